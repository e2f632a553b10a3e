"""Bodies and errors of the engine host's HTTP."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

import pydantic
from starlette.requests import ClientDisconnect, Request

from core.errors import EspalierError, InvalidInput, Unavailable

T = TypeVar("T")


class BodyTooLarge(InvalidInput):
    """The request's body is over the limit."""

    default_code = "body_too_large"
    http_status = 413


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        BodyTooLarge: before more than max_bytes are held.
    """
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise BodyTooLarge(f"The body is over {max_bytes} bytes; send less at once.")
        chunks.append(chunk)
    return b"".join(chunks)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, cancelled once the client is gone. Call it after the body was read.

    Raises:
        ClientDisconnect: the client is gone; there is nobody to answer.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for pending in (task, gone):
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, EspalierError):
                await pending


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def as_espalier_error(error: Exception) -> EspalierError:
    """What the caller is told of an error; details of an unforeseen one stay in the log."""
    if isinstance(error, EspalierError):
        return error
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        return InvalidInput(f"{param}: {first['msg']}" if param else first["msg"], param=param or None)
    if isinstance(error, MemoryError):
        return Unavailable("The engine has no memory left for this request; send less at once or later.", code="out_of_memory")
    return EspalierError(f"The engine failed ({type(error).__name__}); its log has the details.")
