"""Adapters that don't fit on the device page to host memory and back, and nobody sees it.

A copy is made at every move, here too where host and device are one, so an optimizer that held on to old storage would show.
"""

from pathlib import Path

import pytest

from core.contracts import LoraSettings, OptimizerSettings, RankBudget
from engine.backends.torch import TorchTrainer
from engine.types import LossSettings, StackedOn
from tests.engines import Engine, make_engine
from tests.training import busy_weights, drain, make_groups

LORA = LoraSettings(rank=4, alpha=6)
SHAPES = ((9, (5, 1, 12)), (4, (7, 7)))
LOSS = LossSettings(clip_low=0.2, clip_high=0.2, beta=0.1, denominator=5, temperature=1)
KINDS: dict[str, LoraSettings] = {
    "plain": LORA,
    "stacked": LORA,
    "budget": LoraSettings(rank=4, rank_budget=RankBudget(mean_rank=2, interval_steps=1)),
    "mixture": LoraSettings(rank=2, num_experts=2),
    "full": LoraSettings(kind="full", target_modules=("q_proj",)),
}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


def trained(engine: Engine, max_resident: int) -> tuple[dict[str, bytes], TorchTrainer]:
    trainer = TorchTrainer(engine.base, engine.info, micro_batch_tokens=40, mixed=False, max_resident=max_resident)
    for name, lora in KINDS.items():
        under = StackedOn(busy_weights(engine, LORA, seed=1), LORA, trainable=True) if name == "stacked" else None
        trainer.create_adapter(name, lora, seed=2, under=under)
    for step in range(3):
        for name in KINDS:
            drain(trainer.forward_backward(name, make_groups(SHAPES, seed=step), LOSS))
        for name in reversed(KINDS):
            trainer.optim_step(name, OptimizerSettings(weight_decay=0.01), learning_rate=1e-2)
            if step == 2:
                drain(trainer.forward_backward(name, make_groups(SHAPES, seed=9), LOSS))
    return {name: trainer.save_state(name) for name in KINDS}, trainer


def test_paged_equals_resident(engine: Engine) -> None:
    resident, _ = trained(engine, 64)
    paged, trainer = trained(engine, 1)
    assert trainer.num_moves > 20
    assert paged == resident
    for name in KINDS:
        before = trainer.slot(name).adapter.fingerprint()
        assert drain(trainer.forward(name, make_groups(SHAPES), temperature=1))
        assert trainer.slot(name).adapter.fingerprint() == before


def test_what_is_in_use_stays(engine: Engine) -> None:
    trainer = TorchTrainer(engine.base, engine.info, micro_batch_tokens=20, max_resident=1)
    for name in ("a", "b", "c"):
        trainer.create_adapter(name, LORA, seed=2)
    op = trainer.begin_forward_backward("a", make_groups(SHAPES), LOSS)
    storage = trainer.slot("a").parameters[0].data_ptr()
    trainer.advance([op])
    for name in ("b", "c", "b"):
        trainer.slot(name)
    assert trainer.slot("a").parameters[0].data_ptr() == storage
    while not op.done:
        trainer.advance([op])
    op.finish()
    moves = trainer.num_moves
    for name in ("b", "c"):
        trainer.slot(name)
    assert trainer.num_moves > moves
    assert trainer.slot("a").num_users == 0
