"""Rollouts by a vLLM server: the adapter is hot-loaded at each sync under a name that carries its fingerprint, and checked there.

vLLM is not patched: it is reached by its own HTTP, and by one route that our plug-in adds (`GET /v1/adapter_fingerprint`).
"""

import asyncio
import json
import shutil
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np

from core.errors import InvalidInput, NotFound, Unavailable
from core.fingerprint import EngineDtype, expected_fingerprint
from core.settings import Settings
from engine.peft_export import exported_scaling
from engine.types import Completion, FinishReason, SampleRequest, SamplingParams, Trainer

MAX_CONCURRENT_REQUESTS = 256
SYNC_TIMEOUT_S = 120.0
SAMPLE_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class _Pushed:
    """What vLLM was last given for an adapter."""

    name: str
    folder: Path
    weights_fingerprint: str
    """The trainer's."""
    held_fingerprint: str
    """What vLLM reported, in its own dtype; equal to what that dtype makes of the trainer's weights."""


class VllmRollouts:
    """`engine.types.Rollouts`.

    Logprobs are vLLM's `processed_logprobs`: at the sampling temperature, and after top-p where that is below 1.

    Args:
        settings: `vllm_url`, and `cache_dir`, where adapters are put for vLLM to read (one machine or a shared folder).
    Raises:
        InvalidInput: `vllm_url` is not set.
    """

    def __init__(self, settings: Settings, trainer: Trainer) -> None:
        if settings.vllm_url is None:
            raise InvalidInput("rollouts is vllm, but no server is named; set ESPALIER_VLLM_URL.", param="ESPALIER_VLLM_URL")
        self._url = settings.vllm_url.rstrip("/")
        self._trainer = trainer
        self._folder = settings.cache_dir.absolute() / "rollouts"
        shutil.rmtree(self._folder, ignore_errors=True)  # of an engine that died; its names are gone from its memory
        self._pushed: dict[str, _Pushed] = {}

    def sync(self, adapter_id: str) -> str:
        """See Rollouts. Call it on the thread that computes: it reads the trainer's weights."""
        saved = self._trainer.save(adapter_id)
        if "distilled_experts" in saved.notes:
            raise InvalidInput(
                "vLLM can't gate a mixture of adapters: it would sample another policy than is trained. Use local rollouts.",
                param="lora.num_experts",
                code="not_an_adapter",
            )
        before = self._pushed.get(adapter_id)
        if before is not None and before.weights_fingerprint == saved.fingerprint and self._holds(before):
            return saved.fingerprint
        name = f"train/{adapter_id}@{saved.fingerprint}"
        folder = self._folder / adapter_id / saved.fingerprint
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(saved.weights)
        (folder / "adapter_config.json").write_text(json.dumps(dict(saved.config)))
        self._load(name, folder)
        held = self._check(name, saved.weights, exported_scaling(saved.config))
        self._pushed[adapter_id] = _Pushed(name, folder, saved.fingerprint, held)
        if before is not None and before.name != name:
            self._forget(before)
        return saved.fingerprint

    def drop(self, adapter_id: str) -> None:
        """See Rollouts."""
        pushed = self._pushed.pop(adapter_id, None)
        if pushed is not None:
            self._forget(pushed)
            shutil.rmtree(self._folder / adapter_id, ignore_errors=True)

    async def sample(self, adapter_id: str | None, requests: Sequence[SampleRequest], *, owner: Hashable = None) -> list[list[Completion]]:
        """See Rollouts. Shares between owners are vLLM's scheduler's.

        Raises:
            NotFound: vLLM lost the adapter (it was restarted); code adapter_not_loaded.
            Unavailable: it does not answer.
        """
        if adapter_id is None:
            model = self._trainer.base.name
        elif adapter_id in self._pushed:
            model = self._pushed[adapter_id].name
        else:
            raise NotFound(f"Adapter {adapter_id} was not synced to vLLM; call sync first.", code="adapter_not_loaded")
        limit = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        limits = httpx.Limits(max_connections=MAX_CONCURRENT_REQUESTS, max_keepalive_connections=MAX_CONCURRENT_REQUESTS)
        async with httpx.AsyncClient(base_url=self._url, timeout=SAMPLE_TIMEOUT_S, trust_env=False, limits=limits) as client:

            async def one(request: SampleRequest, params: SamplingParams) -> Completion:
                async with limit:
                    return await _complete(client, model, request, params)

            flat = await asyncio.gather(*(one(request, params) for request in requests for params in request.params))
        completions = iter(flat)
        return [[next(completions) for _ in request.params] for request in requests]

    def _load(self, name: str, folder: Path) -> None:
        response = self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        # vLLM refuses a name that it has; an immutable name that is there already is what was wanted, and is checked next.
        if not response.is_success and "already been loaded" not in response.text:
            raise Unavailable(f"vLLM did not load {name}: {response.text[:300]}")

    def _check(self, name: str, weights: bytes, scaling: float) -> str:
        held = self._held(name)
        if held is None:
            raise Unavailable(f"vLLM says that it loaded {name} and does not know it.")
        wanted = expected_fingerprint(weights, scaling, cast(EngineDtype, held["dtype"]))
        if held["fingerprint"] != wanted:
            raise Unavailable(
                f"vLLM holds {held['fingerprint'][:12]} for {name}, the trainer's weights are {wanted[:12]}; nothing was sampled."
            )
        return wanted

    def _holds(self, pushed: _Pushed) -> bool:
        held = self._held(pushed.name)
        return held is not None and held["fingerprint"] == pushed.held_fingerprint

    def _held(self, name: str) -> dict[str, str] | None:
        try:
            response = httpx.get(f"{self._url}/v1/adapter_fingerprint", params={"lora_name": name}, timeout=SYNC_TIMEOUT_S, trust_env=False)
        except httpx.HTTPError as error:
            raise Unavailable(f"vLLM at {self._url} does not answer ({error}); is it running?") from error
        if response.status_code == HTTPStatus.NOT_FOUND and name in response.text:
            return None
        if not response.is_success:
            raise Unavailable(
                f"vLLM can't tell what it holds ({response.status_code} {response.text[:300]}); start it by deploy/vllm/serve.sh."
            )
        return cast(dict[str, str], response.json())

    def _forget(self, pushed: _Pushed) -> None:
        self._post("/v1/unload_lora_adapter", {"lora_name": pushed.name})
        shutil.rmtree(pushed.folder, ignore_errors=True)

    def _post(self, path: str, body: dict[str, str]) -> httpx.Response:
        try:
            return httpx.post(f"{self._url}{path}", json=body, timeout=SYNC_TIMEOUT_S, trust_env=False)
        except httpx.HTTPError as error:
            raise Unavailable(f"vLLM at {self._url} does not answer ({error}); is it running?") from error


