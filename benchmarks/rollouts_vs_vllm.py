"""Rollouts by the local engine against vLLM on CPU with our plug-in: same prompts, lengths, precision, threads and adapters, in turns.

`python -m benchmarks.rollouts_vs_vllm [--json] [--quick] [--sequences 8 32 64] [--adapters 0 1 4] [--repeats N]`

Both are servers in processes of their own, reached over HTTP; each is stopped (SIGSTOP) while the other computes. A request is a prompt and
its group of completions, each of full length, with the logprobs of the sampled tokens: what a GRPO step asks for. vLLM comes out of
deploy/vllm (make bench-peers): its stock CPU LoRA is several times slower than what stands here.

JSON: speedup_lora_32 (our tokens a second over vLLM's, 32 sequences, 1 adapter), and the same of every other number of sequences and
adapters.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import httpx
import numpy as np
from safetensors.numpy import load, save

from benchmarks.arithmetic import ModelShape
from benchmarks.batches import Sizes, make_requests, timed_sampling
from benchmarks.engine_process import REPO, EngineProcess, engine_process, paused
from benchmarks.machine import Machine, this_machine
from benchmarks.measure import Spread, alternate, ratio
from benchmarks.options import base_models, parser
from benchmarks.report import print_json, print_table, say, until_stopped
from core.contracts import LoraSettings
from engine.client import EngineClient
from engine.types import SampleRequest
from tests.vllm.server import VllmServer, vllm_server

VLLM_PYTHON = REPO / ".venv-vllm/bin/python"
RANK = 16


@dataclass(frozen=True)
class Cell:
    """One number of sequences with one number of adapters."""

    num_sequences: int
    num_adapters: int
    num_tokens: int
    ours: Spread
    vllm: Spread

    @property
    def speedup(self) -> float:
        """vLLM's seconds over ours."""
        return ratio(self.vllm, self.ours)

    def as_json(self) -> dict[str, object]:
        """All figures."""
        return {
            "sequences": self.num_sequences, "adapters": self.num_adapters, "speedup": self.speedup,
            "ours_tokens_per_s": self.num_tokens / self.ours.median, "vllm_tokens_per_s": self.num_tokens / self.vllm.median,
            "ours_s": self.ours.as_json(), "vllm_s": self.vllm.as_json(),
        }  # fmt: skip


@dataclass(frozen=True)
class Load:
    """Requests of one cell, by adapter (None: the base), and the seconds that each side takes for it."""

    requests: tuple[tuple[str | None, tuple[SampleRequest, ...]], ...]

    def ours(self, client: EngineClient) -> float:
        """Every adapter's requests at once."""
        return _at_once([partial(timed_sampling, client, adapter, requests) for adapter, requests in self.requests])

    def vllm(self, server: VllmServer) -> float:
        """The same, a request a prompt."""
        return _at_once([partial(_complete, server, adapter, request) for adapter, requests in self.requests for request in requests])


def main() -> None:
    """Measures every cell."""
    options = parser(__doc__)
    options.add_argument("--sequences", type=int, nargs="+", default=[8, 32, 64], help="completions sampled at once")
    options.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 4], help="adapters among them; 0 is the base")
    options.add_argument("--repeats", type=int, help="measurements a side; default 3")
    chosen = options.parse_args()
    if not VLLM_PYTHON.exists():
        sys.exit(f"vLLM's environment is not there ({VLLM_PYTHON}). Make it first: make bench-peers")
    machine = this_machine()
    sizes = Sizes(1, 1, 16, 6) if chosen.quick else Sizes(1, 1, 64, 64)
    sequences, adapters = ([4], [1, 2]) if chosen.quick else (chosen.sequences, chosen.adapters)
    dtype = "bfloat16" if machine.bf16_native else "float32"
    with base_models(quick=chosen.quick) as bases, tempfile.TemporaryDirectory(prefix="espalier-vllm-") as scratch:
        cells = measure(bases, Path(scratch), machine, dtype, sizes, sequences, adapters, chosen.repeats or (1 if chosen.quick else 3))
    _print(cells, machine, dtype, sizes)
    if chosen.json:
        values: dict[str, object] = {f"speedup_lora_{c.num_sequences}": c.speedup for c in cells if c.num_adapters == 1}
        print_json(values | {"dtype": dtype, "machine": machine.as_json(), "cells": [cell.as_json() for cell in cells]})


