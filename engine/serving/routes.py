"""The serving routes: vLLM's OpenAI server, as far as this engine goes.

GET /v1/models; POST /v1/completions, /v1/chat/completions, /v1/load_lora_adapter, /v1/unload_lora_adapter.
"""

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pydantic
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from core.errors import InvalidInput
from engine.chat import ChatTokenizer
from engine.http_errors import as_espalier_error, read_body, until_disconnect
from engine.lora import Adapter
from engine.rollouts.local import LocalRollouts
from engine.rollouts.requests import Generation, Piece
from engine.serving.adapters import ServingAdapters
from engine.serving.responses import Answer, error_body, event
from engine.serving.schemas import ChatRequest, CompletionRequest, LoadLoraRequest, UnloadLoraRequest
from engine.types import BaseModelInfo, IntArray, SamplingParams
from engine.verbs import check_tokens

MAX_BODY_BYTES = 16 * 2**20
DEFAULT_MAX_TOKENS = 16
"""Of text completions, as OpenAI has it; a chat may fill the context."""
M = TypeVar("M", bound=pydantic.BaseModel)
logger = logging.getLogger(__name__)
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class _Work:
    """One request, ready to generate: a generation a prompt, each with the same number of choices."""

    generations: list[Generation]
    answer: Answer
    include_usage: bool

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(g.prompt_tokens) for g in self.generations)


