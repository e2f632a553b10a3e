"""What a line of a job's file must hold, by what the job does with it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from core.contracts import JobSpec
from engine.graders import item_paths
from engine.graders.templates import lookup
from engine.loop.rows import PromptRow

IGNORED_KEYS = ("name", "weight")
_ROLES = ("system", "developer", "user", "assistant")
_PAIR_FIELDS = ("input", "preferred_output", "non_preferred_output")


class RowFault(Exception):
    """One fault of one line."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(frozen=True)
class RowFormat:
    """The form of a file's rows.

    prompts: {messages, fields that the grader reads}, the policy is to answer; answers: the last message is the answer to learn;
    pairs: {input: {messages}, preferred_output: [message], non_preferred_output: [message]}.
    """

    kind: Literal["prompts", "answers", "pairs"]
    needed: Sequence[tuple[str, ...]] = ()
    """Fields that the grader reads, as paths."""
    answer_field: str | None = None
    """Of prompts: the field whose text a warm-up learns."""
    difficulty_field: str | None = None

    @classmethod
    def of(cls, spec: JobSpec, *, training: bool) -> "RowFormat":
        """What the job wants of its training or validation file."""
        sorted_by = spec.curriculum.difficulty_field if training and spec.curriculum.mode == "difficulty" else None
        if not spec.algorithm.samples:
            return cls("answers" if spec.algorithm.name == "sft" else "pairs", difficulty_field=sorted_by)
        answers = spec.warm_up.answer_field if training and spec.warm_up.steps else None
        return cls("prompts", sorted(item_paths(spec.grader)), answers, sorted_by)

    def faults(self, value: Mapping[str, Any]) -> Iterator[RowFault]:
        """Everything that is wrong with a row."""
        if self.kind == "pairs":
            yield from _pair_faults(value)
        else:
            yield from _message_faults(value.get("messages"), "messages", ends_with_answer=self.kind == "answers")
        item = self._item(value)
        for path in self.needed:
            try:
                lookup(item, path)
            except KeyError:
                name = ".".join(path)
                yield RowFault("missing_field", f"The field {name!r} is missing; the grader reads {{{{item.{name}}}}}.")
        if self.answer_field is not None and not (isinstance(item.get(self.answer_field), str) and item[self.answer_field]):
            yield RowFault("bad_answer", f"The field {self.answer_field!r} must be a text that is not empty: the warm-up learns it.")
        if self.difficulty_field is not None and not _is_number(item.get(self.difficulty_field)):
            yield RowFault("bad_difficulty", f"The field {self.difficulty_field!r} must be a number: the curriculum sorts by it.")

    def row(self, value: Mapping[str, Any]) -> PromptRow:
        """The row of a value without a fault."""
        item = self._item(value)
        if self.kind == "pairs":
            answers = tuple(_text_of(value[name][0]["content"]) or "" for name in _PAIR_FIELDS[1:])
            return PromptRow(_plain(value["input"]["messages"]), item, answers)
        messages = _plain(value["messages"])
        if self.kind == "answers":
            return PromptRow(messages[:-1], item, (messages[-1]["content"],))
        return PromptRow(messages, item, () if self.answer_field is None else (item[self.answer_field],))

    def messages(self, value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Every message of a value without a fault."""
        if self.kind != "pairs":
            return value["messages"]
        return [*value["input"]["messages"], *value["preferred_output"], *value["non_preferred_output"]]

    def _item(self, value: Mapping[str, Any]) -> dict[str, Any]:
        own = _PAIR_FIELDS if self.kind == "pairs" else ("messages",)
        return {name: field for name, field in value.items() if name not in own}


def _pair_faults(value: Mapping[str, Any]) -> Iterator[RowFault]:
    asked = value.get("input")
    if not isinstance(asked, dict):
        yield RowFault("bad_input", 'input is missing or no object; give {"messages": [...]}.')
    else:
        unknown = sorted(name for name, field in asked.items() if name != "messages" and field)
        if unknown:
            yield RowFault("bad_input", f"input has the field {unknown[0]!r}, which is not supported; remove it.")
        yield from _message_faults(asked.get("messages"), "input.messages", ends_with_answer=False)
    for name in _PAIR_FIELDS[1:]:
        answer = value.get(name)
        if not isinstance(answer, list) or len(answer) != 1:
            yield RowFault("bad_output", f"{name} must be a list of one message, the assistant's.")
            continue
        yield from _faults_of_one(answer[0], f"{name}[0]")
        if isinstance(answer[0], dict) and answer[0].get("role") in _ROLES[:-1]:
            yield RowFault("bad_role", f"{name}[0].role is {answer[0]['role']!r}; it must be assistant.")
    texts = [_text_of(value[name][0].get("content")) if _is_message_list(value.get(name)) else None for name in _PAIR_FIELDS[1:]]
    if texts[0] is not None and texts[0] == texts[1]:
        yield RowFault("equal_outputs", "Both outputs have the same text, so neither is preferred.")


def _message_faults(messages: Any, where: str, *, ends_with_answer: bool) -> Iterator[RowFault]:
    if not isinstance(messages, list) or not messages:
        yield RowFault("no_messages", f"{where} is missing or empty; give at least one message with role user.")
        return
    for i, message in enumerate(messages):
        yield from _faults_of_one(message, f"{where}[{i}]")
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    if ends_with_answer:
        if roles[-1] in _ROLES[:-1]:
            yield RowFault("last_not_assistant", "The last message must be the assistant's: it is the answer that is learned.")
        elif roles[-1] == "assistant" and "user" not in roles[:-1]:
            yield RowFault("no_prompt", "There is no message of the user's before the assistant's; an answer is learned to a prompt.")
        return
    if roles[-1] == "assistant":
        yield RowFault(
            "last_is_assistant",
            "The last message is the assistant's, which the policy is to write: remove it, and put the wanted answer into a field beside "
            'messages, e.g. "answer", that the grader reads as {{item.answer}}.',
        )
    elif roles[-1] in ("system", "developer"):
        yield RowFault("last_not_user", "The last message must be the user's; add one or move this one to the front.")


def _faults_of_one(message: Any, where: str) -> Iterator[RowFault]:
    if not isinstance(message, dict):
        yield RowFault("bad_message", f"{where} is not an object with role and content.")
        return
    if message.get("role") not in _ROLES:
        yield RowFault("bad_role", f"{where}.role is {message.get('role')!r}; use one of {', '.join(_ROLES)}.")
    if _text_of(message.get("content")) is None:
        yield RowFault("bad_content", f"{where}.content must be a string that is not empty, or a list of text parts.")
    unknown = sorted(set(message) - {"role", "content", *IGNORED_KEYS})
    if unknown:
        yield RowFault("bad_message", f"{where} has the field {unknown[0]!r}, which is not supported; remove it.")


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _text_of(content: Any) -> str | None:
    """The text of a message, parts joined; None where it is neither a string nor text parts, or empty."""
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
        texts = [p for p in parts if isinstance(p, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    return content if isinstance(content, str) and content else None


def _plain(messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], ...]:
    # Chat templates of open models know system, not OpenAI's newer name for it.
    roles = {"developer": "system"}
    return tuple({"role": str(roles.get(m["role"], m["role"])), "content": _text_of(m["content"]) or ""} for m in messages)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
