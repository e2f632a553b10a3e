"""The papers' objectives in plain loops over one completion at a time, for float64 tensors. Nothing of the engine is called here.

Each takes groups (one prompt's completions) and gives -J, or L where the paper has a loss; a paper's expectation over prompts is the mean
over groups.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-4
"""Added to the standard deviation, as the engine says it does."""


@dataclass
class Group:
    """One prompt's completions: per completion a tensor of its tokens' logprobs."""

    new: list[Tensor]
    old: list[Tensor]
    ref: list[Tensor]
    rewards: list[float]

    @property
    def size(self) -> int:
        return len(self.new)

    @property
    def normalised(self) -> list[float]:
        """(r - mean) / (sample standard deviation + eps)."""
        mean = sum(self.rewards) / self.size
        std = math.sqrt(sum((reward - mean) ** 2 for reward in self.rewards) / (self.size - 1))
        return [(reward - mean) / (std + EPS) for reward in self.rewards]

    @property
    def centred(self) -> list[float]:
        mean = sum(self.rewards) / self.size
        return [reward - mean for reward in self.rewards]


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def k3(new: Tensor, ref: Tensor) -> Tensor:
    quotient = torch.exp(ref - new)
    return quotient - torch.log(quotient) - 1


def grpo(groups: list[Group], *, beta: float) -> Tensor:
    """arXiv:2402.03300, eq. 3 with eq. 4's estimate times the ratio (decision 0008); eps 0.2."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for i, advantage in enumerate(group.normalised):
            ratio = torch.exp(group.new[i] - group.old[i])
            terms = clipped(ratio, advantage, 0.2, 0.2) - beta * ratio * k3(group.new[i], group.ref[i])
            total = total + terms.sum() / len(terms) / group.size / len(groups)
    return -total


def dr_grpo(groups: list[Group], *, max_tokens: int) -> Tensor:
    """arXiv:2503.20783, section 3.2: neither 1 / |o| nor 1 / std; its listing divides the sum over tokens by a constant."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for i, advantage in enumerate(group.centred):
            total = total + clipped(torch.exp(group.new[i] - group.old[i]), advantage, 0.2, 0.2).sum() / max_tokens / group.size
    return -total / len(groups)


def dapo(groups: list[Group]) -> Tensor:
    """arXiv:2503.14476, eq. 8, over all tokens of the batch; eps 0.2 and 0.28."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        for i, advantage in enumerate(group.normalised):
            total = total + clipped(torch.exp(group.new[i] - group.old[i]), advantage, 0.2, 0.28).sum()
            tokens += len(group.new[i])
    return -total / tokens


def gspo(groups: list[Group], *, low: float = 3e-4, high: float = 4e-4) -> Tensor:
    """arXiv:2507.18071, eq. 5 to 7: s = (pi(y) / pi_old(y)) ** (1 / |y|)."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        for i, advantage in enumerate(group.normalised):
            ratio = (torch.exp(group.new[i].sum()) / torch.exp(group.old[i].sum())) ** (1 / len(group.new[i]))
            total = total + clipped(ratio, advantage, low, high) / group.size / len(groups)
    return -total


def cispo(groups: list[Group], *, high: float = 4.0) -> Tensor:
    """arXiv:2506.13585, eq. 4 and 5, no bound below."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        for i, advantage in enumerate(group.normalised):
            weight = torch.clamp(torch.exp(group.new[i] - group.old[i]), max=1 + high).detach()
            total = total + (weight * advantage * group.new[i]).sum()
            tokens += len(group.new[i])
    return -total / tokens


def rloo(groups: list[Group], *, beta: float) -> Tensor:
    """arXiv:2402.14740, section 2.2, on policy: (R_i - mean of the others' R) * log pi(y_i), R = r - beta * log(pi / pi_ref)."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        returns = [
            reward - beta * float((new - ref).sum().detach()) for reward, new, ref in zip(group.rewards, group.new, group.ref, strict=True)
        ]
        for i, own in enumerate(returns):
            others = (sum(returns) - own) / (group.size - 1)
            total = total + (own - others) * group.new[i].sum() / group.size / len(groups)
    return -total


def flowrl(groups: list[Group], *, reward_scale: float = 15.0, eps: float = 0.2) -> Tensor:
    """arXiv:2509.15207, eq. 6; log Z from the group's other completions at the policy that sampled, the weight a geometric mean."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        target = [reward_scale * r_hat + float(ref.mean()) for r_hat, ref in zip(group.normalised, group.ref, strict=True)]
        for i in range(group.size):
            log_z = sum(target[j] - float(group.old[j].mean()) for j in range(group.size) if j != i) / (group.size - 1)
            weight = torch.clamp(torch.exp((group.new[i] - group.old[i]).mean()), 1 - eps, 1 + eps).detach()
            total = total + weight * (log_z + group.new[i].mean() - target[i]) ** 2 / group.size / len(groups)
    return total


def sft(groups: list[Group]) -> Tensor:
    """Mean negative logprob of all answers' tokens."""
    tokens = torch.cat([new for group in groups for new in group.new])
    return -tokens.sum() / len(tokens)


def dpo(groups: list[Group], *, beta: float = 0.1) -> Tensor:
    """arXiv:2305.18290, eq. 7: the first completion is the chosen one."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        chosen, rejected = (group.new[i].sum() - group.ref[i].sum() for i in (0, 1))
        total = total - torch.log(1 / (1 + torch.exp(-beta * (chosen - rejected))))
    return total / len(groups)
