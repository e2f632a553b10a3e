"""Rollouts in the trainer's process, on the trainer's own weights: nothing is copied or sent, sampler and trainer agree by construction."""

import asyncio
from collections.abc import Callable, Hashable, Sequence

from engine.compute import Compute
from engine.lora import Adapter
from engine.rollouts.batcher import Batcher
from engine.rollouts.requests import Generation, check_length, check_params
from engine.types import Completion, SampleRequest


class LocalRollouts:
    """`engine.types.Rollouts`; also what the serving routes generate with.

    Args:
        lookup: the trainer's live adapter of an id; raises NotFound. Called on the compute thread.
        max_model_len: tokens of prompt and completion together.
    """

    def __init__(self, batcher: Batcher, compute: Compute, lookup: Callable[[str], Adapter], *, max_model_len: int) -> None:
        self._batcher = batcher
        self._compute = compute
        self._lookup = lookup
        self._max_model_len = max_model_len

    def sync(self, adapter_id: str) -> str:
        """See Rollouts. Call it on the compute thread."""
        adapter = self._lookup(adapter_id)
        adapter.changed()
        return adapter.fingerprint()

    def drop(self, adapter_id: str) -> None:
        """See Rollouts. Holds nothing: adapters are the trainer's."""

    async def sample(self, adapter_id: str | None, requests: Sequence[SampleRequest], *, owner: Hashable = None) -> list[list[Completion]]:
        """See Rollouts.

        Raises:
            InvalidInput: a parameter or length is out of bounds. NotFound: the adapter is not loaded.
        """
        adapter = None
        if adapter_id is not None:
            adapter = await asyncio.wrap_future(self._compute.call(lambda: self._lookup(adapter_id)))
        generations = [Generation(("train", owner or adapter_id), adapter, request.prompt_tokens, request.params) for request in requests]
        return await self.generate(generations)

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
