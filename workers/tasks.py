"""Celery tasks: thin, and they carry ids only."""

import logging
import threading
from functools import lru_cache

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from core.settings import get_settings
from engine.client import EngineClient
from registry.store import open_store
from workers import runner, validate
from workers import sweep as sweeping
from workers.app import app
from workers.context import RUN_JOB, SWEEP, VALIDATE_JOB, Context, TaskName

log = logging.getLogger(__name__)

STOPPING = threading.Event()
_run_slots = threading.BoundedSemaphore(get_settings().worker_concurrency)


@lru_cache(maxsize=1)
def context() -> Context:
    """This process's."""
    settings = get_settings()
    url = settings.resolved_engine_url
    return Context(settings, open_store(), lambda token, tenant_id: EngineClient(url, holder_token=token, owner=tenant_id), _send, STOPPING)


@app.task(name=VALIDATE_JOB)
def validate_job(job_id: str) -> None:
    """Validates a job's files and queues it."""
    validate.validate_job(context(), job_id)


@app.task(name=RUN_JOB)
def run_job(job_id: str) -> None:
    """Runs a job; leaves it queued when this worker is full or ending, for the next one that is free."""
    if STOPPING.is_set() or not _run_slots.acquire(blocking=False):
        return
    try:
        runner.run_job(context(), job_id)
    finally:
        _run_slots.release()
    if not STOPPING.is_set():
        sweeping.wake_next(context())


@app.task(name=SWEEP)
def sweep() -> None:
    """Wakes workers for what lost its message or its holder."""
    sweeping.sweep(context())


def _send(task: TaskName, job_id: str) -> None:
    try:
        app.send_task(task, args=[job_id], ignore_result=True, retry=False)
    except (OperationalError, RedisError, OSError) as error:
        log.warning("broker did not take %s(%s); the sweep will: %s", task, job_id, error)
