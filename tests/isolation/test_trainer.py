"""Policy, reference and tenants in one trainer stay what they are.

1. Reference logits equal a pristine base bit for bit, also after training, nesting, exceptions and abandoned calls (peft#736, peft#3447).
2. Every step changes the adapter's fingerprint and never the base (trl#6700, SkyRL#1077, trl#6688); the backward does LoRA's work only.
3. A save amid a run changes nothing and later gradients are not zero (ms-swift#9452).
4. Two adapters interleaved equal each alone, bit for bit (SkyRL#2153).
5. save_state and load_state are exact, pending gradients included (lerobot#3459); wrong states are refused.
6. Exports with missing, unexpected or misshapen keys are refused (Relax#262).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from core.contracts import LoraSettings, OptimizerSettings
from core.errors import Conflict, CorruptData, InvalidInput, NotFound
from core.settings import Settings
from engine.backends.torch import TorchTrainer
from engine.base_model import base_digest, load_base
from engine.lora import Segment
from engine.model import BaseModel
from engine.types import LossSettings, TrainGroup
from tests.engines import Engine, make_engine
from tests.training import busy_weights, drain, gradients, make_groups, trainer_of

LORA = LoraSettings(rank=4, alpha=6)
OTHER = LoraSettings(rank=8, alpha=8, target_modules=("q_proj", "down_proj"))
SHAPES = ((9, (5, 1, 12)), (4, (7, 7)))
LOSS = LossSettings(clip_low=0.2, clip_high=0.2, beta=0.1, denominator=5, temperature=1)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


def base_logprobs(trainer: TorchTrainer) -> bytes:
    values = drain(trainer.forward(None, make_groups(SHAPES, seed=9), temperature=1))
    return np.concatenate([completion for group in values for completion in group]).tobytes()


def base_weights_digest(base: BaseModel) -> str:
    digest = sha256()
    for name, tensor in sorted(base._stack.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def step(trainer: TorchTrainer, adapter_id: str, groups: tuple[TrainGroup, ...], optimizer: OptimizerSettings, rate: float = 1e-2) -> str:
    drain(trainer.forward_backward(adapter_id, groups, LOSS))
    return trainer.optim_step(adapter_id, optimizer, learning_rate=rate).fingerprint


class _Broken:
    """An attention that fails at the second layer."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        if layer == 1:
            raise RuntimeError("out of memory")
        return query


def test_reference_is_the_pristine_base(engine: Engine, tiny_model: Path) -> None:
    pristine = base_logprobs(trainer_of(make_engine(tiny_model), micro_batch_tokens=20))
    trainer = trainer_of(engine, micro_batch_tokens=20)
    trainer.create_adapter("job", LORA, seed=0, weights=busy_weights(engine, LORA, seed=1))
    assert base_logprobs(trainer) == pristine
    step(trainer, "job", make_groups(SHAPES), OptimizerSettings())
    assert base_logprobs(trainer) == pristine
    adapter, tokens = trainer.adapter("job"), torch.arange(5)
    for with_gradients in (True, False):
        with pytest.raises(RuntimeError, match="out of memory"), torch.set_grad_enabled(with_gradients):
            engine.base.hidden(tokens, tokens, _Broken(), (Segment(0, 5, adapter),))
        assert list(engine.base.router.segments) == []
    with engine.base.router.routed((Segment(0, 5, adapter),)), engine.base.router.routed(()):
        assert base_logprobs(trainer) == pristine
    abandoned = trainer.forward_backward("job", make_groups(SHAPES), LOSS)
    next(abandoned)
    abandoned.close()
    assert base_logprobs(trainer) == pristine


def test_every_step_changes_the_adapter_and_never_the_base(engine: Engine, tiny_model: Path) -> None:
    trainer = trainer_of(engine)
    created = trainer.create_adapter("job", LORA, seed=0)
    weights, digest = base_weights_digest(engine.base), base_digest(tiny_model)
    seen = {created.fingerprint}
    for number in range(5):
        fingerprint = step(trainer, "job", make_groups(SHAPES, seed=number), OptimizerSettings())
        assert fingerprint not in seen
        assert trainer.save("job").fingerprint == fingerprint
        seen.add(fingerprint)
    assert base_weights_digest(engine.base) == weights
    assert base_digest(tiny_model) == digest


