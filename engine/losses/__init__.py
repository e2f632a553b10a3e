"""Losses over packed completion tokens. docs/algorithms.md says which algorithm is which loss.

Dimensions: N completion tokens of one op in a micro-batch, packed, no padding.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.losses.check import check_loss
from engine.losses.flow import flow_loss
from engine.losses.inputs import LossInputs, Terms
from engine.losses.policy import cispo_loss, clip_loss, sequence_clip_loss
from engine.losses.supervised import dpo_loss, sft_loss
from engine.types import LossKind, LossSettings

__all__ = ["LossInputs", "check_loss", "packed_loss"]

_FAMILIES: dict[LossKind, Callable[[LossInputs, LossSettings], Terms]] = {
    "clip": clip_loss,
    "sequence_clip": sequence_clip_loss,
    "cispo": cispo_loss,
    "flow": flow_loss,
    "sft": sft_loss,
    "dpo": dpo_loss,
}


def packed_loss(inputs: LossInputs, settings: LossSettings) -> tuple[Tensor, dict[str, float]]:
    """One op's part of its loss. Parts of one batch add up to the same whatever the micro-batches, since denominators are the batch's.

    An entropy bonus takes bonus * sum(weight * entropy) / denominator off the loss.

    Returns:
        (loss, metrics): a scalar with a gradient, and detached means over tokens: entropy (nats) where given, and by kind
        clip, sequence_clip, cispo: ratio (of the completion for sequence_clip), clip_fraction (tokens whose gradient the clip cut, or
            whose weight it changed), kl (k3, nats; 0 without a reference), tis_weight with importance_cap;
        flow: ratio, clip_fraction, tis_weight; sft: nll; dpo: margin, accuracy.
    Raises:
        ValueError: an input that the settings need is not there, or a denominator that is not above 0. `check_loss` says so earlier.
    """
    if not settings.denominator > 0:
        raise ValueError(f"denominator is {settings.denominator}; it must be above 0")
    if settings.beta > 0 and inputs.ref_N is None:
        raise ValueError("beta is above 0, so ref_N is needed")
    terms = _FAMILIES[settings.kind](inputs, settings)
    total, sums = terms.total, dict(terms.sums)
    if settings.entropy_bonus > 0:
        if inputs.entropies_N is None:
            raise ValueError("entropy_bonus is above 0, so entropies_N is needed")
        total = total - settings.entropy_bonus * (inputs.entropies_N * inputs.weights_N).sum()
    if inputs.entropies_N is not None:
        sums["entropy"] = inputs.entropies_N.detach().sum()
    # One transfer for all of them: each alone would wait for the device.
    values = torch.stack([value.to(total.dtype) for value in sums.values()]).tolist()
    count = max(1, inputs.logprobs_N.numel())
    return total / settings.denominator, {name: value / count for name, value in zip(sums, values, strict=True)}
