"""The base model is made ready in a process of its own: the supervisor stays small and never loads torch."""

import os
import sys
import threading

from cli.process import spawn, stop, tail
from cli.supervisor import PartFailed
from core.settings import Settings

_GRACE_S = 5.0


def convert_in_child(settings: Settings, stopping: threading.Event | None = None) -> None:
    """Runs the conversion; gives it up when `stopping` is set (the next start does it again).

    Raises:
        PartFailed: it did not end well; the message ends with what it said.
    """
    log = settings.data_dir / "logs" / "base-model.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        child = spawn([sys.executable, "-P", "-m", "engine.base_model"], env=os.environ, log=file)
    stopping = stopping or threading.Event()
    try:
        while child.poll() is None:
            if stopping.wait(0.1):
                return
    finally:
        stop(child, grace_s=_GRACE_S)
    if child.returncode != 0:
        raise PartFailed(
            f"The base model could not be made ready in {settings.resolved_base_model_path} (exit {child.returncode}):\n{tail(log, 6)}",
            param="ESPALIER_BASE_MODEL_PATH",
        )
