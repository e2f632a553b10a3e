"""The one thread that computes: training ops, one micro-batch a turn, interleaved with decode steps.

Where both have work, each gets half of the time, so that serving waits for a micro-batch at most, never for a whole training op. Ops take
turns among themselves: with one op in flight per adapter (the host sees to that), no adapter starves another.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from core.errors import Unavailable
from engine.rollouts.batcher import Batcher

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass
class _Op(Generic[T]):
    start: Callable[[], Iterator[None] | T]
    future: Future[T]
    turns: Iterator[None] | None = None


class Compute:
    """Runs ops and the batcher's steps. Methods may be called from any thread.

    Args:
        batcher: touched by the compute thread only, once `start` was called.
    """

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._ops: deque[_Op[Any]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._ops_s = 0.0
        self._decode_s = 0.0

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def num_ops(self) -> int:
        """Ops queued or under way."""
        return len(self._ops)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Ends the thread after the turn it is in; what is left gets Unavailable."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def post(self, action: Callable[[], None]) -> None:
        """Runs a short action on the compute thread before its next turn; it must not raise."""
        with self._wake:
            if self._stopping:
                raise Unavailable("The engine host is shutting down.")
            self._inbox.append(action)
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function as an op of one turn."""
        return self._enqueue(_Op(function, Future[T]()))

    def iterate(self, make: Callable[[], Iterator[None]]) -> Future[Any]:
        """Runs a generator as an op, one `next` a turn; the result is what it returns. An error reaches this op's caller only."""
        return self._enqueue(_Op[Any](make, Future[Any]()))

    def _enqueue(self, op: _Op[T]) -> Future[T]:
        self.post(lambda: self._ops.append(op))
        return op.future

    def _run(self) -> None:
        while self._wait_for_work():
            if self._ops and (not self._batcher.busy or self._ops_s <= self._decode_s):
                self._ops_s += _timed(self._turn)
            elif self._batcher.busy:
                self._decode_s += _timed(self._step)
            if not (self._ops and self._batcher.busy):
                self._ops_s = self._decode_s = 0.0
        self._abandon()

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._stopping or self._inbox or self._ops or self._batcher.busy):
                self._wake.wait()
            actions, self._inbox = self._inbox, deque()
            stopping = self._stopping
        for action in actions:
            action()
        return not stopping

    def _turn(self) -> None:
        op = self._ops.popleft()
        if op.turns is None and not op.future.set_running_or_notify_cancel():
            return
        try:
            if op.turns is None:
                started = op.start()
                if not isinstance(started, Iterator):
                    op.future.set_result(started)
                    return
                op.turns = cast("Iterator[None]", started)
            next(op.turns)
        except StopIteration as end:
            op.future.set_result(end.value)
        except BaseException as error:  # noqa: BLE001 - the thread serves everyone: whatever one op raises is its caller's
            op.future.set_exception(error)
        else:
            self._ops.append(op)

    def _step(self) -> None:
        try:
            self._batcher.step()
        except Exception as error:
            logger.exception("A decode step failed; what was being decoded is given up")
            self._batcher.reset(error)

    def _abandon(self) -> None:
        error = Unavailable("The engine host is shutting down.")
        for op in self._ops:
            if op.turns is not None or op.future.set_running_or_notify_cancel():
                op.future.set_exception(error)
        self._ops.clear()
        self._batcher.cancel_all(lambda _: True, error)


def _timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
