"""Attention over cached keys and values: a chunk of one prompt, or one token of every live sequence.

Dimensions: N rows, Q query heads, K key-value heads, R = Q / K query heads a key-value head, D head size, S slots, T tokens, P prompt
tokens, M rows with a shared prompt, G rows of one prompt, X = G * R.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.rollouts.kv_cache import WIDTH_STEP, PromptKv, SlotKv

MASKED = -1e30
"""Score of what must not be seen. Finite: a row that sees nothing gives a weight that is dropped later, not NaN."""


class PrefillAttention:
    """Causal attention of one prompt's next chunk over the prompt so far; keeps its keys and values."""

    def __init__(self, prompt: PromptKv) -> None:
        self._prompt = prompt

    def attend(self, layer: int, query_NQD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float) -> Tensor:
        """See engine.decoder.Attention."""
        keys_KPD, values_KPD = self._prompt.append(layer, key_NKD.transpose(0, 1), value_NKD.transpose(0, 1))
        num_rows, num_seen = query_NQD.shape[0], keys_KPD.shape[1]
        mask_NP = None
        if num_seen > num_rows:
            rows_N = torch.arange(num_seen - num_rows, num_seen, device=query_NQD.device)
            mask_NP = torch.arange(num_seen, device=query_NQD.device)[None, :] <= rows_N[:, None]
        out_1QND = F.scaled_dot_product_attention(
            query_NQD.transpose(0, 1)[None], keys_KPD[None], values_KPD[None],
            attn_mask=mask_NP, is_causal=mask_NP is None, scale=scaling, enable_gqa=True,
        )  # fmt: skip
        return out_1QND[0].transpose(0, 1)


