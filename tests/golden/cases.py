"""Each algorithm as a job would run it: its defaults, what its rewards become, its weights and denominator; and its paper's formula."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from core.contracts import AlgorithmSettings
from engine.advantages import flow_offsets, group_advantages, leave_one_out, rewards_less_kl
from engine.types import FloatArray, LossKind, LossSettings
from tests.golden import formulas
from tests.golden.formulas import Group

MAX_TOKENS = 11
Arrays = Sequence[FloatArray]


@dataclass(frozen=True)
class Algorithm:
    """One row of docs/algorithms.md."""

    name: str
    kind: LossKind
    formula: Callable[[list[Group]], Tensor]
    on_policy: bool = False
    """Whether the formula holds on policy only."""
    value_differs: bool = False
    """Whether only the gradient is the formula's: REINFORCE's value is no estimate of anything."""

    @property
    def settings(self) -> AlgorithmSettings:
        return AlgorithmSettings.model_validate({"name": self.name})

    def advantages(self, rewards: Sequence[float], logprobs: Arrays, ref_logprobs: Arrays) -> NDArray[np.float32]:
        """As the loop makes them, from one group's rewards and logprobs at the rollout."""
        match self.name:
            case "rloo":
                return leave_one_out(rewards_less_kl(rewards, logprobs, ref_logprobs, beta=self.settings.beta))
            case "flowrl":
                return flow_offsets(rewards, logprobs, ref_logprobs, reward_scale=self.settings.reward_scale)
            case "sft" | "dpo":
                return np.zeros(len(rewards), np.float32)
            case _:
                return group_advantages(rewards, scale=self.settings.scale_advantages)

    def weight(self, num_tokens: int) -> float:
        """Of a token in a completion of so many."""
        return {"sequence": 1 / num_tokens, "token": 1.0, "constant": 1 / MAX_TOKENS, "sum": 1.0}[self.settings.loss_aggregation]

    def loss(self, lengths: Sequence[int], *, temperature: float = 1.0) -> LossSettings:
        """For a batch of completions of these lengths."""
        settings = self.settings
        denominator = sum(lengths) if settings.loss_aggregation == "token" else len(lengths) // (2 if self.name == "dpo" else 1)
        beta = settings.beta if settings.kl_in == "loss" else 0.0
        return LossSettings(
            settings.clip_low,
            settings.clip_high,
            beta,
            denominator,
            temperature,
            self.kind,
            settings.entropy_bonus,
            settings.importance_cap,
        )


ALGORITHMS = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("grpo", "clip", lambda groups: formulas.grpo(groups, beta=0.04)),
        Algorithm("dr_grpo", "clip", lambda groups: formulas.dr_grpo(groups, max_tokens=MAX_TOKENS)),
        Algorithm("dapo", "clip", formulas.dapo),
        Algorithm("gspo", "sequence_clip", formulas.gspo),
        Algorithm("cispo", "cispo", formulas.cispo),
        Algorithm("rloo", "clip", lambda groups: formulas.rloo(groups, beta=0.05), on_policy=True, value_differs=True),
        Algorithm("flowrl", "flow", formulas.flowrl),
        Algorithm("sft", "sft", formulas.sft),
        Algorithm("dpo", "dpo", formulas.dpo),
    )
}
