"""An adapter in PEFT's format and back. The only engine module that speaks of `r` and `lora_alpha`.

Source: huggingface/peft, `LoraConfig` and `get_peft_model_state_dict`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from core.contracts import LoraSettings
from core.errors import InvalidInput
from engine.lora import Adapter, Factors

KEY_PREFIX = "base_model.model.model."


def adapter_weights(adapter: Adapter) -> bytes:
    """safetensors, float32; equal factors give equal bytes."""
    tensors: dict[str, Tensor] = {}
    for name, pair in sorted(adapter.factors.items()):
        for letter, factor in (("A", pair.a_RI), ("B", pair.b_OR)):
            tensors[_key(name, letter)] = factor.detach().to("cpu", torch.float32).contiguous()
    return save(tensors, metadata={"format": "pt"})


def adapter_config(settings: LoraSettings, base_model_name: str) -> dict[str, Any]:
    """PEFT's adapter_config.json as a value."""
    alpha = settings.alpha
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": base_model_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": settings.rank,
        "rank_pattern": {},
        "target_modules": sorted(settings.target_modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def read_adapter(weights: bytes, settings: LoraSettings, layers: Mapping[str, tuple[int, int]], device: torch.device) -> Adapter:
    """The adapter of PEFT safetensors.

    Args:
        layers: (inputs, outputs) of each layer of the base that can take an adapter, by name.
    Raises:
        InvalidInput: not safetensors, a key missing or unexpected, a shape that doesn't fit the base or the rank, a value not finite.
    """
    try:
        tensors = load(weights)
    except SafetensorError as error:
        raise InvalidInput(
            f"The weights are not safetensors ({error}); export them with PEFT's save_pretrained.", param="weights"
        ) from error
    names = [name for name in sorted(layers) if name.rsplit(".", 1)[-1] in settings.target_modules]
    expected: dict[str, tuple[int, int]] = {}
    for name in names:
        num_inputs, num_outputs = layers[name]
        expected[_key(name, "A")] = (settings.rank, num_inputs)
        expected[_key(name, "B")] = (num_outputs, settings.rank)
    faults = [f"missing {key}" for key in sorted(expected.keys() - tensors.keys())]
    faults += [f"unexpected {key}" for key in sorted(tensors.keys() - expected.keys())]
    faults += [
        f"{key} has shape {list(tensors[key].shape)}, not {list(shape)}"
        for key, shape in expected.items()
        if key in tensors and tuple(tensors[key].shape) != shape
    ]
    faults += [f"{key} has values that are not finite" for key in sorted(tensors) if not bool(torch.isfinite(tensors[key].float()).all())]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise InvalidInput(
            f"The weights don't fit rank, target_modules or base: {'; '.join(faults[:3])}{more}.", param="weights", code="adapter_mismatch"
        )
    moved = {key: tensor.to(device, torch.float32).contiguous() for key, tensor in tensors.items()}
    return Adapter(settings, {name: Factors(moved[_key(name, "A")], moved[_key(name, "B")]) for name in names})


def _key(name: str, letter: str) -> str:
    return f"{KEY_PREFIX}{name}.lora_{letter}.weight"
