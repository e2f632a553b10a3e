"""One token for every row straight from the last hidden states: head, softmax, draw and logprob, by chunks of the vocabulary.

Dimensions: N rows, H hidden, V vocabulary (padded to whole blocks), B tokens of a block, K blocks, C candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.decoder import for_product

CANDIDATES = 512
"""Top-p looks among so many likeliest tokens before it sorts the whole vocabulary, which is slow and seldom needed."""
CHUNK_TOKENS = 4096
"""Vocabulary per product: its logits are still in the cache when they are exponentiated and summed."""
BLOCK_TOKENS = 256
"""Tokens whose weights are summed together: a draw looks for its block first, then within it."""


@dataclass(frozen=True)
class Row:
    """How one row is sampled."""

    temperature: float
    top_p: float
    seed: int
    position: int
    """Index of the token in its completion."""
    num_top_logprobs: int = 0


@dataclass(frozen=True)
class Draw:
    """A sampled token."""

    token: int
    logprob: float
    """Nats, at the sampling temperature (1 when greedy), before top-p."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their logprobs."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments only (Philox 4x64 in counter mode; Salmon et al. 2011)."""
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position)).random())


class Sampler:
    """Samples rows by the inverse of their cumulative distributions, in the order of token ids.

    Inverse sampling takes one number a token, so that a completion is a function of its seed and its logits, and a rounding difference
    in the logits changes the token only where the number falls on a border.

    Args:
        head_VH: the language-model head.
    """

    def __init__(self, head_VH: Tensor) -> None:
        self._head_VH = head_VH
        self._num_blocks = -(-head_VH.shape[0] // BLOCK_TOKENS)

    def draw(self, hidden_HN: Tensor, rows: Sequence[Row]) -> list[Draw]:
        """One token a row.

        Args:
            hidden_HN: last hidden states, one column a row; a single column serves rows that share it and their temperature.
        """
        temperatures = [row.temperature or 1.0 for row in rows]
        shared = hidden_HN.shape[1] == 1 and len(set(temperatures)) == 1
        if not shared and hidden_HN.shape[1] != len(rows):
            hidden_HN = hidden_HN.expand(-1, len(rows))
        columns_N = torch.zeros(len(rows), dtype=torch.int64) if shared else torch.arange(len(rows))
        columns_N = columns_N.to(hidden_HN.device)
        scores = self._score(for_product(hidden_HN), temperatures[:1] if shared else temperatures)
        uniforms_N = torch.tensor([uniform(row.seed, row.position) for row in rows], dtype=torch.float64, device=hidden_HN.device)
        tokens_N = scores.invert(uniforms_N, columns_N)
        for i, row in enumerate(rows):
            column = int(columns_N[i]) if row.temperature == 0 or row.top_p < 1 else 0
            if row.temperature == 0:
                tokens_N[i] = scores.logits_VN[:, column].argmax()
            elif row.top_p < 1:
                kept_C = _nucleus(scores.logprobs(column), row.top_p)
                cumulative_1C = scores.logprobs(column)[kept_C].double().exp().cumsum(dim=-1)[None]
                tokens_N[i] = kept_C[_first_above(cumulative_1C, uniforms_N[i : i + 1, None] * cumulative_1C[:, -1:])[0]]
        chosen_N = scores.logits_VN[tokens_N, columns_N].double() - scores.log_totals_N[columns_N]
        tokens, chosen, columns = tokens_N.tolist(), chosen_N.tolist(), columns_N.tolist()
        return [
            Draw(tokens[i], chosen[i], _top(scores.logprobs(columns[i]), row.num_top_logprobs) if row.num_top_logprobs else ())
            for i, row in enumerate(rows)
        ]

    def _score(self, hidden_HN: Tensor, temperatures: Sequence[float]) -> "_Scores":
        num_rows, vocab_size = hidden_HN.shape[1], self._head_VH.shape[0]
        device = hidden_HN.device
        tempered = any(t != 1.0 for t in temperatures)
        rates_N = torch.tensor([1 / t for t in temperatures], dtype=torch.float32, device=device)
        logits_VN = torch.empty(self._num_blocks * BLOCK_TOKENS, num_rows, dtype=torch.float32, device=device)
        logits_VN[vocab_size:] = -torch.inf
        sums: list[Tensor] = []
        peaks: list[Tensor] = []
        for start in range(0, vocab_size, CHUNK_TOKENS):
            head_CH = self._head_VH[start : start + CHUNK_TOKENS]
            chunk_CN = logits_VN[start : start + CHUNK_TOKENS]
            if head_CH.dtype == torch.float32:
                torch.mm(head_CH, hidden_HN, out=chunk_CN[: head_CH.shape[0]])
            else:
                chunk_CN[: head_CH.shape[0]] = torch.mm(head_CH, hidden_HN)
            if tempered:
                chunk_CN *= rates_N
            peak_N = chunk_CN.amax(dim=0)
            weights_CN = torch.sub(chunk_CN, peak_N).exp_()
            sums.append(weights_CN.view(-1, BLOCK_TOKENS, num_rows).sum(dim=1))
            peaks.append(peak_N)
        peak_XN = torch.stack(peaks)
        peak_N = peak_XN.amax(dim=0)
        scales_XN = (peak_XN - peak_N).double().exp()
        sums_KN = torch.cat([s.double() * scales_XN[x] for x, s in enumerate(sums)])
        return _Scores(logits_VN, peak_N, sums_KN)


class _Scores:
    """Tempered logits of N columns, and the total weight exp(logit - peak) of each block."""

    def __init__(self, logits_VN: Tensor, peak_N: Tensor, sums_KN: Tensor) -> None:
        self.logits_VN = logits_VN
        self._peak_N = peak_N
        self._cumulative_NK = sums_KN.cumsum(dim=0).t().contiguous()
        self.log_totals_N = peak_N.double() + self._cumulative_NK[:, -1].log()

    def logprobs(self, column: int) -> Tensor:
        """One column's, [V] float32."""
        return self.logits_VN[:, column] - self.log_totals_N[column].float()

    def invert(self, uniforms_N: Tensor, columns_N: Tensor) -> Tensor:
        """First token whose cumulative weight passes the uniform share of the total; never one of weight 0."""
        cumulative_NK = self._cumulative_NK[columns_N]
        targets_N1 = uniforms_N[:, None] * cumulative_NK[:, -1:]
        block_N = _first_above(cumulative_NK, targets_N1)
        before_N1 = torch.where(block_N[:, None] > 0, cumulative_NK.gather(1, (block_N - 1).clamp(min=0)[:, None]), 0.0)
        logits_KBN = self.logits_VN.view(-1, BLOCK_TOKENS, self.logits_VN.shape[1])
        weights_NB = (logits_KBN[block_N, :, columns_N] - self._peak_N[columns_N, None]).double().exp()
        return block_N * BLOCK_TOKENS + _first_above(weights_NB.cumsum(dim=1), targets_N1 - before_N1)


def _first_above(cumulative_NX: Tensor, targets_N1: Tensor) -> Tensor:
    """Index of the first cumulative weight above the target."""
    # Rounding may lift a target to the total itself, which nothing would pass.
    totals_N1 = cumulative_NX[:, -1:]
    below_N1 = torch.minimum(targets_N1, torch.nextafter(totals_N1, torch.zeros_like(totals_N1)))
    return torch.searchsorted(cumulative_NX, below_N1, right=True)[:, 0]


def _nucleus(logprobs_V: Tensor, top_p: float) -> Tensor:
    """Ids, ascending, of the fewest likeliest tokens whose mass reaches top_p (Holtzman et al. 2019, arXiv:1904.09751); at least one."""
    for count in (min(CANDIDATES, logprobs_V.shape[0]), logprobs_V.shape[0]):
        likeliest = logprobs_V.topk(count)
        mass_C = likeliest.values.exp().cumsum(dim=-1)
        needed = int((mass_C < top_p).sum()) + 1
        if needed <= count:
            return likeliest.indices[:needed].sort().values
    return torch.arange(logprobs_V.shape[0], device=logprobs_V.device)


def _top(logprobs_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    best = logprobs_V.topk(min(count, logprobs_V.shape[0]))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
