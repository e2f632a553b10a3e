"""Where an adapter version came from, stored with it for good."""

from typing import Annotated

from pydantic import Field

from core.contracts.base import Contract
from core.contracts.job import JobSpec

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Lineage(Contract):
    """Everything needed to say why an adapter answers as it does, and to make it again."""

    job_id: str | None = Field(description="Job that trained it; null for an adapter that was brought in ready-made.")
    training_file_sha256: Sha256 | None = Field(default=None, description="Content of the training file.")
    validation_file_sha256: Sha256 | None = Field(default=None, description="Content of the validation file.")
    base_model: str = Field(description="Name of the base model.")
    base_model_digest: str = Field(description="Digest of the base's weights and config, as the engine reported it.")
    spec: JobSpec | None = Field(default=None, description="All settings of the job.")
    code_revision: str = Field(description="Version of this software, and its commit where known.")
    parent_digest: Sha256 | None = Field(default=None, description="Adapter version that training started from.")
    step: int = Field(ge=0, description="Optimizer steps that made it.")
