"""Fine-tuning jobs, by the stock client."""

from typing import Any

import openai
import pytest

from core.contracts import JobStatus
from core.db import session_scope
from core.ids import new_id
from core.jobs import transition
from core.tables import Checkpoint, Job
from tests.live_api import BASE, GRADER, METHOD, LiveApi, spec_of, version_id

SETTINGS: dict[str, Any] = {
    "lora": {"rank": 4, "alpha": 8}, "algorithm": {"group_size": 4, "beta": 0.02}, "rollout": {"max_tokens": 12},
    "optimizer": {"learning_rate": 3e-3}, "checkpoint_interval": 4, "num_steps": 6,
}  # fmt: skip


def create(api: LiveApi, client: openai.OpenAI, **changes: Any) -> Any:
    return client.fine_tuning.jobs.create(**{"model": BASE, "training_file": api.upload(client), "method": METHOD, **changes})


def move(job_id: str, *statuses: JobStatus) -> None:
    with session_scope() as session:
        job = session.get(Job, job_id)
        assert job is not None
        for status in statuses:
            transition(session, job, status, f"now {status}")


def test_a_job_is_stored_as_asked(api: LiveApi) -> None:
    client = api.client()
    job = create(api, client, suffix="tone", seed=7, metadata={"team": "a"}, extra_body=SETTINGS)
    assert (job.object, job.status, job.model, job.seed) == ("fine_tuning.job", "validating_files", BASE, 7)
    assert job.method.reinforcement.grader.model_dump() == GRADER
    assert job.method.reinforcement.hyperparameters.batch_size == 4
    assert (job.metadata, job.error, job.fine_tuned_model, job.trained_tokens, job.result_files) == ({"team": "a"}, None, None, None, [])
    assert client.fine_tuning.jobs.retrieve(job.id) == job
    spec = spec_of(job.id)
    assert (spec.lora.rank, spec.group_size, spec.rollout.max_tokens, spec.learning_rate, spec.num_steps) == (4, 4, 12, 3e-3, 6)
    assert client.fine_tuning.jobs.list_events(job.id).data[0].message.startswith("Job created")


def test_a_seed_is_chosen_and_kept(api: LiveApi) -> None:
    client = api.client()
    jobs = [create(api, client) for _ in range(2)]
    assert jobs[0].seed != jobs[1].seed
    assert client.fine_tuning.jobs.retrieve(jobs[0].id).seed == jobs[0].seed == spec_of(jobs[0].id).seed


def test_jobs_are_listed_and_filtered(api: LiveApi) -> None:
    client = api.client()
    ids = [create(api, client, metadata={"n": str(n)}).id for n in range(3)]
    assert [job.id for job in client.fine_tuning.jobs.list(limit=2)] == ids[::-1]
    assert [job.id for job in client.fine_tuning.jobs.list(metadata={"n": "1"})] == [ids[1]]
    assert api.client("other").fine_tuning.jobs.list().data == []


def test_a_retried_submission_makes_one_job(api: LiveApi) -> None:
    client = api.client()
    file_id = api.upload(client)
    first = create(api, client, training_file=file_id)
    retry = {"x-stainless-retry-count": "1"}
    assert create(api, client, training_file=file_id, extra_headers=retry).id == first.id
    on_purpose = create(api, client, training_file=file_id)
    assert on_purpose.id != first.id
    assert create(api, client, training_file=file_id, extra_headers=retry).id == on_purpose.id
    assert create(api, client, training_file=file_id, seed=1, extra_headers=retry).id not in (first.id, on_purpose.id)


