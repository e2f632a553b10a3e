"""Rows that many tests need."""

from sqlalchemy.orm import Session

from core.contracts.job import JobStatus
from core.ids import new_id
from core.scope import Scope
from core.tables import ApiKey, File, Job, Project, Tenant


def add_project(session: Session, tenant: str, project: str) -> Scope:
    """A tenant with one project and one key; returns what the key opens."""
    tenant_id, project_id, key_id = new_id("tenant"), new_id("proj"), new_id("key")
    session.add(Tenant(id=tenant_id, name=tenant))
    session.flush()
    session.add(Project(id=project_id, tenant_id=tenant_id, name=project))
    session.flush()
    session.add(
        ApiKey(id=key_id, tenant_id=tenant_id, project_id=project_id, name="test", sha256=key_id.ljust(64, "0")[:64], hint="sk-esp-test")
    )
    session.flush()
    return Scope(tenant_id=tenant_id, project_id=project_id, project=project, api_key_id=key_id)


def add_job(session: Session, scope: Scope, *, status: JobStatus = JobStatus.VALIDATING_FILES) -> Job:
    """A job over an uploaded file, in any state."""
    file = File(
        id=new_id("file"), tenant_id=scope.tenant_id, project_id=scope.project_id, filename="train.jsonl", purpose="fine-tune", num_bytes=2,
        sha256="0" * 64,
    )  # fmt: skip
    session.add(file)
    session.flush()
    job = Job(id=new_id("ftjob"), tenant_id=scope.tenant_id, project_id=scope.project_id, status=status, training_file_id=file.id, spec={})
    session.add(job)
    session.flush()
    return job
