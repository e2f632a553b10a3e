"""A serving replica that speaks vLLM's HTTP and says what it is told to: a real server on a real socket, with no model behind it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

# U+2028 is a line end for str.splitlines and none for JSON or SSE.
WORDS = ("one", " two\u2028", " three")


class ScriptedReplica:
    """What it holds, what it was asked, and how it behaves."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.loaded: dict[str, str] = {}
        self.requests: list[dict[str, Any]] = []
        self.num_loads = 0
        self.num_open = 0
        self.chunk_delay_s = 0.0
        self.first_delay_s = 0.0
        self.break_after: int | None = None
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _health(self, _request: Request) -> Response:
        return Response()

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        self.num_loads += 1
        folder = Path(body["lora_path"])
        if not (folder / "adapter_model.safetensors").is_file():
            return _error(400, f"no adapter in {folder}")
        self.loaded[body["lora_name"]] = body["lora_path"]
        return Response("Success")

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        body = await request.json()
        self.requests.append(body)
        if body["model"] != self.base and body["model"] not in self.loaded:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if body.get("max_tokens") == 4096:
            return _error(400, f"{body['model']}: max_tokens is too large")
        usage = {"prompt_tokens": 7, "completion_tokens": len(WORDS), "total_tokens": 7 + len(WORDS)}
        if body["stream"]:
            return StreamingResponse(self._stream(body, usage, chat=chat), media_type="text/event-stream")
        self.num_open += 1
        try:
            until_s = time.monotonic() + self.first_delay_s
            while time.monotonic() < until_s:
                if await request.is_disconnected():
                    return Response()
                await asyncio.sleep(0.01)
        finally:
            self.num_open -= 1
        text = "".join(WORDS)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        kind = "chat.completion" if chat else "text_completion"
        return JSONResponse({"id": "c-1", "object": kind, "created": 1, "model": body["model"], "choices": [choice], "usage": usage})

    async def _stream(self, body: dict[str, Any], usage: dict[str, int], *, chat: bool) -> AsyncIterator[bytes]:
        self.num_open += 1
        try:
            head = {"id": "c-1", "object": "chat.completion.chunk" if chat else "text_completion", "created": 1, "model": body["model"]}
            for index, word in enumerate(WORDS):
                if index == self.break_after:
                    raise ConnectionError("scripted")
                await asyncio.sleep(self.chunk_delay_s)
                part = {"delta": {"content": word}} if chat else {"text": word}
                yield _event({**head, "choices": [{"index": 0, "finish_reason": None, **part}]})
            if body["stream_options"]["include_usage"]:
                yield _event({**head, "choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        finally:
            self.num_open -= 1


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "x", "param": None, "code": status}}, status)
