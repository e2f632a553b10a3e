"""`espalier up`: the whole platform on one machine, supervised."""

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from cli.commands import part_command, part_env, redis_command
from cli.health import WorkerPing, api_answers, http_answers, redis_answers, require_free_port, written_lately
from cli.lock import data_dir_lock, write_status
from cli.secrets_file import read_or_create
from cli.supervisor import Part, Running, Supervisor
from cli.up_view import View, make_view
from core.keys import KEY_PREFIX
from core.settings import Settings, get_settings

ENGINE_START_TIMEOUT_S = 300.0
# Running jobs end their step, write a checkpoint and go back to the queue.
WORKER_GRACE_S = 60.0
# Beyond the interval of sweeps, for a busy machine.
BEAT_SILENCE_S = 30.0


def run_up(settings: Settings, *, json: bool, quiet: bool) -> int:
    """Runs until SIGINT or SIGTERM; a second one stops without waiting for running jobs to write a checkpoint.

    Returns:
        0 after a clean stop.
    Raises:
        Conflict: another one runs on this data folder.
        PortTaken: a part could not listen.
        PartFailed: a part can't be started; everything is stopped again.
    """
    view = make_view(settings, json=json, quiet=quiet)
    stopping, hurry = threading.Event(), threading.Event()
    with data_dir_lock(settings.data_dir), _signals_set(stopping, hurry), view:
        _require_ports(settings)
        settings = prepare(settings, view.say, stopping)
        if stopping.is_set():
            return 0
        parts = make_parts(settings)
        supervisor = Supervisor(parts, logs_dir(settings), lambda running: _publish(settings, supervisor, view, running))
        supervisor.run(stopping, hurry)
    return 0


def prepare(settings: Settings, say: Callable[[str], None], stopping: threading.Event) -> Settings:
    """Everything that must be there before a part starts: operator's key, schema, base model. Returns the settings with the key."""
    if settings.admin_key is None:
        os.environ["ESPALIER_ADMIN_KEY"] = read_or_create(settings.data_dir / "admin.key", lambda: KEY_PREFIX + secrets.token_urlsafe(32))
        get_settings.cache_clear()
        settings = get_settings()
    say("Database: bringing the schema up to date.")
    migrate_database()
    if _engine_is_ours(settings):
        if not settings.resolved_base_model_path.exists():
            say(f"Base model: converting {settings.base_model_name}, once.")
        prepare_base_model(settings, stopping)
    return settings


def migrate_database() -> None:
    """Brings the database to the newest schema."""
    from migrations import upgrade

    upgrade()


def prepare_base_model(settings: Settings, stopping: threading.Event | None = None) -> None:
    """Converts the base model if it isn't there yet.

    Raises:
        PartFailed: the conversion did not end well; the message ends with what it said.
    """
    if (settings.resolved_base_model_path / "config.json").exists():
        return
    from cli.base_model import convert_in_child

    convert_in_child(settings, stopping)


def make_parts(settings: Settings) -> list[Part]:
    """The parts that this machine runs. One whose address the user set elsewhere (broker, engine) is not ours to start."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    parts: list[Part] = []
    if settings.broker_url is None:
        url = settings.resolved_broker_url
        parts.append(Part("redis", redis_command(settings), env, lambda: redis_answers(url), port=settings.redis_port))
    if _engine_is_ours(settings):
        engine_url = settings.resolved_engine_url
        parts.append(
            Part(
                "engine",
                part_command("engine"),
                env | part_env("engine"),
                lambda: http_answers(f"{engine_url}/health"),
                port=settings.engine_port,
                start_timeout_s=ENGINE_START_TIMEOUT_S,
            )
        )
    parts.append(
        Part(
            "api",
            part_command("api"),
            env,
            lambda: api_answers(f"{api_url(settings)}/healthz"),
            port=settings.api_port,
            after=("redis",),
        )
    )
    # Named by the data folder's lock holder, so two platforms on one broker do not answer for each other.
    node = f"espalier-{os.getpid()}@localhost"
    ping = WorkerPing(settings.resolved_broker_url, node)
    parts.append(Part("worker", part_command("worker", node=node), env, ping, after=("redis", "engine"), grace_s=WORKER_GRACE_S))
    beat_log, silence_s = logs_dir(settings) / "beat.log", settings.sweep_interval_s + BEAT_SILENCE_S
    # Beat answers no questions, but it says so each time it sends a sweep.
    parts.append(Part("beat", part_command("beat"), env, lambda: written_lately(beat_log, within_s=silence_s), after=("redis", "api")))
    return parts


def api_url(settings: Settings) -> str:
    """Where this machine reaches the API."""
    return f"http://{reachable_host(settings.api_host)}:{settings.api_port}"


def reachable_host(listen_host: str) -> str:
    """Where this machine reaches what listens on an address."""
    return "127.0.0.1" if listen_host in ("0.0.0.0", "::") else listen_host


def logs_dir(settings: Settings) -> Path:
    """Folder of the parts' logs."""
    return settings.data_dir.absolute() / "logs"


def _engine_is_ours(settings: Settings) -> bool:
    return settings.engine_url is None


def _require_ports(settings: Settings) -> None:
    require_free_port(settings.api_host, settings.api_port, part="API", setting="ESPALIER_API_PORT", option="--port")
    if _engine_is_ours(settings):
        require_free_port(
            settings.engine_host, settings.engine_port, part="engine host", setting="ESPALIER_ENGINE_PORT", option="--engine-port"
        )
    if settings.broker_url is None:
        require_free_port("127.0.0.1", settings.redis_port, part="Redis server", setting="ESPALIER_REDIS_PORT", option="--redis-port")


def _publish(settings: Settings, supervisor: Supervisor, view: View, changed: Running) -> None:
    running = list(supervisor.running.values())
    write_status(
        settings.data_dir,
        {
            "pid": os.getpid(), "url": api_url(settings), "healthy": supervisor.all_healthy, "updated_at": time.time(),
            "parts": {r.part.name: part_status(r) for r in running},
        },
    )  # fmt: skip
    view.update(running, changed, all_healthy=supervisor.all_healthy)


def part_status(running: Running) -> dict[str, object]:
    """A part as scripts see it."""
    return {
        "pid": running.process.pid if running.process else None, "state": str(running.state), "port": running.part.port,
        "restarts": running.num_restarts, "ready_s": running.ready_s, "log": str(running.log),
    }  # fmt: skip


@contextmanager
def _signals_set(stopping: threading.Event, hurry: threading.Event) -> Generator[None]:
    def on_signal(*_: object) -> None:
        (hurry if stopping.is_set() else stopping).set()

    previous = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
