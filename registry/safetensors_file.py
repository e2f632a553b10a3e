"""safetensors, read with numpy and checked byte for byte: a header of JSON, then the tensors, without holes (format of safetensors 0.8)."""

import json
import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from core.errors import InvalidInput

MAX_HEADER_BYTES = 16 << 20
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_PARAM = "adapter_model.safetensors"
_OTHER_FORMATS = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes (pickle)"),
    (b"\x80", "a pickle"),
    (b"version https://git-lfs", "a Git LFS pointer; fetch the file itself with `git lfs pull`"),
)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's place in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte from the file's start."""
    end: int


def refuse(message: str) -> InvalidInput:
    """An error about the weights file."""
    return InvalidInput(message, param=_PARAM, code="invalid_adapter")


def read_header(data: bytes) -> dict[str, TensorEntry]:
    """Tensors by name.

    Raises:
        InvalidInput: no safetensors file, damaged, or tensors of a type that is not floating point.
    """
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= header_bytes <= min(MAX_HEADER_BYTES, len(data) - 8):
        # Only here: a header's length may well begin with a pickle's first byte.
        for magic, what in _OTHER_FORMATS:
            if data.startswith(magic):
                raise refuse(f"The weights are {what}. Only safetensors is read: save with `safe_serialization=True`.")
        raise refuse("The weights are no safetensors file, or it is cut short; upload it again.")
    try:
        header: Any = json.loads(data[8 : 8 + header_bytes], object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise refuse("The safetensors header can't be read; upload the file again.") from error
    if not isinstance(header, dict):
        raise refuse("The safetensors header is no JSON object; upload the file again.")
    entries = cast("dict[str, Any]", header)
    entries.pop("__metadata__", None)
    base = 8 + header_bytes
    tensors = {name: _entry(name, value, base) for name, value in entries.items()}
    position = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != position:
            raise refuse(f"The safetensors file has a hole or an overlap before tensor {name!r}; save the adapter again.")
        position = tensor.end
    if position != len(data):
        raise refuse("The safetensors file is shorter or longer than its header says; upload it again.")
    return tensors


def as_float(data: bytes, tensor: TensorEntry) -> NDArray[np.floating[Any]]:
    """The tensor's values, flat; bfloat16 widened to float32, others as they are (a view)."""
    buffer = memoryview(data)[tensor.start : tensor.end]
    if tensor.dtype == "BF16":
        return (np.frombuffer(buffer, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(buffer, dtype={"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.dtype])


def _entry(name: str, value: Any, base: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise refuse(f"The safetensors header's entry for {name!r} can't be read; upload the file again.") from error
    if dtype not in ITEM_BYTES:
        raise refuse(f"Tensor {name!r} is of type {dtype!r}; LoRA factors are floating point: {', '.join(ITEM_BYTES)}.")
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise refuse(f"Tensor {name!r} has a shape or place that is no whole number; upload the file again.")
    if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise refuse(f"Tensor {name!r} of shape {list(shape)} does not fill its place in the file; upload it again.")
    return TensorEntry(dtype, shape, base + start, base + end)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name occurs twice")
    return names
