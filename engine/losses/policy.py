"""Losses that weigh sampled tokens by their advantage: GRPO and its relatives, GSPO, CISPO.

Dimensions: N completion tokens of one op in a micro-batch, B completions.
"""

import torch
from torch import Tensor

from engine.losses.inputs import LossInputs, Terms
from engine.types import LossSettings


def clip_loss(inputs: LossInputs, settings: LossSettings) -> Terms:
    """Clipped policy loss per token: GRPO, Dr. GRPO, DAPO and RLOO, which differ in advantages, weights, denominator and bounds.

    Source: Shao et al. 2024, arXiv:2402.03300, eq. 3; asymmetric bounds from Yu et al. 2025, arXiv:2503.14476, eq. 8. Departures: the
    KL term (see `kl_terms`); RLOO's paper (arXiv:2402.14740) has no ratio and no clip, which is what this is on policy.
    """
    ratio_N = torch.exp(inputs.log_ratio_N)
    plain_N = ratio_N * inputs.advantages_N
    clipped_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high) * inputs.advantages_N
    policy_N = -torch.minimum(plain_N, clipped_N)
    return _per_token(inputs, settings, policy_N, ratio_N, clipped_N < plain_N)


def cispo_loss(inputs: LossInputs, settings: LossSettings) -> Terms:
    """Clipped importance weight, without a gradient, times advantage and logprob: no token's gradient is ever cut off.

    The loss's value is that of a log-likelihood, no estimate of the return; only its gradient means something.

    Source: MiniMax-M1 2025, arXiv:2506.13585, eq. 4 and 5. The paper has no lower bound: clip_low 1.
    """
    ratio_N = torch.exp(inputs.log_ratio_N.detach())
    weight_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    policy_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    return _per_token(inputs, settings, policy_N, ratio_N, weight_N != ratio_N)


def sequence_clip_loss(inputs: LossInputs, settings: LossSettings) -> Terms:
    """Clipped policy loss per completion, whose ratio is the geometric mean of its tokens' ratios (GSPO).

    A completion counts as much as its tokens' weights add up to: once with weights 1 / length.

    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7. Beyond it: a KL term per token, as in `clip_loss`; the weight against the
    rollout engine is of the completion too (geometric mean), since a weight per token would undo what the sequence's ratio is for.
    """
    ratio_B = torch.exp(inputs.means_B(inputs.log_ratio_N))
    advantages_B = inputs.means_B(inputs.advantages_N)
    plain_B = ratio_B * advantages_B
    clipped_B = ratio_B.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages_B
    policy_B = -torch.minimum(plain_B, clipped_B)
    sums = {"ratio": inputs.token_sum(ratio_B.detach()), "clip_fraction": inputs.token_sum((clipped_B < plain_B).to(ratio_B.dtype))}
    if settings.importance_cap is not None:
        tis_B = sequence_importance_B(inputs, settings.importance_cap)
        policy_B = tis_B * policy_B
        sums["tis_weight"] = inputs.token_sum(tis_B)
    kl_N, kl_sum = kl_terms(inputs, settings)
    total = (policy_B * inputs.sums_B(inputs.weights_N)).sum()
    return Terms(total if kl_N is None else total + (kl_N * inputs.weights_N).sum(), {**sums, "kl": kl_sum})


def kl_terms(inputs: LossInputs, settings: LossSettings) -> tuple[Tensor | None, Tensor]:
    """beta times the policy ratio times the k3 estimate, per token; None without beta.

    Differentiated by itself, k3 (eq. 4 of arXiv:2402.03300) gives the gradient of KL(reference || policy), since the tokens' own
    distribution depends on the policy too. With the ratio, which is 1 on policy, the gradient is that of KL(policy || reference),
    on policy and off. Source: DeepSeek-V3.2 2025, arXiv:2512.02556.

    Returns:
        (terms_N, detached sum of the k3 estimate itself, nats).
    """
    if inputs.ref_N is None:
        return None, inputs.logprobs_N.new_zeros(())
    gap_N = inputs.ref_N - inputs.logprobs_N
    k3_N = torch.expm1(gap_N) - gap_N
    terms_N = settings.beta * torch.exp(inputs.log_ratio_N) * k3_N if settings.beta > 0 else None
    return terms_N, k3_N.detach().sum()


def sequence_importance_B(inputs: LossInputs, cap: float) -> Tensor:
    """Trainer / rollout engine probability of a completion, geometric mean over its tokens, at most `cap`; no gradient."""
    return torch.exp(inputs.means_B(_log_importance_N(inputs))).clamp(max=cap)


def _per_token(inputs: LossInputs, settings: LossSettings, policy_N: Tensor, ratio_N: Tensor, clipped_N: Tensor) -> Terms:
    sums = {"ratio": ratio_N.detach().sum(), "clip_fraction": clipped_N.sum()}
    if settings.importance_cap is not None:
        # Truncated importance sampling, Yao et al. 2025: on the policy term only, whose expectation is the sampler's.
        tis_N = torch.exp(_log_importance_N(inputs)).clamp(max=settings.importance_cap)
        policy_N = tis_N * policy_N
        sums["tis_weight"] = tis_N.sum()
    kl_N, kl_sum = kl_terms(inputs, settings)
    loss_N = policy_N if kl_N is None else policy_N + kl_N
    return Terms((loss_N * inputs.weights_N).sum(), {**sums, "kl": kl_sum})


def _log_importance_N(inputs: LossInputs) -> Tensor:
    if inputs.sampler_N is None:
        raise ValueError("importance_cap is set, so sampler_N is needed")
    return (inputs.logprobs_N if inputs.old_N is None else inputs.old_N).detach() - inputs.sampler_N
