"""How near to the machine's limit: training and sampling against the matrix rate and the memory bandwidth that this machine reaches.

`python -m benchmarks.roofline [--json] [--quick] [--only training sampling length rank group adapters] [--repeats N]`

The rates are measured in the same run, on the model's own shapes at the rows that the engine multiplies, over weights that no cache holds.
Work is what has to be computed (benchmarks/arithmetic.py); what the engine computes twice counts as lost. Attention, factors and the
vocabulary's matrix count as work, at the rate of the linear layers and the vocabulary's matrix together.

JSON: train_fraction (forward and backward, no reference pass), rollout_fraction (decoding 64 sequences, one adapter), and the growth with
length, rank, group size and adapters.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter

import torch

from benchmarks.arithmetic import DecodeWork, ModelShape, decode_work, train_work
from benchmarks.batches import Sizes, make_groups, make_requests, plain_loss, timed_sampling, timed_training
from benchmarks.engine_process import EngineProcess, engine_process
from benchmarks.machine import Machine, this_machine
from benchmarks.matrix_rate import MIN_S, MatrixRate, measure, memory_bytes_per_s
from benchmarks.measure import Spread, alternate
from benchmarks.options import base_models, parser
from benchmarks.report import print_json, print_table, say, until_stopped
from core.contracts import LoraSettings
from engine.client import EngineClient

MICRO_BATCH_TOKENS = 2048
LONGEST = 2048
RANK = 16
SEQUENCES = (1, 8, 64)


@dataclass(frozen=True)
class Rates:
    """The machine's limits in this run."""

    train: MatrixRate
    decode: dict[int, MatrixRate]
    """By rows: sequences decoded at once."""
    bytes_per_s: float


@dataclass(frozen=True)
class Trained:
    """Updates of one kind."""

    what: str
    rows: int
    """Tokens through the layers, once each way."""
    operations: float
    seconds: Spread
    fraction: float
    """Needed operations a second over the matrix rate."""
    peak_mib: float


@dataclass(frozen=True)
class Decoded:
    """Decoding of so many sequences."""

    num_sequences: int
    tokens_per_s: float
    of_matrix_rate: float
    """Of the rate at so many rows."""
    of_training_rate: float
    """Of the rate at a whole micro-batch's rows."""
    of_bandwidth: float


class Bench:
    """One engine and what is measured on it."""

    def __init__(self, engine: EngineProcess, client: EngineClient, shape: ModelShape, rates: Rates, repeats: int) -> None:
        self._engine, self._client, self._shape, self._rates, self._repeats = engine, client, shape, rates, repeats

    def train(self, what: str, sizes: Sizes, *, rank: int = RANK, num_adapters: int = 1) -> Trained:
        """Updates of a batch, in which the groups are dealt out to so many adapters that train at the same time."""
        groups = make_groups(sizes, self._shape.vocab, mixed=False)
        adapters = [f"{what}-{number}" for number in range(num_adapters)]
        for adapter_id in adapters:
            self._client.create_adapter(adapter_id, LoraSettings(rank=rank, alpha=2.0 * rank), seed=0)
        loss = plain_loss(sizes, beta=0.0)
        shares = [partial(timed_training, self._client, a, groups[i::num_adapters], loss) for i, a in enumerate(adapters)]
        self._engine.reset_peak()
        (seconds,) = alternate([partial(_at_once, shares)], repeats=self._repeats)
        peak_mib = self._engine.peak_bytes / 2**20
        for adapter_id in adapters:
            self._client.drop_adapter(adapter_id)
        operations = train_work(self._shape, sizes.lengths, rank=rank, with_reference=False).total
        rows = sum(group.rows for group in sizes.lengths)
        fraction = operations / seconds.median / self._rates.train.both
        say(f"{what}: {rows} rows in {seconds} s, {fraction:.2f} of the matrix rate")
        return Trained(what, rows, operations, seconds, fraction, peak_mib)

    def decode(self, sizes: Sizes, *, bytes_per_weight: int) -> Decoded:
        """Decoding alone: sampling the batch less sampling one token of each, which is the prompts' part."""
        requests = make_requests(sizes, self._shape.vocab)
        first = make_requests(replace(sizes, completion_tokens=1), self._shape.vocab)
        self._client.create_adapter("decode", LoraSettings(rank=RANK), seed=0)
        self._client.sync("decode")
        sample = partial(timed_sampling, self._client, "decode")
        whole_s, first_s = alternate([partial(sample, requests), partial(sample, first)], repeats=self._repeats)
        seconds = whole_s.median - first_s.median
        work = decoding_alone(self._shape, sizes, bytes_per_weight)
        count = sizes.num_prompts * sizes.group_size
        per_s = work.operations / seconds
        say(f"{count} sequences: {count * (sizes.completion_tokens - 1) / seconds:.0f} tokens/s")
        return Decoded(
            count, count * (sizes.completion_tokens - 1) / seconds, per_s / self._rates.decode[count].forward,
            per_s / self._rates.train.forward, work.bytes_read / seconds / self._rates.bytes_per_s,
        )  # fmt: skip


