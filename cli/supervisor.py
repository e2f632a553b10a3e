"""Keeps parts running: starts them in order, watches their health, restarts what died, stops them in reverse."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from threading import Event

from cli.process import rotate, spawn, stop, tail
from core.errors import EspalierError

TICK_S = 0.1
HEALTH_INTERVAL_S = 5.0
STARTING_INTERVAL_S = 0.25
LOG_LIMIT_BYTES = 20 * 2**20
MAX_BACKOFF_S = 30.0
MAX_FAILED_STARTS = 3
STABLE_S = 60.0


class PartFailed(EspalierError):
    """A part never became healthy."""

    default_code = "part_failed"


class State(StrEnum):
    """Where a part is."""

    WAITING = "waiting"
    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "not answering"
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Part:
    """What is supervised."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    healthy: Callable[[], bool]
    """A real question to the part, answered within about 2 s; any failure is False."""
    port: int | None = None
    after: tuple[str, ...] = ()
    """Parts that must be healthy before this one is started the first time."""
    start_timeout_s: float = 60.0
    grace_s: float = 10.0
    """Seconds between TERM and KILL."""


@dataclass
class Running:
    """A part and what became of it."""

    part: Part
    log: Path
    state: State = State.WAITING
    process: subprocess.Popen[bytes] | None = None
    num_restarts: int = 0
    num_failed_starts: int = 0
    started_at: float = 0.0
    checked_at: float = 0.0
    retry_at: float = 0.0
    backoff_s: float = 1.0
    last_exit: int | None = None
    ready_s: float | None = field(default=None)
    """Seconds from start to the first healthy answer."""


class Supervisor:
    """Runs parts until told to stop.

    Args:
        parts: in start order; they are stopped in the reverse order.
        log_dir: one `<part>.log` each.
        on_change: called with the part whose state or pid changed.
    """

    def __init__(self, parts: Sequence[Part], log_dir: Path, on_change: Callable[[Running], None]) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.running = {part.name: Running(part, log_dir / f"{part.name}.log") for part in parts}
        self._on_change = on_change

    @property
    def all_healthy(self) -> bool:
        """Whether every part answered its last health check."""
        return all(running.state is State.HEALTHY for running in self.running.values())

    def run(self, stopping: Event, hurry: Event | None = None) -> None:
        """Supervises until `stopping` is set, then stops everything; also when a part can't be started at all.

        Args:
            hurry: once set, no part is waited for any longer when stopping.
        Raises:
            PartFailed: a part died or stayed silent at every try of its first start; the message ends with its log.
        """
        try:
            while not stopping.is_set():
                for running in self.running.values():
                    self._advance(running)
                    if stopping.is_set():
                        break
                stopping.wait(TICK_S)
        finally:
            self.stop(hurry)

    def stop(self, hurry: Event | None = None) -> None:
        """Stops all parts, last started first."""
        for running in reversed(self.running.values()):
            if running.process is not None:
                stop(running.process, grace_s=running.part.grace_s, hurry=hurry)
                running.process = None
                self._move(running, State.STOPPED)

    def _advance(self, running: Running) -> None:
        now = time.monotonic()
        process = running.process
        if process is None:
            if self._may_start(running, now):
                self._start(running, now)
        elif process.poll() is not None:
            self._died(running, now)
        elif now - running.checked_at >= (STARTING_INTERVAL_S if running.state is State.STARTING else HEALTH_INTERVAL_S):
            self._check(running)

    def _may_start(self, running: Running, now: float) -> bool:
        if running.state is State.RESTARTING:
            return now >= running.retry_at
        return all(self.running[name].state is State.HEALTHY for name in running.part.after if name in self.running)

    def _start(self, running: Running, now: float) -> None:
        rotate(running.log, limit_bytes=LOG_LIMIT_BYTES)
        with running.log.open("ab") as log:
            running.process = spawn(running.part.command, env=running.part.env, log=log)
        running.started_at = running.checked_at = now
        self._move(running, State.STARTING)

    def _check(self, running: Running) -> None:
        part = running.part
        healthy = part.healthy()
        now = running.checked_at = time.monotonic()
        age_s = now - running.started_at
        if healthy:
            running.num_failed_starts = 0
            if running.ready_s is None:
                running.ready_s = age_s
            if age_s > STABLE_S:
                running.backoff_s = 1.0
            self._move(running, State.HEALTHY)
        elif running.state is State.HEALTHY:
            self._move(running, State.UNHEALTHY)
        elif running.state is State.STARTING and age_s > part.start_timeout_s:
            assert running.process is not None
            stop(running.process, grace_s=part.grace_s)
            self._died(running, now)
        if running.state is State.HEALTHY:
            rotate(running.log, limit_bytes=LOG_LIMIT_BYTES)

    def _died(self, running: Running, now: float) -> None:
        assert running.process is not None
        # What the dead leader left behind would hold its port or write beside its successor.
        stop(running.process, grace_s=0)
        running.last_exit, running.process = running.process.returncode, None
        running.num_failed_starts += 1
        if running.ready_s is None and running.num_failed_starts >= MAX_FAILED_STARTS:
            raise PartFailed(
                f"{running.part.name} did not start (exit {running.last_exit}) in {running.num_failed_starts} tries. "
                f"The end of {running.log}:\n{tail(running.log)}"
            )
        running.num_restarts += 1
        running.retry_at = now + running.backoff_s
        running.backoff_s = min(2 * running.backoff_s, MAX_BACKOFF_S)
        self._move(running, State.RESTARTING)

    def _move(self, running: Running, state: State) -> None:
        if state is not running.state:
            running.state = state
            with contextlib.suppress(BrokenPipeError):
                self._on_change(running)
