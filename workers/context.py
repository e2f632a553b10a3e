"""What a worker works with; tests put another engine and a clockwork of milliseconds in its place."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

from core.settings import Settings
from engine.types import Verbs
from registry.store import ObjectStore

TaskName = Literal["workers.validate_job", "workers.run_job", "workers.sweep"]
VALIDATE_JOB: TaskName = "workers.validate_job"
RUN_JOB: TaskName = "workers.run_job"
SWEEP: TaskName = "workers.sweep"


def holder_name() -> str:
    """Who holds a lease, for people who look at the table: host, process and thread."""
    return f"{socket.gethostname()}/{os.getpid()}/{threading.get_ident()}"[:128]


@dataclass(frozen=True)
class Context:
    """Everything around a job."""

    settings: Settings
    store: ObjectStore
    connect: Callable[[int, str], AbstractContextManager[Verbs]]
    """The engine, for the holder of this fencing token."""
    send: Callable[[TaskName, str], None]
    """Wakes a worker: task and job id. May lose messages; the sweep finds what was lost."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when this process is asked to end: jobs checkpoint and are given back."""
    engine_wait_s: float = 600.0
    """How long a job waits for an engine that does not answer before it fails. Ten minutes outlast a restart with a large base."""
    engine_poll_s: float = 2.0
