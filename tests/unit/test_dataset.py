"""Training files: every valid line is one row, every fault has its line number."""

import json
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from core.contracts import DatasetReport, Grader
from core.errors import InvalidInput
from engine.graders import item_paths
from tests.scripted_engine import ScriptedClient, ScriptedEngine
from workers.dataset import MAX_LISTED_FAULTS, check_file, parse_file
from workers.row_formats import RowFormat

GRADER: Any = TypeAdapter(Grader).validate_python(
    {"type": "string_check", "name": "g", "input": "{{sample.output_text}}", "reference": "{{item.order.id}}", "operation": "eq"}
)
PROMPTS = RowFormat("prompts", sorted(item_paths(GRADER)))
USER = {"role": "user", "content": "Which order?"}
ANSWER = {"role": "assistant", "content": "Order 1."}


def row(*messages: Any, **fields: Any) -> bytes:
    value = {"messages": list(messages) or [USER], "order": {"id": "1"}} | fields
    return json.dumps(value, ensure_ascii=False).encode()


def check(data: bytes, form: RowFormat = PROMPTS, verbs: ScriptedClient | None = None) -> DatasetReport:
    verbs = verbs or ScriptedClient(ScriptedEngine(), 0)
    return check_file(data, form, verbs, max_model_len=60, max_completion_tokens=20, between=lambda: None)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"\xff\xfe{}", "not_utf8"),
        (b'{"messages": [', "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "x"}], "order": {"id": NaN}}', "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}], "order": {"id": "1"}}', "invalid_json"),
        (b"[" * 200_000, "invalid_json"),
        (b"[1]", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b'{"order": {"id": "1"}}', "no_messages"),
        (row(messages=[]), "no_messages"),
        (row(messages="hello"), "no_messages"),
        (row("hello"), "bad_message"),
        (row({"role": "robot", "content": "x"}), "bad_role"),
        (row({"role": "user", "content": ""}), "bad_content"),
        (row({"role": "user", "content": None}), "bad_content"),
        (row({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}), "bad_content"),
        (row({"role": "user", "content": "x", "tool_calls": []}), "bad_message"),
        (row(USER, {"role": "assistant", "content": "Order 1."}), "last_is_assistant"),
        (row(USER, {"role": "system", "content": "Be brief."}), "last_not_user"),
        (row(order={"total": 1}), "missing_field"),
        (row({"role": "user", "content": "long " * 20}), "prompt_too_long"),
    ],
)
def test_each_fault_is_found_on_its_line(line: bytes, code: str) -> None:
    report = check(b"\n".join([row(), b"", line, row()]) + b"\n")
    assert [(fault.line, fault.code) for fault in report.faults] == [(3, code)]
    assert report.num_rows == 2


def test_all_faults_are_found_also_several_of_one_line() -> None:
    report = check(b"\n".join([b"{", row({"role": "x", "content": 1}, order=None), row(), b"[]"]))
    assert [(fault.line, fault.code) for fault in report.faults] == [
        (1, "invalid_json"), (2, "bad_role"), (2, "bad_content"), (2, "missing_field"), (4, "not_an_object"),
    ]  # fmt: skip


def test_faults_are_counted_beyond_those_that_are_listed() -> None:
    report = check(b"{\n" * (MAX_LISTED_FAULTS + 5))
    assert (report.num_faults, len(report.faults)) == (MAX_LISTED_FAULTS + 5, MAX_LISTED_FAULTS)


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_a_newline_ends_a_row(character: str) -> None:
    content = f"a{character}b"
    line = row({"role": "user", "content": content})
    if character < " ":
        assert character.encode() not in line
    parsed = parse_file(line + b"\r\n" + row(), PROMPTS)
    assert [r.messages[0]["content"] for r in parsed.rows] == [content, USER["content"]]
    assert parsed.lines == [1, 2]


def test_byte_order_mark_is_skipped_and_said() -> None:
    report = check(b"\xef\xbb\xbf" + row())
    assert (report.num_rows, report.num_faults) == (1, 0)
    assert any("byte order mark" in warning for warning in report.warnings)


def test_utf16_file_is_refused_by_line() -> None:
    assert check(row().decode().encode("utf-16")).faults[0].code == "not_utf8"


def test_file_without_rows_is_a_fault() -> None:
    assert [fault.code for fault in check(b"\n  \n").faults] == ["no_rows"]


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "Which "}, {"type": "text", "text": "order?"}]
    parsed = parse_file(
        row({"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": "Ann"}, extra=[1]), PROMPTS
    )
    assert parsed.rows[0].messages == ({"role": "system", "content": "Be brief."}, USER)
    assert parsed.rows[0].item == {"order": {"id": "1"}, "extra": [1]}
    assert any("name" in warning for warning in parsed.warnings)


