"""Rollouts in the trainer's process, on the trainer's own weights: nothing is copied or sent, sampler and trainer agree by construction."""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial

from core.errors import Unavailable
from engine.backends.optimizer import Slot
from engine.compute import Compute
from engine.rollouts.batcher import Batcher
from engine.rollouts.requests import Generation, check_length, check_params
from engine.types import Completion, SampleRequest


class LocalRollouts:
    """`engine.types.Rollouts`; also what the serving routes generate with.

    Args:
        lookup: the trainer's slot of an id; raises NotFound. Called on the compute thread.
        max_model_len: tokens of prompt and completion together.
    """

    def __init__(self, batcher: Batcher, compute: Compute, lookup: Callable[[str], Slot], *, max_model_len: int) -> None:
        self._batcher = batcher
        self._compute = compute
        self._lookup = lookup
        self._max_model_len = max_model_len

    def sync(self, adapter_id: str) -> str:
        """See Rollouts. Call it on the compute thread."""
        adapter = self._lookup(adapter_id).adapter
        adapter.changed()
        return adapter.fingerprint()

    def drop(self, adapter_id: str) -> None:
        """See Rollouts. Holds nothing: adapters are the trainer's."""

    async def sample(self, adapter_id: str | None, requests: Sequence[SampleRequest], *, owner: Hashable = None) -> list[list[Completion]]:
        """See Rollouts.

        Raises:
            InvalidInput: a parameter or length is out of bounds. NotFound: the adapter is not loaded.
        """
        slot = None if adapter_id is None else await asyncio.wrap_future(self._compute.call(lambda: self._hold(adapter_id)))
        adapter = None if slot is None else slot.adapter
        try:
            return await self.generate(
                [Generation(("train", owner or adapter_id), adapter, request.prompt_tokens, request.params) for request in requests]
            )
        finally:
            if slot is not None:
                with suppress(Unavailable):
                    self._compute.post(partial(_let_go, slot))

    def _hold(self, adapter_id: str) -> Slot:
        slot = self._lookup(adapter_id)
        slot.num_users += 1
        return slot

    def check(self, generations: Sequence[Generation]) -> None:
        """Refuses what can't be generated.

        Raises:
            InvalidInput: a parameter or length is out of bounds.
        """
        for generation in generations:
            for params in generation.params:
                check_params(params)
                check_length(len(generation.prompt_tokens), params.max_tokens, self._max_model_len)

    async def generate(self, generations: Sequence[Generation]) -> list[list[Completion]]:
        """Completions of each generation, in order. Cancelling the caller ends all of them at the next token."""
        self.check(generations)

        def submit() -> None:
            for generation in generations:
                self._batcher.submit(generation)

        self._compute.post(submit)
        try:
            return list(await asyncio.gather(*(asyncio.wrap_future(generation.result) for generation in generations)))
        finally:
            for generation in generations:
                generation.cancelled = True


def _let_go(slot: Slot) -> None:
    slot.num_users -= 1
