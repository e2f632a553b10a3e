"""Graders turn a completion and its row into a reward. They run in workers and in the API, never beside the accelerator."""

from engine.graders.errors import ERROR_FLAGS, GraderError
from engine.graders.grade import GradeResult, grade, item_paths, validate_grader

__all__ = ["ERROR_FLAGS", "GradeResult", "GraderError", "grade", "item_paths", "validate_grader"]
