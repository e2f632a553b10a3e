"""What is special about each kind of adapter.

1. Initialisations are what they say; learning rates go by layer, kind and part.
2. Dropout is the adapter's own; a rank budget keeps its sum and idle components wait unchanged.
3. A mixture is gated row by row and leaves as one adapter at a cost that is told; dense changes leave as such.
4. What does not go together is refused by name.
"""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load

from core.contracts import LearningRateGroup, LoraSettings, OptimizerSettings, RankBudget
from core.errors import InvalidInput
from core.settings import Settings
from engine.backends.torch import TorchTrainer
from engine.distillation import distilled_kl
from engine.peft_export import delta_weights
from engine.rollouts.vllm import VllmRollouts
from engine.types import StackedOn, TrainGroup, Verbs
from registry.peft_format import check_adapter
from tests.adapters import (
    ADAPTERS,
    LOSS,
    OPTIMIZER,
    SHAPES,
    START,
    Logprobs,
    create,
    loaded_again,
    logprobs,
    step,
    values_of,
    worst,
)
from tests.engines import Engine, make_engine
from tests.training import busy_weights, drain, make_groups, trainer_of


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


@pytest.fixture(scope="module")
def start(engine: Engine) -> bytes:
    return busy_weights(engine, START, seed=5, scale=0.05)


def test_orthogonal_rows(engine: Engine, start: bytes) -> None:
    trainer = trainer_of(engine)
    for _, parts in create(trainer, "orthogonal", start).factors.items():
        a_RI = parts[0].a_RI.detach()
        assert torch.allclose(a_RI @ a_RI.t(), torch.eye(4), atol=1e-6)
        assert not parts[0].b_OR.any()
    with pytest.raises(InvalidInput, match="65 is more"):
        trainer.create_adapter("wide", LoraSettings(rank=65, init="orthogonal"), seed=0)
    other = trainer.create_adapter("other", ADAPTERS["orthogonal"].lora, seed=8)
    assert other.fingerprint != trainer.adapter("orthogonal").fingerprint()


def test_pissa_starts_from_the_principal_components(engine: Engine, start: bytes) -> None:
    trainer = trainer_of(engine)
    for name, (anchor, new) in create(trainer, "pissa", start).factors.items():
        weight_OI = engine.base.weight(name).double()
        u, singular, v = torch.linalg.svd(weight_OI, full_matrices=False)
        best = u[:, :4] * singular[:4] @ v[:4]
        got = new.scale * new.b_OR.detach().double() @ new.a_RI.detach().double()
        # Random matrices have no gap in their spectrum: judged by what is left over, against the least that can be (Eckart-Young).
        left, least = (weight_OI - got).norm(), (weight_OI - best).norm()
        assert float(left / least) - 1 < 1e-4
        assert torch.equal(anchor.a_RI, new.a_RI.detach())
        assert torch.equal(anchor.b_OR, new.b_OR.detach())
        assert anchor.scale == -new.scale
        assert not anchor.trainable
    step(trainer, "pissa", seed=0)
    saved = trainer.save("pissa")
    assert (saved.config["r"], saved.config["lora_alpha"]) == (8, 12)
    with pytest.raises(InvalidInput, match="more than layer"):
        trainer.create_adapter("wide", LoraSettings(rank=33, init="pissa"), seed=0)


