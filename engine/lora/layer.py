"""The frozen linear layer that routes each row to its own adapter.

Dimensions: N packed tokens, I and O the layer's inputs and outputs, R rank, E experts.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.lora.adapter import Adapter


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of the packed batch belong to this adapter; None is the bare base."""

    start: int
    stop: int
    adapter: Adapter | None
    pieces: tuple[tuple[int, int], ...] = ()
    """In training: (number since the adapter's last step, rows) of each piece, which dropout masks depend on."""


class Router:
    """Which rows of the batch that is being computed belong to which adapter. Shared by all layers of one base; one thread computes."""

    def __init__(self) -> None:
        self.segments: Sequence[Segment] = ()

    @contextmanager
    def routed(self, segments: Sequence[Segment]) -> Generator[None]:
        """Sets the segments for the forward inside; restores what was there before, also after an exception."""
        before = self.segments
        self.segments = segments
        try:
            yield
        finally:
            self.segments = before


class LoraLinear(nn.Module):
    """A frozen linear layer plus each row's own update, with gradients (without them `engine.decoder` computes).

    A row without an adapter gets exactly the base's output, bit for bit.
    """

    def __init__(self, base: nn.Linear, name: str, router: Router) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self._router = router

    def forward(self, x_1NI: Tensor) -> Tensor:
        """[1, N, I] -> [1, N, O]."""
        y_1NO = self.base(x_1NI)
        live = [
            (segment, segment.adapter)
            for segment in self._router.segments
            if segment.adapter is not None and segment.stop > segment.start
            if self.name in segment.adapter.factors or self.name in segment.adapter.dense
        ]
        if not live:
            return y_1NO
        return self._updates(x_1NI[0], y_1NO[0], live)[None]

    def _updates(self, x_NI: Tensor, y_NO: Tensor, live: Sequence[tuple[Segment, Adapter]]) -> Tensor:
        pieces: list[Tensor] = []
        done = 0
        for segment, adapter in live:
            if segment.start > done:
                pieces.append(y_NO[done : segment.start])
            rows = slice(segment.start, segment.stop)
            pieces.append(self._updated(adapter, segment.pieces, x_NI[rows], y_NO[rows]))
            done = segment.stop
        if done < y_NO.shape[0]:
            pieces.append(y_NO[done:])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _updated(self, adapter: Adapter, pieces: Sequence[tuple[int, int]], x_NI: Tensor, y_NO: Tensor) -> Tensor:
        if self.name in adapter.dense:
            return torch.addmm(y_NO, x_NI, adapter.dense[self.name].to(x_NI.dtype).t())
        dropped_NI: Tensor | None = None
        for part in adapter.factors[self.name]:
            input_NI = x_NI
            if part.trainable:
                # What is frozen acts as a part of the base, which has no dropout.
                dropped_NI = adapter.dropped(self.name, x_NI, pieces) if dropped_NI is None else dropped_NI
                input_NI = dropped_NI
            low_NR = F.linear(input_NI, part.a_RI.to(x_NI.dtype))
            if part.gate is not None:
                shares_NE = part.gate.shares(x_NI)
                part.gate.observe(shares_NE)
                num_experts = shares_NE.shape[1]
                low_NR = (low_NR.unflatten(1, (num_experts, -1)) * shares_NE[:, :, None].to(low_NR.dtype)).flatten(1)
            y_NO = torch.addmm(y_NO, low_NR, part.b_OR.to(x_NI.dtype).t(), alpha=part.scale)
        return y_NO