def main() -> None:
    """Runs what was asked for."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", metavar="PART", help="training sampling length rank group adapters")
    options.add_argument("--repeats", type=int, help="measurements of each; default 3")
    chosen = options.parse_args()
    machine = this_machine()
    repeats = chosen.repeats or (1 if chosen.quick else 3)
    wanted: dict[str, list[Trained] | list[Decoded]] = {}
    with base_models(quick=chosen.quick) as (_, base):
        shape = ModelShape.read(base)
        rates = measure_rates(shape, machine, quick=chosen.quick)
        longest = 64 if chosen.quick else LONGEST
        with ExitStack() as stack:
            limits = {"micro_batch_tokens": MICRO_BATCH_TOKENS, "max_model_len": longest + 128}
            engine = stack.enter_context(engine_process(base, threads=machine.cores, settings=limits))
            client = stack.enter_context(engine.client())
            bench = Bench(engine, client, shape, rates, repeats)
            parts = _parts(bench, machine, quick=chosen.quick, longest=longest)
            with until_stopped():
                for name, run in parts.items():
                    if not chosen.only or name in chosen.only:
                        wanted[name] = run()
    _print(wanted, rates, machine)
    if chosen.json:
        print_json(_json(wanted, rates, machine))


def measure_rates(shape: ModelShape, machine: Machine, *, quick: bool) -> Rates:
    """The machine's limits, in the precision that dtype auto takes."""
    dtype = torch.bfloat16 if machine.bf16_native else torch.float32
    min_s = 0.01 if quick else MIN_S
    decode = {rows: measure(shape, rows, dtype, threads=machine.cores, min_s=min_s) for rows in SEQUENCES}
    train = measure(shape, MICRO_BATCH_TOKENS, dtype, threads=machine.cores, min_s=min_s)
    return Rates(train, decode, memory_bytes_per_s(threads=machine.cores, min_s=min_s))


def decoding_alone(shape: ModelShape, sizes: Sizes, bytes_per_weight: int) -> DecodeWork:
    """Needed work of all tokens but the first of each completion."""
    first = replace(sizes, completion_tokens=1)
    whole, begin = (decode_work(shape, s.lengths, rank=RANK, bytes_per_weight=bytes_per_weight) for s in (sizes, first))
    return DecodeWork(whole.operations - begin.operations, whole.bytes_read - begin.bytes_read)


