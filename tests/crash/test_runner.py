"""The real runner against real SQLite and a real store: whatever happens on the way, the adapter is the one of an unbroken run.

The worker's death is a BaseException that nothing catches: the runner is left where it stands, and its lease expires.
"""

from pathlib import Path

import pytest
from sqlalchemy import select, update

from core import leases
from core.contracts import JobStatus
from core.db import session_scope
from core.errors import LeaseLost, Unavailable
from core.settings import get_settings
from core.tables import Adapter, AdapterVersion, Alias, Checkpoint, Job, Lease, Project, Tenant
from tests.crash.deaths import killed_at, wait_for_expiry
from tests.jobs import Platform, jsonl
from workers.claim import fenced
from workers.context import RUN_JOB
from workers.sweep import sweep


def request(job_id: str, **flags: bool) -> None:
    with session_scope() as session:
        job = session.get_one(Job, job_id)
        for name, value in flags.items():
            setattr(job, name, value)


@pytest.fixture
def unbroken(platform: Platform) -> str:
    """Digest of the same job, run without a fault."""
    job_id = platform.queued()
    assert platform.run(job_id) == JobStatus.SUCCEEDED
    return platform.digest(job_id)


def test_unbroken_run_leaves_everything_in_its_place(platform: Platform) -> None:
    job_id = platform.queued(validation=jsonl(3, "Held out"), suffix="tone", hyperparameters={"batch_size": 2, "eval_interval": 3})
    assert platform.sent == [(RUN_JOB, job_id)]
    assert platform.run(job_id) == JobStatus.SUCCEEDED
    job, metrics = platform.job(job_id), platform.metrics(job_id)
    assert (job.step, job.num_deaths, job.estimated_finish, job.error_code) == (7, 0, None, None)
    assert sorted(metrics) == list(range(8))
    assert [s for s, values in metrics.items() if "eval_reward_mean" in values] == [0, 3, 6, 7]
    assert job.trained_tokens == sum(values.get("num_tokens", 0) for values in metrics.values()) > 0
    wanted = {"reward_mean", "reward_std", "reward/exact", "reward/near", "kl", "entropy", "clip_fraction", "ratio", "grad_norm", "loss"}
    wanted |= {"learning_rate", "completion_tokens_mean", "truncated_share", "dead_group_share", "excluded_rows", "tokens_per_s"}
    wanted |= {"rollout_s", "grade_s", "train_s", "num_tokens", "sampler_trainer_logprob_gap_mean", "sampler_trainer_logprob_gap_max"}
    assert wanted <= set(metrics[1])
    with session_scope(readonly=True) as session:
        checkpoints = session.scalars(select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step)).all()
        version = session.get_one(AdapterVersion, job.adapter_version_id)
        assert session.scalar(select(Alias)) is None
        lease = session.get_one(Lease, f"job/{job_id}")
    assert [c.step for c in checkpoints] == [2, 4, 6, 7]
    assert all(c.state_key is None for c in checkpoints)
    assert (version.kind, version.job_id, version.lineage["step"]) == ("final", job_id, 7)
    assert platform.context.store.list_keys(f"states/{job_id}") == []
    assert platform.engine.adapters == {}
    assert lease.expires_at == 0


def test_adapter_changes_at_each_live_step_and_the_sampler_follows(platform: Platform) -> None:
    job_id = platform.queued()
    seen: list[str] = []
    platform.engine.on_call = lambda verb, _: seen.append(platform.engine.adapters[job_id].fingerprint) if verb == "optim_step" else None
    platform.run(job_id)
    live = sum(values["grad_norm"] > 0 for values in platform.metrics(job_id).values())
    assert live == len(seen) == len(set(seen)) > 3


