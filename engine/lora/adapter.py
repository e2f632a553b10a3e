"""An adapter: per layer, parts that lie side by side along the rank, or one dense change.

    y += sum over parts of scale * B (A x)

One part is plain LoRA. "start" and "new" are an adapter stacked over another; "anchor" takes the base's principal components out of the
base (PiSSA), which itself stays untouched. Dimensions: N packed tokens, I and O a layer's inputs and outputs, R rank, E experts.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from core.contracts import LoraSettings

T = TypeVar("T")
PartLabel = Literal["start", "new", "anchor"]


@dataclass
class Gate:
    """What share each expert of a mixture has in a row: softmax(x G^T).

    Its mean over the rows of training is kept, for the one adapter that the mixture leaves as.
    """

    weight_EI: Tensor
    """float32, trained with the factors."""
    mean_E: Tensor
    """Running mean over optimizer steps; sums to 1."""
    sum_E: Tensor
    """Over the rows since the last step."""
    num_rows: int = 0

    def shares(self, x_NI: Tensor) -> Tensor:
        """[N, I] -> [N, E], float32."""
        return F.linear(x_NI.float(), self.weight_EI).softmax(-1)

    def observe(self, shares_NE: Tensor) -> None:
        """Counts the rows of a training forward."""
        self.sum_E = self.sum_E + shares_NE.detach().sum(0)
        self.num_rows += len(shares_NE)

    def fold(self, decay: float) -> None:
        """Ends a step: what was counted goes into the running mean."""
        if self.num_rows:
            self.mean_E = decay * self.mean_E + (1 - decay) * self.sum_E / self.num_rows
            self.sum_E, self.num_rows = torch.zeros_like(self.sum_E), 0


@dataclass
class Factors:
    """One part of one layer, float32: the update is scale * B @ A."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    label: PartLabel = "new"
    trainable: bool = True
    active_R: Tensor | None = None
    """Of a rank budget: which components count (bool); the others' columns of B are 0. None: all."""
    gate: Gate | None = None
    """Of a mixture: R is experts times rank, expert by expert."""

    @property
    def kept(self) -> tuple[Tensor, Tensor]:
        """Detached A and B of the components that count, unscaled."""
        a_RI, b_OR = self.a_RI.detach(), self.b_OR.detach()
        return (a_RI, b_OR) if self.active_R is None else (a_RI[self.active_R], b_OR[:, self.active_R])

    def ungated(self) -> "Factors":
        """Without the gate, whose mean goes into B; frozen."""
        if self.gate is None:
            return self
        share_R = self.gate.mean_E.repeat_interleave(len(self.a_RI) // len(self.gate.mean_E))
        return replace(self, b_OR=self.b_OR.detach() * share_R, gate=None, trainable=False)


@dataclass(frozen=True)
class Named:
    """One tensor of an adapter."""

    label: str
    """Unique and stable, such as `layers.0.self_attn.q_proj.new.A`."""
    layer: str
    part: PartLabel
    tensor: Tensor
    trainable: bool


@dataclass
class Adapter:
    """Everything of one adapter, by the layer's name within the base (`layers.0.self_attn.q_proj`).

    `seed`, `step` and `micro_batch` (pieces since the last optimizer step) fix the dropout of the next training forward: nothing else that
    the engine computes has a part in it.
    """

    settings: LoraSettings
    factors: dict[str, tuple[Factors, ...]]
    dense: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Of kind full: the trained change of each layer's weight, [O, I], float32."""
    seed: int = 0
    step: int = 0
    micro_batch: int = 0
    _derived: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any], repr=False)

    def named(self) -> Iterator[Named]:
        """Every tensor, in the order of layer names."""
        for name in sorted(self.factors):
            for part in self.factors[name]:
                for letter, tensor in (("A", part.a_RI), ("B", part.b_OR)):
                    yield Named(f"{name}.{part.label}.{letter}", name, part.label, tensor, part.trainable)
                if part.gate is not None:
                    yield Named(f"{name}.{part.label}.G", name, part.label, part.gate.weight_EI, part.trainable)
        for name in sorted(self.dense):
            yield Named(f"{name}.new.D", name, "new", self.dense[name], True)

    def parameters(self) -> Iterator[Tensor]:
        """The tensors that are trained, in the order of `named`."""
        return (named.tensor for named in self.named() if named.trainable)

    def gates(self) -> Iterator[Gate]:
        """The gates of a mixture, in the order of layer names."""
        return (part.gate for name in sorted(self.factors) for part in self.factors[name] if part.gate is not None)

    def fingerprint(self) -> str:
        """SHA-256 over labels, shapes and float32 bytes of all tensors, hex."""
        digest = sha256()
        for named in self.named():
            data = named.tensor.detach().to("cpu", torch.float32).contiguous()
            digest.update(f"{named.label}{tuple(data.shape)}".encode())
            digest.update(data.numpy().tobytes())
        return digest.hexdigest()

    def cast(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Detached A [R, I] and scale * B [O, R] over all parts, in the base's precision: for sampling, without gradients.

        A mixture's low-rank activations still have to be weighed by `gate` in between.
        """

        def make() -> tuple[Tensor, Tensor]:
            pairs = [(part.kept[0], part.kept[1] * part.scale) for part in self.factors[name]]
            if len(pairs) == 1:
                return pairs[0][0].to(dtype), pairs[0][1].to(dtype)
            return torch.cat([a for a, _ in pairs]).to(dtype), torch.cat([b for _, b in pairs], 1).to(dtype)

        return self.derived((name, dtype), make)

    def gate(self, names: Sequence[str], x_NI: Tensor) -> Tensor | None:
        """What the low-rank activations of these layers' A (`cast`, side by side) are multiplied by, [N, R] in the base's precision.

        None where nothing is gated, which is all but mixtures.
        """
        if self.settings.num_experts == 1:
            return None
        shares: list[Tensor] = []
        for part in (part for name in names for part in self.factors.get(name, ())):
            rank = part.a_RI.shape[0]
            if part.gate is None:
                shares.append(x_NI.new_ones(len(x_NI), rank))
            else:
                shares.append(part.gate.shares(x_NI).to(x_NI.dtype).repeat_interleave(rank // self.settings.num_experts, 1))
        return torch.cat(shares, 1)

    def plain(self) -> "Adapter":
        """Itself, or a mixture as the one adapter that it leaves as: each expert weighs what its gate gave it on average in training.

        Exact where a gate is the same for every row; what it costs elsewhere is measured by `engine.distillation`.
        """
        if self.settings.num_experts == 1:
            return self
        factors = {name: tuple(part.ungated() for part in parts) for name, parts in self.factors.items()}
        return Adapter(self.settings.model_copy(update={"num_experts": 1}), factors)

    def delta(self, name: str, dtype: torch.dtype) -> Tensor:
        """Detached dense change [O, I] of a layer in the base's precision (kind full)."""
        return self.derived((name, dtype, "dense"), lambda: self.dense[name].detach().to(dtype))

    def dropped(self, name: str, x_NI: Tensor, pieces: Sequence[tuple[int, int]]) -> Tensor:
        """The adapter's input of a training forward under inverted dropout.

        Args:
            pieces: (number since the last step, rows) of each piece of x; its mask depends on it, this adapter, step and layer alone.
        """
        share = self.settings.dropout
        if share == 0:
            return x_NI
        masks: list[Tensor] = []
        for number, num_rows in pieces:
            key = sha256(f"dropout/{self.seed}/{self.step}/{number}/{name}".encode()).digest()
            generator = torch.Generator(x_NI.device).manual_seed(int.from_bytes(key[:8], "little") >> 1)
            masks.append(x_NI.new_empty(num_rows, x_NI.shape[1]).bernoulli_(1 - share, generator=generator))
        return x_NI * torch.cat(masks).div_(1 - share)

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, kept under `key` until `changed` is called."""
        if key not in self._derived:
            self._derived[key] = make()
        return cast(T, self._derived[key])

    def changed(self) -> None:
        """Call after tensors were written in place."""
        self._derived.clear()
