"""A slot as bytes and back, bit for bit: the adapter's tensors, AdamW's moments, pending gradients, counters, the reference, settings."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from core.contracts import LoraSettings
from core.errors import Conflict, CorruptData
from engine.backends.optimizer import Slot
from engine.lora import Adapter, Factors, Gate

FORMAT = 2


def slot_to_bytes(slot: Slot, base_digest: str) -> bytes:
    """safetensors whose metadata holds settings, counters and the base's digest."""
    tensors = {f"factor.{named.label}": named.tensor for named in slot.adapter.named()}
    tensors |= {f"gradient.{named.label}": named.tensor.grad for named in slot.trained if named.tensor.grad is not None}
    moments = slot.moments()
    for label, (mean, square, _) in moments.items():
        tensors[f"mean.{label}"], tensors[f"square.{label}"] = mean, square
    for name, parts in slot.adapter.factors.items():
        for part in parts:
            if part.active_R is not None:
                tensors[f"active.{name}"] = part.active_R
            if part.gate is not None:
                tensors[f"gate_mean.{name}"], tensors[f"gate_sum.{name}"] = part.gate.mean_E, part.gate.sum_E
    if slot.ranks is not None:
        tensors |= {f"importance.{name}": value for name, value in slot.ranks.importance.items()}
    note: dict[str, Any] = {
        "format": FORMAT,
        "base_digest": base_digest,
        "step": slot.step,
        "seed": slot.adapter.seed,
        "micro_batch": slot.adapter.micro_batch,
        "gate_rows": [gate.num_rows for gate in slot.adapter.gates()],
        "adam_steps": {label: steps for label, (_, _, steps) in moments.items() if steps != slot.step},
        "adapter": _described(slot.adapter),
    }
    if slot.reference is not None:
        note["reference"] = _described(slot.reference)
        held = {id(tensor) for tensor in tensors.values()}
        # A frozen adapter underneath is its own reference, and is written once.
        tensors |= {f"reference.{n.label}": n.tensor for n in slot.reference.named() if id(n.tensor) not in held}
    plain = {key: tensor.detach().to("cpu").contiguous() for key, tensor in sorted(tensors.items())}
    return save(plain, metadata={"espalier": json.dumps(note, sort_keys=True)})


def slot_from_bytes(state: bytes, base_digest: str, device: torch.device) -> Slot:
    """The slot that `slot_to_bytes` was given.

    Raises:
        CorruptData: the bytes are not such a state.
        Conflict: it belongs to another base model, or to another version of this format.
    """
    try:
        header = json.loads(state[8 : 8 + int.from_bytes(state[:8], "little")])
        note: dict[str, Any] = json.loads(header["__metadata__"]["espalier"])
        tensors = {key: tensor.to(device) for key, tensor in load(state).items()}
        if note["format"] != FORMAT:
            raise Conflict(
                f"The training state has format {note['format']}, this engine reads {FORMAT}; resume with the version that wrote it."
            )
        if note["base_digest"] != base_digest:
            raise Conflict("The training state belongs to another base model; load the base that the job started on.", code="other_base")
        return _slot(note, tensors)
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CorruptData(f"These bytes are not a training state ({error}); resume from another checkpoint.", param="state") from error


def _slot(note: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Slot:
    adapter = _adapter(note["adapter"], {key.removeprefix("factor."): t for key, t in tensors.items() if key.startswith("factor.")})
    adapter.seed, adapter.step, adapter.micro_batch = note["seed"], note["step"], note["micro_batch"]
    for name, parts in adapter.factors.items():
        for part in parts:
            if part.label == "new":
                part.active_R = tensors.get(f"active.{name}")
            if part.gate is not None:
                part.gate.mean_E, part.gate.sum_E = tensors[f"gate_mean.{name}"], tensors[f"gate_sum.{name}"]
    for gate, num_rows in zip(adapter.gates(), note["gate_rows"], strict=True):
        gate.num_rows = num_rows
    reference: Adapter | None = None
    if "reference" in note:
        own = {key.removeprefix("reference."): tensor for key, tensor in tensors.items() if key.startswith("reference.")}
        held = {named.label: named.tensor for named in adapter.named()}
        reference = _adapter(note["reference"], held | own)
    importance = {key.removeprefix("importance."): tensor for key, tensor in tensors.items() if key.startswith("importance.")}
    slot = Slot(adapter, reference, importance or None)
    slot.restore(
        {
            named.label: (tensors[f"mean.{named.label}"], tensors[f"square.{named.label}"], note["adam_steps"].get(named.label, slot.step))
            for named in slot.trained
            if f"mean.{named.label}" in tensors
        }
    )
    for named in slot.trained:
        named.tensor.grad = tensors.get(f"gradient.{named.label}")
    return slot


def _described(adapter: Adapter) -> dict[str, Any]:
    parts = [[name, part.label, part.scale, part.trainable] for name in sorted(adapter.factors) for part in adapter.factors[name]]
    return {"lora": adapter.settings.model_dump(mode="json"), "parts": parts, "dense": sorted(adapter.dense)}


def _adapter(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Adapter:
    """The adapter whose tensors are given by the labels of `Adapter.named`."""
    adapter = Adapter(LoraSettings.model_validate(description["lora"]), {})
    for name, label, scale, trainable in description["parts"]:
        gate: Gate | None = None
        if f"{name}.{label}.G" in tensors:
            weight_EI = tensors[f"{name}.{label}.G"]
            gate = Gate(weight_EI, weight_EI.new_zeros(len(weight_EI)), weight_EI.new_zeros(len(weight_EI)))
        part = Factors(tensors[f"{name}.{label}.A"], tensors[f"{name}.{label}.B"], scale, label, trainable, gate=gate)
        adapter.factors[name] = (*adapter.factors.get(name, ()), part)
    adapter.dense.update({name: tensors[f"{name}.new.D"] for name in description["dense"]})
    return adapter