@pytest.mark.parametrize(
    ("verb", "nth"), [("sample", 1), ("forward_backward", 2), ("optim_step", 3), ("sync", 4), ("save_state", 2), ("save", 1)]
)
def test_worker_death_anywhere_gives_the_same_adapter(platform: Platform, unbroken: str, verb: str, nth: int) -> None:
    job_id = platform.queued()
    killed_at(platform, job_id, verb, nth)
    assert platform.run(job_id) is None, "the dead holder's lease still stands"
    wait_for_expiry(job_id)
    assert platform.run(job_id) == JobStatus.SUCCEEDED
    assert platform.digest(job_id) == unbroken
    job, metrics = platform.job(job_id), platform.metrics(job_id)
    assert job.num_deaths == 1
    assert job.trained_tokens == sum(values["num_tokens"] for values in metrics.values())
    told = [event.data["step"] for event in platform.events(job_id) if event.type == "metrics"]
    assert told == list(range(1, 8)), "each step is told once"


def test_engine_that_loses_the_adapter_mid_run(platform: Platform, unbroken: str) -> None:
    job_id = platform.queued()
    platform.at("forward_backward", 4, platform.engine.restart)
    assert platform.run(job_id) == JobStatus.SUCCEEDED
    assert platform.digest(job_id) == unbroken
    messages = [event.message for event in platform.events(job_id)]
    assert any(m.startswith("Restored after step 2; steps 3 to 3 are done again") for m in messages)


def test_engine_that_is_away_for_a_while(platform: Platform, unbroken: str) -> None:
    job_id = platform.queued()
    polls = 0

    def on_call(verb: str, _: str | None) -> None:
        nonlocal polls
        if verb == "optim_step" and not polls:
            platform.engine.down = True
            platform.engine.restart()
        if platform.engine.down and verb == "info":
            polls += 1
            platform.engine.down = polls < 3

    platform.engine.on_call = on_call
    assert platform.run(job_id) == JobStatus.SUCCEEDED
    assert polls == 3
    assert platform.digest(job_id) == unbroken


def test_engine_that_stays_away_fails_the_job_with_the_reason(platform: Platform) -> None:
    job_id = platform.queued()

    def go_down() -> None:
        platform.engine.down = True

    platform.at("sample", 2, go_down)
    assert platform.run(job_id) == JobStatus.FAILED
    assert platform.job(job_id).error_code == "engine_unavailable"


def test_sampler_with_stale_weights_is_not_sampled_from(platform: Platform) -> None:
    job_id = platform.queued()

    def corrupt() -> None:
        adapter = platform.engine.adapters[job_id]
        key = next(iter(adapter.factors))
        adapter.factors[key] = adapter.factors[key] + 1

    platform.engine.on_call = lambda verb, _: corrupt() if verb == "sync" else None
    assert platform.run(job_id) == JobStatus.FAILED
    assert ("sample", job_id) not in platform.engine.calls
    job = platform.job(job_id)
    assert job.error_code == "engine_unavailable"
    assert "restored 5 times" in (job.error_message or "")


def test_stale_holder_writes_nothing(platform: Platform, unbroken: str) -> None:
    job_id = platform.queued()
    with session_scope() as session:
        stale = leases.acquire(session, f"job/{job_id}", "worker that sleeps", ttl_s=0.0)
    assert stale is not None
    assert platform.run(job_id) == JobStatus.SUCCEEDED
    with pytest.raises(LeaseLost), fenced(stale) as (_, job):
        job.step = 99
    assert platform.job(job_id).step == 7
    with platform.engine.connect(stale.token, "") as verbs, pytest.raises(LeaseLost):
        verbs.drop_adapter(job_id)
    assert platform.digest(job_id) == unbroken


def test_holder_that_was_cut_off_mid_step_stops(platform: Platform, unbroken: str) -> None:
    job_id = platform.queued()

    def take_over() -> None:
        with session_scope() as session:
            session.get_one(Lease, f"job/{job_id}").expires_at = 0.0
            assert leases.acquire(session, f"job/{job_id}", "another", ttl_s=0.3) is not None

    platform.at("optim_step", 3, take_over)
    assert platform.run(job_id) is None
    assert platform.job(job_id).step == 2
    assert platform.job(job_id).status == JobStatus.RUNNING
    wait_for_expiry(job_id)
    assert platform.run(job_id) == JobStatus.SUCCEEDED
    assert platform.digest(job_id) == unbroken