class ServingRoutes:
    """Serves the base and the loaded adapters.

    Args:
        tokenizer: for names of tokens in logprobs; used on the event loop only.
    """

    def __init__(
        self, info: BaseModelInfo, rollouts: LocalRollouts, adapters: ServingAdapters, chat: ChatTokenizer, tokenizer: Any
    ) -> None:
        self._info = info
        self._rollouts = rollouts
        self._adapters = adapters
        self._chat = chat
        self._tokenizer = tokenizer

    def routes(self) -> list[Route]:
        """For the app."""
        return [
            Route("/v1/models", _answering(self._models), methods=["GET"]),
            Route("/v1/completions", _answering(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", _answering(self._chat_completions), methods=["POST"]),
            Route("/v1/load_lora_adapter", _answering(self._load), methods=["POST"]),
            Route("/v1/unload_lora_adapter", _answering(self._unload), methods=["POST"]),
        ]

    async def _models(self, request: Request) -> Response:
        base: dict[str, Any] = {"id": self._info.name, "object": "model", "created": 0, "owned_by": "espalier", "root": self._info.name}
        listed = [{**base, "parent": None, "max_model_len": self._info.max_model_len}]
        listed += [{**base, "id": name, "parent": self._info.name} for name in self._adapters.names]
        return JSONResponse({"object": "list", "data": listed})

    async def _load(self, request: Request) -> Response:
        body = await _parse(request, LoadLoraRequest)
        await self._adapters.load(body.lora_name, Path(body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        body = await _parse(request, UnloadLoraRequest)
        self._adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _completions(self, request: Request) -> Response:
        body = await _parse(request, CompletionRequest)
        adapter = self._adapters.get(body.model)
        prompts = await self._prompts(body.prompt)
        answer = Answer(False, body.model or self._info.name, body.logprobs, self._tokenizer)
        max_tokens = body.max_tokens or DEFAULT_MAX_TOKENS
        return await self._run(request, body, self._work(body, adapter, prompts, max_tokens, answer))

    async def _chat_completions(self, request: Request) -> Response:
        body = await _parse(request, ChatRequest)
        adapter = self._adapters.get(body.model)
        [prompt] = await self._chat.render([body.messages], "messages")
        answer = Answer(True, body.model or self._info.name, (body.top_logprobs or 0) if body.logprobs else None, self._tokenizer)
        # At least 1, so that a prompt that fills the context is refused with the numbers.
        max_tokens = body.max_completion_tokens or body.max_tokens or max(1, self._info.max_model_len - len(prompt))
        return await self._run(request, body, self._work(body, adapter, [prompt], max_tokens, answer))

    async def _prompts(self, prompt: str | list[int] | list[str | list[int]]) -> list[IntArray]:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]  # pyright: ignore[reportAssignmentType] - one prompt: its text or its ids
        if not prompt:
            raise InvalidInput("prompt is empty; it needs at least one token.", param="prompt")
        encoded: list[IntArray] = []
        for item in prompt:
            if isinstance(item, str):
                encoded += await self._chat.encode([item])
            else:
                tokens = np.array(item, dtype=np.int64).clip(0, 2**31 - 1).astype(np.int32)
                check_tokens(tokens, "prompt", self._info.vocab_size)
                encoded.append(tokens)
        return encoded

    def _work(
        self, body: ChatRequest | CompletionRequest, adapter: Adapter | None, prompts: Sequence[IntArray], max_tokens: int, answer: Answer
    ) -> _Work:
        count = body.n or 1
        temperature, top_p = (1.0 if body.temperature is None else body.temperature), body.top_p or 1.0
        owner = ("serve", body.cache_salt or answer.model)
        generations: list[Generation] = []
        for i, prompt in enumerate(prompts):
            first_seed = secrets.randbits(63) if body.seed is None else body.seed + i * count
            params = tuple(SamplingParams(max_tokens, temperature, top_p, body.stops, first_seed + j) for j in range(count))
            generations.append(Generation(owner, adapter, prompt, params, num_top_logprobs=answer.num_logprobs or 0, interactive=True))
        self._rollouts.check(generations)
        return _Work(generations, answer, body.stream_options is not None and body.stream_options.include_usage)

    async def _run(self, request: Request, body: ChatRequest | CompletionRequest, work: _Work) -> Response:
        if body.stream:
            return StreamingResponse(self._events(request, work), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        results = await until_disconnect(request, self._rollouts.generate(work.generations))
        choices = [
            (completion, draws)
            for generation, completions in zip(work.generations, results, strict=True)
            for completion, draws in zip(completions, generation.draws, strict=True)
        ]
        return JSONResponse(work.answer.whole(choices, work.num_prompt_tokens))

    async def _events(self, request: Request, work: _Work) -> AsyncGenerator[str]:
        pieces: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for i, generation in enumerate(work.generations):
            first = i * len(generation.params)

            def deliver(piece: Piece, first: int = first) -> None:
                loop.call_soon_threadsafe(pieces.put_nowait, (first + piece.index, piece))

            generation.on_piece = deliver
        task = asyncio.ensure_future(self._rollouts.generate(work.generations))
        # The results come over the loop after the last piece's own callback: the end marker is behind every piece.
        task.add_done_callback(lambda _: pieces.put_nowait(None))
        opened: set[int] = set()
        num_tokens = 0
        try:
            while (item := await pieces.get()) is not None:
                index, piece = item
                num_tokens += 1
                if work.answer.chat and index not in opened:
                    opened.add(index)
                    yield event(work.answer.opening(index))
                if piece.text or piece.finish_reason is not None or work.answer.num_logprobs is not None:
                    yield event(work.answer.chunk(index, piece))
                if await request.is_disconnected():
                    return
            await task
            if work.include_usage:
                yield event(work.answer.closing(work.num_prompt_tokens, num_tokens))
        except Exception as error:
            logger.exception("A stream broke off")
            yield event(error_body(as_espalier_error(error)))
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        yield event("[DONE]")


async def _parse(request: Request, kind: type[M]) -> M:
    body = await read_body(request, MAX_BODY_BYTES)
    try:
        content: object = json.loads(body)
    except ValueError as error:
        raise InvalidInput("The body is not JSON.") from error
    return kind.model_validate(content)


def _answering(endpoint: Endpoint) -> Endpoint:
    """Errors in vLLM's shape."""

    async def answered(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            told = as_espalier_error(error)
            if told.http_status >= 500:
                logger.exception("%s failed", request.url.path)
            return JSONResponse(error_body(told), status_code=told.http_status)

    return answered
