"""A worker's death as the runner meets it: a BaseException that nothing catches, then a lease that runs out."""

import time

import pytest

from core import leases
from core.db import session_scope
from tests.jobs import Platform


class Killed(BaseException):
    """SIGKILL, as seen from inside."""


def die() -> None:
    raise Killed


def killed_at(platform: Platform, job_id: str, verb: str, nth: int) -> None:
    platform.at(verb, nth, die)
    with pytest.raises(Killed):
        platform.run(job_id)
    platform.at(verb, 0, die)


def wait_for_expiry(job_id: str) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        with session_scope(readonly=True) as session:
            if not leases.is_live(session, f"job/{job_id}"):
                return
        time.sleep(0.02)
    raise AssertionError("the dead holder's lease did not expire")
