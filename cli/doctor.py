"""`espalier doctor`: what the platform needs of this machine, and what it found."""

import importlib.metadata
import json as jsonlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import psutil
from rich.console import Console
from rich.table import Table

from cli.commands import redis_binary
from cli.health import redis_answers, require_free_port
from cli.lock import is_held
from core.errors import EspalierError
from core.settings import Settings

MIN_MEMORY_BYTES = 4 * 2**30
MIN_DISK_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    what: str
    found: str
    ok: bool = True
    mend: str = ""


def run_doctor(settings: Settings, *, json: bool) -> int:
    """Prints the findings.

    Returns:
        0 if nothing stands in the way, else 1.
    """
    findings = list(examine(settings))
    ok = all(finding.ok for finding in findings)
    if json:
        print(jsonlib.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}))
        return 0 if ok else 1
    table = Table()
    for heading in ("", "what", "found", "mend"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row("[green]ok" if finding.ok else "[red]no", finding.what, finding.found, finding.mend)
    Console().print(table)
    return 0 if ok else 1


def examine(settings: Settings) -> Iterator[Finding]:
    """Looks at each thing in turn."""
    yield Finding("python", sys.version.split()[0], sys.version_info >= (3, 11), "use Python 3.11 or newer")
    yield from _torch(settings)
    cores = len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else os.cpu_count()
    yield Finding("threads", f"{settings.num_threads or cores} for the engine, of {cores} cores")
    memory = psutil.virtual_memory()
    found = f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}"
    yield Finding("memory", found, memory.available >= MIN_MEMORY_BYTES, "free some: base, adapters and a training batch want about 4 GiB")
    folder = settings.data_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    yield Finding("disk", f"{free / 2**30:.1f} GiB free at {folder}", free >= MIN_DISK_BYTES, "free some, or choose another --data-dir")
    yield _redis(settings)
    base = settings.resolved_base_model_path
    ready = (base / "config.json").exists()
    yield Finding("base model", f"{base}, {'ready' if ready else 'not there yet: `espalier up` makes it'}")
    yield from _ports(settings)


def _torch(settings: Settings) -> Iterator[Finding]:
    try:
        yield Finding("torch", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        yield Finding("torch", "not installed", settings.engine_url is not None, "pip install 'espalier[engine]'")
        return
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    yield Finding("device", f"{device} (setting: {settings.device}, dtype {settings.dtype})")


def _redis(settings: Settings) -> Finding:
    if settings.broker_url is not None:
        answers = redis_answers(settings.broker_url)
        return Finding("redis", "ESPALIER_BROKER_URL is set", answers, "it does not answer PING: start it, or mend the address")
    return _tried("redis", lambda: str(redis_binary()))


def _ports(settings: Settings) -> Iterator[Finding]:
    if is_held(settings.data_dir):
        yield Finding("ports", "espalier up runs on this data folder")
        return
    for part, host, port, setting, option in (
        ("API", settings.api_host, settings.api_port, "ESPALIER_API_PORT", "--port"),
        ("engine host", settings.engine_host, settings.engine_port, "ESPALIER_ENGINE_PORT", "--engine-port"),
        ("Redis server", "127.0.0.1", settings.redis_port, "ESPALIER_REDIS_PORT", "--redis-port"),
    ):

        def free(part: str = part, host: str = host, port: int = port, setting: str = setting, option: str = option) -> str:
            require_free_port(host, port, part=part, setting=setting, option=option)
            return f"{port} is free"

        yield _tried(f"port of the {part}", free)


def _tried(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, look())
    except EspalierError as error:
        return Finding(what, "no", False, error.message)
