"""Identifiers: a prefix that says what it is, and 128 random bits."""

import secrets
from typing import Literal

Prefix = Literal["tenant", "proj", "key", "file", "ftjob", "ftevent", "ftckpt", "adapter", "av", "chatcmpl", "cmpl", "req"]


def new_id(prefix: Prefix) -> str:
    """Returns e.g. `ftjob-4f1c…` (32 hex digits): unguessable, sortable by nothing."""
    return f"{prefix}-{secrets.token_hex(16)}"
