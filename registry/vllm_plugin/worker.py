"""What a vLLM worker really holds for an adapter; mixed into its worker class by --worker-extension-cls."""

from typing import Any, cast

import torch

from core.fingerprint import EngineDtype, Matrix, adapter_fingerprint

_DTYPES: dict[torch.dtype, EngineDtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class AdapterInspector:
    """Methods for `collective_rpc`; each worker of a tensor-parallel group answers for itself. `self` is vLLM's worker."""

    def espalier_adapter_fingerprint(self, lora_int_id: int | str) -> dict[str, str | int | bool]:
        """Digest of an adapter in this worker, see core.fingerprint.

        The adapter is put into a slot if it has none (as the next request for it would do), and the slot's tensors, those that requests are
        computed with, are compared with the adapter's own, sliced for this worker: a slot left from another adapter can't go unseen.

        Args:
            lora_int_id: vLLM's id of the adapter (an int, or its digits: the dev endpoint passes strings).
        Returns:
            `found`; where true also `fingerprint` (64 hex digits), `dtype`, `num_modules` (base-model modules with weights) and
            `slot_matches`.
        """
        manager: Any = cast("Any", self).model_runner.lora_manager._adapter_manager
        adapter_id = int(lora_int_id)
        adapter: Any = manager.get_adapter(adapter_id)
        if adapter is None:
            return {"found": False}
        manager.activate_adapter(adapter_id)
        slot = manager.lora_index_to_id.index(adapter_id)
        dtype = manager.lora_config.lora_dtype
        modules = [part for name, weights in adapter.loras.items() for part in _parts(manager, name, weights)]
        return {
            "found": True,
            "fingerprint": adapter_fingerprint(modules, _DTYPES[dtype]),
            "dtype": _DTYPES[dtype],
            "num_modules": len(modules),
            "slot_matches": all(_slot_matches(module, slot, adapter.get_lora(name)) for name, module in manager.modules.items())
            and adapter.loras.keys() <= manager.modules.keys(),
        }


def _parts(manager: Any, name: str, weights: Any) -> list[tuple[str, Matrix, Matrix]]:
    """Undoes vLLM's packing: (base-model module, A, scaling * B) of one vLLM module."""
    if not isinstance(weights.lora_a, list):
        return [(name, _float32(weights.lora_a), _float32(weights.lora_b * weights.scaling))]
    # vLLM scales each part of a packed module when it packs.
    return [
        (part, _float32(a), _float32(b))
        for part, a, b in zip(manager.packed_modules[name], weights.lora_a, weights.lora_b, strict=True)
        if a is not None
    ]


def _slot_matches(module: Any, slot: int, weights: Any) -> bool:
    """Whether a module's slot holds these weights (None: zeros), zero-padded to the slot's shape, sliced for this worker."""
    a_stacked = module.lora_a_stacked if isinstance(module.lora_a_stacked, tuple) else (module.lora_a_stacked,)
    b_stacked = module.lora_b_stacked if isinstance(module.lora_b_stacked, tuple) else (module.lora_b_stacked,)
    held = [*(stack[slot] for stack in a_stacked), *(stack[slot] for stack in b_stacked)]
    if weights is None:
        return not any(bool(tensor.any()) for tensor in held)
    a, b = weights.lora_a, weights.lora_b
    if module.tp_size > 1:
        a, b = module.slice_lora_a(a), module.slice_lora_b(b)
    owed = [*(a if isinstance(a, list) else [a]), *(b if isinstance(b, list) else [b])]
    return len(held) == len(owed) and all(_equals_padded(tensor, part) for tensor, part in zip(held, owed, strict=True))


def _equals_padded(held: torch.Tensor, owed: torch.Tensor | None) -> bool:
    padded = torch.zeros_like(held)
    if owed is not None:
        padded[..., : owed.shape[0], : owed.shape[1]] = owed
    return torch.equal(held, padded)


def _float32(tensor: torch.Tensor) -> Matrix:
    return tensor.detach().to("cpu", torch.float32).numpy()
