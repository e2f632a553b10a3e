"""FlowRL: a policy in proportion to exp(reward), not at its maximum.

Dimensions: N completion tokens of one op in a micro-batch, B completions.
"""

import torch

from engine.losses.inputs import LossInputs, Terms
from engine.losses.policy import sequence_importance_B
from engine.types import LossSettings


def flow_loss(inputs: LossInputs, settings: LossSettings) -> Terms:
    """w * (mean logprob + offset)^2 per completion, w the clipped importance weight, without a gradient.

    `advantages_N` holds the offset, log Z - reward_scale * r_hat - mean reference logprob, constant over a completion
    (`engine.advantages.flow_offsets`). A completion counts as much as its tokens' weights add up to.

    Source: Zhu et al. 2025, arXiv:2509.15207, eq. 6. Departures: no network learns log Z, which is estimated from the group (VarGrad,
    Richter et al. 2020, arXiv:2010.10436); the importance weight is the geometric mean over tokens, as everything else in the equation
    is a mean over tokens (the product leaves any bounds after some tokens).
    """
    residual_B = inputs.means_B(inputs.logprobs_N + inputs.advantages_N)
    ratio_B = torch.exp(inputs.means_B(inputs.log_ratio_N.detach()))
    weight_B = ratio_B.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    sums = {"ratio": inputs.token_sum(ratio_B), "clip_fraction": inputs.token_sum((weight_B != ratio_B).to(ratio_B.dtype))}
    if settings.importance_cap is not None:
        tis_B = sequence_importance_B(inputs, settings.importance_cap)
        weight_B = tis_B * weight_B
        sums["tis_weight"] = inputs.token_sum(tis_B)
    return Terms((weight_B * residual_B**2 * inputs.sums_B(inputs.weights_N)).sum(), sums)
