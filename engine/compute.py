"""The one thread that computes: short calls, micro-batches of all training ops under way, decode steps.

While somebody is served, decoding gets half of the time, so that a request waits for a micro-batch at most, never for a whole training op.
While all that is decoded are rollouts, training gets most of it: a job that is through with its step samples next, and many jobs that
sample at once decode at little more than the cost of one.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from core.errors import Unavailable
from engine.device import release_memory
from engine.rollouts.batcher import Batcher
from engine.types import PendingOp

T = TypeVar("T")
logger = logging.getLogger(__name__)


TRAINING_SHARE = 0.8
"""Of the time while only rollouts are decoded. Not 1: a small job's rollouts go on beside a large job's long pass."""
SERVING_SHARE = 0.5
IDLE_S = 5.0
"""Without work for so long, free memory goes back to the system."""


@dataclass
class _Call(Generic[T]):
    run: Callable[[], T]
    future: Future[T]


@dataclass
class _Training:
    op: PendingOp
    future: Future[Any]


class Compute:
    """Runs ops and the batcher's steps. Methods may be called from any thread.

    Args:
        batcher: touched by the compute thread only, once `start` was called.
        advance: computes the next micro-batch of the ops that it is given, see `engine.types.Trainer`.
    """

    def __init__(self, batcher: Batcher, advance: Callable[[Sequence[Any]], None]) -> None:
        self._batcher = batcher
        self._advance = advance
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._calls: deque[_Call[Any]] = deque()
        self._training: list[_Training] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._training_s = 0.0
        self._decode_s = 0.0

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def num_ops(self) -> int:
        """Calls and training ops queued or under way."""
        return len(self._calls) + len(self._training)

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
        """Runs a short function on the compute thread; its error is its caller's."""
        call = _Call(function, Future[T]())
        self.post(lambda: self._calls.append(call))
        return call.future

    def train(self, begin: Callable[[], PendingOp]) -> Future[Any]:
        """Carries an op through; the future gets what it finishes with, or the error of `begin` or of one of its micro-batches.

        Args:
            begin: makes the op; called on the compute thread.
        """
        future = Future[Any]()

        def enter() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._training.append(_Training(begin(), future))
            except Exception as error:  # noqa: BLE001 - whatever it raises is its caller's
                future.set_exception(error)

        self.post(enter)
        return future

    def _run(self) -> None:
        while self._wait_for_work():
            if self._calls:
                self._answer(self._calls.popleft())
            elif self._training and (not self._batcher.busy or self._trains_next()):
                self._training_s += _timed(self._train)
            elif self._batcher.busy:
                self._decode_s += _timed(self._step)
            if not (self._training and self._batcher.busy):
                self._training_s = self._decode_s = 0.0
        self._abandon()

    def _trains_next(self) -> bool:
        share = SERVING_SHARE if self._batcher.serving else TRAINING_SHARE
        return self._training_s * (1 - share) <= self._decode_s * share

    def _wait_for_work(self) -> bool:
        with self._wake:
            # Once only: what is idle for longer has given its memory back already.
            patience_s: float | None = IDLE_S
            while not (self._stopping or self._inbox or self._calls or self._training or self._batcher.busy):
                if not self._wake.wait(patience_s):
                    release_memory()
                    patience_s = None
            actions, self._inbox = self._inbox, deque()
            stopping = self._stopping
        for action in actions:
            action()
        return not stopping

    def _answer(self, call: _Call[Any]) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            call.future.set_result(call.run())
        except BaseException as error:  # noqa: BLE001 - the thread serves everyone: whatever one call raises is its caller's
            call.future.set_exception(error)

    def _train(self) -> None:
        self._advance([training.op for training in self._training if not training.op.done])
        still: list[_Training] = []
        for training in self._training:
            if not training.op.done:
                still.append(training)
            elif training.op.error is not None:
                training.future.set_exception(training.op.error)
            else:
                training.future.set_result(training.op.finish())
        self._training = still

    def _step(self) -> None:
        try:
            self._batcher.step()
        except Exception as error:
            logger.exception("A decode step failed; what was being decoded is given up")
            self._batcher.reset(error)

    def _abandon(self) -> None:
        error = Unavailable("The engine host is shutting down.")
        for call in self._calls:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)
        for training in self._training:
            training.op.abort(error)
            training.future.set_exception(error)
        self._calls.clear()
        self._training.clear()
        self._batcher.cancel_all(lambda _: True, error)


def _timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
