"""One vLLM server of ours for all tests here, and one of stock vLLM as the negative control."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from registry.store import ObjectStore, open_store
from tests.tiny import write_tiny_model
from tests.vllm.adapters import PublishedAdapter, Reference, publish_random_adapter
from tests.vllm.server import VllmServer, vllm_server

MAX_LORAS = 2


@dataclass(frozen=True)
class World:
    """A tiny base, a store with adapters in it, and the same in transformers + PEFT."""

    folder: Path
    base_model: Path
    store: ObjectStore
    adapters: tuple[PublishedAdapter, ...]
    reference: Reference

    @property
    def cache(self) -> Path:
        """The resolver's cache folder of our server."""
        return self.folder / "cache"


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("vllm")
    base_model = write_tiny_model(folder / "base", num_heads=2)
    store = open_store(folder / "store")
    adapters = (
        publish_random_adapter(store, base_model, folder / "adapter0", seed=0),
        publish_random_adapter(store, base_model, folder / "adapter1", seed=1, rank=16, alpha=16),
        publish_random_adapter(store, base_model, folder / "adapter2", seed=2, rank=4, alpha=8, targets=("q_proj", "v_proj", "up_proj")),
    )
    return World(folder, base_model, store, adapters, Reference(base_model, adapters))


@pytest.fixture(scope="session")
def server(world: World) -> Iterator[VllmServer]:
    """Our replica: resolver, mended LoRA ops, two LoRA slots, float32. Dev routes only to look into the engine."""
    folder = world.folder / "server"
    folder.mkdir()
    environment = {
        "ESPALIER_STORE_URL": str(world.folder / "store"), "ESPALIER_RESOLVER_CACHE": str(world.cache),
        "ESPALIER_VLLM_MAX_LORAS": str(MAX_LORAS), "VLLM_SERVER_DEV_MODE": "1",
    }  # fmt: skip
    with vllm_server(folder, base_model=world.base_model, environment=environment) as running:
        yield running


@pytest.fixture
def stock_server(world: World, tmp_path: Path) -> Iterator[VllmServer]:
    """vLLM without our plugins, in bfloat16, two LoRA slots; the worker extension is there, reached by the dev route."""
    environment = {
        "VLLM_PLUGINS": "", "ESPALIER_VLLM_MAX_LORAS": str(MAX_LORAS), "ESPALIER_VLLM_DTYPE": "bfloat16", "VLLM_SERVER_DEV_MODE": "1",
    }  # fmt: skip
    with vllm_server(tmp_path, base_model=world.base_model, environment=environment) as running:
        yield running
