"""What may become an adapter version.

1. An adapter by stock PEFT passes, and what is stored loads in stock PEFT and gives the same logits (verl#5488, verl#6380).
2. Each corruption is refused by name: missing and unexpected keys, no module, wrong shapes, NaN, other formats (Relax#262, peft#1993).
3. What the engine or vLLM could not apply is refused by name (vllm#6909, vllm#6983, vllm#9280), and no config names code (peft#3085).
4. Equal content has equal digests, whatever wrote the config.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import CorruptData, InvalidInput
from registry.manifest import Manifest
from registry.peft_config import parse_config
from registry.peft_format import check_adapter
from tests.peft_files import NUM_LAYERS, RANK, adapter, config, key, tensors, weights


def check(values: dict[str, Any] | bytes | None = None, **changes: Any) -> Any:
    data = values if isinstance(values, bytes) else weights(values)
    return check_adapter(data, config(**changes), base_model="tiny", num_layers=NUM_LAYERS)


def refused(values: dict[str, Any] | bytes | None = None, **changes: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        check(values, **changes)
    assert caught.value.code == "invalid_adapter"
    assert caught.value.param is not None
    return caught.value


def test_stock_peft_round_trip(tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(12).reshape(1, -1)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    base_logits = base(tokens).logits.detach()
    torch.manual_seed(1)
    wrapped = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    logits = wrapped(tokens).logits.detach()
    wrapped.save_pretrained(tmp_path / "peft")

    checked = check_adapter(
        (tmp_path / "peft/adapter_model.safetensors").read_bytes(), (tmp_path / "peft/adapter_config.json").read_bytes(), base_model="tiny"
    )
    assert checked.num_layers == 2
    assert checked.warnings == ()
    assert str(tiny_model) not in checked.config.decode()

    (tmp_path / "stored").mkdir()
    for name, content in checked.files.items():
        (tmp_path / "stored" / name).write_bytes(content)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "stored")
    assert torch.equal(again(tokens).logits, logits)
    assert not torch.allclose(logits, base_logits, atol=1e-3)


def test_config_is_canonical() -> None:
    other_order = dict(sorted(config(peft_version="0.1", corda_config=None, loftq_config={}).items(), reverse=True))
    other_order["target_modules"] = list(reversed(other_order["target_modules"]))
    other_order["lora_alpha"] = 8.0
    one, two = adapter(), check_adapter(weights(), json.dumps(other_order).encode(), base_model="tiny")
    assert one.digest == two.digest
    stored = json.loads(one.config)
    assert list(stored) == sorted(stored)
    assert stored["lora_alpha"] == 8
    assert stored["task_type"] == "CAUSAL_LM"
    assert adapter(1).digest != one.digest


def test_manifest_digest() -> None:
    import hashlib

    made = adapter()
    files = {name: hashlib.sha256(content).hexdigest() for name, content in made.files.items()}
    canonical = json.dumps({"files": files}, sort_keys=True, separators=(",", ":")).encode()
    assert made.digest == hashlib.sha256(canonical).hexdigest()
    assert Manifest.from_bytes(canonical, digest=made.digest) == made.manifest
    with pytest.raises(CorruptData):
        Manifest.from_bytes(canonical + b" ", digest=made.digest)
    with pytest.raises(CorruptData):
        Manifest({**files, "../evil": "0" * 64})


def test_fresh_adapter_passes_with_a_warning() -> None:
    values = {name: value * (0 if "lora_B" in name else 1) for name, value in tensors().items()}
    assert "exactly as the base model" in check(values).warnings[0]


def test_missing_key() -> None:
    values = tensors()
    del values[key(1, "v_proj", "B")]
    assert "layers.1.self_attn.v_proj.lora_B" in refused(values).message


def test_missing_layer_without_a_layer_count() -> None:
    values = {name: value for name, value in tensors().items() if ".layers.0." not in name}
    with pytest.raises(InvalidInput, match=r"layers\.0\."):
        check_adapter(weights(values), config(), base_model="tiny")


def test_extra_key() -> None:
    values = tensors() | {"base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight": np.zeros((RANK, 64), np.float32)}
    assert "k_proj" in refused(values).message


def test_keys_without_pefts_prefix_apply_to_nothing() -> None:
    values = {name.removeprefix("base_model.model."): value for name, value in tensors().items()}
    assert "applies to no module" in refused(values).message
    with pytest.raises(InvalidInput, match="applies to no module"):
        check_adapter(weights(values), config(), base_model="tiny")


def test_no_tensors_at_all() -> None:
    assert "applies to no module" in refused({}).message


@pytest.mark.parametrize("shape", [(RANK + 1, 64), (RANK, 65), (RANK,), (0, 64), (64, RANK)])
def test_wrong_shape(shape: tuple[int, ...]) -> None:
    error = refused(tensors() | {key(1, "q_proj", "A"): np.ones(shape, np.float32)})
    assert "layers.1.self_attn.q_proj.lora_A" in error.message


def test_rank_pattern_decides_shapes_and_must_keep_one_scaling() -> None:
    wide = {
        name: np.concatenate([value, value], axis=0 if "lora_A" in name else 1) if "q_proj" in name else value
        for name, value in tensors().items()
    }
    assert "with rank 4" in refused(wide).message
    assert "one scaling" in refused(wide, rank_pattern={"q_proj": 2 * RANK}).message
    passed = check(wide, rank_pattern={"q_proj": 2 * RANK}, alpha_pattern={"q_proj": 16})
    assert passed.settings.scaling_of("model.layers.0.self_attn.q_proj") == passed.settings.scaling == 2.0
    assert "several values" in refused(wide, rank_pattern={"q_proj": 8, "self_attn.q_proj": 4}).message
    assert "rank_pattern" in refused(rank_pattern={"q_proj": 100_000}).message
    assert "regular expressions" in refused(rank_pattern={".*q_proj": 8}).message


def test_single_layers_are_targets_too() -> None:
    """A rank budget can leave layers without an adapter; what it names must be there, and nothing else."""
    values = {name: value for name, value in tensors().items() if "layers.0.mlp.down_proj" not in name}
    targets = ["q_proj", "v_proj", "layers.1.mlp.down_proj"]
    checked = check(values, target_modules=targets)
    assert checked.settings.modules(NUM_LAYERS) == [
        "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj",
        "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj",
    ]  # fmt: skip
    lora = checked.settings.lora_settings()
    assert [lora.rank_of(f"layers.{layer}.mlp.down_proj") for layer in (0, 1)] == [0, RANK]
    assert lora.rank_of("layers.0.self_attn.q_proj") == RANK
    assert "down_proj" in refused(target_modules=targets).message
    assert "lora_A" in refused(values, target_modules=[*targets, "layers.0.mlp.up_proj"]).message
    assert "applies to no module" in refused({}, target_modules=["layers.7.mlp.down_proj"]).message
    for wrong in ("layers.1.self_attn.down_proj", "layers.01.mlp.down_proj", "layers.*.mlp.down_proj", "model.layers.1.mlp.down_proj"):
        assert "target_modules" in refused(values, target_modules=["q_proj", "v_proj", wrong]).message


def test_settings_of_an_accepted_config() -> None:
    accepted = parse_config(config(rank_pattern={"q_proj": 8, "model.layers.1.mlp.down_proj": 2}, alpha_pattern={"q_proj": 4.5}))
    lora = accepted.lora_settings()
    for name in accepted.modules(NUM_LAYERS):
        assert lora.rank_of(name.removeprefix("model.")) == accepted.rank_of(name)
        assert lora.scaling_of(name.removeprefix("model.")) == accepted.scaling_of(name)


def test_dense_changes_are_no_adapter() -> None:
    assert "kind full" in refused({"full/layers.0.mlp.down_proj": np.ones((4, 4), np.float32)}).message


def test_rslora_scaling() -> None:
    assert parse_config(config(use_rslora=True)).scaling == pytest.approx(8 / RANK**0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_values_that_are_no_numbers(bad: float, dtype: Any) -> None:
    values = {name: value.astype(dtype) for name, value in tensors().items()}
    values[key(0, "down_proj", "B")][3, 1] = bad
    assert "NaN or infinity" in refused(values).message


def test_bfloat16_is_read() -> None:
    import torch
    from safetensors.torch import save as save_torch

    values = {name: torch.from_numpy(value).to(torch.bfloat16) for name, value in tensors().items()}
    assert check(save_torch(values)).warnings == ()
    values[key(0, "q_proj", "A")][0, 0] = float("nan")
    assert "NaN" in refused(save_torch(values)).message


def test_integers_are_no_factors() -> None:
    assert "floating point" in refused({name: value.astype(np.int32) for name, value in tensors().items()}).message


def test_other_formats_by_name() -> None:
    import io

    import torch

    archive = io.BytesIO()
    torch.save({name: torch.from_numpy(value) for name, value in tensors().items()}, archive)
    assert "pickle" in refused(archive.getvalue()).message
    assert "pickle" in refused(pickle.dumps({"a": 1})).message
    assert "git lfs pull" in refused(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n").message


def test_damaged_files() -> None:
    good = weights()
    header_bytes = int.from_bytes(good[:8], "little")
    for bad in (
        b"", good[:4], good[:-1], good + b"\0", good[:100], (1 << 62).to_bytes(8, "little") + good[8:], good[:8] + b"[" * header_bytes,
        good[:8] + b" " + good[9:], good.replace(b'"F32"', b'"F16"', 1), good.replace(b'"shape":[', b'"shape":{', 1),
    ):  # fmt: skip
        refused(bad)


def test_overlapping_tensors() -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]} for name in ("a", "b")}).encode()
    assert "overlap" in refused(len(header).to_bytes(8, "little") + header + bytes(4)).message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"), ("peft_type", None), ("task_type", "SEQ_CLS"), ("task_type", None), ("r", 0), ("r", 1000), ("r", True),
        ("lora_alpha", 0), ("lora_alpha", -1), ("lora_alpha", float("nan")), ("lora_alpha", "8"), ("target_modules", "all-linear"),
        ("target_modules", []), ("target_modules", ["query_key_value"]), ("use_dora", True), ("modules_to_save", ["lm_head"]),
        ("auto_mapping", {"base_model_class": "X", "parent_library": "os"}), ("bias", "all"), ("lora_bias", True),
        ("layers_to_transform", [0]), ("layer_replication", [[0, 2]]), ("fan_in_fan_out", True), ("init_lora_weights", "pissa"),
        ("megatron_config", {"a": 1}), ("trainable_token_indices", [1]), ("enable_lora", [True]), ("use_rslora", "yes"),
        ("something_new", 1), ("rank_pattern", [1]),
    ],
)  # fmt: skip
def test_configs_that_are_refused_by_name(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert error.param == f"adapter_config.json.{field}"
    assert field in error.message


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"version https://git-lfs.github.com/spec/v1", b"[" * 100_000])
def test_config_files_that_are_no_config(data: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"adapter_config\.json"):
        parse_config(data)


def test_legacy_fields_that_are_off_pass() -> None:
    assert check(enable_lora=None, merge_weights=False).digest == adapter().digest