def test_cancel_is_read_at_the_next_step(platform: Platform) -> None:
    job_id = platform.queued()
    platform.at("sample", 4, lambda: request(job_id, cancel_requested=True))
    assert platform.run(job_id) == JobStatus.CANCELLED
    job = platform.job(job_id)
    assert (job.step, job.adapter_version_id) == (4, None)
    assert job.finished_at is not None
    assert platform.engine.adapters == {}
    assert platform.context.store.list_keys(f"states/{job_id}") == []


def test_cancel_is_read_at_the_start_and_while_the_engine_is_away(platform: Platform) -> None:
    first, second = platform.queued(), platform.queued()
    request(first, cancel_requested=True)
    assert platform.run(first) is None
    assert platform.job(first).status == JobStatus.CANCELLED

    def leave() -> None:
        platform.engine.down = True
        request(second, cancel_requested=True)

    platform.at("sample", 2, leave)
    assert platform.run(second) == JobStatus.CANCELLED


def test_pause_and_resume_give_the_same_adapter(platform: Platform, unbroken: str) -> None:
    job_id = platform.queued()
    platform.at("sample", 3, lambda: request(job_id, pause_requested=True))
    assert platform.run(job_id) == JobStatus.PAUSED
    job = platform.job(job_id)
    assert (job.step, job.pause_requested) == (3, False)
    assert platform.engine.adapters == {}
    assert platform.run(job_id) is None, "a paused job is nobody's work"
    with session_scope() as session:
        session.get_one(Job, job_id).status = JobStatus.QUEUED
    assert platform.run(job_id) == JobStatus.SUCCEEDED
    assert platform.digest(job_id) == unbroken
    assert not any("done again" in event.message for event in platform.events(job_id)), "the pause made a checkpoint"


def test_worker_that_is_asked_to_end_gives_the_job_back(platform: Platform, unbroken: str) -> None:
    job_id = platform.queued()
    platform.at("sample", 3, platform.context.stopping.set)
    assert platform.run(job_id) == JobStatus.RUNNING
    platform.context.stopping.clear()
    assert platform.sent[-1] == (RUN_JOB, job_id)
    assert platform.run(job_id) == JobStatus.SUCCEEDED
    assert platform.digest(job_id) == unbroken
    assert platform.job(job_id).num_deaths == 0, "a restart is no death"


def test_three_deaths_fail_the_job(platform: Platform) -> None:
    job_id = platform.queued()
    for _ in range(3):
        killed_at(platform, job_id, "sample", 1)
        wait_for_expiry(job_id)
    assert platform.run(job_id) is None
    job = platform.job(job_id)
    assert (job.status, job.error_code, job.num_deaths) == (JobStatus.FAILED, "worker_lost", 3)


def test_sweep_wakes_what_has_no_live_holder_and_spaces_its_messages(platform: Platform) -> None:
    waiting, queued, dead = platform.submit(), platform.queued(), platform.queued()
    killed_at(platform, dead, "sample", 4)
    platform.sent.clear()
    assert set(sweep(platform.context, grace_s=0.0)) == {waiting, queued}, "the dead holder's lease still stands"
    wait_for_expiry(dead)
    assert sweep(platform.context, grace_s=0.0) == [dead]
    assert sweep(platform.context, grace_s=0.0) == []
    assert sorted(platform.sent) == sorted([("workers.validate_job", waiting), (RUN_JOB, queued), (RUN_JOB, dead)])
    with session_scope() as session:
        session.get_one(Job, dead).status = JobStatus.CANCELLED
    assert platform.context.store.list_keys(f"states/{dead}") != []
    sweep(platform.context)
    assert platform.context.store.list_keys(f"states/{dead}") == []


