"""TRL in an interpreter of its own, told what to do in JSON lines."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from benchmarks.engine_process import REPO, paused
from benchmarks.job import StepFigures
from benchmarks.peak import peak_bytes
from benchmarks.workload import Workload
from cli.process import tail

PEER_PYTHON = REPO / ".venv-trl/bin/python"
Precision = Literal["float32", "bfloat16", "bfloat16_weights"]
"""bfloat16: TRL's bf16=True, autocast over float32 weights, which is what it does by itself; bfloat16_weights: the base in bf16 as well."""


@dataclass(frozen=True)
class PeerSettings:
    """What is asked of TRL beside the workload."""

    precision: Precision
    micro_batch: int
    """Completions in one forward and backward; divides those of a step."""
    threads: int
    checkpointing: bool = False
    """Gradient checkpointing, TRL's default: less memory, more time. Off is its faster setting."""
    seed: int = 0


class PeerProcess:
    """A trainer that waits for its next step. Made by `peer_process`."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process, self._log = process, log
        self.pid = process.pid
        self.versions: dict[str, str] = {}

    @property
    def peak_bytes(self) -> int:
        """Greatest resident memory since its start."""
        return peak_bytes(self.pid)

    def begin(self, base_model: Path, workload: Workload, settings: PeerSettings) -> None:
        """Loads the model and makes the trainer."""
        ready = self._ask({"do": "begin", "base_model": str(base_model), "workload": workload.as_json(), "settings": vars(settings)})
        self.versions = ready["versions"]

    def run_step(self) -> StepFigures:
        """The next step, generation to optimizer."""
        answer = self._ask({"do": "step"})
        return StepFigures(
            answer["seconds"], answer["parts_s"], answer["reward_mean"], answer["completion_tokens"], 1.0, answer["prompts_digest"]
        )

    def start_step(self) -> None:
        """The same without waiting; `end_step` waits."""
        self._tell({"do": "step"})

    def end_step(self) -> float:
        """Seconds of the step that `start_step` began."""
        return float(self._hear()["seconds"])

    @contextmanager
    def paused(self) -> Generator[None]:
        """Takes no core meanwhile."""
        with paused(self.pid):
            yield

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self._tell(message)
        return self._hear()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The peer ended (exit code {self._process.wait()}):\n{tail(self._log, 40)}")
        return json.loads(line)


def require_peer() -> None:
    """Says how to get the peer where it is not there.

    Raises:
        SystemExit: it is not there.
    """
    if not PEER_PYTHON.exists():
        sys.exit(f"The peer's environment is not there ({PEER_PYTHON}). Make it first: make bench-peers")


@contextmanager
def peer_process(threads: int) -> Generator[PeerProcess]:
    """Starts the peer's interpreter with the environment that a user would have, and ends it."""
    require_peer()
    env = {**os.environ, "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory(prefix="espalier-peer-") as folder:
        log = Path(folder) / "peer.log"
        with log.open("wb") as output:
            process = _start(env, output, Path(folder))
        try:
            yield PeerProcess(process, log)
        finally:
            process.kill()
            process.wait()


def _start(env: dict[str, str], log: IO[bytes], cwd: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [str(PEER_PYTHON), "-P", "-m", "benchmarks.peer_trl"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, cwd=cwd, text=True, start_new_session=True,
    )  # fmt: skip
