"""Batches, exports and outside references for tests of the trainer."""

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from core.contracts import LoraSettings
from engine.backends.torch import TorchTrainer
from engine.lora import new_adapter
from engine.peft_export import adapter_weights
from engine.types import SavedAdapter, TrainGroup
from tests.engines import Engine

EOS = 2
Result = TypeVar("Result")


def drain(run: Generator[None, None, Result]) -> Result:
    """Runs a verb to its end."""
    while True:
        try:
            next(run)
        except StopIteration as stop:
            return stop.value


def trainer_of(engine: Engine, *, micro_batch_tokens: int = 512) -> TorchTrainer:
    """A trainer of its own on the engine's base."""
    return TorchTrainer(engine.base, engine.info, micro_batch_tokens=micro_batch_tokens)


def make_groups(
    shapes: Sequence[tuple[int, Sequence[int]]], *, seed: int = 0, vocab_size: int = 259, token_weights: bool = False
) -> tuple[TrainGroup, ...]:
    """Random groups of (prompt tokens, tokens of each completion); every other completion ends in the EOS."""
    rng = np.random.default_rng(seed)
    groups: list[TrainGroup] = []
    for prompt_tokens, lengths in shapes:
        completions = [rng.integers(3, vocab_size, length).astype(np.int32) for length in lengths]
        for completion in completions[::2]:
            completion[-1:] = EOS
        weights = np.array([1.0 if token_weights else 1 / max(1, length) for length in lengths], dtype=np.float32)
        advantages = rng.normal(size=len(lengths)).astype(np.float32)
        groups.append(TrainGroup(rng.integers(3, vocab_size, prompt_tokens).astype(np.int32), tuple(completions), advantages, weights))
    return tuple(groups)


def busy_weights(engine: Engine, lora: LoraSettings, *, seed: int, scale: float = 0.1) -> bytes:
    """PEFT safetensors of an adapter whose B is not zero."""
    adapter = new_adapter(lora, engine.base.layers, seed=seed, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(adapter.factors):
        (part,) = adapter.factors[name]
        b_OR = part.b_OR
        b_OR.copy_(torch.randn(b_OR.shape, generator=generator) * scale)
    return adapter_weights(adapter)


def peft_model(base: Path, saved: SavedAdapter, folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The export as stock PEFT over stock transformers reads it; factors take gradients."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(saved.weights)
    (folder / "adapter_config.json").write_text(json.dumps(dict(saved.config)))
    causal = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(causal, str(folder), is_trainable=True).to(dtype)


def outside_logprobs(model: Any, group: TrainGroup, temperature: float) -> list[torch.Tensor]:
    """Per completion its tokens' logprobs by a plain transformers forward, one sequence at a time, no packing."""
    found: list[torch.Tensor] = []
    for completion in group.completions:
        tokens = torch.tensor(np.concatenate([group.prompt_tokens, completion]).astype(np.int64))[None]
        logits = model(input_ids=tokens).logits[0, len(group.prompt_tokens) - 1 : -1]
        found.append(torch.log_softmax(logits / temperature, -1).gather(1, tokens[0, len(group.prompt_tokens) :, None])[:, 0])
    return found


def gradients(trainer: TorchTrainer, adapter_id: str) -> dict[str, torch.Tensor]:
    """Accumulated gradients by PEFT's parameter names."""
    found: dict[str, torch.Tensor] = {}
    for name, (part,) in trainer.adapter(adapter_id).factors.items():
        for letter, factor in (("A", part.a_RI), ("B", part.b_OR)):
            grad = factor.grad
            found[f"base_model.model.model.{name}.lora_{letter}.default.weight"] = (
                torch.zeros_like(factor) if grad is None else grad.clone()
            )
    return found


def peft_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of a PEFT model's factors."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def worst_relative(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest ||got - expected|| / ||expected|| over all factors."""
    assert got.keys() == expected.keys()
    return max(float((got[name].double() - expected[name].double()).norm() / expected[name].double().norm()) for name in expected)
