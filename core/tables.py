"""The tables. SQL is the only truth; every row that belongs to a tenant says so, and every query is scoped by it (`core.scope`)."""

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, Integer, MetaData, String, Text, UniqueConstraint
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from core.clock import now_s

Json = JSON().with_variant(JSONB(), "postgresql")
# SQLite only autoincrements INTEGER PRIMARY KEY.
AutoBigInt = BigInteger().with_variant(Integer(), "sqlite")


class Base(DeclarativeBase):
    """Declarative base with constraint names that migrations can refer to."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s", "uq": "uq_%(table_name)s_%(column_0_N_name)s", "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s",
        }
    )  # fmt: skip


class Tenant(Base):
    """An organisation."""

    __tablename__ = "tenants"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[float] = mapped_column(Float, default=now_s)


class Project(Base):
    """A business line of a tenant."""

    __tablename__ = "projects"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float] = mapped_column(Float, default=now_s)


class ApiKey(Base):
    """A key of a project. Only its SHA-256 is kept: keys carry 256 random bits, so no slow hash is needed."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), index=True)
    name: Mapped[str] = mapped_column(String(64))
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    hint: Mapped[str] = mapped_column(String(16), doc="First characters, to tell keys apart.")
    created_at: Mapped[float] = mapped_column(Float, default=now_s)
    revoked_at: Mapped[float | None] = mapped_column(Float)


class File(Base):
    """An uploaded file; its bytes are a content-addressed blob of the object store."""

    __tablename__ = "files"
    __table_args__ = (Index("ix_files_scope", "project_id", "created_at"),)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    filename: Mapped[str] = mapped_column(String(255))
    purpose: Mapped[str] = mapped_column(String(32))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64), index=True)
    created_at: Mapped[float] = mapped_column(Float, default=now_s)
    expires_at: Mapped[float | None] = mapped_column(Float)
    deleted_at: Mapped[float | None] = mapped_column(Float)


class Job(Base):
    """A managed training run."""

    __tablename__ = "jobs"
    __table_args__ = (Index("ix_jobs_scope", "project_id", "created_at"), Index("ix_jobs_status", "status"))
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    status: Mapped[str] = mapped_column(String(32))
    training_file_id: Mapped[str] = mapped_column(ForeignKey("files.id"))
    validation_file_id: Mapped[str | None] = mapped_column(ForeignKey("files.id"))
    suffix: Mapped[str | None] = mapped_column(String(64))
    spec: Mapped[dict[str, Any]] = mapped_column(Json, doc="core.contracts.JobSpec")
    request_metadata: Mapped[dict[str, str]] = mapped_column(Json, default=dict)
    idempotency_key: Mapped[str | None] = mapped_column(
        String(128), unique=True, doc="Project and digest of a request that a client may retry."
    )
    created_at: Mapped[float] = mapped_column(Float, default=now_s)
    started_at: Mapped[float | None] = mapped_column(Float)
    finished_at: Mapped[float | None] = mapped_column(Float)
    estimated_finish: Mapped[float | None] = mapped_column(Float)
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    pause_requested: Mapped[bool] = mapped_column(default=False)
    step: Mapped[int] = mapped_column(Integer, default=0, doc="Optimizer steps done.")
    num_steps: Mapped[int | None] = mapped_column(Integer, doc="Optimizer steps in all, known after validation.")
    trained_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    num_deaths: Mapped[int] = mapped_column(Integer, default=0, doc="Holders that died on this job.")
    report: Mapped[dict[str, Any] | None] = mapped_column(Json, doc="What validation found in the files.")
    error_code: Mapped[str | None] = mapped_column(String(64))
    error_message: Mapped[str | None] = mapped_column(Text)
    error_param: Mapped[str | None] = mapped_column(String(128))
    adapter_version_id: Mapped[str | None] = mapped_column(ForeignKey("adapter_versions.id", use_alter=True))


class Event(Base):
    """Something that happened to a job, in order."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_job", "job_id", "seq"),)
    seq: Mapped[int] = mapped_column(AutoBigInt, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    created_at: Mapped[float] = mapped_column(Float, default=now_s)
    level: Mapped[str] = mapped_column(String(8))
    type: Mapped[str] = mapped_column(String(16))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)


class Metric(Base):
    """The numbers of one optimizer step of a job; a step that is done again after a crash replaces its row."""

    __tablename__ = "metrics"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    created_at: Mapped[float] = mapped_column(Float, default=now_s)
    values: Mapped[dict[str, float]] = mapped_column(Json)


class Checkpoint(Base):
    """A point that a job can resume from, and an adapter version that can be served."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("job_id", "step"),)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    step: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[float] = mapped_column(Float, default=now_s)
    adapter_version_id: Mapped[str] = mapped_column(ForeignKey("adapter_versions.id"))
    state_key: Mapped[str | None] = mapped_column(String(255), doc="Object store key of the trainer's state; None once pruned.")
    metrics: Mapped[dict[str, float]] = mapped_column(Json, default=dict)


class Adapter(Base):
    """A named line of adapter versions of a project."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("project_id", "name"),)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(64))
    base_model: Mapped[str] = mapped_column(String(128))
    created_at: Mapped[float] = mapped_column(Float, default=now_s)


class AdapterVersion(Base):
    """An immutable adapter, named by the digest of its manifest; `lineage` says where it came from."""

    __tablename__ = "adapter_versions"
    __table_args__ = (UniqueConstraint("adapter_id", "number"), UniqueConstraint("adapter_id", "digest"))
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"))
    number: Mapped[int] = mapped_column(Integer)
    digest: Mapped[str] = mapped_column(String(64), index=True)
    num_bytes: Mapped[int] = mapped_column(BigInteger, doc="Sum of the files' sizes.")
    tar_sha256: Mapped[str] = mapped_column(String(64), doc="Of the tar that registry.download streams, for clients to check.")
    kind: Mapped[str] = mapped_column(String(16), doc="final or checkpoint")
    created_at: Mapped[float] = mapped_column(Float, default=now_s)
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), index=True)
    lineage: Mapped[dict[str, Any]] = mapped_column(Json)


class Alias(Base):
    """A movable name of a version."""

    __tablename__ = "aliases"
    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    version_id: Mapped[str] = mapped_column(ForeignKey("adapter_versions.id"))
    updated_at: Mapped[float] = mapped_column(Float, default=now_s)


class Lease(Base):
    """Who may write for a resource now. `token` only grows; a write with an older one is refused."""

    __tablename__ = "leases"
    resource: Mapped[str] = mapped_column(String(128), primary_key=True)
    holder: Mapped[str] = mapped_column(String(128))
    token: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[float] = mapped_column(Float)


class Usage(Base):
    """Counters per key, model and day (UTC, ISO date)."""

    __tablename__ = "usage"
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    api_key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"), primary_key=True)
    model: Mapped[str] = mapped_column(String(255), primary_key=True)
    day: Mapped[str] = mapped_column(String(10), primary_key=True)
    num_requests: Mapped[int] = mapped_column(BigInteger, default=0)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    completion_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
