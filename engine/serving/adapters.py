"""Adapters that are served: read from PEFT folders, under immutable names, the least recently used leave.

Errors are told to the caller and harm nothing that is loaded. Source of the format: huggingface/peft `LoraConfig`.
"""

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pydantic
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from core.contracts import LoraSettings
from core.errors import InvalidInput, NotFound
from engine.compute import Compute
from engine.lora import Adapter, Factors
from engine.model import BaseModel
from engine.peft_export import KEY_PREFIX

MAX_RANK = 512
MAX_FILE_BYTES = 4 * 2**30
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@:-]{0,511}")
_KEY = re.compile(re.escape(KEY_PREFIX) + r"(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
_UNSERVED = {
    "use_dora": (False, None), "fan_in_fan_out": (False, None), "bias": ("none", None), "modules_to_save": (None, []),
    "layer_replication": (None, []), "trainable_token_indices": (None, []), "megatron_config": (None,), "target_parameters": (None, []),
    "use_qalora": (False, None), "alora_invocation_tokens": (None, []), "lora_bias": (False, None), "exclude_modules": (None, []),
}  # fmt: skip


class ServingAdapters:
    """Name -> adapter. State of the event loop; weights are placed by the compute thread.

    Args:
        max_adapters: kept at once; a load beyond it drops the least recently used.
    """

    def __init__(self, base: BaseModel, base_name: str, compute: Compute, *, max_adapters: int) -> None:
        self._base = base
        self._base_name = base_name
        self._compute = compute
        self._max_adapters = max_adapters
        self._loaded: OrderedDict[str, Adapter] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """What is loaded, the least recently used first."""
        return tuple(self._loaded)

    def get(self, name: str | None) -> Adapter | None:
        """The adapter of a model name; None is the bare base.

        Raises:
            NotFound: neither the base nor loaded.
        """
        if name is None or name == self._base_name:
            return None
        if name not in self._loaded:
            raise NotFound(f"The model `{name}` does not exist.", param="model", code="model_not_found")
        self._loaded.move_to_end(name)
        return self._loaded[name]

    async def load(self, name: str, folder: Path) -> None:
        """Loads a PEFT folder under a name that never means anything else.

        Raises:
            InvalidInput: the name is loaded already (code adapter_already_loaded), there is no such folder, or name, config or weights
            are not what this engine serves.
        """
        if _NAME.fullmatch(name) is None or ".." in name.split("/"):
            raise InvalidInput("lora_name holds letters, digits and . _ / @ : - only, 512 at most.", param="lora_name")
        if name == self._base_name:
            raise InvalidInput(f"{name} is the base model's name; give the adapter another.", param="lora_name")
        self._refuse_loaded(name)
        config, weights = await asyncio.to_thread(_read_folder, folder)
        adapter = await asyncio.wrap_future(self._compute.call(lambda: adapter_of(config, weights, self._base)))
        self._refuse_loaded(name)
        self._loaded[name] = adapter
        while len(self._loaded) > self._max_adapters:
            self._loaded.popitem(last=False)

    def unload(self, name: str) -> None:
        """Forgets a name; its memory goes with the last sequence that uses it.

        Raises:
            NotFound: not loaded.
        """
        if self._loaded.pop(name, None) is None:
            raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name", code="adapter_not_loaded")

    def _refuse_loaded(self, name: str) -> None:
        if name in self._loaded:
            raise InvalidInput(f"The lora adapter '{name}' has already been loaded.", param="lora_name", code="adapter_already_loaded")


def adapter_of(config: Mapping[str, Any], weights: bytes, base: BaseModel) -> Adapter:
    """A PEFT adapter as the engine computes it, each layer with its own scaling.

    Raises:
        InvalidInput: what the engine can't serve exactly, by name; any missing or unexpected key; a wrong shape, a rank over the limit, a
        value that is not finite; an adapter that applies to no layer (code invalid_adapter).
    """
    _check_config(config)
    try:
        tensors = load(weights)
    except SafetensorError as error:
        raise _refuse(f"adapter_model.safetensors is not safetensors ({error}).") from error
    pairs = _pairs(tensors, base)
    missing = sorted(_expected_layers(config, base) - pairs.keys())
    if missing:
        raise _refuse(f"The weights lack {missing[0]}" + (f" and {len(missing) - 1} more layers" if len(missing) > 1 else "") + ".")
    factors: dict[str, tuple[Factors, ...]] = {}
    for layer, (a_RI, b_OR) in pairs.items():
        rank, scaling = _rank_and_scaling(config, layer)
        num_inputs, num_outputs = base.layers[layer]
        if a_RI.shape != (rank, num_inputs) or b_OR.shape != (num_outputs, rank):
            raise _refuse(
                f"{layer} has shapes {list(a_RI.shape)} and {list(b_OR.shape)}; rank {rank} and the base want [{rank}, {num_inputs}] and "
                f"[{num_outputs}, {rank}]."
            )
        a_RI, b_OR = a_RI.to(base.device.torch, torch.float32), b_OR.to(base.device.torch, torch.float32)
        if not (bool(torch.isfinite(a_RI).all()) and bool(torch.isfinite(b_OR).all())):
            raise _refuse(f"{layer} holds values that are not finite.")
        factors[layer] = (Factors(a_RI.contiguous(), b_OR.contiguous(), scaling, trainable=False),)
    modules = {layer.rsplit(".", 1)[-1] for layer in factors}
    rank = max(part.a_RI.shape[0] for (part,) in factors.values())
    try:
        settings = LoraSettings(rank=rank, alpha=float(rank), target_modules=cast(Any, tuple(sorted(modules))))
    except pydantic.ValidationError as error:
        raise _refuse(f"The adapter has layers that this engine doesn't adapt: {', '.join(sorted(modules))}.") from error
    return Adapter(settings, factors)


def _read_folder(folder: Path) -> tuple[Mapping[str, Any], bytes]:
    config_file, weights_file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for file in (config_file, weights_file):
        if not file.is_file():
            raise InvalidInput(f"No adapter found: {folder} has no {file.name}.", param="lora_path", code="adapter_not_found")
    if weights_file.stat().st_size > MAX_FILE_BYTES:
        raise _refuse(f"adapter_model.safetensors is over {MAX_FILE_BYTES} bytes.")
    try:
        config = json.loads(config_file.read_text())
    except ValueError as error:
        raise _refuse("adapter_config.json is not JSON.") from error
    if not isinstance(config, dict):
        raise _refuse("adapter_config.json is not an object.")
    return cast("dict[str, Any]", config), weights_file.read_bytes()


def _check_config(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise _refuse(f"peft_type is {config.get('peft_type')!r}; only LORA is served.")
    for field, allowed in _UNSERVED.items():
        if config.get(field, allowed[0]) not in allowed:
            raise _refuse(f"{field} is {config[field]!r}, which this engine does not serve.")
    for rank in _values(config, "r", "rank_pattern"):
        if type(rank) is not int or not 1 <= rank <= MAX_RANK:
            raise _refuse(f"A rank is {rank!r}; it must be between 1 and {MAX_RANK}.")
    for alpha in _values(config, "lora_alpha", "alpha_pattern"):
        if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
            raise _refuse(f"lora_alpha is {alpha!r}; with it the adapter does nothing or is not a number.")


def _values(config: Mapping[str, Any], field: str, pattern_field: str) -> list[object]:
    patterns: object = config.get(pattern_field) or {}
    if not isinstance(patterns, dict):
        raise _refuse(f"{pattern_field} is not an object.")
    return [config.get(field), *cast("dict[str, object]", patterns).values()]


def _pairs(tensors: Mapping[str, Tensor], base: BaseModel) -> dict[str, tuple[Tensor, Tensor]]:
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or match["layer"] not in base.layers:
            raise _refuse(f"The weights hold {key!r}, which names no layer of the base; PEFT's keys begin with {KEY_PREFIX!r}.")
        sides.setdefault(match["layer"], {})[match["side"]] = tensor
    if not sides:
        raise _refuse("The adapter applies to no layer of the base.")
    for layer, pair in sides.items():
        if len(pair) != 2:
            raise _refuse(f"The weights hold only one of the two factors of {layer}.")
    return {layer: (pair["A"], pair["B"]) for layer, pair in sorted(sides.items())}


def _expected_layers(config: Mapping[str, Any], base: BaseModel) -> set[str]:
    """Layers that the config says are adapted; a pattern in place of names leaves it to the weights."""
    targets = config.get("target_modules")
    if targets == "all-linear":
        return set(base.layers)
    if not isinstance(targets, list) or not targets or not all(isinstance(t, str) for t in targets):
        if isinstance(targets, str):
            return {layer for layer in base.layers if re.fullmatch(re.escape(targets), layer)}
        raise _refuse("target_modules is not a list of names.")
    chosen = config.get("layers_to_transform")
    numbers = None if chosen is None else {str(n) for n in (chosen if isinstance(chosen, list) else [chosen])}
    return {
        layer for layer in base.layers
        if any(f".{layer}".endswith(f".{target}") for target in cast("list[str]", targets))
        and (numbers is None or layer.split(".")[1] in numbers)
    }  # fmt: skip


def _rank_and_scaling(config: Mapping[str, Any], layer: str) -> tuple[int, float]:
    rank = _pattern_value(config.get("rank_pattern"), layer, config["r"])
    alpha = _pattern_value(config.get("alpha_pattern"), layer, config["lora_alpha"])
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _pattern_value(patterns: Mapping[str, Any] | None, layer: str, default: Any) -> Any:
    """The first pattern that matches the end of the layer's name, as PEFT's `get_pattern_key` finds it."""
    for pattern, value in (patterns or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", f"model.{layer}"):
                return value
        except re.error as error:
            raise _refuse(f"The pattern {pattern!r} is no regular expression.") from error
    return default


def _refuse(message: str) -> InvalidInput:
    return InvalidInput(message, param="lora_path", code="invalid_adapter")
