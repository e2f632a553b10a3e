"""Errors that a user can act on. Each names the field, the reason and the mend; the API turns them into HTTP, the CLI into exit codes."""

from typing import ClassVar


class EspalierError(Exception):
    """Base of all errors meant for users.

    Args:
        message: reason and mend, one or two sentences.
        param: the field at fault, dotted, as the user wrote it; None when no single field is.
        code: machine-readable; defaults to the class's own.
    """

    default_code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code


class InvalidInput(EspalierError):
    """The request can't be carried out as written."""

    default_code = "invalid_request"
    http_status = 400


class NotAuthenticated(EspalierError):
    """No key, or a key that is unknown, expired or revoked."""

    default_code = "invalid_api_key"
    http_status = 401


class Forbidden(EspalierError):
    """A valid key without the right."""

    default_code = "forbidden"
    http_status = 403


class NotFound(EspalierError):
    """No such object for this tenant; another tenant's object is not told apart from none."""

    default_code = "not_found"
    http_status = 404


class Conflict(EspalierError):
    """The object's state does not allow it."""

    default_code = "conflict"
    http_status = 409


class IllegalTransition(Conflict):
    """A job was asked to move along an edge that its state machine does not have."""

    default_code = "illegal_transition"


class LeaseLost(Conflict):
    """The caller's fencing token is no longer the newest; its writes are refused."""

    default_code = "lease_lost"


class Unavailable(EspalierError):
    """A part that is needed does not answer now; the same request may work later."""

    default_code = "unavailable"
    http_status = 503


class CorruptData(EspalierError):
    """Stored bytes do not have the digest that they are named by."""

    default_code = "corrupt_data"
