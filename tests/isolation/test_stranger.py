"""Every route of the application, found by itself: 401 without a key, and 404 for another tenant's objects.

A new route fails here until it is listed: OPEN says that it is meant for all, ADMIN that the operator's key opens it, CASES how a stranger
would reach for another's object.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from core.db import session_scope
from core.ids import new_id
from core.tables import Checkpoint, Job
from tests.live_api import ADMIN_KEY, BASE, METHOD, ROWS, LiveApi, version_id

OPEN = {("GET", "/healthz"), ("GET", "/openapi.json")}
# What a stranger sends, with the owner's ids filled in; None: the route names no object and answers with the caller's own (empty) data.
JOB_BODY = {"model": BASE, "training_file": "{file_id}", "method": METHOD}
CASES: dict[tuple[str, str], Any] = {
    ("POST", "/v1/files"): None,
    ("GET", "/v1/files"): None,
    ("GET", "/v1/files/{file_id}"): {},
    ("GET", "/v1/files/{file_id}/content"): {},
    ("DELETE", "/v1/files/{file_id}"): {},
    ("POST", "/v1/fine_tuning/jobs"): JOB_BODY,
    ("GET", "/v1/fine_tuning/jobs"): None,
    ("GET", "/v1/fine_tuning/jobs/{job_id}"): {},
    ("POST", "/v1/fine_tuning/jobs/{job_id}/cancel"): {},
    ("POST", "/v1/fine_tuning/jobs/{job_id}/pause"): {},
    ("POST", "/v1/fine_tuning/jobs/{job_id}/resume"): {},
    ("GET", "/v1/fine_tuning/jobs/{job_id}/events"): {},
    ("GET", "/v1/fine_tuning/jobs/{job_id}/checkpoints"): {},
    ("GET", "/v1/models"): None,
    ("GET", "/v1/models/{model:path}"): {},
    ("GET", "/v1/adapters"): None,
    ("GET", "/v1/adapters/{name}"): {},
    ("GET", "/v1/adapters/{name}/versions"): {},
    ("GET", "/v1/adapters/{name}/versions/{version}"): {},
    ("GET", "/v1/adapters/{name}/versions/{version}/content"): {},
    ("PUT", "/v1/adapters/{name}/aliases/{alias}"): {"version": 1},
    ("DELETE", "/v1/adapters/{name}/aliases/{alias}"): {},
    ("POST", "/v1/chat/completions"): {"model": "{model}", "messages": [{"role": "user", "content": "hi"}]},
    ("POST", "/v1/completions"): {"model": "{model}", "prompt": "hi"},
}
ADMIN_PREFIX = "/v1/admin/"


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Every (method, path) that the application answers, however deeply routers are nested."""

    def walk(entries: Any) -> Iterator[Any]:
        for entry in entries:
            inner = getattr(entry, "original_router", None)
            yield from walk(inner.routes) if inner is not None else [entry]

    for route in walk(app.routes):
        for method in route.methods - {"HEAD", "OPTIONS"}:
            yield method, route.path


@pytest.fixture
def owned(api: LiveApi) -> dict[str, str]:
    """One of everything, of tenant `acme`, by the names that paths and bodies use."""
    client = api.client("acme")
    file_id = api.upload(client)
    job_id = client.fine_tuning.jobs.create(model=BASE, training_file=file_id, method=METHOD, suffix="tone").id
    digest = api.publish("acme", job_id=job_id)
    with session_scope() as session:
        job = session.get(Job, job_id)
        assert job is not None
        job.adapter_version_id = version_id(digest)
        session.add(Checkpoint(id=new_id("ftckpt"), job_id=job_id, step=1, adapter_version_id=version_id(digest)))
    with api.http(client.api_key) as http:
        assert http.put("/v1/adapters/tone/aliases/prod", json={"version": 1}).status_code == 200
    return {
        "file_id": file_id, "job_id": job_id, "model": f"support/tone@{digest[:12]}", "model:path": "support/tone", "name": "tone",
        "version": "1", "alias": "prod", "key": client.api_key, "digest": digest, "tenant": "acme", "project": "support", "key_id": "key-x",
    }  # fmt: skip


def call(http: httpx.Client, method: str, path: str, body: Any, owned: dict[str, str]) -> httpx.Response:
    for name, value in owned.items():
        path = path.replace(f"{{{name}}}", value.replace("/", "%2F"))
    assert "{" not in path, f"{path}: say what fills it"
    if path == "/v1/files" and method == "POST":
        return http.post(path, data={"purpose": "fine-tune"}, files={"file": ("mine.jsonl", ROWS)})
    if method == "GET" or not body:
        return http.request(method, path)
    text = json.dumps(body)
    for name, value in owned.items():
        text = text.replace(f'"{{{name}}}"', json.dumps(value))
    return http.request(method, path, content=text, headers={"content-type": "application/json"})


