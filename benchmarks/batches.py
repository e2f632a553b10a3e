"""Batches of random tokens, and the verbs on them timed: what is measured below the loop, where neither text nor reward matters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from benchmarks.arithmetic import GroupLengths
from core.contracts import OptimizerSettings
from engine.types import IntArray, LossSettings, SampleRequest, SamplingParams, TrainGroup, Verbs


@dataclass(frozen=True)
class Sizes:
    """A batch."""

    num_prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 57
    completion_tokens: int = 64
    """Of every completion, or of the longest."""

    @property
    def lengths(self) -> list[GroupLengths]:
        """For counting its arithmetic, all completions of full length."""
        return [GroupLengths(self.prompt_tokens, (self.completion_tokens,) * self.group_size)] * self.num_prompts


def make_groups(sizes: Sizes, vocab: int, *, mixed: bool, seed: int = 0) -> list[TrainGroup]:
    """A batch to train on.

    Args:
        mixed: lengths are spread evenly from 1 to the longest, as of completions that stop by themselves; else all are the longest.
    """
    rng = np.random.default_rng(seed)
    count = sizes.num_prompts * sizes.group_size
    lengths = np.full(count, sizes.completion_tokens)
    if mixed:
        lengths = rng.permutation(np.linspace(1, sizes.completion_tokens, count).round().astype(int))

    def tokens(number: int) -> IntArray:
        return rng.integers(3, vocab, number, dtype=np.int32)

    advantages = np.linspace(-1.5, 1.5, sizes.group_size, dtype=np.float32)
    return [
        TrainGroup(tokens(sizes.prompt_tokens), tuple(tokens(n) for n in row), advantages, (1.0 / row).astype(np.float32))
        for row in lengths.reshape(sizes.num_prompts, -1)
    ]


def make_requests(sizes: Sizes, vocab: int, *, seed: int = 0) -> list[SampleRequest]:
    """The same prompts to sample from, a request a group."""
    params = tuple(SamplingParams(sizes.completion_tokens, seed=k) for k in range(sizes.group_size))
    return [SampleRequest(group.prompt_tokens, params) for group in make_groups(sizes, vocab, mixed=False, seed=seed)]


def one_by_one(groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """A group for every completion, each with its own copy of the prompt: the same loss."""
    return [
        TrainGroup(g.prompt_tokens, (c,), g.advantages[i : i + 1], g.weights[i : i + 1])
        for g in groups
        for i, c in enumerate(g.completions)
    ]


def padded(groups: Sequence[TrainGroup], length: int) -> list[TrainGroup]:
    """The same completions filled up to one length by tokens that weigh nothing: the same loss, and what padding computes."""

    def fill(completion: IntArray) -> IntArray:
        return np.concatenate([completion, np.zeros(length - len(completion), np.int32)])

    def kept(completion: IntArray) -> np.ndarray:
        return (np.arange(length) < len(completion)).astype(np.float32)

    return [
        replace(g, completions=tuple(fill(c) for c in g.completions), token_weights=tuple(kept(c) for c in g.completions)) for g in groups
    ]


def plain_loss(sizes: Sizes, *, beta: float) -> LossSettings:
    """GRPO's."""
    return LossSettings(0.2, 0.2, beta, float(sizes.num_prompts * sizes.group_size), 1.0)


def timed_training(verbs: Verbs, adapter_id: str, groups: Sequence[TrainGroup], loss: LossSettings, *, old_pass: bool = False) -> float:
    """Seconds of one update.

    Args:
        old_pass: with a pass for the old policy's logprobs before it, as several updates on one rollout would need.
    """
    started = perf_counter()
    if old_pass:
        old = verbs.forward(adapter_id, groups, temperature=loss.temperature)
        groups = [replace(group, old_logprobs=logprobs) for group, logprobs in zip(groups, old, strict=True)]
    verbs.forward_backward(adapter_id, groups, loss)
    verbs.optim_step(adapter_id, OptimizerSettings(), learning_rate=1e-5)
    return perf_counter() - started


def timed_sampling(verbs: Verbs, adapter_id: str | None, requests: Sequence[SampleRequest]) -> float:
    """Seconds of sampling."""
    started = perf_counter()
    verbs.sample(adapter_id, requests)
    return perf_counter() - started
