"""Training ops under way: what is left of each, what it gave so far, and which pieces of which ops make the next micro-batch.

Dimensions: M completion tokens of one op in one micro-batch.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.backends.optimizer import Slot
from engine.lora import Adapter
from engine.packing import Piece, cut, rows_of
from engine.types import FloatArray, ForwardBackwardResult, LossSettings, TrainGroup

Logprobs = tuple[tuple[FloatArray, ...], ...]


@dataclass(eq=False)
class PendingOp:
    """One forward or forward_backward.

    Args:
        owner: whose share of the micro-batches it takes.
        adapter: whose logprobs are wanted; None is the bare base.
        slot: stays on the device meanwhile, and takes the gradients; None for the bare base.
        loss: None for a forward.
    """

    owner: Hashable
    groups: Sequence[TrainGroup]
    temperature: float
    adapter: Adapter | None
    slot: Slot | None = None
    loss: LossSettings | None = None
    pieces: deque[Piece] = field(default_factory=deque[Piece])
    total_loss: float = 0.0
    num_tokens: int = 0
    _sums: dict[str, float] = field(default_factory=dict[str, float])
    _found: dict[tuple[int, int], FloatArray] = field(default_factory=dict[tuple[int, int], FloatArray])
    _accumulating: ExitStack = field(default_factory=ExitStack)
    _opened: bool = False
    error: BaseException | None = None

    def __post_init__(self) -> None:
        if self.slot is not None:
            self.slot.num_users += 1

    def plan(self, max_rows: int) -> "PendingOp":
        """Cuts the groups into pieces; what shares a prompt and fits stays together, and so do dpo's pairs."""
        pairs = self.loss is not None and self.loss.kind == "dpo"
        for index, group in enumerate(self.groups):
            self.pieces += (Piece(index, numbers) for numbers in cut(group, max_rows, whole=pairs))
        return self

    @property
    def done(self) -> bool:
        """Whether nothing is left to compute: it went through, or failed."""
        return not self.pieces

    def open(self) -> None:
        """Before its first micro-batch: gradients are gathered apart, so that a call that fails leaves them as they were."""
        if self.slot is not None and self.loss is not None and not self._opened:
            self._accumulating.enter_context(self.slot.accumulating())
            self._opened = True

    def finish(self) -> Logprobs | ForwardBackwardResult:
        """Its result; adds its gradients to those that were there."""
        self._accumulating.close()
        self._let_go()
        if self.loss is None:
            return self._logprobs()
        means = {name: total / max(1, self.num_tokens) for name, total in self._sums.items()}
        return ForwardBackwardResult(self.total_loss, self.num_tokens, self._logprobs(), means)

    def abort(self, error: BaseException) -> None:
        """Gives it up: gradients are what they were before it."""
        if self.error is None:
            self._accumulating.__exit__(type(error), error, error.__traceback__)
            self.error = error
            self._let_go()
        self.pieces.clear()

    def add(self, pieces: Sequence[Piece], logprobs_M: Tensor, *, loss: float = 0.0, means: dict[str, float] | None = None) -> None:
        """Takes in what one micro-batch gave."""
        values_M, start = logprobs_M.detach().to("cpu", torch.float32).numpy(), 0
        for group, number in completions_of(pieces):
            stop = start + len(self.groups[group].completions[number])
            self._found[group, number] = values_M[start:stop].copy()
            start = stop
        self.total_loss += loss
        self.num_tokens += start
        for name, mean in (means or {}).items():
            self._sums[name] = self._sums.get(name, 0.0) + mean * start

    def per_token(self, pieces: Sequence[Piece], values: Callable[[TrainGroup, int], FloatArray], device: torch.device) -> Tensor:
        """Packs a completion's values [M] from a function of (group, completion number) that gives one per token."""
        parts = [values(self.groups[group], number) for group, number in completions_of(pieces)]
        return torch.from_numpy(np.concatenate(parts).astype(np.float32, copy=False)).to(device)

    def lengths(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """Tokens of each completion."""
        return tuple(len(self.groups[group].completions[number]) for group, number in completions_of(pieces))

    def _let_go(self) -> None:
        if self.slot is not None:
            self.slot.num_users -= 1

    def _logprobs(self) -> Logprobs:
        empty = np.zeros(0, np.float32)
        return tuple(
            tuple(self._found.get((index, number), empty) for number in range(len(group.completions)))
            for index, group in enumerate(self.groups)
        )


def completions_of(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """(group, completion number) in packed order."""
    return ((piece.group, number) for piece in pieces for number in piece.completions)


Chosen = list[tuple[PendingOp, list[Piece]]]


class FairShare:
    """Fills micro-batches from several ops so that owners get equal rows over time, whatever the sizes of their ops."""

    def __init__(self) -> None:
        self._served: dict[Hashable, int] = {}

    def choose(self, ops: Sequence[PendingOp], max_rows: int, *, mixed: bool) -> Chosen:
        """Takes the next pieces off the ops: at most `max_rows` rows, at least one piece, of one op only where not mixed."""
        self._settle({op.owner for op in ops})
        chosen: dict[int, tuple[PendingOp, list[Piece]]] = {}
        open_ops = [op for op in ops if op.pieces]
        num_rows = 0
        while open_ops:
            op = min(open_ops, key=lambda candidate: self._served[candidate.owner])
            rows = rows_of(op.groups[op.pieces[0].group], op.pieces[0].completions)
            if num_rows and num_rows + rows > max_rows:
                open_ops.remove(op)
                continue
            chosen.setdefault(id(op), (op, []))[1].append(op.pieces.popleft())
            num_rows += rows
            self._served[op.owner] += rows
            open_ops = [other for other in (open_ops if mixed else [op]) if other.pieces]
        return list(chosen.values())

    def _settle(self, owners: set[Hashable]) -> None:
        """Who comes anew begins where the least served one is: absence earns no credit."""
        present = {owner: self._served[owner] for owner in owners if owner in self._served}
        floor = min(present.values(), default=0)
        self._served = {owner: present.get(owner, floor) - floor for owner in owners}
