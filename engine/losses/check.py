"""What a loss can't be computed from, told before anything is computed."""

import math
from collections.abc import Sequence

from core.errors import InvalidInput
from engine.types import LossSettings, TrainGroup


def check_loss(groups: Sequence[TrainGroup], loss: LossSettings) -> None:
    """Holds a batch against the loss that it is for; groups are well formed in themselves (`engine.packing.check_groups`).

    Raises:
        InvalidInput: a number out of its range, a setting that the kind has no use for, a missing input, or dpo groups that are no pairs.
    """
    kind = loss.kind
    if not 0 < loss.denominator < math.inf:
        raise InvalidInput(f"denominator is {loss.denominator}; it must be above 0.", param="loss.denominator")
    if not (0 <= loss.beta < math.inf and 0 <= loss.entropy_bonus < math.inf):
        raise InvalidInput("beta and entropy_bonus must be finite and not below 0.", param="loss")
    if kind in ("flow", "sft") and loss.beta > 0:
        reason = "flow's offsets hold the reference already" if kind == "flow" else "nothing was sampled"
        raise InvalidInput(f"{kind} has no KL term ({reason}); give beta 0.", param="loss.beta")
    if kind == "dpo" and loss.beta == 0:
        raise InvalidInput("beta is dpo's temperature; with 0 nothing is learned, 0.1 is the paper's.", param="loss.beta")
    if kind == "dpo" and loss.entropy_bonus > 0:
        raise InvalidInput("dpo's weights count within a completion's sum, so it has no entropy bonus; give 0.", param="loss.entropy_bonus")
    if kind == "dpo" and not all(len(group.completions) == 2 and all(map(len, group.completions)) for group in groups):
        raise InvalidInput("A dpo group is two completions with tokens, the chosen one first.", param="groups")
    if loss.importance_cap is not None:
        if kind in ("sft", "dpo"):
            raise InvalidInput(f"{kind} samples nothing, so there is no importance to cap; leave it out.", param="loss.importance_cap")
        if not loss.importance_cap > 0:
            raise InvalidInput(f"importance_cap is {loss.importance_cap}; it must be above 0.", param="loss.importance_cap")
        if any(group.sampler_logprobs is None for group in groups):
            raise InvalidInput("importance_cap needs sampler_logprobs of every group.", param="groups.sampler_logprobs")
