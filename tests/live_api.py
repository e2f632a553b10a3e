"""The API on a real socket over SQLite and a folder store, with a scripted replica behind it, driven by the stock `openai` client."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI

import migrations
from api.app import create_app
from core.contracts import JobSpec, Lineage
from core.db import session_scope
from core.keys import create_key
from core.settings import get_settings
from core.tables import AdapterVersion, Job
from core.tenants import ensure_project
from registry.store import open_store
from registry.versions import publish
from tests import peft_files
from tests.scripted_replica import ScriptedReplica

ADMIN_KEY = "operator-key-of-the-tests"
BASE = "tiny"
ROWS = b'{"messages": [{"role": "user", "content": "hi"}], "answer": "hello"}\n'
GRADER: dict[str, Any] = {
    "type": "string_check", "name": "exact", "input": "{{sample.output_text}}", "reference": "{{item.answer}}", "operation": "eq",
}  # fmt: skip
METHOD: Any = {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": {"batch_size": 4}}}


@contextmanager
def serve(app: Any) -> Iterator[str]:
    """Runs an ASGI app by uvicorn on a free port, in a thread; yields its base URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@dataclass(frozen=True)
class LiveApi:
    """A running API. `client()` makes an unmodified client of a tenant's project."""

    url: str
    app: FastAPI
    replica: ScriptedReplica
    folder: Path

    def key(self, tenant: str, project: str = "support") -> str:
        """A new key."""
        with session_scope() as session:
            return create_key(session, ensure_project(session, tenant, project).project, "test")[1]

    def client(self, tenant: str = "acme", project: str = "support", *, max_retries: int = 0) -> openai.OpenAI:
        """The stock client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key(tenant, project), max_retries=max_retries, timeout=20)

    def http(self, key: str | None = None) -> httpx.Client:
        """A plain client with a key."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=20, trust_env=False)

    def publish(
        self, tenant: str = "acme", project: str = "support", *, name: str = "tone", seed: int = 0, job_id: str | None = None
    ) -> str:
        """A real adapter version in the registry; returns its digest."""
        peft = peft_files.adapter(seed, base_model=BASE)
        lineage = Lineage(job_id=job_id, base_model=BASE, base_model_digest="0" * 64, code_revision="test", step=1)
        with session_scope() as session:
            owner = ensure_project(session, tenant, project).project
            version = publish(
                session, open_store(), tenant_id=owner.tenant_id, project_id=owner.id, adapter_name=name, base_model=BASE, peft=peft,
                kind="final", job_id=job_id, lineage=lineage,
            )  # fmt: skip
            return version.digest

    def upload(self, client: openai.OpenAI, content: bytes = ROWS, name: str = "train.jsonl") -> str:
        """A training file; returns its id."""
        return client.files.create(file=(name, content), purpose="fine-tune").id


@contextmanager
def run_api(folder: Path, monkeypatch: pytest.MonkeyPatch, *, broker_url: str = "redis://127.0.0.1:1/0") -> Iterator[LiveApi]:
    """The API over the configured database, migrated here; its engine and only replica is the scripted one."""
    replica = ScriptedReplica(BASE)
    with serve(replica.app) as replica_url:
        values = {"BASE_MODEL_NAME": BASE, "ADMIN_KEY": ADMIN_KEY, "ENGINE_URL": replica_url, "BROKER_URL": broker_url}
        for name, value in values.items():
            monkeypatch.setenv(f"ESPALIER_{name}", value)
        get_settings.cache_clear()
        migrations.upgrade(get_settings().resolved_database_url)
        app = create_app()
        with serve(app) as url:
            yield LiveApi(url, app, replica, folder)


@pytest.fixture
def api(fresh_settings: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveApi]:
    """The API with an empty SQLite database; its broker is down."""
    with run_api(fresh_settings, monkeypatch) as running:
        yield running


@pytest.fixture
def api_on_each(database_url: str, fresh_settings: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveApi]:
    """The same on SQLite and on PostgreSQL."""
    with run_api(fresh_settings, monkeypatch) as running:
        yield running


def spec_of(job_id: str) -> JobSpec:
    """What a job stores of its request."""
    with session_scope(readonly=True) as session:
        job = session.get(Job, job_id)
        assert job is not None
        return JobSpec.model_validate(job.spec)


def version_id(digest: str) -> str:
    """Row id of a version."""
    with session_scope(readonly=True) as session:
        return session.query(AdapterVersion).filter_by(digest=digest).one().id


def json_body(response: httpx.Response) -> dict[str, Any]:
    """An answer's JSON object."""
    body: dict[str, Any] = json.loads(response.text)
    return body
