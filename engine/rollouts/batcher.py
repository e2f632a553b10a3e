"""Continuous batching over the trainer's own base: many sequences, several adapters, one token each a step.

Everything here runs on the one compute thread, except `Generation.cancelled`, which any thread sets.
Dimensions: N live sequences, H hidden.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import Any

import torch

from core.errors import Unavailable
from engine.lora import Segment
from engine.model import BaseModel
from engine.rollouts.cached_attention import DecodeAttention, PrefillAttention, SharedPrompts
from engine.rollouts.kv_cache import PromptKv, PromptPool, SlotKv
from engine.rollouts.requests import Generation, LiveSequence
from engine.rollouts.sampler import Sampler

PREFILL_TOKENS = 512
"""Prompt tokens computed before the live sequences get their next token: what a newcomer may delay the others by."""


class Batcher:
    """Admits generations, decodes all that is live.

    Args:
        base: the frozen base, shared with the trainer.
        tokenizer: used on the compute thread only.
        eos_tokens: end a completion.
        max_num_seqs: sequences live at once. With 1, a completion depends on nothing but its request.
    """

    def __init__(self, base: BaseModel, tokenizer: Any, eos_tokens: Sequence[int], *, max_num_seqs: int) -> None:
        self._base = base
        self._tokenizer = tokenizer
        self._eos_tokens = frozenset(eos_tokens)
        self._max_num_seqs = max_num_seqs
        self._waiting: list[Generation] = []
        self._live: list[LiveSequence] = []
        self._cache = SlotKv(base.num_layers, base.num_kv_heads, base.head_dim, base.device.dtype, base.device.torch)
        self._prompts = PromptPool(base.num_layers, base.num_kv_heads, base.head_dim, base.device.dtype, base.device.torch)
        self._sampler = Sampler(base.lm_head_VH)
        self._sorted = True
        self._num_submitted = 0
        self.num_sampled_tokens = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._waiting or self._live)

    @property
    def serving(self) -> bool:
        """Whether somebody waits for an answer, not a training job for its rollouts."""
        return any(g.interactive for g in self._waiting) or any(s.generation.interactive for s in self._live)

    @property
    def num_live(self) -> int:
        """Sequences being decoded."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Sequences not admitted yet."""
        return sum(len(g.params) - g.num_admitted for g in self._waiting)

    @property
    def cache_bytes(self) -> int:
        """Memory of all keys and values."""
        return self._cache.num_bytes + self._prompts.num_bytes

    def submit(self, generation: Generation) -> None:
        """Queues a generation; its `result` is set by a later `step`."""
        if not generation.result.set_running_or_notify_cancel():
            return
        if not generation.params:
            generation.result.set_result([])
            return
        generation.draws = [[] for _ in generation.params]
        generation.arrival = self._num_submitted
        self._num_submitted += 1
        self._waiting.append(generation)

    def cancel_all(self, matches: Callable[[Generation], bool], error: Exception) -> None:
        """Ends every matching generation with `error`."""
        for generation in {*self._waiting, *(s.generation for s in self._live)}:
            if matches(generation):
                self._fail(generation, error)
        self._drop_cancelled()

    def step(self) -> None:
        """Some prompt tokens, then one token for every live sequence."""
        with torch.no_grad():
            self._drop_cancelled()
            self._admit()
            if self._live:
                self._decode()

    def reset(self, error: Exception) -> None:
        """After a step that broke: all that was live gets `error`; what waits stays."""
        for generation in {s.generation for s in self._live} | {g for g in self._waiting if g.prompt_kv is not None}:
            self._fail(generation, error)
        self._drop_cancelled()

    def _fail(self, generation: Generation, error: Exception) -> None:
        generation.cancelled = True
        if not generation.result.done():
            generation.result.set_exception(error)

    def _drop_cancelled(self) -> None:
        gone = [g for g in self._waiting if g.cancelled]
        for generation in gone:
            self._waiting.remove(generation)
        for sequence in [s for s in self._live if s.generation.cancelled]:
            self._leave(sequence)
            gone.append(sequence.generation)
        for generation in gone:
            self._forget_prompt(generation)
            self._fail(generation, Unavailable("The request was cancelled.", code="cancelled"))

    def _admit(self) -> None:
        budget = PREFILL_TOKENS
        while self._waiting and len(self._live) < self._max_num_seqs:
            generation = self._next_in_turn()
            if generation.first_hidden_H1 is None:
                if budget == 0:
                    return
                budget -= self._prefill(generation, budget)
                continue
            alone = all(g.owner == generation.owner for g in self._waiting)
            room = self._max_num_seqs - len(self._live) if alone else 1
            stop = min(len(generation.params), generation.num_admitted + room)
            self._start([LiveSequence(generation, i, self._tokenizer) for i in range(generation.num_admitted, stop)])
            generation.num_admitted = stop
            if stop == len(generation.params):
                self._waiting.remove(generation)
                generation.first_hidden_H1 = None

    def _next_in_turn(self) -> Generation:
        """The oldest generation of the owner with the fewest live sequences."""
        live: Counter[Hashable] = Counter(s.generation.owner for s in self._live)
        return min(self._waiting, key=lambda g: live[g.owner])

    def _prefill(self, generation: Generation, budget: int) -> int:
        """Computes the prompt's next tokens, at most `budget`; returns how many."""
        prompt = generation.prompt_kv = generation.prompt_kv or PromptKv()
        start = prompt.num_tokens
        stop = min(len(generation.prompt_tokens), start + budget)
        device = self._base.device.torch
        tokens_N = torch.tensor(generation.prompt_tokens[start:stop], dtype=torch.int64, device=device)
        positions_N = torch.arange(start, stop, device=device)
        hidden_NH = self._base.hidden(tokens_N, positions_N, PrefillAttention(prompt), [Segment(0, stop - start, generation.adapter)])
        prompt.num_tokens = stop
        if stop == len(generation.prompt_tokens):
            generation.first_hidden_H1 = hidden_NH[-1:].t().contiguous()
            if generation.share_prompt:
                generation.prompt_place = self._prompts.put(prompt)
                prompt.clear()
        return stop - start

    def _start(self, sequences: Sequence[LiveSequence]) -> None:
        """Samples the first token of newly admitted sequences of one generation from the prompt's last hidden state."""
        generation = sequences[0].generation
        assert generation.first_hidden_H1 is not None
        assert generation.prompt_kv is not None
        draws = self._sampler.draw(generation.first_hidden_H1, [s.row() for s in sequences])
        for sequence, drawn in zip(sequences, draws, strict=True):
            self.num_sampled_tokens += 1
            if sequence.push(drawn, self._eos_tokens) is not None:
                self._settle(generation)
                continue
            sequence.slot = self._cache.take()
            if not generation.share_prompt:
                self._cache.fill(sequence.slot, generation.prompt_kv)
                sequence.num_own_tokens = generation.prompt_kv.num_tokens
            self._live.append(sequence)
            self._sorted = False

    def _decode(self) -> None:
        self._arrange()
        device, live = self._base.device.torch, self._live
        longest = max(s.num_own_tokens for s in live)
        self._cache.fit(longest + 1)
        tokens_N = torch.tensor([s.draws[-1].token for s in live], device=device)
        positions_N = torch.tensor([s.position for s in live], device=device)
        slots_N = torch.tensor([s.slot for s in live], device=device)
        lengths_N = torch.tensor([s.num_own_tokens for s in live], device=device)
        attention = DecodeAttention(self._cache, slots_N, lengths_N, longest, self._shared_prompts())
        hidden_NH = self._base.hidden(tokens_N, positions_N, attention, self._segments())
        drawn = self._sampler.draw(hidden_NH.t(), [s.row() for s in live])
        self.num_sampled_tokens += len(live)
        ended: list[LiveSequence] = []
        for sequence, token in zip(live, drawn, strict=True):
            sequence.num_own_tokens += 1
            if sequence.push(token, self._eos_tokens) is not None:
                ended.append(sequence)
        for sequence in ended:
            self._leave(sequence)
            self._settle(sequence.generation)

    def _arrange(self) -> None:
        """Rows of one adapter, and within it of one prompt, next to each other; slots packed once half of them are empty."""
        if not self._sorted:
            first: dict[int, int] = {}
            for arrival, adapter in sorted((s.generation.arrival, id(s.generation.adapter)) for s in self._live):
                first.setdefault(adapter, arrival)
            # By arrival, not by id(): the same traffic gives the same rows in the same order.
            self._live.sort(key=lambda s: (first[id(s.generation.adapter)], s.generation.arrival, s.index))
            self._sorted = True
        if max(s.slot for s in self._live) + 1 > 2 * len(self._live):
            for sequence in sorted(self._live, key=lambda s: -s.slot):
                target = self._cache.lowest_free()
                if target is None or target > sequence.slot:
                    break
                self._cache.move(sequence.slot, target, sequence.num_own_tokens)
                sequence.slot = target

    def _segments(self) -> list[Segment]:
        return [Segment(start, stop, adapter) for start, stop, adapter in _runs(self._live, lambda s: s.generation.adapter)]

    def _shared_prompts(self) -> list[SharedPrompts]:
        rows: dict[int, list[tuple[int, int, int, int]]] = {}
        for start, stop, generation in _runs(self._live, lambda s: s.generation):
            if generation.prompt_place is not None:
                width, slot = generation.prompt_place
                rows.setdefault(width, []).append((slot, len(generation.prompt_tokens), start, stop))
        return [SharedPrompts(self._prompts.cache(width), found, self._base.device.torch) for width, found in sorted(rows.items())]

    def _forget_prompt(self, generation: Generation) -> None:
        if generation.prompt_place is not None:
            self._prompts.release(generation.prompt_place)
            generation.prompt_place = None

    def _leave(self, sequence: LiveSequence) -> None:
        self._live.remove(sequence)
        self._cache.release(sequence.slot)

    def _settle(self, generation: Generation) -> None:
        """Hands the result over once the last completion is there."""
        if len(generation.completions) < len(generation.params):
            return
        self._forget_prompt(generation)
        if not generation.result.done():
            generation.result.set_result([generation.completions[i] for i in range(len(generation.params))])


def _runs(live: Sequence[LiveSequence], key: Callable[[LiveSequence], Any]) -> list[tuple[int, int, Any]]:
    """(start, stop, value) of neighbours for which `key` gives the same object."""
    runs: list[tuple[int, int, Any]] = []
    start = 0
    for _, members in groupby(live, key=lambda s: id(key(s))):
        sequences = list(members)
        runs.append((start, start + len(sequences), key(sequences[0])))
        start += len(sequences)
    return runs
