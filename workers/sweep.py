"""Finds what lost its message or its holder, and wakes a worker for it. It asks SQL, so a broker that forgot all costs one sweep."""

import logging

from sqlalchemy import exists, literal, select

from core import leases
from core.clock import now_s
from core.contracts import TERMINAL, JobStatus
from core.db import after_commit, session_scope
from core.tables import Checkpoint, Job, Lease
from workers.checkpoints import delete_states
from workers.context import RUN_JOB, SWEEP, VALIDATE_JOB, Context, TaskName

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""A job younger than this has its first message still on the way."""
MAX_PER_SWEEP = 200
_TASKS: dict[JobStatus, TaskName] = {
    JobStatus.VALIDATING_FILES: VALIDATE_JOB, JobStatus.QUEUED: RUN_JOB, JobStatus.RUNNING: RUN_JOB, JobStatus.PAUSING: RUN_JOB,
}  # fmt: skip


def sweep(context: Context, *, grace_s: float = GRACE_S) -> list[str]:
    """Wakes a worker for each job that should be worked on and has no live holder, oldest first.

    A job that waits for a free worker is not sent at every sweep: a lease of its own spaces the messages, else a long queue of jobs
    would fill the broker.

    Returns:
        Ids of the jobs that were dispatched.
    """
    settings = context.settings
    spacing_s = max(settings.lease_ttl_s, 3 * settings.sweep_interval_s)
    dispatched: list[str] = []
    now = now_s()
    live = exists().where(Lease.resource.in_([literal("job/").concat(Job.id), literal("dispatch/").concat(Job.id)]), Lease.expires_at > now)
    with session_scope() as session:
        waiting = select(Job.id, Job.status).where(Job.status.in_(_TASKS), Job.created_at < now - grace_s, ~live)
        for job_id, status in session.execute(waiting.order_by(Job.created_at).limit(MAX_PER_SWEEP)):
            if leases.acquire(session, f"dispatch/{job_id}", SWEEP, ttl_s=spacing_s) is None:
                continue
            after_commit(session, lambda task=_TASKS[JobStatus(status)], job_id=job_id: context.send(task, job_id))
            dispatched.append(job_id)
        # A job that was cancelled while it was paused, or failed because its workers died, had no holder to clean up after it.
        ended = (
            select(Checkpoint.job_id)
            .join(Job, Checkpoint.job_id == Job.id)
            .where(Job.status.in_(TERMINAL), Checkpoint.state_key.is_not(None))
        )
        for job_id in session.scalars(ended.distinct().limit(MAX_PER_SWEEP)).all():
            delete_states(session, context.store, job_id)
    if dispatched:
        log.info("dispatched %s", ", ".join(dispatched))
    return dispatched


def wake_next(context: Context) -> str | None:
    """Dispatches the job that has waited longest; call it when a worker has become free, so that the queue need not wait for a sweep."""
    with session_scope(readonly=True) as session:
        live = exists().where(Lease.resource == literal("job/").concat(Job.id), Lease.expires_at > now_s())
        job_id = session.scalar(select(Job.id).where(Job.status == JobStatus.QUEUED, ~live).order_by(Job.created_at).limit(1))
    if job_id is not None:
        context.send(RUN_JOB, job_id)
    return job_id
