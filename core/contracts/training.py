"""What a job may set about its training, beside OpenAI's own fields. Every default says why."""

from typing import Literal, Self

from pydantic import Field, model_validator

from core.contracts.base import Contract

TargetModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALL_LINEAR: tuple[TargetModule, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraSettings(Contract):
    """Shape of the adapter."""

    rank: int = Field(
        default=16,
        ge=1,
        le=512,
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

    @model_validator(mode="after")
    def _unique(self) -> Self:
        if len(set(self.target_modules)) != len(self.target_modules):
            raise ValueError("target_modules names a module twice; name each once")
        return self

    @property
    def scaling(self) -> float:
        """alpha / rank (Hu et al. 2021, arXiv:2106.09685, section 4.1)."""
        return self.alpha / self.rank


class AlgorithmSettings(Contract):
    """The objective. GRPO as in Shao et al. 2024, arXiv:2402.03300; departures are named at the fields."""

    name: Literal["grpo"] = Field(default="grpo", description="Which objective.")
    group_size: int = Field(
        default=8, ge=2, le=256, description="Completions per prompt. 8: fewer makes the group's mean noisy, more costs in proportion."
    )
    clip_low: float = Field(
        default=0.2, gt=0, lt=1, description="The policy ratio is clipped below at 1 - clip_low. 0.2 as in PPO and the paper."
    )
    clip_high: float = Field(
        default=0.2, gt=0, description="The policy ratio is clipped above at 1 + clip_high. 0.2 as in PPO and the paper."
    )
    beta: float = Field(
        default=0.04,
        ge=0,
        le=10,
        description="Weight of the KL term against the reference policy. 0.04 as in the paper; 0 saves the reference pass.",
    )
    scale_advantages: bool = Field(default=True, description="Divide advantages by the group's standard deviation, as in the paper.")
    loss_aggregation: Literal["sequence", "token"] = Field(
        default="sequence",
        description="sequence: mean over a completion's tokens, then over completions (the paper's eq. 3); token: mean over all tokens.",
    )
    share_backbone: bool = Field(
        default=True,
        description="The reference policy is the same base with the adapter off (one copy of the base). The only mode; false is refused.",
    )

    @model_validator(mode="after")
    def _shared(self) -> Self:
        if not self.share_backbone:
            raise ValueError("share_backbone must be true: a second copy of the base for the reference is not kept")
        return self


class RolloutSettings(Contract):
    """How completions are sampled during training."""

    temperature: float = Field(
        default=1.0, gt=0, le=2, description="Sampling temperature; logprobs are taken at it on both sides. 1: the policy itself."
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Nucleus. 1: anything less samples from another distribution than the one that is trained."
    )
    max_tokens: int = Field(
        default=128, ge=1, le=32768, description="Longest completion, in tokens. Truncated completions are graded as they are."
    )
    stop: tuple[str, ...] = Field(default=(), max_length=4, description="Strings that end a completion; they are not part of it.")


class OptimizerSettings(Contract):
    """AdamW on the LoRA factors, in float32."""

    learning_rate: float = Field(
        default=1e-4,
        gt=0,
        le=1,
        description="Peak learning rate. 1e-4: LoRA wants about ten times what full fine-tuning does (LoRA Without Regret, 2025).",
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Steps over which the rate rises linearly from 0. 0: the ratio clip already tames the first steps."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="What the rate does after warm-up; linear and cosine end at 0."
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the gradient's running mean.")
    beta2: float = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="Decay of the squared gradient's running mean. 0.99: RL runs are short, 0.999 would still be warming up.",
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(default=0.0, ge=0, le=1, description="Decoupled weight decay. 0: the KL term already holds the adapter.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled so that their global norm is at most this.")


class Hyperparameters(Contract):
    """OpenAI's own fields of `method.reinforcement.hyperparameters`; "auto" takes the default that is described."""

    n_epochs: int | Literal["auto"] = Field(default="auto", description="Passes over the training file; auto: 1.")
    batch_size: int | Literal["auto"] = Field(
        default="auto", description="Prompts per optimizer step; auto: 8 (or the whole file when it is smaller)."
    )
    learning_rate_multiplier: float | Literal["auto"] = Field(default="auto", description="Multiplies optimizer.learning_rate; auto: 1.")
    compute_multiplier: float | Literal["auto"] = Field(
        default="auto", description="Multiplies algorithm.group_size (rounded, at least 2); auto: 1."
    )
    eval_interval: int | Literal["auto"] = Field(default="auto", description="Steps between evaluations on the validation file; auto: 10.")
    eval_samples: int | Literal["auto"] = Field(
        default="auto", description="Prompts of the validation file per evaluation; auto: 32 (greedy, one completion each)."
    )
    reasoning_effort: Literal["default", "low", "medium", "high"] | None = Field(
        default=None, description="Accepted for the wire's sake; base models here have no such switch, so only default is allowed."
    )

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for name, low, high in (
            ("n_epochs", 1, 1000), ("batch_size", 1, 1024), ("eval_interval", 1, 100_000), ("eval_samples", 1, 10_000),
            ("learning_rate_multiplier", 1e-4, 1e4), ("compute_multiplier", 0.25, 16),
        ):  # fmt: skip
            value = getattr(self, name)
            if value != "auto" and not low <= value <= high:
                raise ValueError(f"{name} is {value}; give a number from {low} to {high}, or auto")
        if self.reasoning_effort not in (None, "default"):
            raise ValueError("reasoning_effort is not a setting of this platform's base models; leave it out")
        return self
