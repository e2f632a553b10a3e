"""The verbs behind `POST /engine/v1/<verb>`: what came over the wire, checked, to the trainer and the rollouts and back."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from core.contracts import LoraSettings, OptimizerSettings
from core.errors import InvalidInput, NotFound
from engine import wire
from engine.chat import ChatTokenizer
from engine.compute import Compute
from engine.fencing import Caller, Fences
from engine.types import (
    BaseModelInfo,
    Completion,
    ForwardBackwardResult,
    LossSettings,
    PendingOp,
    Rollouts,
    SampleRequest,
    StackedOn,
    Trainer,
    TrainGroup,
)

T = TypeVar("T")


@dataclass(frozen=True)
class _Call:
    holder_token: int
    client_id: str
    owner: str = field(default="", kw_only=True)
    """Whose share of the engine the call takes; empty: the adapter counts by itself."""


@dataclass(frozen=True)
class _Render(_Call):
    conversations: tuple[object, ...]


@dataclass(frozen=True)
class _OnAdapter(_Call):
    adapter_id: str


@dataclass(frozen=True)
class _Sample(_Call):
    adapter_id: str | None
    requests: tuple[SampleRequest, ...]


@dataclass(frozen=True)
class _Forward(_Call):
    adapter_id: str | None
    groups: tuple[TrainGroup, ...]
    temperature: float
    reference: bool = False
    exported: bool = False


@dataclass(frozen=True)
class _Mutating(_OnAdapter):
    seq_id: int


@dataclass(frozen=True)
class _CreateAdapter(_Mutating):
    lora: LoraSettings
    seed: int
    weights: bytes | None = None
    under: StackedOn | None = None


@dataclass(frozen=True)
class _ForwardBackward(_Mutating):
    groups: tuple[TrainGroup, ...]
    loss: LossSettings


@dataclass(frozen=True)
class _OptimStep(_Mutating):
    optimizer: OptimizerSettings
    learning_rate: float
    total_steps: int | None = None


@dataclass(frozen=True)
class _LoadState(_Mutating):
    state: bytes


class VerbService:
    """Runs verbs: those of one adapter in the order they came, those of several side by side."""

    def __init__(self, trainer: Trainer, rollouts: Rollouts, compute: Compute, chat: ChatTokenizer) -> None:
        self._trainer = trainer
        self._rollouts = rollouts
        self._compute = compute
        self._chat = chat
        self._fences = Fences()
        self._loaded: set[str] = set()
        self.num_trained_tokens = 0
        self._verbs: dict[str, tuple[type[_Call], Callable[[Any], Awaitable[object]]]] = {
            "info": (_Call, self._info),
            "render": (_Render, self._render),
            "render_answers": (_Render, self._render_answers),
            "create_adapter": (_CreateAdapter, self._create_adapter),
            "drop_adapter": (_Mutating, self._drop_adapter),
            "sync": (_Mutating, self._sync),
            "sample": (_Sample, self._sample),
            "forward": (_Forward, self._forward),
            "forward_backward": (_ForwardBackward, self._forward_backward),
            "optim_step": (_OptimStep, self._optim_step),
            "new_phase": (_Mutating, self._new_phase),
            "save": (_OnAdapter, self._save),
            "save_state": (_OnAdapter, self._save_state),
            "load_state": (_LoadState, self._load_state),
        }

    @property
    def num_adapters(self) -> int:
        """Adapters in training."""
        return len(self._loaded)

    async def handle(self, verb: str, body: bytes) -> bytes:
        """One request.

        Raises:
            NotFound: no such verb. InvalidInput: the body is not what the verb takes. Else what the verb raises.
        """
        if verb not in self._verbs:
            raise NotFound(f"There is no verb {verb!r}; there are {', '.join(sorted(self._verbs))}.", code="unknown_verb")
        kind, run = self._verbs[verb]
        try:
            call = wire.build(kind, wire.unpack(body))
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidInput(f"The body of {verb} is malformed: {error}", code="malformed_body") from error
        return wire.pack(await run(call))

    async def _info(self, call: _Call) -> BaseModelInfo:
        return self._trainer.base

    async def _render(self, call: _Render) -> object:
        return await self._chat.render(call.conversations)

    async def _render_answers(self, call: _Render) -> object:
        return await self._chat.render_answers(call.conversations, self._trainer.base.eos_tokens)

    async def _create_adapter(self, call: _CreateAdapter) -> object:
        create = partial(self._trainer.create_adapter, call.adapter_id, call.lora, seed=call.seed, weights=call.weights, under=call.under)
        return await self._mutate(call, "create_adapter", lambda: self._changing(call.adapter_id, create, loads=True))

    async def _load_state(self, call: _LoadState) -> object:
        load = partial(self._trainer.load_state, call.adapter_id, call.state)
        return await self._mutate(call, "load_state", lambda: self._changing(call.adapter_id, load, loads=True))

    async def _optim_step(self, call: _OptimStep) -> object:
        rates = {"learning_rate": call.learning_rate, "total_steps": call.total_steps}
        step = partial(self._trainer.optim_step, call.adapter_id, call.optimizer, **rates)
        return await self._mutate(call, "optim_step", lambda: self._changing(call.adapter_id, step))

    async def _new_phase(self, call: _Mutating) -> object:
        begin = partial(self._trainer.new_phase, call.adapter_id)
        return await self._mutate(call, "new_phase", lambda: self._changing(call.adapter_id, begin))

    async def _drop_adapter(self, call: _Mutating) -> object:
        def drop() -> None:
            self._rollouts.drop(call.adapter_id)
            self._trainer.drop_adapter(call.adapter_id)

        async def work() -> None:
            await self._changing(call.adapter_id, drop)
            self._loaded.discard(call.adapter_id)

        return await self._mutate(call, "drop_adapter", work)

    async def _sync(self, call: _Mutating) -> object:
        async def work() -> str:
            fingerprint = await self._once(partial(self._rollouts.sync, call.adapter_id))
            self._fences.set_synced(call.adapter_id, True)
            return fingerprint

        return await self._mutate(call, "sync", work)

    async def _forward_backward(self, call: _ForwardBackward) -> object:
        _check_groups(call.groups)

        async def work() -> ForwardBackwardResult:
            result = await self._train(
                partial(self._trainer.begin_forward_backward, call.adapter_id, call.groups, call.loss, owner=call.owner or call.adapter_id)
            )
            assert isinstance(result, ForwardBackwardResult)
            self.num_trained_tokens += result.num_tokens
            return result

        return await self._mutate(call, "forward_backward", work)

    async def _forward(self, call: _Forward) -> object:
        _check_groups(call.groups)
        begin = partial(
            self._trainer.begin_forward, call.adapter_id, call.groups, temperature=call.temperature, reference=call.reference,
            exported=call.exported, owner=call.owner or call.adapter_id,
        )  # fmt: skip
        return await self._read(call, call.adapter_id, "forward", lambda: self._train(begin))

    async def _sample(self, call: _Sample) -> object:
        for i, request in enumerate(call.requests):
            check_tokens(request.prompt_tokens, f"requests[{i}].prompt_tokens", self._trainer.base.vocab_size)

        async def work() -> list[list[Completion]]:
            if call.adapter_id is not None:
                if call.adapter_id not in self._loaded:
                    raise NotFound(
                        f"Adapter {call.adapter_id} is not loaded in this engine; create it or load its state first.",
                        code="adapter_not_loaded",
                    )
                self._fences.check_synced(call.adapter_id)
            return await self._rollouts.sample(call.adapter_id, call.requests, owner=call.owner or call.adapter_id)

        return await self._read(call, call.adapter_id, "sample", work)

    async def _save(self, call: _OnAdapter) -> object:
        return await self._read(call, call.adapter_id, "save", lambda: self._once(partial(self._trainer.save, call.adapter_id)))

    async def _save_state(self, call: _OnAdapter) -> object:
        return await self._read(call, call.adapter_id, "save_state", lambda: self._once(partial(self._trainer.save_state, call.adapter_id)))

    async def _changing(self, adapter_id: str, change: Callable[[], T], *, loads: bool = False) -> T:
        result = await self._once(change)
        if loads:
            self._loaded.add(adapter_id)
        self._fences.set_synced(adapter_id, False)
        return result

    async def _mutate(self, call: _Mutating, verb: str, work: Callable[[], Any]) -> object:
        caller = Caller(call.holder_token, call.client_id, call.seq_id)
        return await self._fences.run(call.adapter_id, verb, caller, work)

    async def _read(self, call: _Call, adapter_id: str | None, verb: str, work: Callable[[], Any]) -> object:
        if adapter_id is None:
            return await work()
        return await self._fences.run(adapter_id, verb, Caller(call.holder_token, call.client_id), work)

    async def _once(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._compute.call(function))

    async def _train(self, begin: Callable[[], PendingOp]) -> Any:
        return await asyncio.wrap_future(self._compute.train(begin))


def check_tokens(tokens: np.ndarray[Any, Any], where: str, vocab_size: int) -> None:
    """Refuses what is no row of token ids.

    Raises:
        InvalidInput: not int32, not one-dimensional, or an id out of the vocabulary.
    """
    _check_array(tokens, where, np.int32)
    if bool(((tokens < 0) | (tokens >= vocab_size)).any()):
        raise InvalidInput(f"{where} holds an id outside the vocabulary of {vocab_size}.", param=where)


def _check_groups(groups: tuple[TrainGroup, ...]) -> None:
    for i, group in enumerate(groups):
        for name, array, dtype in (
            ("prompt_tokens", group.prompt_tokens, np.int32),
            ("advantages", group.advantages, np.float32),
            ("weights", group.weights, np.float32),
            *(("completions", tokens, np.int32) for tokens in group.completions),
            *(("old_logprobs", values, np.float32) for values in group.old_logprobs or ()),
            *(("sampler_logprobs", values, np.float32) for values in group.sampler_logprobs or ()),
            *(("token_weights", values, np.float32) for values in group.token_weights or ()),
        ):
            _check_array(array, f"groups[{i}].{name}", dtype)


def _check_array(array: np.ndarray[Any, Any], where: str, dtype: type[np.generic]) -> None:
    if array.dtype != dtype or array.ndim != 1:
        raise InvalidInput(
            f"{where} must be one-dimensional {np.dtype(dtype).name}, not {array.ndim}-dimensional {array.dtype.name}.", param=where
        )
