"""What a job may set about sampling, optimising, its course and its evaluation. Every default says why."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from core.contracts.base import Contract
from core.contracts.lora import TargetModule


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


class LearningRateGroup(Contract):
    """A learning rate of their own for some of the factors. The first group that matches a layer counts."""

    learning_rate: float = Field(ge=0, le=1, description="Peak learning rate of these factors; 0 freezes them. Schedule and warm-up apply.")
    target_modules: tuple[TargetModule, ...] = Field(default=(), description="Module kinds, e.g. the attention's four; empty: every kind.")
    first_layer: int = Field(default=0, ge=0, description="First decoder layer, 0 for the lowest.")
    last_layer: int | None = Field(default=None, ge=0, description="Last decoder layer, itself included; null: the highest.")
    part: Literal["any", "start", "new"] = Field(
        default="any", description="Of a stacked adapter: start is what training began from, new what was put over it."
    )


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
    learning_rate_groups: tuple[LearningRateGroup, ...] = Field(
        default=(), max_length=32, description="Learning rates by layer, module kind or part; what no group matches takes learning_rate."
    )


class WarmUpSettings(Contract):
    """Supervised steps before the reinforcement: cross-entropy on the reference answers of the same file."""

    steps: int = Field(default=0, ge=0, le=100_000, description="Supervised optimizer steps that come first. 0: none.")
    answer_field: str = Field(
        default="answer", min_length=1, max_length=200, description="Field beside messages that holds a row's reference answer."
    )
    batch_size: int = Field(default=8, ge=1, le=1024, description="Rows per supervised step.")
    learning_rate: float = Field(
        default=2e-4, gt=0, le=1, description="Constant rate of the warm-up. 2e-4: what supervised LoRA commonly takes."
    )


class CurriculumSettings(Contract):
    """Which rows are met how often. Rows of weight w are drawn w times as often as rows of weight 1."""

    mode: Literal["none", "difficulty", "pass_rate"] = Field(
        default="none",
        description="none: every row once an epoch; difficulty: easy rows first, by a field of the file; pass_rate: rows that the policy "
        "always or never solves are met less, by the rewards seen so far (the older ones count half as much at each visit).",
    )
    difficulty_field: str = Field(
        default="difficulty", min_length=1, max_length=200, description="Field with a number, higher is harder (mode difficulty)."
    )
    ramp: float = Field(
        default=0.5, gt=0, le=1, description="Share of the steps after which all rows are open (mode difficulty). 0.5: half of the job."
    )
    easy_above: float = Field(
        default=0.9, ge=0, le=1, description="Mean reward above which a row counts as too easy (mode pass_rate), on the grader's scale."
    )
    hopeless_below: float = Field(
        default=0.1, ge=0, le=1, description="Mean reward below which a row counts as hopeless (mode pass_rate), on the grader's scale."
    )
    min_weight: float = Field(
        default=0.2, gt=0, le=1, description="Weight of rows that are too easy or hopeless. 0.2: still met, since the policy changes."
    )

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.hopeless_below >= self.easy_above:
            raise ValueError(f"hopeless_below is {self.hopeless_below:g}, which must be below easy_above, {self.easy_above:g}")
        return self


class EvaluationSettings(Contract):
    """What the held-out rewards decide. They need a validation file."""

    early_stop_patience: int | None = Field(
        default=None, ge=1, description="Stop after so many evaluations in a row without a better one. null: never."
    )
    min_improvement: float = Field(default=0.0, ge=0, description="What a reward must gain over the best one to count as better.")
    publish: Literal["last", "best"] = Field(
        default="last", description="Which step's adapter the job ends with: the last one's, or the one with the best held-out reward."
    )


Auto = Literal["auto"]


class SupervisedHyperparameters(Contract):
    """OpenAI's own fields of `method.supervised.hyperparameters`, and this platform's two of evaluation; "auto" takes the default."""

    n_epochs: int | Auto = Field(default="auto", description="Passes over the training file; auto: 1.")
    batch_size: int | Auto = Field(
        default="auto", description="Prompts per optimizer step; auto: 8 (or the whole file when it is smaller)."
    )
    learning_rate_multiplier: float | Auto = Field(default="auto", description="Multiplies optimizer.learning_rate; auto: 1.")
    eval_interval: int | Auto = Field(default="auto", description="Steps between evaluations on the validation file; auto: 10.")
    eval_samples: int | Auto = Field(
        default="auto", description="Prompts of the validation file per evaluation; auto: 32 (greedy, one completion each)."
    )

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for name, low, high in (
            ("n_epochs", 1, 1000), ("batch_size", 1, 1024), ("eval_interval", 1, 100_000), ("eval_samples", 1, 10_000),
            ("learning_rate_multiplier", 1e-4, 1e4), ("compute_multiplier", 0.25, 16), ("beta", 1e-4, 10),
        ):  # fmt: skip
            value: Any = getattr(self, name, "auto")
            if value != "auto" and not low <= value <= high:
                raise ValueError(f"{name} is {value}; give a number from {low} to {high}, or auto")
        return self


class DpoHyperparameters(SupervisedHyperparameters):
    """OpenAI's own fields of `method.dpo.hyperparameters`."""

    beta: float | Auto = Field(default="auto", description="The same as algorithm.beta; auto: 0.1.")


class Hyperparameters(SupervisedHyperparameters):
    """OpenAI's own fields of `method.reinforcement.hyperparameters`."""

    compute_multiplier: float | Auto = Field(default="auto", description="Multiplies algorithm.group_size (rounded, at least 2); auto: 1.")
    reasoning_effort: Literal["default", "low", "medium", "high"] | None = Field(
        default=None, description="Accepted for the wire's sake; base models here have no such switch, so only default is allowed."
    )

    @model_validator(mode="after")
    def _no_reasoning(self) -> Self:
        if self.reasoning_effort not in (None, "default"):
            raise ValueError("reasoning_effort is not a setting of this platform's base models; leave it out")
        return self
