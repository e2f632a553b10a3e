"""The fingerprint is the same for the trainer's file and for what an engine makes of it, and for nothing else."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from core.fingerprint import EngineDtype, Matrix, adapter_fingerprint, expected_fingerprint

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")


def factors(seed: int = 0, rank: int = 4) -> dict[str, tuple[Matrix, Matrix]]:
    random = np.random.default_rng(seed)
    return {name: (random.normal(size=(rank, 6)).astype(np.float32), random.normal(size=(5, rank)).astype(np.float32)) for name in MODULES}


def trainer_file(modules: dict[str, tuple[Matrix, Matrix]]) -> bytes:
    return save(
        {
            f"base_model.model.{name}.lora_{half}.weight": matrix
            for name, pair in modules.items()
            for half, matrix in zip("AB", pair, strict=True)
        }
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scaling", [1.0, 0.5, 12 / 7])
def test_equals_what_an_engine_holds_after_torch_cast_scaling_padding_and_reordering(dtype: EngineDtype, scaling: float) -> None:
    held = []
    for name, (a, b) in reversed(factors().items()):
        scaled = torch.from_numpy(b).to(getattr(torch, dtype))
        scaled *= scaling
        padded_a = torch.zeros(16, a.shape[1])
        padded_a[:4] = torch.from_numpy(a).to(getattr(torch, dtype)).float()
        padded_b = torch.zeros(b.shape[0], 16)
        padded_b[:, :4] = scaled.float()
        held.append((name, padded_a.numpy(), padded_b.numpy()))
    held.append(("model.layers.0.self_attn.k_proj", np.zeros((16, 6), np.float32), np.zeros((5, 16), np.float32)))
    assert adapter_fingerprint(held, dtype) == expected_fingerprint(trainer_file(factors()), scaling, dtype)


def test_every_weight_the_scaling_the_names_and_the_dtype_count() -> None:
    seen = {expected_fingerprint(trainer_file(factors()), 2.0), expected_fingerprint(trainer_file(factors()), 2.0, "bfloat16")}
    seen.add(expected_fingerprint(trainer_file(factors()), 2.0000002))
    for half in (0, 1):
        changed = factors()
        matrix = changed[MODULES[1]][half]
        matrix[1, 2] = np.nextafter(matrix[1, 2], np.float32(9))
        seen.add(expected_fingerprint(trainer_file(changed), 2.0))
    swapped = factors()
    swapped[MODULES[0]], swapped[MODULES[1]] = swapped[MODULES[1]], swapped[MODULES[0]]
    seen.add(expected_fingerprint(trainer_file(swapped), 2.0))
    assert len(seen) == 6


def test_scaling_by_module() -> None:
    weights = trainer_file(factors())
    assert expected_fingerprint(weights, dict.fromkeys(MODULES, 2.0)) == expected_fingerprint(weights, 2.0)
    assert expected_fingerprint(weights, {MODULES[0]: 2.0, MODULES[1]: 1.0}) != expected_fingerprint(weights, 2.0)


def test_what_is_no_pair_of_finite_factors_is_refused() -> None:
    a, b = factors()[MODULES[0]]
    key = f"base_model.model.{MODULES[0]}.lora_"
    with pytest.raises(ValueError, match="in pairs"):
        expected_fingerprint(save({f"{key}A.weight": a}), 1.0)
    with pytest.raises(ValueError, match="in pairs"):
        expected_fingerprint(save({f"{key}A.weight": a, f"{key}B.weight": b, "lm_head.weight": a}), 1.0)
    with pytest.raises(ValueError, match="finite"):
        expected_fingerprint(save({f"{key}A.weight": a, f"{key}B.weight": b * np.float32(np.nan)}), 1.0)
