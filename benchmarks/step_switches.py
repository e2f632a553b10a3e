"""What each saving of a training step brings, one at a time: everything on, against the same work asked for in the wasteful way.

The engine has no switches for it. The waste is in how it is asked: a group for every completion computes the prompt every time; completions
filled up to one length are what padding computes; a micro-batch of one sequence is no packing; dead groups, the old policy's pass and the
reference pass are sent or left out. Only the whole logits are computed here, by plain torch, since the engine never does.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import numpy as np
import torch

from benchmarks.arithmetic import ModelShape
from benchmarks.engine_process import EngineProcess, engine_process
from benchmarks.machine import Machine
from benchmarks.measure import Spread, alternate, ratio
from benchmarks.options import base_models
from benchmarks.peak import peak_bytes, reset_peak
from benchmarks.report import print_json, print_table
from core.contracts import LoraSettings, OptimizerSettings
from engine.logprobs import token_logprobs
from engine.types import IntArray, LossSettings, SampleRequest, SamplingParams, TrainGroup, Verbs

DEAD_SHARE = 0.25
"""Groups of the batch whose rewards were all equal; the demo's job has more than half of them in its last steps."""


@dataclass(frozen=True)
class Figures:
    """One way of doing the work."""

    saving: str
    seconds: Spread
    without: Spread
    """Seconds where the saving is off."""

    @property
    def times(self) -> float:
        """How many times as long it takes without."""
        return ratio(self.without, self.seconds)


@dataclass(frozen=True)
class Sizes:
    """The batch: lengths spread evenly from 1 to the longest, as completions that stop by themselves do."""

    num_prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 57
    completion_tokens: int = 64


def run_switches(machine: Machine, *, quick: bool, repeats: int, as_json: bool) -> None:
    """Measures and prints."""
    sizes = Sizes(2, 2, 20, 6) if quick else Sizes()
    with base_models(quick=quick) as (_, base), ExitStack() as stack:
        engine = stack.enter_context(engine_process(base, threads=machine.cores))
        single = stack.enter_context(engine_process(base, threads=machine.cores, micro_batch_tokens=1, max_num_seqs=1))
        shape = ModelShape.read(base)
        figures = [*_training(engine, single, shape, sizes, repeats), *_sampling(engine, single, shape, sizes, repeats)]
    logits, peaks_mib = _logits(shape, sizes, machine.cores, repeats)
    figures.append(logits)
    title = (
        f"{sizes.num_prompts} x {sizes.group_size} completions of 1 to {sizes.completion_tokens} tokens, prompts of {sizes.prompt_tokens}"
    )
    rows = [(f.saving, str(f.seconds), str(f.without), f.times) for f in figures]
    headings = ("saving", "with it, s", "without, s", "times")
    print_table(f"What each saving brings alone: {title}, {machine.cores} threads", headings, rows)
    print("Memory of the logits: " + ", ".join(f"{way} {mib:.0f} MiB" for way, mib in peaks_mib.items()) + ".")
    if as_json:
        told = [{"saving": f.saving, "times": f.times, "with_s": f.seconds.as_json(), "without_s": f.without.as_json()} for f in figures]
        print_json({"machine": machine.as_json(), "savings": told, "logits_peak_mib": peaks_mib})


def _training(engine: EngineProcess, single: EngineProcess, shape: ModelShape, sizes: Sizes, repeats: int) -> list[Figures]:
    groups = make_groups(sizes, shape.vocab)
    alive = groups[round(DEAD_SHARE * len(groups)) :]
    alone = one_by_one(alive)
    loss = LossSettings(0.2, 0.2, 0.04, float(sizes.num_prompts * sizes.group_size), 1.0)
    with engine.client() as ours, single.client() as other:
        for verbs in (ours, other):
            verbs.create_adapter("switch", LoraSettings(), seed=0)
        best = partial(_train, ours, alive, loss)
        without_beta = partial(_train, ours, alive, replace(loss, beta=0.0))
        ways: list[tuple[str, Callable[[], float], Callable[[], float]]] = [
            ("no padding", best, partial(_train, ours, padded(alive, sizes.completion_tokens), loss)),
            ("the prompt once a group", best, partial(_train, ours, alone, loss)),
            ("packing (prompt not shared)", partial(_train, ours, alone, loss), partial(_train, other, alone, loss)),
            (f"dead groups skipped ({DEAD_SHARE:.0%} of them)", best, partial(_train, ours, groups, loss)),
            ("no old policy's pass", best, partial(_with_old_pass, ours, alive, loss)),
            ("no reference pass (beta 0)", without_beta, best),
        ]
        return [_compare(saving, run, wasteful, repeats) for saving, run, wasteful in ways]


