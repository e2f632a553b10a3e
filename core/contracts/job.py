"""A job as it is stored: what the user asked for, validated, and what follows from it."""

import math
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from core.contracts.algorithm import AlgorithmSettings
from core.contracts.base import Contract
from core.contracts.graders import Grader
from core.contracts.lora import LoraSettings
from core.contracts.training import (
    CurriculumSettings,
    EvaluationSettings,
    Hyperparameters,
    OptimizerSettings,
    RolloutSettings,
    SupervisedHyperparameters,
    WarmUpSettings,
)


class JobStatus(StrEnum):
    """States of a job, as OpenAI names them."""

    VALIDATING_FILES = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED})


class ReinforcementSettings(Contract):
    """`method.reinforcement` of the wire."""

    grader: Grader
    hyperparameters: Hyperparameters = Field(default_factory=Hyperparameters)


class SupervisedSettings(Contract):
    """`method.supervised` and `method.dpo` of the wire."""

    hyperparameters: SupervisedHyperparameters = Field(default_factory=SupervisedHyperparameters)


class JobSettings(Contract):
    """What request, stored job and shown job have in common beside OpenAI's fields."""

    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings, description="The objective.")
    rollout: RolloutSettings = Field(default_factory=RolloutSettings, description="How completions are sampled.")
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings, description="AdamW.")
    warm_up: WarmUpSettings = Field(default_factory=WarmUpSettings, description="Supervised steps that come first.")
    curriculum: CurriculumSettings = Field(default_factory=CurriculumSettings, description="Which rows are met how often.")
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings, description="What the held-out rewards decide.")
    checkpoint_interval: int = Field(
        default=5, ge=1, le=100_000, description="Steps between checkpoints. 5: at most that much work is done twice after a crash."
    )
    num_steps: int | None = Field(
        default=None, ge=1, le=100_000, description="Steps after the warm-up, each one rollout; default n_epochs over the file."
    )
    start_mode: Literal["continue", "stack"] = Field(
        default="continue",
        description="continue: the adapter that training starts from is itself trained; stack: a new one of shape lora is put over it, "
        "and the pair leaves as one adapter of both ranks.",
    )
    start_learning_rate: float = Field(
        default=0.0, ge=0, le=1, description="Learning rate of the adapter underneath (stack); 0 keeps it as it is."
    )

    def shared(self) -> dict[str, Any]:
        """These fields, for another contract that has them."""
        return {name: getattr(self, name) for name in JobSettings.model_fields}


class JobSpec(JobSettings):
    """Everything that decides what a job computes; stored with the job and with every adapter it makes."""

    base_model: str = Field(description="Name of the base model.")
    training_file_sha256: str
    validation_file_sha256: str | None = None
    seed: int = Field(ge=0, lt=2**31)
    reinforcement: ReinforcementSettings | None = Field(default=None, description="Of algorithms that sample and grade.")
    supervised: SupervisedSettings | None = Field(default=None, description="Of sft and dpo.")
    lora: LoraSettings = Field(default_factory=LoraSettings)
    start_from: str | None = Field(
        default=None, description="Digest of the adapter version that training continues from; default a new adapter."
    )
    start_lora: LoraSettings | None = Field(default=None, description="Shape of the adapter that training starts from (stack).")

    @model_validator(mode="after")
    def _one_method(self) -> Self:
        if self.algorithm.samples != (self.reinforcement is not None) or self.algorithm.samples == (self.supervised is not None):
            wanted = "reinforcement" if self.algorithm.samples else "supervised"
            raise ValueError(f"algorithm {self.algorithm.name} takes the settings of {wanted}, and no others")
        if (self.start_mode == "stack") != (self.start_lora is not None) or (self.start_lora is not None and self.start_from is None):
            raise ValueError("stack needs start_from and start_lora, and nothing else does")
        return self

    @property
    def hyperparameters(self) -> SupervisedHyperparameters:
        """OpenAI's own settings, whatever the method."""
        method = self.reinforcement or self.supervised
        assert method is not None, "validated: one of them is there"
        return method.hyperparameters

    @property
    def grader(self) -> Grader:
        """What grades completions; sft and dpo have none."""
        assert self.reinforcement is not None, f"{self.algorithm.name} grades nothing"
        return self.reinforcement.grader

    @property
    def num_epochs(self) -> int:
        """Passes over the training file."""
        value = self.hyperparameters.n_epochs
        return 1 if value == "auto" else value

    @property
    def group_size(self) -> int:
        """Completions per prompt."""
        multiplier = self.reinforcement.hyperparameters.compute_multiplier if self.reinforcement is not None else "auto"
        return max(2, round(self.algorithm.group_size * (1.0 if multiplier == "auto" else multiplier)))

    @property
    def learning_rate(self) -> float:
        """Peak learning rate."""
        multiplier = self.hyperparameters.learning_rate_multiplier
        return self.optimizer.learning_rate * (1.0 if multiplier == "auto" else multiplier)

    @property
    def eval_interval(self) -> int:
        """Optimizer steps between evaluations."""
        value = self.hyperparameters.eval_interval
        return 10 if value == "auto" else value

    @property
    def eval_samples(self) -> int:
        """Prompts per evaluation."""
        value = self.hyperparameters.eval_samples
        return 32 if value == "auto" else value

    def prompts_per_step(self, num_rows: int) -> int:
        """Prompts per optimizer step for a file of `num_rows` rows."""
        value = self.hyperparameters.batch_size
        return min(8 if value == "auto" else value, num_rows)

    def total_steps(self, num_rows: int) -> int:
        """Steps of the whole job, the warm-up's included; the last batch of an epoch wraps into the next, so no row is dropped."""
        own = self.num_steps or max(1, math.ceil(self.num_epochs * num_rows / self.prompts_per_step(num_rows)))
        return self.warm_up.steps + own


EventLevel = Literal["info", "warn", "error"]
EventType = Literal["message", "metrics"]
