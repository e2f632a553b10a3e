"""HTTP routes that our replicas add to vLLM's server, an endpoint plugin (VLLM_PLUGINS must name `espalier`).

Why not the dev server's /collective_rpc: it needs VLLM_SERVER_DEV_MODE=1, which opens every worker method, sleep and reload to whoever
reaches the port. These two routes lie under /v1, so --api-key guards them.
"""

# vLLM is installed in its own environment only, where the type checker does not look.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from argparse import Namespace
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

from registry.vllm_plugin.resolver import registered_resolver

router = APIRouter()


class EspalierEndpoints:
    """GET /v1/adapter_fingerprint, and an /v1/unload_lora_adapter that gives the slot back."""

    name = "espalier"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes; ours takes the place of vLLM's own /v1/unload_lora_adapter."""
        app.include_router(router)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Lets the resolver see which names vLLM lists."""
        models: OpenAIServingModels = state.openai_serving_models
        registered_resolver().bind(lambda: models.lora_requests.keys())


@router.get("/v1/adapter_fingerprint")
async def adapter_fingerprint(lora_name: Annotated[str, Query()], raw_request: Request) -> JSONResponse:
    """What vLLM holds under a name: `{"lora_name", "fingerprint", "dtype", "num_modules"}`; see core.fingerprint.

    404: the name is not loaded (a request for it, or /v1/load_lora_adapter, loads it). 500: workers differ, or a slot holds other weights
    than the adapter's.
    """
    models: OpenAIServingModels = raw_request.app.state.openai_serving_models
    lora_request = models.lora_requests.get(lora_name)
    if lora_request is None:
        return _error(f"The adapter {lora_name} is not loaded.", HTTPStatus.NOT_FOUND)
    engine: EngineClient = raw_request.app.state.engine_client
    # vLLM's own cache may have dropped the weights since; this is what a request would do.
    await engine.add_lora(lora_request)
    answers = await engine.collective_rpc("espalier_adapter_fingerprint", args=(lora_request.lora_int_id,))
    first = answers[0]
    if not all(answer == first and answer["found"] and answer["slot_matches"] for answer in answers):
        return _error(f"vLLM's workers don't hold {lora_name} whole: {answers}", HTTPStatus.INTERNAL_SERVER_ERROR)
    return JSONResponse({"lora_name": lora_name, **{key: first[key] for key in ("fingerprint", "dtype", "num_modules")}})


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: UnloadLoRAAdapterRequest, raw_request: Request) -> Response:
    """Forgets the name, as vLLM's own route does, and also drops the weights from cache and slot, which vLLM's own leaves there."""
    models: OpenAIServingModels = raw_request.app.state.openai_serving_models
    lora_request = models.lora_requests.get(request.lora_name)
    answer = await models.unload_lora_adapter(request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if lora_request is not None:
        registered_resolver().released(request.lora_name)
        await raw_request.app.state.engine_client.remove_lora(lora_request.lora_int_id)
    return Response(answer)


def _error(message: str, status: HTTPStatus) -> JSONResponse:
    return JSONResponse(create_error_response(message=message, err_type=status.phrase, status_code=status).model_dump(), status_code=status)
