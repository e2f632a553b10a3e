"""One GRPO step of the trainer, packed and in float32, against a float64 reference written from the paper over stock PEFT.

1. Loss, metrics and every factor's gradient: beta 0 and above, on policy and clipped, both aggregations, fresh and continued adapters.
2. The optimizer step is AdamW's on the clipped gradients.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.contracts import LoraSettings, OptimizerSettings
from engine.types import LossSettings, TrainGroup
from tests.engines import Engine, make_engine
from tests.training import (
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
SHAPES = ((9, (5, 1, 12)), (4, (7, 7)), (15, (3, 20, 2, 8)))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


def reference_step(model: Any, ref: list[list[torch.Tensor]], groups: tuple[TrainGroup, ...], loss: LossSettings, aggregation: str) -> Any:
    """-J of arXiv:2402.03300, eq. 3, with eq. 4's KL estimate; plain loops, one sequence at a time.

    The estimate carries the ratio pi / pi_old, 1 on policy: eq. 3 is an expectation over pi_old's samples, and without the ratio the
    gradient is not that of the KL in it (see test_losses).
    """
    per_completion: list[torch.Tensor] = []
    lengths: list[int] = []
    for group, ref_group in zip(groups, ref, strict=True):
        for i, logprobs in enumerate(outside_logprobs(model, group, loss.temperature)):
            old = logprobs.detach() if group.old_logprobs is None else torch.tensor(group.old_logprobs[i]).double()
            ratio, advantage = torch.exp(logprobs - old), float(group.advantages[i])
            surrogate = torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - loss.clip_low, 1 + loss.clip_high) * advantage)
            quotient = torch.exp(ref_group[i].detach() - logprobs)
            kl = ratio * (quotient - torch.log(quotient) - 1)
            per_completion.append(surrogate - loss.beta * kl)
            lengths.append(len(logprobs))
    if aggregation == "sequence":
        return -sum(terms.sum() / length for terms, length in zip(per_completion, lengths, strict=True)) / len(lengths)
    return -sum(terms.sum() for terms in per_completion) / sum(lengths)


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize(("old", "temperature"), [("policy", 1.0), ("clipped", 0.7), ("mixed", 1.0)])
def test_loss_and_gradients_equal_the_paper(
    engine: Engine, tiny_model: Path, tmp_path: Path, aggregation: str, beta: float, old: str, temperature: float
) -> None:
    trainer = trainer_of(engine, micro_batch_tokens=40)
    start = busy_weights(engine, LORA, seed=1)
    trainer.create_adapter("job", LORA, seed=0, weights=start)
    frozen = peft_model(tiny_model, trainer.save("job"), tmp_path / "start", dtype=torch.float64)
    # The policy moves off its start, so that the reference (the frozen start) is another policy.
    with torch.no_grad():
        for number, factor in enumerate(trainer.adapter("job").parameters()):
            factor += 0.02 * torch.randn(factor.shape, generator=torch.Generator().manual_seed(number))
    model = peft_model(tiny_model, trainer.save("job"), tmp_path / "now", dtype=torch.float64)
    groups = make_groups(SHAPES, token_weights=aggregation == "token")
    if old != "policy":
        rng = np.random.default_rng(5)
        current = drain(trainer.forward("job", groups, temperature=temperature))
        moved = [tuple((v + rng.normal(size=v.shape) * 0.3).astype(np.float32) for v in values) for values in current]
        groups = tuple(
            replace(group, old_logprobs=None if old == "mixed" and i == 1 else values)
            for i, (group, values) in enumerate(zip(groups, moved, strict=True))
        )
    completions = [completion for group in groups for completion in group.completions]
    denominator = len(completions) if aggregation == "sequence" else sum(len(completion) for completion in completions)
    loss = LossSettings(clip_low=0.2, clip_high=0.28, beta=beta, denominator=denominator, temperature=temperature)

    result = drain(trainer.forward_backward("job", groups, loss))
    ref = [[values.detach() for values in outside_logprobs(frozen, group, temperature)] for group in groups]
    expected = reference_step(model, ref, groups, loss, aggregation)
    expected.backward()

    assert result.loss == pytest.approx(float(expected.detach()), abs=1e-5)
    assert worst_relative(gradients(trainer, "job"), peft_gradients(model)) < 1e-4
    assert result.num_tokens == sum(len(completion) for completion in completions)
    assert (result.metrics["clip_fraction"] > 0.05) == (old != "policy")
    assert (result.metrics["kl"] > 1e-3) == (beta > 0)


def test_reference_of_a_fresh_adapter_is_the_bare_base(engine: Engine, tiny_model: Path, tmp_path: Path) -> None:
    """trl#1340: KL at step 0 is 0, for a fresh adapter and for a continued one; later it is against the start."""
    trainer = trainer_of(engine)
    groups = make_groups(SHAPES)
    loss = LossSettings(clip_low=0.2, clip_high=0.2, beta=0.3, denominator=9, temperature=1)
    trainer.create_adapter("fresh", LORA, seed=3)
    trainer.create_adapter("continued", LORA, seed=3, weights=busy_weights(engine, LORA, seed=2))
    for adapter_id in ("fresh", "continued"):
        assert drain(trainer.forward_backward(adapter_id, groups, loss)).metrics["kl"] == pytest.approx(0, abs=1e-9)
        trainer.optim_step(adapter_id, OptimizerSettings(), learning_rate=1e-2)
    model = peft_model(tiny_model, trainer.save("fresh"), tmp_path, dtype=torch.float64)
    with model.disable_adapter():
        ref = [[values.detach() for values in outside_logprobs(model, group, 1.0)] for group in groups]
    expected = reference_step(model, ref, groups, loss, "sequence")
    expected.backward()
    result = drain(trainer.forward_backward("fresh", groups, loss))
    assert result.loss == pytest.approx(float(expected.detach()), abs=1e-5)
    assert worst_relative(gradients(trainer, "fresh"), peft_gradients(model)) < 1e-4
    assert result.metrics["kl"] > 1e-3