def _parts(bench: Bench, machine: Machine, *, quick: bool, longest: int) -> dict[str, Callable[[], list[Trained] | list[Decoded]]]:
    batch = Sizes(2, 2, 20, 6) if quick else Sizes()
    small = Sizes(2, batch.group_size, batch.prompt_tokens, batch.completion_tokens)
    doublings = [length for length in (64, 128, 256, 512, 1024, 2048) if length <= longest]
    bytes_per_weight = 2 if machine.bf16_native else 4
    prompts = {1: (1, 1), 8: (1, 8), 64: (8, 8)}

    def decoded() -> list[Decoded]:
        sizes = [Sizes(*prompts[count], batch.prompt_tokens, batch.completion_tokens) for count in SEQUENCES]
        return [bench.decode(s, bytes_per_weight=bytes_per_weight) for s in sizes]

    def trained(cases: Sequence[tuple[str, Sizes, int, int]]) -> list[Trained]:
        return [bench.train(what, sizes, rank=rank, num_adapters=count) for what, sizes, rank, count in cases]

    title = f"{batch.num_prompts} x {batch.group_size} x {batch.completion_tokens}"
    ranks, group_sizes, counts = ((8, 128), (2, 4), (1, 2)) if quick else ((8, 16, 32, 64, 128), (2, 4, 8, 16, 32), (1, 2, 4, 8))
    return {
        "training": partial(trained, [(title, batch, RANK, 1)]),
        "sampling": decoded,
        "length": partial(trained, [(f"{n} tokens", Sizes(1, 2, batch.prompt_tokens, n), RANK, 1) for n in doublings]),
        "rank": partial(trained, [(f"rank {r}", small, r, 1) for r in ranks]),
        "group": partial(
            trained, [(f"group of {g}", Sizes(1, g, batch.prompt_tokens, batch.completion_tokens), RANK, 1) for g in group_sizes]
        ),
        "adapters": partial(trained, [(f"{n} adapters", batch, RANK, n) for n in counts]),
    }


def _at_once(shares: Sequence[Callable[[], float]]) -> float:
    started = perf_counter()
    with ThreadPoolExecutor(len(shares)) as pool:
        for done in [pool.submit(share) for share in shares]:
            done.result()
    return perf_counter() - started


def _print(parts: dict[str, list[Trained] | list[Decoded]], rates: Rates, machine: Machine) -> None:
    memory = f"memory read at {rates.bytes_per_s / 1e9:.1f} GB/s"
    print_table(
        f"The machine's limits: {machine.cores} threads, {machine.cpu}, {rates.train.dtype}; {memory}",
        ("rows", "forward, GFLOP/s", "forward and backward"),
        [(r.num_rows, r.forward / 1e9, r.both / 1e9) for r in (*rates.decode.values(), rates.train)],
    )
    titles = {
        "training": "Forward and backward against the matrix rate", "sampling": "Decoding against matrix rate and memory bandwidth",
        "length": "Growth with length (1 x 2)", "rank": "Growth with rank (2 groups)", "group": "Growth with group size (1 prompt)",
        "adapters": "The same groups dealt out to several adapters, trained at once",
    }  # fmt: skip
    for name, figures in parts.items():
        if name == "sampling":
            rows = [(d.num_sequences, d.tokens_per_s, d.of_matrix_rate, d.of_training_rate, d.of_bandwidth)
                    for d in figures if isinstance(d, Decoded)]  # fmt: skip
            columns = ("sequences", "tokens/s", "of the matrix rate at so many rows", f"at {MICRO_BATCH_TOKENS}", "of the bandwidth")
            print_table(titles[name], columns, rows)
            continue
        lines = [(t.what, t.rows, str(t.seconds), t.rows / t.seconds.median, t.operations / t.rows / 1e9, t.fraction, t.peak_mib)
                 for t in figures if isinstance(t, Trained)]  # fmt: skip
        headings = ("batch", "rows", "seconds", "rows/s", "GFLOP a row", "of the matrix rate", "peak MiB")
        print_table(titles[name], headings, lines)


def _json(parts: dict[str, list[Trained] | list[Decoded]], rates: Rates, machine: Machine) -> dict[str, object]:
    values: dict[str, object] = {}
    for figure in parts.get("training", []):
        values["train_fraction"] = figure.fraction if isinstance(figure, Trained) else None
    for figure in parts.get("sampling", []):
        if isinstance(figure, Decoded) and figure.num_sequences == max(SEQUENCES):
            values |= {"rollout_fraction": figure.of_matrix_rate, "rollout_bandwidth_fraction": figure.of_bandwidth}
    values |= {"machine": machine.as_json(), "dtype": rates.train.dtype, "memory_bytes_per_s": rates.bytes_per_s}
    values["matrix_flops_per_s"] = {str(r.num_rows): {"forward": r.forward, "both": r.both} for r in (*rates.decode.values(), rates.train)}
    return values | {"parts": {name: [asdict(figure) for figure in figures] for name, figures in parts.items()}}


if __name__ == "__main__":
    main()
