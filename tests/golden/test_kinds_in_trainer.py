"""Every algorithm through the trainer (packed, float32, tiny transformers model) against its paper's formula over stock PEFT in float64.

1. Loss and every factor's gradient; the policy has moved off its start, which is the reference.
2. Nothing depends on micro-batches (trl#6024, ms-swift#10117): groups whole, cut by completions, alone, together.
3. The loss's slope along the gradient, by finite differences through the whole model.
4. An entropy bonus and truncated importance sampling reach the factors.
5. On policy at temperatures other than 1, ratio and importance weight are 1 (trl#4159, trl#4163, prime-rl#697).
6. The EOS that ends a completion is trained on by every kind (trl#4970, trl#6357).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.contracts import LoraSettings
from engine.backends.torch import TorchTrainer
from engine.types import FloatArray, LossSettings, TrainGroup
from tests.engines import Engine, make_engine
from tests.golden.cases import ALGORITHMS, Algorithm
from tests.golden.formulas import Group
from tests.training import (
    EOS,
    busy_weights,
    drain,
    gradients,
    make_groups,
    outside_logprobs,
    peft_gradients,
    peft_model,
    trainer_of,
    worst_relative,
)

LORA = LoraSettings(rank=4, alpha=6)
SHAPES = ((9, (5, 1, 11)), (4, (7, 7, 2)), (15, (3, 10, 8)))
PAIRS = ((9, (5, 1)), (4, (7, 7)), (15, (10, 8)))
WHOLE = 4096


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


def new_trainer(engine: Engine, *, micro_batch_tokens: int = WHOLE) -> TorchTrainer:
    """With one adapter "job" whose policy has left its reference."""
    trainer = trainer_of(engine, micro_batch_tokens=micro_batch_tokens)
    trainer.create_adapter("job", LORA, seed=0, weights=busy_weights(engine, LORA, seed=1))
    with torch.no_grad():
        for number, factor in enumerate(trainer.adapter("job").parameters()):
            factor += 0.02 * torch.randn(factor.shape, generator=torch.Generator().manual_seed(number))
    trainer.adapter("job").changed()
    return trainer


def moved(values: Sequence[Sequence[FloatArray]], *, by: float, seed: int) -> list[tuple[FloatArray, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple((each + by * rng.normal(size=each.shape)).astype(np.float32) for each in group) for group in values]


def batch_of(
    algorithm: Algorithm, trainer: TorchTrainer, temperature: float, *, off_policy: float
) -> tuple[list[TrainGroup], list[list[float]]]:
    """The batch as the loop makes it after a rollout by another policy, `off_policy` nats away; and its rewards."""
    shapes = make_groups(PAIRS if algorithm.name == "dpo" else SHAPES)
    current = drain(trainer.forward("job", shapes, temperature=temperature))
    reference = drain(trainer.forward("job", shapes, temperature=temperature, reference=True))
    old = moved(current, by=off_policy, seed=5)
    rewards = [np.random.default_rng(i).random(len(group.completions)).tolist() for i, group in enumerate(shapes)]
    return [
        replace(
            group,
            advantages=algorithm.advantages(reward, own, ref),
            weights=np.array([algorithm.weight(len(completion)) for completion in group.completions], np.float32),
            old_logprobs=own if off_policy else None,
        )
        for group, reward, own, ref in zip(shapes, rewards, old, reference, strict=True)
    ], rewards


def loss_of(algorithm: Algorithm, batch: Sequence[TrainGroup], temperature: float = 1.0) -> LossSettings:
    return algorithm.loss([len(completion) for group in batch for completion in group.completions], temperature=temperature)


def formula_groups(model: Any, frozen: Any, batch: Sequence[TrainGroup], rewards: list[list[float]], temperature: float) -> list[Group]:
    found: list[Group] = []
    for group, reward in zip(batch, rewards, strict=True):
        new = outside_logprobs(model, group, temperature)
        old = (
            [each.detach() for each in new] if group.old_logprobs is None else [torch.tensor(each).double() for each in group.old_logprobs]
        )
        found.append(Group(new, old, [each.detach() for each in outside_logprobs(frozen, group, temperature)], reward))
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradients_equal_the_paper_however_cut(engine: Engine, tiny_model: Path, tmp_path: Path, name: str) -> None:
    algorithm, temperature = ALGORITHMS[name], 0.8
    trainer = trainer_of(engine)
    trainer.create_adapter("job", LORA, seed=0, weights=busy_weights(engine, LORA, seed=1))
    frozen = peft_model(tiny_model, trainer.save("job"), tmp_path / "start", dtype=torch.float64)
    trainer = new_trainer(engine)
    model = peft_model(tiny_model, trainer.save("job"), tmp_path / "now", dtype=torch.float64)
    batch, rewards = batch_of(algorithm, trainer, temperature, off_policy=0.0 if algorithm.on_policy else 0.3)
    loss = loss_of(algorithm, batch, temperature)
    result = drain(trainer.forward_backward("job", batch, loss))
    expected = algorithm.formula(formula_groups(model, frozen, batch, rewards, temperature))
    expected.backward()
    if not algorithm.value_differs:
        assert result.loss == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-5)
    assert worst_relative(gradients(trainer, "job"), peft_gradients(model)) < 2e-4
    for limit in (1, 24, 40):
        cut = new_trainer(engine, micro_batch_tokens=limit)
        got = drain(cut.forward_backward("job", batch, loss))
        assert got.loss == pytest.approx(result.loss, rel=1e-5, abs=1e-6)
        assert got.metrics == pytest.approx(result.metrics, rel=1e-4, abs=1e-5)
        assert worst_relative(gradients(cut, "job"), gradients(trainer, "job")) < 1e-4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_is_the_slope_of_the_loss(engine: Engine, name: str) -> None:
    """Central differences along the gradient. What a kind detaches is made constant: ratios are far outside the bounds."""
    algorithm = ALGORITHMS[name]
    trainer = new_trainer(engine)
    batch, _ = batch_of(algorithm, trainer, 1.0, off_policy=0.3)
    if name in ("cispo", "flowrl"):
        current = drain(trainer.forward("job", batch, temperature=1.0))
        batch = [replace(group, old_logprobs=tuple(each - 3 for each in values)) for group, values in zip(batch, current, strict=True)]
    loss = loss_of(algorithm, batch)
    drain(trainer.forward_backward("job", batch, loss))
    factors = list(trainer.adapter("job").parameters())
    grads = [factor.grad.clone() for factor in factors if factor.grad is not None]
    assert len(grads) == len(factors)
    norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
    start = [factor.detach().clone() for factor in factors]

    def loss_at(step: float) -> float:
        with torch.no_grad():
            for factor, value, grad in zip(factors, start, grads, strict=True):
                factor.copy_(value + step * grad / norm)
        trainer.adapter("job").changed()
        return drain(trainer.forward_backward("job", batch, loss)).loss

    h = 1e-3
    assert (loss_at(h) - loss_at(-h)) / (2 * h) == pytest.approx(norm, rel=0.02)


def test_entropy_bonus_reaches_the_factors(engine: Engine, tiny_model: Path, tmp_path: Path) -> None:
    trainer = new_trainer(engine, micro_batch_tokens=30)
    batch = [replace(group, advantages=np.zeros_like(group.advantages)) for group in make_groups(SHAPES)]
    model = peft_model(tiny_model, trainer.save("job"), tmp_path, dtype=torch.float64)
    loss = LossSettings(0.2, 0.2, 0.0, denominator=9, temperature=0.8, entropy_bonus=0.3)
    result = drain(trainer.forward_backward("job", batch, loss))
    total, entropies = torch.zeros((), dtype=torch.float64), []
    for group in batch:
        for completion, weight in zip(group.completions, group.weights, strict=True):
            tokens = torch.tensor(np.concatenate([group.prompt_tokens, completion]).astype(np.int64))[None]
            full = torch.log_softmax(model(input_ids=tokens).logits[0, len(group.prompt_tokens) - 1 : -1] / 0.8, -1)
            entropies.append(-(full.exp() * full).sum(1))
            total = total - 0.3 * float(weight) * entropies[-1].sum() / 9
    total.backward()
    assert result.loss == pytest.approx(float(total.detach()), abs=1e-5)
    assert result.metrics["entropy"] == pytest.approx(float(torch.cat(entropies).mean().detach()), abs=1e-4)
    assert worst_relative(gradients(trainer, "job"), peft_gradients(model)) < 2e-4


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("sft", "dpo")])
def test_importance_is_one_where_trainer_and_sampler_agree(engine: Engine, name: str) -> None:
    """At a temperature that is not 1; and logprobs at another temperature show."""
    algorithm, temperature = ALGORITHMS[name], 0.7
    trainer = new_trainer(engine)
    batch, _ = batch_of(algorithm, trainer, temperature, off_policy=0.0)
    loss = loss_of(algorithm, batch, temperature)
    drain(trainer.forward_backward("job", batch, loss))
    plain = gradients(trainer, "job")
    sampled = drain(trainer.forward("job", batch, temperature=temperature))
    agreeing = [replace(group, sampler_logprobs=values) for group, values in zip(batch, sampled, strict=True)]
    capped = new_trainer(engine)
    metrics = drain(capped.forward_backward("job", agreeing, replace(loss, importance_cap=2.0))).metrics
    assert metrics["ratio"] == 1
    assert metrics["tis_weight"] == pytest.approx(1, abs=1e-5)
    assert worst_relative(gradients(capped, "job"), plain) < 1e-4
    untempered = drain(trainer.forward("job", batch, temperature=1.0))
    wrong = [replace(group, sampler_logprobs=values) for group, values in zip(batch, untempered, strict=True)]
    metrics = drain(capped.forward_backward("job", wrong, replace(loss, importance_cap=2.0))).metrics
    assert abs(metrics["tis_weight"] - 1) > 0.01


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_eos_counts(engine: Engine, name: str) -> None:
    """Its weight alone set to 0 changes the gradient; the prompt's EOS is no token of the completion."""
    algorithm = ALGORITHMS[name]
    trainer = new_trainer(engine)
    batch, _ = batch_of(algorithm, trainer, 1.0, off_policy=0.0)
    batch = [replace(group, prompt_tokens=np.append(group.prompt_tokens, EOS).astype(np.int32)) for group in batch]
    loss = loss_of(algorithm, batch)
    result = drain(trainer.forward_backward("job", batch, loss))
    assert result.num_tokens == sum(len(completion) for group in batch for completion in group.completions)
    without = [replace(group, token_weights=tuple(np.float32(each != EOS) for each in group.completions)) for group in batch]
    assert sum(int((each == 0).sum()) for group in without for each in group.token_weights or ()) > 2
    masked = new_trainer(engine)
    drain(masked.forward_backward("job", without, loss))
    assert worst_relative(gradients(masked, "job"), gradients(trainer, "job")) > 0.01
