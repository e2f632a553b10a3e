"""The first half of a step: completions of its prompts, graded; prompts that teach nothing replaced where the job asks for it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from core.contracts import JobSpec, RolloutSettings
from core.errors import InvalidInput
from engine.graders import GradeResult, grade
from engine.loop.rows import PromptRow, sample_seed
from engine.types import Completion, IntArray, SampleRequest, SamplingParams, Verbs

MAX_EXCLUDED_SHARE = 0.5
"""A step with more completions than this without a score fails the job: the grader, not the policy, is then what is learned from."""


@dataclass(frozen=True)
class GradedGroup:
    """One prompt's completions with their grades."""

    row: int
    prompt_tokens: IntArray
    completions: Sequence[Completion]
    grades: Sequence[GradeResult]

    @property
    def rewards(self) -> list[float | None]:
        """The grader's, None where it gave none."""
        return [result.reward for result in self.grades]

    @property
    def kept(self) -> list[int]:
        """Completions that have a score."""
        return [i for i, reward in enumerate(self.rewards) if reward is not None]

    @property
    def mean_reward(self) -> float | None:
        """Over the completions that have one."""
        rewards = [reward for reward in self.rewards if reward is not None]
        return float(np.mean(rewards)) if rewards else None

    @property
    def is_even(self) -> bool:
        """Whether all completions earned the same, so that none is better than another."""
        return len({reward for reward in self.rewards if reward is not None}) < 2


@dataclass(frozen=True)
class Rollout:
    """What a step has to learn from."""

    groups: list[GradedGroup]
    """As many as the step has prompts."""
    replaced: list[GradedGroup]
    """Those of dynamic sampling whose place others took; they count in what is observed, not in what is trained."""
    num_excluded: int
    """Completions without a score, of both."""
    num_rounds: int
    sample_s: float
    grade_s: float

    @property
    def seen(self) -> list[GradedGroup]:
        """All groups that were sampled."""
        return [*self.groups, *self.replaced]


def roll_out(
    verbs: Verbs, adapter_id: str, spec: JobSpec, rows: Sequence[PromptRow], take: Iterator[int], step: int, between: Callable[[], None]
) -> Rollout:
    """Samples and grades the prompts of one step.

    With dynamic sampling, groups whose rewards are all equal give way to the next rows, round by round, until every place is taken or the
    rounds are used up; a place that found no better group keeps its last one.

    Args:
        take: the step's rows, and further ones (`Curriculum.rows_of`).
        step: of the sampling steps, 0 for the first.
        between: called after each sampling; may raise to stop.
    Raises:
        InvalidInput: too many completions without a score (code grader_failed, with the grader's own error).
    Source: dynamic sampling as in DAPO, arXiv:2503.14476, section 3.2, where rounds have no bound and rows are drawn on and on.
    """
    algorithm = spec.algorithm
    max_rounds = algorithm.max_sampling_rounds if algorithm.dynamic_sampling else 1
    places: list[GradedGroup | None] = [None] * spec.prompts_per_step(len(rows))
    replaced: list[GradedGroup] = []
    met: Counter[int] = Counter()
    num_rounds, sample_s, grade_s = 0, 0.0, 0.0
    while num_rounds < max_rounds and (wanting := [i for i, group in enumerate(places) if group is None or group.is_even]):
        started = time.perf_counter()
        indices = list(islice(take, len(wanting)))
        prompts = verbs.render([rows[index].messages for index in indices])
        sampled = verbs.sample(adapter_id, [_request(spec, step, *pair, met) for pair in zip(indices, prompts, strict=True)])
        sampled_at = time.perf_counter()
        between()
        for place, index, prompt, completions in zip(wanting, indices, prompts, sampled, strict=True):
            grades = [grade(spec.grader, item=rows[index].item, output_text=completion.text) for completion in completions]
            if (dead := places[place]) is not None:
                replaced.append(dead)
            places[place] = GradedGroup(index, prompt, completions, grades)
        num_rounds += 1
        sample_s, grade_s = sample_s + sampled_at - started, grade_s + time.perf_counter() - sampled_at
    groups = [group for group in places if group is not None]
    num_excluded = count_excluded([result for group in (*groups, *replaced) for result in group.grades])
    return Rollout(groups, replaced, num_excluded, num_rounds, sample_s, grade_s)


def count_excluded(grades: Sequence[GradeResult]) -> int:
    """Number without a score.

    Raises:
        InvalidInput: more than MAX_EXCLUDED_SHARE of them.
    """
    excluded = [g for g in grades if g.reward is None]
    if len(excluded) > MAX_EXCLUDED_SHARE * len(grades):
        detail = next((str(v) for k, v in excluded[0].errors.items() if k.endswith("_details")), "no detail")
        message = f"The grader gave no score for {len(excluded)} of {len(grades)} completions. Its first error: {detail}"
        raise InvalidInput(message, param="method.reinforcement.grader", code="grader_failed")
    return len(excluded)


def sampling_params(rollout: RolloutSettings, *, seed: int) -> SamplingParams:
    """How a completion of a training step is sampled."""
    return SamplingParams(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.stop, seed)


def _request(spec: JobSpec, step: int, index: int, prompt: IntArray, met: Counter[int]) -> SampleRequest:
    # A row that ends one epoch and begins the next comes twice in a step; its completions must differ.
    first = met[index] * spec.group_size
    met[index] += 1
    seeds = [sample_seed(spec.seed, step, index, first + k) for k in range(spec.group_size)]
    return SampleRequest(prompt, tuple(sampling_params(spec.rollout, seed=seed) for seed in seeds))
