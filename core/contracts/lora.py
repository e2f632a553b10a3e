"""What a job may set about the shape of its adapter. Every default says why."""

import math
from typing import Literal, Self, TypeVar

from pydantic import Field, model_validator

from core.contracts.base import Contract

TargetModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALL_LINEAR: tuple[TargetModule, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_RANK = 512
N = TypeVar("N", int, float)


class RankBudget(Contract):
    """Ranks that move between layers during training (in the manner of AdaLoRA, Zhang et al. 2023, arXiv:2303.10512)."""

    mean_rank: float = Field(gt=0, le=MAX_RANK, description="Active ranks a layer, on average over all adapted layers.")
    interval_steps: int = Field(
        default=10, ge=1, description="Optimizer steps between reallocations. 10: enough to average gradients over."
    )
    freeze_after: float = Field(
        default=0.7, gt=0, le=1, description="Share of the steps after which ranks stay where they are, so that the last ones settle."
    )


class LoraSettings(Contract):
    """Shape of the adapter."""

    kind: Literal["lora", "full"] = Field(
        default="lora",
        description="full: every weight of target_modules is trained itself (a dense change per layer; rank and alpha are not used). It "
        "costs full fine-tuning's memory and can't be served as an adapter.",
    )
    rank: int = Field(
        default=16,
        ge=1,
        le=MAX_RANK,
        description="Rank of the update of each layer. 16: RL carries little information a sample, so a low rank loses nothing.",
    )
    alpha: float = Field(
        default=32.0,
        gt=0,
        description="The update is scaled by alpha / rank. 32: twice the rank, the common choice for which learning rates are known.",
    )
    target_modules: tuple[TargetModule, ...] = Field(
        default=ALL_LINEAR,
        min_length=1,
        description="Layers that get an adapter. All linear ones: attention alone learns worse at the same size.",
    )
    rslora: bool = Field(
        default=False,
        description="Scale by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv:2312.03732), which keeps high ranks from learning too slowly.",
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the adapter's inputs that are zeroed in training. 0: on-policy RL does not overfit so.",
    )
    init: Literal["default", "orthogonal", "pissa"] = Field(
        default="default",
        description="default: A by Kaiming, B zero; orthogonal: A with orthonormal rows, B zero; pissa: the base's principal components "
        "(Meng et al. 2024, arXiv:2404.02948), which leave as plain LoRA of twice the rank.",
    )
    rank_pattern: dict[str, int] = Field(
        default_factory=dict[str, int],
        max_length=1000,
        description="Ranks of their own: keys end a layer's name (q_proj, layers.0.mlp.up_proj), the longest one that fits counts. 0: none "
        "there.",
    )
    alpha_pattern: dict[str, float] = Field(
        default_factory=dict[str, float], max_length=1000, description="Alphas of their own, keyed as rank_pattern."
    )
    rank_budget: RankBudget | None = Field(
        default=None, description="Let ranks move between layers within a budget; rank is then the most that one layer may have."
    )
    num_experts: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Above 1: a mixture of so many adapters, gated per layer. It trains and samples here; vLLM can't gate, so it "
        "leaves as one adapter distilled from it, with the loss told.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.target_modules)) != len(self.target_modules):
            raise ValueError("target_modules names a module twice; name each once")
        for field, values in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            for key, value in values.items():
                if not key or key.startswith(".") or key.endswith("."):
                    raise ValueError(f"{field}: {key!r} is no end of a layer's name; write q_proj or layers.0.mlp.up_proj")
                if not (0 <= value <= MAX_RANK if field == "rank_pattern" else 0 < value < math.inf):
                    raise ValueError(f"{field}[{key!r}] is {value}; give a rank from 0 to {MAX_RANK}, or an alpha above 0")
        special = [name for name, on in (
            ("rank_budget", self.rank_budget is not None), ("num_experts", self.num_experts > 1), ("init pissa", self.init == "pissa"),
            ("kind full", self.kind == "full"),
        ) if on]  # fmt: skip
        if len(special) > 1:
            raise ValueError(f"{' and '.join(special)} do not go together; choose one")
        if self.rank_budget is not None and self.rank_budget.mean_rank > self.rank:
            raise ValueError(f"rank_budget.mean_rank is {self.rank_budget.mean_rank:g}, over rank {self.rank}, the most a layer may have")
        if self.kind == "lora" and self.exported_rank > MAX_RANK:
            raise ValueError(f"the adapter would leave with rank {self.exported_rank}, over the limit of {MAX_RANK}; ask for a lower rank")
        return self

    @property
    def exported_rank(self) -> int:
        """The greatest rank of a layer in the adapter that leaves: PiSSA's has twice its rank, a mixture's its experts' together."""
        return self.max_rank * (2 if self.init == "pissa" else 1) * self.num_experts

    @property
    def max_rank(self) -> int:
        """The greatest rank that any layer may have."""
        return max([self.rank, *self.rank_pattern.values()])

    def rank_of(self, layer: str) -> int:
        """Rank of one layer, by its name within the base (`layers.0.self_attn.q_proj`)."""
        return _by_suffix(self.rank_pattern, layer, self.rank)

    def scaling_of(self, layer: str) -> float:
        """alpha / rank (Hu et al. 2021, arXiv:2106.09685, section 4.1), or alpha / sqrt(rank) with rslora."""
        rank, alpha = self.rank_of(layer), _by_suffix(self.alpha_pattern, layer, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _by_suffix(pattern: dict[str, N], layer: str, default: N) -> N:
    matching = [key for key in pattern if layer == key or layer.endswith("." + key)]
    return pattern[max(matching, key=len)] if matching else default
