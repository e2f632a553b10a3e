"""What can go wrong while grading, by the names of the OpenAI wire."""

from typing import Literal

from core.errors import EspalierError

ErrorFlag = Literal["formula_parse_error", "invalid_variable_error", "sample_parse_error", "other_error"]
ERROR_FLAGS: tuple[ErrorFlag, ...] = ("formula_parse_error", "invalid_variable_error", "sample_parse_error", "other_error")


class GraderError(EspalierError):
    """A grader has no score for this completion.

    Args:
        flag: which of the wire's error flags is raised.
        path: the variable or part at fault, e.g. `item.answer`; also the error's param.
    """

    default_code = "grader_error"
    http_status = 400

    def __init__(self, message: str, *, flag: ErrorFlag, path: str | None = None) -> None:
        super().__init__(message, param=path)
        self.flag: ErrorFlag = flag


class SampleParseError(GraderError):
    """The completion lacks what the template reads (no JSON, or no such field): the policy's fault, so the grader scores 0."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message, flag="sample_parse_error", path=path)
