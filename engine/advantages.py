"""What a group's rewards become before the loss sees them: advantages, offsets of FlowRL, and terms that belong to the reward.

Everywhere a reward of None excludes its completion, as if it had not been sampled: it becomes NaN, so that one which is trained on by
mistake shows. A group that can't teach (one reward left, or all equal) becomes exactly 0, which `is_dead` sees.
Dimensions: G completions of one prompt, T tokens of one completion.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EPS = 1e-4


def group_advantages(rewards: Sequence[float | None], *, scale: bool, eps: float = EPS) -> NDArray[np.float32]:
    """Reward minus the group's mean, over the group's sample standard deviation where scaled.

    Args:
        rewards: G rewards of one prompt's completions; None is excluded.
        scale: divide by (standard deviation + eps).
    Returns:
        G values, unitless; 0 throughout for a dead group, NaN where excluded.
    Raises:
        ValueError: a reward is not finite.
    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2. The paper does not say which standard deviation it means; ours is the
        sample one (n - 1), as in TRL, with 1e-4 added as TRL does.
    """
    kept, values = _graded(rewards)
    if _can_not_teach(values):
        return _spread(len(rewards), kept, 0.0)
    centred = values - values.mean()
    return _spread(len(rewards), kept, centred / (values.std(ddof=1) + eps) if scale else centred)


def leave_one_out(rewards: Sequence[float | None]) -> NDArray[np.float32]:
    """Reward minus the mean of the group's other rewards: a baseline that does not depend on the completion that it judges.

    Args, Returns, Raises: as `group_advantages`.
    Source: Kool et al. 2019; for language models (RLOO) Ahmadian et al. 2024, arXiv:2402.14740, section 2.2.
    """
    kept, values = _graded(rewards)
    if _can_not_teach(values):
        return _spread(len(rewards), kept, 0.0)
    return _spread(len(rewards), kept, values - _mean_of_others(values))


def flow_offsets(
    rewards: Sequence[float | None],
    logprobs: Sequence[NDArray[np.float32]],
    ref_logprobs: Sequence[NDArray[np.float32]],
    *,
    reward_scale: float,
) -> NDArray[np.float32]:
    """FlowRL's part of the residual that does not depend on the policy: log Z - reward_scale * r_hat - mean reference logprob.

    r_hat is `group_advantages` with scale. The paper learns log Z by a network; here it is what makes the mean residual of the group's
    other completions 0 (VarGrad, Richter et al. 2020, arXiv:2010.10436, left one out). So it doesn't depend on the completion, and the
    gradient of mean(residual^2) is that of the residuals' sample variance at the policy that `logprobs` are of. In later updates on the
    same rollout log Z stays what it was.

    Args:
        rewards: G rewards; None is excluded, and so is a completion without tokens.
        logprobs: per completion T logprobs under the policy that sampled, nats.
        ref_logprobs: the same under the reference policy.
        reward_scale: the paper's beta, above 0.
    Returns:
        G values, nats a token; NaN where excluded, 0 throughout where fewer than two completions are left. Equal rewards still teach:
        they draw the policy towards the reference.
    Raises:
        ValueError: a reward is not finite, or arrays do not fit together.
    Source: Zhu et al. 2025, arXiv:2509.15207, eq. 6.
    """
    if [len(each) for each in logprobs] != [len(each) for each in ref_logprobs] or len(logprobs) != len(rewards):
        raise ValueError("logprobs and ref_logprobs need as many values as the completions have tokens, one array per reward")
    normalised = group_advantages(rewards, scale=True)
    kept = [i for i, reward in enumerate(rewards) if reward is not None and len(logprobs[i])]
    if len(kept) < 2:
        return _spread(len(rewards), kept, 0.0)
    target = np.array([reward_scale * float(normalised[i]) + np.mean(ref_logprobs[i], dtype=np.float64) for i in kept])
    policy = np.array([np.mean(logprobs[i], dtype=np.float64) for i in kept])
    return _spread(len(rewards), kept, _mean_of_others(target - policy) - target)


def rewards_less_kl(
    rewards: Sequence[float | None],
    logprobs: Sequence[NDArray[np.float32]],
    ref_logprobs: Sequence[NDArray[np.float32]],
    *,
    beta: float,
) -> list[float | None]:
    """Rewards minus beta times log(policy / reference) of the whole completion: the KL term as part of the reward.

    The k1 estimate is no loss by itself (the gradient of its value is 0 on average), but as a reward its policy gradient is exactly
    that of -beta * KL(policy || reference).

    Args:
        logprobs, ref_logprobs: per completion T values, nats, under the policy that sampled and under the reference.
    Returns:
        G rewards, None where there was none.
    Raises:
        ValueError: arrays do not fit together.
    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2; per completion as in Ahmadian et al. 2024, arXiv:2402.14740, eq. 2.
    """
    return [
        None if reward is None else reward - beta * float(np.sum(np.subtract(own, ref, dtype=np.float64)))
        for reward, own, ref in zip(rewards, logprobs, ref_logprobs, strict=True)
    ]


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_share: float) -> float:
    """DAPO's soft overlong punishment, to be added to a reward: 0 up to (1 - buffer_share) * max_tokens, then linear to -1 at max_tokens.

    Args:
        num_tokens: of the completion, its EOS included.
        buffer_share: of max_tokens, 0 to 1; 0: no penalty at any length.
    Source: Yu et al. 2025, arXiv:2503.14476, eq. 13. There a completion may pass the limit and then gets -1; here none can.
    """
    buffer_tokens = buffer_share * max_tokens
    if buffer_tokens == 0:
        return 0.0
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens))


def is_dead(advantages: NDArray[np.float32]) -> bool:
    """Whether a group carries no signal: every advantage is 0 or excluded."""
    return not np.any(np.nan_to_num(advantages))


def _graded(rewards: Sequence[float | None]) -> tuple[list[int], NDArray[np.float64]]:
    kept = [i for i, reward in enumerate(rewards) if reward is not None]
    values = np.array([rewards[i] for i in kept], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("rewards must be finite; give None for a completion without a score")
    return kept, values


def _can_not_teach(values: NDArray[np.float64]) -> bool:
    # Compared, not subtracted: the mean of equal floats is not always equal to them.
    return len(values) < 2 or bool(values.min() == values.max())


def _mean_of_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return (values.sum() - values) / (len(values) - 1)


def _spread(size: int, kept: Sequence[int], values: NDArray[np.float64] | float) -> NDArray[np.float32]:
    spread = np.full(size, np.nan, dtype=np.float32)
    spread[list(kept)] = values
    return spread
