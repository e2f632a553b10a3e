"""How much arithmetic training and sampling need, counted from the model's shape: what no implementation can do without.

A multiplication and an addition are 2 operations. Only matrix products are counted: norms, activations, softmax and the optimizer are
left out, so a fraction of the matrix rate can't reach 1. A product counts once however it is computed; what an engine recomputes is its
own loss.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Matrix:
    """One weight matrix of a layer, or the vocabulary's."""

    name: str
    inputs: int
    outputs: int
    count: int
    """Of this shape in the whole model."""

    @property
    def size(self) -> int:
        """Weights of one."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class ModelShape:
    """A Llama-like decoder."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def read(cls, folder: Path) -> "ModelShape":
        """From a model folder's config.json."""
        c = json.loads((folder / "config.json").read_text())
        heads = c["num_attention_heads"]
        head_dim = c.get("head_dim") or c["hidden_size"] // heads
        return cls(
            c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"], heads, c.get("num_key_value_heads") or heads, head_dim,
            c["vocab_size"],
        )  # fmt: skip

    @property
    def linear(self) -> tuple[Matrix, ...]:
        """The seven matrices of a layer."""
        h, m, n = self.hidden, self.intermediate, self.num_layers
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (
            Matrix("q_proj", h, q, n), Matrix("k_proj", h, kv, n), Matrix("v_proj", h, kv, n), Matrix("o_proj", q, h, n),
            Matrix("gate_proj", h, m, n), Matrix("up_proj", h, m, n), Matrix("down_proj", m, h, n),
        )  # fmt: skip

    @property
    def head(self) -> Matrix:
        """The vocabulary's matrix."""
        return Matrix("lm_head", self.hidden, self.vocab, 1)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All of them."""
        return (*self.linear, self.head)

    @property
    def num_weights(self) -> int:
        """Weights that are multiplied with: every linear layer's and the vocabulary's."""
        return sum(matrix.size * matrix.count for matrix in self.matrices)


@dataclass(frozen=True)
class GroupLengths:
    """One prompt and its completions, in tokens."""

    prompt: int
    completions: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Tokens that have to go through the layers: the prompt once, and of each completion all but the last, which predicts nothing."""
        return self.prompt + sum(length - 1 for length in self.completions)

    @property
    def targets(self) -> int:
        """Tokens that have a logprob."""
        return sum(self.completions)

    @property
    def pairs(self) -> int:
        """(query, key) pairs that causal attention looks at: the prompt's own, and each completion's with the prompt and itself."""
        own = sum((length - 1) * length // 2 + (length - 1) * self.prompt for length in self.completions)
        return self.prompt * (self.prompt + 1) // 2 + own


@dataclass(frozen=True)
class TrainWork:
    """Operations of one training step, by part."""

    forward: float
    backward: float
    reference: float
    """The pass without adapter that the KL term takes; 0 where beta is 0."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.forward + self.backward + self.reference


def train_work(shape: ModelShape, groups: Sequence[GroupLengths], *, rank: int, with_reference: bool) -> TrainWork:
    """Needed operations of forward, backward and reference pass over groups, LoRA of one rank on every linear layer.

    Backward is the gradient of activations (as much as the forward, no gradient of base weights) and of the factors; nothing flows below
    the lowest layer's inputs. In the last layer only rows that predict something need more than keys and values.
    """
    rows, targets = sum(g.rows for g in groups), sum(g.targets for g in groups)
    predicting = sum(1 + g.rows - g.prompt for g in groups)
    attention = 4.0 * shape.num_heads * shape.head_dim * sum(g.pairs for g in groups) * shape.num_layers
    base = lora = base_backward = 0.0
    for matrix in shape.linear:
        last = rows if matrix.name in ("k_proj", "v_proj") else predicting
        times = rows * (matrix.count - 1) + last
        base += 2.0 * matrix.size * times
        lora += 2.0 * rank * (matrix.inputs + matrix.outputs) * times
        lowest = rows if matrix.name in ("q_proj", "k_proj", "v_proj") else 0
        base_backward += 2.0 * matrix.size * (times - lowest)
    head = 2.0 * shape.head.size * targets
    reference = base + attention + head if with_reference else 0.0
    # Attention's backward is four products where its forward is two; the factors' is two where theirs is one.
    return TrainWork(base + lora + attention + head, base_backward + 2 * lora + 2 * attention + head, reference)


@dataclass(frozen=True)
class DecodeWork:
    """What sampling needs, prompts and decoding together."""

    operations: float
    bytes_read: float
    """Weights once a decode step, and each live sequence's keys and values; a group's prompt once a step for all of it."""


def decode_work(
    shape: ModelShape, groups: Sequence[GroupLengths], *, rank: int, bytes_per_weight: int, num_adapters: int = 1
) -> DecodeWork:
    """Needed work of sampling groups that are decoded all at once.

    Args:
        rank: of each adapter; 0 for the bare base.
        bytes_per_weight: 4 in float32, 2 in bfloat16; keys and values have the same.
        num_adapters: whose factors are read, in float32.
    """
    lora = sum(rank * (matrix.inputs + matrix.outputs) * matrix.count for matrix in shape.linear)
    layers = shape.num_weights - shape.head.size
    rows, targets = sum(g.rows for g in groups), sum(g.targets for g in groups)
    pairs = sum(g.pairs for g in groups)
    attention = 4.0 * shape.num_heads * shape.head_dim * pairs * shape.num_layers
    operations = 2.0 * (layers + lora) * rows + 2.0 * shape.head.size * targets + attention
    steps = max(length for g in groups for length in g.completions)
    a_token = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers * bytes_per_weight
    own = sum(length * (length - 1) // 2 for g in groups for length in g.completions)
    prompts = sum(g.prompt * (max(g.completions) - 1) for g in groups)
    weights = steps * (shape.num_weights * bytes_per_weight + num_adapters * lora * 4)
    return DecodeWork(operations, weights + a_token * (own + prompts))
