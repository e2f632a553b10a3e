"""Training and validation files: JSONL of `{"messages": [...], ...item fields}`. Every fault is found, each with its line number."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from core.contracts import DatasetReport, Grader, LineFault, TokenStats
from core.errors import InvalidInput
from engine.graders import item_paths
from engine.graders.templates import lookup
from engine.grpo import PromptRow
from engine.types import Verbs

MAX_LISTED_FAULTS = 1000
RENDER_CHUNK_ROWS = 256
_BOM = b"\xef\xbb\xbf"
_ROLES = ("system", "developer", "user", "assistant")
_IGNORED_KEYS = ("name", "weight")


@dataclass
class ParsedFile:
    """A file after parsing; `rows` are those without a fault."""

    rows: list[PromptRow] = field(default_factory=list[PromptRow])
    lines: list[int] = field(default_factory=list[int])
    """Line number of each row."""
    faults: list[LineFault] = field(default_factory=list[LineFault])
    warnings: list[str] = field(default_factory=list[str])


class _RowFault(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def parse_file(data: bytes, grader: Grader) -> ParsedFile:
    """Parses a file.

    Lines end at \\n only: U+2028 and its kind are ordinary characters inside a JSON string. Blank lines are skipped.

    Args:
        grader: rows must have the fields that its templates read.
    """
    parsed = ParsedFile()
    if data.startswith(_BOM):
        data = data.removeprefix(_BOM)
        parsed.warnings.append("The file begins with a byte order mark; it was skipped.")
    needed = sorted(item_paths(grader))
    prompts: set[bytes] = set()
    num_duplicates = num_ignored = 0
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if not raw.strip():
            continue
        faults: list[_RowFault] = []
        try:
            value = _parse_line(raw)
        except _RowFault as fault:
            faults.append(fault)
            value = {}
        else:
            faults += _faults_of(value, needed)
        if faults:
            parsed.faults += [LineFault(line=number, code=f.code, message=f.message) for f in faults]
            continue
        row = PromptRow(tuple(_plain(m) for m in value["messages"]), _item(value))
        num_ignored += any(key in m for m in value["messages"] for key in _IGNORED_KEYS)
        digest = hashlib.sha256(json.dumps(row.messages).encode()).digest()
        num_duplicates += digest in prompts
        prompts.add(digest)
        parsed.rows.append(row)
        parsed.lines.append(number)
    if not parsed.rows and not parsed.faults:
        parsed.faults.append(LineFault(line=1, code="no_rows", message="The file has no rows; give one JSON object a line."))
    if num_duplicates:
        parsed.warnings.append(f"{num_duplicates} rows repeat the prompt of an earlier row.")
    if num_ignored:
        parsed.warnings.append(f"{num_ignored} rows have messages with {' or '.join(_IGNORED_KEYS)}, which is not used.")
    return parsed


def check_file(data: bytes, grader: Grader, verbs: Verbs, *, max_prompt_tokens: int, between: Callable[[], None]) -> DatasetReport:
    """Parses, renders and counts a file.

    Args:
        max_prompt_tokens: what the base's context leaves beside the completion; longer prompts are faults.
        between: called between chunks; may raise to stop.
    Raises:
        Unavailable: the engine does not answer.
    """
    parsed = parse_file(data, grader)
    lengths: list[int] = []
    for line, length in _prompt_lengths(parsed, verbs, between):
        if isinstance(length, InvalidInput):
            parsed.faults.append(LineFault(line=line, code="template_refused", message=length.message))
        elif length > max_prompt_tokens:
            message = (
                f"The prompt has {length} tokens; at most {max_prompt_tokens} fit beside the completion. Shorten it or lower max_tokens."
            )
            parsed.faults.append(LineFault(line=line, code="prompt_too_long", message=message))
        else:
            lengths.append(length)
    faults = sorted(parsed.faults, key=lambda fault: fault.line)
    fields = set[str].intersection(*(set(row.item) for row in parsed.rows)) if parsed.rows else set[str]()
    return DatasetReport(
        num_rows=len(lengths),
        num_faults=len(faults),
        faults=tuple(faults[:MAX_LISTED_FAULTS]),
        warnings=tuple(parsed.warnings),
        item_fields=tuple(sorted(fields)),
        prompt_tokens=_stats(lengths) if lengths else None,
    )


def _prompt_lengths(parsed: ParsedFile, verbs: Verbs, between: Callable[[], None]) -> Iterator[tuple[int, int | InvalidInput]]:
    for start in range(0, len(parsed.rows), RENDER_CHUNK_ROWS):
        between()
        rows, lines = parsed.rows[start : start + RENDER_CHUNK_ROWS], parsed.lines[start : start + RENDER_CHUNK_ROWS]
        try:
            rendered = verbs.render([row.messages for row in rows])
        except InvalidInput:
            # The template refused one of them; one by one, every such row gets its own fault.
            for row, line in zip(rows, lines, strict=True):
                try:
                    yield line, len(verbs.render([row.messages])[0])
                except InvalidInput as error:
                    yield line, error
        else:
            yield from ((line, len(tokens)) for line, tokens in zip(lines, rendered, strict=True))


def _stats(lengths: Sequence[int]) -> TokenStats:
    ordered = sorted(lengths)
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return TokenStats(min=ordered[0], mean=sum(ordered) / len(ordered), p95=p95, max=ordered[-1])


def _parse_line(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _RowFault("not_utf8", f"Byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8.") from None
    try:
        value: Any = json.loads(text, parse_constant=_no_constant)
        # A lone surrogate parses and can't be written again, so no tokenizer takes it.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _RowFault("invalid_json", "A string holds half of a surrogate pair (\\ud800 to \\udfff); remove it.") from None
    except json.JSONDecodeError as error:
        raise _RowFault("invalid_json", f"Not JSON at column {error.colno}: {error.msg}. Each row is one object on one line.") from None
    except (ValueError, RecursionError) as error:
        raise _RowFault("invalid_json", f"Not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise _RowFault("not_an_object", f'A row is an object {{"messages": [...], ...}}, not {type(value).__name__}.')
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _faults_of(row: Mapping[str, Any], needed: Sequence[tuple[str, ...]]) -> list[_RowFault]:
    faults = list(_message_faults(row))
    item = _item(row)
    for path in needed:
        try:
            lookup(item, path)
        except KeyError:
            name = ".".join(path)
            faults.append(_RowFault("missing_field", f"The field {name!r} is missing; the grader reads {{{{item.{name}}}}}."))
    return faults


def _item(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "messages"}


def _message_faults(row: Mapping[str, Any]) -> Iterator[_RowFault]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        yield _RowFault("no_messages", "messages is missing or empty; give at least one message with role user.")
        return
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            yield _RowFault("bad_message", f"messages[{i}] is not an object with role and content.")
            continue
        if message.get("role") not in _ROLES:
            yield _RowFault("bad_role", f"messages[{i}].role is {message.get('role')!r}; use one of {', '.join(_ROLES)}.")
        if _text_of(message.get("content")) is None:
            yield _RowFault("bad_content", f"messages[{i}].content must be a string that is not empty, or a list of text parts.")
        unknown = sorted(set(message) - {"role", "content", *_IGNORED_KEYS})
        if unknown:
            yield _RowFault("bad_message", f"messages[{i}] has the field {unknown[0]!r}, which is not supported; remove it.")
    last = messages[-1]
    if isinstance(last, dict) and last.get("role") == "assistant":
        yield _RowFault(
            "last_is_assistant",
            "The last message is the assistant's, which the policy is to write: remove it, and put the wanted answer into a field beside "
            'messages, e.g. "answer", that the grader reads as {{item.answer}}.',
        )
    elif isinstance(last, dict) and last.get("role") in ("system", "developer"):
        yield _RowFault("last_not_user", "The last message must be the user's; add one or move this one to the front.")


def _text_of(content: Any) -> str | None:
    """The text of a message, parts joined; None where it is neither a string nor text parts, or empty."""
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
        texts = [p for p in parts if isinstance(p, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    return content if isinstance(content, str) and content else None


def _plain(message: Mapping[str, Any]) -> dict[str, str]:
    # Chat templates of open models know system, not OpenAI's newer name for it.
    role = "system" if message["role"] == "developer" else message["role"]
    return {"role": role, "content": _text_of(message["content"]) or ""}
