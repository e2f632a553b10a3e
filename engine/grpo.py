"""GRPO (Shao et al. 2024, arXiv:2402.03300) as one loop over the verbs: sample, grade, advantages, forward_backward, optim_step, sync.

How it departs from the paper: one update per rollout, so the step is strictly on policy and needs no old-policy pass; groups whose rewards
are all equal are not trained on, not even for their KL term, and still count in the denominator; token aggregation is there as an option.

Everything that is random follows from (job seed, step, row, completion), so a run that is resumed at step s does what an unbroken one does.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from core.contracts import JobSpec, RolloutSettings
from core.errors import InvalidInput, Unavailable
from engine.advantages import group_advantages, is_dead
from engine.graders import GradeResult, grade
from engine.types import (
    Completion,
    FloatArray,
    ForwardBackwardResult,
    IntArray,
    LossSettings,
    Message,
    SampleRequest,
    SamplingParams,
    TrainGroup,
    Verbs,
)

MAX_EXCLUDED_SHARE = 0.5
"""A step with more completions than this without a score fails the job: the grader, not the policy, is then what is learned from."""


@dataclass(frozen=True)
class PromptRow:
    """One row of a training or validation file."""

    messages: tuple[Message, ...]
    item: Mapping[str, Any]
    """The row's fields beside messages."""


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    step: int
    """Steps done, this one included."""
    metrics: dict[str, float]
    fingerprint: str
    """Of the adapter after the step, equal in trainer and sampler."""


@dataclass
class GradedGroup:
    """One prompt's completions with their grades and advantages."""

    prompt_tokens: IntArray
    completions: list[Completion]
    grades: list[GradeResult]
    advantages: FloatArray
    kept: list[int] = field(default_factory=list[int])
    """Indices of the completions that have a score."""


