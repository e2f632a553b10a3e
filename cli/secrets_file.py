"""Secrets in the data folder: readable by their owner only."""

import os
from collections.abc import Callable
from pathlib import Path


def read_or_create(path: Path, make: Callable[[], str]) -> str:
    """The file's text; at the first call it is made, with mode 600 from its first byte on."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        secret = make()
        write_secret(path, secret)
        return secret


def write_secret(path: Path, secret: str) -> None:
    """Writes (or replaces) a secret file of mode 600, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
    temporary.replace(path)
