"""Adapters without a base: how they are cast, exported and named."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from core.contracts import LoraSettings
from core.fingerprint import adapter_fingerprint, expected_fingerprint
from engine.lora import Adapter, Factors, new_adapter
from engine.peft_export import adapter_config, adapter_weights, exported_rank, exported_scaling, read_adapter
from registry.peft_config import parse_config

LAYERS = {
    f"layers.{layer}.{name}": shape
    for layer in range(3)
    for name, shape in (("self_attn.q_proj", (6, 8)), ("self_attn.v_proj", (6, 4)), ("mlp.up_proj", (6, 10)), ("mlp.down_proj", (10, 6)))
}
CPU = torch.device("cpu")


def busy(lora: LoraSettings, *, seed: int = 0) -> Adapter:
    adapter = new_adapter(lora, LAYERS, seed=seed, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    for parts in adapter.factors.values():
        for part in parts:
            part.b_OR.copy_(torch.randn(part.b_OR.shape, generator=generator))
    return adapter


def exported_update(adapter: Adapter) -> dict[str, torch.Tensor]:
    """scaling * B A of every layer, float64, as a reader of the exported files computes it."""
    config = parse_config(json.dumps(adapter_config(adapter, "tiny", LAYERS)).encode())
    tensors = load(adapter_weights(adapter))
    found: dict[str, torch.Tensor] = {}
    for module in config.modules(3):
        a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"].double() for side in "AB")
        assert a.shape[0] == b.shape[1] == config.rank_of(module)
        found[module.removeprefix("model.")] = config.scaling_of(module) * b @ a
    assert len(tensors) == 2 * len(found)
    return found


def live_update(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {
        name: torch.stack([part.scale * part.b_OR.double() @ part.a_RI.double() for part in parts]).sum(0)
        for name, parts in adapter.factors.items()
    }


names = st.sampled_from(["q_proj", "up_proj", "self_attn.v_proj", "layers.1.mlp.up_proj", "layers.2.self_attn.q_proj", "down_proj"])
shapes = st.builds(
    LoraSettings,
    rank=st.integers(1, 9),
    alpha=st.floats(0.1, 100),
    rslora=st.booleans(),
    rank_pattern=st.dictionaries(names, st.integers(0, 9), max_size=3),
    alpha_pattern=st.dictionaries(names, st.floats(0.1, 100), max_size=2),
)


@settings(deadline=None, max_examples=60)
@given(shapes, st.one_of(st.none(), shapes))
def test_what_leaves_is_what_was_trained(lora: LoraSettings, under: LoraSettings | None) -> None:
    """Any ranks, scalings and patterns, alone or over another: one scaling, the greatest rank in `r`, the same update."""
    adapter = busy(lora)
    if under is not None:
        for name, (part,) in busy(under, seed=1).factors.items():
            adapter.factors[name] = (Factors(part.a_RI, part.b_OR, part.scale, "start", False), *adapter.factors.get(name, ()))
    if not adapter.factors:
        return
    got, want = exported_update(adapter), live_update(adapter)
    assert got.keys() == want.keys()
    for name, update in want.items():
        assert torch.allclose(got[name], update, rtol=1e-5, atol=1e-5 * float(update.abs().max()))
    config = adapter_config(adapter, "tiny", LAYERS)
    assert config["r"] == exported_rank(adapter)
    # vLLM reads one scaling out of r and lora_alpha, and the trainer's `cast` is what it then holds, bit for bit.
    scaling = exported_scaling(config)
    held = [(f"model.{name}", *(factor.numpy() for factor in adapter.cast(name, torch.float32))) for name in adapter.factors]
    assert expected_fingerprint(adapter_weights(adapter), scaling) == adapter_fingerprint(held, "float32")


@settings(deadline=None, max_examples=30)
@given(shapes)
def test_an_export_can_be_continued(lora: LoraSettings) -> None:
    adapter = busy(lora)
    if not adapter.factors:
        return
    config = parse_config(json.dumps(adapter_config(adapter, "tiny", LAYERS)).encode())
    again = read_adapter(adapter_weights(adapter), config.lora_settings(), LAYERS, CPU)
    got, want = live_update(again), live_update(adapter)
    assert got.keys() == want.keys()
    for name, update in want.items():
        assert torch.allclose(got[name], update, rtol=1e-5, atol=1e-5 * float(update.abs().max()))


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        (LoraSettings(rank=4, alpha=6), {"r": 4, "lora_alpha": 6, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}),
        (LoraSettings(rank=5, alpha=3.5, rslora=True), {"r": 5, "lora_alpha": 3.5, "use_rslora": True, "rank_pattern": {}}),
        (
            LoraSettings(rank=4, alpha=8, rank_pattern={"q_proj": 6}, alpha_pattern={"q_proj": 12}),
            {"r": 6, "lora_alpha": 12, "rank_pattern": {"down_proj": 4, "up_proj": 4, "v_proj": 4}},
        ),
        # Scalings differ, so they are in B and the exported one is 1.
        (LoraSettings(rank=4, alpha=8, rank_pattern={"q_proj": 2}), {"r": 4, "lora_alpha": 4, "alpha_pattern": {"q_proj": 2}}),
        (
            LoraSettings(rank=4, alpha=4, rank_pattern={"q_proj": 0, "layers.2.self_attn.q_proj": 4}),
            {"r": 4, "target_modules": ["down_proj", "layers.2.self_attn.q_proj", "up_proj", "v_proj"], "rank_pattern": {}},
        ),
    ],
)
def test_configs(lora: LoraSettings, expected: dict[str, Any]) -> None:
    config = adapter_config(busy(lora), "tiny", LAYERS)
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("shape", [{"rank": 257, "init": "pissa"}, {"rank": 64, "num_experts": 9}])
def test_what_could_not_leave_is_refused_at_once(shape: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="over the limit of 512"):
        LoraSettings(**shape)


def test_a_plain_adapter_is_cast_and_kept_without_a_copy() -> None:
    adapter = busy(LoraSettings(rank=4, alpha=4))
    name = "layers.0.self_attn.q_proj"
    a_RI, _ = adapter.cast(name, torch.float32)
    assert a_RI.data_ptr() == adapter.factors[name][0].a_RI.data_ptr()
    assert adapter.cast(name, torch.float32)[1] is adapter.cast(name, torch.float32)[1]
    before = adapter.cast(name, torch.float32)[1]
    adapter.factors[name][0].b_OR.mul_(2)
    assert adapter.cast(name, torch.float32)[1] is before
    adapter.changed()
    assert torch.equal(adapter.cast(name, torch.float32)[1], 2 * before)


def test_idle_components_are_not_cast() -> None:
    adapter = busy(LoraSettings(rank=4, alpha=4))
    name = "layers.0.self_attn.q_proj"
    (part,) = adapter.factors[name]
    part.active_R = torch.tensor([True, False, False, True])
    a_RI, b_OR = adapter.cast(name, torch.float32)
    assert torch.equal(a_RI, part.a_RI[[0, 3]])
    assert torch.equal(b_OR, part.b_OR[:, [0, 3]])


def test_the_fingerprint_covers_every_tensor() -> None:
    mixture = LoraSettings(rank=2, num_experts=2)
    seen = {new_adapter(mixture, LAYERS, seed=0, device=CPU).fingerprint()}
    for named in new_adapter(mixture, LAYERS, seed=0, device=CPU).named():
        adapter = new_adapter(mixture, LAYERS, seed=0, device=CPU)
        tensor = next(other.tensor for other in adapter.named() if other.label == named.label)
        tensor.view(-1)[-1] = float(np.nextafter(np.float32(tensor.view(-1)[-1]), np.float32(9)))
        seen.add(adapter.fingerprint())
    assert len(seen) == 1 + 3 * len(LAYERS)
