"""A real vLLM server, started by the same script as in production, in its own environment."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

REPO = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class VllmServer:
    """A running server. `start_s`: seconds from the command to the first healthy answer; `pid`: leads its process group."""

    url: str
    pid: int
    log: Path
    start_s: float
    client: httpx.Client


@contextlib.contextmanager
def vllm_server(
    folder: Path, *, base_model: Path, environment: Mapping[str, str], arguments: tuple[str, ...] = ()
) -> Generator[VllmServer]:
    """Runs deploy/vllm/serve.sh on a free port until the context ends; its log is `folder/vllm.log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "vllm.log"
    started_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [REPO / "deploy/vllm/serve.sh", *arguments],
            stdout=output, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True, preexec_fn=_end_with_parent,
            env=os.environ | {
                "ESPALIER_BASE_MODEL_PATH": str(base_model), "ESPALIER_BASE_MODEL_NAME": "base", "ESPALIER_VLLM_PORT": str(port),
                "ESPALIER_VLLM_THREADS": "1", "ESPALIER_VLLM_MAX_MODEL_LEN": "256",
            } | environment,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120.0, trust_env=False) as client:
            while not _healthy(client):
                if process.poll() is not None or time.monotonic() - started_s > START_TIMEOUT_S:
                    raise RuntimeError(f"vLLM did not start (exit code {process.returncode}):\n{log.read_text(errors='replace')[-4000:]}")
                time.sleep(0.2)
            yield VllmServer(str(client.base_url), process.pid, log, time.monotonic() - started_s, client)
    finally:
        _stop(process)


def _end_with_parent() -> None:
    """Has the kernel end the server should the tests be killed: a server left behind takes a core and gigabytes."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.TransportError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to end, then ends its whole session: vLLM's engine is a process of its own."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
