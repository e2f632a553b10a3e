"""A job whose worker, engine and API are killed at random moments ends with the adapter of an unbroken run.

Locks: 1 a killed worker's job is taken over, 2 a killed engine's adapter is restored from the last checkpoint, 3 a killed API loses
nothing, 4 two tenants side by side each get what they get alone. The digest of the final adapter is the judge of all four.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.platform import DETERMINISTIC, Platform, steps_done, submit, wait_for

NUM_STEPS = 20
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Platform]:
    running = Platform(tmp_path_factory.mktemp("crash") / "data", tiny_model, DETERMINISTIC)
    running.start()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def unbroken(platform: Platform) -> str:
    """Digest that an undisturbed run gives."""
    client = platform.client("unbroken")
    return _digest(platform, client, submit(client, num_steps=NUM_STEPS))


def _digest(platform: Platform, client: openai.OpenAI, job_id: str) -> str:
    job = wait_for(client, job_id)
    assert job.status == "succeeded", job.error
    assert steps_done(client, job_id) == NUM_STEPS
    name = job.fine_tuned_model.split("/")[1].split("@")[0]
    versions = platform.get(client, f"/v1/adapters/{name}/versions")["data"]
    return str(next(v["digest"] for v in versions if job.fine_tuned_model.endswith(v["digest"][:12])))


@pytest.mark.parametrize("victim", ["worker", "engine", "api"])
def test_a_killed_part_changes_nothing(platform: Platform, unbroken: str, victim: str) -> None:
    client = platform.client(f"killed-{victim}")
    job_id = submit(client, num_steps=NUM_STEPS)
    moments = sorted(random.Random(victim).sample(range(2, NUM_STEPS - 1), 2))
    for moment in moments:
        while steps_done(client, job_id) < moment:
            time.sleep(0.05)
        platform.kill(victim)
    assert _digest(platform, client, job_id) == unbroken


def test_all_three_killed_in_one_job(platform: Platform, unbroken: str) -> None:
    client = platform.client("killed-all")
    job_id = submit(client, num_steps=NUM_STEPS)
    randomness = random.Random(3)
    for victim in ("engine", "worker", "api"):
        time.sleep(randomness.uniform(1.0, 3.0))
        platform.kill(victim)
    assert _digest(platform, client, job_id) == unbroken


def test_two_tenants_side_by_side_equal_each_alone(platform: Platform, unbroken: str) -> None:
    first, second = platform.client("side-a"), platform.client("side-b")
    other = _digest(platform, second, submit(second, num_steps=NUM_STEPS, seed=8))
    assert other != unbroken
    jobs = [(first, submit(first, num_steps=NUM_STEPS)), (second, submit(second, num_steps=NUM_STEPS, seed=8, suffix="again"))]
    assert [_digest(platform, client, job_id) for client, job_id in jobs] == [unbroken, other]


def test_a_restart_keeps_all_state(platform: Platform, unbroken: str) -> None:
    client = platform.client("restart")
    job_id = submit(client, num_steps=NUM_STEPS)
    while steps_done(client, job_id) < 6:
        time.sleep(0.05)
    assert platform.stop() == 0
    platform.start()
    assert _digest(platform, client, job_id) == unbroken
