"""One `espalier up` a data folder, and what it says about itself to others."""

import fcntl
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.errors import Conflict


def _lock_path(data_dir: Path) -> Path:
    return data_dir / "up.lock"


def _status_path(data_dir: Path) -> Path:
    return data_dir / "status.json"


@contextmanager
def data_dir_lock(data_dir: Path) -> Generator[None]:
    """Holds the data folder; the kernel lets go of it however this process ends.

    Raises:
        Conflict: another `espalier up` holds it; the message has its pid.
    """
    # Training data, adapters and keys lie there.
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(_lock_path(data_dir), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(descriptor, 32).decode() or "unknown"
            raise Conflict(
                f"espalier up already runs on {data_dir} (pid {pid}). Stop it, or give this one "
                "another folder with --data-dir and other ports.",
                param="data_dir", code="data_dir_in_use",
            ) from None  # fmt: skip
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
        _status_path(data_dir).unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def is_held(data_dir: Path) -> bool:
    """Whether an `espalier up` runs on the data folder."""
    path = _lock_path(data_dir)
    if not path.exists():
        return False
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def write_status(data_dir: Path, status: Mapping[str, Any]) -> None:
    """Publishes what runs, for `espalier demo` and scripts; atomically."""
    path = _status_path(data_dir)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(status, indent=1))
    temporary.replace(path)


def read_status(data_dir: Path) -> dict[str, Any] | None:
    """What the running `espalier up` published last; None if none runs or it has published nothing yet."""
    if not is_held(data_dir) or not _status_path(data_dir).exists():
        return None
    return json.loads(_status_path(data_dir).read_text())
