"""Errors on the wire: {error: {message, type, param, code}}, each naming the field, the reason and the mend."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DataError, InterfaceError, OperationalError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from api.middleware import REQUEST_ID_HEADER
from core.errors import Conflict, EspalierError, InvalidInput, Unavailable

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2
TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(status: int, message: str, *, param: str | None, code: str | None) -> dict[str, Any]:
    """The error object of the OpenAI wire."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: EspalierError) -> JSONResponse:
    """An answer for an error that a user can act on."""
    headers: dict[str, str] = {}
    if isinstance(error, Conflict):
        # The stock client retries every 409; a state that forbids the request will not change by itself.
        headers["x-should-retry"] = "false"
    if isinstance(error, Unavailable):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    body = error_body(error.http_status, error.message, param=error.param, code=error.code)
    return JSONResponse(body, error.http_status, headers)


def describe(errors: Sequence[Mapping[str, Any]]) -> InvalidInput:
    """One readable error out of pydantic's list: the first field at fault, every reason given for it, and how many other fields fail."""
    reasons: dict[str, list[str]] = {}
    for error in errors:
        reasons.setdefault(_param(error), []).append(_reason(error))
    param, texts = next(iter(reasons.items()))
    message = f"{param or 'The body'}: {', or '.join(dict.fromkeys(texts))}."
    if len(reasons) > 1:
        message += f" Also at fault: {', '.join(name for name in reasons if name != param)}."
    return InvalidInput(message, param=param or None)


def _param(error: Mapping[str, Any]) -> str:
    """The field's dotted name as the user wrote it: pydantic's location without its own tags of unions, which name no field."""
    path: list[str] = []
    location = list(error["loc"])
    if location and location[0] in ("body", "query", "path", "header", "cookie"):
        location.pop(0)
    if error["type"] == "json_invalid":
        return ""
    here: Any = error.get("root")
    for index, part in enumerate(location):
        is_last = index == len(location) - 1
        if isinstance(here, Mapping):
            if part in here:
                path.append(str(part))
                here = here[part]
            elif is_last and error["type"] == "missing":
                path.append(str(part))
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            path.append(str(part))
            here = here[part]
        elif error.get("root") is None:
            path.append(str(part))
    return ".".join(path)


def _reason(error: Mapping[str, Any]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return "no such field; remove it, or check its spelling and the object that it belongs to"
    if kind == "missing":
        return "required and missing; add it"
    if kind == "json_invalid":
        return f"not JSON ({context.get('error', 'syntax error')} at character {error['loc'][-1]}); send one JSON object"
    text = str(error["msg"]).removeprefix("Value error, ").rstrip(".")
    if kind == "value_error":
        return text
    given = repr(error.get("input"))
    return f"{text[:1].lower()}{text[1:]}; got {given if len(given) <= 80 else given[:77] + '...'}"


def install(app: FastAPI) -> None:
    """Registers the handlers; after this no answer of the app has another error format."""

    async def on_known(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, EspalierError)
        if error.http_status >= 500:
            log.warning("%s: %s", error.code, error.message)
        return error_response(error)

    async def on_validation(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        body: object = error.body
        return error_response(describe([{**item, "root": body if item["loc"][:1] == ("body",) else None} for item in error.errors()]))

    async def on_http(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        texts = {
            404: "No such route; check the method's path, and that the base URL ends in /v1.",
            405: "This route does not take that HTTP method.",
            413: "The request is larger than this platform accepts; split the file or ask your platform team to raise the limit.",
        }
        message = texts.get(error.status_code, str(error.detail))
        code = {404: "unknown_route", 405: "method_not_allowed", 413: "too_large"}.get(error.status_code, "invalid_request")
        return JSONResponse(error_body(error.status_code, message, param=None, code=code), error.status_code, error.headers)

    async def on_database(_request: Request, error: Exception) -> JSONResponse:
        log.error("database: %s", error)
        return error_response(Unavailable("The database does not answer; try again.", code="database_unavailable"))

    async def on_unstorable(_request: Request, _error: Exception) -> JSONResponse:
        return error_response(InvalidInput("The request holds characters that can't be stored (NUL, half a surrogate pair); remove them."))

    async def on_unknown(request: Request, error: Exception) -> JSONResponse:
        request_id: str = request.state.request_id
        log.error("request %s failed", request_id, exc_info=error)
        message = f"The platform failed on this request; report {request_id} to your platform team."
        # This handler runs outside the middleware that sets the header.
        return JSONResponse(error_body(500, message, param=None, code="internal_error"), 500, {REQUEST_ID_HEADER: request_id})

    app.add_exception_handler(EspalierError, on_known)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    for kind in (OperationalError, InterfaceError):
        app.add_exception_handler(kind, on_database)
    for kind in (DataError, UnicodeEncodeError):
        app.add_exception_handler(kind, on_unstorable)
    app.add_exception_handler(Exception, on_unknown)