def test_learning_rates_by_layer_kind_and_part(engine: Engine) -> None:
    """Against stock AdamW with the same groups, and a rate of 0 leaves clipping and moments alone too."""
    groups = (
        LearningRateGroup(learning_rate=0, target_modules=("v_proj",)),
        LearningRateGroup(learning_rate=3e-3, target_modules=("q_proj", "k_proj", "o_proj"), last_layer=0),
        LearningRateGroup(learning_rate=2e-2, first_layer=1),
    )
    optimizer = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1e9, learning_rate_groups=groups)
    trainer, lora = trainer_of(engine), LoraSettings(rank=4, alpha=6)
    trainer.create_adapter("job", lora, seed=0, weights=busy_weights(engine, lora, seed=1))
    adapter = trainer.adapter("job")
    expected = {label: value.requires_grad_() for label, value in values_of(adapter).items()}

    def rate_of(label: str) -> float:
        first = ".layers.0." in f".{label}"
        if "v_proj" in label:
            return 0.0
        if first and any(kind in label for kind in ("q_proj", "k_proj", "o_proj")):
            return 3e-3
        return 1e-2 if first else 2e-2

    moving = {label: value for label, value in expected.items() if rate_of(label)}
    stock = torch.optim.AdamW(
        [{"params": [value], "lr": rate_of(label)} for label, value in moving.items()], betas=(0.9, 0.99), weight_decay=0.1
    )
    before = values_of(adapter)
    for number, scheduled in enumerate((1e-2, 5e-3)):
        drain(trainer.forward_backward("job", make_groups(SHAPES, seed=number), LOSS))
        for named in adapter.named():
            assert named.tensor.grad is not None
            expected[named.label].grad = named.tensor.grad.clone()
        for group in stock.param_groups:
            group["lr"] *= scheduled / (1e-2, 1e-2)[number]
        norm = torch.cat([value.grad.flatten() for value in moving.values() if value.grad is not None]).norm()
        result = trainer.optim_step("job", optimizer, learning_rate=scheduled)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
        stock.step()
    for label, value in values_of(adapter).items():
        assert torch.allclose(value, expected[label].detach(), atol=1e-7), label
        assert torch.equal(value, before[label]) == ("v_proj" in label)
    state = trainer.save_state("job")
    trainer.load_state("copy", state)
    assert trainer.save_state("copy") == state
    # A rate that comes back later starts its own count.
    for name in ("job", "copy"):
        drain(trainer.forward_backward(name, make_groups(SHAPES, seed=4), LOSS))
        trainer.optim_step(name, OptimizerSettings(), learning_rate=1e-2)
    assert trainer.save_state("copy") == trainer.save_state("job")


