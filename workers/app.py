"""The Celery application: `celery -A workers.app worker`, `celery -A workers.app beat`. It keeps no state: SQL does."""

import logging
import sys
from typing import Any

from celery import Celery
from celery.signals import setup_logging, worker_shutting_down

from core.settings import get_settings
from workers.context import SWEEP

CONTROL_THREADS = 2
"""Threads beside those that run jobs, so that validation and sweeps go on while every job slot is taken."""

_settings = get_settings()

app = Celery("espalier", broker=_settings.resolved_broker_url, include=["workers.tasks"])
app.conf.update(
    task_serializer="json",
    accept_content=["json"],
    task_ignore_result=True,
    # A lost message is sent again by the sweep, a message that comes twice finds the lease taken: so it is acknowledged at once, and no
    # visibility timeout can redeliver a job that runs for hours.
    task_acks_late=False,
    worker_prefetch_multiplier=1,
    # Threads: a job mostly waits for the engine. One process then tells all its jobs to checkpoint when it is asked to end.
    worker_pool="threads",
    worker_concurrency=_settings.worker_concurrency + CONTROL_THREADS,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    # Without a limit: a worker outlives any outage of the broker.
    broker_connection_max_retries=None,
    beat_schedule={
        "sweep": {
            "task": SWEEP,
            "schedule": _settings.sweep_interval_s,
            # Sweeps that nobody took while workers were down would only repeat each other.
            "options": {"expires": _settings.sweep_interval_s, "ignore_result": True},
        }
    },
    # In memory; the default scheduler keeps a file in the working folder.
    beat_scheduler="celery.beat:Scheduler",
    timezone="UTC",
)


@setup_logging.connect
def _set_up_logging(loglevel: int = logging.INFO, **_: Any) -> None:
    """One line an event on stderr; what supervises the process keeps it."""
    logging.basicConfig(level=loglevel or logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


@worker_shutting_down.connect
def _on_shutting_down(**_: Any) -> None:
    """Jobs of this process checkpoint at their next step and are given back."""
    from workers.tasks import STOPPING

    STOPPING.set()