def _sampling(engine: EngineProcess, single: EngineProcess, shape: ModelShape, sizes: Sizes, repeats: int) -> list[Figures]:
    prompts = [group.prompt_tokens for group in make_groups(sizes, shape.vocab)]
    params = [tuple(SamplingParams(sizes.completion_tokens, seed=k) for k in range(sizes.group_size)) for _ in prompts]
    shared = [SampleRequest(prompt, many) for prompt, many in zip(prompts, params, strict=True)]
    apart = [SampleRequest(prompt, (one,)) for prompt, many in zip(prompts, params, strict=True) for one in many]
    with engine.client() as ours, single.client() as other:
        for verbs in (ours, other):
            verbs.create_adapter("sample", LoraSettings(), seed=0)
            verbs.sync("sample")
        together, alone = partial(_sample, ours, shared), partial(_sample, ours, apart)
        # One at a time takes as many times longer as there are sequences: a group of them is enough to see it.
        a_group, in_turn = partial(_sample, ours, shared[:1]), partial(_sample, other, shared[:1])
        return [
            _compare("rollouts: the prompt once a group", together, alone, repeats),
            _compare("rollouts: sequences decoded together (one group)", a_group, in_turn, repeats),
        ]


def _compare(saving: str, run: Callable[[], float], wasteful: Callable[[], float], repeats: int) -> Figures:
    return Figures(saving, *alternate([run, wasteful], repeats=repeats))


def make_groups(sizes: Sizes, vocab: int, *, seed: int = 0) -> list[TrainGroup]:
    """A batch of random tokens, completions of every length from 1 to the longest."""
    rng = np.random.default_rng(seed)
    count = sizes.num_prompts * sizes.group_size
    lengths = rng.permutation(np.linspace(1, sizes.completion_tokens, count).round().astype(int)).reshape(sizes.num_prompts, -1)

    def tokens(number: int) -> IntArray:
        return rng.integers(3, vocab, number, dtype=np.int32)

    advantages = np.linspace(-1.5, 1.5, sizes.group_size, dtype=np.float32)
    return [
        TrainGroup(tokens(sizes.prompt_tokens), tuple(tokens(n) for n in row), advantages, (1.0 / row).astype(np.float32))
        for row in lengths
    ]


def one_by_one(groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """A group for every completion, each with its own copy of the prompt: the same loss."""
    return [
        TrainGroup(g.prompt_tokens, (c,), g.advantages[i : i + 1], g.weights[i : i + 1])
        for g in groups for i, c in enumerate(g.completions)
    ]  # fmt: skip


def padded(groups: Sequence[TrainGroup], length: int) -> list[TrainGroup]:
    """The same completions filled up to one length by tokens that weigh nothing: the same loss, and what padding computes."""

    def fill(completion: IntArray) -> IntArray:
        return np.concatenate([completion, np.zeros(length - len(completion), np.int32)])

    def kept(completion: IntArray) -> np.ndarray:
        return (np.arange(length) < len(completion)).astype(np.float32)

    return [
        replace(g, completions=tuple(fill(c) for c in g.completions), token_weights=tuple(kept(c) for c in g.completions)) for g in groups
    ]


def _train(verbs: Verbs, groups: Sequence[TrainGroup], loss: LossSettings) -> float:
    started = perf_counter()
    verbs.forward_backward("switch", groups, loss)
    verbs.optim_step("switch", OptimizerSettings(), learning_rate=1e-5)
    return perf_counter() - started


def _with_old_pass(verbs: Verbs, groups: Sequence[TrainGroup], loss: LossSettings) -> float:
    started = perf_counter()
    old = verbs.forward("switch", groups, temperature=1.0)
    _train(verbs, [replace(g, old_logprobs=o) for g, o in zip(groups, old, strict=True)], loss)
    return perf_counter() - started


def _sample(verbs: Verbs, requests: Sequence[SampleRequest]) -> float:
    started = perf_counter()
    verbs.sample("sample", requests)
    return perf_counter() - started


def _logits(shape: ModelShape, sizes: Sizes, threads: int, repeats: int) -> tuple[Figures, dict[str, float]]:
    """Logprobs and their gradient for all completion tokens: in chunks, as the engine does it, against all logits at once; and MiB."""
    torch.set_num_threads(threads)
    num_tokens = sum(len(c) for g in make_groups(sizes, shape.vocab) for c in g.completions)
    head_VH = torch.randn(shape.vocab, shape.hidden) * 0.02
    hidden_MH, targets_M = torch.randn(num_tokens, shape.hidden), torch.randint(shape.vocab, (num_tokens,))
    peaks = {"chunks": 0.0, "whole": 0.0}

    def run(way: str) -> float:
        reset_peak(os.getpid())
        before = peak_bytes(os.getpid())
        leaf_MH = hidden_MH.clone().requires_grad_()
        started = perf_counter()
        if way == "chunks":
            logprobs_M = token_logprobs(leaf_MH, head_VH, targets_M, temperature=1.0)[0]
        else:
            logprobs_M = torch.log_softmax(leaf_MH @ head_VH.T, dim=-1).gather(1, targets_M[:, None])[:, 0]
        logprobs_M.sum().backward()
        seconds = perf_counter() - started
        peaks[way] = max(peaks[way], (peak_bytes(os.getpid()) - before) / 2**20)
        return seconds

    chunks, whole = alternate([partial(run, "chunks"), partial(run, "whole")], repeats=repeats)
    return Figures(f"logits in chunks ({num_tokens} tokens; against plain torch)", chunks, whole), peaks
