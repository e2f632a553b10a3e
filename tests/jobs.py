"""Jobs in a real database over a real local object store, run by a scripted engine."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import select

from core.contracts import JobSpec, JobStatus
from core.db import get_engine, session_scope
from core.events import add_event
from core.ids import new_id
from core.settings import get_settings
from core.tables import AdapterVersion, Base, Event, File, Job, Metric, Project, Tenant
from registry.store import open_store
from tests.scripted_engine import BASE, ScriptedEngine
from workers.context import Context, TaskName
from workers.runner import run_job
from workers.validate import validate_job

GRADER = {
    "type": "multi",
    "graders": {
        "exact": {
            "type": "string_check", "name": "exact", "input": "{{sample.output_text}}", "reference": "{{item.answer}}", "operation": "eq",
        },
        "near": {
            "type": "text_similarity", "name": "near", "input": "{{sample.output_text}}", "reference": "{{item.answer}}",
            "evaluation_metric": "fuzzy_match",
        },
    },
    "calculate_output": "0.8 * exact + 0.2 * near",
}  # fmt: skip


def jsonl(num_rows: int, prefix: str = "Question") -> bytes:
    """A valid training file."""
    rows = ({"messages": [{"role": "user", "content": f"{prefix} {i}?"}], "answer": "yes"} for i in range(num_rows))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@dataclass
class Platform:
    """A database, a store, an engine and a worker's context."""

    folder: Path
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    sent: list[tuple[TaskName, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        Base.metadata.create_all(get_engine())
        self.context = Context(
            get_settings(),
            open_store(),
            self.engine.connect,
            lambda task, job_id: self.sent.append((task, job_id)),
            engine_wait_s=0.3,
            engine_poll_s=0.01,
        )
        with session_scope() as session:
            session.add(Tenant(id="tenant-1", name="acme"))
            session.flush()
            session.add(Project(id="proj-1", tenant_id="tenant-1", name="billing"))

    def submit(self, training: bytes | None = None, validation: bytes | None = None, *, suffix: str | None = None, **spec: object) -> str:
        """Stores a job as the API does."""
        files = [self._file(data) for data in (training or jsonl(6), validation) if data is not None]
        grader, hyperparameters = spec.pop("grader", GRADER), spec.pop("hyperparameters", {"batch_size": 2})
        algorithm = spec.get("algorithm", {})
        supervised = isinstance(algorithm, dict) and algorithm.get("name") in ("sft", "dpo")
        method = {"supervised": {}} if supervised else {"reinforcement": {"grader": grader}}
        for settings in method.values():
            settings["hyperparameters"] = hyperparameters
        defaults = {
            "base_model": BASE.name, "training_file_sha256": files[0][1], "validation_file_sha256": files[1][1] if validation else None,
            "seed": 7, **method, "lora": {"rank": 2, "target_modules": ["q_proj", "up_proj"]},
            "algorithm": {"group_size": 4}, "rollout": {"max_tokens": 20}, "checkpoint_interval": 2, "num_steps": 7,
        }  # fmt: skip
        job_spec = JobSpec.model_validate(defaults | spec)
        with session_scope() as session:
            job = Job(
                id=new_id("ftjob"), tenant_id="tenant-1", project_id="proj-1", status=JobStatus.VALIDATING_FILES,
                training_file_id=files[0][0], validation_file_id=files[1][0] if validation else None, suffix=suffix,
                spec=job_spec.model_dump(mode="json"),
            )  # fmt: skip
            session.add(job)
            session.flush()
            add_event(session, job.id, "Job created.")
            return job.id

    def queued(self, **spec: object) -> str:
        """A job whose files are validated."""
        job_id = self.submit(**spec)  # pyright: ignore[reportArgumentType]
        assert validate_job(self.context, job_id) == JobStatus.QUEUED
        return job_id

    def run(self, job_id: str) -> JobStatus | None:
        return run_job(self.context, job_id)

    def job(self, job_id: str) -> Job:
        with session_scope(readonly=True) as session:
            return session.get_one(Job, job_id)

    def events(self, job_id: str) -> list[Event]:
        with session_scope(readonly=True) as session:
            return list(session.scalars(select(Event).where(Event.job_id == job_id).order_by(Event.seq)))

    def metrics(self, job_id: str) -> dict[int, dict[str, float]]:
        with session_scope(readonly=True) as session:
            return {m.step: m.values for m in session.scalars(select(Metric).where(Metric.job_id == job_id).order_by(Metric.step))}

    def digest(self, job_id: str) -> str:
        """Digest of the adapter that the job made."""
        with session_scope(readonly=True) as session:
            return session.get_one(AdapterVersion, session.get_one(Job, job_id).adapter_version_id).digest

    def at(self, verb: str, nth: int, do: Callable[[], None]) -> None:
        """Does something just before the nth call (1 for the first) of a verb from now on."""
        count = 0

        def on_call(name: str, _: str | None) -> None:
            nonlocal count
            count += name == verb
            if name == verb and count == nth:
                do()

        self.engine.on_call = on_call

    def _file(self, data: bytes) -> tuple[str, str]:
        sha256 = self.context.store.put_blob(data)
        with session_scope() as session:
            row = File(
                id=new_id("file"), tenant_id="tenant-1", project_id="proj-1", filename="rows.jsonl", purpose="fine-tune",
                num_bytes=len(data), sha256=sha256,
            )  # fmt: skip
            session.add(row)
            return row.id, sha256
