"""LoRA on CPU that leaves base requests alone: a stand-in for vLLM's PunicaWrapperCPU.

What is wrong in stock (vLLM 0.32, lora/ops/torch_ops/lora_ops.py): a token without an adapter carries slot index -1, and the ops gather
weights by `stacked[indices]`, where -1 means the LAST slot. As soon as every slot is taken, base requests that share a batch with LoRA
requests get whatever adapter sits in the last slot: one tenant's adapter answers for another's base request. (Batches of base requests
alone are safe: stock returns early.) The gather also copies A and B once per token, which makes LoRA several times slower than the base.

Why this is right: tokens are grouped by slot once per step, index -1 belongs to no group, and each group is one matrix product with its
own slot's A and B. A token's result depends on its own slot only, and rows outside all groups are never written.

Eager mode only (grouping depends on the data): serve.sh passes --enforce-eager.

N tokens of the step, R rank of the slots, I inputs, O outputs.
"""

# vLLM is installed in its own environment only, where the type checker does not look.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from typing import Any

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

# (slot, its token rows; None for every row of the step)
Groups = list[tuple[int, torch.Tensor | None]]


def group_by_slot(slots_N: torch.Tensor) -> Groups:
    """Groups token rows by adapter slot; -1 (no adapter) is in no group.

    Args:
        slots_N: slot index of each token, int64, -1 for none.
    Returns:
        One entry per slot that occurs, in ascending order.
    """
    slots = [int(slot) for slot in torch.unique(slots_N).tolist()]
    if len(slots) == 1 and slots[0] >= 0:
        return [(slots[0], None)]
    return [(slot, (slots_N == slot).nonzero().squeeze(1)) for slot in slots if slot >= 0]


class GroupedPunicaWrapper(PunicaWrapperCPU):
    """One matrix product per adapter and module; the interface and its meaning are PunicaWrapperBase's.

    The stacked weights are (slots, 1, R, I) for A and (slots, 1, O, R) for B, zero-padded to the slots' rank.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._token_groups: Groups = []
        self._sampler_groups: Groups = []

    def update_metadata(self, mapping: LoRAMapping, *args: Any, **kwargs: Any) -> None:
        """Takes the step's slot per token (and per sampled row, for logits) and groups them once for all modules."""
        super().update_metadata(mapping, *args, **kwargs)
        self._token_groups = group_by_slot(self.token_lora_indices)
        self._sampler_groups = group_by_slot(self.sampler_indices)

    def add_shrink(self, y: Any, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...], scale: float, **kwargs: Any) -> None:
        """y[i] = scale * x A_i^T for rows with an adapter; y[i] is (N, R), zero before."""
        x_NI = x.view(-1, x.shape[-1])
        for y_i, a in zip(y, lora_a_stacked, strict=True):
            y_NR = y_i.view(-1, y_i.shape[-1])
            for slot, rows in self._token_groups:
                a_RI = a[slot, 0]
                product = torch.mm(_rows(x_NI, rows).to(a_RI.dtype), a_RI.t()).mul_(scale)
                _write(y_NR[:, : a_RI.shape[0]], rows, product, add=False)

    def add_expand(
        self,
        y: torch.Tensor,
        x: Any,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """y[:, slice i] += x[i] B_i^T (or =, without `add_inputs`) for rows with an adapter."""
        y_NO = y.view(-1, y.shape[-1])
        offset = offset_start
        for x_i, b, width in zip(x, lora_b_stacked, output_slices, strict=True):
            _expand(y_NO[:, offset : offset + width], x_i, b, self._token_groups, add=add_inputs)
            offset += width

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """y += x B^T for rows with an adapter; x holds the rows of A that the token ids picked."""
        _expand(y.view(-1, y.shape[-1]), x, lora_b_stacked, self._token_groups, add=add_inputs)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """y[:, slice i] += scale * x A_i^T B_i^T for rows with an adapter. `buffer` is unused: nothing is kept between the two products."""
        x_NI = x.view(-1, x.shape[-1])
        y_NO = y.view(-1, y.shape[-1])
        for slot, rows in self._token_groups:
            x_group = _rows(x_NI, rows)
            offset = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                a_RI, b_OR = a[slot, 0], b[slot, 0]
                shrunk = torch.mm(x_group.to(a_RI.dtype), a_RI.t()).mul_(scale)
                _write(y_NO[:, offset : offset + b_OR.shape[0]], rows, torch.mm(shrunk.to(b_OR.dtype), b_OR.t()), add=add_inputs)
                offset += width

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """y += scale * x A^T B^T for sampled rows with an adapter; y may be wider than B (padded vocabulary)."""
        x_NI = x.view(-1, x.shape[-1])
        y_NO = y.view(-1, y.shape[-1])
        for slot, rows in self._sampler_groups:
            a_RI, b_OR = lora_a_stacked[slot, 0], lora_b_stacked[slot, 0]
            shrunk = torch.mm(_rows(x_NI, rows).to(a_RI.dtype), a_RI.t()).mul_(scale)
            width = min(b_OR.shape[0], y_NO.shape[1])
            _write(y_NO[:, :width], rows, torch.mm(shrunk.to(b_OR.dtype), b_OR[:width].t()), add=True)


def _rows(x_NI: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x_NI if rows is None else x_NI.index_select(0, rows)


def _write(y_NO: torch.Tensor, rows: torch.Tensor | None, values: torch.Tensor, *, add: bool) -> None:
    values = values.to(y_NO.dtype)
    if rows is None:
        y_NO.add_(values) if add else y_NO.copy_(values)
    elif add:
        y_NO.index_add_(0, rows, values)
    else:
        y_NO.index_copy_(0, rows, values)


def _expand(y_NO: torch.Tensor, x_NR: torch.Tensor, b_stacked: torch.Tensor, groups: Groups, *, add: bool) -> None:
    for slot, rows in groups:
        b_OR = b_stacked[slot, 0]
        width = min(b_OR.shape[0], y_NO.shape[1])
        _write(y_NO[:, :width], rows, torch.mm(_rows(x_NR, rows).to(b_OR.dtype), b_OR[:width].t()), add=add)


def _punica_wrapper_name() -> str:
    return f"{GroupedPunicaWrapper.__module__}.{GroupedPunicaWrapper.__qualname__}"


def register() -> None:
    """Makes vLLM build GroupedPunicaWrapper, on the CPU platform only; others have kernels of their own that skip index -1."""
    if current_platform.is_cpu():
        # The platform's own hook for this choice; vLLM has no registry for it.
        type(current_platform).get_punica_wrapper = staticmethod(_punica_wrapper_name)  # pyright: ignore[reportAttributeAccessIssue]
