"""What a loss is computed from, and sums over completions.

Dimensions: N completion tokens of one op in a micro-batch, packed, no padding; B completions of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """One op's rows of a micro-batch. A completion is never split over micro-batches, nor is a pair of dpo."""

    logprobs_N: Tensor
    """log pi_theta at the sampling temperature, nats; carries the gradient."""
    advantages_N: Tensor
    """One value per completion, on each of its tokens: an advantage, or flow's offset. Unused by sft and dpo."""
    weights_N: Tensor
    """What each token counts in the loss's sum, token factors included; 0 leaves a token out. In dpo: in its completion's sum."""
    lengths: tuple[int, ...]
    """Tokens of each completion, in packed order."""
    old_N: Tensor | None = None
    """Logprobs under the policy that sampled, nats; None when that is the policy itself (ratio exactly 1)."""
    ref_N: Tensor | None = None
    """Logprobs under the reference policy, nats."""
    sampler_N: Tensor | None = None
    """Logprobs as the rollout engine gave them, nats."""
    entropies_N: Tensor | None = None
    """Entropy of the policy where the token was drawn, nats; with a gradient where there is a bonus on it."""

    def __post_init__(self) -> None:
        optional = (self.old_N, self.ref_N, self.sampler_N, self.entropies_N)
        others = [self.advantages_N, self.weights_N, *(tensor for tensor in optional if tensor is not None)]
        if self.logprobs_N.dim() != 1 or any(tensor.shape != self.logprobs_N.shape for tensor in others):
            raise ValueError(f"all inputs need one shape [N]; got {[tuple(tensor.shape) for tensor in (self.logprobs_N, *others)]}")
        if sum(self.lengths) != len(self.logprobs_N):
            raise ValueError(f"lengths add up to {sum(self.lengths)} tokens, {len(self.logprobs_N)} are given")

    @property
    def log_ratio_N(self) -> Tensor:
        """log(pi_theta / pi_old); 0 with a gradient where the policy itself sampled."""
        return self.logprobs_N - (self.logprobs_N.detach() if self.old_N is None else self.old_N)

    def sums_B(self, values_N: Tensor) -> Tensor:
        """Sum over each completion's tokens."""
        # One sum per completion and no index_add: the order of its additions, so its last bit, would be free on an accelerator.
        parts = values_N.split(self.lengths)
        return torch.stack([part.sum() for part in parts]) if parts else values_N

    def means_B(self, values_N: Tensor) -> Tensor:
        """Mean over the tokens of each completion that count (weight not 0); 0 where none does."""
        kept_N = (self.weights_N != 0).to(values_N.dtype)
        return self.sums_B(values_N * kept_N) / self.sums_B(kept_N).clamp(min=1)

    def token_sum(self, values_B: Tensor) -> Tensor:
        """Sum over all tokens of a value that a completion's tokens share."""
        return (values_B * torch.tensor(self.lengths, dtype=values_B.dtype, device=values_B.device)).sum()


@dataclass(frozen=True)
class Terms:
    """What a family computes."""

    total: Tensor
    """Weighted sum, before the denominator."""
    sums: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Detached sums over tokens, by the metric's name."""
