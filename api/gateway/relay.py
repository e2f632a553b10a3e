"""One inference request on its way through: opened on a replica, relayed, counted, and closed however it ends."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from api.errors import error_body
from api.gateway.replicas import Replicas, error_text, scrub
from api.gateway.target import Target
from api.gateway.usage import record_usage
from core.errors import InvalidInput, Unavailable
from core.scope import Scope

log = logging.getLogger(__name__)

MAX_EVENT_BYTES = 16 << 20


@dataclass
class Counter:
    """Tokens of one request: the replica's own count, or what was seen until the client left."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    started: bool = False
    seen_chunks: int = field(default=0)

    def take(self, usage: Any) -> None:
        """Keeps a replica's usage object, the newest wins."""
        if isinstance(usage, dict):
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self.completion_tokens = int(usage.get("completion_tokens") or 0)


class Relay(Response):
    """An ASGI response that is the exchange itself, so that a client's leaving cancels whatever it waits for."""

    def __init__(
        self, replicas: Replicas, caller: Scope, target: Target, path: str, payload: dict[str, Any], *, stream: bool, wants_usage: bool
    ) -> None:
        super().__init__()
        self._replicas, self._caller, self._target = replicas, caller, target
        self._path, self._payload, self._stream, self._wants_usage = path, payload, stream, wants_usage
        self._counter = Counter()
        self._upstream: httpx.Response | None = None

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        try:
            await _unless_client_leaves(receive, self._exchange(scope, receive, send))
        finally:
            # Not part of what is cancelled: the stock client leaves as soon as it has read [DONE], in the middle of any clean-up.
            if self._upstream is not None:
                await self._upstream.aclose()
            await self._count()

    async def _exchange(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        upstream = await self._open()
        self._counter.started = True
        if self._stream:
            await self._relay_events(upstream, send)
        else:
            await JSONResponse(await self._read(upstream))(scope, receive, send)

    async def _open(self) -> httpx.Response:
        """A replica's answer of status 200, its body unread.

        Raises:
            InvalidInput: the replica refuses the request. Unavailable: no replica answers.
        """
        for url in self._replicas.order(self._target):
            try:
                response = await self._send(url)
                if response.status_code == 404 and self._target.digest is not None:
                    await response.aclose()
                    await self._replicas.load(url, self._target)
                    response = await self._send(url)
            except httpx.TransportError as error:
                log.warning("replica %s: %r", url, error)
                self._replicas.mark_down(url)
                continue
            if response.status_code == 200:
                return response
            try:
                await response.aread()
            finally:
                await response.aclose()
            if 400 <= response.status_code < 500 and response.status_code not in (401, 403, 404, 408, 429):
                raise InvalidInput(scrub(error_text(response), self._target))
            log.warning("replica %s: HTTP %s: %s", url, response.status_code, error_text(response))
            self._replicas.mark_down(url)
        raise Unavailable("No serving replica answers for this model now; try again.", code="replica_unavailable")

    async def _send(self, url: str) -> httpx.Response:
        request = self._replicas.http.build_request("POST", url + self._path, json=self._payload)
        self._upstream = await self._replicas.http.send(request, stream=True)
        return self._upstream

    async def _read(self, upstream: httpx.Response) -> dict[str, Any]:
        try:
            body: dict[str, Any] = json.loads(await upstream.aread())
        except (httpx.TransportError, ValueError) as error:
            raise Unavailable("The serving replica broke off its answer; try again.", code="replica_failed") from error
        self._counter.take(body.get("usage"))
        body["model"] = self._target.asked_name
        return body

    async def _relay_events(self, upstream: httpx.Response, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for data in _events(upstream):
                line = data if data == b"[DONE]" else self._rewritten(data)
                if line is not None:
                    await send({"type": "http.response.body", "body": b"data: " + line + b"\n\n", "more_body": True})
        except (httpx.TransportError, ValueError) as error:
            log.warning("stream broke off: %r", error)
            text = "The serving replica broke off its answer; try again."
            line = json.dumps(error_body(503, text, param=None, code="replica_failed")).encode()
            await send({"type": "http.response.body", "body": b"data: " + line + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _rewritten(self, data: bytes) -> bytes | None:
        """A chunk as the client may see it; None for one that it did not ask for."""
        chunk: dict[str, Any] = json.loads(data)
        self._counter.take(chunk.get("usage"))
        if "error" in chunk:
            return scrub(data.decode(), self._target).encode()
        chunk["model"] = self._target.asked_name
        if chunk.get("choices"):
            self._counter.seen_chunks += 1
            chunk.pop("usage", None)
            if self._wants_usage:
                chunk["usage"] = None
        elif chunk.get("usage") is not None and not self._wants_usage:
            return None
        return json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode()

    async def _count(self) -> None:
        """Counts a request that a replica took."""
        if not self._counter.started:
            return
        # A client that left before the replica's count: each chunk held at least one token.
        completion_tokens = max(self._counter.completion_tokens, self._counter.seen_chunks if self._stream else 0)
        await run_in_threadpool(
            record_usage, self._caller, self._target.usage_name,
            prompt_tokens=self._counter.prompt_tokens, completion_tokens=completion_tokens,
        )  # fmt: skip


async def _events(upstream: httpx.Response) -> AsyncIterator[bytes]:
    """The `data:` fields of a stream of server-sent events.

    Lines are cut at line feeds only: httpx's own line iterator also cuts at U+2028 and its kin, which JSON holds unescaped.
    """
    rest = b""
    async for piece in upstream.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is larger than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


async def _unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` and cancels it once the client has left.

    By a cancel scope, and not by cancelling a task: httpx shields the return of a connection to its pool from the former only, and a task
    that is cancelled in the middle of that return leaks the connection.

    Raises:
        Whatever `work` raises.
    """
    with anyio.CancelScope() as scope:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            scope.cancel()

        watcher = asyncio.create_task(watch())
        try:
            await work
        finally:
            watcher.cancel()
