"""Training and validation files: JSONL, one row a line (`workers.row_formats`). Every fault is found, each with its line number."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from core.contracts import DatasetReport, LineFault, TokenStats
from core.errors import InvalidInput
from engine.loop.rows import PromptRow
from engine.types import Verbs
from workers.row_formats import IGNORED_KEYS, RowFault, RowFormat

MAX_LISTED_FAULTS = 1000
RENDER_CHUNK_ROWS = 256
_BOM = b"\xef\xbb\xbf"


@dataclass
class ParsedFile:
    """A file after parsing; `rows` are those without a fault."""

    rows: list[PromptRow] = field(default_factory=list[PromptRow])
    lines: list[int] = field(default_factory=list[int])
    """Line number of each row."""
    faults: list[LineFault] = field(default_factory=list[LineFault])
    warnings: list[str] = field(default_factory=list[str])


def parse_file(data: bytes, form: RowFormat) -> ParsedFile:
    """Parses a file.

    Lines end at \\n only: U+2028 and its kind are ordinary characters inside a JSON string. Blank lines are skipped.
    """
    parsed = ParsedFile()
    if data.startswith(_BOM):
        data = data.removeprefix(_BOM)
        parsed.warnings.append("The file begins with a byte order mark; it was skipped.")
    prompts: set[bytes] = set()
    num_duplicates = num_ignored = num_earlier = 0
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if not raw.strip():
            continue
        faults: list[RowFault] = []
        try:
            value = _parse_line(raw)
        except RowFault as fault:
            faults.append(fault)
            value = {}
        else:
            faults += form.faults(value)
        if faults:
            parsed.faults += [LineFault(line=number, code=f.code, message=f.message) for f in faults]
            continue
        row = form.row(value)
        num_ignored += any(key in m for m in form.messages(value) for key in IGNORED_KEYS)
        num_earlier += form.kind == "answers" and any(m["role"] == "assistant" for m in row.messages)
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
        parsed.warnings.append(f"{num_ignored} rows have messages with {' or '.join(IGNORED_KEYS)}, which is not used.")
    if num_earlier:
        parsed.warnings.append(f"{num_earlier} rows have earlier answers of the assistant; only the last message is learned.")
    return parsed


def check_file(
    data: bytes, form: RowFormat, verbs: Verbs, *, max_model_len: int, max_completion_tokens: int, between: Callable[[], None]
) -> DatasetReport:
    """Parses, renders and counts a file.

    Args:
        max_model_len: tokens of the base's context; a row that does not fit into it is a fault.
        max_completion_tokens: what must fit beside a prompt; rows with answers bring their own.
        between: called between chunks; may raise to stop.
    Raises:
        Unavailable: the engine does not answer.
    """
    parsed = parse_file(data, form)
    room = max_completion_tokens if form.kind == "prompts" else 0
    lengths: list[int] = []
    for line, measured in _lengths(parsed, verbs, between):
        if isinstance(measured, InvalidInput):
            parsed.faults.append(LineFault(line=line, code="template_refused", message=measured.message))
            continue
        prompt, answer = measured
        if prompt + room > max_model_len:
            message = (
                f"The prompt has {prompt} tokens; at most {max_model_len - room} fit beside the completion. Shorten it or lower max_tokens."
            )
            parsed.faults.append(LineFault(line=line, code="prompt_too_long", message=message))
        elif prompt + answer > max_model_len:
            message = f"Prompt and answer have {prompt} and {answer} tokens; at most {max_model_len} fit together. Shorten one."
            parsed.faults.append(LineFault(line=line, code="answer_too_long", message=message))
        else:
            lengths.append(prompt)
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


def _lengths(parsed: ParsedFile, verbs: Verbs, between: Callable[[], None]) -> Iterator[tuple[int, tuple[int, int] | InvalidInput]]:
    """(line, tokens of its prompt and of its longest answer)."""
    for start in range(0, len(parsed.rows), RENDER_CHUNK_ROWS):
        between()
        rows, lines = parsed.rows[start : start + RENDER_CHUNK_ROWS], parsed.lines[start : start + RENDER_CHUNK_ROWS]
        try:
            measured = _measure(verbs, rows)
        except InvalidInput:
            # The template refused one of them; one by one, every such row gets its own fault.
            for row, line in zip(rows, lines, strict=True):
                try:
                    yield line, _measure(verbs, [row])[0]
                except InvalidInput as error:
                    yield line, error
        else:
            yield from zip(lines, measured, strict=True)


def _measure(verbs: Verbs, rows: Sequence[PromptRow]) -> list[tuple[int, int]]:
    prompts = [len(tokens) for tokens in verbs.render([row.messages for row in rows])]
    if not rows[0].answers:
        return [(prompt, 0) for prompt in prompts]
    whole = [[*row.messages, {"role": "assistant", "content": answer}] for row in rows for answer in row.answers]
    answers = [len(tokens) for tokens in verbs.render_answers(whole)]
    per_row = len(rows[0].answers)
    return [(prompt, max(answers[i * per_row : (i + 1) * per_row])) for i, prompt in enumerate(prompts)]


def _stats(lengths: Sequence[int]) -> TokenStats:
    ordered = sorted(lengths)
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return TokenStats(min=ordered[0], mean=sum(ordered) / len(ordered), p95=p95, max=ordered[-1])


def _parse_line(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowFault("not_utf8", f"Byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8.") from None
    try:
        value: Any = json.loads(text, parse_constant=_no_constant)
        # A lone surrogate parses and can't be written again, so no tokenizer takes it.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RowFault("invalid_json", "A string holds half of a surrogate pair (\\ud800 to \\udfff); remove it.") from None
    except json.JSONDecodeError as error:
        raise RowFault("invalid_json", f"Not JSON at column {error.colno}: {error.msg}. Each row is one object on one line.") from None
    except (ValueError, RecursionError) as error:
        raise RowFault("invalid_json", f"Not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise RowFault("not_an_object", f'A row is an object {{"messages": [...], ...}}, not {type(value).__name__}.')
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
