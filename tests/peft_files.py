"""Adapters written by hand, in the format that stock PEFT writes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from registry.peft_format import PeftAdapter, check_adapter

# (out, in) of the tiny model's layers.
SIZES = {"q_proj": (64, 64), "v_proj": (32, 64), "down_proj": (64, 128)}
PARENT = {"q_proj": "self_attn", "v_proj": "self_attn", "down_proj": "mlp"}
NUM_LAYERS = 2
RANK = 4


def config(**changes: Any) -> dict[str, Any]:
    """A valid adapter_config.json with changes."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 8, "target_modules": list(SIZES), "bias": "none",
        "base_model_name_or_path": "/home/somebody/model", **changes,
    }  # fmt: skip


def key(layer: int, module: str, side: str) -> str:
    """A tensor's name."""
    return f"base_model.model.model.layers.{layer}.{PARENT[module]}.{module}.lora_{side}.weight"


def tensors(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """The factors that `config()` asks for, random."""
    rng = np.random.default_rng(seed)
    values: dict[str, NDArray[np.float32]] = {}
    for layer in range(NUM_LAYERS):
        for module, (size_out, size_in) in SIZES.items():
            values[key(layer, module, "A")] = rng.standard_normal((RANK, size_in), dtype=np.float32)
            values[key(layer, module, "B")] = rng.standard_normal((size_out, RANK), dtype=np.float32)
    return values


def weights(values: dict[str, NDArray[Any]] | None = None) -> bytes:
    """adapter_model.safetensors."""
    return save(values if values is not None else tensors(), metadata={"format": "pt"})


def adapter(seed: int = 0, *, base_model: str = "tiny") -> PeftAdapter:
    """A checked adapter; another one for each seed."""
    return check_adapter(weights(tensors(seed)), config(), base_model=base_model, num_layers=NUM_LAYERS)
