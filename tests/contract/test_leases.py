"""Leases, the job state machine and many writers, on both databases.

1. One of several claimers wins; the others get None, at the first claim too.
2. An expired lease is taken over with a higher token; the stale holder's heartbeat, release and writes are refused (celery#5935,
   kombu#337).
3. The state machine has the edges that it says, and no others.
4. Four processes that write at once lose nothing (aiosqlite#251).
"""

import itertools
import subprocess
import sys
import threading

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core import clock, db, leases
from core.contracts.job import TERMINAL, JobStatus
from core.errors import IllegalTransition, InvalidInput, LeaseLost
from core.jobs import MOVES, transition
from core.leases import Held
from core.tables import Event, Job, Lease
from tests.rows import add_job, add_project

TTL_S = 30.0
# On SQLite an open transaction keeps every other writer out.
POSTGRESQL_ONLY = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
NUM_PROCESSES, NUM_WRITES = 4, 25


def claim(holder: str) -> Held | None:
    with db.session_scope() as session:
        return leases.acquire(session, "job:1", holder, ttl_s=TTL_S)


def expire() -> None:
    with db.session_scope() as session:
        session.get_one(Lease, "job:1").expires_at = clock.now_s() - 1


def test_two_claimers(database_url: str) -> None:
    first = claim("a")
    assert first == Held("job:1", "a", 1, took_over=False)
    assert claim("b") is None
    assert claim("a") is None
    with db.session_scope() as session:
        assert leases.is_live(session, "job:1")
        leases.release(session, first)
        assert not leases.is_live(session, "job:1")
    assert claim("b") == Held("job:1", "b", 2, took_over=False)


def test_claimers_at_once(database_url: str) -> None:
    """Over and over: first claims race for the primary key, later ones for the row."""
    barrier = threading.Barrier(4)
    for expected_token in (1, 2, 3):
        won: list[Held | None] = []

        def work(holder: str, won: list[Held | None] = won) -> None:
            barrier.wait(timeout=30)
            won.append(claim(holder))

        threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert len(won) == 4
        holders = [held for held in won if held is not None]
        assert [held.token for held in holders] == [expected_token]
        with db.session_scope() as session:
            leases.release(session, holders[0])


def test_takeover_fences_the_stale_holder(database_url: str) -> None:
    stale = claim("a")
    assert stale is not None
    expire()
    fresh = claim("b")
    assert fresh == Held("job:1", "b", 2, took_over=True)
    for call in (leases.check, leases.release, lambda session, held: leases.renew(session, held, ttl_s=TTL_S)):
        with pytest.raises(LeaseLost, match="taken over"), db.session_scope() as session:
            call(session, stale)
        with db.session_scope() as session:
            leases.check(session, fresh)


def test_the_same_holder_that_comes_back_has_another_token(database_url: str) -> None:
    stale = claim("a")
    expire()
    fresh = claim("a")
    assert stale is not None
    assert fresh is not None
    with pytest.raises(LeaseLost), db.session_scope() as session:
        leases.check(session, stale)
    with db.session_scope() as session:
        leases.renew(session, fresh, ttl_s=TTL_S)


@POSTGRESQL_ONLY
def test_a_check_sees_a_takeover_since_the_session_last_looked(database_url: str) -> None:
    stale = claim("a")
    assert stale is not None
    with db.session_scope() as session:
        assert leases.is_live(session, "job:1")
        expire()
        assert claim("b") is not None
        with pytest.raises(LeaseLost):
            leases.check(session, stale)


@POSTGRESQL_ONLY
def test_a_claim_sees_a_renewal_since_the_session_last_looked(database_url: str) -> None:
    held = claim("a")
    assert held is not None
    expire()
    with db.session_scope() as session:
        assert not leases.is_live(session, "job:1")
        with db.session_scope() as other:
            leases.renew(other, held, ttl_s=TTL_S)
        assert leases.acquire(session, "job:1", "b", ttl_s=TTL_S) is None


def test_a_refused_write_leaves_nothing(database_url: str) -> None:
    with db.session_scope() as session:
        job_id = add_job(session, add_project(session, "acme", "billing"), status=JobStatus.RUNNING).id
    stale = claim("a")
    assert stale is not None
    expire()
    assert claim("b") is not None

    def write() -> None:
        with db.session_scope() as session:
            session.get_one(Job, job_id).step = 7
            session.flush()
            leases.check(session, stale)

    with pytest.raises(LeaseLost):
        write()
    with db.session_scope(readonly=True) as session:
        assert session.get_one(Job, job_id).step == 0


@pytest.mark.parametrize(("start", "end"), list(itertools.product(JobStatus, JobStatus)))
def test_every_edge(start: JobStatus, end: JobStatus) -> None:
    job = Job(id="ftjob-1", status=start, started_at=None, estimated_finish=5.0)
    session = Session()
    if end not in MOVES[start]:
        with pytest.raises(IllegalTransition, match=f"is {start}"):
            transition(session, job, end, "moved")
        assert (job.status, list(session.new)) == (start, [])
        return
    transition(session, job, end, "moved")
    assert job.status == end
    assert [event.message for event in session.new] == ["moved"]
    assert (job.finished_at is not None) == (end in TERMINAL)
    assert (job.started_at is not None) == (end == JobStatus.RUNNING)


def test_a_job_through_its_life(database_url: str) -> None:
    with db.session_scope() as session:
        job_id = add_job(session, add_project(session, "acme", "billing")).id
    path = [JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSING, JobStatus.PAUSED, JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.FAILED]
    for status in path:
        with db.session_scope() as session:
            error = InvalidInput("The file is gone.", param="training_file") if status == JobStatus.FAILED else None
            transition(session, session.get_one(Job, job_id), status, f"now {status}", error=error)
    with db.session_scope(readonly=True) as session:
        job = session.get_one(Job, job_id)
        assert (job.error_code, job.error_message, job.error_param) == ("invalid_request", "The file is gone.", "training_file")
        events = session.scalars(select(Event).where(Event.job_id == job_id).order_by(Event.seq)).all()
        assert [event.message for event in events] == [f"now {status}" for status in path]
        assert events[-1].level == "error"
    with pytest.raises(IllegalTransition), db.session_scope() as session:
        transition(session, session.get_one(Job, job_id), JobStatus.RUNNING, "again")


WRITER = """
import sys
from sqlalchemy import select
from core.db import session_scope
from core.events import add_event
from core.tables import Job
for i in range(int(sys.argv[2])):
    with session_scope() as session:
        job = session.scalars(select(Job).where(Job.id == sys.argv[1]).with_for_update()).one()
        job.trained_tokens += 1
        add_event(session, job.id, f"{sys.argv[3]}-{i}")
"""


def test_processes_that_write_at_once_lose_nothing(database_url: str) -> None:
    with db.session_scope() as session:
        job_id = add_job(session, add_project(session, "acme", "billing")).id
    command = [sys.executable, "-c", WRITER, job_id, str(NUM_WRITES)]
    writers = [subprocess.Popen([*command, str(n)], stderr=subprocess.PIPE) for n in range(NUM_PROCESSES)]
    errors = [writer.communicate(timeout=120)[1].decode() for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * NUM_PROCESSES, errors
    with db.session_scope(readonly=True) as session:
        assert session.get_one(Job, job_id).trained_tokens == NUM_PROCESSES * NUM_WRITES
        assert session.scalar(select(func.count()).select_from(Event)) == NUM_PROCESSES * NUM_WRITES
        assert len(set(session.scalars(select(Event.message)))) == NUM_PROCESSES * NUM_WRITES
