"""Files on the wire."""

from typing import Literal

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field

Purpose = Literal["fine-tune", "batch", "user_data", "evals", "assistants", "vision"]


class FileCreate(BaseModel):
    """The form that uploads a file."""

    model_config = ConfigDict(extra="forbid")

    file: UploadFile = Field(description="The content, with its name.")
    purpose: Purpose = Field(description="What it is for; training and validation files are fine-tune.")
    expires_anchor: Literal["created_at"] | None = Field(
        default=None, alias="expires_after[anchor]", description="What the expiry counts from."
    )
    expires_seconds: int | None = Field(
        default=None, ge=3600, le=2_592_000, alias="expires_after[seconds]", description="Seconds until it is gone; default never."
    )


class FileObject(BaseModel):
    """An uploaded file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"] = "processed"
    status_details: str | None = None


class FileDeleted(BaseModel):
    """What a deletion answers."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
