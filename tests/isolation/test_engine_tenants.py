"""Faults of engines that many tenants share, each row of the list with the test that holds it.

| row | test |
|---|---|
| SkyRL#2153 moments were not swapped | test_trainer.py, test_mixed_batches.py, test_paging.py |
| SkyRL#1621 an export needed its owner swapped in | test_an_export_is_its_owners, here |
| SkyRL#2129 a reload made a live name 404 | test_sampling_never_fails_while_others_come_and_go, here |
| vllm#42125, #30931, #44250 a name reused another's cache | test_a_name_carries_its_content, here; unit/test_replica_name.py |
| vllm#54839, #42633 unload kept the slot | tests/vllm/test_plugin.py; tests/contract/test_serving_routes.py (unload) |
| vllm#34186, #55193, unsloth#3802 an adapter that applies to nothing | test_an_adapter_that_applies_to_nothing_is_refused, here |
| vllm#46287 names that leave the store | tests/vllm/test_plugin.py, tests/unit/test_store.py |
| vllm#11727, gpustack#5438 a rank over the limit | tests/vllm/test_plugin.py; tests/contract/test_serving_routes.py (a bad adapter) |
| CVE-2025-46570, vllm#17045, #53347 a prefix cache across tenants | tests/contract/test_openai_inference.py (cache salt) |
| vllm#16876, sglang#15129, open-rl#206 one tenant starved the others | test_mixed_batches.py, tests/unit/test_compute.py |
"""

import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from core.contracts import LoraSettings, OptimizerSettings
from core.errors import InvalidInput
from engine.client import EngineClient
from engine.types import LossSettings, SampleRequest, SamplingParams
from registry.replica_name import ReplicaName, parse_replica_name
from tests.engines import Engine, live_host, make_engine
from tests.training import busy_weights, drain, make_groups, trainer_of

LORA = LoraSettings(rank=4, alpha=8)
LOSS = LossSettings(clip_low=0.2, clip_high=0.2, beta=0, denominator=5, temperature=1)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


def test_an_export_is_its_owners(engine: Engine) -> None:
    trainer = trainer_of(engine)
    weights = {name: busy_weights(engine, LORA, seed=seed) for seed, name in enumerate(("a", "b", "c"))}
    for name, content in weights.items():
        trainer.create_adapter(name, LORA, seed=1, weights=content)
    drain(trainer.forward_backward("b", make_groups(((5, (4, 6)),)), LOSS))
    trainer.optim_step("b", OptimizerSettings(), learning_rate=1e-2)
    for name in ("a", "c"):
        ours, theirs = load(trainer.save(name).weights), load(weights[name])
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[key], theirs[key]) for key in ours)
    assert trainer.save("b").weights != weights["b"]


def test_sampling_never_fails_while_others_come_and_go(tiny_model: Path) -> None:
    request = SampleRequest(np.array([3, 4, 5], np.int32), (SamplingParams(max_tokens=6, seed=1), SamplingParams(max_tokens=6, seed=2)))
    with (
        live_host(tiny_model, max_resident_adapters=2) as host,
        EngineClient(host.url, owner="a") as mine,
        EngineClient(host.url) as others,
    ):
        mine.create_adapter("mine", LORA, seed=1)
        mine.sync("mine")
        expected = [c.tokens.tolist() for c in mine.sample("mine", [request])[0]]
        over, faults = threading.Event(), list[BaseException]()

        def churn() -> None:
            try:
                for number in range(12):
                    name = f"other{number % 3}"
                    others.create_adapter(name, LORA, seed=number)
                    others.sync(name)
                    others.forward_backward(name, make_groups(((5, (4, 6)),), seed=number), LOSS)
                    others.optim_step(name, OptimizerSettings(), learning_rate=1e-2)
                    others.save(name)
                    others.drop_adapter(name)
            except BaseException as fault:  # noqa: BLE001 - told below
                faults.append(fault)
            over.set()

        thread = threading.Thread(target=churn)
        thread.start()
        count = 0
        while not over.is_set() or count < 3:
            assert [c.tokens.tolist() for c in mine.sample("mine", [request])[0]] == expected
            count += 1
        thread.join()
        assert not faults


def test_a_name_carries_its_content() -> None:
    first, second = (str(ReplicaName("tenant", "project", "tone", digest * 64)) for digest in "ab")
    assert first != second
    parsed = parse_replica_name(first)
    assert parsed is not None
    assert parsed.digest == "a" * 64


def test_an_adapter_that_applies_to_nothing_is_refused(engine: Engine) -> None:
    weights = load(busy_weights(engine, LORA, seed=1))
    elsewhere = {key.replace("layers.", "blocks."): value for key, value in weights.items()}
    with pytest.raises(InvalidInput) as refused:
        trainer_of(engine).create_adapter("job", LORA, seed=0, weights=save(elsewhere))
    assert refused.value.param == "weights"
    assert "missing" in refused.value.message
