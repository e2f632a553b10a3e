"""Best step, early stop, warm-up, curriculum, sft and dpo: a job that was killed on the way ends as an unbroken one."""

import json

import pytest

from core.contracts import JobStatus
from core.db import session_scope
from core.tables import AdapterVersion
from tests.crash.deaths import killed_at, wait_for_expiry
from tests.jobs import Platform, jsonl

HELD_OUT = {"validation": jsonl(3, "Held out"), "hyperparameters": {"batch_size": 2, "eval_interval": 2}, "num_steps": 8}


def ending(platform: Platform, job_id: str) -> tuple[str, int, dict[int, float]]:
    """(digest of the adapter, step that made it, held-out scores by step)."""
    job, metrics = platform.job(job_id), platform.metrics(job_id)
    with session_scope(readonly=True) as session:
        version = session.get_one(AdapterVersion, job.adapter_version_id)
        assert version.kind == "final"
        scores = {step: values["eval_reward_mean"] for step, values in metrics.items() if "eval_reward_mean" in values}
        return version.digest, version.lineage["step"], scores


def test_best_step_is_published_also_over_a_kill(platform: Platform) -> None:
    spec = HELD_OUT | {"evaluation": {"publish": "best"}, "checkpoint_interval": 3}
    for seed in range(20):
        whole = platform.queued(seed=seed, **spec)
        assert platform.run(whole) == JobStatus.SUCCEEDED
        digest, step, scores = ending(platform, whole)
        trained = {s: score for s, score in scores.items() if s}
        assert step == min(s for s, score in trained.items() if score == max(trained.values()))
        assert platform.metrics(whole)[8]["best_step"] == step
        if step in (2, 4):
            break
    else:
        raise AssertionError("no seed has its best step in the middle")
    assert any(event.message.startswith(f"Step {step} is the best so far") for event in platform.events(whole))
    broken = platform.queued(seed=seed, **spec)
    killed_at(platform, broken, "optim_step", 6)
    wait_for_expiry(broken)
    assert platform.run(broken) == JobStatus.SUCCEEDED
    assert ending(platform, broken) == (digest, step, scores)


def test_job_that_stops_improving_ends_early_also_over_a_kill(platform: Platform) -> None:
    spec = HELD_OUT | {"evaluation": {"early_stop_patience": 1, "min_improvement": 1.0}, "num_steps": 50}
    whole, broken = platform.queued(**spec), platform.queued(**spec)
    assert platform.run(whole) == JobStatus.SUCCEEDED
    assert platform.job(whole).step == 2, "no evaluation gains 1.0 over the start's"
    assert any(event.message.startswith("Stopped after step 2: 1 evaluations") for event in platform.events(whole))
    killed_at(platform, broken, "save", 2)
    wait_for_expiry(broken)
    assert platform.run(broken) == JobStatus.SUCCEEDED
    assert platform.digest(broken) == platform.digest(whole)


def pairs(num_rows: int) -> bytes:
    return b"".join(
        json.dumps(
            {
                "input": {"messages": [{"role": "user", "content": f"Question {i}?"}]},
                "preferred_output": [{"role": "assistant", "content": f"yes {i}"}],
                "non_preferred_output": [{"role": "assistant", "content": "no"}],
            }
        ).encode() + b"\n"
        for i in range(num_rows)
    )  # fmt: skip


def answers(num_rows: int) -> bytes:
    rows = ([{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": f"yes {i}"}] for i in range(num_rows))
    return b"".join(json.dumps({"messages": messages}).encode() + b"\n" for messages in rows)


@pytest.mark.parametrize(
    "spec",
    [
        {"warm_up": {"steps": 3}, "curriculum": {"mode": "pass_rate", "easy_above": 0.6, "hopeless_below": 0.4}},
        {"algorithm": {"name": "dapo", "updates_per_rollout": 2}, "num_steps": 5},
        {"algorithm": {"name": "sft"}, "training": answers(6), "validation": answers(2)},
        {"algorithm": {"name": "dpo"}, "training": pairs(6)},
    ],
    ids=["warm-up and curriculum", "dapo", "sft", "dpo"],
)
def test_every_kind_of_job_survives_a_kill(platform: Platform, spec: dict[str, object]) -> None:
    whole, broken = platform.queued(**spec), platform.queued(**spec)
    assert platform.run(whole) == JobStatus.SUCCEEDED
    killed_at(platform, broken, "optim_step", 4)
    wait_for_expiry(broken)
    assert platform.run(broken) == JobStatus.SUCCEEDED
    assert platform.digest(broken) == platform.digest(whole)
    drop = {"rollout_s", "grade_s", "train_s", "step_s", "tokens_per_s"}
    told = [{step: {k: v for k, v in m.items() if k not in drop} for step, m in platform.metrics(i).items()} for i in (whole, broken)]
    assert told[0] == told[1]
