"""LoRA over one frozen base for many adapters at once (Hu et al. 2021, arXiv:2106.09685).

Dimensions: N packed tokens, I and O a layer's inputs and outputs, R rank.
"""

import math
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.contracts import LoraSettings

T = TypeVar("T")


@dataclass
class Factors:
    """One layer's factors, float32: the update is scaling * B @ A."""

    a_RI: Tensor
    b_OR: Tensor


@dataclass
class Adapter:
    """All factors of one adapter, by the layer's name within the base (`layers.0.self_attn.q_proj`)."""

    settings: LoraSettings
    factors: dict[str, Factors]
    _derived: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any], repr=False)

    def parameters(self) -> Iterator[Tensor]:
        """A and B of every layer, in the order of layer names."""
        for name in sorted(self.factors):
            yield self.factors[name].a_RI
            yield self.factors[name].b_OR

    def fingerprint(self) -> str:
        """SHA-256 over names, shapes and float32 bytes of all factors, hex."""
        digest = sha256()
        for name in sorted(self.factors):
            for tensor in (self.factors[name].a_RI, self.factors[name].b_OR):
                data = tensor.detach().to("cpu", torch.float32).contiguous()
                digest.update(f"{name}{tuple(data.shape)}".encode())
                digest.update(data.numpy().tobytes())
        return digest.hexdigest()

    def cast(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Detached A and B * scaling in the base's precision: for sampling, without gradients."""

        def make() -> tuple[Tensor, Tensor]:
            pair = self.factors[name]
            return pair.a_RI.detach().to(dtype), (pair.b_OR.detach() * self.settings.scaling_of(name)).to(dtype)

        return self.derived((name, dtype), make)

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, kept under `key` until `changed` is called."""
        if key not in self._derived:
            self._derived[key] = make()
        return cast(T, self._derived[key])

    def changed(self) -> None:
        """Call after the factors were written in place."""
        self._derived.clear()


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of the packed batch belong to this adapter; None is the bare base."""

    start: int
    stop: int
    adapter: Adapter | None


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
    """A frozen linear layer plus each row's own low-rank update.

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
        live = [s for s in self._router.segments if s.adapter is not None and self.name in s.adapter.factors and s.stop > s.start]
        if not live:
            return y_1NO
        if torch.is_grad_enabled():
            return self._with_gradients(x_1NI, y_1NO, live)
        for segment in live:
            assert segment.adapter is not None
            a_RI, b_OR = segment.adapter.cast(self.name, x_1NI.dtype)
            rows = slice(segment.start, segment.stop)
            y_1NO[0, rows].addmm_(x_1NI[0, rows] @ a_RI.t(), b_OR.t())
        return y_1NO

    def _with_gradients(self, x_1NI: Tensor, y_1NO: Tensor, live: Sequence[Segment]) -> Tensor:
        x_NI, y_NO = x_1NI[0], y_1NO[0]
        pieces: list[Tensor] = []
        done = 0
        for segment in live:
            if segment.start > done:
                pieces.append(y_NO[done : segment.start])
            assert segment.adapter is not None
            pair, rows = segment.adapter.factors[self.name], slice(segment.start, segment.stop)
            low_NR = F.linear(x_NI[rows], pair.a_RI.to(x_NI.dtype))
            pieces.append(
                torch.addmm(y_NO[rows], low_NR, pair.b_OR.to(x_NI.dtype).t(), alpha=segment.adapter.settings.scaling_of(self.name))
            )
            done = segment.stop
        if done < y_NO.shape[0]:
            pieces.append(y_NO[done:])
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[None]


def new_adapter(settings: LoraSettings, layers: dict[str, tuple[int, int]], *, seed: int, device: torch.device) -> Adapter:
    """A fresh adapter: A uniform by Kaiming with a = sqrt(5) as in PEFT (bound 1 / sqrt(I)), B zero.

    Args:
        layers: (inputs, outputs) of each layer of the base that can take an adapter, by name.
        seed: fixes A whatever the device: numbers are drawn on the CPU, in the order of layer names.
    """
    generator = torch.Generator().manual_seed(seed)
    factors: dict[str, Factors] = {}
    for name in sorted(layers):
        if name.rsplit(".", 1)[-1] not in settings.target_modules:
            continue
        num_inputs, num_outputs = layers[name]
        a_RI = torch.empty(settings.rank_of(name), num_inputs)
        nn.init.kaiming_uniform_(a_RI, a=math.sqrt(5), generator=generator)
        factors[name] = Factors(a_RI.to(device), torch.zeros(num_outputs, settings.rank_of(name), device=device))
    return Adapter(settings, factors)