def measure(
    bases: tuple[Path, Path],
    scratch: Path,
    machine: Machine,
    dtype: str,
    sizes: Sizes,
    sequences: Sequence[int],
    adapters: Sequence[int],
    repeats: int,
) -> list[Cell]:
    """All cells on one pair of servers. Ours has the base that nothing ends, vLLM is told in each request to look for no end."""
    base, endless_base = bases
    cells: list[Cell] = []
    most, names = max(sequences), [f"bench-{number}" for number in range(max(adapters))]
    environment = {
        "ESPALIER_VLLM_DTYPE": dtype, "ESPALIER_VLLM_THREADS": str(machine.cores), "ESPALIER_VLLM_MAX_NUM_SEQS": str(most),
        "ESPALIER_VLLM_MAX_LORAS": str(max(1, len(names))), "ESPALIER_VLLM_MAX_LORA_RANK": str(RANK),
        "ESPALIER_RESOLVER_CACHE": str(scratch / "cache"), "ESPALIER_STORE_URL": str(scratch / "store"),
    }  # fmt: skip
    vocab = ModelShape.read(base).vocab
    with ExitStack() as stack:
        engine = stack.enter_context(engine_process(endless_base, threads=machine.cores, dtype=dtype, settings={"max_num_seqs": most}))
        client = stack.enter_context(engine.client())
        folders = [make_adapter(client, name, scratch / name) for name in names]
        with engine.paused():
            server = stack.enter_context(vllm_server(scratch, base_model=base, environment=environment))
            for name, folder in zip(names, folders, strict=True):
                server.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)}).raise_for_status()
        stack.enter_context(until_stopped())
        for num_adapters in adapters:
            for count in sequences:
                load = make_load(sizes, vocab, count, names[:num_adapters])
                ours, vllm = alternate([partial(_ours, load, client, server), partial(_vllm, load, engine, server)], repeats=repeats)
                cells.append(Cell(count, num_adapters, count * sizes.completion_tokens, ours, vllm))
                say(f"{count} sequences, {num_adapters} adapters: ours {ours} s, vLLM {vllm} s, ours/vLLM {cells[-1].speedup:.2f}")
    return cells


def make_load(sizes: Sizes, vocab: int, num_sequences: int, adapters: Sequence[str]) -> Load:
    """Groups of 8 (smaller where there are more adapters than that gives groups), dealt out to the adapters.

    Args:
        adapters: ids; none for the base.
    """
    num_prompts = max(num_sequences // 8, len(adapters), 1)
    requests = make_requests(replace(sizes, num_prompts=num_prompts, group_size=num_sequences // num_prompts), vocab)
    owners: Sequence[str | None] = adapters or [None]
    return Load(tuple((owner, tuple(requests[i :: len(owners)])) for i, owner in enumerate(owners)))


def make_adapter(client: EngineClient, adapter_id: str, folder: Path) -> Path:
    """An adapter whose B is random, loaded in our engine under that id; returns a PEFT folder with the same, for vLLM."""
    lora = LoraSettings(rank=RANK, alpha=2.0 * RANK)
    client.create_adapter(adapter_id, lora, seed=0)
    saved = client.save(adapter_id)
    rng = np.random.default_rng(0)
    factors = load(saved.weights)
    for name, values in factors.items():
        if "lora_B" in name:
            factors[name] = rng.normal(0, 0.02, values.shape).astype(np.float32)
    weights = save(factors)
    client.create_adapter(adapter_id, lora, seed=0, weights=weights)
    client.sync(adapter_id)
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(json.dumps(dict(saved.config)))
    return folder


def _ours(load: Load, client: EngineClient, server: VllmServer) -> float:
    with paused(server.pid):
        return load.ours(client)


def _vllm(load: Load, engine: EngineProcess, server: VllmServer) -> float:
    with engine.paused():
        return load.vllm(server)


def _complete(server: VllmServer, adapter: str | None, request: SampleRequest) -> float:
    length = request.params[0].max_tokens
    body = {
        "model": adapter or "base", "prompt": request.prompt_tokens.tolist(), "n": len(request.params), "max_tokens": length,
        "temperature": 1.0, "seed": 0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True, "top_k": -1,
    }  # fmt: skip
    started = perf_counter()
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=1800.0, trust_env=False)
    response.raise_for_status()
    lengths = {len(choice["token_ids"]) for choice in response.json()["choices"]}
    if lengths != {length}:
        raise RuntimeError(f"vLLM's completions have {sorted(lengths)} tokens, not {length}")
    return perf_counter() - started


def _at_once(actions: Sequence[Callable[[], float]]) -> float:
    started = perf_counter()
    with ThreadPoolExecutor(len(actions)) as pool:
        for done in [pool.submit(action) for action in actions]:
            done.result()
    return perf_counter() - started


def _print(cells: Sequence[Cell], machine: Machine, dtype: str, sizes: Sizes) -> None:
    lengths = f"prompts of {sizes.prompt_tokens}, completions of {sizes.completion_tokens} tokens"
    rows = [
        (c.num_sequences, c.num_adapters, c.num_tokens / c.ours.median, c.num_tokens / c.vllm.median, c.speedup, str(c.ours), str(c.vllm))
        for c in cells
    ]
    print_table(
        f"Rollouts, {dtype}, {lengths}, {machine.cores} threads, {machine.cpu}",
        ("sequences", "adapters", "ours, tokens/s", "vLLM, tokens/s", "ours/vLLM", "ours, s: median (least to greatest)", "vLLM, s"), rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
