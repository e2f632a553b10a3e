"""What it costs that a mixture of adapters leaves as one: servers can't gate."""

from collections.abc import Sequence

import numpy as np

from engine.types import TrainGroup, Verbs


def distilled_kl(verbs: Verbs, adapter_id: str, groups: Sequence[TrainGroup], *, temperature: float) -> float:
    """Mean KL per token from the policy to the adapter that `save` gives, nats; 0 where they are the same.

    Args:
        groups: completions that the policy sampled at this temperature (the estimate is over its own tokens).
    Source: the k3 estimate of Schulman 2020, "Approximating KL divergence": mean of exp(d) - 1 - d with d = log q - log p, unbiased and
    never below 0.
    """
    policy = verbs.forward(adapter_id, groups, temperature=temperature)
    left = verbs.forward(adapter_id, groups, temperature=temperature, exported=True)
    gaps = [theirs - ours for group in zip(left, policy, strict=True) for theirs, ours in zip(*group, strict=True)]
    gap = np.concatenate([*gaps, np.zeros(0, np.float32)]).astype(np.float64)
    return float(np.mean(np.expm1(gap) - gap)) if len(gap) else 0.0