def test_backward_does_lora_work_only(engine: Engine) -> None:
    """No gradient for a base weight, and no graph below the first adapted layer."""
    trainer = trainer_of(engine)
    trainer.create_adapter("job", LoraSettings(rank=2, target_modules=("down_proj",)), seed=0)
    tracked: dict[str, bool] = {}
    hooks = [
        engine.base._stack.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output, name=name: tracked.__setitem__(name, output.requires_grad)
        )
        for name in engine.base.layers
    ]
    drain(trainer.forward_backward("job", make_groups(SHAPES), replace(LOSS, beta=0)))
    for hook in hooks:
        hook.remove()
    assert {name for name, needed in tracked.items() if not needed} == {
        f"layers.0.{name}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in engine.base._stack.parameters())


def test_saving_amid_a_run_changes_nothing(engine: Engine) -> None:
    groups, optimizer = make_groups(SHAPES), OptimizerSettings()
    plain, saved = trainer_of(engine), trainer_of(engine)
    for trainer in (plain, saved):
        trainer.create_adapter("job", LORA, seed=0)
    for _ in range(3):
        drain(plain.forward_backward("job", groups, LOSS))
        drain(saved.forward_backward("job", groups, LOSS))
        saved.save("job")
        saved.save_state("job")
        expected, got = (trainer.optim_step("job", optimizer, learning_rate=1e-2) for trainer in (plain, saved))
        saved.save("job")
        assert got == expected
        assert got.grad_norm > 0


def test_interleaved_equals_alone(engine: Engine) -> None:
    runs: dict[str, tuple[LoraSettings, OptimizerSettings, float]] = {
        "a": (LORA, OptimizerSettings(weight_decay=0.1, max_grad_norm=0.1), 1e-2),
        "b": (OTHER, OptimizerSettings(beta2=0.999), 3e-3),
    }
    alone: dict[str, bytes] = {}
    for adapter_id, (lora, optimizer, rate) in runs.items():
        trainer = trainer_of(engine)
        trainer.create_adapter(adapter_id, lora, seed=7)
        for number in range(3):
            step(trainer, adapter_id, make_groups(SHAPES, seed=number), optimizer, rate)
        alone[adapter_id] = trainer.save_state(adapter_id)
    both = trainer_of(engine, micro_batch_tokens=512)
    for adapter_id, (lora, _, _) in runs.items():
        both.create_adapter(adapter_id, lora, seed=7)
    for number in range(3):
        passes = {adapter_id: both.forward_backward(adapter_id, make_groups(SHAPES, seed=number), LOSS) for adapter_id in runs}
        # One yield of each in turn, as the host lets them.
        for pending in passes.values():
            next(pending)
        for pending in passes.values():
            drain(pending)
        for adapter_id in reversed(runs) if number == 1 else runs:
            _, optimizer, rate = runs[adapter_id]
            both.optim_step(adapter_id, optimizer, learning_rate=rate)
    assert {adapter_id: both.save_state(adapter_id) for adapter_id in runs} == alone
    both.drop_adapter("a")
    both.drop_adapter("a")
    assert both.save_state("b") == alone["b"]
    with pytest.raises(NotFound) as missing:
        both.save("a")
    assert missing.value.code == "adapter_not_loaded"


@pytest.mark.parametrize("weights", [False, True])
def test_resume_is_exact(engine: Engine, weights: bool) -> None:
    optimizer = OptimizerSettings(weight_decay=0.05)
    first = trainer_of(engine)
    first.create_adapter("job", LORA, seed=3, weights=busy_weights(engine, LORA, seed=4) if weights else None)
    for number in range(2):
        step(first, "job", make_groups(SHAPES, seed=number), optimizer)
    drain(first.forward_backward("job", make_groups(SHAPES, seed=8), LOSS))
    state = first.save_state("job")
    resumed = trainer_of(engine)
    info = resumed.load_state("job", state)
    assert (info.step, info.fingerprint) == (2, first.save("job").fingerprint)
    assert resumed.save_state("job") == state
    for trainer in (first, resumed):
        trainer.optim_step("job", optimizer, learning_rate=1e-2)
        for number in (5, 6):
            step(trainer, "job", make_groups(SHAPES, seed=number), optimizer)
    assert resumed.save_state("job") == first.save_state("job")


def test_other_states_are_refused(engine: Engine) -> None:
    trainer = trainer_of(engine)
    trainer.create_adapter("job", LORA, seed=0)
    state = trainer.save_state("job")
    for broken in (b"", state[:40], state[:-8], b"\xff" * 64, trainer.save("job").weights):
        with pytest.raises(CorruptData):
            trainer.load_state("job", broken)
    with pytest.raises(Conflict):
        TorchTrainer(engine.base, replace(engine.info, digest="0" * 64), micro_batch_tokens=64).load_state("job", state)
    assert trainer.save_state("job") == state


def _rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.removeprefix("base_model.model."): value for key, value in tensors.items()}


