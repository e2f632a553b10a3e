"""Tenants, projects and keys on the wire."""

from typing import Literal

from pydantic import BaseModel, Field

from core.contracts import Contract


class TenantCreate(Contract):
    """The body that makes a tenant."""

    name: str = Field(description="1 to 63 of a-z, 0-9, '-' and '_', the first and last a letter or digit.")


class ProjectCreate(Contract):
    """The body that makes a project."""

    name: str = Field(description="As a tenant's; it stands in the names of the project's adapters.")


class KeyCreate(Contract):
    """The body that makes a key."""

    name: str = Field(min_length=1, max_length=64, description="What tells this key from the project's others.")


class TenantObject(BaseModel):
    """An organisation."""

    id: str
    object: Literal["tenant"] = "tenant"
    name: str
    created_at: int


class ProjectObject(BaseModel):
    """A business line of a tenant."""

    id: str
    object: Literal["project"] = "project"
    tenant: str
    name: str
    created_at: int


class KeyObject(BaseModel):
    """A key; `api_key` only in the answer that makes it."""

    id: str
    object: Literal["api_key"] = "api_key"
    project: str
    name: str
    hint: str
    created_at: int
    revoked_at: int | None
    api_key: str | None = None