def test_cancel_ends_what_waits_and_flags_what_runs(api: LiveApi) -> None:
    client = api.client()
    waiting, running = create(api, client), create(api, client)
    assert client.fine_tuning.jobs.cancel(waiting.id).status == "cancelled"
    assert client.fine_tuning.jobs.cancel(waiting.id).status == "cancelled"
    move(running.id, JobStatus.QUEUED, JobStatus.RUNNING)
    assert client.fine_tuning.jobs.cancel(running.id).status == "running"
    with session_scope(readonly=True) as session:
        row = session.get(Job, running.id)
        assert row is not None
        assert row.cancel_requested
    move(running.id, JobStatus.FAILED)
    with pytest.raises(openai.ConflictError) as caught:
        client.fine_tuning.jobs.cancel(running.id)
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_pause_and_resume(api: LiveApi) -> None:
    client = api.client()
    job = create(api, client)
    with pytest.raises(openai.ConflictError):
        client.fine_tuning.jobs.pause(job.id)
    move(job.id, JobStatus.QUEUED)
    assert client.fine_tuning.jobs.pause(job.id).status == "paused"
    assert client.fine_tuning.jobs.resume(job.id).status == "queued"
    move(job.id, JobStatus.RUNNING)
    assert client.fine_tuning.jobs.pause(job.id).status == "pausing"
    assert client.fine_tuning.jobs.resume(job.id).status == "running"
    with session_scope(readonly=True) as session:
        row = session.get(Job, job.id)
        assert row is not None
        assert not row.pause_requested


def test_checkpoints_and_the_finished_job_name_what_can_be_called(api: LiveApi) -> None:
    client = api.client()
    job = create(api, client, suffix="tone")
    digest = api.publish(job_id=job.id)
    with session_scope() as session:
        row = session.get(Job, job.id)
        assert row is not None
        row.adapter_version_id, row.trained_tokens = version_id(digest), 99
        session.add(
            Checkpoint(id=new_id("ftckpt"), job_id=job.id, step=5, adapter_version_id=version_id(digest), metrics={"reward_mean": 0.5})
        )
    move(job.id, JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.SUCCEEDED)
    done = client.fine_tuning.jobs.retrieve(job.id)
    assert done.fine_tuned_model == f"support/tone@{digest[:12]}"
    assert done.trained_tokens == 99
    assert done.finished_at is not None
    checkpoint = client.fine_tuning.jobs.checkpoints.list(job.id).data[0]
    assert (checkpoint.step_number, checkpoint.fine_tuned_model_checkpoint) == (5, done.fine_tuned_model)
    assert client.models.retrieve(done.fine_tuned_model).id == done.fine_tuned_model


def test_training_goes_on_from_an_adapter(api: LiveApi) -> None:
    client = api.client()
    digest = api.publish()
    for changes in ({"model": "support/tone"}, {"extra_body": {"start_from": f"support/tone@{digest[:12]}"}}):
        spec = spec_of(create(api, client, **changes).id)
        assert (spec.base_model, spec.start_from, spec.lora.rank, spec.lora.alpha) == (BASE, digest, 4, 8.0)
        assert set(spec.lora.target_modules) == {"q_proj", "v_proj", "down_proj"}
    with pytest.raises(openai.BadRequestError) as caught:
        create(api, client, model="support/tone", extra_body={"lora": {"rank": 8}})
    assert caught.value.param == "lora.rank"


def test_every_setting_of_the_project_is_stored_and_shown(api: LiveApi) -> None:
    client = api.client()
    own: dict[str, Any] = {
        "algorithm": {"name": "dapo", "updates_per_rollout": 2}, "warm_up": {"steps": 3, "answer_field": "reference"},
        "curriculum": {"mode": "difficulty", "ramp": 0.25}, "evaluation": {"publish": "best", "early_stop_patience": 2}, "num_steps": 9,
    }  # fmt: skip
    job = create(api, client, validation_file=api.upload(client), extra_body=own)
    shown = client.fine_tuning.jobs.retrieve(job.id).model_dump()
    for name in ("algorithm", "warm_up", "curriculum", "evaluation"):
        assert own[name].items() <= shown[name].items()
        assert getattr(spec_of(job.id), name).model_dump(mode="json") == shown[name]
    assert (shown["algorithm"]["clip_high"], shown["algorithm"]["loss_aggregation"]) == (0.28, "token"), "dapo's own defaults"
    assert spec_of(job.id).total_steps(1) == 3 + 9
    assert shown["guidance"] == []