def test_repeated_prompts_are_a_warning() -> None:
    report = check(b"\n".join([row(), row(order={"id": "2"}), row({"role": "user", "content": "Other?"}), row()]))
    assert report.num_faults == 0
    assert any(warning.startswith("2 rows repeat") for warning in report.warnings)


def test_report_sums_up_tokens_and_fields() -> None:
    lines = [row({"role": "user", "content": "x" * n}, **({"only_here": 1} if n == 1 else {})) for n in range(1, 21)]
    report = check(b"\n".join(lines))
    assert report.prompt_tokens is not None
    assert report.prompt_tokens.model_dump() == {"min": 1, "mean": 10.5, "p95": 19, "max": 20}
    assert report.item_fields == ("order",)


def test_row_that_the_template_refuses_has_its_own_line() -> None:
    class Picky(ScriptedClient):
        def render(self, conversations: Any) -> list[Any]:
            if any("assistant" in [m["role"] for m in c] for c in conversations):
                raise InvalidInput("The chat template wants the user first.", param="conversations[1]")
            return [np.zeros(3, dtype=np.int32) for _ in conversations]

    data = b"\n".join([row(), row({"role": "assistant", "content": "Hi."}, USER), row()])
    report = check(data, verbs=Picky(ScriptedEngine(), 0))
    assert [(fault.line, fault.code) for fault in report.faults] == [(2, "template_refused")]
    assert report.num_rows == 2


def pair(**changes: Any) -> bytes:
    value = {"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [{**ANSWER, "content": "No."}]}
    return json.dumps(value | changes).encode()


ANSWERS, PAIRS = RowFormat("answers"), RowFormat("pairs")


def test_rows_of_each_method_hold_their_answers() -> None:
    [learned] = parse_file(row({"role": "system", "content": "Be brief."}, USER, ANSWER, level=2), ANSWERS).rows
    assert (learned.messages[-1], learned.answers, learned.item["level"]) == (USER, ("Order 1.",), 2)
    [preferred] = parse_file(pair(level=2), PAIRS).rows
    assert (preferred.messages, preferred.answers, preferred.item) == ((USER,), ("Order 1.", "No."), {"level": 2})
    [warmed] = parse_file(row(answer="One."), RowFormat("prompts", answer_field="answer")).rows
    assert (warmed.messages, warmed.answers) == ((USER,), ("One.",))


@pytest.mark.parametrize(
    ("form", "line", "code"),
    [
        (ANSWERS, row(), "last_not_assistant"),
        (ANSWERS, row(ANSWER), "no_prompt"),
        (ANSWERS, row({"role": "user", "content": "x" * 40}, {**ANSWER, "content": "y" * 20}), "answer_too_long"),
        (ANSWERS, row({"role": "user", "content": "x" * 61}, ANSWER), "prompt_too_long"),
        (PAIRS, row(), "bad_input"),
        (PAIRS, pair(input={"messages": [USER], "tools": [{}]}), "bad_input"),
        (PAIRS, pair(input={"messages": []}), "no_messages"),
        (PAIRS, pair(input={"messages": [USER, ANSWER]}), "last_is_assistant"),
        (PAIRS, pair(preferred_output=[]), "bad_output"),
        (PAIRS, pair(preferred_output=[ANSWER, ANSWER]), "bad_output"),
        (PAIRS, pair(non_preferred_output=[USER]), "bad_role"),
        (PAIRS, pair(non_preferred_output=[ANSWER]), "equal_outputs"),
        (PAIRS, pair(non_preferred_output=["No."]), "bad_message"),
        (RowFormat("prompts", answer_field="answer"), row(), "bad_answer"),
        (RowFormat("prompts", answer_field="answer"), row(answer=""), "bad_answer"),
        (RowFormat("prompts", answer_field="answer"), row(answer="z" * 60), "answer_too_long"),
        (RowFormat("prompts", difficulty_field="level"), row(), "bad_difficulty"),
        (RowFormat("prompts", difficulty_field="level"), row(level=True), "bad_difficulty"),
        (RowFormat("prompts", difficulty_field="level"), row(level="3"), "bad_difficulty"),
    ],
)
def test_faults_of_each_method_name_their_line(form: RowFormat, line: bytes, code: str) -> None:
    report = check(b"\n\n" + line, form)
    assert code in [fault.code for fault in report.faults]
    assert {fault.line for fault in report.faults} == {3}
    assert report.num_rows == 0


def test_earlier_answers_are_told_to_be_context_only() -> None:
    report = check(row(USER, ANSWER, USER, ANSWER), ANSWERS)
    assert (report.num_rows, report.num_faults) == (1, 0)
    assert any("earlier answers" in warning for warning in report.warnings)