def near_with(formula: str, reference: str) -> dict[str, object]:
    part = {
        "type": "text_similarity",
        "name": "n",
        "input": "{{sample.output_text}}",
        "reference": reference,
        "evaluation_metric": "fuzzy_match",
    }
    return {"type": "multi", "graders": {"n": part}, "calculate_output": formula}


def test_completions_without_a_score_are_left_out_and_counted(platform: Platform) -> None:
    # Defined where parts are 0, 0.5 and 1; a root of a negative number at 0.4, the score of "perhaps".
    job_id = platform.queued(grader=near_with("n + 0 * sqrt((n - 0.35) * (n - 0.45))", "yes"))
    assert platform.run(job_id) == JobStatus.SUCCEEDED
    metrics = platform.metrics(job_id)
    assert sum(values["excluded_rows"] for values in metrics.values()) > 3
    assert all(values["reward/n"] == pytest.approx(values["reward_mean"]) or values["excluded_rows"] for values in metrics.values())


def test_grader_that_gives_too_few_scores_fails_the_job_with_its_own_error(platform: Platform) -> None:
    # Only "no" (0) has a score: the others are at 0.8, 0.22 and 0.21.
    job_id = platform.queued(grader=near_with("sqrt((n - 0.1) * (n - 0.48)) * sqrt((n - 0.6) * (n - 0.9))", "ye"))
    assert platform.run(job_id) == JobStatus.FAILED
    job = platform.job(job_id)
    assert (job.error_code, job.error_param) == ("grader_failed", "method.reinforcement.grader")
    assert "math domain error" in (job.error_message or "")


def test_store_that_fails_once_is_a_passing_fault(platform: Platform, unbroken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = platform.queued()
    put, failures = platform.context.store.put, [1]

    def put_or_fail(key: str, data: bytes) -> None:
        if key.startswith("states/") and failures:
            failures.pop()
            raise Unavailable("disk full")
        put(key, data)

    monkeypatch.setattr(platform.context.store, "put", put_or_fail)
    assert platform.run(job_id) == JobStatus.SUCCEEDED
    assert platform.digest(job_id) == unbroken


def test_job_started_from_an_adapter_of_its_project(platform: Platform, unbroken: str) -> None:
    job_id = platform.queued(start_from=unbroken)
    assert platform.run(job_id) == JobStatus.SUCCEEDED
    assert platform.digest(job_id) != unbroken
    with session_scope(readonly=True) as session:
        assert session.get_one(AdapterVersion, platform.job(job_id).adapter_version_id).lineage["parent_digest"] == unbroken
    with session_scope() as session:
        session.add(Tenant(id="tenant-2", name="rival"))
        session.flush()
        session.add(Project(id="proj-2", tenant_id="tenant-2", name="billing"))
        session.flush()
        session.add(Adapter(id="adapter-2", tenant_id="tenant-2", project_id="proj-2", name="theirs", base_model="scripted"))
        session.flush()
        session.execute(update(AdapterVersion).where(AdapterVersion.digest == unbroken).values(adapter_id="adapter-2"))
    other = platform.queued(start_from=unbroken)
    assert platform.run(other) == JobStatus.FAILED
    assert platform.job(other).error_param == "start_from"


def test_death_of_a_worker_on_each_database(database_url: str, fresh_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_LEASE_TTL_S", "0.4")
    monkeypatch.setenv("ESPALIER_HEARTBEAT_S", "0.05")
    get_settings.cache_clear()
    assert get_settings().resolved_database_url == database_url
    platform = Platform(fresh_settings)
    whole, broken = platform.queued(), platform.queued()
    assert platform.run(whole) == JobStatus.SUCCEEDED
    killed_at(platform, broken, "optim_step", 4)
    wait_for_expiry(broken)
    assert sweep(platform.context, grace_s=0.0) == [broken]
    assert platform.run(broken) == JobStatus.SUCCEEDED
    assert platform.digest(broken) == platform.digest(whole)
