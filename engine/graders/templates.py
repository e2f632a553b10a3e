"""Templates of graders: text with `{{item.a.b}}`, `{{sample.output_text}}` and `{{sample.output_json.field}}`. Nothing is evaluated."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from core.errors import InvalidInput
from engine.graders.errors import GraderError, SampleParseError

_PLACEHOLDER = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_PATH = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")
_HELP = "Write {{item.field}}, {{sample.output_text}} or {{sample.output_json.field}}."


@dataclass(frozen=True)
class Variable:
    """One placeholder, as the segments between its dots, e.g. ("item", "order", "id")."""

    segments: tuple[str, ...]

    @property
    def path(self) -> str:
        """The dotted form."""
        return ".".join(self.segments)


@dataclass(frozen=True)
class Template:
    """Literal text and variables, in order."""

    parts: tuple[str | Variable, ...]

    @property
    def item_paths(self) -> frozenset[tuple[str, ...]]:
        """What it reads of the row, without the leading `item`."""
        return frozenset(p.segments[1:] for p in self.parts if isinstance(p, Variable) and p.segments[0] == "item")


@dataclass(frozen=True)
class Sample:
    """A completion as templates see it."""

    output_text: str


@lru_cache(maxsize=1024)
def parse(text: str, param: str = "template") -> Template:
    """Splits a template into text and variables.

    Args:
        text: `{{` opens a placeholder; a lone `}}` is text, as in nested JSON.
        param: the field that errors name.
    Raises:
        InvalidInput: a placeholder that is not closed, or names something else than item or sample fields.
    """
    parts: list[str | Variable] = []
    position = 0
    for match in _PLACEHOLDER.finditer(text):
        _literal(text[position : match.start()], parts, param)
        parts.append(_variable(match.group(1).strip(), param))
        position = match.end()
    _literal(text[position:], parts, param)
    return Template(tuple(parts))


def render(template: Template, *, item: Mapping[str, Any], sample: Sample) -> str:
    """Fills a template. Strings go in as they are, other values as JSON (true, 3, {"a": 1}).

    Raises:
        GraderError: the row has no such field (flag invalid_variable_error, the path as param).
        SampleParseError: the completion is not JSON, or has no such field.
    """
    return "".join(p if isinstance(p, str) else _text_of(_value_of(p, item, sample)) for p in template.parts)


def lookup(value: Any, segments: Sequence[str]) -> Any:
    """The value under a path; a digit segment indexes a list.

    Raises:
        KeyError: no such field; carries the segment that is missing.
    """
    for segment in segments:
        if isinstance(value, Mapping) and segment in value:
            value = value[segment]
        elif isinstance(value, list) and segment.isdecimal() and int(segment) < len(value):
            value = value[int(segment)]
        else:
            raise KeyError(segment)
    return value


def _literal(text: str, parts: list[str | Variable], param: str) -> None:
    if "{{" in text:
        raise InvalidInput(f"A placeholder is opened by '{{{{' and not closed by '}}}}' in {text[:60]!r}. {_HELP}", param=param)
    if text:
        parts.append(text)


def _variable(path: str, param: str) -> Variable:
    def refuse(reason: str) -> NoReturn:
        raise InvalidInput(f"{{{{{path[:60]}}}}} {reason}. {_HELP}", param=param)

    if not _PATH.fullmatch(path):
        refuse("is not a dotted path of names")
    segments = tuple(path.split("."))
    if segments[0] == "item":
        if len(segments) < 2:
            refuse("names no field of the row")
    elif segments[0] == "sample":
        if len(segments) < 2 or segments[1] not in ("output_text", "output_json"):
            refuse("is not something a sample has")
        if segments[1] == "output_text" and len(segments) > 2:
            refuse("reads a field of text; take output_json")
    else:
        refuse("starts with neither item nor sample")
    return Variable(segments)


def _value_of(variable: Variable, item: Mapping[str, Any], sample: Sample) -> Any:
    root, rest = variable.segments[0], variable.segments[1:]
    if root == "item":
        try:
            return lookup(item, rest)
        except KeyError as error:
            message = f"The row has no field {variable.path!r} (missing at {error.args[0]!r}); add it to the file or mend the template."
            raise GraderError(message, flag="invalid_variable_error", path=variable.path) from None
    if rest[0] == "output_text":
        return sample.output_text
    try:
        return lookup(_parse_json(sample.output_text), rest[1:])
    except KeyError as error:
        raise SampleParseError(f"The completion's JSON has no field {error.args[0]!r}.", path=variable.path) from None
    except (ValueError, RecursionError):
        raise SampleParseError("The completion is not JSON.", path=variable.path) from None


@lru_cache(maxsize=64)
def _parse_json(text: str) -> Any:
    return json.loads(text.strip(), parse_constant=_no_constant)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
