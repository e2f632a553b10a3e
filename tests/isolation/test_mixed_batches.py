"""Several jobs in one packed forward and backward: each gets what it would get alone.

1. Ranks, scales, algorithms, temperatures and reference policies mixed: losses, logprobs, gradients and steps equal the solo run's.
2. Owners share micro-batches by rows, whatever the sizes of their ops (vllm#16876, sglang#15129, open-rl#206).
3. An op that fails leaves its gradients as they were, and the others' alone.
4. Activations that are computed again change nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from core.contracts import LoraSettings, OptimizerSettings
from engine.backends.ops import FairShare, PendingOp
from engine.backends.torch import TorchTrainer
from engine.packing import rows_of
from engine.types import ForwardBackwardResult, LossSettings, TrainGroup
from tests.engines import Engine, make_engine
from tests.training import busy_weights, drain, gradients, make_groups, trainer_of

GRPO = LossSettings(clip_low=0.2, clip_high=0.2, beta=0.1, denominator=5, temperature=1)
JOBS: dict[str, tuple[LoraSettings, LossSettings, tuple[tuple[int, tuple[int, ...]], ...]]] = {
    "a": (LoraSettings(rank=4, alpha=6), GRPO, ((9, (5, 1, 12)), (4, (7, 7)))),
    "b": (LoraSettings(rank=8, target_modules=("q_proj", "down_proj")), replace(GRPO, beta=0, temperature=0.7), ((20, (3, 9)),)),
    "c": (LoraSettings(rank=2, dropout=0.2, rslora=True), replace(GRPO, beta=0.3), ((3, (4, 4, 4)), (8, (2, 11)), (5, (6,)))),
}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


def groups_of(name: str, step: int) -> tuple[TrainGroup, ...]:
    return make_groups(JOBS[name][2], seed=hash_of(name) + step)


def hash_of(name: str) -> int:
    return 10 * ord(name)


def create(trainer: TorchTrainer, engine: Engine, name: str) -> None:
    lora = JOBS[name][0]
    trainer.create_adapter(name, lora, seed=3, weights=busy_weights(engine, lora, seed=hash_of(name)))


def together(trainer: TorchTrainer, ops: Sequence[PendingOp]) -> list[ForwardBackwardResult]:
    while any(not op.done for op in ops):
        trainer.advance(ops)
    for op in ops:
        assert op.error is None
    return [result for op in ops if isinstance(result := op.finish(), ForwardBackwardResult)]


@pytest.mark.parametrize("micro_batch_tokens", [40, 1000])
@pytest.mark.parametrize("mixed", [True, False])
def test_together_equals_alone(engine: Engine, micro_batch_tokens: int, mixed: bool) -> None:
    rate, optimizer = 1e-2, OptimizerSettings(max_grad_norm=0.5, weight_decay=0.01)
    both = TorchTrainer(engine.base, engine.info, micro_batch_tokens=micro_batch_tokens, mixed=mixed)
    for name in JOBS:
        create(both, engine, name)
    alone = {name: trainer_of(engine, micro_batch_tokens=micro_batch_tokens) for name in JOBS}
    for name, trainer in alone.items():
        create(trainer, engine, name)
    for step in range(2):
        ops = [both.begin_forward_backward(name, groups_of(name, step), JOBS[name][1], owner=name) for name in JOBS]
        for name, result in zip(JOBS, together(both, ops), strict=True):
            solo = drain(alone[name].forward_backward(name, groups_of(name, step), JOBS[name][1]))
            assert result.loss == pytest.approx(solo.loss, rel=1e-5, abs=1e-6)
            assert result.num_tokens == solo.num_tokens
            assert result.metrics == pytest.approx(dict(solo.metrics), rel=1e-4, abs=1e-6)
            for ours, theirs in zip(result.logprobs, solo.logprobs, strict=True):
                for one, other in zip(ours, theirs, strict=True):
                    np.testing.assert_allclose(one, other, atol=1e-5)
            for key, grad in gradients(alone[name], name).items():
                assert float((gradients(both, name)[key] - grad).abs().max()) <= 1e-5 * max(1.0, float(grad.abs().max())), key
        for name in reversed(JOBS):
            both.optim_step(name, optimizer, learning_rate=rate)
        for name in JOBS:
            alone[name].optim_step(name, optimizer, learning_rate=rate)
    if not mixed:
        assert {name: both.save_state(name) for name in JOBS} == {name: alone[name].save_state(name) for name in JOBS}


def test_forwards_of_several_adapters_and_the_base_ride_one_batch(engine: Engine) -> None:
    trainer = trainer_of(engine, micro_batch_tokens=1000)
    for name in JOBS:
        create(trainer, engine, name)
    wanted = {name: drain(trainer.forward(name, groups_of(name, 0), temperature=1)) for name in JOBS}
    wanted["base"] = drain(trainer.forward(None, groups_of("a", 0), temperature=1))
    ops = {name: trainer.begin_forward(name, groups_of(name, 0), temperature=1) for name in JOBS}
    ops["base"] = trainer.begin_forward(None, groups_of("a", 0), temperature=1)
    trainer.advance(list(ops.values()))
    for name, op in ops.items():
        assert op.done, "one batch holds them all"
        for ours, theirs in zip(op.finish(), wanted[name], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5)


def test_owners_share_rows_evenly(engine: Engine) -> None:
    trainer = trainer_of(engine, micro_batch_tokens=64)
    create(trainer, engine, "a")
    many, few = make_groups(((6, (4, 4)),) * 40, seed=1), make_groups(((6, (4, 4)),) * 6, seed=2)
    ops = [trainer.begin_forward("a", many, temperature=1, owner="greedy") for _ in range(3)]
    ops.append(trainer.begin_forward("a", few, temperature=1, owner="modest"))
    shares, served = FairShare(), {"greedy": 0, "modest": 0}
    while not ops[-1].done:
        for op, pieces in shares.choose(ops, 64, mixed=True):
            served[str(op.owner)] += sum(rows_of(op.groups[piece.group], piece.completions) for piece in pieces)
    assert abs(served["greedy"] - served["modest"]) <= 64, "three large ops of one tenant get one micro-batch more at most"


def test_a_failing_op_leaves_all_gradients_as_they_were(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = TorchTrainer(engine.base, engine.info, micro_batch_tokens=30, mixed=False)
    for name in ("a", "b"):
        create(trainer, engine, name)
        drain(trainer.forward_backward(name, groups_of(name, 0), JOBS[name][1]))
    before = {name: trainer.save_state(name) for name in ("a", "b")}
    failing = trainer.begin_forward_backward("a", groups_of("a", 1), GRPO, owner="a")
    other = trainer.begin_forward_backward("b", groups_of("b", 1), GRPO, owner="b")
    trainer.advance([failing])
    assert not failing.done
    with monkeypatch.context() as patch:

        def broken(*_: object) -> None:
            raise MemoryError

        patch.setattr(engine.base, "hidden", broken)
        trainer.advance([failing])
    assert failing.done
    assert isinstance(failing.error, MemoryError)
    together(trainer, [other])
    assert trainer.save_state("a") == before["a"]
    assert trainer.save_state("b") != before["b"]


def test_recomputed_activations_change_nothing(engine: Engine, tiny_model: Path) -> None:
    lean = make_engine(tiny_model)
    lean.base.checkpoint_activations()
    found = []
    for each in (engine, lean):
        trainer = trainer_of(each)
        for name in JOBS:
            create(trainer, each, name)
        together(trainer, [trainer.begin_forward_backward(name, groups_of(name, 0), JOBS[name][1]) for name in JOBS])
        found.append([gradients(trainer, name) for name in JOBS])
    for plain, recomputed in zip(*found, strict=True):
        for key, grad in plain.items():
            assert torch.equal(grad, recomputed[key]), key
