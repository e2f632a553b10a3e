"""What each saving of a training step brings, one at a time: everything on, against the same work asked for in the wasteful way.

The engine has no switches for it. The waste is in how it is asked: a group for every completion computes the prompt every time; completions
filled up to one length are what padding computes; a micro-batch of one sequence is no packing; dead groups, the old policy's pass and the
reference pass are sent or left out. Only the whole logits are computed here, by plain torch, since the engine never does.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from benchmarks.arithmetic import ModelShape
from benchmarks.batches import Sizes, make_groups, make_requests, one_by_one, padded, plain_loss, timed_sampling, timed_training
from benchmarks.engine_process import EngineProcess, engine_process
from benchmarks.machine import Machine
from benchmarks.measure import Spread, alternate, ratio
from benchmarks.options import base_models
from benchmarks.peak import peak_bytes, reset_peak
from benchmarks.report import print_json, print_table, say
from core.contracts import LoraSettings
from engine.logprobs import token_logprobs
from engine.types import SampleRequest

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


def run_switches(machine: Machine, *, quick: bool, repeats: int, as_json: bool) -> None:
    """Measures and prints."""
    sizes = Sizes(2, 2, 20, 6) if quick else Sizes()
    with base_models(quick=quick) as (_, base), ExitStack() as stack:
        engine = stack.enter_context(engine_process(base, threads=machine.cores))
        single = stack.enter_context(engine_process(base, threads=machine.cores, settings={"micro_batch_tokens": 1, "max_num_seqs": 1}))
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
    groups = make_groups(sizes, shape.vocab, mixed=True)
    alive = groups[round(DEAD_SHARE * len(groups)) :]
    alone, filled = one_by_one(alive), padded(alive, sizes.completion_tokens)
    loss, no_beta = plain_loss(sizes, beta=0.04), plain_loss(sizes, beta=0.0)
    with engine.client() as ours, single.client() as other:
        for verbs in (ours, other):
            verbs.create_adapter("switch", LoraSettings(), seed=0)
        train, train_single = partial(timed_training, ours, "switch"), partial(timed_training, other, "switch")
        best = partial(train, alive, loss)
        ways: list[tuple[str, Callable[[], float], Callable[[], float]]] = [
            ("no padding", best, partial(train, filled, loss)),
            ("the prompt once a group", best, partial(train, alone, loss)),
            ("packing (prompt not shared)", partial(train, alone, loss), partial(train_single, alone, loss)),
            (f"dead groups skipped ({DEAD_SHARE:.0%} of them)", best, partial(train, groups, loss)),
            ("no old policy's pass", best, partial(train, alive, loss, old_pass=True)),
            ("no reference pass (beta 0)", partial(train, alive, no_beta), best),
        ]
        return [_compare(saving, run, wasteful, repeats) for saving, run, wasteful in ways]


def _sampling(engine: EngineProcess, single: EngineProcess, shape: ModelShape, sizes: Sizes, repeats: int) -> list[Figures]:
    shared = make_requests(sizes, shape.vocab)
    apart = [SampleRequest(request.prompt_tokens, (one,)) for request in shared for one in request.params]
    with engine.client() as ours, single.client() as other:
        for verbs in (ours, other):
            verbs.create_adapter("switch", LoraSettings(), seed=0)
            verbs.sync("switch")
        sample, sample_single = partial(timed_sampling, ours, "switch"), partial(timed_sampling, other, "switch")
        # One at a time takes as many times longer as there are sequences: a group of them is enough to see it.
        a_group = shared[:1]
        return [
            _compare("rollouts: the prompt once a group", partial(sample, shared), partial(sample, apart), repeats),
            _compare("rollouts: a group decoded together", partial(sample, a_group), partial(sample_single, a_group), repeats),
        ]


def _compare(saving: str, run: Callable[[], float], wasteful: Callable[[], float], repeats: int) -> Figures:
    figures = Figures(saving, *alternate([run, wasteful], repeats=repeats))
    say(f"{saving}: {figures.seconds} s, without {figures.without} s, {figures.times:.2f} times")
    return figures


def _logits(shape: ModelShape, sizes: Sizes, threads: int, repeats: int) -> tuple[Figures, dict[str, float]]:
    """Logprobs and their gradient for all completion tokens: in chunks, as the engine does it, against all logits at once; and MiB."""
    torch.set_num_threads(threads)
    num_tokens = sum(len(c) for g in make_groups(sizes, shape.vocab, mixed=True) for c in g.completions)
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
