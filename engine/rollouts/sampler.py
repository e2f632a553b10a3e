"""One token of every row out of its logits. Dimensions: N rows, V vocabulary, C candidates."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CANDIDATES = 512
"""Top-p looks among so many likeliest tokens before it sorts the whole vocabulary, which is slow and seldom needed."""


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


def draw(logits_NV: Tensor, rows: Sequence[Row]) -> list[Draw]:
    """Samples each row by the inverse of its cumulative distribution, in the order of token ids.

    Inverse sampling takes one number a token, so that a completion is a function of its seed and its logits, and a rounding difference
    in the logits changes the token only where the number falls on a border.

    Args:
        logits_NV: float32; overwritten.
    """
    greedy = [i for i, row in enumerate(rows) if row.temperature == 0]
    temperatures_N = torch.tensor([row.temperature or 1.0 for row in rows], dtype=torch.float32, device=logits_NV.device)
    logits_NV.div_(temperatures_N[:, None])
    logits_NV.sub_(logits_NV.amax(dim=-1, keepdim=True))
    # One exponential and one sum over the vocabulary serve both the draw and the logprob; torch sums float32 in double here.
    cumulative_NV = logits_NV.exp().cumsum_(dim=-1)
    log_totals_N = cumulative_NV[:, -1].log()
    tokens_N = _invert(cumulative_NV, _uniforms(rows, range(len(rows)), logits_NV))
    if greedy:
        index = torch.tensor(greedy, device=logits_NV.device)
        tokens_N[index] = logits_NV[index].argmax(dim=-1)
    for i, row in enumerate(rows):
        if row.temperature > 0 and row.top_p < 1:
            kept_C = _nucleus(logits_NV[i] - log_totals_N[i], row.top_p)
            tokens_N[i] = kept_C[_invert(logits_NV[i, kept_C].exp().cumsum(dim=-1)[None], _uniforms(rows, [i], logits_NV))[0]]
    chosen_N = logits_NV.gather(1, tokens_N[:, None])[:, 0] - log_totals_N
    tokens, chosen, log_totals = tokens_N.tolist(), chosen_N.tolist(), log_totals_N.tolist()
    return [Draw(tokens[i], chosen[i], _top(logits_NV[i], log_totals[i], row.num_top_logprobs)) for i, row in enumerate(rows)]


def _uniforms(rows: Sequence[Row], index: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor([uniform(rows[i].seed, rows[i].position) for i in index], dtype=torch.float32, device=like.device)


def _invert(cumulative_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """First token whose cumulative weight passes the uniform share of the total; never one of weight 0."""
    totals_N1 = cumulative_NV[:, -1:]
    # float32 may round the product up to the total itself, which no token would pass.
    targets_N1 = torch.minimum(uniforms_N[:, None] * totals_N1, torch.nextafter(totals_N1, torch.zeros_like(totals_N1)))
    return torch.searchsorted(cumulative_NV, targets_N1, right=True)[:, 0]


def _nucleus(logprobs_V: Tensor, top_p: float) -> Tensor:
    """Ids, ascending, of the fewest likeliest tokens whose mass reaches top_p (Holtzman et al. 2019, arXiv:1904.09751); at least one."""
    for count in (min(CANDIDATES, logprobs_V.shape[0]), logprobs_V.shape[0]):
        likeliest = logprobs_V.topk(count)
        mass_C = likeliest.values.exp().cumsum(dim=-1)
        needed = int((mass_C < top_p).sum()) + 1
        if needed <= count:
            return likeliest.indices[:needed].sort().values
    return torch.arange(logprobs_V.shape[0], device=logprobs_V.device)


def _top(shifted_V: Tensor, log_total: float, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    best = shifted_V.topk(min(count, shifted_V.shape[0]))
    return tuple((token, value - log_total) for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True))
