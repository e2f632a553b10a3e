"""The base's forward without gradients: sampling, reference and old-policy passes.

The same layers as transformers' (its weights, its rotary embedding), laid out features first: a product `W @ x` with x as [features, rows]
runs at up to twice the rate of `x @ W.T` on a CPU while rows are few, and layers that read the same input are one product. Exactly the
base's arithmetic otherwise.
Dimensions: N packed rows, H hidden, Q query heads, K key-value heads, D head size, F intermediate, I and O a product's inputs and outputs,
R rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.lora import Adapter, LoraLinear, Segment

FEW_ROWS = 32
"""Up to here a product reads each weight once per few rows, and rows that lie in one piece are read faster; measured at 4 to 128 rows."""


class Attention(Protocol):
    """How one packed batch attends."""

    def attend(self, layer: int, query_NQD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float) -> Tensor:
        """Rotated queries and keys of the packed batch -> outputs [N, Q, D]."""
        ...


@dataclass(frozen=True)
class Fused:
    """Linear layers that read one input, as one product; the layers' own weights are views of its rows."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    weight_OI: Tensor
    bias_O1: Tensor | None

    def __call__(self, x_IN: Tensor, segments: Sequence[Segment]) -> Tensor:
        """[I, N] -> [O, N], each row with its own adapter's update."""
        x_IN = for_product(x_IN)
        y_ON = torch.mm(self.weight_OI, x_IN)
        if self.bias_O1 is not None:
            y_ON += self.bias_O1
        for segment in segments:
            if segment.adapter is not None and segment.stop > segment.start:
                self._update(y_ON, x_IN, segment, segment.adapter)
        return y_ON

    def _update(self, y_ON: Tensor, x_IN: Tensor, segment: Segment, adapter: Adapter) -> None:
        if adapter.dense:
            self._update_dense(y_ON[:, segment.start : segment.stop], x_IN[:, segment.start : segment.stop], adapter)
            return
        a_RI, parts = adapter.derived(("fused", self.names, x_IN.dtype), lambda: self._factors(adapter, x_IN.dtype))
        if a_RI is None:
            return
        low_RN = torch.mm(a_RI, x_IN[:, segment.start : segment.stop])
        gate_NR = adapter.gate(self.names, x_IN[:, segment.start : segment.stop].t())
        if gate_NR is not None:
            low_RN *= gate_NR.t()
        first_rank = 0
        for first, b_OR in parts:
            last_rank = first_rank + b_OR.shape[1]
            y_ON[first : first + b_OR.shape[0], segment.start : segment.stop].addmm_(b_OR, low_RN[first_rank:last_rank])
            first_rank = last_rank

    def _update_dense(self, y_ON: Tensor, x_IN: Tensor, adapter: Adapter) -> None:
        first = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            if name in adapter.dense:
                y_ON[first : first + size].addmm_(adapter.delta(name, x_IN.dtype), x_IN)
            first += size

    def _factors(self, adapter: Adapter, dtype: torch.dtype) -> tuple[Tensor | None, list[tuple[int, Tensor]]]:
        """A of all layers in one, and each layer's first output with its B * scaling."""
        low: list[Tensor] = []
        parts: list[tuple[int, Tensor]] = []
        first = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            if name in adapter.factors:
                a_RI, b_OR = adapter.cast(name, dtype)
                low.append(a_RI)
                parts.append((first, b_OR))
            first += size
        return (torch.cat(low) if low else None), parts


@dataclass(frozen=True)
class _Layer:
    input_norm_H1: Tensor
    mlp_norm_H1: Tensor
    qkv: Fused
    query_norm_D1: Tensor | None
    key_norm_D1: Tensor | None
    out: Fused
    gate_up: Fused
    down: Fused


