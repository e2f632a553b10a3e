"""Answers of the serving routes, in OpenAI's shapes as vLLM fills them."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from core.errors import EspalierError
from engine.rollouts.requests import Piece
from engine.rollouts.sampler import Draw
from engine.types import Completion

_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 413: "BadRequestError", 503: "ServiceUnavailableError"}


def error_body(error: EspalierError) -> dict[str, Any]:
    """vLLM's error shape: `code` is the HTTP status."""
    kind = _ERROR_TYPES.get(error.http_status, "InternalServerError")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.http_status}}


def event(content: object) -> str:
    """One server-sent event."""
    return f"data: {content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)}\n\n"


def usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    """Token counts of one request."""
    return {
        "prompt_tokens": num_prompt_tokens, "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }  # fmt: skip


@dataclass
class Answer:
    """Makes the objects of one request.

    Args:
        chat: chat completions, else text completions.
        num_logprobs: likeliest tokens beside each sampled one; None: no logprobs at all.
        tokenizer: turns ids into the text that logprobs name.
    """

    chat: bool
    model: str
    num_logprobs: int | None
    tokenizer: Any
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _lengths: dict[int, int] = field(default_factory=dict[int, int])

    def whole(self, choices: Sequence[tuple[Completion, Sequence[Draw]]], num_prompt_tokens: int) -> dict[str, Any]:
        """The answer that is no stream; choices in order of index."""
        listed = [self._choice(i, c.text, draws, c.finish_reason) for i, (c, draws) in enumerate(choices)]
        return {**self._frame(stream=False), "choices": listed, "usage": usage(num_prompt_tokens, sum(len(d) for _, d in choices))}

    def opening(self, index: int) -> dict[str, Any]:
        """A chat stream's first chunk of a choice: the role."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return {**self._frame(stream=True), "choices": [choice]}

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """A stream's chunk for one token."""
        choice = self._choice(index, piece.text, [piece.draw], piece.finish_reason, stream=True)
        return {**self._frame(stream=True), "choices": [choice]}

    def closing(self, num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, Any]:
        """A stream's usage chunk."""
        return {**self._frame(stream=True), "choices": [], "usage": usage(num_prompt_tokens, num_completion_tokens)}

    def _frame(self, *, stream: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if stream else "chat.completion") if self.chat else "text_completion"
        return {"id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, text: str, draws: Sequence[Draw], finish_reason: str | None, *, stream: bool = False) -> dict[str, Any]:
        logprobs = None
        if self.num_logprobs is not None:
            logprobs = self._chat_logprobs(draws) if self.chat else self._text_logprobs(index, draws)
        if not self.chat:
            content: dict[str, Any] = {"text": text}
        elif stream:
            content = {"delta": {"content": text}}
        else:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _chat_logprobs(self, draws: Sequence[Draw]) -> dict[str, Any]:
        return {"content": [{**self._named(d.token, d.logprob), "top_logprobs": [self._named(*top) for top in d.top]} for d in draws]}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _text_logprobs(self, index: int, draws: Sequence[Draw]) -> dict[str, Any]:
        tokens = [self._text(d.token) for d in draws]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._lengths.get(index, 0))
            self._lengths[index] = offsets[-1] + len(token)
        # The sampled token is always among the named ones, as in vLLM, even where it is not among the likeliest.
        tops = [{self._text(t): p for t, p in (*d.top, (d.token, d.logprob))} for d in draws] if self.num_logprobs else None
        return {"tokens": tokens, "token_logprobs": [d.logprob for d in draws], "top_logprobs": tops, "text_offset": offsets}

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))
