"""Losses over packed completion tokens.

Dimensions: N completion tokens of the (micro-)batch, packed, no padding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.types import LossSettings


def grpo_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor | None,
    ref_logprobs_N: Tensor | None,
    advantages_N: Tensor,
    *,
    weights_N: Tensor,
    clip_low: float,
    clip_high: float,
    beta: float,
    denominator: float,
) -> tuple[Tensor, dict[str, float]]:
    """Clipped group-relative policy loss over packed completion tokens.

    The KL term is the k3 estimate (eq. 4) times the policy ratio. On policy the ratio is 1, so the value is the paper's; but the gradient
    is that of KL(policy || reference), which eq. 4 differentiated by itself does not give: that yields KL(reference || policy)'s, since
    the tokens' own distribution depends on the policy too.

    Args:
        logprobs_N: log pi_theta at the sampling temperature, nats, float32; the only input with a gradient.
        old_logprobs_N: the same under the policy that sampled, nats; None when that is the policy itself (ratio exactly 1).
        ref_logprobs_N: the same under the reference policy, nats; None when beta is 0.
        advantages_N: reward minus group mean, over group std where the algorithm scales; unitless.
        weights_N: what each token counts in the sum: 1 / its completion's length (eq. 3), or 1 (mean over tokens).
        clip_low, clip_high: ratio is clipped to [1 - clip_low, 1 + clip_high].
        beta: weight of the KL term.
        denominator: number that the weighted sum is divided by; completions or tokens of the global batch.
    Returns:
        (loss, metrics): a scalar, and detached token means: ratio, clip_fraction (tokens whose gradient the clip cut), kl (k3, nats).
    Raises:
        ValueError: shapes differ, beta without reference logprobs, or a denominator that is not above 0.
    Source: Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4; asymmetric clip from arXiv:2503.14476; the ratio on k3 as
        in DeepSeek-V3.2, arXiv:2512.02556.
    """
    others = [tensor for tensor in (old_logprobs_N, ref_logprobs_N, advantages_N, weights_N) if tensor is not None]
    if any(tensor.shape != logprobs_N.shape for tensor in others) or logprobs_N.dim() != 1:
        raise ValueError(f"all inputs need one shape [N]; got {[tuple(tensor.shape) for tensor in (logprobs_N, *others)]}")
    if beta > 0 and ref_logprobs_N is None:
        raise ValueError("beta is above 0, so ref_logprobs_N is needed")
    if not denominator > 0:
        raise ValueError(f"denominator is {denominator}; it must be above 0")
    ratio_N = torch.exp(logprobs_N - (logprobs_N.detach() if old_logprobs_N is None else old_logprobs_N))
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    loss_N = -torch.minimum(plain_N, clipped_N)
    kl_N = torch.zeros_like(loss_N)
    if ref_logprobs_N is not None:
        gap_N = ref_logprobs_N - logprobs_N
        kl_N = torch.expm1(gap_N) - gap_N
        if beta > 0:
            loss_N = loss_N + beta * ratio_N * kl_N
    count = max(1, logprobs_N.numel())
    metrics = {
        "ratio": float(ratio_N.detach().sum()) / count,
        "clip_fraction": float((clipped_N < plain_N).sum()) / count,
        "kl": float(kl_N.detach().sum()) / count,
    }
    return (loss_N * weights_N).sum() / denominator, metrics


@dataclass(frozen=True)
class LossInputs:
    """One op's rows of a micro-batch, packed; completions are never split.

    N = completion tokens. See `engine.types.TrainGroup` for what each is.
    """

    logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    lengths: tuple[int, ...]
    old_N: Tensor | None = None
    ref_N: Tensor | None = None
    sampler_N: Tensor | None = None
    entropies_N: Tensor | None = None


def packed_loss(inputs: LossInputs, settings: LossSettings) -> tuple[Tensor, dict[str, float]]:
    """The loss that the settings name and its detached token means."""
    loss, means = grpo_loss(
        inputs.logprobs_N, inputs.old_N, inputs.ref_N, inputs.advantages_N, weights_N=inputs.weights_N, clip_low=settings.clip_low,
        clip_high=settings.clip_high, beta=settings.beta, denominator=settings.denominator,
    )  # fmt: skip
    if inputs.entropies_N is not None:
        means["entropy"] = float(inputs.entropies_N.detach().mean())
    return loss, means
