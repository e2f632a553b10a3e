"""Group-relative advantages.

Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2. The paper does not say which standard deviation it means; ours is the sample one
(n - 1), as in TRL, with 1e-4 added as TRL does.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EPS = 1e-4


def group_advantages(rewards: Sequence[float | None], *, scale: bool, eps: float = EPS) -> NDArray[np.float32]:
    """Reward minus the group's mean, over the group's sample standard deviation where scaled.

    Args:
        rewards: G rewards of one prompt's completions; None is excluded, as if it had not been sampled.
        scale: divide by (standard deviation + eps).
    Returns:
        G values, unitless; 0 throughout for a dead group (all remaining rewards equal, or one remaining); NaN where excluded, so
        that one which is trained on by mistake shows.
    Raises:
        ValueError: a reward is not finite.
    """
    kept = [i for i, reward in enumerate(rewards) if reward is not None]
    values = np.array([rewards[i] for i in kept], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError("rewards must be finite; give None for a completion without a score")
    advantages = np.full(len(rewards), np.nan, dtype=np.float32)
    advantages[kept] = 0.0
    # Compared, not subtracted: the mean of equal floats is not always equal to them.
    if len(kept) < 2 or values.min() == values.max():
        return advantages
    centred = values - values.mean()
    advantages[kept] = centred / (values.std(ddof=1) + eps) if scale else centred
    return advantages


def is_dead(advantages: NDArray[np.float32]) -> bool:
    """Whether a group carries no signal: every advantage is 0 or excluded."""
    return not np.any(np.nan_to_num(advantages))
