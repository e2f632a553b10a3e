"""The frozen base: a transformers model whose linear layers route rows to adapters and whose attention is ours.

transformers gives the architecture (norms, rotary embedding, MLP) for Llama, Qwen2, Qwen3 and their like; the attention is a function
that it lets us register, so that packed training batches and cached decoding run through the same layers.
Dimensions: N packed tokens, H hidden, Q query heads, K key-value heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from core.errors import InvalidInput
from engine.decoder import Attention, Decoder
from engine.device import Device
from engine.lora import LoraLinear, Router, Segment

ATTENTION_NAME = "espalier"
# Others may scale logits, cap scores, add sinks or skip layers, which would be computed wrongly in silence.
KNOWN_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


class _Active:
    """The attention of the forward that is running; one thread computes, so one is enough."""

    attention: Attention | None = None


@contextmanager
def _attending(attention: Attention) -> Generator[None]:
    before = _Active.attention
    _Active.attention = attention
    try:
        yield
    finally:
        _Active.attention = before


def _attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, *, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """transformers' interface: [1, heads, N, D] in, [1, N, Q, D] out."""
    assert _Active.attention is not None, "the base is only called through BaseModel.hidden"
    layer = module.layer_idx
    assert isinstance(layer, int)
    out_NQD = _Active.attention.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scaling)
    return out_NQD.unsqueeze(0), None


def _no_mask(*_args: object, **_kwargs: object) -> None:
    return None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention_function)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)


def _refuse_unknown(config: Any) -> None:
    if config.model_type not in KNOWN_ARCHITECTURES:
        raise InvalidInput(
            f"The architecture {config.model_type} is not known to the engine; use one of {', '.join(KNOWN_ARCHITECTURES)}.",
            param="base_model",
        )
    windowed = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if windowed or (config.model_type == "mistral" and config.sliding_window is not None):
        raise InvalidInput("The base attends in a sliding window, which packing does not; use one with full attention.", param="base_model")


class BaseModel:
    """One copy of the base's weights for policy, reference, rollouts and serving.

    Args:
        folder: config.json and safetensors.
    Raises:
        InvalidInput: an architecture whose layers this engine doesn't know.
    """

    def __init__(self, folder: Path, device: Device) -> None:
        self.device = device
        _refuse_unknown(AutoConfig.from_pretrained(folder, local_files_only=True))
        causal: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=device.dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
        )
        causal.requires_grad_(False)
        causal.eval()
        causal.to(device.torch)
        self.config: Any = causal.config
        self.router = Router()
        self._stack: nn.Module = causal.model
        self.lm_head_VH: Tensor = causal.lm_head.weight
        self.layers = self._wrap_linears()
        self.num_layers = int(self.config.num_hidden_layers)
        self.num_kv_heads = int(self.config.num_key_value_heads)
        self.head_dim = int(getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads)
        self.vocab_size = int(self.lm_head_VH.shape[0])
        # Counted here: a tied head once, and nothing that the engine adds.
        self.num_params = sum(parameter.numel() for parameter in causal.parameters())
        self._decoder = Decoder(self._stack, self.config, self.head_dim)

    @contextmanager
    def computing(self, attention: Attention, segments: Sequence[Segment]) -> Generator[None]:
        """Around a forward and its backward: layers that are computed again for the backward find both as they were."""
        with self.router.routed(segments), _attending(attention):
            yield

    def hidden(self, tokens_N: Tensor, positions_N: Tensor, attention: Attention, segments: Sequence[Segment]) -> Tensor:
        """Final hidden states (after the last norm) of a packed batch, [N, H].

        Gradients flow to the segments' factors where enabled; the base has none.
        """
        if not torch.is_grad_enabled():
            return self._decoder.hidden(tokens_N, positions_N, attention, segments).t()
        with self.computing(attention, segments):
            output: Any = self._stack(input_ids=tokens_N[None], position_ids=positions_N[None], use_cache=False)
        return output.last_hidden_state[0]

    def weight(self, name: str) -> Tensor:
        """The base's weight [O, I] of a layer in `layers`; not to be written."""
        layer = self._stack.get_submodule(name)
        assert isinstance(layer, LoraLinear)
        return layer.base.weight.detach()

    def checkpoint_activations(self) -> None:
        """From now on a training forward keeps each layer's input only; the backward computes the layer again."""
        for layer in self._stack.get_submodule("layers").children():
            layer.forward = _recomputed(layer.forward)

    def _wrap_linears(self) -> dict[str, tuple[int, int]]:
        """Puts a LoraLinear over every linear layer of the stack; returns (inputs, outputs) by name."""
        found = {name: module for name, module in self._stack.named_modules() if isinstance(module, nn.Linear)}
        if not found:
            raise InvalidInput(
                f"{type(self._stack).__name__} has no linear layer to adapt; use a dense Llama, Qwen2 or Qwen3.", param="base_model"
            )
        for name, module in found.items():
            parent, _, leaf = name.rpartition(".")
            setattr(self._stack.get_submodule(parent), leaf, LoraLinear(module, name, self.router))
        return {name: (module.in_features, module.out_features) for name, module in found.items()}


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Dropout draws from generators of its own, so torch's global one has nothing to restore.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return wrapped
