"""A job as it is stored: what the user asked for, validated, and what follows from it."""

import math
from enum import StrEnum
from typing import Literal

from pydantic import Field

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


class JobSpec(Contract):
    """Everything that decides what a job computes; stored with the job and with every adapter it makes."""

    base_model: str = Field(description="Name of the base model.")
    training_file_sha256: str
    validation_file_sha256: str | None = None
    seed: int = Field(ge=0, lt=2**31)
    reinforcement: ReinforcementSettings
    lora: LoraSettings = Field(default_factory=LoraSettings)
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    warm_up: WarmUpSettings = Field(default_factory=WarmUpSettings)
    curriculum: CurriculumSettings = Field(default_factory=CurriculumSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    checkpoint_interval: int = Field(
        default=5, ge=1, description="Optimizer steps between checkpoints. 5: at most that much work is done twice after a crash."
    )
    num_steps: int | None = Field(default=None, ge=1, le=100_000, description="Optimizer steps; default n_epochs over the file.")
    start_from: str | None = Field(
        default=None, description="Digest of the adapter version that training continues from; default a new adapter."
    )
    start_mode: Literal["continue", "stack"] = Field(
        default="continue",
        description="continue: that adapter itself is trained; stack: a new one of shape lora is put over it, and the pair leaves as one "
        "adapter of both ranks.",
    )
    start_lora: LoraSettings | None = Field(default=None, description="Shape of the adapter that training starts from (stack).")
    start_learning_rate: float = Field(
        default=0.0, ge=0, le=1, description="Learning rate of the adapter underneath (stack); 0 keeps it as it is."
    )

    @property
    def num_epochs(self) -> int:
        """Passes over the training file."""
        value = self.reinforcement.hyperparameters.n_epochs
        return 1 if value == "auto" else value

    @property
    def group_size(self) -> int:
        """Completions per prompt."""
        multiplier = self.reinforcement.hyperparameters.compute_multiplier
        return max(2, round(self.algorithm.group_size * (1.0 if multiplier == "auto" else multiplier)))

    @property
    def learning_rate(self) -> float:
        """Peak learning rate."""
        multiplier = self.reinforcement.hyperparameters.learning_rate_multiplier
        return self.optimizer.learning_rate * (1.0 if multiplier == "auto" else multiplier)

    @property
    def eval_interval(self) -> int:
        """Optimizer steps between evaluations."""
        value = self.reinforcement.hyperparameters.eval_interval
        return 10 if value == "auto" else value

    @property
    def eval_samples(self) -> int:
        """Prompts per evaluation."""
        value = self.reinforcement.hyperparameters.eval_samples
        return 32 if value == "auto" else value

    def prompts_per_step(self, num_rows: int) -> int:
        """Prompts per optimizer step for a file of `num_rows` rows."""
        value = self.reinforcement.hyperparameters.batch_size
        return min(8 if value == "auto" else value, num_rows)

    def total_steps(self, num_rows: int) -> int:
        """Optimizer steps of the whole job; the last batch of an epoch wraps into the next, so no row is dropped."""
        return self.num_steps or max(1, math.ceil(self.num_epochs * num_rows / self.prompts_per_step(num_rows)))


EventLevel = Literal["info", "warn", "error"]
EventType = Literal["message", "metrics"]
