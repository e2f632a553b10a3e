"""PEFT's adapter_config.json: what is accepted, and the canonical form that is stored.

The stored config is made of known fields only, so nothing that came in with an adapter (an import path, a hub id to fetch) reaches a
loader. What the engine or vLLM could not apply exactly is refused here, by name.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from core.contracts import LoraSettings, TargetModule
from core.errors import InvalidInput

MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 512
TARGETS = frozenset[str](get_args(TargetModule))
_PARENT = {
    "q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn",
    "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp",
}  # fmt: skip
_LAYER_TARGET = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(self_attn|mlp)\.([a-z]+_proj)")
# Without effect on what the adapter computes once it is trained; not kept.
_IGNORED = frozenset(
    {"peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "megatron_core", "qalora_group_size",
     "layers_pattern", "peft_type", "task_type", "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora",
     "init_lora_weights"}
)  # fmt: skip
_WHY = {
    "use_dora": "DoRA scales the base's own columns, which a shared base can't do for one tenant",
    "modules_to_save": "whole trained modules can't be swapped per request on a shared base",
    "auto_mapping": "a config may not name code to import",
    "bias": "trained biases can't be swapped per request on a shared base",
    "lora_bias": "trained biases can't be swapped per request on a shared base",
    "trainable_token_indices": "trained embeddings can't be swapped per request on a shared base",
    "layers_to_transform": "an adapter covers every layer of its target modules",
    "exclude_modules": "an adapter covers every layer of its target modules",
    "layer_replication": "the shared base keeps its layers",
    "fan_in_fan_out": "the base's linear layers are stored as (out, in)",
    "megatron_config": "export the adapter to plain PEFT first",
}
# These start from the base's own weights and change them: the adapter is only right on that changed base.
_NEUTRAL_INITS: tuple[Any, ...] = (True, False, None, "gaussian", "orthogonal")
_PATTERN_KEY = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")


@dataclass(frozen=True)
class PeftConfig:
    """An accepted config. `r` and `lora_alpha` as PEFT calls them."""

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    """Sorted: module kinds, or single layers such as `layers.0.mlp.up_proj` where a kind is not adapted everywhere."""
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    alpha_pattern: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def scaling(self) -> float:
        """What the update is multiplied by: alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023, arXiv:2312.03732)."""
        return self._scaling(self.lora_alpha, self.r)

    def rank_of(self, module: str) -> int:
        """Rank of the module at a dotted path, e.g. `model.layers.0.self_attn.q_proj`."""
        return self.rank_pattern.get(_match(self.rank_pattern, module) or "", self.r)

    def scaling_of(self, module: str) -> float:
        """Scaling of the module at a dotted path."""
        alpha = self.alpha_pattern.get(_match(self.alpha_pattern, module) or "", self.lora_alpha)
        return self._scaling(alpha, self.rank_of(module))

    def modules(self, num_layers: int) -> list[str]:
        """Dotted paths of the adapted modules in a base of so many layers."""
        found: list[str] = []
        for target in self.target_modules:
            if target in TARGETS:
                found += [f"model.layers.{layer}.{_PARENT[target]}.{target}" for layer in range(num_layers)]
            elif int(target.split(".")[1]) < num_layers:
                found.append(f"model.{target}")
        return sorted(found)

    def lora_settings(self) -> LoraSettings:
        """The shape for a job that continues this adapter or stacks over it."""
        single = [target for target in self.target_modules if target not in TARGETS]
        partial = {_kind(target) for target in single}
        ranks = {key.removeprefix("model."): rank for key, rank in self.rank_pattern.items() if _kind(key) not in partial}
        # A kind that is adapted in some layers only: rank 0 throughout, and those layers by name.
        ranks |= dict.fromkeys(partial, 0) | {target: self.rank_of(f"model.{target}") for target in single}
        kinds = sorted({_kind(target) for target in self.target_modules})
        return LoraSettings(
            rank=self.r,
            alpha=self.lora_alpha,
            target_modules=cast("Any", tuple(kinds)),
            rslora=self.use_rslora,
            rank_pattern=ranks,
            alpha_pattern={key.removeprefix("model."): alpha for key, alpha in self.alpha_pattern.items()},
        )

    def _scaling(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def to_bytes(self, *, base_model: str) -> bytes:
        """The canonical adapter_config.json: every field that stock PEFT and vLLM need, sorted."""
        value = {
            "alpha_pattern": {key: _number(alpha) for key, alpha in self.alpha_pattern.items()},
            "base_model_name_or_path": base_model,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": _number(self.lora_alpha),
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": self.r,
            "rank_pattern": dict(self.rank_pattern),
            "target_modules": list(self.target_modules),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": self.use_rslora,
        }
        return (json.dumps(value, sort_keys=True, indent=2) + "\n").encode()


def parse_config(config: Mapping[str, Any] | bytes) -> PeftConfig:
    """Checks a config, given as a value or as the file's bytes.

    Raises:
        InvalidInput: param is `adapter_config.json`, or that and the field.
    """
    value = _load(config) if isinstance(config, bytes) else config
    if value.get("peft_type") != "LORA":
        raise _refuse("peft_type", f"is {value.get('peft_type')!r}; only LORA adapters are served")
    if value.get("task_type") != "CAUSAL_LM":
        raise _refuse("task_type", f"is {value.get('task_type')!r}; set it to CAUSAL_LM")
    for name, setting in value.items():
        if name not in _IGNORED and not (_is_off(setting) or (name == "bias" and setting == "none")):
            raise _refuse(name, f"is {_short(setting)}, which can't be served: {_WHY.get(name, 'this feature is not supported here')}")
    if not any(value.get("init_lora_weights", True) is init or value.get("init_lora_weights") == init for init in _NEUTRAL_INITS):
        raise _refuse(
            "init_lora_weights",
            f"is {_short(value['init_lora_weights'])}, which alters the base; convert the adapter to plain LoRA with PEFT's "
            "`path_initial_model_for_weight_conversion`",
        )
    use_rslora = value.get("use_rslora") or False
    if not isinstance(use_rslora, bool):
        raise _refuse("use_rslora", "must be true or false")
    return PeftConfig(
        r=_rank(value.get("r"), "r"),
        lora_alpha=_alpha(value.get("lora_alpha"), "lora_alpha"),
        target_modules=_targets(value.get("target_modules")),
        use_rslora=use_rslora,
        rank_pattern={key: _rank(rank, "rank_pattern") for key, rank in _pattern(value, "rank_pattern").items()},
        alpha_pattern={key: _alpha(alpha, "alpha_pattern") for key, alpha in _pattern(value, "alpha_pattern").items()},
    )


def _load(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_CONFIG_BYTES:
        raise InvalidInput(
            f"adapter_config.json is larger than {MAX_CONFIG_BYTES} bytes.", param="adapter_config.json", code="invalid_adapter"
        )
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        lfs = " It is a Git LFS pointer; fetch the file itself." if data.startswith(b"version https://git-lfs") else ""
        raise InvalidInput(f"adapter_config.json is not JSON.{lfs}", param="adapter_config.json", code="invalid_adapter") from error
    if not isinstance(value, dict):
        raise InvalidInput("adapter_config.json must hold a JSON object.", param="adapter_config.json", code="invalid_adapter")
    return cast("dict[str, Any]", value)


def _targets(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple, set, frozenset)) or not value:
        raise _refuse("target_modules", f"is {_short(value)}; list the modules by name, at least one")
    names: list[Any] = list(cast("Any", value))
    unknown = sorted({str(name) for name in names if name not in TARGETS and not _is_layer(name)})
    if unknown:
        raise _refuse("target_modules", f"names {', '.join(unknown)}, which can't be served; known are {', '.join(sorted(TARGETS))}")
    return tuple(sorted(name for name in set(names) if name in TARGETS or _kind(name) not in names))


def _kind(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def _is_layer(name: Any) -> bool:
    match = _LAYER_TARGET.fullmatch(name) if isinstance(name, str) else None
    return match is not None and _PARENT.get(match[3]) == match[2]


def _pattern(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    pattern = value.get(name) or {}
    if not isinstance(pattern, dict):
        raise _refuse(name, "must be an object")
    entries = cast("dict[str, Any]", pattern)
    for key in entries:
        if _PATTERN_KEY.fullmatch(key) is None:
            raise _refuse(name, f"has the key {key!r}; write module names or dotted paths, no regular expressions")
    return dict(sorted(entries.items()))


def _match(pattern: Mapping[str, Any], module: str) -> str | None:
    """The key that PEFT would apply (a whole path or a dotted suffix); where several fit, their order would decide, so they must agree."""
    keys = [key for key in pattern if module == key or module.endswith("." + key)]
    if len({pattern[key] for key in keys}) > 1:
        raise _refuse("rank_pattern", f"or alpha_pattern gives {module} several values by {', '.join(sorted(keys))}; leave one")
    return keys[0] if keys else None


def _rank(value: Any, name: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _refuse(name, f"is {_short(value)}; give a whole number from 1 to {MAX_RANK}")
    return value


def _alpha(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise _refuse(name, f"is {_short(value)}; give a number above 0 (at 0 the adapter does nothing)")
    return float(value)


def _is_off(setting: Any) -> bool:
    return setting is None or setting is False or setting in ([], {}, "")


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse(name: str, reason: str) -> InvalidInput:
    return InvalidInput(f"adapter_config.json: {name} {reason}.", param=f"adapter_config.json.{name}", code="invalid_adapter")
