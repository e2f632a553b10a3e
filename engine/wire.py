"""How verbs travel: msgpack with numpy arrays as an extension type. No pickles, nothing executable."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import msgpack
import numpy as np
from pydantic import BaseModel

CONTENT_TYPE = "application/msgpack"
_ARRAY = 1
_DTYPES = ("int32", "int64", "float32")
T = TypeVar("T")


def pack(value: object) -> bytes:
    """Encodes dataclasses, pydantic models, tuples, dicts, bytes and numpy arrays (int32, int64, float32)."""
    packed = msgpack.packb(value, default=_encode, strict_types=False)
    assert isinstance(packed, bytes)
    return packed


def unpack(data: bytes) -> Any:
    """Decodes to dicts, lists and arrays.

    Raises:
        ValueError: not msgpack, or an array whose bytes don't fit its shape.
    """
    return msgpack.unpackb(data, ext_hook=_decode, strict_map_key=True, max_ext_len=2**31 - 1, max_bin_len=2**31 - 1)


def build(kind: type[T], data: Any) -> T:
    """Makes a (nested) dataclass of the engine's types out of what `unpack` gave.

    Raises:
        ValueError: a field is missing, unknown or of another kind.
    """
    return typing.cast(T, _build(kind, data, kind.__name__))


def _encode(value: object) -> object:
    if isinstance(value, np.ndarray):
        if value.dtype.name not in _DTYPES:
            raise TypeError(f"arrays of {value.dtype} don't travel; use one of {_DTYPES}")
        header = msgpack.packb([value.dtype.name, list(value.shape)])
        assert header is not None
        return msgpack.ExtType(_ARRAY, len(header).to_bytes(2, "little") + header + np.ascontiguousarray(value).tobytes())
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} does not travel")


def _decode(code: int, data: bytes) -> object:
    if code != _ARRAY or len(data) < 2:
        raise ValueError(f"unknown extension type {code}")
    size = int.from_bytes(data[:2], "little")
    dtype, shape = msgpack.unpackb(data[2 : 2 + size])
    if dtype not in _DTYPES:
        raise ValueError(f"arrays of {dtype!r} don't travel")
    return np.frombuffer(data, dtype=dtype, offset=2 + size).reshape(shape)


def _build(kind: Any, data: Any, where: str) -> object:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        return _build(next(a for a in args if a is not type(None)), data, where)
    if origin is tuple:
        if not isinstance(data, (list, tuple)):
            raise ValueError(f"{where} must be a list")
        return tuple(_build(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is typing.Literal:
        if data not in args:
            raise ValueError(f"{where} must be one of {', '.join(map(repr, args))}, not {data!r}")
        return data
    if origin is np.ndarray:
        if not isinstance(data, np.ndarray):
            raise ValueError(f"{where} must be an array")
        return data
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.model_validate(data)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, data, where)
    if isinstance(kind, type) and not isinstance(data, (kind, int) if kind is float else kind):
        raise ValueError(f"{where} must be {kind.__name__}, not {type(data).__name__}")
    return float(data) if kind is float else data


def _build_dataclass(kind: type[Any], data: Any, where: str) -> object:
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be a map")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = set(data) - set(fields)
    if unknown:
        raise ValueError(f"{where} has no field {sorted(unknown)}")
    missing = [
        n for n, f in fields.items()
        if n not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise ValueError(f"{where} lacks {missing}")
    return kind(**{name: _build(hints[name], value, f"{where}.{name}") for name, value in data.items()})
