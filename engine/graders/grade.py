"""One way in: validate a grader when a job is submitted, grade a completion while it runs."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.contracts import Grader, MultiGrader, StringCheckGrader, TextSimilarityGrader
from core.errors import InvalidInput
from engine.graders.errors import ErrorFlag, GraderError, SampleParseError
from engine.graders.multi import evaluate, validate_formula
from engine.graders.string_check import string_check
from engine.graders.templates import Sample, parse, render
from engine.graders.text_similarity import UNAVAILABLE, text_similarity

MAX_DEPTH = 4


@dataclass(frozen=True)
class GradeResult:
    """What grading one completion gave."""

    reward: float | None
    """Finite; None when there is no score (the row is then left out of its group and counted, never taken as 0)."""
    sub_rewards: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """By part of a multi grader; a nested part is `outer.inner`."""
    errors: dict[str, bool | str] = field(default_factory=dict[str, bool | str])
    """Raised flags of the wire, each with `<flag>_details` beside it. A sample_parse_error comes with a score of 0."""


def validate_grader(grader: Grader, item_fields: set[str] | None, *, param: str = "grader") -> None:
    """Refuses a grader that could not grade.

    Args:
        item_fields: top-level fields that rows have; None when they are not known yet.
        param: where the grader stands in the request; errors name `<param>.input` and so on.
    Raises:
        InvalidInput: a template, an unknown field, a metric that can't run here, a formula; param says which.
    """
    for path, part, depth in _walk(grader, param, 1):
        if isinstance(part, MultiGrader):
            if depth >= MAX_DEPTH:
                raise InvalidInput(f"Graders nest deeper than {MAX_DEPTH}; flatten them into one formula.", param=path)
            validate_formula(part.calculate_output, part.graders, param=f"{path}.calculate_output")
            continue
        for name in ("input", "reference"):
            used = {p[0] for p in parse(getattr(part, name), f"{path}.{name}").item_paths}
            if item_fields is not None and used - item_fields:
                have = ", ".join(sorted(item_fields)) or "none"
                message = f"Rows have no field {sorted(used - item_fields)[0]!r}; their fields beside messages are: {have}."
                raise InvalidInput(message, param=f"{path}.{name}")
        if isinstance(part, TextSimilarityGrader) and part.evaluation_metric in UNAVAILABLE:
            raise InvalidInput(f"Refused: {UNAVAILABLE[part.evaluation_metric]}.", param=f"{path}.evaluation_metric")


def item_paths(grader: Grader) -> frozenset[tuple[str, ...]]:
    """Everything that the grader's templates read of a row, as paths, e.g. ("order", "id")."""
    leaves = (part for _, part, _ in _walk(grader, "grader", 1) if not isinstance(part, MultiGrader))
    return frozenset[tuple[str, ...]]().union(*(parse(t).item_paths for leaf in leaves for t in (leaf.input, leaf.reference)))


def grade(grader: Grader, *, item: Mapping[str, Any], output_text: str) -> GradeResult:
    """Grades one completion. Never raises for what a completion or a row holds: see `GradeResult.errors`.

    Args:
        grader: one that `validate_grader` let pass.
        item: the row's fields beside messages.
        output_text: the completion's text, stop string and EOS cut.
    """
    sub_rewards: dict[str, float | None] = {}
    errors: dict[str, bool | str] = {}
    reward = _score(grader, "", item, Sample(output_text), sub_rewards, errors)
    return GradeResult(reward, sub_rewards, errors)


def _walk(grader: Grader, path: str, depth: int) -> Iterator[tuple[str, Grader, int]]:
    yield path, grader, depth
    if isinstance(grader, MultiGrader):
        for name, part in grader.graders.items():
            yield from _walk(part, f"{path}.graders.{name}", depth + 1)


def _score(
    grader: Grader,
    prefix: str,
    item: Mapping[str, Any],
    sample: Sample,
    sub_rewards: dict[str, float | None],
    errors: dict[str, bool | str],
) -> float | None:
    try:
        if isinstance(grader, MultiGrader):
            return _multi(grader, prefix, item, sample, sub_rewards, errors)
        return _finite(_leaf(grader, item, sample))
    except SampleParseError as error:
        _flag(errors, error.flag, error.message)
        return 0.0
    except GraderError as error:
        _flag(errors, error.flag, error.message)
    except (ArithmeticError, ValueError, TypeError, LookupError, RecursionError) as error:
        _flag(errors, "other_error", f"{type(error).__name__}: {error}")
    return None


def _leaf(grader: StringCheckGrader | TextSimilarityGrader, item: Mapping[str, Any], sample: Sample) -> float:
    text = render(parse(grader.input), item=item, sample=sample)
    reference = render(parse(grader.reference), item=item, sample=sample)
    if isinstance(grader, StringCheckGrader):
        return string_check(text, reference, grader.operation)
    return text_similarity(text, reference, grader.evaluation_metric)


def _multi(
    grader: MultiGrader,
    prefix: str,
    item: Mapping[str, Any],
    sample: Sample,
    sub_rewards: dict[str, float | None],
    errors: dict[str, bool | str],
) -> float | None:
    scores: dict[str, float] = {}
    for name, part in grader.graders.items():
        score = _score(part, f"{prefix}{name}.", item, sample, sub_rewards, errors)
        sub_rewards[prefix + name] = score
        if score is not None:
            scores[name] = score
    if len(scores) < len(grader.graders):
        return None
    return _finite(evaluate(grader.calculate_output, scores))


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise GraderError(f"The score is {value}; a reward must be a finite number.", flag="other_error")
    return value


def _flag(errors: dict[str, bool | str], flag: ErrorFlag, detail: str) -> None:
    errors[flag] = True
    errors.setdefault(f"{flag}_details", detail)
