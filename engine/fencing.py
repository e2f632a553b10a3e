"""Who may act on an adapter, and what was already done: per adapter the newest holder, one op at a time, the last mutating request."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from core.errors import Conflict, LeaseLost

MAX_RECORDS = 10_000
"""Adapters remembered; the longest unused are forgotten."""


@dataclass(frozen=True)
class Caller:
    """Who asks: the lease's fencing token, and the request's identity within its client."""

    holder_token: int
    client_id: str
    seq_id: int | None = None
    """Numbers a client's mutating requests on one adapter; None for a verb that changes nothing."""


@dataclass
class _Record:
    holder_token: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    synced: bool = False
    last: tuple[Caller, str, asyncio.Task[Any]] | None = None


class Fences:
    """State of the event loop alone."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()

    async def run(self, adapter_id: str, verb: str, caller: Caller, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Runs `work` in the adapter's order, for its newest holder; a repeated mutating request gets the first one's result or error.

        Work that was asked for with a seq_id goes on when its caller is cancelled, so that the repeat finds it.

        Raises:
            LeaseLost: a newer holder has spoken, now or while this waited for its turn.
            Conflict: the request is older than one of the same client that was already taken (code stale_request).
        """
        record = self._record(adapter_id, caller)
        if caller.seq_id is None:
            return await self._in_order(record, caller, work)
        if record.last is not None and record.last[0].client_id == caller.client_id:
            last, last_verb, task = record.last
            if last == caller and last_verb == verb:
                return await asyncio.shield(task)
            if caller.seq_id <= (last.seq_id or 0):
                raise Conflict(f"Request {caller.seq_id} on {adapter_id} comes after {last.seq_id}; it was given up.", code="stale_request")
        task = asyncio.ensure_future(self._in_order(record, caller, work))
        task.add_done_callback(_retrieve)
        record.last = (caller, verb, task)
        return await asyncio.shield(task)

    def set_synced(self, adapter_id: str, synced: bool) -> None:
        """Notes whether the sampler holds the trainer's factors."""
        if adapter_id in self._records:
            self._records[adapter_id].synced = synced

    def check_synced(self, adapter_id: str) -> None:
        """Refuses to sample from what may be stale.

        Raises:
            Conflict: sync was not called since the adapter changed (code adapter_not_synced).
        """
        if not self._records[adapter_id].synced:
            raise Conflict(f"Adapter {adapter_id} changed since its last sync; call sync before sample.", code="adapter_not_synced")

    def _record(self, adapter_id: str, caller: Caller) -> _Record:
        record = self._records.setdefault(adapter_id, _Record(caller.holder_token))
        self._records.move_to_end(adapter_id)
        if len(self._records) > MAX_RECORDS:
            oldest = next(iter(self._records))
            if not self._records[oldest].lock.locked():
                del self._records[oldest]
        self._check_holder(record, caller)
        record.holder_token = caller.holder_token
        return record

    async def _in_order(self, record: _Record, caller: Caller, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        async with record.lock:
            self._check_holder(record, caller)
            return await work()

    def _check_holder(self, record: _Record, caller: Caller) -> None:
        if caller.holder_token < record.holder_token:
            raise LeaseLost(f"Holder {caller.holder_token} was replaced by {record.holder_token}; stop working on this job.")


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Its caller may be gone: the error is kept for the repeat and is no cause for a warning."""
    if not task.cancelled():
        task.exception()
