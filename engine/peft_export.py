"""An adapter in PEFT's format and back. The only engine module that speaks of `r` and `lora_alpha`.

Whatever its parts, an adapter leaves as one plain LoRA: ranks side by side, one scaling for all layers (servers apply no other).
Source: huggingface/peft, `LoraConfig`, `get_pattern_key` and `get_peft_model_state_dict`.
Dimensions: I and O a layer's inputs and outputs, R rank, E experts.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from core.contracts import LoraSettings
from core.errors import InvalidInput
from engine.lora import Adapter, Factors, adapted_layers

KEY_PREFIX = "base_model.model.model."
FULL_PREFIX = "full/"


def adapter_weights(adapter: Adapter) -> bytes:
    """safetensors, float32; equal factors give equal bytes.

    Where all parts share one scaling (a sign aside) the factors are as they are trained; else each B carries its own scaling and the
    exported one is 1. Idle components of a rank budget stay behind; a mixture's gates are replaced by their running mean.
    """
    adapter = adapter.plain()
    scaling = _scaling(adapter)
    tensors: dict[str, Tensor] = {}
    for name, parts in sorted(adapter.factors.items()):
        pairs = [_exported(part, scaling) for part in parts]
        a_RI, b_OR = pairs[0] if len(pairs) == 1 else (torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1))
        if len(a_RI):
            for letter, factor in (("A", a_RI), ("B", b_OR)):
                tensors[_key(name, letter)] = factor.to("cpu", torch.float32).contiguous()
    return save(tensors, metadata={"format": "pt"})


def delta_weights(adapter: Adapter) -> bytes:
    """The dense changes of a full-parameter job: safetensors, float32 [O, I] under `full/<layer>`; equal changes give equal bytes.

    Raises:
        InvalidInput: the adapter is of low rank.
    """
    if not adapter.dense:
        raise InvalidInput("Only a job of kind full has dense changes; save this one as an adapter.", param="lora.kind")
    return save({FULL_PREFIX + name: d_OI.detach().to("cpu").contiguous() for name, d_OI in sorted(adapter.dense.items())})


def adapter_config(adapter: Adapter, base_model_name: str, layers: Iterable[str]) -> dict[str, Any]:
    """PEFT's adapter_config.json as a value.

    `r` is the greatest rank of any layer, so that a server that looks no further admits it rightly; others stand in rank_pattern with an
    alpha_pattern that keeps the one scaling.

    Args:
        layers: every layer of the base that can take an adapter, by name.
    Raises:
        InvalidInput: a job of kind full, which is no adapter.
    """
    if adapter.dense:
        raise InvalidInput(
            "A job of kind full trains the weights themselves and can't leave as an adapter; take its dense changes instead.",
            param="lora.kind",
            code="not_an_adapter",
        )
    settings, scaling = adapter.settings, _scaling(adapter)
    ranks = {name: rank for name in sorted(adapter.factors) if (rank := _rank(adapter.factors[name]))}
    rank = max(ranks.values(), default=settings.rank)
    targets, pattern = _by_module(ranks, layers, rank)
    own = scaling == settings.alpha / (math.sqrt(rank) if settings.rslora else rank)
    return {
        "alpha_pattern": {key: _number(scaling * value) for key, value in pattern.items()},
        "auto_mapping": None,
        "base_model_name_or_path": base_model_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": _number(settings.alpha if own and not pattern else scaling * rank),
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": pattern,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": own and not pattern and settings.rslora,
    }


def export_notes(adapter: Adapter) -> dict[str, float]:
    """See `SavedAdapter.notes`."""
    return {"distilled_experts": float(adapter.settings.num_experts)} if adapter.settings.num_experts > 1 else {}


def exported_scaling(config: Mapping[str, Any]) -> float:
    """The one scaling of an exported config."""
    return float(config["lora_alpha"]) / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])


def exported_rank(adapter: Adapter) -> int:
    """The greatest rank that a layer of the exported adapter may come to have (a rank budget counts with its most)."""
    return max((sum(len(part.a_RI) for part in parts) for parts in adapter.factors.values()), default=0)


def read_adapter(weights: bytes, settings: LoraSettings, layers: Mapping[str, tuple[int, int]], device: torch.device) -> Adapter:
    """The adapter of PEFT safetensors, one trainable part a layer.

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
    names = adapted_layers(settings, layers)
    expected: dict[str, tuple[int, int]] = {}
    for name in names:
        num_inputs, num_outputs = layers[name]
        expected[_key(name, "A")] = (settings.rank_of(name), num_inputs)
        expected[_key(name, "B")] = (num_outputs, settings.rank_of(name))
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
    return Adapter(
        settings, {name: (Factors(moved[_key(name, "A")], moved[_key(name, "B")], settings.scaling_of(name)),) for name in names}
    )


def _scaling(adapter: Adapter) -> float:
    """The scaling that the exported adapter has in all layers: the parts' own where they agree on it, else 1."""
    scalings = {abs(part.scale) for parts in adapter.factors.values() for part in parts}
    if len(scalings) != 1:
        return 1.0
    scaling = scalings.pop()
    ranks = {_rank(parts) for parts in adapter.factors.values()} - {0}
    # Servers compute alpha / r again; where that does not give the same float32, B carries the scaling.
    return scaling if all(np.float32(scaling * rank / rank) == np.float32(scaling) for rank in ranks) else 1.0


def _exported(part: Factors, scaling: float) -> tuple[Tensor, Tensor]:
    a_RI, b_OR = part.kept
    if scaling == abs(part.scale):
        return a_RI, -b_OR if part.scale < 0 else b_OR
    return a_RI, b_OR * part.scale


def _rank(parts: tuple[Factors, ...]) -> int:
    return sum(len(part.a_RI) if part.active_R is None else int(part.active_R.sum()) for part in parts)


def _by_module(ranks: Mapping[str, int], layers: Iterable[str], rank: int) -> tuple[list[str], dict[str, int]]:
    """PEFT's target_modules and rank_pattern: by module kind where all layers of it are alike, else layer by layer."""
    targets: list[str] = []
    pattern: dict[str, int] = {}
    kinds = sorted({name.rsplit(".", 1)[-1] for name in ranks})
    for kind in kinds:
        found = {name: ranks.get(name, 0) for name in sorted(layers) if name.rsplit(".", 1)[-1] == kind}
        keys = [kind] if 0 not in found.values() else [name for name in found if found[name]]
        targets += keys
        distinct = set(found.values()) - {0}
        if keys == [kind] and len(distinct) == 1:
            pattern |= {kind: distinct.pop()}
        else:
            pattern |= {name: value for name, value in found.items() if value}
    return targets, {key: value for key, value in pattern.items() if value != rank}


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _key(name: str, letter: str) -> str:
    return f"{KEY_PREFIX}{name}.lora_{letter}.weight"
