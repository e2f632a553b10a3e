"""Jobs as the wire shows them."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.openai.job_schemas import JobError, JobObject
from core.contracts import TERMINAL, JobSpec, JobStatus
from core.scope import Scope
from core.tables import Adapter, AdapterVersion, Job
from registry.names import fine_tuned_name


def public_names(session: Session, scope: Scope, version_ids: list[str]) -> dict[str, str]:
    """Immutable public names of adapter versions of the project, by the version's id."""
    statement = (
        scope.select(Adapter)
        .join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
        .where(AdapterVersion.id.in_(version_ids))
        .with_only_columns(AdapterVersion.id, Adapter.name, AdapterVersion.digest)
    )
    return {row[0]: fine_tuned_name(scope.project, row[1], row[2]) for row in session.execute(statement)}


def to_object(session: Session, scope: Scope, job: Job) -> JobObject:
    """One job."""
    return to_objects(session, scope, [job])[0]


def to_objects(session: Session, scope: Scope, jobs: list[Job]) -> list[JobObject]:
    """Several jobs, with one query for the names of what they made."""
    names = public_names(session, scope, [job.adapter_version_id for job in jobs if job.adapter_version_id is not None])
    return [_to_object(job, names) for job in jobs]


def _to_object(job: Job, names: dict[str, str]) -> JobObject:
    spec, status = JobSpec.model_validate(job.spec), JobStatus(job.status)
    hyperparameters = spec.hyperparameters.model_dump(mode="json", exclude_none=True)
    failed = job.error_code is not None
    return JobObject(
        id=job.id,
        created_at=int(job.created_at),
        finished_at=None if job.finished_at is None else int(job.finished_at),
        estimated_finish=None if job.estimated_finish is None else int(job.estimated_finish),
        error=JobError(code=job.error_code or "", message=job.error_message or "", param=job.error_param) if failed else None,
        fine_tuned_model=names.get(job.adapter_version_id or ""),
        hyperparameters={name: hyperparameters[name] for name in ("n_epochs", "batch_size", "learning_rate_multiplier")},
        model=spec.base_model,
        organization_id=job.tenant_id,
        seed=spec.seed,
        status=status,
        trained_tokens=job.trained_tokens if status in TERMINAL else None,
        training_file=job.training_file_id,
        validation_file=job.validation_file_id,
        method=_method(spec, hyperparameters),
        metadata=job.request_metadata or None,
        suffix=job.suffix,
        lora=spec.lora,
        start_from=spec.start_from,
        start_lora=spec.start_lora,
        guidance=(job.report or {}).get("guidance", []),
        **spec.shared(),
    )


def _method(spec: JobSpec, hyperparameters: dict[str, Any]) -> dict[str, Any]:
    if spec.reinforcement is not None:
        grader = spec.reinforcement.grader.model_dump(mode="json")
        return {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": hyperparameters}}
    if spec.algorithm.name == "dpo":
        return {"type": "dpo", "dpo": {"hyperparameters": {**hyperparameters, "beta": spec.algorithm.beta}}}
    return {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}


def owned_job(session: Session, scope: Scope, job_id: str, *, lock: bool = False) -> Job:
    """A job of the project.

    Args:
        lock: holds the row until the transaction ends, so that a worker's move and the user's do not cross.
    Raises:
        NotFound: no such job here.
    """
    job = scope.get(session, Job, job_id, what="fine-tuning job")
    if lock:
        session.execute(select(Job.id).where(Job.id == job.id).with_for_update())
        session.refresh(job)
    return job
