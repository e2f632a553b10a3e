"""Validation of a job's files by the real task's code, up to the job's new state."""

from pathlib import Path

import pytest

from core.contracts import JobStatus
from core.db import session_scope
from core.tables import Job
from tests.jobs import Platform, jsonl
from workers.context import RUN_JOB
from workers.validate import validate_job


@pytest.fixture
def platform(fresh_settings: Path) -> Platform:
    return Platform(fresh_settings)


def test_valid_files_queue_the_job_and_wake_a_worker(platform: Platform) -> None:
    job_id = platform.submit(jsonl(6), num_steps=None, hyperparameters={"batch_size": 4, "n_epochs": 2})
    assert validate_job(platform.context, job_id) == JobStatus.QUEUED
    job = platform.job(job_id)
    assert job.num_steps == 3
    assert job.report is not None
    assert job.report["training_file"]["num_rows"] == 6
    guidance = job.report["guidance"]
    assert guidance[0].startswith("optimizer.learning_rate: ")
    assert [event.message for event in platform.events(job_id) if event.message in guidance] == guidance, "told once, and nothing imposed"
    assert platform.sent == [(RUN_JOB, job_id)]
    assert validate_job(platform.context, job_id) is None, "a message that comes twice does nothing"


def test_faults_fail_the_job_and_are_all_in_its_report(platform: Platform) -> None:
    job_id = platform.submit(jsonl(2), b"{\n" * 5 + jsonl(1))
    assert validate_job(platform.context, job_id) == JobStatus.FAILED
    job = platform.job(job_id)
    assert (job.error_code, job.error_param) == ("invalid_validation_file", "validation_file")
    assert "5 faults. Line 1:" in (job.error_message or "")
    assert job.report is not None
    assert [fault["line"] for fault in job.report["validation_file"]["faults"]] == [1, 2, 3, 4, 5]


def test_engine_that_is_away_leaves_the_job_to_the_next_sweep(platform: Platform) -> None:
    job_id = platform.submit()
    platform.engine.down = True
    assert validate_job(platform.context, job_id) is None
    platform.engine.down = False
    assert validate_job(platform.context, job_id) == JobStatus.QUEUED
    assert platform.job(job_id).num_deaths == 0


def test_cancel_before_validation_is_honoured(platform: Platform) -> None:
    job_id = platform.submit()
    with session_scope() as session:
        session.get_one(Job, job_id).cancel_requested = True
    assert validate_job(platform.context, job_id) is None
    assert platform.job(job_id).status == JobStatus.CANCELLED


def test_file_that_is_gone_fails_the_job(platform: Platform) -> None:
    job_id = platform.submit(training_file_sha256="0" * 64)
    assert validate_job(platform.context, job_id) == JobStatus.FAILED
    assert platform.job(job_id).error_code == "not_found"
