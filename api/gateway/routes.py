"""/v1/chat/completions and /v1/completions."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool

from api.auth import CurrentScope
from api.gateway.relay import Relay
from api.gateway.replicas import Replicas
from api.gateway.schemas import ChatRequest, CompletionRequest
from api.gateway.target import cache_salt, find_target
from core.scope import Scope

router = APIRouter(prefix="/v1", tags=["inference"])


def _replicas(request: Request) -> Replicas:
    return request.app.state.replicas


Serving = Annotated[Replicas, Depends(_replicas)]


@router.post("/chat/completions", response_model=None)
async def chat(scope: CurrentScope, replicas: Serving, body: ChatRequest) -> Relay:
    return await _relay(scope, replicas, "/v1/chat/completions", body)


@router.post("/completions", response_model=None)
async def complete(scope: CurrentScope, replicas: Serving, body: CompletionRequest) -> Relay:
    return await _relay(scope, replicas, "/v1/completions", body)


async def _relay(scope: Scope, replicas: Replicas, path: str, body: ChatRequest | CompletionRequest) -> Relay:
    target = await run_in_threadpool(find_target, scope, body.model)
    stream = bool(body.stream)
    payload: dict[str, Any] = {**body.payload(), "model": target.replica_name, "stream": stream, "cache_salt": cache_salt(scope)}
    if stream:
        # Always asked for, so that tokens are counted; vLLM's running count covers clients that leave early.
        payload["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    return Relay(replicas, scope, target, path, payload, stream=stream, wants_usage=wants_usage)
