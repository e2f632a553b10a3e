"""Packs groups without padding: a group's prompt once, then its completions, which attend to it.

Positions restart after the prompt for each completion. Token t of a completion is predicted by the hidden state of its token t - 1, the
first one by the prompt's last; so a completion of T tokens takes T - 1 rows.
Dimensions: N rows of a micro-batch, M completion tokens of it (what gets a logprob).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import InvalidInput
from engine.types import TrainGroup


@dataclass(frozen=True)
class Piece:
    """Completions of one group that share one copy of its prompt in a micro-batch."""

    group: int
    completions: tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one piece: first the prompt's, then each completion's."""

    prompt_rows: int
    completion_rows: tuple[int, ...]


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch."""

    pieces: tuple[Piece, ...]
    spans: tuple[Span, ...]
    tokens_N: Tensor
    positions_N: Tensor
    predictors_M: Tensor
    """Row whose hidden state predicts each completion token."""
    targets_M: Tensor


def pack(groups: Sequence[TrainGroup], pieces: Sequence[Piece], device: torch.device) -> PackedBatch:
    """Lays out one micro-batch."""
    tokens: list[NDArray[np.int32]] = []
    positions: list[NDArray[np.int64]] = []
    predictors: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int32]] = []
    spans: list[Span] = []
    row = 0
    for piece in pieces:
        group = groups[piece.group]
        prompt_rows = len(group.prompt_tokens)
        tokens.append(group.prompt_tokens)
        positions.append(np.arange(prompt_rows))
        row += prompt_rows
        last_of_prompt = row - 1
        for number in piece.completions:
            completion = group.completions[number]
            inputs = len(completion) - 1
            tokens.append(completion[:-1])
            positions.append(np.arange(prompt_rows, prompt_rows + inputs))
            predictors.append(np.concatenate([[last_of_prompt], np.arange(row, row + inputs)]))
            targets.append(completion)
            row += inputs
        spans.append(Span(prompt_rows, tuple(len(group.completions[number]) - 1 for number in piece.completions)))

    def tensor(parts: Sequence[NDArray[np.int32] | NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return PackedBatch(tuple(pieces), tuple(spans), tensor(tokens), tensor(positions), tensor(predictors), tensor(targets))


def check_groups(groups: Sequence[TrainGroup], *, vocab_size: int, max_model_len: int, training: bool) -> None:
    """Refuses what can't be computed.

    Args:
        training: advantages and weights are looked at too; an excluded completion has the advantage NaN and must not get here.
    Raises:
        InvalidInput: an empty prompt, an id outside the vocabulary, a sequence over `max_model_len`, arrays that don't fit together,
            or advantages or weights that are not finite.
    """
    for index, group in enumerate(groups):
        param, count = f"groups[{index}]", len(group.completions)
        if len(group.prompt_tokens) == 0:
            raise InvalidInput("The prompt is empty, so nothing predicts a first token; give it one.", param=f"{param}.prompt_tokens")
        if len(group.advantages) != count or len(group.weights) != count:
            raise InvalidInput(
                f"{count} completions, {len(group.advantages)} advantages and {len(group.weights)} weights; give as many of each.",
                param=param,
            )
        if training and not (np.isfinite(group.advantages).all() and np.isfinite(group.weights).all()):
            raise InvalidInput("Advantages and weights must be finite; leave out completions that have no score.", param=param)
        for tokens in (group.prompt_tokens, *group.completions):
            if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
                raise InvalidInput(f"A token id lies outside the vocabulary of {vocab_size}; use the base's own tokenizer.", param=param)
        longest = len(group.prompt_tokens) + max((len(completion) for completion in group.completions), default=0)
        if longest > max_model_len:
            raise InvalidInput(
                f"Prompt and completion together are {longest} tokens, over the limit of {max_model_len}; shorten one of them.", param=param
            )
        for name in ("old_logprobs", "sampler_logprobs", "token_weights"):
            values = getattr(group, name)
            if values is not None and [len(each) for each in values] != [len(completion) for completion in group.completions]:
                raise InvalidInput(f"Each completion needs as many {name} as tokens.", param=f"{param}.{name}")


def cut(group: TrainGroup, max_rows: int, *, whole: bool = False) -> Iterator[tuple[int, ...]]:
    """Completion numbers that share one copy of the prompt.

    A group stays whole where it fits; a larger one is cut by completions and its prompt is computed once per cut. One completion that is
    alone too long is a piece of its own. Completions without tokens are left out.

    Args:
        whole: never cut.
    """
    numbers: list[int] = []
    used = len(group.prompt_tokens)
    for number, completion in enumerate(group.completions):
        if len(completion) == 0:
            continue
        rows = len(completion) - 1
        if numbers and used + rows > max_rows and not whole:
            yield tuple(numbers)
            numbers, used = [], len(group.prompt_tokens)
        numbers.append(number)
        used += rows
    if numbers:
        yield tuple(numbers)


def rows_of(group: TrainGroup, completions: Sequence[int]) -> int:
    """Rows that a piece takes: the prompt's, and for each completion all but its last token's."""
    return len(group.prompt_tokens) + sum(len(group.completions[number]) - 1 for number in completions)
