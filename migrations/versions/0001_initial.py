"""All tables of the first release.

Revision ID: 0001
Revises:
Create Date: 2026-11-30
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")

revision: str = "0001"
down_revision: str | None = None
branch_labels: None = None
depends_on: None = None


def upgrade() -> None:
    op.create_table(
        "leases",
        sa.Column("resource", sa.String(length=128), nullable=False),
        sa.Column("holder", sa.String(length=128), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("resource", name=op.f("pk_leases")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_projects_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_projects_tenant_id_name")),
    )
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(length=128), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_adapters_project_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_adapters_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapters")),
        sa.UniqueConstraint("project_id", "name", name=op.f("uq_adapters_project_id_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("hint", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_api_keys_project_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("sha256", name=op.f("uq_api_keys_sha256")),
    )
    op.create_index(op.f("ix_api_keys_project_id"), "api_keys", ["project_id"])
    op.create_table(
        "files",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(length=255), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("deleted_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_files_project_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_files_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index("ix_files_scope", "files", ["project_id", "created_at"])
    op.create_index(op.f("ix_files_sha256"), "files", ["sha256"])
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=32), nullable=False),
        sa.Column("training_file_id", sa.String(length=64), nullable=False),
        sa.Column("validation_file_id", sa.String(length=64), nullable=True),
        sa.Column("suffix", sa.String(length=64), nullable=True),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("request_metadata", JSON, nullable=False),
        sa.Column("idempotency_key", sa.String(length=128), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("estimated_finish", sa.Float(), nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("pause_requested", sa.Boolean(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("num_steps", sa.Integer(), nullable=True),
        sa.Column("trained_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_deaths", sa.Integer(), nullable=False),
        sa.Column("report", JSON, nullable=True),
        sa.Column("error_code", sa.String(length=64), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("error_param", sa.String(length=128), nullable=True),
        sa.Column("adapter_version_id", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["adapter_version_id"], ["adapter_versions.id"], name=op.f("fk_jobs_adapter_version_id"), use_alter=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_jobs_project_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_jobs_tenant_id")),
        sa.ForeignKeyConstraint(["training_file_id"], ["files.id"], name=op.f("fk_jobs_training_file_id")),
        sa.ForeignKeyConstraint(["validation_file_id"], ["files.id"], name=op.f("fk_jobs_validation_file_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_jobs_idempotency_key")),
    )
    op.create_index("ix_jobs_scope", "jobs", ["project_id", "created_at"])
    op.create_index("ix_jobs_status", "jobs", ["status"])
    op.create_table(
        "usage",
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("api_key_id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("day", sa.String(length=10), nullable=False),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_keys.id"], name=op.f("fk_usage_api_key_id")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_usage_project_id")),
        sa.PrimaryKeyConstraint("project_id", "api_key_id", "model", "day", name=op.f("pk_usage")),
    )
    op.create_table(
        "adapter_versions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("tar_sha256", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=True),
        sa.Column("lineage", JSON, nullable=False),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_adapter_versions_adapter_id")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_adapter_versions_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_versions")),
        sa.UniqueConstraint("adapter_id", "digest", name=op.f("uq_adapter_versions_adapter_id_digest")),
        sa.UniqueConstraint("adapter_id", "number", name=op.f("uq_adapter_versions_adapter_id_number")),
    )
    op.create_index(op.f("ix_adapter_versions_digest"), "adapter_versions", ["digest"])
    op.create_index(op.f("ix_adapter_versions_job_id"), "adapter_versions", ["job_id"])
    # Jobs and versions refer to each other. SQLite took the constraint with the table; others want it once both tables are there.
    if op.get_context().dialect.supports_alter:
        op.create_foreign_key(op.f("fk_jobs_adapter_version_id"), "jobs", "adapter_versions", ["adapter_version_id"], ["id"])
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("level", sa.String(length=8), nullable=False),
        sa.Column("type", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", JSON, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_events")),
        sa.UniqueConstraint("id", name=op.f("uq_events_id")),
    )
    op.create_index("ix_events_job", "events", ["job_id", "seq"])
    op.create_table(
        "metrics",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("values", JSON, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_metrics_job_id")),
        sa.PrimaryKeyConstraint("job_id", "step", name=op.f("pk_metrics")),
    )
    op.create_table(
        "aliases",
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("version_id", sa.String(length=64), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_aliases_adapter_id")),
        sa.ForeignKeyConstraint(["version_id"], ["adapter_versions.id"], name=op.f("fk_aliases_version_id")),
        sa.PrimaryKeyConstraint("adapter_id", "name", name=op.f("pk_aliases")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("adapter_version_id", sa.String(length=64), nullable=False),
        sa.Column("state_key", sa.String(length=255), nullable=True),
        sa.Column("metrics", JSON, nullable=False),
        sa.ForeignKeyConstraint(["adapter_version_id"], ["adapter_versions.id"], name=op.f("fk_checkpoints_adapter_version_id")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_checkpoints_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("job_id", "step", name=op.f("uq_checkpoints_job_id_step")),
    )


def downgrade() -> None:
    if op.get_context().dialect.supports_alter:
        op.drop_constraint(op.f("fk_jobs_adapter_version_id"), "jobs", type_="foreignkey")
    for table in (
        "checkpoints",
        "aliases",
        "metrics",
        "events",
        "adapter_versions",
        "usage",
        "jobs",
        "files",
        "api_keys",
        "adapters",
        "projects",
        "tenants",
        "leases",
    ):
        op.drop_table(table)
