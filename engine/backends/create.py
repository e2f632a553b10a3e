"""How an adapter comes into the engine: new, from weights, or new over another one."""

from dataclasses import replace

from core.contracts import LoraSettings
from core.contracts.lora import MAX_RANK
from core.errors import InvalidInput
from engine.backends.optimizer import Slot, frozen_copy
from engine.lora import Adapter, new_adapter
from engine.model import BaseModel
from engine.peft_export import exported_rank, read_adapter
from engine.types import StackedOn


def new_slot(model: BaseModel, lora: LoraSettings, *, seed: int, weights: bytes | None, under: StackedOn | None) -> Slot:
    """The slot of `Trainer.create_adapter`: its reference is the policy at this moment, the bare base for a new adapter.

    Raises:
        InvalidInput: weights that don't fit; a shape that can't start from weights, or can't leave as one adapter within the rank limit.
    """
    device = model.device.torch
    if weights is not None:
        if under is not None:
            raise InvalidInput("Continue from weights or stack over an adapter, not both.", param="under")
        _check_continued(lora)
        adapter = read_adapter(weights, lora, model.layers, device)
        adapter.seed = seed
        slot = Slot(adapter, frozen_copy(adapter))
    else:
        adapter = new_adapter(lora, model.layers, seed=seed, device=device, base_weight=model.weight)
        slot = (
            Slot(adapter, None)
            if under is None
            else _stacked(adapter, read_adapter(under.weights, under.lora, model.layers, device), under)
        )
    if exported_rank(adapter) > MAX_RANK:
        raise InvalidInput(
            f"The adapter would leave with rank {exported_rank(adapter)}, over the limit of {MAX_RANK}; ask for a lower rank.",
            param="lora.rank",
        )
    return slot


def _stacked(new: Adapter, start: Adapter, under: StackedOn) -> Slot:
    if new.dense:
        raise InvalidInput("kind full is not stacked over an adapter; merge that adapter, or stack a LoRA.", param="lora.kind")
    for name, parts in start.factors.items():
        below = tuple(replace(part, label="start", trainable=under.trainable) for part in parts)
        new.factors[name] = (*below, *new.factors.get(name, ()))
        start.factors[name] = below
    return Slot(new, frozen_copy(start))


def _check_continued(lora: LoraSettings) -> None:
    """What can't begin as a plain adapter without changing the policy at once."""
    for field, special in (
        ("kind", lora.kind == "full"),
        ("num_experts", lora.num_experts > 1),
        ("rank_budget", lora.rank_budget is not None),
    ):
        if special:
            raise InvalidInput(f"lora.{field} does not go with continuing an adapter; start new, or stack over it.", param=f"lora.{field}")
