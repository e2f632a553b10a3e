"""Fine-tuning jobs on the wire: OpenAI's own fields, and this project's settings beside them."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, StringConstraints, model_validator

from core.contracts import AlgorithmSettings, Contract, Grader, Hyperparameters, JobStatus, LoraSettings, OptimizerSettings, RolloutSettings

Metadata = Annotated[
    dict[Annotated[str, StringConstraints(min_length=1, max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=16),
]


class ReinforcementCreate(Contract):
    """`method.reinforcement`."""

    grader: Grader = Field(description="What turns a completion into a reward.")
    hyperparameters: Hyperparameters | None = Field(default=None, description="OpenAI's own settings; default all auto.")
    response_format: dict[str, Any] | None = Field(default=None, description="Not supported: rollouts are not constrained.")

    @model_validator(mode="after")
    def _unconstrained(self) -> Self:
        if self.response_format is not None:
            raise ValueError("response_format is not supported: rollouts are not constrained to a schema; reward the format in the grader")
        return self


class Method(Contract):
    """`method`."""

    type: Literal["supervised", "dpo", "reinforcement"] = Field(description="reinforcement is the one that this platform trains.")
    reinforcement: ReinforcementCreate | None = None
    supervised: dict[str, Any] | None = None
    dpo: dict[str, Any] | None = None


class JobCreate(Contract):
    """The body that submits a job."""

    model: str = Field(min_length=1, max_length=256, description="The base model, or an adapter of the project to continue from.")
    training_file: str = Field(min_length=1, max_length=128, description="Id of a file with purpose fine-tune.")
    validation_file: str | None = Field(default=None, min_length=1, max_length=128, description="Id of a file to evaluate on.")
    suffix: str | None = Field(default=None, min_length=1, max_length=64, description="Name of the adapter that the job makes.")
    seed: int | None = Field(default=None, ge=0, lt=2**31, description="Fixes the job's randomness; default one is chosen and shown.")
    metadata: Metadata | None = Field(default=None, description="At most 16 pairs of your own.")
    integrations: list[dict[str, Any]] | None = Field(default=None, description="None is supported.")
    method: Method | None = Field(default=None, description="How to train.")
    hyperparameters: dict[str, Any] | None = Field(default=None, description="OpenAI's old place of them; use method's.")

    lora: LoraSettings | None = Field(default=None, description="Shape of the adapter; default rank 16 on all linear layers.")
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings, description="The objective.")
    rollout: RolloutSettings = Field(default_factory=RolloutSettings, description="How completions are sampled.")
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings, description="AdamW.")
    checkpoint_interval: int = Field(default=5, ge=1, le=100_000, description="Optimizer steps between checkpoints.")
    num_steps: int | None = Field(default=None, ge=1, le=100_000, description="Optimizer steps; default n_epochs over the file.")
    start_from: str | None = Field(
        default=None, min_length=1, max_length=256, description="Adapter of the project that training continues from; or name it as model."
    )


class JobError(BaseModel):
    """Why a job failed."""

    code: str
    message: str
    param: str | None


class JobObject(BaseModel):
    """A job."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    error: JobError | None
    fine_tuned_model: str | None
    hyperparameters: dict[str, Any]
    model: str
    organization_id: str
    result_files: list[str] = []
    seed: int
    status: JobStatus
    trained_tokens: int | None
    training_file: str
    validation_file: str | None
    method: dict[str, Any]
    metadata: dict[str, str] | None
    integrations: list[dict[str, Any]] = []
    suffix: str | None
    lora: LoraSettings
    algorithm: AlgorithmSettings
    rollout: RolloutSettings
    optimizer: OptimizerSettings
    checkpoint_interval: int
    num_steps: int | None
    start_from: str | None


class EventObject(BaseModel):
    """Something that happened to a job."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]


class CheckpointObject(BaseModel):
    """A point of a job whose adapter can be served."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    step_number: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    metrics: dict[str, float]
