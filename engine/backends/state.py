"""A slot as bytes and back, bit for bit: factors, AdamW moments, pending gradients, step, the reference's factors, settings."""

import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from core.contracts import LoraSettings
from core.errors import Conflict, CorruptData
from engine.backends.optimizer import Slot
from engine.lora import Adapter, Factors

FORMAT = 1


def slot_to_bytes(slot: Slot, base_digest: str) -> bytes:
    """safetensors whose metadata holds settings, step and the base's digest."""
    tensors: dict[str, Tensor] = {}
    labels = _labels(slot.adapter)
    moments = slot.moments()
    for number, (label, parameter) in enumerate(zip(labels, slot.parameters, strict=True)):
        tensors[f"factor.{label}"] = parameter
        if moments:
            tensors[f"mean.{label}"], tensors[f"square.{label}"] = moments[number]
        if parameter.grad is not None:
            tensors[f"gradient.{label}"] = parameter.grad
    if slot.reference is not None:
        tensors.update({f"reference.{label}": factor for label, factor in zip(labels, slot.reference.parameters(), strict=True)})
    note = {"format": FORMAT, "step": slot.step, "base_digest": base_digest, "lora": slot.adapter.settings.model_dump(mode="json")}
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
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CorruptData(f"These bytes are not a training state ({error}); resume from another checkpoint.", param="state") from error
    if note["format"] != FORMAT:
        raise Conflict(
            f"The training state has format {note['format']}, this engine reads {FORMAT}; resume with the version that wrote it."
        )
    if note["base_digest"] != base_digest:
        raise Conflict("The training state belongs to another base model; load the base that the job started on.", code="other_base")
    settings = LoraSettings.model_validate(note["lora"])
    adapter = _adapter(tensors, "factor.", settings)
    assert adapter is not None
    slot = Slot(adapter, _adapter(tensors, "reference.", settings))
    labels = _labels(adapter)
    moments = [(tensors[f"mean.{label}"], tensors[f"square.{label}"]) for label in labels if f"mean.{label}" in tensors]
    slot.restore(int(note["step"]), moments)
    for label, parameter in zip(labels, slot.parameters, strict=True):
        parameter.grad = tensors.get(f"gradient.{label}")
    return slot


def _labels(adapter: Adapter) -> list[str]:
    """Names in the order of `Adapter.parameters`."""
    return [f"{name}.{letter}" for name in sorted(adapter.factors) for letter in ("A", "B")]


def _adapter(tensors: dict[str, Tensor], prefix: str, settings: LoraSettings) -> Adapter | None:
    names = sorted({key.removeprefix(prefix).rpartition(".")[0] for key in tensors if key.startswith(prefix)})
    if not names:
        return None
    return Adapter(settings, {name: Factors(tensors[f"{prefix}{name}.A"], tensors[f"{prefix}{name}.B"]) for name in names})
