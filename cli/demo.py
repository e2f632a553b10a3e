"""`espalier demo`: from nothing to an adapter that beats its base on held-out prompts, over the public API."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console

from cli.demo_client import DemoClient
from cli.demo_task import DemoTask, make_task, to_jsonl
from cli.demo_view import Answer, Cost, Progress, show_answers, show_costs
from cli.lock import is_held, read_status
from cli.process import peak_memory_bytes, spawn, stop, tail
from cli.secrets_file import write_secret
from cli.supervisor import PartFailed
from cli.tenant import make_key
from core.errors import EspalierError, NotAuthenticated
from core.settings import Settings

TENANT, PROJECT, ADAPTER = "acme", "support", "order-numbers"
REQUIRED_MARGIN = 0.3
START_TIMEOUT_S = 600.0
PATIENCE_S = 8.0
STOP_GRACE_S = 30.0
POLL_S = 1.0
ENDED = ("succeeded", "failed", "cancelled")


class JobDidNotSucceed(EspalierError):
    """The demo's job failed or was cancelled."""

    default_code = "job_did_not_succeed"


def run_demo(settings: Settings, *, again: bool, num_steps: int | None) -> int:
    """Runs it.

    Args:
        again: trains anew even if a finished job with the same settings is there.
        num_steps: optimizer steps; None takes the task's own.
    Returns:
        0 if the adapter's mean reward on held-out prompts is at least REQUIRED_MARGIN above the base's, else 1.
    Raises:
        EspalierError: a part, a request or the job failed.
    """
    console = Console()
    clock = _Clock()
    task = make_task() if num_steps is None else make_task(num_steps=num_steps)
    with _terminate_as_interrupt(), _platform(settings, console) as url:
        clock.lap("start the platform")
        with _client(settings, console, url) as client:
            job, progress = _train(client, console, task, settings.base_model_name, again=again)
            clock.lap("train" if progress else "find the finished job")
            answers = _ask(client, console, task, settings.base_model_name, job["fine_tuned_model"])
            clock.lap("ask base and adapter")
        console.print()
        show_answers(console, answers)
        if progress:
            console.print(f"reward by step: {' '.join(f'{reward:.2f}' for reward in progress)}", highlight=False)
        costs = [*clock.costs(), *_memory(settings)]
    show_costs(console, costs)
    margin = sum(a.adapter_reward - a.base_reward for a in answers) / len(answers)
    passed = margin >= REQUIRED_MARGIN
    verdict = "The adapter beats its base" if passed else "The adapter does NOT beat its base by enough"
    console.print(f"{verdict}: {margin:+.3f} in mean reward (at least {REQUIRED_MARGIN:+.1f} wanted). Adapter: {job['fine_tuned_model']}")
    return 0 if passed else 1


class _Clock:
    def __init__(self) -> None:
        self._started = self._lap = time.monotonic()
        self._costs: list[Cost] = []

    def lap(self, what: str) -> None:
        now = time.monotonic()
        self._costs.append(Cost(what, now - self._lap))
        self._lap = now

    def costs(self) -> list[Cost]:
        return [*self._costs, Cost("all", time.monotonic() - self._started)]


@contextmanager
def _terminate_as_interrupt() -> Generator[None]:
    """SIGTERM unwinds like Ctrl-C does, so that what was started is stopped."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _platform(settings: Settings, console: Console) -> Generator[str]:
    """URL of the API: of the platform that runs on the data folder, else of one that is started here and stopped at the end."""
    if is_held(settings.data_dir):
        console.print(f"Platform: using the one that runs on {settings.data_dir}.", highlight=False)
        yield _wait_healthy(settings, lambda: None)
        return
    console.print("Platform: starting espalier up (the first time converts the base model).", highlight=False)
    log = settings.data_dir / "logs" / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        child = spawn([sys.executable, "-P", "-m", "cli.main", "up"], env=os.environ, log=file)

    def still_runs() -> None:
        if child.poll() is not None:
            raise PartFailed(f"espalier up ended with exit code {child.returncode}. The end of {log}:\n{tail(log)}")

    try:
        yield _wait_healthy(settings, still_runs)
    finally:
        console.print("Platform: stopping what was started.", highlight=False)
        # A second Ctrl-C does not leave the stopping half done.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        _stop_platform(child)
        signal.signal(signal.SIGINT, previous)


def _stop_platform(child: subprocess.Popen[bytes]) -> None:
    """Asks once, so that parts end in order, and again soon: the demo's job is done or cancelled, no checkpoint of it is wanted."""
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(PATIENCE_S)
    stop(child, grace_s=STOP_GRACE_S)