def _lose_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(list(tensors.items())[1:])


def _transpose(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.t().contiguous() for key, value in tensors.items()}


def _poison(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.fill_(math.nan) for key, value in tensors.items()}


@pytest.mark.parametrize("spoil", [_rename, _lose_one, _transpose, _poison])
def test_weights_that_do_not_fit_are_refused(engine: Engine, spoil: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    trainer = trainer_of(engine)
    with pytest.raises(InvalidInput) as refused:
        trainer.create_adapter("job", LORA, seed=0, weights=save(spoil(load(busy_weights(engine, LORA, seed=1)))))
    assert refused.value.code == "adapter_mismatch"
    with pytest.raises(InvalidInput, match="safetensors"):
        trainer.create_adapter("job", LORA, seed=0, weights=b"pickle")
    with pytest.raises(NotFound):
        trainer.adapter("job")


def test_an_export_comes_back_the_same(engine: Engine) -> None:
    trainer = trainer_of(engine)
    trainer.create_adapter("job", LORA, seed=0)
    step(trainer, "job", make_groups(SHAPES), OptimizerSettings())
    saved = trainer.save("job")
    again = trainer.create_adapter("copy", LORA, seed=5, weights=saved.weights)
    assert again.fingerprint == saved.fingerprint
    assert trainer.save("copy").weights == saved.weights
    assert saved.config["task_type"] == "CAUSAL_LM"
    assert saved.config["lora_alpha"] == 6
    assert trainer.create_adapter("x", LORA, seed=1).fingerprint == trainer.create_adapter("y", LORA, seed=1).fingerprint
    assert trainer.create_adapter("x", LORA, seed=1).fingerprint != trainer.create_adapter("y", LORA, seed=2).fingerprint


def test_a_gradient_that_is_not_finite_takes_no_step(engine: Engine) -> None:
    trainer = trainer_of(engine)
    created = trainer.create_adapter("job", LORA, seed=0)
    group, _ = make_groups(SHAPES)
    far = tuple(np.full(len(completion), -1e4, np.float32) for completion in group.completions)
    drain(trainer.forward_backward("job", [replace(group, old_logprobs=far, advantages=-np.ones(3, np.float32))], LOSS))
    with pytest.raises(InvalidInput) as refused:
        trainer.optim_step("job", OptimizerSettings(), learning_rate=1e-2)
    assert refused.value.code == "non_finite_gradient"
    assert trainer.save("job").fingerprint == created.fingerprint
    assert step(trainer, "job", make_groups(SHAPES), OptimizerSettings()) != created.fingerprint
    assert all(float(grad.norm()) == 0 for grad in gradients(trainer, "job").values())


def test_base_digest_follows_the_files(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = Settings(base_model_path=str(tmp_path), device="cpu", dtype="float32")
    _, _, info = load_base(settings)
    assert info.digest == base_digest(tmp_path) == base_digest(tiny_model)
    assert info.eos_tokens == (2,)
    assert info.max_model_len == 512
    config = tmp_path / "config.json"
    config.write_text(config.read_text() + "\n")
    assert base_digest(tmp_path) != info.digest
    config.write_text(config.read_text().replace('"llama"', '"gpt_oss"'))
    with pytest.raises(InvalidInput, match="gpt_oss"):
        load_base(settings)
    with pytest.raises(NotFound):
        load_base(Settings(base_model_path=str(tmp_path / "nowhere")))


def test_a_call_that_is_abandoned_adds_nothing(engine: Engine) -> None:
    """A repeat after a failure would else count its first micro-batches twice."""
    trainer, clean = (trainer_of(engine, micro_batch_tokens=20) for _ in range(2))
    for each in (trainer, clean):
        each.create_adapter("job", LORA, seed=0)
        drain(each.forward_backward("job", make_groups(SHAPES, seed=1), LOSS))
    abandoned = trainer.forward_backward("job", make_groups(SHAPES), LOSS)
    next(abandoned)
    abandoned.close()
    assert trainer.save_state("job") == clean.save_state("job")
    drain(trainer.forward_backward("job", make_groups(SHAPES), LOSS))
    drain(clean.forward_backward("job", make_groups(SHAPES), LOSS))
    assert trainer.save_state("job") == clean.save_state("job")
