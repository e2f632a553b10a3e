"""The Celery application: what its settings must be for jobs to survive, and what it must not load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from core.contracts import JobStatus
from core.db import session_scope
from core.tables import Job
from tests.jobs import Platform
from workers.app import CONTROL_THREADS, app
from workers.context import RUN_JOB
from workers.sweep import wake_next


def test_messages_are_json_and_never_redelivered() -> None:
    assert app.conf.task_serializer == "json"
    assert app.conf.accept_content == ["json"]
    assert app.conf.task_acks_late is False
    assert app.conf.task_ignore_result is True
    assert app.conf.broker_connection_max_retries is None


def test_validation_and_sweeps_have_threads_beside_the_jobs() -> None:
    assert app.conf.worker_pool == "threads"
    assert app.conf.worker_concurrency > CONTROL_THREADS > 0


def test_beat_keeps_no_file(tmp_path: Path) -> None:
    code = (
        "from workers.app import app; from celery.beat import Service; s = Service(app, scheduler_cls=app.conf.beat_scheduler);"
        "print(sorted(s.scheduler.schedule)); s.sync()"
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "ESPALIER_DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
    assert "sweep" in done.stdout
    assert list(tmp_path.rglob("*schedule*")) == []


def test_workers_load_no_torch_and_no_web_layer(tmp_path: Path) -> None:
    code = (
        "import json, sys, workers.tasks; print(json.dumps([m for m in ('torch', 'transformers', 'fastapi', 'nltk') if m in sys.modules]))"
    )
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "ESPALIER_DATA_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=env)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("status", [JobStatus.QUEUED, JobStatus.PAUSED])
def test_worker_that_became_free_wakes_the_job_that_waited_longest(fresh_settings: Path, status: JobStatus) -> None:
    platform = Platform(fresh_settings)
    first, second = platform.queued(), platform.queued()
    platform.sent.clear()
    with session_scope() as session:
        session.get_one(Job, first).status = status
    wanted = first if status == JobStatus.QUEUED else second
    assert wake_next(platform.context) == wanted
    assert platform.sent == [(RUN_JOB, wanted)]
