"""Files, by the stock client."""

import hashlib
import time

import openai
import pytest

from core.db import session_scope
from core.tables import File
from tests.live_api import ROWS, LiveApi, json_body


def test_a_file_lives_from_upload_to_deletion(api: LiveApi) -> None:
    client = api.client()
    made = client.files.create(file=("train.jsonl", ROWS), purpose="fine-tune")
    assert (made.object, made.bytes, made.filename, made.purpose, made.status) == (
        "file",
        len(ROWS),
        "train.jsonl",
        "fine-tune",
        "processed",
    )
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == ROWS
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(made.id)
    assert caught.value.param == "file_id"
    assert client.files.list().data == []


def test_pages_follow_the_last_id(api: LiveApi) -> None:
    client = api.client()
    ids = [api.upload(client, ROWS * (n + 1), f"{n}.jsonl") for n in range(5)]
    first = client.files.list(limit=2)
    assert [f.id for f in first.data] == ids[:2:-1]
    assert first.has_more
    assert [f.id for f in client.files.list(limit=2)] == ids[::-1]  # the client walks the pages
    assert [f.id for f in client.files.list(limit=2, order="asc", after=ids[1])][:2] == ids[2:4]
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.list(after="file-nope")
    assert caught.value.param == "after"


def test_a_large_upload_is_whole_and_hashed_before_the_answer(api: LiveApi) -> None:
    content = b"".join(b'{"n": %d}\n' % n for n in range(300_000))
    client = api.client()
    file_id = api.upload(client, content)
    with session_scope(readonly=True) as session:
        row = session.get(File, file_id)
        assert row is not None
        assert row.sha256 == hashlib.sha256(content).hexdigest()
    assert client.files.content(file_id).read() == content


def test_a_retried_upload_makes_one_file(api: LiveApi) -> None:
    client = api.client()
    first = client.files.create(file=("train.jsonl", ROWS), purpose="fine-tune")
    again = client.files.create(file=("train.jsonl", ROWS), purpose="fine-tune", extra_headers={"x-stainless-retry-count": "1"})
    assert again.id == first.id
    wanted_twice = client.files.create(file=("train.jsonl", ROWS), purpose="fine-tune")
    assert wanted_twice.id != first.id
    stranger = api.client("other").files.create(
        file=("train.jsonl", ROWS), purpose="fine-tune", extra_headers={"x-stainless-retry-count": "1"}
    )
    assert stranger.id not in (first.id, wanted_twice.id)


def test_an_expired_file_is_gone(api: LiveApi) -> None:
    client = api.client()
    made = client.files.create(file=("t.jsonl", ROWS), purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at == pytest.approx(time.time() + 3600, abs=5)
    with session_scope() as session:
        row = session.get(File, made.id)
        assert row is not None
        row.expires_at = time.time() - 1
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)


@pytest.mark.parametrize(
    ("name", "content", "form", "param"),
    [
        ("t.jsonl", b"", {}, "file"),
        ("bad\u200bname", ROWS, {}, "file"),
        ("t.jsonl", ROWS, {"purpose": "mining"}, "purpose"),
        ("t.jsonl", ROWS, {"color": "red"}, "color"),
        ("t.jsonl", ROWS, {"expires_after[seconds]": "5"}, "expires_after[seconds]"),
    ],
)
def test_a_refusal_names_the_field(api: LiveApi, name: str, content: bytes, form: dict[str, str], param: str) -> None:
    with api.http(api.key("acme")) as http:
        answer = http.post("/v1/files", data={"purpose": "fine-tune", **form}, files={"file": (name, content)})
    assert answer.status_code == 400
    assert json_body(answer)["error"]["param"] == param, answer.text
    assert answer.headers["x-request-id"]


def test_a_path_in_the_name_is_cut(api: LiveApi) -> None:
    assert api.client().files.create(file=("../../etc/x.jsonl", ROWS), purpose="fine-tune").filename == "x.jsonl"