def test_dropout_follows_seed_step_and_piece_only(engine: Engine, start: bytes) -> None:
    groups, lora = make_groups(SHAPES, seed=1), ADAPTERS["dropout"].lora
    weights = busy_weights(engine, lora, seed=1)

    def gradient(seed: int, *, steps: int = 0, calls: int = 1, dropout: float = 0.3) -> torch.Tensor:
        trainer = trainer_of(engine)
        trainer.create_adapter("job", lora.model_copy(update={"dropout": dropout}), seed=seed, weights=weights)
        torch.manual_seed(calls)
        trainer.adapter("job").step = steps
        trainer.adapter("job").micro_batch = calls - 1
        drain(trainer.forward_backward("job", groups, LOSS))
        return torch.cat([p.grad.flatten() for p in trainer.adapter("job").parameters() if p.grad is not None])

    once = gradient(0)
    assert torch.equal(gradient(0), once)
    for other in (gradient(1), gradient(0, steps=1), gradient(0, calls=2), gradient(0, dropout=0.0)):
        assert float((other - once).norm() / once.norm()) > 0.05
    # Unbiased: over many masks the mean update is the update without dropout.
    adapter = trainer_of(engine)
    adapter.create_adapter("job", lora, seed=0, weights=weights)
    live, x_NI = adapter.adapter("job"), torch.ones(4000, 64)
    kept = live.dropped("layers.0.self_attn.q_proj", x_NI, ((0, 4000),))
    assert float((kept == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(kept.mean()) == pytest.approx(1, abs=0.02)
    assert not torch.equal(kept, live.dropped("layers.1.self_attn.q_proj", x_NI, ((0, 4000),)))


def test_a_rank_budget_keeps_its_sum_and_moves_ranks(engine: Engine, start: bytes) -> None:
    trainer = trainer_of(engine)
    adapter = create(trainer, "rank budget", start)

    def ranks() -> dict[str, int]:
        return {name: int(part.active_R.sum()) for name, (part,) in adapter.factors.items() if part.active_R is not None}

    budget = round(1.5 * 14)
    seen = [ranks()]
    assert set(seen[0].values()) == {1, 2}
    for number in range(6):
        step(trainer, "rank budget", seed=number)
        seen.append(ranks())
        for (part,) in adapter.factors.values():
            assert part.active_R is not None
            assert not part.b_OR[:, ~part.active_R].any()
        exported = load(trainer.save("rank budget").weights)
        assert sum(tensor.shape[0] for key, tensor in exported.items() if "lora_A" in key) == budget
    assert [sum(found.values()) for found in seen] == [budget] * 7
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert any(value == 0 for found in seen for value in found.values())
    # Told how long the job is, it lets them settle after freeze_after (0.7) of it.
    for number in range(6, 10):
        drain(trainer.forward_backward("rank budget", make_groups(SHAPES, seed=number), LOSS))
        before = ranks()
        trainer.optim_step("rank budget", OPTIMIZER, learning_rate=1e-2, total_steps=10)
        assert ranks() == before or number == 6


def test_idle_components_wait_unchanged(engine: Engine) -> None:
    lora = LoraSettings(rank=4, alpha=4, rank_budget=RankBudget(mean_rank=2, interval_steps=100))
    trainer = trainer_of(engine)
    trainer.create_adapter("job", lora, seed=0)
    plain = trainer_of(engine)
    plain.create_adapter("job", LoraSettings(rank=4, alpha=4), seed=0)
    before = values_of(trainer.adapter("job"))
    drain(trainer.forward_backward("job", make_groups(SHAPES), LOSS))
    result = trainer.optim_step("job", OptimizerSettings(weight_decay=0.5), learning_rate=1e-2)
    for name, (part,) in trainer.adapter("job").factors.items():
        assert torch.equal(part.a_RI[2:].detach(), before[f"{name}.new.A"][2:])
        assert not torch.equal(part.a_RI[:2].detach(), before[f"{name}.new.A"][:2])
    drain(plain.forward_backward("job", make_groups(SHAPES), LOSS))
    assert 0 < result.grad_norm < plain.optim_step("job", OptimizerSettings(), learning_rate=1e-2).grad_norm


def test_a_mixture_is_gated_row_by_row(engine: Engine, start: bytes) -> None:
    """Against the formula, and gradients against autograd of it."""
    trainer = trainer_of(engine)
    adapter = create(trainer, "mixture", start)
    for number in range(3):
        step(trainer, "mixture", seed=number)
    name = "layers.0.mlp.gate_proj"
    (part,) = adapter.factors[name]
    assert part.gate is not None
    assert float(part.gate.weight_EI.detach().abs().max()) > 1e-3
    x_NI = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    shares_NE = (x_NI @ part.gate.weight_EI.detach().t()).softmax(-1)
    wanted = sum(
        shares_NE[:, e : e + 1] * (x_NI @ part.a_RI.detach()[2 * e : 2 * e + 2].t() @ part.b_OR.detach()[:, 2 * e : 2 * e + 2].t()) * 3
        for e in range(3)
    )
    a_RI, b_OR = adapter.cast(name, torch.float32)
    gate_NR = adapter.gate((name,), x_NI)
    assert gate_NR is not None
    assert torch.allclose((x_NI @ a_RI.t() * gate_NR) @ b_OR.t(), torch.as_tensor(wanted), atol=1e-6)
    assert float(part.gate.mean_E.sum()) == pytest.approx(1, abs=1e-5)
    # Training and sampling forwards agree.
    groups = make_groups(SHAPES, seed=3)
    trained = drain(trainer.forward_backward("mixture", groups, LOSS)).logprobs
    assert worst(trained, logprobs(trainer, "mixture", groups)) < 1e-5


class Drained:
    """A trainer's forward as the client has it."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self._trainer = trainer

    def forward(self, adapter_id: str, groups: tuple[TrainGroup, ...], **which: Any) -> Logprobs:
        return drain(self._trainer.forward(adapter_id, groups, **which))


def test_what_a_mixture_leaves_as_is_another_policy_and_says_so(engine: Engine, start: bytes) -> None:
    trainer, groups = trainer_of(engine), make_groups(SHAPES, seed=3)
    create(trainer, "mixture", start)
    verbs = cast("Verbs", Drained(trainer))
    assert distilled_kl(verbs, "mixture", groups, temperature=1) == 0
    for number in range(3):
        step(trainer, "mixture", seed=number)
    saved, policy = trainer.save("mixture"), logprobs(trainer, "mixture", groups)
    assert saved.notes == {"distilled_experts": 3.0}
    left = drain(trainer.forward("mixture", groups, temperature=1, exported=True))
    assert worst(left, loaded_again(trainer, saved, "again")) < 1e-5
    assert 1e-5 < worst(left, policy) < worst(policy, logprobs(trainer, None, groups))
    gaps = np.concatenate([a - b for one, other in zip(left, policy, strict=True) for a, b in zip(one, other, strict=True)]).astype(float)
    kl = distilled_kl(verbs, "mixture", groups, temperature=1)
    assert kl == pytest.approx(float(np.mean(np.exp(gaps) - 1 - gaps)), rel=1e-4)
    assert 0 < kl < 1
    assert distilled_kl(verbs, "mixture", (), temperature=1) == 0
    trainer.create_adapter("plain", ADAPTERS["plain"].lora, seed=0)
    assert trainer.save("plain").notes == {}


def test_vllm_samples_no_mixture_and_no_dense_change(engine: Engine, start: bytes, tmp_path: Path) -> None:
    """It would sample another policy than is trained; refused before anything is sent."""
    trainer = trainer_of(engine)
    rollouts = VllmRollouts(Settings(vllm_url="http://127.0.0.1:9", data_dir=tmp_path), trainer)
    for name in ("mixture", "full"):
        create(trainer, name, start)
        with pytest.raises(InvalidInput) as refused:
            rollouts.sync(name)
        assert refused.value.code == "not_an_adapter"


def test_dense_changes_leave_as_such(engine: Engine, start: bytes) -> None:
    trainer, groups = trainer_of(engine), make_groups(SHAPES, seed=3)
    adapter = create(trainer, "full", start)
    assert adapter.dense.keys() == {f"layers.{layer}.{kind}" for layer in (0, 1) for kind in ("self_attn.q_proj", "mlp.down_proj")}
    step(trainer, "full", seed=0)
    with pytest.raises(InvalidInput, match="kind full") as refused:
        trainer.save("full")
    assert refused.value.code == "not_an_adapter"
    exported = delta_weights(adapter)
    assert delta_weights(adapter) == exported
    with pytest.raises(InvalidInput, match="kind full"):
        check_adapter(
            exported,
            {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]},
            base_model="tiny",
        )
    # The base with the change added computes the same.
    policy = logprobs(trainer, "full", groups)
    before = {name: engine.base.weight(name).clone() for name in adapter.dense}
    for key, delta_OI in load(exported).items():
        engine.base.weight(key.removeprefix("full/")).add_(delta_OI)
    merged = logprobs(trainer, None, groups)
    for name, weight_OI in before.items():
        engine.base.weight(name).copy_(weight_OI)
    assert worst(merged, policy) < 1e-5
    assert worst(policy, logprobs(trainer, None, groups)) > 1e-2
    trained = drain(trainer.forward_backward("full", groups, LOSS)).logprobs
    assert worst(trained, policy) < 1e-5


def test_what_does_not_go_together_is_refused(engine: Engine, start: bytes) -> None:
    trainer = trainer_of(engine)
    for lora, field in (
        (LoraSettings(rank=3, alpha=6, target_modules=START.target_modules, num_experts=2), "num_experts"),
        (LoraSettings(rank=3, target_modules=START.target_modules, rank_budget=RankBudget(mean_rank=1)), "rank_budget"),
        (LoraSettings(kind="full"), "kind"),
    ):
        with pytest.raises(InvalidInput) as refused:
            trainer.create_adapter("job", lora, seed=0, weights=start)
        assert refused.value.param == f"lora.{field}"
    with pytest.raises(InvalidInput, match="not both"):
        trainer.create_adapter("job", START, seed=0, weights=start, under=StackedOn(start, START, False))
    with pytest.raises(InvalidInput, match="stacked"):
        trainer.create_adapter("job", LoraSettings(kind="full"), seed=0, under=StackedOn(start, START, False))
    with pytest.raises(InvalidInput, match="limit of 512"):
        trainer.create_adapter("job", LoraSettings(rank=510), seed=0, under=StackedOn(start, START, False))
    with pytest.raises(InvalidInput, match="target_modules"):
        trainer.create_adapter("job", LoraSettings(rank_pattern={"q_proj": 0}, target_modules=("q_proj",)), seed=0)
