"""Fine-tuning jobs on the wire: OpenAI's own fields, and this project's settings beside them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, Field, StringConstraints, model_validator

from core.contracts import (
    Contract,
    DpoHyperparameters,
    Grader,
    Hyperparameters,
    JobSettings,
    JobStatus,
    LoraSettings,
    SupervisedHyperparameters,
)

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


class SupervisedCreate(Contract):
    """`method.supervised`: rows end with the assistant's message, which is what is learned."""

    hyperparameters: SupervisedHyperparameters | None = Field(default=None, description="OpenAI's own settings; default all auto.")


class DpoCreate(Contract):
    """`method.dpo`: rows are {input: {messages}, preferred_output: [message], non_preferred_output: [message]}."""

    hyperparameters: DpoHyperparameters | None = Field(default=None, description="OpenAI's own settings; default all auto.")


MethodType = Literal["supervised", "dpo", "reinforcement"]
ALGORITHM_OF: Mapping[str, str] = {"supervised": "sft", "dpo": "dpo"}
"""Methods that are one algorithm."""


class Method(Contract):
    """`method`."""

    type: MethodType = Field(description="reinforcement samples and grades; supervised and dpo learn from what the file holds.")
    reinforcement: ReinforcementCreate | None = None
    supervised: SupervisedCreate | None = None
    dpo: DpoCreate | None = None


class JobCreate(JobSettings):
    """The body that submits a job."""

    model: str = Field(min_length=1, max_length=256, description="The base model, or an adapter of the project to start from.")
    training_file: str = Field(min_length=1, max_length=128, description="Id of a file with purpose fine-tune.")
    validation_file: str | None = Field(default=None, min_length=1, max_length=128, description="Id of a file to evaluate on.")
    suffix: str | None = Field(default=None, min_length=1, max_length=64, description="Name of the adapter that the job makes.")
    seed: int | None = Field(default=None, ge=0, lt=2**31, description="Fixes the job's randomness; default one is chosen and shown.")
    metadata: Metadata | None = Field(default=None, description="At most 16 pairs of your own.")
    integrations: list[dict[str, Any]] | None = Field(default=None, description="None is supported.")
    method: Method | None = Field(default=None, description="How to train.")
    hyperparameters: dict[str, Any] | None = Field(default=None, description="OpenAI's old place of them; use method's.")
    lora: LoraSettings | None = Field(default=None, description="Shape of the adapter; default rank 16 on all linear layers.")
    start_from: str | None = Field(
        default=None, min_length=1, max_length=256, description="Adapter of the project that training starts from; or name it as model."
    )

    @model_validator(mode="before")
    @classmethod
    def _algorithm_of_the_method(cls, data: Any) -> Any:
        """supervised and dpo need not name their algorithm, and dpo's beta may stand in OpenAI's own place."""
        if not isinstance(data, dict):
            return data
        body = cast("dict[str, Any]", data)
        method, algorithm = body.get("method"), body.get("algorithm", {})
        name = ALGORITHM_OF.get(str(method.get("type"))) if isinstance(method, dict) else None
        if name is None or not isinstance(algorithm, dict):
            return body
        beta = _at(method, "dpo", "hyperparameters", "beta") if name == "dpo" else None
        own = {"beta": beta} if isinstance(beta, int | float) else {}
        return {**body, "algorithm": {"name": name, **own, **cast("dict[str, Any]", algorithm)}}


def _at(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


class JobError(BaseModel):
    """Why a job failed."""

    code: str
    message: str
    param: str | None


class OpenaiJob(BaseModel):
    """A job as OpenAI has it."""

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


class JobObject(JobSettings, OpenaiJob):
    """A job, with this project's settings beside OpenAI's fields."""

    lora: LoraSettings
    start_from: str | None
    start_lora: LoraSettings | None
    guidance: list[str] = Field(description="What is proposed for such a job, known once its files are validated; nothing is imposed.")


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
