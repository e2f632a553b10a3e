"""Every shape of adapter: what it computes, how it trains beside others, how it leaves.

1. What stock PEFT makes of the export equals the trainer's policy, and the registry takes it (verl#5488, verl#6380, vllm#6909).
2. At step 0 the policy is the reference: the bare base, or the adapter underneath (trl#1340, trl#3194).
3. Every step changes the adapter's digest and never the base's (trl#6700, SkyRL#1077).
4. All shapes trained in turns equal each alone, and a resume is exact, bit for bit (SkyRL#2153, lerobot#3459).
5. What stands underneath stays still, or moves at its own rate; the pair leaves as one plain adapter.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from engine.backends.torch import TorchTrainer
from engine.serving.adapters import adapter_of
from tests.adapters import (
    ADAPTERS,
    GATED,
    LEAVES,
    LOSS,
    SHAPES,
    START,
    base_digest,
    checked,
    create,
    loaded_again,
    logprobs,
    peft_logprobs,
    step,
    values_of,
    worst,
)
from tests.engines import Engine, make_engine
from tests.training import busy_weights, drain, make_groups, peft_model, trainer_of


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


@pytest.fixture(scope="module")
def start(engine: Engine) -> bytes:
    return busy_weights(engine, START, seed=5, scale=0.05)


@pytest.mark.parametrize("name", LEAVES)
def test_stock_peft_computes_the_same(engine: Engine, tiny_model: Path, start: bytes, tmp_path: Path, name: str) -> None:
    trainer, groups = trainer_of(engine), make_groups(SHAPES, seed=3)
    create(trainer, name, start)
    for number in range(3):
        step(trainer, name, seed=number)
    saved = trainer.save(name)
    again = loaded_again(trainer, saved, "again")
    policy = again if name in GATED else logprobs(trainer, name, groups)
    assert worst(peft_logprobs(tiny_model, saved, tmp_path, groups), policy) < 1e-5
    assert worst(policy, logprobs(trainer, None, groups)) > 1e-2
    assert worst(again, policy) < 1e-5
    # The registry's own copy of the config, and the serving engine, say the same.
    stored = replace(saved, config=json.loads(checked(saved).config))
    assert worst(peft_logprobs(tiny_model, stored, tmp_path / "stored", groups), policy) < 1e-5
    trainer.slot("again").adapter = adapter_of(stored.config, stored.weights, engine.base)
    assert worst(logprobs(trainer, "again", groups), policy) < 1e-5


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_at_step_0_the_policy_is_the_reference(engine: Engine, start: bytes, name: str) -> None:
    trainer, groups = trainer_of(engine), make_groups(SHAPES, seed=3)
    create(trainer, name, start)
    if ADAPTERS[name].over:
        trainer.create_adapter("under", START, seed=0, weights=start)
        before = logprobs(trainer, "under", groups)
    else:
        before = logprobs(trainer, None, groups)
    # Where B is zero: bit for bit. PiSSA takes components out and puts them back, and a stack's products have more terms, which rounds.
    bound = 1e-4 if "pissa" in name else 5e-6 if ADAPTERS[name].over else 0
    assert worst(logprobs(trainer, name, groups), before) <= bound
    assert worst(logprobs(trainer, name, groups, reference=True), before) == 0
    assert drain(trainer.forward_backward(name, groups, LOSS)).metrics["kl"] <= 1e-8
    trainer.optim_step(name, ADAPTERS[name].optimizer, learning_rate=1e-2)
    assert worst(logprobs(trainer, name, groups, reference=True), before) == 0
    assert worst(logprobs(trainer, name, groups), before) > 1e-3


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_every_step_changes_the_adapter_and_never_the_base(engine: Engine, start: bytes, name: str) -> None:
    trainer, digest = trainer_of(engine), base_digest(engine)
    seen = {create(trainer, name, start).fingerprint()}
    for number in range(4):
        seen.add(step(trainer, name, seed=number))
    assert len(seen) == 5
    assert base_digest(engine) == digest
    assert trainer.adapter(name).fingerprint() in seen


def test_all_in_turns_equal_each_alone_and_resume(engine: Engine, start: bytes) -> None:
    alone: dict[str, bytes] = {}
    for name in ADAPTERS:
        trainer = trainer_of(engine, micro_batch_tokens=30)
        create(trainer, name, start)
        for number in range(4):
            step(trainer, name, seed=number)
            if number == 1:
                # Amid a step, between two calls that accumulate, the run moves to another trainer.
                drain(trainer.forward_backward(name, make_groups(SHAPES, seed=8), LOSS))
                state = trainer.save_state(name)
                trainer = trainer_of(engine, micro_batch_tokens=30)
                trainer.load_state(name, state)
                assert trainer.save_state(name) == state
        alone[name] = trainer.save_state(name)
    # Only three of them fit on the device at once: the others page out and back.
    together = TorchTrainer(engine.base, engine.info, micro_batch_tokens=30, max_resident=3)
    for name in ADAPTERS:
        create(together, name, start)
    for number in range(4):
        for batch in (8, number) if number == 2 else (number,):
            passes = {name: together.forward_backward(name, make_groups(SHAPES, seed=batch), LOSS) for name in ADAPTERS}
            for pending in passes.values():
                next(pending)
            for pending in passes.values():
                drain(pending)
        for name in reversed(ADAPTERS) if number % 2 else ADAPTERS:
            together.optim_step(name, ADAPTERS[name].optimizer, learning_rate=1e-2)
    assert together.num_moves > len(ADAPTERS)
    for name in ADAPTERS:
        assert together.save_state(name) == alone[name], name


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_a_new_phase_begins_with_a_kl_of_0(engine: Engine, start: bytes, name: str) -> None:
    """After a warm-up the policy of that moment is the reference, through a save and a load too."""
    trainer, groups = trainer_of(engine), make_groups(SHAPES, seed=3)
    create(trainer, name, start)
    step(trainer, name, seed=0)
    trainer.new_phase(name)
    policy = logprobs(trainer, name, groups)
    trainer.load_state("copy", trainer.save_state(name))
    assert trainer.save_state("copy") == trainer.save_state(name)
    for each in (name, "copy"):
        assert worst(logprobs(trainer, each, groups, reference=True), policy) <= 5e-6
        drain(trainer.forward_backward(each, groups, LOSS))
        trainer.optim_step(each, ADAPTERS[name].optimizer, learning_rate=1e-2)
        assert worst(logprobs(trainer, each, groups, reference=True), policy) <= 5e-6
        assert worst(logprobs(trainer, each, groups), policy) > 1e-3
    assert trainer.save_state("copy") == trainer.save_state(name)


@pytest.mark.parametrize("name", ["dropout", "mixture", "rank budget"])
def test_an_abandoned_call_leaves_no_trace(engine: Engine, start: bytes, name: str) -> None:
    trainer = trainer_of(engine, micro_batch_tokens=20)
    create(trainer, name, start)
    step(trainer, name, seed=0)
    drain(trainer.forward_backward(name, make_groups(SHAPES, seed=1), LOSS))
    before = trainer.save_state(name)
    abandoned = trainer.forward_backward(name, make_groups(SHAPES, seed=2), LOSS)
    next(abandoned)
    abandoned.close()
    assert trainer.save_state(name) == before


def test_a_frozen_adapter_underneath_stays_and_a_trained_one_has_its_own_rate(engine: Engine, start: bytes) -> None:
    trainer = trainer_of(engine)
    for name, moved in (("stacked", 0.0), ("stacked, both trained", 1e-5 / 5e-4 * 1e-2)):
        adapter = create(trainer, name, start)
        before = values_of(adapter)
        step(trainer, name, seed=0)
        change = {label: float((value - before[label]).abs().max()) for label, value in values_of(adapter).items()}
        start_moves = [value for label, value in change.items() if ".start." in label]
        # Adam's first step is the rate itself wherever there is a gradient.
        assert len(start_moves) == 12
        assert max(start_moves) == pytest.approx(moved, rel=1e-2)
        assert min(value for label, value in change.items() if ".new.B" in label) == pytest.approx(1e-2, rel=1e-2)


def test_the_pair_leaves_with_ranks_side_by_side(engine: Engine, start: bytes) -> None:
    trainer, groups = trainer_of(engine), make_groups(SHAPES, seed=3)
    adapter = create(trainer, "stacked", start)
    step(trainer, "stacked", seed=0)
    saved = trainer.save("stacked")
    assert (saved.config["r"], saved.config["lora_alpha"]) == (7, 14)
    assert saved.config["rank_pattern"] == {"gate_proj": 4, "k_proj": 4, "o_proj": 4, "up_proj": 4}
    tensors, below = load(saved.weights), load(start)
    key = "base_model.model.model.layers.1.mlp.down_proj.lora_"
    new = adapter.factors["layers.1.mlp.down_proj"][1]
    assert torch.equal(tensors[key + "A.weight"], torch.cat([below[key + "A.weight"], new.a_RI.detach()]))
    assert torch.equal(tensors[key + "B.weight"], torch.cat([below[key + "B.weight"], new.b_OR.detach()], 1))
    # Where the scalings differ, each B carries its own, rounded once: the very numbers that the sampler uses.
    create(trainer, "stacked, another scaling", start)
    step(trainer, "stacked, another scaling", seed=0)
    other = trainer.save("stacked, another scaling")
    assert other.config["r"] == other.config["lora_alpha"] == 7
    a_RI, b_OR = trainer.adapter("stacked, another scaling").cast("layers.0.self_attn.q_proj", torch.float32)
    exported = load(other.weights)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    assert torch.equal(exported[key + "A.weight"], a_RI)
    assert torch.equal(exported[key + "B.weight"], b_OR)
    assert worst(logprobs(trainer, "stacked, another scaling", groups), logprobs(trainer, "stacked", groups)) > 1e-3


def test_layers_of_rank_0_are_left_out(engine: Engine, tiny_model: Path, start: bytes, tmp_path: Path) -> None:
    trainer = trainer_of(engine)
    create(trainer, "rank pattern", start)
    step(trainer, "rank pattern", seed=0)
    saved = trainer.save("rank pattern")
    assert "layers.1.self_attn.o_proj" in saved.config["target_modules"]
    assert not {"o_proj", "layers.0.self_attn.o_proj"} & set(saved.config["target_modules"])
    assert saved.config["r"] == 7
    wrapped = {name for name, _ in peft_model(tiny_model, saved, tmp_path).named_modules() if name.endswith("lora_A.default")}
    assert sum("o_proj" in name for name in wrapped) == 1
    assert sum("q_proj" in name for name in wrapped) == 2
