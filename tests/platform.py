"""A whole platform as users run it (`espalier up` in a process of its own), on the tiny model, driven by the stock `openai` client."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

START_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 240.0
# One sequence at a time and one thread: a completion's numerics don't depend on who else is served, so digests can be compared.
DETERMINISTIC = {"ESPALIER_MAX_NUM_SEQS": "1", "ESPALIER_NUM_THREADS": "1", "ESPALIER_DTYPE": "float32", "ESPALIER_MIXED_BATCHES": "false"}
# Deaths are noticed within seconds instead of half a minute.
IMPATIENT = {"ESPALIER_LEASE_TTL_S": "4", "ESPALIER_HEARTBEAT_S": "0.5", "ESPALIER_SWEEP_INTERVAL_S": "1", "ESPALIER_MAX_JOB_DEATHS": "10"}


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Platform:
    """`espalier up` on a data folder.

    Args:
        data_dir: where its state lives; starting again on the same folder finds it.
        base_model: folder of the base model.
        env: more settings.
    """

    def __init__(self, data_dir: Path, base_model: Path, env: Mapping[str, str] | None = None) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ESPALIER_")}
        self.env = {
            **clean, "ESPALIER_DATA_DIR": str(data_dir), "ESPALIER_BASE_MODEL_PATH": str(base_model), "ESPALIER_BASE_MODEL_NAME": "tiny",
            "ESPALIER_API_PORT": str(self.port), "ESPALIER_ENGINE_PORT": str(free_port()), "ESPALIER_REDIS_PORT": str(free_port()),
            "ESPALIER_MAX_MODEL_LEN": "256", "ESPALIER_WORKER_CONCURRENCY": "2", **IMPATIENT, **(env or {}),
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL of the API."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it and waits until every part is healthy."""
        log = (self.data_dir.parent / f"{self.data_dir.name}-up.log").open("ab")
        self._process = subprocess.Popen([*self._cli(), "up", "--json"], env=self.env, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, f"`espalier up` ended with {self._process.returncode}; see {log.name}"
            status = self._status()
            if status.get("healthy") and status.get("pid") == self._process.pid:
                return
            time.sleep(0.2)
        raise AssertionError(f"not healthy after {START_TIMEOUT_S} s; see {log.name} and {self.data_dir}/logs")

    def stop(self) -> int:
        """Ctrl-C; returns the exit code and checks that nothing is left behind."""
        if self._process is None:
            return 0
        family = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        self._process.send_signal(signal.SIGINT)
        code = self._process.wait(60)
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive, f"left behind: {alive}"
        self._process = None
        return code

    def kill(self, part: str) -> None:
        """SIGKILL to one part and all its children, as the kernel would."""
        pid = self._status()["parts"][part]["pid"]
        if pid is None:
            return  # already down
        try:
            root = psutil.Process(pid)
            victims = [*root.children(recursive=True), root]
        except psutil.NoSuchProcess:
            return
        for victim in victims:
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                continue

    def client(self, tenant: str, project: str = "support") -> openai.OpenAI:
        """An unmodified `openai` client of a (new) tenant."""
        done = subprocess.run(
            [*self._cli(), "tenant", "create", tenant, "--project", project, "--new-key", "--json"],
            env=self.env, capture_output=True, text=True, check=True,
        )  # fmt: skip
        key = json.loads(done.stdout.splitlines()[-1])["key"]
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=8, timeout=60)

    def get(self, client: openai.OpenAI, path: str) -> Any:
        """GET of one of our own routes."""
        answer = httpx.get(f"{self.url}{path}", headers={"Authorization": f"Bearer {client.api_key}"}, timeout=60)
        answer.raise_for_status()
        return answer.json()

    def _status(self) -> dict[str, Any]:
        try:
            return json.loads((self.data_dir / "status.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def _cli(self) -> list[str]:
        return [sys.executable, "-P", "-m", "cli.main"]


def training_file(num_rows: int) -> bytes:
    """Rows whose reward (a text similarity) differs between completions of an untrained model."""
    words = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot"]
    rows = [{"messages": [{"role": "user", "content": f"say {words[i % 6]} {i}"}], "reference": words[i % 6] * 2} for i in range(num_rows)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


GRADER = {
    "type": "text_similarity", "name": "close", "input": "{{sample.output_text}}", "reference": "{{item.reference}}",
    "evaluation_metric": "fuzzy_match",
}  # fmt: skip


def submit(client: openai.OpenAI, *, num_steps: int, seed: int = 7, suffix: str = "words", **extra: object) -> str:
    """Uploads the training file and submits a small job; returns its id."""
    file = client.files.create(file=("train.jsonl", training_file(16)), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=file.id, seed=seed, suffix=suffix,
        method={"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": {"batch_size": 4}}},  # type: ignore[arg-type]
        extra_body={
            "lora": {"rank": 4, "alpha": 8}, "algorithm": {"group_size": 4, "beta": 0.02}, "rollout": {"max_tokens": 12},
            "optimizer": {"learning_rate": 3e-3}, "checkpoint_interval": 4, "num_steps": num_steps, **extra,
        },
    )  # fmt: skip
    return job.id


def wait_for(client: openai.OpenAI, job_id: str, *, statuses: tuple[str, ...] = ("succeeded", "failed", "cancelled")) -> Any:
    """Polls a job until it has one of the statuses; the API may be down in between."""
    deadline = time.monotonic() + JOB_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            job = client.fine_tuning.jobs.retrieve(job_id)
        except (openai.APIConnectionError, openai.InternalServerError):
            time.sleep(0.2)
            continue
        if job.status in statuses:
            return job
        time.sleep(0.2)
    raise AssertionError(f"job {job_id} is still {job.status} after {JOB_TIMEOUT_S} s")  # pyright: ignore[reportPossiblyUnboundVariable]


def steps_done(client: openai.OpenAI, job_id: str) -> int:
    """Optimizer steps that the job has reported, 0 while the API is down."""
    try:
        events = client.fine_tuning.jobs.list_events(job_id, limit=100)
    except (openai.APIConnectionError, openai.InternalServerError):
        return 0
    return max((int(e.data["step"]) for e in events.data if e.type == "metrics"), default=0)  # type: ignore[index]
