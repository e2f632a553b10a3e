"""Every shape of adapter, and what tests do with one."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

from core.contracts import LearningRateGroup, LoraSettings, OptimizerSettings, RankBudget
from engine.backends.torch import TorchTrainer
from engine.lora import Adapter
from engine.types import FloatArray, LossSettings, SavedAdapter, StackedOn, TrainGroup
from registry.peft_format import PeftAdapter, check_adapter
from tests.engines import Engine
from tests.training import drain, make_groups, outside_logprobs, peft_model

SHAPES = ((9, (5, 1, 12)), (4, (7, 7)))
LOSS = LossSettings(clip_low=0.2, clip_high=0.2, beta=0.1, denominator=5, temperature=1)
START = LoraSettings(rank=3, alpha=6, target_modules=("q_proj", "v_proj", "down_proj"))
OPTIMIZER = OptimizerSettings(weight_decay=0.05)
Logprobs = tuple[tuple[FloatArray, ...], ...]


@dataclass(frozen=True)
class Shape:
    """An adapter to create: new, over START, or over START with that trained too."""

    lora: LoraSettings
    over: bool = False
    trainable: bool = False
    optimizer: OptimizerSettings = OPTIMIZER


PATTERN = {"q_proj": 2, "layers.1.mlp.up_proj": 7, "layers.0.self_attn.o_proj": 0}
ADAPTERS = {
    "plain": Shape(LoraSettings(rank=4, alpha=6)),
    "rslora": Shape(LoraSettings(rank=5, alpha=3, rslora=True)),
    "rank pattern": Shape(LoraSettings(rank=4, alpha=6, rank_pattern=PATTERN)),
    "alpha pattern": Shape(LoraSettings(rank=4, alpha=6, alpha_pattern={"down_proj": 3.0, "layers.0.mlp.down_proj": 5.0})),
    "both, one scaling": Shape(LoraSettings(rank=4, alpha=8, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 4.0})),
    "rslora pattern": Shape(LoraSettings(rank=4, alpha=3, rslora=True, rank_pattern=PATTERN)),
    "orthogonal": Shape(LoraSettings(rank=4, alpha=6, init="orthogonal")),
    "pissa": Shape(LoraSettings(rank=4, alpha=6, init="pissa")),
    "dropout": Shape(LoraSettings(rank=4, alpha=6, dropout=0.3)),
    "rank budget": Shape(LoraSettings(rank=6, alpha=12, rank_budget=RankBudget(mean_rank=1.5, interval_steps=2))),
    "stacked": Shape(LoraSettings(rank=4, alpha=8), over=True),
    "stacked, another scaling": Shape(LoraSettings(rank=4, alpha=6, dropout=0.1, target_modules=("q_proj", "up_proj")), over=True),
    "stacked, both trained": Shape(
        LoraSettings(rank=4, alpha=6),
        over=True,
        trainable=True,
        optimizer=OptimizerSettings(learning_rate=5e-4, learning_rate_groups=(LearningRateGroup(learning_rate=1e-5, part="start"),)),
    ),
    "stacked pissa": Shape(LoraSettings(rank=2, alpha=6, init="pissa"), over=True),
    "stacked budget": Shape(LoraSettings(rank=4, alpha=8, rank_budget=RankBudget(mean_rank=1, interval_steps=1)), over=True),
    "mixture": Shape(LoraSettings(rank=2, alpha=6, num_experts=3)),
    "stacked mixture": Shape(LoraSettings(rank=2, alpha=3, num_experts=2, dropout=0.1), over=True),
    "full": Shape(LoraSettings(kind="full", target_modules=("q_proj", "down_proj"))),
}
LEAVES = sorted(ADAPTERS.keys() - {"full"})
GATED = {"mixture", "stacked mixture"}


def create(trainer: TorchTrainer, name: str, start: bytes) -> Adapter:
    shape = ADAPTERS[name]
    under = StackedOn(start, START, shape.trainable) if shape.over else None
    trainer.create_adapter(name, shape.lora, seed=7, under=under)
    return trainer.adapter(name)


def step(trainer: TorchTrainer, name: str, *, seed: int, rate: float = 1e-2) -> str:
    drain(trainer.forward_backward(name, make_groups(SHAPES, seed=seed), LOSS))
    return trainer.optim_step(name, ADAPTERS[name].optimizer, learning_rate=rate).fingerprint


def logprobs(trainer: TorchTrainer, name: str | None, groups: tuple[TrainGroup, ...], *, reference: bool = False) -> Logprobs:
    return drain(trainer.forward(name, groups, temperature=1, reference=reference))


def worst(got: Logprobs, expected: Logprobs) -> float:
    return max(float(np.abs(a - b).max()) for one, other in zip(got, expected, strict=True) for a, b in zip(one, other, strict=True))


def checked(saved: SavedAdapter) -> PeftAdapter:
    return check_adapter(saved.weights, saved.config, base_model="tiny", num_layers=2)


def peft_logprobs(base: Path, saved: SavedAdapter, folder: Path, groups: tuple[TrainGroup, ...]) -> Logprobs:
    model = peft_model(base, saved, folder)
    with torch.no_grad():
        return tuple(tuple(values.numpy() for values in outside_logprobs(model, group, 1.0)) for group in groups)


def base_digest(engine: Engine) -> str:
    digest = sha256()
    for name in sorted(engine.base.layers):
        digest.update(engine.base.weight(name).numpy().tobytes())
    return digest.hexdigest()


def values_of(adapter: Adapter) -> Mapping[str, torch.Tensor]:
    return {named.label: named.tensor.detach().clone() for named in adapter.named()}


def loaded_again(trainer: TorchTrainer, saved: SavedAdapter, name: str) -> Logprobs:
    """Of the exported adapter."""
    trainer.create_adapter(name, checked(saved).settings.lora_settings(), seed=0, weights=saved.weights)
    return logprobs(trainer, name, make_groups(SHAPES, seed=3))
