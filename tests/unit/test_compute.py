"""The compute thread and the batcher: turns, fairness, errors that stay with their caller, memory that comes back."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from core.errors import Conflict, InvalidInput, LeaseLost, NotFound, Unavailable
from engine.compute import Compute
from engine.fencing import Caller, Fences
from engine.rollouts.local import LocalRollouts
from engine.rollouts.requests import Generation, Piece
from engine.types import SampleRequest, SamplingParams
from tests.engines import Engine, busy_adapter, computing, make_engine


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model, max_num_seqs=4)


def generation(owner: str, count: int, *, max_tokens: int = 20, log: list[str] | None = None) -> Generation:
    def on_piece(piece: Piece) -> None:
        if log is not None:
            log.append(owner)

    params = tuple(SamplingParams(max_tokens=max_tokens, seed=i, temperature=1.0) for i in range(count))
    return Generation(owner, None, np.array([3, 4, 5], np.int32), params, on_piece=on_piece if log is not None else None)


class Op:
    """A training op of some turns that notes each one; the last of `breaks_at` turns raises."""

    def __init__(self, name: str, turns: float, log: list[str], *, turn_s: float = 0.0, breaks_at: int | None = None) -> None:
        self.name, self.left, self.log, self.turn_s, self.breaks_at = name, turns, log, turn_s, breaks_at
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.left <= 0 or self.error is not None

    def advance(self) -> None:
        time.sleep(self.turn_s)
        self.left -= 1
        self.log.append(self.name)
        if self.breaks_at is not None and self.log.count(self.name) == self.breaks_at:
            self.abort(ZeroDivisionError())

    def finish(self) -> str:
        return self.name

    def abort(self, error: BaseException) -> None:
        self.error = self.error or error


def advance(ops: Sequence[Any]) -> None:
    for op in ops:
        op.advance()


@contextmanager
def computing_ops(engine: Engine) -> Iterator[tuple[Compute, LocalRollouts]]:
    compute = Compute(engine.batcher, advance)
    compute.start()
    try:
        yield compute, LocalRollouts(engine.batcher, compute, engine.trainer.slot, max_model_len=512)
    finally:
        compute.stop()


def test_ops_advance_together_and_a_crash_is_its_callers(engine: Engine) -> None:
    order: list[str] = []
    with computing_ops(engine) as (compute, _):
        gate = threading.Event()
        compute.post(gate.wait)
        ops = [Op("a", 3, order), Op("broken", 9, order, breaks_at=2), Op("b", 3, order)]
        first, broken, second = (compute.train(lambda op=op: op) for op in ops)
        refused = compute.train(lambda: cast(Any, 1 / 0))
        plain = compute.call(lambda: 42)
        gate.set()
        assert (first.result(10), second.result(10), plain.result(10)) == ("a", "b", 42)
        for failed in (broken, refused):
            with pytest.raises(ZeroDivisionError):
                failed.result(10)
    assert order == ["a", "broken", "b", "a", "broken", "b", "a", "b"]


@pytest.mark.parametrize("interactive", [True, False])
def test_decoding_goes_on_between_micro_batches(engine: Engine, interactive: bool) -> None:
    """A training op of many turns leaves time to sequences that are live, more of it when somebody waits for them."""
    log: list[str] = []
    with computing_ops(engine) as (compute, rollouts):
        training = compute.train(lambda: Op("long", 60, log, turn_s=0.02))
        request = Generation(("x",), None, np.array([3, 4], np.int32), (SamplingParams(max_tokens=12),), interactive=interactive)
        asyncio.run(rollouts.generate([request]))
        turns_before = len(log)
        training.result(20)
    assert 0 < turns_before < 60


def test_a_short_call_does_not_wait_for_a_whole_op(engine: Engine) -> None:
    log: list[str] = []
    with computing_ops(engine) as (compute, _):
        training = compute.train(lambda: Op("long", 50, log, turn_s=0.01))
        compute.call(lambda: None).result(10)
        assert len(log) < 50
        training.result(10)


def test_stopping_gives_what_is_left_an_error(engine: Engine) -> None:
    compute = Compute(engine.batcher, advance)
    compute.start()
    endless = Op("endless", math.inf, [], turn_s=0.001)
    op, waiting = compute.train(lambda: endless), generation("left", 2, max_tokens=500)
    compute.post(lambda: engine.batcher.submit(waiting))
    compute.stop()
    for future in (op, waiting.result):
        with pytest.raises(Unavailable):
            future.result(0)
    assert isinstance(endless.error, Unavailable)
    assert not engine.batcher.busy
    with pytest.raises(Unavailable):
        compute.call(lambda: 1)


def test_a_crashed_step_fails_what_was_live_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine.base.hidden
    calls = 0

    def breaks_at_third(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError
        return real(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(engine.base, "hidden", breaks_at_third)
    with computing(engine) as (compute, _):
        live, later = generation("same", 4), generation("same", 1)

        def submit() -> None:
            engine.batcher.submit(live)
            engine.batcher.submit(later)

        compute.post(submit)
        with pytest.raises(MemoryError):
            live.result.result(20)
        assert later.result.result(20)[0].finish_reason in ("stop", "length")
    assert engine.batcher.cache_bytes == 0


def test_owners_share_the_slots_evenly(engine: Engine) -> None:
    log: list[str] = []
    generations = [generation("greedy", 20, log=log), generation("modest", 2, log=log)]
    engine.run(*generations)
    assert log.index("modest") < 60, "a newcomer waits for a slot, not for the other's twenty completions"


def test_cancelling_frees_slots_and_memory(engine: Engine) -> None:
    gone, kept = generation("gone", 3, max_tokens=400), generation("kept", 2, max_tokens=30)
    for item in (gone, kept):
        engine.batcher.submit(item)
    for _ in range(5):
        engine.batcher.step()
    gone.cancelled = True
    while engine.batcher.busy:
        engine.batcher.step()
    assert isinstance(gone.result.exception(0), Unavailable)
    [alone] = engine.run(generation("kept", 2, max_tokens=30))
    assert [c.tokens.tolist() for c in kept.result.result(0)] == [c.tokens.tolist() for c in alone]
    assert engine.batcher.cache_bytes == 0


def test_long_prompts_come_in_chunks(tiny_model: Path) -> None:
    """A prompt over the prefill budget gives what transformers gives, and others decode meanwhile."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine.rollouts import batcher as module

    engine = make_engine(tiny_model)
    tokens = np.random.default_rng(0).integers(3, 259, 150).astype(np.int32)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    inputs = torch.tensor(tokens[None].astype(np.int64))
    expected = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=20)[0, 150:].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PREFILL_TOKENS", 32)
        results = engine.run(
            Generation("short", None, tokens[:5], (SamplingParams(max_tokens=20, temperature=0),)),
            Generation("long", None, tokens, (SamplingParams(max_tokens=20, temperature=0),) * 2),
        )
    assert [c.tokens.tolist() for c in results[1]] == [expected, expected]


