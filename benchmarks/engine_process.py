"""The engine host as users run it: a process of its own, reached by its verbs over HTTP."""

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.peak import peak_bytes, reset_peak
from cli.commands import part_env
from cli.process import spawn, stop, tail
from engine.client import EngineClient
from tests.platform import free_port

REPO = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 300.0
STOP_GRACE_S = 15.0


@dataclass(frozen=True)
class EngineProcess:
    """A running engine host."""

    url: str
    pid: int
    start_s: float
    """Seconds from the command to the first healthy answer."""

    def client(self) -> EngineClient:
        """The verbs, for one job."""
        return EngineClient(self.url)

    @property
    def peak_bytes(self) -> int:
        """Greatest resident memory since its start, or since `reset_peak`."""
        return peak_bytes(self.pid)

    def reset_peak(self) -> None:
        """Measures the peak anew from here."""
        reset_peak(self.pid)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Takes no core meanwhile, not even to wait."""
        with paused(self.pid):
            yield


@contextmanager
def engine_process(
    base_model: Path, *, threads: int, dtype: str = "auto", settings: Mapping[str, object] | None = None
) -> Generator[EngineProcess]:
    """Starts `python -m engine.host` with the environment that `espalier up` gives it, and stops it in the end.

    Args:
        threads: of its compute team.
        dtype: auto, float32 or bfloat16.
        settings: more of core.settings, by field name.
    Raises:
        RuntimeError: it did not start; the message ends with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="espalier-engine-") as folder:
        port, log = free_port(), Path(folder) / "engine.log"
        wanted = {"base_model_path": base_model, "device": "cpu", "dtype": dtype, "engine_port": port, "num_threads": threads,
                  "data_dir": folder, **(settings or {})}  # fmt: skip
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ESPALIER_")}
        env = {**clean, **part_env("engine"), "PYTHONPATH": str(REPO), **{f"ESPALIER_{k.upper()}": str(v) for k, v in wanted.items()}}
        started = time.monotonic()
        with log.open("wb") as output:
            process = spawn([sys.executable, "-P", "-m", "engine.host"], env=env, log=output)
        try:
            url = f"http://127.0.0.1:{port}"
            while not _healthy(url):
                if process.poll() is not None or time.monotonic() - started > START_TIMEOUT_S:
                    raise RuntimeError(f"The engine host did not start (exit code {process.returncode}):\n{tail(log)}")
                time.sleep(0.2)
            yield EngineProcess(url, process.pid, time.monotonic() - started)
        finally:
            stop(process, grace_s=STOP_GRACE_S)


@contextmanager
def paused(pid: int) -> Generator[None]:
    """Stops a process that leads its group, and all of that group, until the context ends."""
    os.killpg(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGCONT)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.TransportError:
        return False
