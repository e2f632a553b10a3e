"""What a job may set about its objective. Defaults are each paper's own; departures are named in `engine.losses`."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from core.contracts.base import Contract

AlgorithmName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "flowrl", "sft", "dpo"]

PAPER_DEFAULTS: dict[str, dict[str, object]] = {
    # Shao et al. 2024, arXiv:2402.03300.
    "grpo": {},
    # Liu et al. 2025, arXiv:2503.20783: no division by length or by the standard deviation, no KL.
    "dr_grpo": {"scale_advantages": False, "loss_aggregation": "constant", "beta": 0.0},
    # Yu et al. 2025, arXiv:2503.14476: clip-higher, dynamic sampling, token-level loss, soft overlong punishment, no KL.
    "dapo": {"clip_high": 0.28, "loss_aggregation": "token", "beta": 0.0, "dynamic_sampling": True, "overlong_buffer_share": 0.2},
    # Zheng et al. 2025, arXiv:2507.18071, section 5.1.
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "beta": 0.0},
    # MiniMax-M1 2025, arXiv:2506.13585: weights clipped above only (1 - clip_low is 0), token-level, no KL. It gives no upper bound;
    # 5, as 1 + clip_high, is ScaleRL's (arXiv:2510.13786).
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "loss_aggregation": "token", "beta": 0.0},
    # Ahmadian et al. 2024, arXiv:2402.14740: REINFORCE with a leave-one-out baseline, KL in the reward.
    "rloo": {"scale_advantages": False, "loss_aggregation": "sum", "beta": 0.05, "kl_in": "reward"},
    # Zhu et al. 2025, arXiv:2509.15207: matches exp(reward_scale * r), length-normalised, importance weight clipped.
    "flowrl": {"beta": 0.0},
    "sft": {"loss_aggregation": "token", "beta": 0.0, "group_size": 1},
    # Rafailov et al. 2023, arXiv:2305.18290.
    "dpo": {"beta": 0.1, "group_size": 2, "loss_aggregation": "sum"},
}
WITH_REFERENCE_ALWAYS = frozenset({"flowrl", "dpo"})


class AlgorithmSettings(Contract):
    """The objective. What is not given takes the default of the named algorithm's paper."""

    name: AlgorithmName = Field(
        default="grpo",
        description="Which objective: grpo, dr_grpo, dapo, gspo, cispo, rloo, flowrl (all sample and grade), sft (reference answers), "
        "dpo (pairs). The defaults below are grpo's; docs/algorithms.md lists the others'.",
    )
    group_size: int = Field(
        default=8, ge=1, le=256, description="Completions per prompt. 8: fewer makes the group's mean noisy, more costs in proportion."
    )
    clip_low: float = Field(
        default=0.2, gt=0, le=1, description="The ratio is clipped below at 1 - clip_low. 0.2 as in PPO and the paper; 1 is no bound below."
    )
    clip_high: float = Field(default=0.2, gt=0, description="The ratio is clipped above at 1 + clip_high. 0.2 as in PPO and the paper.")
    beta: float = Field(
        default=0.04,
        ge=0,
        le=10,
        description="Weight of the KL term against the reference policy (for dpo its temperature). 0.04 as in the paper; 0 saves the "
        "reference pass.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss",
        description="loss: the k3 estimate is part of the loss; reward: beta * log(policy / reference) is taken off it.",
    )
    scale_advantages: bool = Field(default=True, description="Divide advantages by the group's standard deviation, as in the paper.")
    loss_aggregation: Literal["sequence", "token", "constant", "sum"] = Field(
        default="sequence",
        description="sequence: mean over a completion's tokens, then over completions (the paper's eq. 3); token: mean over all tokens; "
        "constant: sum over tokens by max_tokens, then mean over completions (Dr. GRPO); sum: the same without max_tokens.",
    )
    entropy_bonus: float = Field(default=0.0, ge=0, le=1, description="Weight of the policy's token entropy, which is rewarded. 0: none.")
    importance_cap: float | None = Field(
        default=None,
        gt=0,
        description="Weigh tokens by trainer / sampler probability, at most this (TIS, Yao et al. 2025); corrects rollouts by an "
        "engine of another precision. null: off. 2 is common.",
    )
    importance_mode: Literal["truncate", "reject"] = Field(
        default="truncate",
        description="truncate: the weight is cut at importance_cap; reject: tokens whose weight is outside [1 / cap, cap] are left out of "
        "loss and denominator.",
    )
    updates_per_rollout: int = Field(
        default=1, ge=1, le=64, description="Optimizer steps on the completions of one rollout. 1: strictly on policy, no old-policy pass."
    )
    dynamic_sampling: bool = Field(
        default=False, description="Replace prompts whose completions all got the same reward by others (DAPO), up to max_sampling_rounds."
    )
    max_sampling_rounds: int = Field(
        default=3,
        ge=1,
        le=20,
        description="Rollouts at most for one step of dynamic sampling. 3: bounded cost where a file is nearly solved.",
    )
    overlong_buffer_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Completions longer than (1 - share) * max_tokens lose up to 1 reward, linearly (DAPO's overlong punishment, where "
        "0.2 is the paper's). 0: none.",
    )
    mask_truncated: bool = Field(
        default=False, description="Leave completions that were cut at max_tokens out of loss and denominator (DAPO's overlong filtering)."
    )
    reward_scale: float = Field(
        default=15.0,
        gt=0,
        description="FlowRL's beta: the policy is drawn towards exp(reward_scale * normalised reward). 15 as in the paper.",
    )
    share_backbone: bool = Field(
        default=True,
        description="The reference policy is the same base with the adapter off (one copy of the base): the only mode where there is a "
        "reference. Where there is none (beta 0, as dapo's paper has it) it is false, and true is refused.",
    )

    @model_validator(mode="before")
    @classmethod
    def _paper_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {str(key): value for key, value in data.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        name = str(given.get("name", "grpo"))
        filled = {**PAPER_DEFAULTS.get(name, {}), **given}
        # True is the default of what has a reference; told apart from a wish, which is refused below where there is none.
        filled.setdefault("share_backbone", name in WITH_REFERENCE_ALWAYS or filled.get("beta", 1.0) != 0)
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.uses_reference and not self.share_backbone:
            raise ValueError("share_backbone must be true: a second copy of the base for the reference is not kept")
        if self.share_backbone and not self.uses_reference:
            raise ValueError(f"share_backbone is true, but {self.name} with beta 0 has no reference policy; leave share_backbone out")
        if self.group_size < 2 and self.name != "sft":
            raise ValueError("group_size is 1; an advantage needs at least 2 completions to compare")
        if self.importance_mode == "reject" and not (self.importance_cap or 0.0) > 1:
            raise ValueError("importance_mode reject keeps weights in [1 / importance_cap, importance_cap]; give an importance_cap above 1")
        if self.name in ("flowrl", "sft") and self.beta > 0:
            reason = "its target holds the reference already" if self.name == "flowrl" else "it samples nothing"
            raise ValueError(f"{self.name} has no KL term ({reason}); leave beta out")
        if self.name == "dpo" and self.beta == 0:
            raise ValueError("beta is dpo's temperature and must be above 0; 0.1 is the paper's")
        if not self.samples and self.importance_cap is not None:
            raise ValueError(f"{self.name} samples nothing, so there is no importance to cap; leave importance_cap out")
        if self.name == "dpo" and self.entropy_bonus > 0:
            raise ValueError("dpo has no entropy bonus; leave entropy_bonus out")
        if self.name == "flowrl" and self.scale_advantages is False:
            raise ValueError("flowrl normalises rewards by their group; leave scale_advantages out")
        return self

    @property
    def uses_reference(self) -> bool:
        """Whether the reference policy is computed."""
        return self.beta > 0 or self.name in WITH_REFERENCE_ALWAYS

    @property
    def samples(self) -> bool:
        """Whether training samples completions and grades them (all but sft and dpo)."""
        return self.name not in ("sft", "dpo")
