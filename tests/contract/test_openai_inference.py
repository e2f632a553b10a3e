"""Models, chat and completions, by the stock client; the gateway's promises to tenants and to replicas."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from sqlalchemy import func, select

from core import db
from core.db import session_scope
from core.tables import Tenant, Usage
from tests.live_api import BASE, LiveApi
from tests.scripted_replica import WORDS

TEXT = "".join(WORDS)
HI = [{"role": "user", "content": "hi"}]


def usage() -> dict[str, tuple[int, int, int]]:
    """(requests, prompt tokens, completion tokens) by model, over all keys."""
    sums = [func.sum(column) for column in (Usage.num_requests, Usage.prompt_tokens, Usage.completion_tokens)]
    with session_scope(readonly=True) as session:
        return {row[0]: (row[1], row[2], row[3]) for row in session.execute(select(Usage.model, *sums).group_by(Usage.model))}


def tenant_id(name: str) -> str:
    with session_scope(readonly=True) as session:
        return session.query(Tenant).filter_by(name=name).one().id


def test_models_are_the_base_and_the_projects_own(api: LiveApi) -> None:
    client = api.client()
    old, new = api.publish(), api.publish(seed=1)
    api.publish("other", name="secret")
    names = [model.id for model in client.models.list()]
    assert names == [BASE, "support/tone", f"support/tone@{new[:12]}", f"support/tone@{old[:12]}"]
    for name in (*names, "tone", "support/tone@1", f"support/tone@{old}"):
        assert client.models.retrieve(name).id == name
    for name in ("secret", "support/secret", "support/tone@9", "a/../b"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(name)
        assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("model", [BASE, "support/tone"])
def test_answers_come_under_the_name_that_was_asked(api: LiveApi, model: str) -> None:
    api.publish()
    client = api.client()
    chat = client.chat.completions.create(model=model, messages=HI)  # type: ignore[arg-type]
    assert (chat.model, chat.choices[0].message.content) == (model, TEXT)
    text = client.completions.create(model=model, prompt="hi", max_tokens=5, temperature=0)
    assert (text.model, text.choices[0].text) == (model, TEXT)
    assert text.usage is not None
    assert text.usage.completion_tokens == len(WORDS)
    chunks = list(client.chat.completions.create(model=model, messages=HI, stream=True))  # type: ignore[arg-type]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == TEXT
    assert {chunk.model for chunk in chunks} == {model}
    assert [part.choices[0].text for part in client.completions.create(model=model, prompt="hi", stream=True)] == list(WORDS)


def test_the_usage_chunk_comes_only_where_asked_and_tokens_always_count(api: LiveApi) -> None:
    digest = api.publish()
    client = api.client()
    quiet = list(client.chat.completions.create(model="tone", messages=HI, stream=True))  # type: ignore[arg-type]
    asked = list(client.chat.completions.create(model="tone", messages=HI, stream=True, stream_options={"include_usage": True}))  # type: ignore[arg-type]
    client.completions.create(model=BASE, prompt="hi")
    assert all(chunk.choices for chunk in quiet)
    assert asked[-1].choices == []
    assert asked[-1].usage.completion_tokens == 3
    assert [chunk.usage for chunk in asked[:-1]] == [None] * 3
    deadline = time.monotonic() + 5
    while sum(row[0] for row in usage().values()) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert usage() == {f"support/tone@{digest[:12]}": (2, 14, 6), BASE: (1, 7, 3)}


def test_an_adapter_is_loaded_once_under_an_immutable_name_and_an_alias_moves_at_once(api: LiveApi) -> None:
    first, second = api.publish(), api.publish(seed=1)
    client = api.client()
    with api.http(client.api_key) as http:
        assert http.put("/v1/adapters/tone/aliases/prod", json={"version": 1}).status_code == 200
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: client.completions.create(model="support/tone", prompt="hi"), range(8)))
        assert http.put("/v1/adapters/tone/aliases/prod", json={"version": second[:12]}).status_code == 200
    client.completions.create(model="support/tone", prompt="hi")
    owner = tenant_id("acme")
    assert sorted(api.replica.loaded) == sorted(f"{owner}/support/tone@{digest}" for digest in (first, second))
    assert api.replica.num_loads == 2
    client.completions.create(model="support/tone", prompt="hi")
    assert api.replica.num_loads == 2


def test_only_known_fields_pass_and_the_salt_is_the_tenants(api: LiveApi) -> None:
    for tenant, body in (("acme", {"cache_salt": "mine"}), ("acme", {}), ("other", {"cache_salt": "mine"})):
        api.client(tenant).completions.create(model=BASE, prompt="hi", user="me", extra_body=body)
    salts = [request["cache_salt"] for request in api.replica.requests]
    assert salts[0] == salts[1] != salts[2]
    assert "mine" not in salts
    assert "user" not in api.replica.requests[0]
    for field in ("chat_template", "lora_path", "priority", "kv_transfer_params"):
        with pytest.raises(openai.BadRequestError) as caught:
            api.client().completions.create(model=BASE, prompt="hi", extra_body={field: "x"})
        assert caught.value.param == field
    assert len(api.replica.requests) == 3


def test_a_replicas_refusal_reaches_the_client_without_internal_names(api: LiveApi) -> None:
    api.publish()
    with pytest.raises(openai.BadRequestError) as caught:
        api.client().completions.create(model="tone", prompt="hi", max_tokens=4096)
    assert "max_tokens is too large" in caught.value.message
    assert tenant_id("acme") not in caught.value.message


def test_replicas_that_are_down_give_503_with_retry_after(api: LiveApi) -> None:
    api.replica.base = "something else"
    with pytest.raises(openai.InternalServerError) as caught:
        api.client().completions.create(model=BASE, prompt="hi")
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) > 0


def test_a_stream_that_breaks_says_so(api: LiveApi) -> None:
    api.replica.break_after = 1
    stream = api.client().chat.completions.create(model=BASE, messages=HI, stream=True)  # type: ignore[arg-type]
    with pytest.raises(openai.APIError, match="broke off"):
        list(stream)


def test_a_hundred_disconnects_leak_nothing(api: LiveApi) -> None:
    """Half leave in mid-stream, half before the first byte: upstream is cancelled, nothing stays checked out, tokens seen count."""
    api.replica.chunk_delay_s = 0.05
    api.replica.first_delay_s = 60
    key = api.key("acme")
    host, port = api.url.removeprefix("http://").split(":")

    def leave(index: int) -> None:
        body = json.dumps({"model": BASE, "prompt": f"<{index}>", "stream": index % 2 == 0})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            if index % 2 == 0:
                assert connection.recv(64).startswith(b"HTTP/1.1 200")
            while not any(request["prompt"] == f"<{index}>" for request in api.replica.requests):
                time.sleep(0.01)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(leave, range(100)))
    upstream = api.app.state.replicas.http._transport._pool
    pool = db.get_engine().pool

    def held() -> tuple[int, int, int]:
        """Requests that the replica works on, connections to it in use, database connections in use."""
        return api.replica.num_open, sum(not connection.is_idle() for connection in upstream.connections), pool.checkedout()  # type: ignore[attr-defined]

    deadline = time.monotonic() + 20
    while held() != (0, 0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held() == (0, 0, 0)
    assert len(api.replica.requests) == 100
    api.replica.chunk_delay_s = api.replica.first_delay_s = 0
    assert api.client().completions.create(model=BASE, prompt="hi").choices[0].text == TEXT
    assert 50 <= usage()[BASE][0] <= 101