def rows_of_step(seed: int, num_rows: int, prompts_per_step: int, step: int) -> list[int]:
    """Rows that a step trains on; the data position follows from the step alone, so a resume is exact.

    Epochs are permutations of their own, laid end to end and cut into steps: a step may end one epoch and begin the next.

    Args:
        step: 0 for the first.
    """
    positions = range(step * prompts_per_step, (step + 1) * prompts_per_step)
    return [_permutation(seed, num_rows, p // num_rows)[p % num_rows] for p in positions]


def sample_seed(job_seed: int, step: int, row: int, k: int) -> int:
    """Seed of a completion, 0 to 2**31 - 1: of its own for each step, row and place k in the group, the same at every try."""
    return int.from_bytes(_digest("sample", job_seed, step, row, k)[:4]) >> 1


def learning_rate_at(step: int, spec: JobSpec, num_steps: int) -> float:
    """Learning rate of step `step` (0 for the first): linear warm-up that reaches the peak at step warmup_steps - 1, then the schedule.

    linear and cosine would reach 0 at step `num_steps`, the one after the last.
    """
    warmup = spec.optimizer.warmup_steps
    if step < warmup:
        return spec.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    match spec.optimizer.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1.0 - progress
        case "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.learning_rate * factor


def train_groups(groups: Sequence[GradedGroup], aggregation: str) -> tuple[list[TrainGroup], float]:
    """The batch to train on and its denominator.

    Completions without a score leave numerator and denominator alike; dead groups leave the numerator only.

    Args:
        aggregation: "sequence": each token weighs 1 / its completion's length, the denominator is the number of graded completions;
            "token": each token weighs 1, the denominator is the number of their tokens.
    """
    graded = [group.completions[i] for group in groups for i in group.kept]
    denominator = float(len(graded) if aggregation == "sequence" else sum(len(c.tokens) for c in graded))
    batch: list[TrainGroup] = []
    for group in groups:
        kept = [i for i in group.kept if len(group.completions[i].tokens)]
        if is_dead(group.advantages) or not kept:
            continue
        tokens = tuple(group.completions[i].tokens for i in kept)
        weights = [1.0 / len(t) if aggregation == "sequence" else 1.0 for t in tokens]
        batch.append(TrainGroup(group.prompt_tokens, tokens, group.advantages[kept], np.array(weights, dtype=np.float32)))
    return batch, denominator


class GrpoLoop:
    """One job's training, step by step. It holds no state but the adapter's fingerprint: what matters is in the engine.

    Args:
        verbs: the engine.
        adapter_id: the job's adapter there, created or restored by the caller.
        spec: what the job asked for.
        rows, validation_rows: prompts of the files, in file order.
        num_steps: steps of the whole job.
        between: called between the phases of a step; may raise to stop it (a lost lease, say).
    """

    def __init__(
        self,
        verbs: Verbs,
        adapter_id: str,
        spec: JobSpec,
        rows: Sequence[PromptRow],
        validation_rows: Sequence[PromptRow],
        num_steps: int,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._verbs, self._adapter_id, self._spec = verbs, adapter_id, spec
        self._rows, self._validation_rows, self._num_steps = rows, validation_rows[: spec.eval_samples], num_steps
        self._between = between
        self._fingerprint: str | None = None

    def begin(self, fingerprint: str) -> None:
        """Makes the sampler hold the adapter as the trainer has it; call after create_adapter or load_state.

        Raises:
            Unavailable: it holds something else.
        """
        self._sync(fingerprint)

    def run_step(self, step: int) -> StepResult:
        """Does step `step` (0 for the first).

        Raises:
            InvalidInput: too many completions without a score (code grader_failed, with the grader's own error).
            Unavailable, NotFound, LeaseLost: the engine's; the step has to be done again from a checkpoint.
        """
        fingerprint = self._fingerprint
        assert fingerprint is not None, "begin() comes first: sampling before a sync could use stale weights"
        started = time.perf_counter()
        groups, num_excluded, timing = self._rollout(step)
        self._between()
        train_started = time.perf_counter()
        batch, denominator = train_groups(groups, self._spec.algorithm.loss_aggregation)
        rate = learning_rate_at(step, self._spec, self._num_steps)
        metrics = rollout_metrics(groups, num_excluded)
        metrics |= {"learning_rate": rate, "loss": 0.0, "grad_norm": 0.0, "num_tokens": 0.0}
        if batch:
            result = self._verbs.forward_backward(self._adapter_id, batch, self._loss(denominator))
            self._between()
            update = self._verbs.optim_step(self._adapter_id, self._spec.optimizer, learning_rate=rate)
            metrics |= {**result.metrics, "loss": result.loss, "grad_norm": update.grad_norm, "num_tokens": float(result.num_tokens)}
            metrics |= _logprob_gap(groups, result)
            fingerprint = update.fingerprint
        self._sync(fingerprint)
        ended = time.perf_counter()
        num_sampled = sum(len(c.tokens) for group in groups for c in group.completions)
        metrics |= timing | {"train_s": ended - train_started, "step_s": ended - started}
        metrics["tokens_per_s"] = (num_sampled + metrics["num_tokens"]) / (ended - started)
        return StepResult(step + 1, metrics, fingerprint)

    def wants_eval(self, steps_done: int) -> bool:
        """Whether the validation file is due: before the first step, every eval_interval, and at the end."""
        return bool(self._validation_rows) and (steps_done % self._spec.eval_interval == 0 or steps_done == self._num_steps)

    def evaluate(self) -> dict[str, float]:
        """Greedy, one completion per validation row: {"eval_reward_mean": …, "eval_excluded_rows": …}.

        Raises:
            InvalidInput: as `run_step`.
        """
        params = _params(self._spec.rollout, seed=0, temperature=0.0)
        prompts = self._verbs.render([row.messages for row in self._validation_rows])
        completions = self._verbs.sample(self._adapter_id, [SampleRequest(prompt, (params,)) for prompt in prompts])
        grades = [self._grade(row, done[0]) for row, done in zip(self._validation_rows, completions, strict=True)]
        num_excluded = _count_excluded(grades)
        rewards = [g.reward for g in grades if g.reward is not None]
        return {"eval_reward_mean": float(np.mean(rewards)), "eval_excluded_rows": float(num_excluded)}

    def _rollout(self, step: int) -> tuple[list[GradedGroup], int, dict[str, float]]:
        started = time.perf_counter()
        spec = self._spec
        indices = rows_of_step(spec.seed, len(self._rows), spec.prompts_per_step(len(self._rows)), step)
        rows = [self._rows[index] for index in indices]
        prompts = self._verbs.render([row.messages for row in rows])
        seen: Counter[int] = Counter()
        requests: list[SampleRequest] = []
        for index, prompt in zip(indices, prompts, strict=True):
            # A row that ends one epoch and begins the next comes twice in a step; its completions must differ.
            first = seen[index] * spec.group_size
            seen[index] += 1
            seeds = [sample_seed(spec.seed, step, index, first + k) for k in range(spec.group_size)]
            requests.append(SampleRequest(prompt, tuple(_params(spec.rollout, seed=s) for s in seeds)))
        sampled = self._verbs.sample(self._adapter_id, requests)
        sampled_at = time.perf_counter()
        self._between()
        groups: list[GradedGroup] = []
        for row, prompt, completions in zip(rows, prompts, sampled, strict=True):
            grades = [self._grade(row, completion) for completion in completions]
            rewards = [g.reward for g in grades]
            advantages = group_advantages(rewards, scale=spec.algorithm.scale_advantages)
            kept = [i for i, reward in enumerate(rewards) if reward is not None]
            groups.append(GradedGroup(prompt, completions, grades, advantages, kept))
        num_excluded = _count_excluded([g for group in groups for g in group.grades])
        return groups, num_excluded, {"rollout_s": sampled_at - started, "grade_s": time.perf_counter() - sampled_at}

    def _grade(self, row: PromptRow, completion: Completion) -> GradeResult:
        return grade(self._spec.grader, item=row.item, output_text=completion.text)

    def _loss(self, denominator: float) -> LossSettings:
        algorithm = self._spec.algorithm
        return LossSettings(algorithm.clip_low, algorithm.clip_high, algorithm.beta, denominator, self._spec.rollout.temperature)

    def _sync(self, fingerprint: str) -> None:
        held = self._verbs.sync(self._adapter_id)
        if held != fingerprint:
            raise Unavailable(
                f"The sampler holds adapter {held[:12]}, the trainer {fingerprint[:12]}; the step is not sampled from stale weights."
            )
        self._fingerprint = fingerprint


def rollout_metrics(groups: Sequence[GradedGroup], num_excluded: int) -> dict[str, float]:
    """What the rollout of a step says: rewards (graded completions only), lengths, truncation, dead groups."""
    rewards = np.array([group.grades[i].reward for group in groups for i in group.kept], dtype=np.float64)
    completions = [c for group in groups for c in group.completions]
    metrics = {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "completion_tokens_mean": float(np.mean([len(c.tokens) for c in completions])),
        "truncated_share": float(np.mean([c.finish_reason == "length" for c in completions])),
        "dead_group_share": float(np.mean([is_dead(group.advantages) for group in groups])),
        "excluded_rows": float(num_excluded),
    }
    parts: dict[str, list[float]] = {}
    for group in groups:
        for result in group.grades:
            for name, value in result.sub_rewards.items():
                if value is not None:
                    parts.setdefault(name, []).append(value)
    return metrics | {f"reward/{name}": float(np.mean(values)) for name, values in parts.items()}


def _logprob_gap(groups: Sequence[GradedGroup], result: ForwardBackwardResult) -> dict[str, float]:
    """Mean and largest |sampler's logprob - trainer's|, nats, over the tokens that were trained on."""
    alive = [group for group in groups if not is_dead(group.advantages)]
    gaps: list[FloatArray] = []
    for group, logprobs in zip(alive, result.logprobs, strict=True):
        sampled = [group.completions[i].logprobs for i in group.kept if len(group.completions[i].tokens)]
        gaps += [np.abs(ours - theirs) for ours, theirs in zip(sampled, logprobs, strict=True)]
    every = np.concatenate(gaps)
    return {"sampler_trainer_logprob_gap_mean": float(every.mean()), "sampler_trainer_logprob_gap_max": float(every.max())}


def _count_excluded(grades: Sequence[GradeResult]) -> int:
    """Number without a score.

    Raises:
        InvalidInput: more than MAX_EXCLUDED_SHARE of them, or all of a few.
    """
    excluded = [g for g in grades if g.reward is None]
    if len(excluded) > MAX_EXCLUDED_SHARE * len(grades):
        detail = next((str(v) for k, v in excluded[0].errors.items() if k.endswith("_details")), "no detail")
        message = f"The grader gave no score for {len(excluded)} of {len(grades)} completions. Its first error: {detail}"
        raise InvalidInput(message, param="method.reinforcement.grader", code="grader_failed")
    return len(excluded)


def _params(rollout: RolloutSettings, *, seed: int, temperature: float | None = None) -> SamplingParams:
    return SamplingParams(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature if temperature is None else temperature,
        top_p=rollout.top_p if temperature is None else 1.0,
        stop=rollout.stop,
        seed=seed,
    )


@lru_cache(maxsize=8)
def _permutation(seed: int, num_rows: int, epoch: int) -> tuple[int, ...]:
    # By digest and not by a library's generator, whose streams may change between versions.
    return tuple(sorted(range(num_rows), key=lambda row: _digest("row", seed, epoch, row)))


def _digest(*parts: object) -> bytes:
    return hashlib.sha256("/".join(map(str, parts)).encode()).digest()
