"""A GRPO step of ours against TRL's GRPOTrainer + PEFT: same model, prompts, lengths, group size, precision and threads, in turns.

`python -m benchmarks.step_vs_trl [--json] [--quick] [--only fp32 bf16 long long_fp32 demo] [--repeats N] [--switches]`

Ours is the engine host in a process of its own, driven by the real loop over HTTP. TRL runs in an interpreter of its own (make bench-peers)
with gradient checkpointing off, its faster setting, and micro-batches of about as many tokens as ours. Each side sleeps while the other
computes. Steps of fixed length: every completion has its full length on both sides. The demo: the whole job, as it runs.

JSON: speedup_fp32, speedup_bf16, speedup_long_prompt, speedup_long_prompt_fp32, speedup_demo (TRL's seconds over ours), memory_ratio (our
peak over TRL's, at fp32), bf16_native, and every scenario's figures.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.arithmetic import GroupLengths, ModelShape, TrainWork, train_work
from benchmarks.engine_process import EngineProcess, engine_process
from benchmarks.job import Job, StepFigures, token_counter
from benchmarks.machine import NO_BF16, Machine, this_machine
from benchmarks.matrix_rate import MIN_S, MatrixRate, measure
from benchmarks.measure import Spread
from benchmarks.options import base_models, parser
from benchmarks.peer_process import PeerProcess, PeerSettings, Precision, peer_process, require_peer
from benchmarks.report import print_json, print_table, say, until_stopped
from benchmarks.step_switches import run_switches
from benchmarks.workload import Workload, demo_workload, fixed_workload

PEER_BF16 = (
    "TRL in bf16: bfloat16 is its own default, autocast over float32 weights; bfloat16_weights has the base in bf16 too; faster (the "
    "default) tries a step of each and takes the faster, or the first on a CPU that only emulates bf16"
)
MICRO_BATCH_TOKENS = 2048
"""The engine's own default; rows of the matrix rate."""


@dataclass(frozen=True)
class Scenario:
    """One comparison."""

    key: str
    title: str
    bf16: bool
    """Asked for in bf16; else in float32."""
    num_prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 57
    completion_tokens: int = 64
    peer_micro_batch: int = 16
    demo_steps: int | None = None
    """Steps of the demo's job; None for steps of fixed length."""


@dataclass(frozen=True)
class Outcome:
    """What both sides took."""

    scenario: Scenario
    peer_precision: Precision
    ours: list[StepFigures]
    peer: list[StepFigures]
    our_peak: int
    peer_peak: int
    versions: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def speedup(self) -> float:
        """TRL's seconds over ours: of whole runs for the demo, else of median steps."""
        if self.scenario.demo_steps is not None:
            return sum(s.seconds for s in self.peer) / sum(s.seconds for s in self.ours)
        return _seconds(self.peer).median / _seconds(self.ours).median

    def as_json(self) -> dict[str, object]:
        """All figures."""
        return {
            "speedup": self.speedup, "peer_precision": self.peer_precision, "ours_step_s": _seconds(self.ours).as_json(),
            "peer_step_s": _seconds(self.peer).as_json(), "ours_parts_s": _parts(self.ours), "peer_parts_s": _parts(self.peer),
            "ours_total_s": sum(s.seconds for s in self.ours), "peer_total_s": sum(s.seconds for s in self.peer),
            "ours_peak_bytes": self.our_peak, "peer_peak_bytes": self.peer_peak, "memory_ratio": self.our_peak / self.peer_peak,
            "ours_trained_share": [s.trained_share for s in self.ours],
            "ours_rewards": [s.reward_mean for s in self.ours], "peer_rewards": [s.reward_mean for s in self.peer],
        }  # fmt: skip