def test_every_route_is_covered(api: LiveApi) -> None:
    found = {pair for pair in routes(api.app) if not pair[1].startswith(ADMIN_PREFIX)}
    assert found - OPEN == set(CASES), "a route that this suite does not know, or one that is gone"
    schema = api.app.openapi()["paths"]
    documented = {(method.upper(), path) for path, methods in schema.items() for method in methods}
    assert {(m, p.replace(":path", "")) for m, p in CASES} <= documented, "the walk and the schema differ"


def test_without_a_key_every_route_is_401(api: LiveApi, owned: dict[str, str]) -> None:
    num_routes = 0
    with api.http() as nobody, api.http("sk-esp-guess") as guesser, api.http(owned["key"]) as owner:
        for method, path in routes(api.app):
            if (method, path) in OPEN:
                continue
            body = CASES.get((method, path)) or {}
            clients = (nobody, guesser, owner) if path.startswith(ADMIN_PREFIX) else (nobody, guesser)
            for http in clients:
                answer = call(http, method, path, body, owned)
                if answer.status_code == 400 and path.startswith(ADMIN_PREFIX):
                    raise AssertionError(f"{method} {path} reads the body before the key: {answer.text}")
                assert answer.status_code == 401, (method, path, answer.text)
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
                assert answer.headers["x-request-id"]
            num_routes += 1
    assert num_routes > len(CASES)


@pytest.mark.parametrize("kind", ["another tenant, same project name", "another project of the tenant"])
def test_a_stranger_finds_nothing(api: LiveApi, owned: dict[str, str], kind: str) -> None:
    key = api.key("rival", "support") if kind.startswith("another tenant") else api.key("acme", "other")
    with api.http(key) as stranger, api.http(owned["key"]) as owner:
        for (method, path), body in CASES.items():
            answer = call(stranger, method, path, body, owned)
            if body is not None:
                assert answer.status_code == 404, (method, path, answer.status_code, answer.text)
                assert "acme" not in answer.text
            else:
                assert answer.status_code == 200, (method, path, answer.text)
            for secret in ("digest", "key"):
                assert owned[secret] not in answer.text, (method, path)
            if method == "GET" and body is None:
                ids = [item["id"] for item in answer.json()["data"]]
                assert not {owned["file_id"], owned["job_id"], "support/tone"} & set(ids), (path, ids)
        # Nothing of the owner's was moved, cancelled or deleted.
        assert owner.get(f"/v1/files/{owned['file_id']}").status_code == 200
        assert owner.get(f"/v1/fine_tuning/jobs/{owned['job_id']}").json()["status"] == "validating_files"
        assert owner.get("/v1/adapters/tone").json()["aliases"] == {"prod": 1}
    assert api.replica.num_loads == 0


def test_another_tenants_object_is_not_told_apart_from_none(api: LiveApi, owned: dict[str, str]) -> None:
    with api.http(api.key("rival")) as stranger:
        real = stranger.get(f"/v1/files/{owned['file_id']}").json()["error"]
        none = stranger.get("/v1/files/file-none").json()["error"]
    assert real["message"].replace(owned["file_id"], "file-none") == none["message"]
    assert {**real, "message": ""} == {**none, "message": ""}


def test_a_revoked_key_opens_nothing(api: LiveApi) -> None:
    with api.http(ADMIN_KEY) as operator:
        assert operator.post("/v1/admin/tenants", json={"name": "new"}).status_code == 200
        assert operator.post("/v1/admin/tenants", json={"name": "new"}).status_code == 409
        assert operator.post("/v1/admin/tenants/new/projects", json={"name": "p"}).status_code == 200
        made = operator.post("/v1/admin/tenants/new/projects/p/keys", json={"name": "k"}).json()
        listed = operator.get("/v1/admin/tenants/new/projects/p/keys").json()["data"]
        assert [(row["id"], row["api_key"]) for row in listed] == [(made["id"], None)]
        with api.http(made["api_key"]) as http:
            assert http.get("/v1/models").status_code == 200
            gone = operator.delete(f"/v1/admin/tenants/new/projects/p/keys/{made['id']}").json()
            assert gone["revoked_at"] is not None
            assert http.get("/v1/models").status_code == 401


def test_the_api_loads_no_torch() -> None:
    code = "import sys, api.app, api.main; print([m for m in ('torch', 'transformers', 'workers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
