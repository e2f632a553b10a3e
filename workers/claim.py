"""Holding a job: claim, heartbeat, and writes that only the holder can make."""

import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from core import leases
from core.contracts import JobStatus
from core.db import session_scope
from core.errors import EspalierError, LeaseLost
from core.events import add_event
from core.jobs import transition
from core.leases import Held
from core.settings import Settings
from core.tables import Job
from workers.context import holder_name

log = logging.getLogger(__name__)


class WorkerLost(EspalierError):
    """Workers died on the job as often as is allowed."""

    default_code = "worker_lost"


@dataclass(frozen=True)
class Claim:
    """A job that this worker holds now."""

    held: Held
    job: Job
    """As it was when claimed; detached."""


def resource_of(job_id: str) -> str:
    """Name of a job's lease."""
    return f"job/{job_id}"


def claim(job_id: str, settings: Settings, expected: frozenset[JobStatus]) -> Claim | None:
    """Takes a job that is in one of the expected states and that nobody holds.

    A flag that was raised meanwhile is honoured here; so is the bound on deaths, since a job that kills its worker would be dispatched
    for ever.

    Returns:
        None where there is nothing to do for the caller.
    """
    with session_scope() as session:
        job = session.get(Job, job_id)
        if job is None or job.status not in expected:
            return None
        held = leases.acquire(session, resource_of(job_id), holder_name(), ttl_s=settings.lease_ttl_s)
        if held is None:
            return None
        session.refresh(job, with_for_update=True)
        if held.took_over and job.status in expected:
            job.num_deaths += 1
            message = f"The worker that held the job is gone ({job.num_deaths} of {settings.max_job_deaths}); another one takes over."
            add_event(session, job_id, message, level="warn")
        if job.status in expected and not _settled(session, job, settings):
            if job.status == JobStatus.QUEUED:
                transition(session, job, JobStatus.RUNNING, "Job started." if job.started_at is None else "Job goes on.")
            return Claim(held, job)
        leases.release(session, held)
        return None


def _settled(session: Session, job: Job, settings: Settings) -> bool:
    if job.num_deaths >= settings.max_job_deaths:
        error = WorkerLost(f"{job.num_deaths} workers died while they held this job. Look into the workers' logs, then submit it again.")
        transition(session, job, JobStatus.FAILED, error.message, error=error)
    elif job.cancel_requested:
        transition(session, job, JobStatus.CANCELLED, "Job cancelled.")
    elif job.status == JobStatus.PAUSING:
        # The holder died on its way to the pause: the newest checkpoint is where the job goes on.
        transition(session, job, JobStatus.PAUSED, "Job paused.")
        job.pause_requested = False
    else:
        return False
    return True


class Heartbeat:
    """Renews a lease from a thread of its own for as long as the `with` block runs."""

    def __init__(self, held: Held, settings: Settings) -> None:
        self._held, self._settings = held, settings
        self._lost, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat {held.resource}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def ensure(self) -> None:
        """Call between long pieces of work.

        Raises:
            LeaseLost: somebody else holds the lease, or it could not be renewed in time.
        """
        if self._lost.is_set():
            raise LeaseLost(f"Lease on {self._held.resource} with token {self._held.token} was lost; this holder stops.")

    def _run(self) -> None:
        renewed_at = time.monotonic()
        while not self._done.wait(self._settings.heartbeat_s):
            try:
                with session_scope() as session:
                    leases.renew(session, self._held, ttl_s=self._settings.lease_ttl_s)
                renewed_at = time.monotonic()
            except LeaseLost:
                self._lost.set()
                return
            except SQLAlchemyError as error:
                log.warning("lease on %s was not renewed: %s", self._held.resource, error)
                if time.monotonic() - renewed_at > self._settings.lease_ttl_s:
                    self._lost.set()
                    return


@contextmanager
def fenced(held: Held) -> Generator[tuple[Session, Job]]:
    """A transaction that only the lease's holder can commit, with the job's row locked.

    Raises:
        LeaseLost: somebody else holds the job now; nothing is written.
    """
    with session_scope() as session:
        leases.check(session, held)
        job = session.get_one(Job, held.resource.removeprefix("job/"), with_for_update=True)
        yield session, job