def test_supervised_and_dpo_are_their_own_methods(api: LiveApi) -> None:
    client = api.client()
    job = create(api, client, method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 3}}})
    assert (job.method.type, job.method.supervised.hyperparameters.n_epochs, job.hyperparameters.batch_size) == ("supervised", 2, 3)
    spec = spec_of(job.id)
    assert (spec.algorithm.name, spec.num_epochs, spec.prompts_per_step(9), spec.reinforcement) == ("sft", 2, 3, None)
    for changes in (dpo(beta=0.3), dpo(algorithm={"beta": 0.3}), dpo(beta=0.3, algorithm={"beta": 0.3, "name": "dpo"})):
        job = create(api, client, **changes)
        assert (job.method.type, job.method.dpo.hyperparameters.beta) == ("dpo", 0.3)
        assert spec_of(job.id).algorithm.beta == 0.3


def test_a_new_adapter_is_stacked_over_one(api: LiveApi) -> None:
    client = api.client()
    api.publish()
    own = {"start_mode": "stack", "lora": {"rank": 2, "alpha": 4, "target_modules": ["q_proj"]}, "start_learning_rate": 1e-5}
    spec = spec_of(create(api, client, model="support/tone", extra_body=own).id)
    assert spec.start_lora is not None
    assert (spec.lora.rank, spec.start_lora.rank, spec.start_lora.alpha, spec.start_learning_rate) == (2, 4, 8.0, 1e-5)
    with pytest.raises(openai.BadRequestError) as caught:
        create(api, client, model="support/tone", extra_body={**own, "lora": {"rank": 512}})
    assert caught.value.param == "lora.rank"