def _wait_healthy(settings: Settings, still_runs: Any) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        still_runs()
        status = read_status(settings.data_dir)
        if status is not None and status["healthy"]:
            return status["url"]
        time.sleep(0.2)
    raise PartFailed(f"The platform was not healthy after {START_TIMEOUT_S:.0f} s; see {settings.data_dir / 'logs'}.")


@contextmanager
def _client(settings: Settings, console: Console, url: str) -> Generator[DemoClient]:
    """A client with the demo's key, which is kept in the data folder; made anew where the database does not know it."""
    path = settings.data_dir / "demo.key"
    if path.exists():
        with DemoClient(url, path.read_text().strip()) as client:
            try:
                client.models()
            except NotAuthenticated:
                pass  # another database than the key's: it gets a new one below
            else:
                console.print(f"Tenant {TENANT}, project {PROJECT}: the key in {path} is reused.", highlight=False)
                yield client
                return
    write_secret(path, make_key(TENANT, PROJECT, key_name="demo"))
    console.print(f"Tenant {TENANT}, project {PROJECT}: made, key kept in {path}.", highlight=False)
    with DemoClient(url, path.read_text().strip()) as client:
        yield client


def _train(client: DemoClient, console: Console, task: DemoTask, base_model: str, *, again: bool) -> tuple[dict[str, Any], list[float]]:
    """The finished job, and the mean reward of each step if it was trained now."""
    file_id, uploaded = client.ensure_file("order-numbers.jsonl", to_jsonl(task.training_rows))
    console.print(f"Training file: {file_id}, {len(task.training_rows)} rows, {'uploaded' if uploaded else 'was there'}.", highlight=False)
    body = _job_body(task, base_model, file_id)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    finished = [job for job in client.find_jobs("demo", digest) if job["status"] == "succeeded"]
    if finished and not again:
        console.print(f"Job: {finished[0]['id']} has trained with these very settings; --again trains anew.", highlight=False)
        return finished[0], []
    job = client.submit({**body, "metadata": {"demo": digest}})
    console.print(f"Job: {job['id']} submitted.", highlight=False)
    with _cancelled_on_interrupt(client, job["id"]), Progress(console, task.num_steps) as progress:
        for latest, events in _follow(client, job["id"]):
            job = latest
            progress.update(job["status"], events)
    if job["status"] != "succeeded":
        reason = (job["error"] or {}).get("message") or "see its events"
        raise JobDidNotSucceed(f"Job {job['id']} {job['status']}: {reason}")
    return job, progress.rewards()


def _job_body(task: DemoTask, base_model: str, file_id: str) -> dict[str, Any]:
    return {
        "model": base_model, "training_file": file_id, "suffix": ADAPTER, "seed": task.seed,
        "method": {"type": "reinforcement", "reinforcement": {"grader": task.grader.model_dump(mode="json")}},
        "lora": task.lora.model_dump(mode="json"), "algorithm": task.algorithm.model_dump(mode="json"),
        "rollout": task.rollout.model_dump(mode="json"), "optimizer": task.optimizer.model_dump(mode="json"),
        "num_steps": task.num_steps,
    }  # fmt: skip


def _follow(client: DemoClient, job_id: str) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The job and its events until it ends, one last time after."""
    while True:
        # The job first: events that came with its last status are then surely in the list.
        job = client.job(job_id)
        yield job, client.events(job_id)
        if job["status"] in ENDED:
            return
        time.sleep(POLL_S)


@contextmanager
def _cancelled_on_interrupt(client: DemoClient, job_id: str) -> Generator[None]:
    try:
        yield
    except KeyboardInterrupt:
        with suppress(EspalierError):
            client.cancel(job_id)
        raise


def _ask(client: DemoClient, console: Console, task: DemoTask, base_model: str, adapter: str) -> list[Answer]:
    from engine.graders import grade

    console.print(f"Asking base and adapter the same {len(task.held_out_rows)} held-out prompts.", highlight=False)
    conversations = [row["messages"] for row in task.held_out_rows]
    texts = [client.ask_all(model, conversations, max_tokens=task.rollout.max_tokens) for model in (base_model, adapter)]

    def reward(row: dict[str, Any], text: str) -> float:
        item = {name: value for name, value in row.items() if name != "messages"}
        score = grade(task.grader, item=item, output_text=text).reward
        assert score is not None, "the demo's grader scores every text"
        return score

    return [
        Answer(row["messages"][-1]["content"], row["answer"], base, tuned, reward(row, base), reward(row, tuned))
        for row, base, tuned in zip(task.held_out_rows, *texts, strict=True)
    ]


def _memory(settings: Settings) -> list[Cost]:
    status = read_status(settings.data_dir) or {"parts": {}}
    pids = {name: part["pid"] for name, part in status["parts"].items() if part["pid"]}
    return [Cost(name, peak_memory_bytes=peak_memory_bytes(pid)) for name, pid in pids.items()]
