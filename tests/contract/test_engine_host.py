"""The verbs end to end: EngineClient against a live engine host over the tiny base.

1. A GRPO-like step over HTTP trains; logprobs of sample and forward agree; save loads in another adapter.
2. A repeated mutating request is done once, also while the first is under way; an older one is refused.
3. A stale holder is refused everywhere; a newer one takes over.
4. Sampling before sync is refused; an adapter that is not there is adapter_not_loaded.
5. Two adapters side by side equal each alone.
6. Malformed bodies are 400 and name the fault; errors come back as the class that was raised.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from core.contracts import LoraSettings, OptimizerSettings
from core.errors import Conflict, InvalidInput, LeaseLost, NotFound, Unavailable
from engine import client as client_module
from engine import wire
from engine.client import EngineClient
from engine.types import LossSettings, SampleRequest, SamplingParams, TrainGroup
from tests.engines import LiveHost, live_host

LORA = LoraSettings(rank=4, alpha=8)
OPTIMIZER = OptimizerSettings(learning_rate=1e-2)
LOSS = LossSettings(clip_low=0.2, clip_high=0.2, beta=0.04, denominator=40.0, temperature=1.0)


@pytest.fixture(scope="module")
def live(tiny_model: Path) -> Iterator[LiveHost]:
    with live_host(tiny_model, max_num_seqs=1) as host:
        yield host


@pytest.fixture
def client(live: LiveHost) -> Iterator[EngineClient]:
    with EngineClient(live.url, holder_token=1) as engine:
        yield engine


def run_steps(client: EngineClient, adapter_id: str, num_steps: int, *, seed: int) -> list[str]:
    """A small job; returns the fingerprint after each step."""
    client.create_adapter(adapter_id, LORA, seed=seed)
    fingerprints: list[str] = []
    prompts = client.render([[{"role": "user", "content": f"say {word}"}] for word in ("a", "b")])
    for step in range(num_steps):
        client.sync(adapter_id)
        requests = [
            SampleRequest(prompt, tuple(SamplingParams(max_tokens=8, seed=1000 * seed + 100 * step + 10 * i + j) for j in range(3)))
            for i, prompt in enumerate(prompts)
        ]
        groups = [
            TrainGroup(
                request.prompt_tokens, tuple(c.tokens for c in completions), np.array([1.0, 0.5, -1.5], np.float32), np.ones(3, np.float32)
            )
            for request, completions in zip(requests, client.sample(adapter_id, requests), strict=True)
        ]
        client.forward_backward(adapter_id, groups, LOSS)
        fingerprints.append(client.optim_step(adapter_id, OPTIMIZER, learning_rate=1e-2).fingerprint)
    return fingerprints


def test_info_and_render(client: EngineClient) -> None:
    info = client.info()
    assert (info.name, info.vocab_size, info.max_model_len, info.dtype) == ("tiny", 259, 512, "float32")
    [tokens] = client.render([[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]])
    assert tokens.dtype == np.int32
    assert tokens[0] == 1
    assert list(tokens[:2]) == list(client.render([[{"role": "user", "content": "hi"}]])[0][:2])
    with pytest.raises(InvalidInput) as caught:
        client.render([[{"role": "user", "content": "hi"}], [{"content": "no role"}]])
    assert caught.value.param == "conversations[1][0]"


def test_an_answer_follows_its_prompt_and_ends_the_turn(client: EngineClient) -> None:
    asked: list[dict[str, str]] = [{"role": "user", "content": "hi"}]
    [prompt] = client.render([asked])
    [answer] = client.render_answers([[*asked, {"role": "assistant", "content": "yes"}]])
    assert answer.dtype == np.int32
    assert answer[-1] == 2, "the EOS that ends the turn, without the template's newline after it"
    # The next turn's prompt holds both as they are, so training on the answer is training on what is sampled.
    [longer] = client.render([[*asked, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "?"}]])
    assert longer[: len(prompt) + len(answer)].tolist() == [*prompt.tolist(), *answer.tolist()]
    for bad in ([{"role": "assistant", "content": "yes"}], asked):
        with pytest.raises(InvalidInput) as caught:
            client.render_answers([bad])
        assert caught.value.param == "conversations[0]"


def test_a_step_over_http(client: EngineClient) -> None:
    created = client.create_adapter("step", LORA, seed=1)
    assert created.step == 0
    assert client.sync("step") == created.fingerprint
    [prompt] = client.render([[{"role": "user", "content": "hello"}]])
    params = tuple(SamplingParams(max_tokens=12, seed=i, temperature=0.8) for i in range(4))
    [completions] = client.sample("step", [SampleRequest(prompt, params)])
    group = TrainGroup(prompt, tuple(c.tokens for c in completions), np.array([1, 1, -1, -1], np.float32), np.ones(4, np.float32))
    [logprobs] = client.forward("step", [group], temperature=0.8)
    for completion, trained in zip(completions, logprobs, strict=True):
        np.testing.assert_allclose(completion.logprobs, trained, atol=1e-4)
    result = client.forward_backward("step", [group], replace(LOSS, temperature=0.8))
    assert result.num_tokens == sum(len(c.tokens) for c in completions)
    assert result.metrics["kl"] == pytest.approx(0, abs=1e-6)
    stepped = client.optim_step("step", OPTIMIZER, learning_rate=1e-2)
    assert stepped.grad_norm > 0
    assert stepped.fingerprint != created.fingerprint
    assert client.sync("step") == stepped.fingerprint
    saved = client.save("step")
    assert saved.fingerprint == stepped.fingerprint
    assert client.create_adapter("copy", LORA, seed=2, weights=saved.weights).fingerprint == stepped.fingerprint
    state = client.save_state("step")
    client.drop_adapter("step")
    assert client.load_state("step", state).step == 1
    client.sync("step")
    [again] = client.sample("step", [SampleRequest(prompt, params)])
    client.sync("copy")
    assert [c.tokens.tolist() for c in again] == [c.tokens.tolist() for c in client.sample("copy", [SampleRequest(prompt, params)])[0]]


def test_sampling_needs_an_adapter_and_a_sync(client: EngineClient) -> None:
    request = SampleRequest(np.array([5], np.int32), (SamplingParams(max_tokens=1),))
    with pytest.raises(NotFound) as missing:
        client.sample("never", [request])
    assert missing.value.code == "adapter_not_loaded"
    client.create_adapter("unsynced", LORA, seed=1)
    with pytest.raises(Conflict) as stale:
        client.sample("unsynced", [request])
    assert stale.value.code == "adapter_not_synced"
    with pytest.raises(NotFound) as unknown:
        client.save("never")
    assert unknown.value.code == "adapter_not_loaded"
    assert len(client.sample(None, [request])[0][0].tokens) == 1
    with pytest.raises(InvalidInput, match="maximum context length is 512"):
        client.sample(None, [SampleRequest(np.zeros(500, np.int32), (SamplingParams(max_tokens=13),))])
    with pytest.raises(InvalidInput, match="vocabulary"):
        client.sample(None, [SampleRequest(np.array([259], np.int32), (SamplingParams(max_tokens=1),))])


def call(live: LiveHost, verb: str, **arguments: object) -> httpx.Response:
    return httpx.post(f"{live.url}/engine/v1/{verb}", content=wire.pack(arguments), timeout=60)


def test_a_repeat_is_done_once(live: LiveHost, client: EngineClient) -> None:
    client.create_adapter("repeat", LORA, seed=1)
    [prompt] = client.render([[{"role": "user", "content": "x"}]])
    group = TrainGroup(prompt, (np.array([7, 8, 9], np.int32),) * 2, np.array([1, -0.5], np.float32), np.ones(2, np.float32))
    body = {"holder_token": 1, "client_id": "other", "adapter_id": "repeat"}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: call(live, "forward_backward", **body, seq_id=5, groups=[group], loss=LOSS), range(4)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    steps = [call(live, "optim_step", **body, seq_id=6, optimizer=OPTIMIZER, learning_rate=1e-2) for _ in range(3)]
    assert [wire.unpack(step.content)["step"] for step in steps] == [1, 1, 1]
    # Once done four times over, the gradient would have been four times as long.
    client.create_adapter("once", LORA, seed=1)
    client.forward_backward("once", [group], LOSS)
    alone = client.optim_step("once", OPTIMIZER, learning_rate=1e-2)
    assert wire.unpack(steps[0].content)["grad_norm"] == alone.grad_norm
    late = call(live, "forward_backward", **body, seq_id=5, groups=[group], loss=LOSS)
    assert (late.status_code, late.json()["error"]["code"]) == (409, "stale_request")
    refused = [call(live, "optim_step", **body, seq_id=7, optimizer=OPTIMIZER, learning_rate=-1.0) for _ in range(2)]
    assert refused[0].content == refused[1].content


def test_a_lost_answer_is_fetched_again(live: LiveHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_DELAYS_S", (0.01, 0.01))
    sent: list[bytes] = []

    class LosesTheFirstAnswer(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            sent.append(request.read())
            if len(sent) == 1:
                response.read()
                raise httpx.ReadError("connection reset", request=request)
            return response

    with EngineClient(live.url) as client:
        client.create_adapter("lost", LORA, seed=1)
        client._http = httpx.Client(base_url=live.url, transport=LosesTheFirstAnswer())
        assert client.optim_step("lost", OPTIMIZER, learning_rate=1e-2).step == 1
        assert len(sent) == 2
        assert sent[0] == sent[1]
        assert client.optim_step("lost", OPTIMIZER, learning_rate=1e-2).step == 2


def test_a_stale_holder_is_refused(live: LiveHost) -> None:
    with EngineClient(live.url, holder_token=4) as old, EngineClient(live.url, holder_token=5) as new:
        old.create_adapter("fenced", LORA, seed=1)
        before = new.sync("fenced")
        for attempt in (
            lambda: old.optim_step("fenced", OPTIMIZER, learning_rate=1e-2),
            lambda: old.drop_adapter("fenced"),
            lambda: old.create_adapter("fenced", LORA, seed=9),
            lambda: old.save("fenced"),
            lambda: old.sync("fenced"),
        ):
            with pytest.raises(LeaseLost):
                attempt()
        assert new.sync("fenced") == before
        new.drop_adapter("fenced")
        with pytest.raises(LeaseLost):
            old.create_adapter("fenced", LORA, seed=1)


def test_two_adapters_side_by_side_equal_each_alone(live: LiveHost) -> None:
    alone: list[list[str]] = []
    for seed in (1, 2):
        with EngineClient(live.url) as client:
            alone.append(run_steps(client, f"alone-{seed}", 3, seed=seed))
    together: dict[int, list[str]] = {}

    def job(seed: int) -> None:
        with EngineClient(live.url) as client:
            together[seed] = run_steps(client, f"together-{seed}", 3, seed=seed)

    threads = [threading.Thread(target=job, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[1], together[2]] == alone
    assert len({*alone[0], *alone[1]}) == 6


@pytest.mark.parametrize(
    ("verb", "body", "status", "code"),
    [
        ("sample", b"\xc1", 400, "malformed_body"),
        ("sample", b"{}", 400, "malformed_body"),
        ("info", wire.pack({"holder_token": 0}), 400, "malformed_body"),
        ("info", wire.pack({"holder_token": "0", "client_id": "x"}), 400, "malformed_body"),
        ("optim_step", wire.pack({"holder_token": 0, "client_id": "x", "adapter_id": "a"}), 400, "malformed_body"),
        ("nothing", wire.pack({}), 404, "unknown_verb"),
        (
            "sample",
            wire.pack(
                {"holder_token": 0, "client_id": "x", "adapter_id": None,
                 "requests": [{"prompt_tokens": np.zeros(3, np.float32), "params": [{"max_tokens": 1}]}]}
            ),
            400, "invalid_request",
        ),
    ],
)  # fmt: skip
def test_malformed_bodies(live: LiveHost, verb: str, body: bytes, status: int, code: str) -> None:
    response = httpx.post(f"{live.url}/engine/v1/{verb}", content=body)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_a_dead_engine_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RETRY_DELAYS_S", (0.01,))
    with EngineClient("http://127.0.0.1:9") as client, pytest.raises(Unavailable, match="does not answer"):
        client.info()


def test_health_and_metrics(live: LiveHost, client: EngineClient) -> None:
    assert httpx.get(f"{live.url}/health").status_code == 200
    client.sample(None, [SampleRequest(np.array([5], np.int32), (SamplingParams(max_tokens=3, temperature=0),))])
    lines = dict(line.split() for line in httpx.get(f"{live.url}/metrics").text.splitlines() if not line.startswith("#"))
    assert float(lines["espalier_sampled_tokens_total"]) >= 3
    assert lines["espalier_sequences_live"] == "0"
    assert lines["espalier_ops_queued"] == "0"
