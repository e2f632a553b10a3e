"""Signals, batches and denominators of a step.

1. Excluded completions leave numerator and denominator (trl#5775), so do masked truncated ones (trl#6369, trl#6439): the batch is that of
   the kept rows. Dead groups leave the numerator only.
2. Each aggregation's weights and denominator; all masked is an empty batch, not NaN.
3. Rejected tokens leave both, with completions and groups of which nothing is left.
4. Signals: overlong punishment, KL in the reward, leave-one-out, FlowRL's offsets; a reward of None is NaN throughout.
5. Each algorithm's loss.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from core.contracts import AlgorithmSettings
from engine.advantages import flow_offsets, group_advantages, leave_one_out
from engine.loop.objective import Batch, batch_of, loss_settings, reject, signals_of, weighed
from engine.loop.rollout import GradedGroup
from engine.types import FloatArray, TrainGroup
from tests.loops import Recorder, graded, make_spec

GROUPS = [graded([2, 3, 9], [1.0, 0.0, None]), graded([5, 6], [0.5, 0.5])]


def signals(groups: Sequence[GradedGroup]) -> list[FloatArray]:
    return [group_advantages(group.rewards, scale=False) for group in groups]


def made(groups: Sequence[GradedGroup], aggregation: str = "sequence", **options: bool) -> tuple[list[TrainGroup], float]:
    return weighed(batch_of(groups, signals(groups), **options), aggregation, max_tokens=10)


def test_denominator_counts_dead_groups_and_not_excluded_completions() -> None:
    batch, denominator = made(GROUPS)
    assert denominator == 4
    assert len(batch) == 1
    np.testing.assert_allclose(batch[0].weights, [1 / 2, 1 / 3])
    np.testing.assert_allclose(batch[0].advantages, [0.5, -0.5])
    assert [len(t) for t in batch[0].completions] == [2, 3]
    batch, denominator = made(GROUPS, "token")
    assert denominator == 2 + 3 + 5 + 6
    np.testing.assert_array_equal(batch[0].weights, [1, 1])
    assert made(GROUPS, "sum")[1] == 4
    assert made(GROUPS, "constant")[1] == 4 * 10


def same(first: tuple[list[TrainGroup], float], second: tuple[list[TrainGroup], float]) -> bool:
    assert first[1] == second[1]
    for ours, theirs in zip(first[0], second[0], strict=True):
        np.testing.assert_array_equal(ours.advantages, theirs.advantages)
        np.testing.assert_array_equal(ours.weights, theirs.weights)
        assert [t.tolist() for t in ours.completions] == [t.tolist() for t in theirs.completions]
    return True


@pytest.mark.parametrize("aggregation", ["sequence", "token", "sum", "constant"])
def test_batch_equals_the_one_without_its_excluded_completion(aggregation: str) -> None:
    assert same(made(GROUPS, aggregation), made([graded([2, 3], [1.0, 0.0]), GROUPS[1]], aggregation))


@pytest.mark.parametrize("aggregation", ["sequence", "token", "sum", "constant"])
def test_masked_truncated_completions_leave_numerator_and_denominator(aggregation: str) -> None:
    groups = [graded([2, 3, 9], [1.0, 0.0, 0.2], truncated=[2]), graded([5, 6], [0.5, 0.5], truncated=[0])]
    kept = [graded([2, 3], [1.0, 0.0]), graded([6], [0.5])]
    # The truncated one still is in its group's mean: what is masked is its loss.
    advantages = [signals(groups)[0][:2], np.zeros(1, np.float32)]
    expected = weighed(batch_of(kept, advantages), aggregation, max_tokens=10)
    assert same(made(groups, aggregation, mask_truncated=True), expected)


@pytest.mark.parametrize("aggregation", ["sequence", "token", "sum", "constant"])
def test_nothing_left_to_train_on_is_an_empty_batch(aggregation: str) -> None:
    assert made([graded([2, 3], [1.0, 0.0], truncated=[0, 1])], aggregation, mask_truncated=True) == ([], 0.0)
    batch, denominator = made([GROUPS[1]], aggregation)
    assert batch == []
    assert denominator > 0


def test_rejected_tokens_leave_loss_and_denominator() -> None:
    groups = [graded([2, 4, 1], [1.0, 0.0, 0.4]), graded([3, 3], [0.0, 1.0]), GROUPS[1]]
    batch = batch_of(groups, signals(groups))
    far = np.float32(np.log(2.1))
    trainer = [
        [np.array([0, far], np.float32), np.array([-far, 0, 0.6, -0.6], np.float32), np.array([far], np.float32)],
        [np.full(3, far), np.full(3, -far)],
    ]
    left = reject(batch, trainer, cap=2.0)
    assert left.num_rejected_tokens == 3 + 6
    train, denominator = weighed(left, "token", max_tokens=10)
    assert denominator == 1 + 3 + 11, "the dead group counts in full"
    assert len(train) == 1
    assert train[0].token_weights is not None
    assert [mask.tolist() for mask in train[0].token_weights] == [[1, 0], [0, 1, 1, 1]]
    np.testing.assert_allclose(train[0].advantages, signals(groups)[0][:2])
    train, denominator = weighed(left, "sequence", max_tokens=10)
    assert denominator == 2 + 2
    np.testing.assert_allclose(train[0].weights, [1 / 1, 1 / 3])
    everything = reject(batch, [[np.full(len(t), far) for t in g.completions] for g in batch.groups], cap=2.0)
    assert weighed(everything, "sequence", max_tokens=10) == ([], 2.0)
    within = reject(batch, [[np.zeros(len(t), np.float32) for t in g.completions] for g in batch.groups], cap=2.0)
    assert same(weighed(within, "token", max_tokens=10), weighed(batch, "token", max_tokens=10))


def signals_by(groups: Sequence[GradedGroup], *, moved: bool = True, **algorithm: Any) -> tuple[list[FloatArray], Recorder]:
    """Signals of an algorithm, with an adapter that has moved off its reference (or not)."""
    spec, verbs = make_spec(algorithm=algorithm), Recorder()
    verbs.create_adapter("a", spec.lora, seed=0)
    if moved:
        verbs.engine.adapters["a"].reference = "another"
    return signals_of(verbs, "a", spec, groups), verbs


def test_overlong_completions_are_punished_before_they_are_compared() -> None:
    # max_tokens is 20, so the buffer of 0.2 begins at 16 tokens.
    groups = [graded([10, 18, 20], [1.0, 1.0, 1.0])]
    [found], verbs = signals_by(groups, name="dapo")
    np.testing.assert_allclose(found, group_advantages([1.0, 0.5, 0.0], scale=True))
    assert "forward" not in verbs.verbs


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_kl_in_the_reward_takes_one_reference_pass(beta: float) -> None:
    logprobs = [np.full(n, -0.5, np.float32) for n in (2, 3, 4)]
    groups = [graded([2, 3, 4], [1.0, None, 0.0], logprobs=logprobs), graded([1, 2], [0.5, 0.5])]
    found, verbs = signals_by(groups, name="rloo", beta=beta)
    if not beta:
        assert "forward" not in verbs.verbs
        np.testing.assert_array_equal(found[0], leave_one_out([1.0, None, 0.0]))
        return
    reference = verbs.engine.adapters["a"].reference_logprobs
    for group, signals_G in zip(groups, found, strict=True):
        less = [
            None if r is None else r - beta * float((c.logprobs - reference(c.tokens)).sum())
            for r, c in zip(group.rewards, group.completions, strict=True)
        ]
        np.testing.assert_allclose(signals_G, leave_one_out(less), rtol=1e-5)
    assert verbs.verbs.count("forward") == 1
    assert np.isnan(found[0][1])


def test_flowrl_needs_the_reference_and_equal_rewards_still_teach() -> None:
    groups = [graded([2, 3, 4], [1.0, None, 0.0]), graded([1, 2], [0.5, 0.5])]
    found, verbs = signals_by(groups, name="flowrl")
    reference = verbs.engine.adapters["a"].reference_logprobs
    for group, signals_G in zip(groups, found, strict=True):
        own, ref = [c.logprobs for c in group.completions], [reference(c.tokens) for c in group.completions]
        np.testing.assert_array_equal(signals_G, flow_offsets(group.rewards, own, ref, reward_scale=15.0))
    assert len(batch_of(groups, found).groups) == 2


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "flowrl"])
def test_a_completion_without_a_score_never_reaches_a_batch(name: str) -> None:
    groups = [graded([2, 3, 4], [1.0, None, 0.0]), graded([2, 2], [None, 0.3]), graded([2, 2], [None, None])]
    found, _ = signals_by(groups, name=name)
    batch, denominator = weighed(batch_of(groups, found), AlgorithmSettings.model_validate({"name": name}).loss_aggregation, max_tokens=20)
    assert denominator > 0
    assert sum(len(group.completions) for group in batch) == 2
    assert all(np.isfinite(group.advantages).all() for group in batch)


@pytest.mark.parametrize(
    ("name", "kind", "beta", "clip"),
    [
        ("grpo", "clip", 0.04, (0.2, 0.2)), ("dr_grpo", "clip", 0.0, (0.2, 0.2)), ("dapo", "clip", 0.0, (0.2, 0.28)),
        ("gspo", "sequence_clip", 0.0, (3e-4, 4e-4)), ("cispo", "cispo", 0.0, (1.0, 4.0)), ("rloo", "clip", 0.0, (0.2, 0.2)),
        ("flowrl", "flow", 0.0, (0.2, 0.2)), ("sft", "sft", 0.0, (0.2, 0.2)), ("dpo", "dpo", 0.1, (0.2, 0.2)),
    ],
)  # fmt: skip
def test_loss_of_each_algorithm(name: str, kind: str, beta: float, clip: tuple[float, float]) -> None:
    loss = loss_settings(AlgorithmSettings.model_validate({"name": name}), 3.0, temperature=0.7)
    assert (loss.kind, loss.beta, loss.clip_low, loss.clip_high, loss.denominator, loss.temperature) == (kind, beta, *clip, 3.0, 0.7)
    with_kl = AlgorithmSettings(beta=0.2, kl_in="reward", entropy_bonus=0.01, importance_cap=2.0)
    loss = loss_settings(with_kl, 1.0, temperature=1.0)
    assert (loss.beta, loss.entropy_bonus, loss.importance_cap) == (0.0, 0.01, 2.0)


def test_a_batch_of_nothing_weighs_nothing() -> None:
    assert weighed(Batch([]), "token", max_tokens=5) == ([], 0.0)
