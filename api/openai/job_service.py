"""Jobs after they were submitted: looking, cancelling, pausing, resuming."""

from typing import cast

from sqlalchemy import select

from api.openai.job_schemas import CheckpointObject, EventObject, JobObject
from api.openai.job_view import owned_job, public_names, to_object, to_objects
from api.paging import PageParams, fetch_page
from api.queue import RUN_JOB, wake
from core.contracts import EventLevel, EventType, JobStatus
from core.db import session_scope
from core.events import add_event
from core.jobs import transition
from core.scope import Scope
from core.tables import Checkpoint, Event, Job

HELD = (JobStatus.RUNNING, JobStatus.PAUSING)
"""States in which a worker holds the job; it reads the flags at every step."""


def list_jobs(scope: Scope, params: PageParams, metadata: dict[str, str]) -> tuple[list[JobObject], bool]:
    """One page of the project's jobs, those with all of the given metadata pairs."""
    statement = scope.select(Job)
    for name, value in metadata.items():
        statement = statement.where(Job.request_metadata[name].as_string() == value)
    with session_scope(readonly=True) as session:
        rows, has_more = fetch_page(session, statement, params, sort=Job.created_at, key=Job.id)
        return to_objects(session, scope, rows), has_more


def retrieve_job(scope: Scope, job_id: str) -> JobObject:
    """One job of the project."""
    with session_scope(readonly=True) as session:
        return to_object(session, scope, owned_job(session, scope, job_id))


def cancel_job(scope: Scope, job_id: str) -> JobObject:
    """Ends a job: at once where no worker holds it, else at the holder's next step. Cancelling what is cancelled changes nothing.

    Raises:
        IllegalTransition: it ended otherwise.
    """
    with session_scope() as session:
        job = owned_job(session, scope, job_id, lock=True)
        if job.status not in HELD and job.status != JobStatus.CANCELLED:
            transition(session, job, JobStatus.CANCELLED, "Job cancelled.")
        elif job.status in HELD and not job.cancel_requested:
            add_event(session, job.id, "Cancellation asked for; the job ends at its next step.")
        job.cancel_requested = True
        session.flush()
        return to_object(session, scope, job)


def pause_job(scope: Scope, job_id: str) -> JobObject:
    """Stops a job so that it can go on later: at once while it is queued, else at the holder's next step. Repeating it changes nothing.

    Raises:
        IllegalTransition: its files are still being validated, or it has ended.
    """
    with session_scope() as session:
        job = owned_job(session, scope, job_id, lock=True)
        if job.status not in (JobStatus.PAUSING, JobStatus.PAUSED):
            to = JobStatus.PAUSING if job.status == JobStatus.RUNNING else JobStatus.PAUSED
            message = "Pause asked for; the job stops at its next step." if to == JobStatus.PAUSING else "Job paused."
            transition(session, job, to, message)
        job.pause_requested = True
        session.flush()
        return to_object(session, scope, job)


def resume_job(scope: Scope, job_id: str) -> JobObject:
    """Lets a paused job go on from its checkpoint. Repeating it changes nothing.

    Raises:
        IllegalTransition: it is not paused.
    """
    with session_scope() as session:
        job = owned_job(session, scope, job_id, lock=True)
        if job.status == JobStatus.PAUSING:
            transition(session, job, JobStatus.RUNNING, "Pause taken back.")
        elif job.status not in (JobStatus.QUEUED, JobStatus.RUNNING):
            transition(session, job, JobStatus.QUEUED, "Job resumed.")
            wake(session, RUN_JOB, job.id)
        job.pause_requested = False
        session.flush()
        return to_object(session, scope, job)


def list_events(scope: Scope, job_id: str, params: PageParams) -> tuple[list[EventObject], bool]:
    """One page of a job's events."""
    with session_scope(readonly=True) as session:
        job = owned_job(session, scope, job_id)
        rows, has_more = fetch_page(session, select(Event).where(Event.job_id == job.id), params, sort=Event.seq, key=Event.id)
    items = [
        EventObject(
            id=row.id, created_at=int(row.created_at), level=cast("EventLevel", row.level), message=row.message,
            type=cast("EventType", row.type), data=row.data,
        )
        for row in rows
    ]  # fmt: skip
    return items, has_more


def list_checkpoints(scope: Scope, job_id: str, params: PageParams) -> tuple[list[CheckpointObject], bool]:
    """One page of a job's checkpoints."""
    with session_scope(readonly=True) as session:
        job = owned_job(session, scope, job_id)
        statement = select(Checkpoint).where(Checkpoint.job_id == job.id)
        rows, has_more = fetch_page(session, statement, params, sort=Checkpoint.step, key=Checkpoint.id)
        names = public_names(session, scope, [row.adapter_version_id for row in rows])
    items = [
        CheckpointObject(
            id=row.id, created_at=int(row.created_at), step_number=row.step, fine_tuned_model_checkpoint=names[row.adapter_version_id],
            fine_tuning_job_id=job_id, metrics={"step": float(row.step), **row.metrics},
        )
        for row in rows
    ]  # fmt: skip
    return items, has_more
