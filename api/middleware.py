"""What every request gets. Plain ASGI: Starlette's BaseHTTPMiddleware hides client disconnects from streaming endpoints."""

from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.ids import new_id

REQUEST_ID_HEADER = "x-request-id"


class RequestId:
    """Gives each request an id, as `request.state.request_id` and as the header `x-request-id` of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class BodyLimit:
    """Refuses a body that is too large: by its declared length before any of it is read, by what arrives otherwise.

    FastAPI's own limit answers in plain text; this one raises, so that the refusal has the format of every other error.

    Args:
        limit_bytes: largest body.
        larger: limits of paths that take more.
    """

    def __init__(self, app: ASGIApp, limit_bytes: int, larger: Mapping[str, int]) -> None:
        self.app = app
        self._limit_bytes = limit_bytes
        self._larger = larger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit_bytes = self._larger.get(scope["path"], self._limit_bytes)
        declared = Headers(scope=scope).get("content-length", "")
        seen_bytes = 0

        async def receive_within_limit() -> Message:
            nonlocal seen_bytes
            if declared.isdecimal() and int(declared) > limit_bytes:
                raise HTTPException(413)
            message = await receive()
            seen_bytes += len(message.get("body", b""))
            if seen_bytes > limit_bytes:
                raise HTTPException(413)
            return message

        await self.app(scope, receive_within_limit, send)