class Decoder:
    """All layers of a base.

    Args:
        stack: transformers' stack of decoder layers whose linear layers are LoraLinear; their weights become views of fused ones.
    """

    def __init__(self, stack: Any, config: Any, head_dim: int) -> None:
        self._embed: nn.Embedding = stack.embed_tokens
        self._rotary: Callable[..., tuple[Tensor, Tensor]] = stack.rotary_emb
        self._eps = float(config.rms_norm_eps)
        self._num_heads, self._num_kv_heads, self._head_dim = int(config.num_attention_heads), int(config.num_key_value_heads), head_dim
        self._activation: Callable[[Tensor], Tensor] = stack.layers[0].mlp.act_fn
        self._layers = [_layer(layer) for layer in stack.layers]
        self._norm_H1: Tensor = stack.norm.weight[:, None]

    @torch.no_grad()
    def hidden(self, tokens_N: Tensor, positions_N: Tensor, attention: Attention, segments: Sequence[Segment]) -> Tensor:
        """Final hidden states (after the last norm), features first: [H, N]."""
        x_HN = self._embed(tokens_N).t().contiguous()
        cos_1ND, sin_1ND = self._rotary(x_HN, positions_N[None])
        cos_DN, sin_DN = cos_1ND[0].t().contiguous(), sin_1ND[0].t().contiguous()
        scaling, num_rows = self._head_dim**-0.5, len(tokens_N)
        for index, layer in enumerate(self._layers):
            qkv_ON = layer.qkv(self._normed(x_HN, layer.input_norm_H1), segments)
            query_QDN, key_KDN, value_KDN = qkv_ON.view(-1, self._head_dim, num_rows).split(
                (self._num_heads, self._num_kv_heads, self._num_kv_heads)
            )
            if layer.query_norm_D1 is not None and layer.key_norm_D1 is not None:
                query_QDN, key_KDN = self._normed(query_QDN, layer.query_norm_D1), self._normed(key_KDN, layer.key_norm_D1)
            query_NQD = _rows_first(_rotated(query_QDN, cos_DN, sin_DN))
            key_NKD = _rows_first(_rotated(key_KDN, cos_DN, sin_DN))
            out_NQD = attention.attend(index, query_NQD, key_NKD, _rows_first(value_KDN), scaling)
            x_HN = layer.out(out_NQD.reshape(num_rows, -1).t(), segments).add_(x_HN)
            gate_FN, up_FN = layer.gate_up(self._normed(x_HN, layer.mlp_norm_H1), segments).chunk(2)
            x_HN = layer.down(self._activation(gate_FN).mul_(up_FN), segments).add_(x_HN)
        return self._normed(x_HN, self._norm_H1)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the features, the second dimension from the end; the mean in float32."""
        wide = x.float()
        scale = wide.square().mean(dim=-2, keepdim=True).add_(self._eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)


def for_product(x_IN: Tensor) -> Tensor:
    """The same values in the memory order in which `W @ x` is fastest: row by row while rows are few, else feature by feature."""
    return x_IN.t().contiguous().t() if x_IN.shape[1] <= FEW_ROWS else x_IN.contiguous()


def _rows_first(x_KDN: Tensor) -> Tensor:
    """[K, D, N] -> [N, K, D] with a head's numbers side by side, as torch's fused attention wants them."""
    return x_KDN.transpose(1, 2).contiguous().transpose(0, 1)


def _rotated(x_KDN: Tensor, cos_DN: Tensor, sin_DN: Tensor) -> Tensor:
    """The rotary embedding, halves convention: x * cos + [-x2, x1] * sin."""
    half = x_KDN.shape[1] // 2
    out_KDN = x_KDN * cos_DN
    out_KDN[:, :half].addcmul_(x_KDN[:, half:], sin_DN[:half], value=-1)
    out_KDN[:, half:].addcmul_(x_KDN[:, :half], sin_DN[half:])
    return out_KDN


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Layer(
        input_norm_H1=layer.input_layernorm.weight[:, None],
        mlp_norm_H1=layer.post_attention_layernorm.weight[:, None],
        qkv=_fused(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm_D1=None if query_norm is None else query_norm.weight[:, None],
        key_norm_D1=None if key_norm is None else key_norm.weight[:, None],
        out=_fused(attention.o_proj),
        gate_up=_fused(mlp.gate_proj, mlp.up_proj),
        down=_fused(mlp.down_proj),
    )


def _fused(*layers: LoraLinear) -> Fused:
    weight_OI = layers[0].base.weight.detach()
    biases: list[Tensor | None] = [layer.base.bias for layer in layers]
    if len(layers) > 1:
        weight_OI = torch.cat([layer.base.weight.detach() for layer in layers])
        # Views, so that the base is there once.
        for layer, rows in zip(layers, weight_OI.split([layer.base.out_features for layer in layers]), strict=True):
            layer.base.weight = nn.Parameter(rows, requires_grad=False)
    bias_O1 = None
    if any(bias is not None for bias in biases):
        zero = [weight_OI.new_zeros(layer.base.out_features) for layer in layers]
        bias_O1 = torch.cat([z if b is None else b.detach() for b, z in zip(biases, zero, strict=True)])[:, None]
    return Fused(tuple(layer.name for layer in layers), tuple(layer.base.out_features for layer in layers), weight_OI, bias_O1)
