"""Real engine parts over the tiny base, for tests."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn

from core.contracts import LoraSettings
from core.settings import Settings
from engine.backends.torch import TorchTrainer
from engine.base_model import load_base
from engine.compute import Compute
from engine.host import EngineHost
from engine.lora import Adapter
from engine.model import BaseModel
from engine.rollouts.batcher import Batcher
from engine.rollouts.local import LocalRollouts
from engine.rollouts.requests import Generation
from engine.types import BaseModelInfo, Completion


@dataclass
class Engine:
    """A trainer and a batcher on one base, driven by hand: the test's thread computes."""

    base: BaseModel
    tokenizer: Any
    info: BaseModelInfo
    trainer: TorchTrainer
    batcher: Batcher

    def run(self, *generations: Generation) -> list[list[Completion]]:
        """Decodes until all are done."""
        for generation in generations:
            self.batcher.submit(generation)
        while self.batcher.busy:
            self.batcher.step()
        return [generation.result.result(timeout=0) for generation in generations]


def make_engine(folder: Path, *, max_num_seqs: int = 64, max_model_len: int = 512) -> Engine:
    """Loads the base in `folder` in float32."""
    settings = Settings(
        base_model_path=str(folder), base_model_name="tiny", device="cpu", dtype="float32", max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )  # fmt: skip
    base, tokenizer, info = load_base(settings)
    trainer = TorchTrainer(base, info, micro_batch_tokens=512)
    return Engine(base, tokenizer, info, trainer, Batcher(base, tokenizer, info.eos_tokens, max_num_seqs=max_num_seqs))


def busy_adapter(engine: Engine, adapter_id: str, *, seed: int, rank: int = 8, scale: float = 0.1) -> Adapter:
    """A loaded adapter whose B is not zero, so that it changes every output."""
    engine.trainer.create_adapter(adapter_id, LoraSettings(rank=rank, alpha=2 * rank), seed=seed)
    adapter = engine.trainer.adapter(adapter_id)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for (part,) in adapter.factors.values():
            part.b_OR.copy_(torch.randn(part.b_OR.shape, generator=generator) * scale)
    adapter.changed()
    return adapter


@contextmanager
def computing(engine: Engine) -> Iterator[tuple[Compute, LocalRollouts]]:
    """The engine with its compute thread running."""
    compute = Compute(engine.batcher, engine.trainer.advance)
    compute.start()
    try:
        yield compute, LocalRollouts(engine.batcher, compute, engine.trainer.slot, max_model_len=engine.info.max_model_len)
    finally:
        compute.stop()


@dataclass
class LiveHost:
    """An engine host on a real port."""

    url: str
    host: EngineHost


@contextmanager
def live_host(folder: Path, **changes: Any) -> Iterator[LiveHost]:
    """Serves the base in `folder` from a thread of this process."""
    settings = Settings(
        **{
            "base_model_path": str(folder), "base_model_name": "tiny", "device": "cpu", "dtype": "float32", "max_model_len": 512,
            "micro_batch_tokens": 128, **changes,
        }
    )  # fmt: skip
    host = EngineHost(settings, *load_base(settings))
    server = uvicorn.Server(uvicorn.Config(host.app(), host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the host did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield LiveHost(f"http://127.0.0.1:{port}", host)
    finally:
        server.should_exit = True
        thread.join(20)
