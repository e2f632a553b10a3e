"""The pure parts of the GRPO loop: advantages, data order, seeds, learning rate, denominators."""

from collections.abc import Sequence

import numpy as np
import pytest

from core.contracts import JobSpec
from engine.advantages import EPS, group_advantages, is_dead
from engine.graders import GradeResult
from engine.grpo import GradedGroup, GrpoLoop, PromptRow, learning_rate_at, rows_of_step, sample_seed, train_groups
from engine.types import Completion, SampleRequest
from tests.scripted_engine import ScriptedClient, ScriptedEngine


@pytest.mark.parametrize("scale", [True, False])
def test_advantages_equal_a_float64_reference(scale: bool) -> None:
    rng = np.random.default_rng(0)
    for size in (2, 3, 8, 64):
        rewards = rng.random(size)
        centred = rewards - rewards.sum() / size
        std = np.sqrt((centred**2).sum() / (size - 1))
        expected = centred / (std + EPS) if scale else centred
        np.testing.assert_allclose(group_advantages(list(rewards), scale=scale), expected, rtol=1e-6, atol=1e-7)


def test_excluded_rewards_do_not_touch_the_others() -> None:
    with_none = group_advantages([1.0, None, 0.0, 0.25, None], scale=True)
    np.testing.assert_array_equal(with_none[[0, 2, 3]], group_advantages([1.0, 0.0, 0.25], scale=True))
    assert np.isnan(with_none[[1, 4]]).all()


@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 10, [None, 0.3], [0.3], [None, None], [0.0, 0.0]])
def test_dead_groups_are_exactly_zero(rewards: list[float | None]) -> None:
    advantages = group_advantages(rewards, scale=True)
    assert is_dead(advantages)
    assert not np.nan_to_num(advantages).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([bad, 1.0], scale=True)


