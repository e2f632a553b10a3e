"""Keys and values of what is being decoded.

A prompt's are computed once (`PromptKv`) and shared by its completions (`PromptPool`); what a sequence itself adds lies in its slot of one
dense tensor per side (`SlotKv`), so that all sequences attend in one batched matmul.
Dimensions: L layers, S slots, K key-value heads, D head size, T own tokens, P prompt tokens.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

TOKEN_CHUNK = 64
"""Tokens by which slots grow: rare copies, little waste."""
SLOT_CHUNK = 8
"""Slots by which the tensor grows."""
WIDTH_STEP = 16
"""Attention covers the longest live sequence rounded up to this, so that matmul shapes change seldom."""


@dataclass
class PromptKv:
    """One prompt's keys and values, filled layer by layer, chunk by chunk."""

    keys: list[Tensor] = field(default_factory=list[Tensor])
    """L tensors [K, P, D]."""
    values: list[Tensor] = field(default_factory=list[Tensor])
    num_tokens: int = 0

    def append(self, layer: int, key_KPD: Tensor, value_KPD: Tensor) -> tuple[Tensor, Tensor]:
        """Adds a chunk to one layer; returns all keys and values of the layer so far."""
        if layer == len(self.keys):
            self.keys.append(key_KPD.contiguous())
            self.values.append(value_KPD.contiguous())
        else:
            self.keys[layer] = torch.cat([self.keys[layer], key_KPD], dim=1)
            self.values[layer] = torch.cat([self.values[layer], value_KPD], dim=1)
        return self.keys[layer], self.values[layer]

    def clear(self) -> None:
        """Lets the tensors go; the number of tokens stays."""
        self.keys, self.values = [], []


class SlotKv:
    """Own-token keys and values of all live sequences, [L, S, K, T, D] a side.

    It shrinks to nothing when the last sequence leaves: with one sequence at a time, neither numerics nor layout depend on what ran before.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_layers = num_layers
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._dtype = dtype
        self._device = device
        self._free: list[int] = []
        self._num_live = 0
        self.keys = self._zeros(0, 0)
        self.values = self._zeros(0, 0)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def take(self) -> int:
        """The lowest free slot."""
        if not self._free:
            num_slots, num_tokens = self.keys.shape[1], self.keys.shape[3]
            self._resize(num_slots + SLOT_CHUNK, max(num_tokens, TOKEN_CHUNK))
            self._free = list(range(num_slots, num_slots + SLOT_CHUNK))
        slot = min(self._free)
        self._free.remove(slot)
        self._num_live += 1
        return slot

    def release(self, slot: int) -> None:
        """Gives a slot back."""
        self._free.append(slot)
        self._num_live -= 1
        if self._num_live == 0:
            self._free = []
            self.keys = self._zeros(0, 0)
            self.values = self._zeros(0, 0)

    def lowest_free(self) -> int | None:
        """The lowest free slot without taking it."""
        return min(self._free, default=None)

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Moves a sequence into the free slot `target`, so that attention need not cover the gap between."""
        self.keys[:, target, :, :num_tokens] = self.keys[:, source, :, :num_tokens]
        self.values[:, target, :, :num_tokens] = self.values[:, source, :, :num_tokens]
        self._free.remove(target)
        self._free.append(source)

    def fit(self, num_tokens: int) -> None:
        """Makes room for sequences of this length."""
        if num_tokens > self.keys.shape[3]:
            self._resize(self.keys.shape[1], -(-num_tokens // TOKEN_CHUNK) * TOKEN_CHUNK)

    def fill(self, slot: int, prompt: PromptKv) -> None:
        """Copies a whole prompt into a slot, for a prompt that has one completion only."""
        self.fit(prompt.num_tokens)
        for layer in range(self._num_layers):
            self.keys[layer, slot, :, : prompt.num_tokens] = prompt.keys[layer]
            self.values[layer, slot, :, : prompt.num_tokens] = prompt.values[layer]

    def _resize(self, num_slots: int, num_tokens: int) -> None:
        old_slots, old_tokens = self.keys.shape[1], self.keys.shape[3]
        for side in ("keys", "values"):
            grown = self._zeros(num_slots, num_tokens)
            grown[:, :old_slots, :, :old_tokens] = getattr(self, side)
            setattr(self, side, grown)

    def _zeros(self, num_slots: int, num_tokens: int) -> Tensor:
        # Zeros, not empty: masked positions get weight 0, and 0 times an uninitialised NaN would be NaN.
        shape = (self._num_layers, num_slots, self._num_kv_heads, num_tokens, self._head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


PromptPlace = tuple[int, int]
"""Width of the cache and slot in it."""


class PromptPool:
    """Whole prompts that several completions share, each in a slot of the cache of its width: powers of two, so that a long prompt does not
    widen the short ones'."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (num_layers, num_kv_heads, head_dim, dtype, device)
        self._caches: dict[int, SlotKv] = {}

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(cache.num_bytes for cache in self._caches.values())

    def put(self, prompt: PromptKv) -> PromptPlace:
        """Copies a computed prompt in."""
        width = max(TOKEN_CHUNK, 1 << (prompt.num_tokens - 1).bit_length())
        cache = self._caches.setdefault(width, SlotKv(*self._shape))
        slot = cache.take()
        cache.fill(slot, prompt)
        return width, slot

    def cache(self, width: int) -> SlotKv:
        """The cache of one width."""
        return self._caches[width]

    def release(self, place: PromptPlace) -> None:
        """Gives a prompt's slot back."""
        self._caches[place[0]].release(place[1])
