"""Rewards to advantages, offsets and reward terms, against their formulas; excluded rewards; groups that can't teach.

1. Leave-one-out: the formula; its mean over the group is 0; excluded rewards change nothing for the others (trl#5775).
2. FlowRL's offsets: the formula with log Z left one out; the gradient of the squared residuals is that of their sample variance.
3. KL in the reward: the sum of log-ratios of the whole completion.
4. DAPO's overlong penalty: 0, linear, -1.
"""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.advantages import EPS, flow_offsets, is_dead, leave_one_out, overlong_penalty, rewards_less_kl

Arrays = list[NDArray[np.float32]]
FlowCase = tuple[Arrays, Arrays, list[float], NDArray[np.float64], NDArray[np.float64]]


def some_logprobs(lengths: tuple[int, ...], *, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return [-rng.random(length).astype(np.float32) for length in lengths]


def test_leave_one_out_compares_with_the_others() -> None:
    rewards = [1.0, 0.25, 0.0, 0.5]
    expected = [rewards[i] - sum(rewards[:i] + rewards[i + 1 :]) / 3 for i in range(4)]
    np.testing.assert_allclose(leave_one_out(rewards), expected, atol=1e-7)
    with_none = leave_one_out([None, 1.0, 0.25, None, 0.0, 0.5])
    np.testing.assert_array_equal(with_none[[1, 2, 4, 5]], leave_one_out(rewards))
    assert np.isnan(with_none[[0, 3]]).all()


@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 10, [None, 0.3], [0.3], [None, None], []])
def test_what_can_not_teach_is_exactly_zero(rewards: list[float | None]) -> None:
    advantages = leave_one_out(rewards)
    assert is_dead(advantages)
    assert not np.nan_to_num(advantages).any()


def offsets_of(rewards: list[float | None]) -> NDArray[np.float32]:
    arrays = some_logprobs((2,) * len(rewards), seed=0)
    return flow_offsets(rewards, arrays, arrays, reward_scale=15)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("make", [leave_one_out, offsets_of])
def test_rewards_that_are_not_finite_are_refused(make: Callable[[list[float | None]], object], bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        make([bad, 1.0, 0.0])


@pytest.fixture
def flow_case() -> FlowCase:
    """(policy's logprobs, reference's, rewards, mean of the policy's, 15 * r_hat + mean of the reference's)."""
    own, ref, rewards = some_logprobs((3, 1, 7, 4), seed=1), some_logprobs((3, 1, 7, 4), seed=2), [0.0, 1.0, 0.5, 0.5]
    centred = np.array(rewards) - np.mean(rewards)
    r_hat = centred / (np.sqrt((centred**2).sum() / 3) + EPS)
    mean_own, mean_ref = (np.array([float(each.astype(np.float64).mean()) for each in arrays]) for arrays in (own, ref))
    return own, ref, rewards, mean_own, 15 * r_hat + mean_ref


def test_flow_offsets_equal_the_formula(flow_case: FlowCase) -> None:
    own, ref, rewards, mean_own, target = flow_case
    for i, got in enumerate(flow_offsets(rewards, own, ref, reward_scale=15)):
        # log Z of eq. 6 with the residuals of the others 0 on average.
        log_z = np.mean([target[j] - mean_own[j] for j in range(4) if j != i])
        assert got == pytest.approx(log_z - target[i], abs=1e-5)


def test_flow_gradient_is_that_of_the_residuals_variance(flow_case: FlowCase) -> None:
    """VarGrad: the slope of the sample variance over the group, by finite differences in each completion's mean logprob."""
    own, ref, rewards, mean_own, target = flow_case
    offsets, h = flow_offsets(rewards, own, ref, reward_scale=15), 1e-5

    def variance(means: NDArray[np.float64]) -> float:
        residuals = means - target
        return float(((residuals - residuals.mean()) ** 2).sum() / 3)

    for i, nudge in enumerate(h * np.eye(4)):
        slope = (variance(mean_own + nudge) - variance(mean_own - nudge)) / (2 * h)
        # The slope of mean(residual^2) with the offset held.
        assert 2 * (mean_own[i] + offsets[i]) / 4 == pytest.approx(slope, abs=1e-4)


def test_flow_offsets_leave_out_what_has_no_score_or_no_tokens() -> None:
    lengths = (3, 2, 0, 4)
    own, ref = some_logprobs(lengths, seed=1), some_logprobs(lengths, seed=2)
    got = flow_offsets([1.0, None, None, 0.0], own, ref, reward_scale=15)
    np.testing.assert_array_equal(got[[0, 3]], flow_offsets([1.0, 0.0], [own[0], own[3]], [ref[0], ref[3]], reward_scale=15))
    assert np.isnan(got[[1, 2]]).all()
    assert np.isnan(flow_offsets([1.0, 0.5, 0.5, 0.0], own, ref, reward_scale=15)[2])
    assert is_dead(flow_offsets([1.0, None, 0.5, None], own, ref, reward_scale=15))


def test_equal_rewards_draw_the_policy_towards_the_reference() -> None:
    own, ref = some_logprobs((3, 3), seed=1), some_logprobs((3, 3), seed=2)
    offsets = flow_offsets([0.5, 0.5], own, ref, reward_scale=15)
    assert not is_dead(offsets)
    residuals = [float(own[i].mean()) + float(offsets[i]) for i in range(2)]
    gaps = [float(own[i].mean() - ref[i].mean()) for i in range(2)]
    assert residuals[0] == pytest.approx(gaps[0] - gaps[1], abs=1e-6)


def test_arrays_that_do_not_fit_are_refused() -> None:
    own = some_logprobs((3, 2), seed=1)
    with pytest.raises(ValueError, match="as many"):
        flow_offsets([1.0, 0.0], own, [own[0], own[0]], reward_scale=15)
    with pytest.raises(ValueError, match="shorter"):
        rewards_less_kl([1.0, 0.0, 1.0], own, own, beta=0.1)
    with pytest.raises(ValueError, match="broadcast"):
        rewards_less_kl([1.0, 0.0], own, [own[0], own[0]], beta=0.1)


def test_kl_in_the_reward_is_the_whole_completions() -> None:
    own, ref = some_logprobs((3, 1, 5), seed=1), some_logprobs((3, 1, 5), seed=2)
    got = rewards_less_kl([1.0, None, 0.0], own, ref, beta=0.05)
    assert got[1] is None
    for i, reward in ((0, 1.0), (2, 0.0)):
        gap = sum(float(a) - float(b) for a, b in zip(own[i], ref[i], strict=True))
        assert got[i] == pytest.approx(reward - 0.05 * gap, abs=1e-7)


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0), (16_384, 0), (18_432, -0.5), (20_480, -1), (20_481, -1)],
    ids=["empty", "fits", "half", "at", "over"],
)
def test_overlong_penalty_is_dapos(num_tokens: int, penalty: float) -> None:
    """The paper's own numbers: 16,384 tokens expected and a buffer of 4,096."""
    assert overlong_penalty(num_tokens, max_tokens=20_480, buffer_share=0.2) == pytest.approx(penalty, abs=1e-9)
    assert overlong_penalty(num_tokens, max_tokens=20_480, buffer_share=0.0) == 0
