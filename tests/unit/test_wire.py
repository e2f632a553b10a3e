"""What goes over the wire comes back the same, and nothing else gets in."""

import msgpack
import numpy as np
import pytest

from core.contracts import LoraSettings
from engine.types import Completion, LossSettings, SampleRequest, SamplingParams, TrainGroup
from engine.wire import build, pack, unpack


def _group() -> TrainGroup:
    return TrainGroup(
        prompt_tokens=np.arange(5, dtype=np.int32),
        completions=(np.array([7, 8], np.int32), np.array([], np.int32)),
        advantages=np.array([0.5, -0.5], np.float32),
        weights=np.ones(2, np.float32),
        old_logprobs=(np.array([-1.0, -2.0], np.float32), np.array([], np.float32)),
    )


def test_a_train_group_survives_with_dtypes_and_empty_arrays() -> None:
    got = build(TrainGroup, unpack(pack(_group())))
    assert got.prompt_tokens.dtype == np.int32
    assert [c.tolist() for c in got.completions] == [[7, 8], []]
    assert got.old_logprobs is not None
    np.testing.assert_array_equal(got.old_logprobs[0], [-1.0, -2.0])


def test_none_stays_none_and_ints_become_floats_where_floats_are_meant() -> None:
    request = SampleRequest(np.zeros(1, np.int32), (SamplingParams(max_tokens=4, temperature=1, stop=("\n",), seed=2**62),))
    got = build(SampleRequest, unpack(pack(request)))
    assert isinstance(got.params[0].temperature, float)
    assert got.params[0].seed == 2**62
    assert got.params[0].stop == ("\n",)


def test_pydantic_contracts_are_validated_on_arrival() -> None:
    assert build(LoraSettings, unpack(pack(LoraSettings(rank=4)))) == LoraSettings(rank=4)
    with pytest.raises(ValueError, match="rank"):
        build(LoraSettings, {"rank": 0})


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        (LossSettings, {"clip_low": 0.2}, "lacks"),
        (LossSettings, {"clip_low": 0.2, "clip_high": 0.2, "beta": 0, "denominator": 1, "temperature": 1, "x": 1}, "no field"),
        (LossSettings, {"clip_low": "a", "clip_high": 0.2, "beta": 0, "denominator": 1, "temperature": 1}, "clip_low must be float"),
        (Completion, {"tokens": [1], "logprobs": [0.0], "text": "", "finish_reason": "stop"}, "tokens must be an array"),
        (TrainGroup, [], "must be a map"),
    ],
)
def test_malformed_values_are_refused_by_name(kind: type, data: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(kind, data)


def test_no_objects_travel() -> None:
    with pytest.raises(TypeError, match="travel"):
        pack({"a": object()})
    with pytest.raises(TypeError, match="object"):
        pack(np.array([object()], dtype=object))
    with pytest.raises(ValueError, match="unknown extension"):
        unpack(msgpack.packb(msgpack.ExtType(5, b"abc")) or b"")


def test_an_array_whose_bytes_do_not_fit_its_shape_is_refused() -> None:
    header = msgpack.packb(["float32", [1000]]) or b""
    body = msgpack.packb(msgpack.ExtType(1, len(header).to_bytes(2, "little") + header + b"\0" * 8)) or b""
    with pytest.raises(ValueError, match="reshape"):
        unpack(body)