async def _complete(client: httpx.AsyncClient, model: str, request: SampleRequest, params: SamplingParams) -> Completion:
    body = {
        "model": model, "prompt": request.prompt_tokens.tolist(), "max_tokens": params.max_tokens, "temperature": params.temperature,
        "top_p": params.top_p, "seed": params.seed, "stop": list(params.stop), "logprobs": 0, "return_token_ids": True,
        # The base's generation_config.json must not change the policy that is trained.
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip
    try:
        response = await client.post("/v1/completions", json=body)
    except httpx.HTTPError as error:
        raise Unavailable(f"vLLM does not answer ({error}); is it running?") from error
    if response.status_code == HTTPStatus.NOT_FOUND:
        raise NotFound(f"vLLM lost {model}; it has to be synced again.", code="adapter_not_loaded")
    if response.status_code == HTTPStatus.BAD_REQUEST:
        raise InvalidInput(f"vLLM refused the request: {response.text[:300]}")
    if not response.is_success:
        raise Unavailable(f"vLLM answered {response.status_code}: {response.text[:300]}")
    choice: dict[str, Any] = response.json()["choices"][0]
    reason: FinishReason = "length" if choice["finish_reason"] == "length" else "stop"
    tokens, logprobs = np.array(choice["token_ids"], np.int32), np.array(choice["logprobs"]["token_logprobs"], np.float32)
    if len(tokens) != len(logprobs):
        raise Unavailable(f"vLLM gave {len(tokens)} tokens and {len(logprobs)} logprobs; its version does not fit.")
    return Completion(tokens, logprobs, str(choice["text"]), reason)