def scenarios(*, quick: bool, bf16_native: bool) -> list[Scenario]:
    """All of them; the last is the demo, in the precision that dtype auto takes."""
    if quick:
        small = {"num_prompts": 2, "group_size": 2, "prompt_tokens": 180, "completion_tokens": 6, "peer_micro_batch": 2}
        return [
            Scenario("fp32", "2 x 2 x 6, fp32", bf16=False, **small),
            Scenario("demo", "the demo's job, 1 step", bf16=bf16_native, demo_steps=1),
        ]  # fmt: skip
    long = {"num_prompts": 4, "prompt_tokens": 512, "peer_micro_batch": 4}
    return [
        Scenario("fp32", "8 x 8 x 64, prompts of 57, fp32", bf16=False),
        Scenario("bf16", "8 x 8 x 64, prompts of 57, bf16", bf16=True),
        Scenario("long", "4 x 8 x 64, prompts of 512, bf16", bf16=True, **long),
        Scenario("long_fp32", "4 x 8 x 64, prompts of 512, fp32", bf16=False, **long),
        Scenario("demo", "the demo's job, all steps", bf16=bf16_native, demo_steps=9),
    ]


def main() -> None:
    """Runs what was asked for."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", metavar="KEY", help="scenarios: fp32 bf16 long long_fp32 demo")
    options.add_argument("--repeats", type=int, help="measured steps a side; default 3, and 1 in bf16 on a CPU that only emulates it")
    options.add_argument("--switches", action="store_true", help="the part that each saving brings, instead of the comparison")
    options.add_argument("--peer-bf16", choices=("faster", "bfloat16", "bfloat16_weights"), default="faster", help=PEER_BF16)
    chosen = options.parse_args()
    machine = this_machine()
    if chosen.switches:
        run_switches(machine, quick=chosen.quick, repeats=chosen.repeats or 3, as_json=chosen.json)
        return
    require_peer()
    wanted = [s for s in scenarios(quick=chosen.quick, bf16_native=machine.bf16_native) if not chosen.only or s.key in chosen.only]
    outcomes: list[Outcome] = []
    with base_models(quick=chosen.quick) as (base, endless_base):
        with until_stopped():
            bf16: Precision = chosen.peer_bf16 if chosen.peer_bf16 != "faster" else "bfloat16"
            if chosen.peer_bf16 == "faster" and machine.bf16_native and any(s.bf16 for s in wanted):
                bf16 = faster_bf16((endless_base, base), machine)
            for scenario in wanted:
                emulated = scenario.bf16 and not machine.bf16_native
                repeats = chosen.repeats or (1 if emulated or chosen.quick else 3)
                precision: Precision = bf16 if scenario.bf16 else "float32"
                bases = (base if scenario.demo_steps else endless_base, base)
                # Where a step takes many minutes, a round that does not count is not worth them.
                warm_up = 0 if emulated or scenario.demo_steps else 1
                outcome = compare(scenario, bases, machine, precision=precision, repeats=repeats, warm_up=warm_up)
                outcomes.append(outcome)
                say(f"{scenario.title}: ours {_seconds(outcome.ours)} s, TRL {_seconds(outcome.peer)} s, TRL/ours {outcome.speedup:.2f}")
        shape = ModelShape.read(base)
        rates = {
            dtype: measure(shape, MICRO_BATCH_TOKENS, dtype, threads=machine.cores, min_s=0.01 if chosen.quick else MIN_S)
            for dtype in {our_dtype(o.scenario, machine) for o in outcomes}
        }
    if not outcomes:
        sys.exit("Nothing was measured.")
    _print(outcomes, machine, shape, rates)
    if chosen.json:
        print_json(_json(outcomes, machine, shape, rates))


def compare(scenario: Scenario, bases: tuple[Path, Path], machine: Machine, *, precision: Precision, repeats: int, warm_up: int) -> Outcome:
    """Runs both sides in turns.

    Args:
        bases: model folders of ours and of the peer: the same weights.
    Raises:
        RuntimeError: the two sides trained on different prompts, or lengths are not the full ones where they should be.
    """
    with ExitStack() as stack:
        dtype = "float32" if not scenario.bf16 else "auto"
        engine = stack.enter_context(engine_process(bases[0], threads=machine.cores, dtype=dtype))
        client = stack.enter_context(engine.client())
        num_rounds = scenario.demo_steps or warm_up + repeats
        workload = _workload(scenario, num_rounds, engine)
        job = Job(client, workload)
        peer = stack.enter_context(peer_process(machine.cores))
        peer.begin(bases[1], workload, PeerSettings(precision, scenario.peer_micro_batch, machine.cores))
        ours, theirs = _in_turns(job, engine, peer, num_rounds)
        skipped = 0 if scenario.demo_steps else warm_up
        _check_same(ours, theirs, workload)
        return Outcome(scenario, precision, ours[skipped:], theirs[skipped:], engine.peak_bytes, peer.peak_bytes, peer.versions)


def faster_bf16(bases: tuple[Path, Path], machine: Machine) -> Precision:
    """In which of its bf16 modes TRL is faster here, by its second step at 8 x 8 x 64."""
    scenario = next(s for s in scenarios(quick=False, bf16_native=True) if s.key == "bf16")
    with engine_process(bases[0], threads=machine.cores) as engine:
        workload = _workload(scenario, 2, engine)
    seconds: dict[Precision, float] = {}
    for precision in ("bfloat16", "bfloat16_weights"):
        with peer_process(machine.cores) as peer:
            peer.begin(bases[1], workload, PeerSettings(precision, scenario.peer_micro_batch, machine.cores))
            peer.run_step()
            seconds[precision] = peer.run_step().seconds
    return min(seconds, key=lambda precision: seconds[precision])


def our_dtype(scenario: Scenario, machine: Machine) -> torch.dtype:
    """What ours computes in: bf16 where it was asked for and the CPU has it."""
    return torch.bfloat16 if scenario.bf16 and machine.bf16_native else torch.float32


def needed(scenario: Scenario, shape: ModelShape) -> TrainWork:
    """Needed operations of a step of fixed length."""
    group = GroupLengths(scenario.prompt_tokens, (scenario.completion_tokens,) * scenario.group_size)
    return train_work(shape, [group] * scenario.num_prompts, rank=16, with_reference=True)


def _workload(scenario: Scenario, num_rounds: int, engine: EngineProcess) -> Workload:
    if scenario.demo_steps is not None:
        return demo_workload(num_steps=scenario.demo_steps)
    with engine.client() as client:
        return fixed_workload(
            num_prompts=scenario.num_prompts, group_size=scenario.group_size, prompt_tokens=scenario.prompt_tokens,
            completion_tokens=scenario.completion_tokens, num_steps=num_rounds, count_tokens=token_counter(client),
        )  # fmt: skip


def _in_turns(job: Job, engine: EngineProcess, peer: PeerProcess, num_rounds: int) -> tuple[list[StepFigures], list[StepFigures]]:
    ours: list[StepFigures] = []
    theirs: list[StepFigures] = []
    for _ in range(num_rounds):
        with peer.paused():
            ours.append(job.run_step())
        with engine.paused():
            theirs.append(peer.run_step())
        say(f"  step {len(ours)} of {num_rounds}: ours {ours[-1].seconds:.2f} s, TRL {theirs[-1].seconds:.2f} s")
    return ours, theirs


def _check_same(ours: Sequence[StepFigures], theirs: Sequence[StepFigures], workload: Workload) -> None:
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True), 1):
        if mine.prompts_digest != other.prompts_digest:
            raise RuntimeError(f"step {number}: the two sides trained on different prompts")
        wanted = workload.spec.rollout.max_tokens
        if workload.full_length and not mine.completion_tokens == other.completion_tokens == wanted:
            means = f"{mine.completion_tokens} and {other.completion_tokens}"
            raise RuntimeError(f"step {number}: completions have {means} tokens on average, not {wanted} on both sides")


def _seconds(steps: Sequence[StepFigures]) -> Spread:
    return Spread(tuple(step.seconds for step in steps))


def _parts(steps: Sequence[StepFigures]) -> dict[str, float]:
    names = sorted({name for step in steps for name in step.parts_s})
    return {name: Spread(tuple(step.parts_s.get(name, 0.0) for step in steps)).median for name in names}


def _print(outcomes: Sequence[Outcome], machine: Machine, shape: ModelShape, rates: dict[torch.dtype, MatrixRate]) -> None:
    rows: list[tuple[object, ...]] = []
    for o in outcomes:
        limit = "-"
        if o.scenario.demo_steps is None:
            limit = f"{needed(o.scenario, shape).total / rates[our_dtype(o.scenario, machine)].both:.2f}"
        rows.append((
            o.scenario.title, str(_seconds(o.ours)), str(_seconds(o.peer)), o.speedup, limit, o.our_peak / 2**30, o.peer_peak / 2**30,
            o.our_peak / o.peer_peak,
        ))  # fmt: skip
    print_table(
        f"A GRPO step, seconds: median (least to greatest), {machine.cores} threads, {machine.cpu}",
        ("scenario", "ours", "TRL", "TRL/ours", "training's limit", "ours GiB", "TRL GiB", "ratio"), rows,
    )  # fmt: skip
    names = ("generate", "reward", "train", "reference", "forward", "backward")
    sides = [(o.scenario.title, side, _parts(steps)) for o in outcomes for side, steps in (("ours", o.ours), ("TRL", o.peer))]
    parts = [(title, side, *(parts.get(name, "") for name in names)) for title, side, parts in sides]
    print_table("Where the seconds of a step go (medians; ours trains in one pass)", ("scenario", "side", *names), parts)
    for rate in rates.values():
        print(f"Matrix rate at {rate.num_rows} rows, {rate.dtype}: {rate.both / 1e9:.0f} GFLOP/s over the model's shapes.")
    print(f"training's limit: forward, backward and reference pass, only the needed operations, at that rate. {_versions(outcomes)}")
    for o in outcomes:
        least = min(step.trained_share for step in o.ours)
        if o.scenario.demo_steps is None and least < 1:
            print(f"{o.scenario.title}: groups died, ours trained on {least:.0%} of the tokens of a step; the ratio flatters it.")
    if any(o.scenario.bf16 for o in outcomes) and not machine.bf16_native:
        print(NO_BF16)


def _json(outcomes: Sequence[Outcome], machine: Machine, shape: ModelShape, rates: dict[torch.dtype, MatrixRate]) -> dict[str, object]:
    names = {"fp32": "speedup_fp32", "bf16": "speedup_bf16", "long": "speedup_long_prompt", "long_fp32": "speedup_long_prompt_fp32",
             "demo": "speedup_demo"}  # fmt: skip
    values: dict[str, object] = {names[o.scenario.key]: o.speedup for o in outcomes}
    fp32 = next((o for o in outcomes if o.scenario.key == "fp32"), None)
    values |= {"memory_ratio": fp32.our_peak / fp32.peer_peak} if fp32 else {}
    values |= {"bf16_native": machine.bf16_native, "machine": machine.as_json(), "peer": _versions(outcomes)}
    values["matrix_flops_per_s"] = {rate.dtype: rate.both for rate in rates.values()}
    values["needed_operations"] = {o.scenario.key: vars(needed(o.scenario, shape)) for o in outcomes if o.scenario.demo_steps is None}
    return values | {"scenarios": {o.scenario.key: o.as_json() for o in outcomes}}


def _versions(outcomes: Sequence[Outcome]) -> str:
    return "Peer: " + ", ".join(f"{name} {version}" for name, version in outcomes[0].versions.items()) + "."


if __name__ == "__main__":
    main()