def test_every_row_is_seen_once_an_epoch_and_the_order_changes() -> None:
    rows = [row for step in range(35) for row in rows_of_step(3, 10, 4, step)]
    epochs = [rows[i : i + 10] for i in range(0, 140, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_data_order_follows_from_seed_and_step_alone() -> None:
    assert rows_of_step(3, 10, 4, 17) == rows_of_step(3, 10, 4, 17)
    assert rows_of_step(3, 10, 4, 17) != rows_of_step(4, 10, 4, 17)
    # Written down: a change of this order would change every resumed job.
    assert rows_of_step(0, 8, 3, 2) == [5, 1, 2]


def test_sample_seeds_differ_and_fit() -> None:
    seeds = [sample_seed(1, step, row, k) for step in range(10) for row in range(10) for k in range(10)]
    assert len(set(seeds)) > 998
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sample_seed(1, 2, 3, 4) == 94295595


def spec(**optimizer: object) -> JobSpec:
    grader = {"type": "string_check", "name": "g", "input": "{{sample.output_text}}", "reference": "x", "operation": "eq"}
    return JobSpec.model_validate(
        {
            "base_model": "b", "training_file_sha256": "0", "seed": 0, "optimizer": {"learning_rate": 1.0, **optimizer},
            "reinforcement": {"grader": grader, "hyperparameters": {"learning_rate_multiplier": 0.5}},
        }
    )  # fmt: skip


def rates(num_steps: int, **optimizer: object) -> list[float]:
    return [learning_rate_at(step, spec(**optimizer), num_steps) for step in range(num_steps)]


def test_learning_rate_schedules() -> None:
    assert rates(3) == [0.5] * 3
    assert rates(4, warmup_steps=2) == [0.25, 0.5, 0.5, 0.5]
    assert rates(4, schedule="linear") == pytest.approx([0.5, 0.375, 0.25, 0.125])
    assert rates(4, schedule="linear", warmup_steps=2) == pytest.approx([0.25, 0.5, 0.5, 0.25])
    assert rates(4, schedule="cosine") == pytest.approx([0.5 * 0.5 * (1 + np.cos(np.pi * s / 4)) for s in range(4)])
    assert rates(2, warmup_steps=9) == pytest.approx([0.5 / 9, 1 / 9])


def graded(lengths: list[int], rewards: list[float | None]) -> GradedGroup:
    completions = [Completion(np.arange(n, dtype=np.int32), np.zeros(n, dtype=np.float32), "", "stop") for n in lengths]
    kept = [i for i, reward in enumerate(rewards) if reward is not None]
    grades = [GradeResult(reward) for reward in rewards]
    return GradedGroup(np.array([1], dtype=np.int32), completions, grades, group_advantages(rewards, scale=False), kept)


GROUPS = [graded([2, 3, 9], [1.0, 0.0, None]), graded([5, 6], [0.5, 0.5])]


def test_denominator_counts_dead_groups_and_not_excluded_completions() -> None:
    batch, denominator = train_groups(GROUPS, "sequence")
    assert denominator == 4
    assert len(batch) == 1
    np.testing.assert_allclose(batch[0].weights, [1 / 2, 1 / 3])
    np.testing.assert_allclose(batch[0].advantages, [0.5, -0.5])
    assert [len(t) for t in batch[0].completions] == [2, 3]
    batch, denominator = train_groups(GROUPS, "token")
    assert denominator == 2 + 3 + 5 + 6
    np.testing.assert_array_equal(batch[0].weights, [1, 1])


def test_batch_equals_the_one_without_its_excluded_completion() -> None:
    kept_only, denominator = train_groups([graded([2, 3], [1.0, 0.0]), GROUPS[1]], "sequence")
    batch, same = train_groups(GROUPS, "sequence")
    assert denominator == same
    np.testing.assert_array_equal(batch[0].advantages, kept_only[0].advantages)


def test_nothing_to_train_on_where_every_group_is_dead() -> None:
    batch, denominator = train_groups([GROUPS[1]], "token")
    assert batch == []
    assert denominator == 11


class Recording(ScriptedClient):
    """Keeps what was asked of the sampler."""

    asked: list[SampleRequest]

    def sample(self, adapter_id: str | None, requests: Sequence[SampleRequest]) -> list[list[Completion]]:
        self.asked = list(requests)
        return super().sample(adapter_id, requests)


def test_row_that_comes_twice_in_a_step_is_sampled_with_other_seeds() -> None:
    job = spec().model_copy(update={"num_steps": 50})
    rows = [PromptRow(({"role": "user", "content": str(i)},), {}) for i in range(3)]
    hyperparameters = job.reinforcement.hyperparameters.model_copy(update={"batch_size": 2})
    job = job.model_copy(update={"reinforcement": job.reinforcement.model_copy(update={"hyperparameters": hyperparameters})})
    step = next(s for s in range(50) if len(set(rows_of_step(job.seed, 3, 2, s))) == 1)
    verbs = Recording(ScriptedEngine(), 1)
    loop = GrpoLoop(verbs, "a", job, rows, [], 50)
    loop.begin(verbs.create_adapter("a", job.lora, seed=0).fingerprint)
    loop.run_step(step)
    first, second = verbs.asked
    np.testing.assert_array_equal(first.prompt_tokens, second.prompt_tokens)
    assert len({p.seed for p in first.params + second.params}) == 2 * job.group_size


def test_step_without_a_live_group_counts_and_leaves_the_adapter_alone() -> None:
    job = spec()
    rows = [PromptRow(({"role": "user", "content": "q"},), {})]
    engine = ScriptedEngine()
    verbs = ScriptedClient(engine, 1)
    loop = GrpoLoop(verbs, "a", job, rows, [], 5)
    before = verbs.create_adapter("a", job.lora, seed=0).fingerprint
    loop.begin(before)
    result = loop.run_step(0)  # no completion equals "x", so every reward is 0
    assert (result.step, result.fingerprint) == (1, before)
    assert (result.metrics["dead_group_share"], result.metrics["num_tokens"]) == (1.0, 0.0)
    assert not {"forward_backward", "optim_step"} & {verb for verb, _ in engine.calls}
