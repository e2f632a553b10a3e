"""A PEFT adapter, checked without torch before it may become a version: a bad one is refused here, not by a server that it takes down."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from registry.manifest import CONFIG_FILE, WEIGHTS_FILE, Manifest, sha256_hex
from registry.peft_config import PeftConfig, parse_config
from registry.safetensors_file import TensorEntry, as_float, read_header, refuse

_PREFIX = "base_model.model."
FULL_PREFIX = "full/"
"""Of the keys of a full-parameter job's export."""
_LAYER = re.compile(r"base_model\.model\.model\.layers\.(0|[1-9][0-9]{0,3})\.")
_NAMED_AT_MOST = 4


@dataclass(frozen=True)
class PeftAdapter:
    """A checked adapter, ready to be published. Make it with `check_adapter`."""

    config: bytes
    """Canonical adapter_config.json."""
    weights: bytes
    """adapter_model.safetensors as it came."""
    settings: PeftConfig
    num_layers: int
    warnings: tuple[str, ...] = ()
    """What its owner should know, and what is no fault in a fresh adapter."""

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """Contents by file name."""
        return {CONFIG_FILE: self.config, WEIGHTS_FILE: self.weights}

    @cached_property
    def manifest(self) -> Manifest:
        """File names and digests."""
        return Manifest({name: sha256_hex(content) for name, content in self.files.items()})

    @cached_property
    def digest(self) -> str:
        """Digest of the version it makes."""
        return self.manifest.digest

    @property
    def num_bytes(self) -> int:
        """Sum of the files' sizes."""
        return len(self.config) + len(self.weights)


def check_adapter(weights: bytes, config: Mapping[str, Any] | bytes, *, base_model: str, num_layers: int | None = None) -> PeftAdapter:
    """Checks an adapter strictly.

    Args:
        weights: adapter_model.safetensors.
        config: adapter_config.json, as a value (of `engine.types.SavedAdapter`) or as bytes.
        base_model: name of the base, written into the stored config (paths of the machine that trained it are not).
        num_layers: layers of the base; default as many as the weights have, without gaps.
    Returns:
        The adapter; `warnings` says so if lora_B is zero throughout, so that it answers as the base does.
    Raises:
        InvalidInput: code invalid_adapter; param is the file, with the config's field where one is at fault.
    """
    settings = parse_config(config)
    tensors = read_header(weights)
    if any(name.startswith(FULL_PREFIX) for name in tensors):
        raise refuse("These are the dense changes of a job of kind full: a shared base serves LoRA adapters only. Train one of kind lora.")
    layers = num_layers if num_layers is not None else _count_layers(tensors)
    modules = settings.modules(layers)
    _check_keys(tensors, {_key(module, side) for module in modules for side in "AB"})
    for module in modules:
        _check_scaling(settings, module)
    _check_shapes(settings, tensors, modules)
    learned = _check_values(weights, tensors)
    warnings = () if learned else ("lora_B is zero in every module: the adapter answers exactly as the base model does.",)
    return PeftAdapter(settings.to_bytes(base_model=base_model), weights, settings, layers, warnings)


def _key(module: str, side: str) -> str:
    return f"{_PREFIX}{module}.lora_{side}.weight"


def _count_layers(tensors: Mapping[str, TensorEntry]) -> int:
    numbers = [int(match.group(1)) for name in tensors if (match := _LAYER.match(name))]
    if not numbers:
        raise refuse(
            "The adapter applies to no module: no key begins with 'base_model.model.model.layers.'. Save it with PEFT's save_pretrained."
        )
    return max(numbers) + 1


def _check_keys(tensors: Mapping[str, TensorEntry], expected: set[str]) -> None:
    missing, unexpected = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
    if len(missing) == len(expected):
        wanted = missing[0] if missing else "that of a layer of the base"
        raise refuse(f"The adapter applies to no module: it has no key such as {wanted!r}; it has {_named(unexpected)}.")
    if missing:
        raise refuse(f"The weights lack {len(missing)} tensors that the config's target modules need: {_named(missing)}.")
    if unexpected:
        raise refuse(f"The weights have {len(unexpected)} tensors that the config's target modules do not name: {_named(unexpected)}.")


def _named(keys: list[str]) -> str:
    shown = ", ".join(repr(key) for key in keys[:_NAMED_AT_MOST])
    return f"{shown} and {len(keys) - _NAMED_AT_MOST} more" if len(keys) > _NAMED_AT_MOST else shown or "none"


def _check_scaling(settings: PeftConfig, module: str) -> None:
    if abs(settings.scaling_of(module) - settings.scaling) > 1e-9 * settings.scaling:
        raise refuse(
            f"Module {module} is scaled by {settings.scaling_of(module):g} and the others by {settings.scaling:g}; servers apply one "
            "scaling to all. Give rank_pattern and alpha_pattern entries the same alpha / r."
        )


def _check_shapes(settings: PeftConfig, tensors: Mapping[str, TensorEntry], modules: Sequence[str]) -> None:
    """A is [R, in] and B is [out, R]; in and out are one module kind's in every layer."""
    sizes: dict[tuple[str, str], int] = {}
    for module in modules:
        rank, kind = settings.rank_of(module), module.rsplit(".", 1)[-1]
        for side, rank_axis in (("A", 0), ("B", 1)):
            key = _key(module, side)
            shape = tensors[key].shape
            if len(shape) != 2 or shape[rank_axis] != rank or 0 in shape:
                wanted = f"[{rank}, in]" if side == "A" else f"[out, {rank}]"
                raise refuse(f"Tensor {key!r} has shape {list(shape)}; with rank {rank} it must be {wanted}.")
            size = shape[1 - rank_axis]
            first = sizes.setdefault((kind, side), size)
            if first != size:
                raise refuse(f"Tensor {key!r} has shape {list(shape)}; in the first layer that size is {first}, not {size}.")


def _check_values(weights: bytes, tensors: Mapping[str, TensorEntry]) -> bool:
    """Whether any lora_B is not zero; refuses NaN and infinity."""
    learned = False
    for key, tensor in tensors.items():
        values = as_float(weights, tensor)
        if not bool(np.isfinite(values).all()):
            raise refuse(f"Tensor {key!r} holds NaN or infinity; the training diverged. Lower the learning rate and train again.")
        learned = learned or (key.endswith(".lora_B.weight") and bool(values.any()))
    return learned