def test_sync_and_missing_adapters(engine: Engine) -> None:
    adapter = busy_adapter(engine, "here", seed=1)
    request = SampleRequest(np.array([3], np.int32), (SamplingParams(max_tokens=1),))
    with computing(engine) as (_, rollouts):
        assert rollouts.sync("here") == adapter.fingerprint()
        with pytest.raises(NotFound):
            asyncio.run(rollouts.sample("elsewhere", [request]))
        for wrong in (SamplingParams(max_tokens=0), SamplingParams(max_tokens=1, temperature=-1), SamplingParams(max_tokens=1, top_p=0)):
            with pytest.raises(InvalidInput):
                asyncio.run(rollouts.sample(None, [SampleRequest(request.prompt_tokens, (wrong,))]))
        assert asyncio.run(rollouts.sample(None, [])) == []
        assert asyncio.run(rollouts.sample(None, [SampleRequest(request.prompt_tokens, ())])) == [[]]


def test_a_holder_replaced_while_it_waited_is_refused() -> None:
    async def scenario() -> None:
        fences, entered, release = Fences(), asyncio.Event(), asyncio.Event()
        done: list[str] = []

        async def slow() -> None:
            entered.set()
            await release.wait()
            done.append("first")

        async def write() -> None:
            done.append("stale")

        async def take_over() -> None:
            done.append("new")

        running = asyncio.ensure_future(fences.run("a", "forward_backward", Caller(1, "old", 1), slow))
        await entered.wait()
        queued = asyncio.ensure_future(fences.run("a", "optim_step", Caller(1, "old", 2), write))
        await asyncio.sleep(0)
        newer = asyncio.ensure_future(fences.run("a", "load_state", Caller(2, "new", 1), take_over))
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(running, newer)
        with pytest.raises(LeaseLost):
            await queued
        assert done == ["first", "new"]

    asyncio.run(scenario())


def test_a_mutation_outlives_its_caller_and_is_found_again() -> None:
    async def scenario() -> None:
        fences, release, count = Fences(), asyncio.Event(), 0

        async def work() -> int:
            nonlocal count
            await release.wait()
            count += 1
            return count

        caller = Caller(1, "c", 1)
        first = asyncio.ensure_future(fences.run("a", "optim_step", caller, work))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        release.set()
        assert [await fences.run("a", "optim_step", caller, work) for _ in range(2)] == [1, 1]
        with pytest.raises(Conflict):
            await fences.run("a", "optim_step", Caller(1, "c", 0), work)

    asyncio.run(scenario())
