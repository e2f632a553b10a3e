"""How a packed training batch attends: prompts causally, completions to their prompt and causally to themselves.

Dimensions: N rows of the micro-batch, C rows of a block of completions, P of its prompt, Q query heads, K key-value heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.packing import Span

# Completions of one prompt are answered together up to this many rows: fewer calls, against arithmetic on masked pairs.
BLOCK_ROWS = 128


@dataclass(frozen=True)
class _Block:
    """Rows that attend to their prompt and, under the mask, to each other."""

    rows: int
    mask_CS: Tensor
    """True where row c may see key s of [prompt, block]."""


class PackedAttention:
    """Attention over one micro-batch; masks are built once and shared by all layers.

    Args:
        spans: the micro-batch's rows, as `engine.packing.pack` laid them out.
        block_rows: bound on C; one completion alone may exceed it.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device, *, block_rows: int = BLOCK_ROWS) -> None:
        self._prompts = [(span.prompt_rows, _blocks(span, block_rows, device)) for span in spans]
        self._sizes = [size for prompt_rows, blocks in self._prompts for size in (prompt_rows, *(block.rows for block in blocks))]

    def attend(self, layer: int, query_NQD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float) -> Tensor:
        """Exact attention, [N, Q, D]; see `engine.decoder.Attention`."""
        del layer
        # One split, not slices: the backward of a slice would fill and add a whole [N, heads, D] tensor per piece.
        queries, keys, values = query_NQD.split(self._sizes), key_NKD.split(self._sizes), value_NKD.split(self._sizes)
        outputs: list[Tensor] = []
        piece = 0
        for _, blocks in self._prompts:
            prompt = piece
            outputs.append(_sdpa(queries[piece], keys[piece], values[piece], None, scaling))
            piece += 1
            for block in blocks:
                key_SKD = torch.cat([keys[prompt], keys[piece]])
                value_SKD = torch.cat([values[prompt], values[piece]])
                outputs.append(_sdpa(queries[piece], key_SKD, value_SKD, block.mask_CS, scaling))
                piece += 1
        return torch.cat(outputs)


def _sdpa(query_CQD: Tensor, key_SKD: Tensor, value_SKD: Tensor, mask_CS: Tensor | None, scaling: float) -> Tensor:
    """Causal where no mask is given; [C, Q, D]."""
    out_1QCD = F.scaled_dot_product_attention(
        query_CQD.transpose(0, 1)[None],
        key_SKD.transpose(0, 1)[None],
        value_SKD.transpose(0, 1)[None],
        attn_mask=mask_CS,
        is_causal=mask_CS is None,
        scale=scaling,
        enable_gqa=query_CQD.shape[1] != key_SKD.shape[1],
    )
    return out_1QCD[0].transpose(0, 1)


def _blocks(span: Span, block_rows: int, device: torch.device) -> list[_Block]:
    blocks: list[_Block] = []
    lengths: list[int] = []
    for rows in (*span.completion_rows, 0):
        if lengths and (rows == 0 or sum(lengths) + rows > block_rows):
            blocks.append(_block(span.prompt_rows, lengths, device))
            lengths = []
        if rows:
            lengths.append(rows)
    return blocks


def _block(prompt_rows: int, lengths: Sequence[int], device: torch.device) -> _Block:
    owner_C = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row_C = torch.arange(len(owner_C))
    own_CC = (owner_C[:, None] == owner_C[None, :]) & (row_C[:, None] >= row_C[None, :])
    prompt_CP = torch.ones(len(owner_C), prompt_rows, dtype=torch.bool)
    return _Block(len(owner_C), torch.cat([prompt_CP, own_CC], dim=1).to(device))