def test_optimizer_step_is_clipped_adamw(engine: Engine, tiny_model: Path, tmp_path: Path) -> None:
    settings = OptimizerSettings(weight_decay=0.1, max_grad_norm=0.05)
    trainer = trainer_of(engine)
    trainer.create_adapter("job", LORA, seed=0, weights=busy_weights(engine, LORA, seed=1))
    model = peft_model(tiny_model, trainer.save("job"), tmp_path)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    moments = {name: (torch.zeros_like(p, dtype=torch.float64), torch.zeros_like(p, dtype=torch.float64)) for name, p in parameters.items()}
    expected = {name: parameter.detach().double() for name, parameter in parameters.items()}
    groups = make_groups(SHAPES)
    loss = LossSettings(clip_low=0.2, clip_high=0.2, beta=0, denominator=9, temperature=1)
    for step in (1, 2, 3):
        drain(trainer.forward_backward("job", groups, loss))
        grads = {name: grad.double() for name, grad in gradients(trainer, "job").items()}
        norm = float(torch.cat([grad.flatten() for grad in grads.values()]).norm())
        result = trainer.optim_step("job", settings, learning_rate=1e-3 * step)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert result.step == step
        for name, grad in grads.items():
            clipped = grad * min(1.0, settings.max_grad_norm / (norm + 1e-6))
            mean, square = moments[name]
            mean.mul_(settings.beta1).add_(clipped * (1 - settings.beta1))
            square.mul_(settings.beta2).add_(clipped**2 * (1 - settings.beta2))
            direction = (mean / (1 - settings.beta1**step)) / ((square / (1 - settings.beta2**step)).sqrt() + settings.eps)
            expected[name] = expected[name] * (1 - 1e-3 * step * settings.weight_decay) - 1e-3 * step * direction
    for name, (part,) in trainer.adapter("job").factors.items():
        for letter, factor in (("A", part.a_RI), ("B", part.b_OR)):
            want = expected[f"base_model.model.model.{name}.lora_{letter}.default.weight"]
            assert float((factor.detach().double() - want).abs().max()) < 1e-6
