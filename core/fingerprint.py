"""One digest for a LoRA adapter, the same from the trainer's file and from what an inference engine holds.

An engine changes the layout: it merges the scaling into B, packs q/k/v and gate/up, pads the rank to its slots' rank, and casts to its
own dtype. The fingerprint is taken of a form that all of these lead to: per module, by the module's name in the base model, A and
B times scaling in the engine's dtype, without rank components that are zero in both, and without modules that are zero altogether.

float32: exact, any change of one bit of one weight shows. bfloat16 and float16: the trainer's weights are rounded just as the engine
rounds them (cast first, then scaling times B in float32, rounded to nearest even), so equality still holds exactly; changes below that
rounding don't show, because the engine does not hold them.

R rank, I inputs, O outputs of a module.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load

EngineDtype = Literal["float32", "bfloat16", "float16"]
Matrix = npt.NDArray[np.float32]

_PREFIX = "base_model.model."
_SUFFIX_A = ".lora_A.weight"
_SUFFIX_B = ".lora_B.weight"


def adapter_fingerprint(modules: Iterable[tuple[str, Matrix, Matrix]], dtype: EngineDtype) -> str:
    """Digest of an adapter as an engine holds it.

    Args:
        modules: (module name such as `model.layers.0.self_attn.q_proj`, A as (R, I), scaling * B as (O, R)) in any order,
            float32 holding the engine's values exactly.
        dtype: what the engine computes in; part of the digest.
    Returns:
        64 hex digits.
    Raises:
        ValueError: A and B of a module don't share R, or a module comes twice.
    """
    digest = hashlib.sha256(dtype.encode())
    previous = ""
    for name, a, b in sorted(modules, key=lambda module: module[0]):
        if name == previous:
            raise ValueError(f"{name} comes twice.")
        previous = name
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise ValueError(f"{name}: A {a.shape} and B {b.shape} don't share the rank.")
        used = a.any(axis=1) | b.any(axis=0)
        if not used.any():
            continue
        for matrix in (a[used], b[:, used]):
            digest.update(json.dumps([name, *matrix.shape]).encode())
            digest.update(np.ascontiguousarray(matrix, dtype="<f4").tobytes())
    return digest.hexdigest()


def expected_fingerprint(weights: bytes, scaling: float | Mapping[str, float], dtype: EngineDtype = "float32") -> str:
    """The fingerprint that an engine must report once it holds this adapter.

    Args:
        weights: content of a PEFT `adapter_model.safetensors`, float32 or float16, linear modules only.
        scaling: alpha / r (rsLoRA: alpha / sqrt(r)); by module name where modules differ.
        dtype: what the engine computes in.
    Returns:
        64 hex digits.
    Raises:
        ValueError: keys that are not `base_model.model.<module>.lora_{A,B}.weight`, a factor without its other half, values that are not
        finite.
    """
    tensors = load(weights)
    names = {key.removeprefix(_PREFIX).removesuffix(_SUFFIX_A) for key in tensors if key.startswith(_PREFIX) and key.endswith(_SUFFIX_A)}
    known = {f"{_PREFIX}{name}{suffix}" for name in names for suffix in (_SUFFIX_A, _SUFFIX_B)}
    if tensors.keys() != known:
        raise ValueError(f"Not LoRA factors of linear modules, in pairs: {sorted(tensors.keys() ^ known)[:4]}")
    modules: list[tuple[str, Matrix, Matrix]] = []
    for name in names:
        a = _rounded(tensors[f"{_PREFIX}{name}{_SUFFIX_A}"], dtype)
        b = _rounded(tensors[f"{_PREFIX}{name}{_SUFFIX_B}"], dtype)
        factor = scaling if isinstance(scaling, int | float) else scaling[name]
        modules.append((name, a, _rounded(b * np.float32(factor), dtype)))
    return adapter_fingerprint(modules, dtype)


def _rounded(matrix: npt.NDArray[np.generic], dtype: EngineDtype) -> Matrix:
    """Rounds to the nearest value of `dtype`, ties to even, and returns that in float32."""
    values = np.ascontiguousarray(matrix, dtype=np.float32)
    if not np.isfinite(values).all():
        raise ValueError("An adapter's weights must be finite.")
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        # bfloat16 is the upper half of a float32: add half a unit of the last kept bit, one less where that bit is even, and cut.
        bits = values.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)
    return values
