"""A new phase of training on the same adapter: what it does is what a job does that starts from the adapter as it then is.

1. The reference is the policy at that moment, and KL begins at 0.
2. Factors after further steps equal those of an adapter made from the export, so moments are gone.
3. It survives a saved state, for plain, stacked, mixed and dense adapters.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from core.contracts import LoraSettings, OptimizerSettings
from engine.types import LossSettings, StackedOn
from tests.engines import Engine, make_engine
from tests.training import busy_weights, drain, make_groups, trainer_of

LORA = LoraSettings(rank=4, alpha=8, target_modules=("q_proj", "up_proj"))
GROUPS = make_groups(((9, (5, 12)), (4, (7, 7))))
LOSS = LossSettings(clip_low=0.2, clip_high=0.2, beta=0.3, denominator=4, temperature=1)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


def steps(trainer: object, adapter_id: str, count: int) -> str:
    fingerprint = ""
    for _ in range(count):
        drain(trainer.forward_backward(adapter_id, GROUPS, LOSS))  # type: ignore[attr-defined]
        fingerprint = trainer.optim_step(adapter_id, OptimizerSettings(), learning_rate=1e-2).fingerprint  # type: ignore[attr-defined]
    return fingerprint


def test_a_new_phase_equals_a_job_that_continues(engine: Engine) -> None:
    trainer = trainer_of(engine)
    trainer.create_adapter("one", LORA, seed=0)
    steps(trainer, "one", 2)
    assert drain(trainer.forward_backward("one", GROUPS, LOSS)).metrics["kl"] > 1e-4
    trainer.optim_step("one", OptimizerSettings(), learning_rate=1e-2)
    trainer.create_adapter("two", LORA, seed=0, weights=trainer.save("one").weights)
    info = trainer.new_phase("one")
    assert info.step == 3
    assert drain(trainer.forward_backward("one", GROUPS, LOSS)).metrics["kl"] == pytest.approx(0, abs=1e-9)
    trainer.optim_step("one", OptimizerSettings(), learning_rate=1e-2)
    steps(trainer, "two", 1)
    assert steps(trainer, "one", 2) == steps(trainer, "two", 2)


@pytest.mark.parametrize("kind", ["plain", "stacked", "budget", "experts", "full"])
def test_a_new_phase_survives_a_saved_state(engine: Engine, kind: str) -> None:
    trainer = trainer_of(engine)
    shapes = {"budget": {"rank_budget": {"mean_rank": 2, "interval_steps": 1}}, "experts": {"num_experts": 2}, "full": {"kind": "full"}}
    lora = LoraSettings.model_validate({**LORA.model_dump(), **shapes.get(kind, {})})
    under = StackedOn(busy_weights(engine, LORA, seed=1), LORA, trainable=True) if kind == "stacked" else None
    trainer.create_adapter("one", lora, seed=0, under=under)
    steps(trainer, "one", 2)
    trainer.new_phase("one")
    assert drain(trainer.forward_backward("one", GROUPS, LOSS)).metrics["kl"] == pytest.approx(0, abs=1e-9)
    trainer.optim_step("one", OptimizerSettings(), learning_rate=1e-2)
    trainer.load_state("two", trainer.save_state("one"))
    first, second = (drain(trainer.forward_backward(name, GROUPS, replace(LOSS, beta=0.5))) for name in ("one", "two"))
    assert first.metrics["kl"] == second.metrics["kl"] > 1e-6
    assert steps(trainer, "one", 2) == steps(trainer, "two", 2)
