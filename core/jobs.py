"""The job state machine: the one place where a job's status is written."""

from sqlalchemy.orm import Session

from core.clock import now_s
from core.contracts.job import TERMINAL, JobStatus
from core.errors import EspalierError, IllegalTransition
from core.events import add_event
from core.tables import Job

S = JobStatus
MOVES: dict[JobStatus, frozenset[JobStatus]] = {
    S.VALIDATING_FILES: frozenset({S.QUEUED, S.FAILED, S.CANCELLED}),
    S.QUEUED: frozenset({S.RUNNING, S.PAUSED, S.FAILED, S.CANCELLED}),
    S.RUNNING: frozenset({S.PAUSING, S.SUCCEEDED, S.FAILED, S.CANCELLED}),
    S.PAUSING: frozenset({S.PAUSED, S.RUNNING, S.SUCCEEDED, S.FAILED, S.CANCELLED}),
    S.PAUSED: frozenset({S.QUEUED, S.CANCELLED}),
    S.SUCCEEDED: frozenset(),
    S.FAILED: frozenset(),
    S.CANCELLED: frozenset(),
}


def transition(session: Session, job: Job, to: JobStatus, message: str, *, error: EspalierError | None = None) -> None:
    """Moves a job and records the move as an event.

    Args:
        message: what the user reads in the job's events.
        error: why it failed; only with FAILED.
    Raises:
        IllegalTransition: the state machine has no such edge.
    """
    current = JobStatus(job.status)
    if to not in MOVES[current]:
        raise IllegalTransition(f"Job {job.id} is {current}; it can't become {to}. {_hint(current)}", param="status")
    job.status = to
    if to == JobStatus.RUNNING and job.started_at is None:
        job.started_at = now_s()
    if to in TERMINAL:
        job.finished_at = now_s()
        job.estimated_finish = None
    if error is not None:
        job.error_code, job.error_message, job.error_param = error.code, error.message, error.param
    add_event(session, job.id, message, level="error" if to == JobStatus.FAILED else "info")


def _hint(current: JobStatus) -> str:
    if current in TERMINAL:
        return "It has ended; submit a new job."
    allowed = ", ".join(sorted(MOVES[current]))
    return f"From here it can become: {allowed}."