def dpo(algorithm: dict[str, Any] | None = None, **hyperparameters: Any) -> dict[str, Any]:
    method = {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
    return {"method": method, "extra_body": {"algorithm": algorithm}} if algorithm else {"method": method}


def reinforcement(**changes: Any) -> Any:
    return {"type": "reinforcement", "reinforcement": {"grader": GRADER, **changes}}


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"training_file": "file-nope"}, 404, "training_file"),
        ({"validation_file": "file-nope"}, 404, "validation_file"),
        ({"model": "gpt-5"}, 404, "model"),
        ({"extra_body": {"start_from": "support/nope"}}, 404, "start_from"),
        ({"method": {"type": "oracle"}}, 400, "method.type"),
        ({"method": {"type": "supervised", "dpo": {}}}, 400, "method.dpo"),
        ({"method": {"type": "supervised", "supervised": {"hyperparameters": {"beta": 1}}}}, 400, "method.supervised.hyperparameters.beta"),
        ({"method": {"type": "dpo"}, "extra_body": {"algorithm": {"name": "grpo"}}}, 400, "algorithm.name"),
        ({"extra_body": {"algorithm": {"name": "sft"}}}, 400, "algorithm.name"),
        ({"method": {"type": "dpo"}, "extra_body": {"algorithm": {"clip_low": 0.1}}}, 400, "algorithm.clip_low"),
        (dpo(beta=0.3, algorithm={"beta": 0.2}), 400, "method.dpo.hyperparameters.beta"),
        ({"method": {"type": "supervised"}, "extra_body": {"warm_up": {"steps": 3}}}, 400, "warm_up.steps"),
        ({"method": {"type": "supervised"}, "extra_body": {"curriculum": {"mode": "pass_rate"}}}, 400, "curriculum.mode"),
        ({"method": openai.omit}, 400, "method"),
        ({"method": {"type": "reinforcement"}}, 400, "method.reinforcement"),
        ({"method": reinforcement(grader={**GRADER, "operation": "is"})}, 400, "method.reinforcement.grader.operation"),
        ({"method": reinforcement(grader={**GRADER, "input": "{{sample.nope}}"})}, 400, "method.reinforcement.grader.input"),
        ({"method": reinforcement(grader={**GRADER, "type": "oracle"})}, 400, "method.reinforcement.grader"),
        ({"method": reinforcement(hyperparameters={"batch_size": 0})}, 400, "method.reinforcement.hyperparameters"),
        ({"method": reinforcement(hyperparameters={"batch_size": "x"})}, 400, "method.reinforcement.hyperparameters.batch_size"),
        ({"method": reinforcement(hyperparameters={"batchsize": 4})}, 400, "method.reinforcement.hyperparameters.batchsize"),
        ({"hyperparameters": {"n_epochs": 2}}, 400, "hyperparameters"),
        ({"suffix": "Not A Name"}, 400, "suffix"),
        ({"suffix": "x" * 65}, 400, "suffix"),
        ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata"),
        ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, 400, "integrations"),
        ({"extra_body": {"algorithm": {"group_size": 1}}}, 400, "algorithm"),
        ({"extra_body": {"algorithm": {"name": "ppo"}}}, 400, "algorithm.name"),
        ({"extra_body": {"algorithm": {"importance_mode": "reject"}}}, 400, "algorithm"),
        ({"extra_body": {"algorithm": {"name": "flowrl", "beta": 0.1}}}, 400, "algorithm"),
        ({"extra_body": {"lora": {"kind": "full"}}}, 400, "lora.kind"),
        ({"extra_body": {"curriculum": {"mode": "pass_rate", "hopeless_below": 0.9}}}, 400, "curriculum"),
        ({"extra_body": {"evaluation": {"publish": "best"}}}, 400, "evaluation.publish"),
        ({"extra_body": {"evaluation": {"early_stop_patience": 2}}}, 400, "evaluation.early_stop_patience"),
        ({"extra_body": {"start_mode": "stack"}}, 400, "start_mode"),
        ({"extra_body": {"start_learning_rate": 1e-5}}, 400, "start_learning_rate"),
        (
            {"extra_body": {"optimizer": {"learning_rate_groups": [{"learning_rate": 1, "part": "old"}]}}},
            400,
            "optimizer.learning_rate_groups.0.part",
        ),
        ({"extra_body": {"algorithm": {"share_backbone": False}}}, 400, "algorithm"),
        ({"extra_body": {"rollout": {"max_tokens": 4096}}}, 400, "rollout.max_tokens"),
        ({"extra_body": {"lora": {"target_modules": ["q_proj", "lm_head"]}}}, 400, "lora.target_modules.1"),
        ({"extra_body": {"learning_rate": 1}}, 400, "learning_rate"),
    ],
)
def test_a_refusal_names_field_and_reason(api: LiveApi, changes: dict[str, Any], status: int, param: str) -> None:
    client = api.client()
    with pytest.raises(openai.APIStatusError) as caught:
        create(api, client, **changes)
    assert (caught.value.status_code, caught.value.param) == (status, param), caught.value.message
    assert len(str(caught.value.body["message"])) > 20  # type: ignore[index]
    assert caught.value.request_id
    assert client.fine_tuning.jobs.list().data == []


def test_wrong_purpose_and_deleted_files_are_refused(api: LiveApi) -> None:
    client = api.client()
    wrong = client.files.create(file=("t.jsonl", b"{}"), purpose="user_data").id
    gone = api.upload(client)
    client.files.delete(gone)
    for file_id, kind in ((wrong, openai.BadRequestError), (gone, openai.NotFoundError)):
        with pytest.raises(kind) as caught:
            create(api, client, training_file=file_id)
        assert caught.value.param == "training_file"


def test_a_body_that_is_no_json_says_where(api: LiveApi) -> None:
    with api.http(api.key("acme")) as http:
        answer = http.post("/v1/fine_tuning/jobs", content=b'{"model": ', headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "not JSON" in answer.json()["error"]["message"]