class SharedPrompts:
    """Prompts of about one length and the live rows that attend to them, besides their own tokens; one batched matmul answers all.

    Args:
        cache: the prompts' keys and values.
        rows: (prompt's slot, its tokens, its first row, the row after its last); rows of one prompt are neighbours.
    """

    def __init__(self, cache: SlotKv, rows: Sequence[tuple[int, int, int, int]], device: torch.device) -> None:
        self._cache = cache
        self._num_slots = max(slot for slot, *_ in rows) + 1
        widest = max(stop - start for *_, start, stop in rows)
        longest = max(num_tokens for _, num_tokens, *_ in rows)
        self._num_tokens = min(-(-longest // WIDTH_STEP) * WIDTH_STEP, cache.keys.shape[3])
        places_SG = torch.zeros(self._num_slots, widest, dtype=torch.int64)
        lengths_S = torch.zeros(self._num_slots, dtype=torch.int64)
        slots: list[int] = []
        numbers: list[int] = []
        live: list[int] = []
        for slot, num_tokens, start, stop in rows:
            places_SG[slot, : stop - start] = torch.arange(start, stop)
            lengths_S[slot] = num_tokens
            slots += [slot] * (stop - start)
            numbers += range(stop - start)
            live += range(start, stop)
        self._places_SG = places_SG.to(device)
        self._slots_M = torch.tensor(slots, device=device)
        self._numbers_M = torch.tensor(numbers, device=device)
        self.rows_M = torch.tensor(live, device=device)
        hidden_ST = torch.arange(self._num_tokens)[None, :] >= lengths_S[:, None]
        self._hidden_S11T = hidden_ST[:, None, None, :].to(device)

    def attend(self, layer: int, query_NKRD: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [M, K, R, D] (float32) of the rows in `rows_M` over their prompts, and the log-sum-exp of their scores [M, K, R, 1]."""
        num_kv_heads, per_kv, head_dim = query_NKRD.shape[1:]
        num_slots, widest = self._places_SG.shape
        keys = self._cache.keys[layer, :num_slots, :, : self._num_tokens]
        values = self._cache.values[layer, :num_slots, :, : self._num_tokens]
        query_SGKRD = query_NKRD[self._places_SG.flatten()].view(num_slots, widest, num_kv_heads, per_kv, head_dim)
        query_SKXD = query_SGKRD.transpose(1, 2).reshape(num_slots, num_kv_heads, widest * per_kv, head_dim)
        scores_SKXT = torch.matmul(query_SKXD, keys.transpose(-1, -2)).float().masked_fill_(self._hidden_S11T, MASKED)
        out_SKXD, sums_SKX1 = _weigh(scores_SKXT, values)
        out = out_SKXD.view(num_slots, num_kv_heads, widest, per_kv, head_dim)[self._slots_M, :, self._numbers_M]
        sums = sums_SKX1.view(num_slots, num_kv_heads, widest, per_kv, 1)[self._slots_M, :, self._numbers_M]
        return out, sums


class DecodeAttention:
    """One token of every live sequence: own tokens in one batched matmul over the slots, shared prompts in another.

    The two parts are merged by their log-sum-exps, which is the softmax over both exactly.

    Args:
        cache: own tokens; this step's are written into it.
        slots_N: each row's slot.
        lengths_N: own tokens of each row before this step: the index that this step's token takes.
        longest: the greatest of lengths_N.
        shared: which rows share which prompt; rows that none covers hold their prompt in their slot.
    """

    def __init__(self, cache: SlotKv, slots_N: Tensor, lengths_N: Tensor, longest: int, shared: Sequence[SharedPrompts]) -> None:
        self._cache = cache
        self._slots_N = slots_N
        self._lengths_N = lengths_N
        self._shared = shared
        self._num_slots = int(slots_N.max()) + 1
        step = min(-(-(longest + 1) // WIDTH_STEP) * WIDTH_STEP, cache.keys.shape[3])
        self._num_tokens = step
        lengths_S = torch.full((self._num_slots,), -1, dtype=lengths_N.dtype, device=lengths_N.device)
        lengths_S[slots_N] = lengths_N
        hidden_ST = torch.arange(step, device=lengths_N.device)[None, :] > lengths_S[:, None]
        self._hidden_S11T = hidden_ST[:, None, None, :]

    def attend(self, layer: int, query_NQD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float) -> Tensor:
        """See engine.decoder.Attention."""
        num_rows, num_heads, head_dim = query_NQD.shape
        num_kv_heads = key_NKD.shape[1]
        keys_SKTD, values_SKTD = self._cache.keys[layer], self._cache.values[layer]
        keys_SKTD[self._slots_N, :, self._lengths_N] = key_NKD
        values_SKTD[self._slots_N, :, self._lengths_N] = value_NKD
        query_NKRD = (query_NQD * scaling).view(num_rows, num_kv_heads, -1, head_dim)
        out_NKRD, sums_NKR1 = self._own(query_NKRD, keys_SKTD, values_SKTD)
        for prompts in self._shared:
            prompt_MKRD, prompt_sums_MKR1 = prompts.attend(layer, query_NKRD)
            own_share_MKR1 = torch.sigmoid(sums_NKR1[prompts.rows_M] - prompt_sums_MKR1)
            out_NKRD[prompts.rows_M] = torch.lerp(prompt_MKRD, out_NKRD[prompts.rows_M], own_share_MKR1)
        return out_NKRD.to(query_NQD.dtype).reshape(num_rows, num_heads, head_dim)

    def _own(self, query_NKRD: Tensor, keys_SKTD: Tensor, values_SKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (float32) over own tokens and the log-sum-exp of their scores."""
        query_SKRD = query_NKRD.new_zeros((self._num_slots, *query_NKRD.shape[1:]))
        query_SKRD[self._slots_N] = query_NKRD
        keys = keys_SKTD[: self._num_slots, :, : self._num_tokens]
        values = values_SKTD[: self._num_slots, :, : self._num_tokens]
        scores_SKRT = torch.matmul(query_SKRD, keys.transpose(-1, -2)).float().masked_fill_(self._hidden_S11T, MASKED)
        out_SKRD, sums_SKR1 = _weigh(scores_SKRT, values)
        return out_SKRD[self._slots_N], sums_SKR1[self._slots_N]


def _weigh(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of float32 scores (overwritten) over their last dimension, applied to values; and the log-sum-exp of the scores."""
    greatest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(greatest).exp_()
    totals = weights.sum(dim=-1, keepdim=True)
    return torch.matmul(weights.to(values.dtype), values).float().div_(totals), greatest.add_(totals.log())
