"""Messages and text to tokens, by the base's own tokenizer and chat template, off the event loop."""

import asyncio
import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jinja2
import numpy as np

from core.errors import InvalidInput
from engine.types import IntArray


class ChatTokenizer:
    """One tokenizer in one thread of its own: transformers' tokenizers may not be shared between threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    def copy(self) -> Any:
        """A tokenizer for another thread."""
        return copy.deepcopy(self._tokenizer)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    async def render(self, conversations: Sequence[object], param: str = "conversations") -> list[IntArray]:
        """Tokens of each conversation, the assistant's turn opened at the end.

        Raises:
            InvalidInput: a conversation is malformed or the template refuses it; param is `conversations[i]`.
        """

        def work() -> list[IntArray]:
            return [self._render(conversation, f"{param}[{i}]") for i, conversation in enumerate(conversations)]

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def render_answers(
        self, conversations: Sequence[object], eos_tokens: Sequence[int], param: str = "conversations"
    ) -> list[IntArray]:
        """Tokens of each conversation's last message, the assistant's, as they follow `render` of the messages before it.

        Args:
            eos_tokens: the base's; what a template writes after the last of them is no part of the answer.
        Raises:
            InvalidInput: as `render`; or the last message is not the assistant's, or is alone.
        """

        def work() -> list[IntArray]:
            return [self._answer(conversation, eos_tokens, f"{param}[{i}]") for i, conversation in enumerate(conversations)]

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def encode(self, texts: Sequence[str]) -> list[IntArray]:
        """Tokens of plain prompts, with the special tokens that the tokenizer adds by itself."""

        def work() -> list[IntArray]:
            return [np.array(self._tokenizer(text)["input_ids"], dtype=np.int32) for text in texts]

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _render(self, conversation: object, param: str) -> IntArray:
        return self._tokens(self._text(_plain_messages(conversation, param), param, opened=True))

    def _answer(self, conversation: object, eos_tokens: Sequence[int], param: str) -> IntArray:
        messages = _plain_messages(conversation, param)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise InvalidInput("An answer is the last message, by the assistant, after at least one other.", param=param)
        prompt, whole = self._text(messages[:-1], param, opened=True), self._text(messages, param, opened=False)
        # Tokenised apart from the prompt, as a sampled completion is. A template that opens a turn otherwise than it writes one (to make
        # room for thoughts, say) gives no such end: then it is the plain content.
        tokens = self._tokens(whole.removeprefix(prompt) if whole.startswith(prompt) else messages[-1]["content"])
        ends = [i for i, token in enumerate(tokens.tolist()) if token in eos_tokens]
        if ends:
            return tokens[: ends[-1] + 1]
        return np.append(tokens, np.int32(self._tokenizer.eos_token_id))

    def _text(self, messages: list[dict[str, Any]], param: str, *, opened: bool) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened))
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidInput(f"The chat template refuses this conversation: {error}", param=param) from error

    def _tokens(self, text: str) -> IntArray:
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def _plain_messages(conversation: object, param: str) -> list[dict[str, Any]]:
    if not isinstance(conversation, (list, tuple)) or not conversation:
        raise InvalidInput("A conversation is a non-empty list of messages.", param=param)
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(cast("Sequence[object]", conversation)):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidInput("A message is an object with a role and content.", param=f"{param}[{i}]")
        plain = {str(key): value for key, value in cast("Mapping[object, Any]", message).items()}
        messages.append({**plain, "content": _plain_content(plain.get("content"), f"{param}[{i}].content")})
    return messages


def _plain_content(content: object, param: str) -> str:
    """Text of a message; its parts joined by newlines, as vLLM does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(cast("list[str]", texts))
    raise InvalidInput("content is a string or a list of parts of type text; this base reads nothing else.", param=param)
