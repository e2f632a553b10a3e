"""The engine host: `python -m engine.host`. One process, one base, one compute thread; the verbs for workers, vLLM's routes for serving.

It has no authentication of its own and belongs on a private address.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from core.settings import Settings, get_settings
from engine import wire
from engine.backends.torch import TorchTrainer
from engine.base_model import load_base
from engine.chat import ChatTokenizer
from engine.compute import Compute
from engine.device import keep_memory, set_threads
from engine.http_errors import as_espalier_error, read_body, until_disconnect
from engine.model import BaseModel
from engine.rollouts.batcher import Batcher
from engine.rollouts.factory import make_rollouts
from engine.rollouts.local import LocalRollouts
from engine.serving.adapters import ServingAdapters
from engine.serving.routes import ServingRoutes
from engine.types import BaseModelInfo
from engine.verbs import VerbService

MAX_BODY_BYTES = 2**30
"""A state of rank 64 on all linear layers of a base of this size is about a quarter of it."""
KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that they close it and don't find it closed under a request."""
logger = logging.getLogger(__name__)


class EngineHost:
    """All parts of one engine, and their HTTP."""

    def __init__(self, settings: Settings, base: BaseModel, tokenizer: Any, info: BaseModelInfo) -> None:
        self.trainer = TorchTrainer(
            base,
            info,
            micro_batch_tokens=settings.micro_batch_tokens,
            mixed=settings.mixed_batches,
            max_resident=settings.max_resident_adapters,
        )
        self.batcher = Batcher(base, tokenizer, info.eos_tokens, max_num_seqs=settings.max_num_seqs)
        self.compute = Compute(self.batcher, self.trainer.advance)
        local = LocalRollouts(self.batcher, self.compute, self.trainer.slot, max_model_len=info.max_model_len)
        self._chat = ChatTokenizer(tokenizer)
        self.verbs = VerbService(self.trainer, make_rollouts(settings, self.trainer, local), self.compute, self._chat)
        self.adapters = ServingAdapters(base, info.name, self.compute, max_adapters=settings.max_serving_adapters)
        self._serving = ServingRoutes(info, local, self.adapters, self._chat, self._chat.copy())

    def app(self) -> Starlette:
        """The ASGI application; its lifespan runs the compute thread."""
        routes = [
            Route("/engine/v1/{verb}", self._verb, methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            *self._serving.routes(),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        self.compute.start()
        try:
            yield
        finally:
            self.compute.stop()
            self._chat.close()

    async def _verb(self, request: Request) -> Response:
        verb = str(request.path_params["verb"])
        try:
            body = await read_body(request, MAX_BODY_BYTES)
            return Response(await until_disconnect(request, self.verbs.handle(verb, body)), media_type=wire.CONTENT_TYPE)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            told = as_espalier_error(error)
            if told is not error and told.http_status >= 500:
                logger.exception("%s failed", verb)
            content = {"error": {"code": told.code, "message": told.message, "param": told.param}}
            return JSONResponse(content, status_code=told.http_status)

    async def _health(self, _: Request) -> Response:
        if not self.compute.alive:
            return PlainTextResponse("the compute thread is not running", status_code=503)
        return Response()

    async def _metrics(self, _: Request) -> Response:
        values = (
            ("sequences_live", "gauge", "Sequences being decoded.", self.batcher.num_live),
            ("sequences_waiting", "gauge", "Sequences not admitted yet.", self.batcher.num_waiting),
            ("ops_queued", "gauge", "Training ops queued or under way.", self.compute.num_ops),
            ("adapters_training", "gauge", "Adapters in training.", self.verbs.num_adapters),
            ("adapters_serving", "gauge", "Adapters loaded for serving.", len(self.adapters.names)),
            ("kv_cache_bytes", "gauge", "Keys and values of live sequences.", self.batcher.cache_bytes),
            ("sampled_tokens_total", "counter", "Tokens sampled.", self.batcher.num_sampled_tokens),
            ("trained_tokens_total", "counter", "Completion tokens trained on.", self.verbs.num_trained_tokens),
        )
        lines = [f"# HELP espalier_{n} {about}\n# TYPE espalier_{n} {kind}\nespalier_{n} {value}\n" for n, kind, about, value in values]
        return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")


def make_app(settings: Settings) -> Starlette:
    """Loads the base and makes the application."""
    set_threads(settings.num_threads)
    keep_memory()
    return EngineHost(settings, *load_base(settings)).app()


def main() -> None:
    """Serves until it is stopped."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = get_settings()
    uvicorn.run(
        make_app(settings), host=settings.engine_host, port=settings.engine_port, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=10,
    )  # fmt: skip


if __name__ == "__main__":
    main()
