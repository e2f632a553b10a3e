"""Adapters on the wire."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from core.contracts import Contract


class AdapterObject(BaseModel):
    """A named line of versions."""

    id: str
    object: Literal["adapter"] = "adapter"
    name: str
    model: str = Field(description="What an inference request names: the alias prod, else the newest final version.")
    base_model: str
    created_at: int
    num_versions: int
    aliases: dict[str, int] = Field(description="Version number by alias.")


class VersionObject(BaseModel):
    """An immutable version."""

    id: str
    object: Literal["adapter.version"] = "adapter.version"
    adapter: str
    number: int
    digest: str = Field(description="SHA-256 of the manifest; names the content.")
    model: str = Field(description="Immutable name for inference requests.")
    kind: Literal["final", "checkpoint"]
    bytes: int
    created_at: int
    job_id: str | None
    aliases: list[str]
    tar_sha256: str = Field(description="Of the tar that /content answers.")
    lineage: dict[str, Any] = Field(description="Job, files' and base's digests, settings, code revision.")


class AliasMove(Contract):
    """The body that moves an alias."""

    version: str | int = Field(description="Number, digest or digest prefix of at least 12 digits, or another alias.")


class AliasObject(BaseModel):
    """An alias and what it means now."""

    object: Literal["adapter.alias"] = "adapter.alias"
    name: str
    adapter: str
    version: int
    digest: str
    updated_at: int


class AliasDeleted(BaseModel):
    """What a removal answers."""

    object: Literal["adapter.alias"] = "adapter.alias"
    name: str
    deleted: Literal[True] = True
