"""docker-compose.yml is run without Docker: each of our services' own command, environment and health check, as plain processes.

PostgreSQL, a Redis-protocol server and an S3 server are real ones out of pip packages; only addresses differ from the file's.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
import yaml
from moto.server import ThreadedMotoServer

from cli.commands import redis_binary
from cli.health import redis_answers
from tests.platform import free_port
from tests.postgres import Postgres, postgres  # noqa: F401  (a fixture)

REPO = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((REPO / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("migrate", "engine", "api", "worker", "beat")
_VARIABLE = re.compile(r"\$\{(\w+)(?::([?-])([^}]*))?\}")
SECRETS = {
    "POSTGRES_PASSWORD": "pg-secret", "REDIS_PASSWORD": "redis-secret", "S3_ACCESS_KEY_ID": "s3-id", "S3_SECRET_ACCESS_KEY": "s3-secret",
    "ESPALIER_ADMIN_KEY": "sk-esp-" + secrets.token_hex(16), "ESPALIER_BASE_MODEL_DIR": "/models/base",
}  # fmt: skip


def interpolate(text: str, variables: dict[str, str]) -> str:
    """What docker compose does with `${NAME}`, `${NAME:-default}` and `${NAME:?message}`."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match[1], match[2], match[3]
        if variables.get(name):
            return variables[name]
        if operator == "?":
            raise KeyError(f"{name}: {rest}")
        return rest or ""

    return _VARIABLE.sub(value, text).replace("$$", "$")


def environment(service: str, variables: dict[str, str]) -> dict[str, str]:
    return {name: interpolate(str(value), variables) for name, value in SERVICES[service]["environment"].items()}


def test_no_secret_has_a_default() -> None:
    text = (REPO / "docker-compose.yml").read_text()
    for name in SECRETS:
        uses = [match for match in _VARIABLE.finditer(text) if match[1] == name]
        assert uses, name
        assert all(match[2] == "?" for match in uses), f"{name} must be required wherever it is used"
    with pytest.raises(KeyError, match="POSTGRES_PASSWORD"):
        environment("api", SECRETS | {"POSTGRES_PASSWORD": ""})
    example = (REPO / "deploy" / "env.example").read_text()
    assert all(re.search(rf"^{name}=$", example, re.MULTILINE) for name in SECRETS), "env.example lists every required variable, empty"


def test_the_file_hangs_together() -> None:
    assert set(SERVICES) == {*OURS, "vllm", "postgres", "redis", "s3", "bucket"}
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[needed], f"{name} waits for the health of {needed}, which has no check"
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert mount.startswith("${") or source in COMPOSE["volumes"], mount
        # Ours is built from this checkout, the rest is pinned.
        image = service["image"]
        assert "build" in service or re.search(r":\d", image), image
        if "build" in service:
            assert (REPO / service["build"]["dockerfile"]).is_file()
    published = [name for name, service in SERVICES.items() if service.get("ports")]
    assert published == ["api"], "only the API has authentication"


@pytest.mark.parametrize("dockerfile", ["deploy/Dockerfile", "deploy/Dockerfile.vllm"])
def test_what_the_images_copy_is_there(dockerfile: str) -> None:
    for line in (REPO / dockerfile).read_text().splitlines():
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (REPO / source).exists(), f"{dockerfile}: {line}"


def test_the_settings_of_the_file_are_settings() -> None:
    from core.settings import Settings

    known = {f"ESPALIER_{name.upper()}" for name in Settings.model_fields}
    serve = (REPO / "deploy" / "vllm" / "serve.sh").read_text()
    for service in (*OURS, "vllm"):
        for name in environment(service, SECRETS):
            assert name in known or name in serve, f"{service}: nobody reads {name}"


@contextmanager
def started(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file, cwd=REPO, start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_until(what: str, ready: Any, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert process.poll() is None, f"{what} ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"{what} is not healthy:\n{log.read_text()[-3000:]}"
        time.sleep(0.3)


@pytest.fixture
def parts(postgres: Postgres, tiny_model: Path, tmp_path: Path) -> Iterator[dict[str, str]]:  # noqa: F811
    """The stores that our services need, and the settings that differ from the file's: addresses."""
    redis_port, s3_port = free_port(), free_port()
    redis_url = f"redis://:{SECRETS['REDIS_PASSWORD']}@127.0.0.1:{redis_port}/0"
    command = [str(redis_binary()), "--port", str(redis_port), "--bind", "127.0.0.1", "--requirepass", SECRETS["REDIS_PASSWORD"]]
    s3 = ThreadedMotoServer(ip_address="127.0.0.1", port=s3_port, verbose=False)
    with (
        postgres.database(migrated=False) as database_url,
        started([*command, "--save", ""], dict(os.environ), tmp_path / "redis.log") as redis,
    ):
        wait_until("redis", lambda: redis_answers(redis_url), redis, tmp_path / "redis.log")
        s3.start()
        try:
            endpoint = f"http://127.0.0.1:{s3_port}"
            client = boto3.client(
                "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="s3-id", aws_secret_access_key="s3-secret"
            )
            client.create_bucket(Bucket="espalier")
            engine_port = str(free_port())
            yield {
                "ESPALIER_DATABASE_URL": database_url, "ESPALIER_BROKER_URL": redis_url, "ESPALIER_S3_ENDPOINT": endpoint,
                "ESPALIER_ENGINE_PORT": engine_port, "ESPALIER_ENGINE_URL": f"http://127.0.0.1:{engine_port}",
                "ESPALIER_REPLICA_URLS": f"http://127.0.0.1:{engine_port}", "ESPALIER_API_PORT": str(free_port()),
                "ESPALIER_BASE_MODEL_PATH": str(tiny_model), "ESPALIER_MAX_MODEL_LEN": "256", "ESPALIER_NUM_THREADS": "1",
                "ESPALIER_DATA_DIR": str(tmp_path / "data"),
            }  # fmt: skip
        finally:
            s3.stop()


def service_env(service: str, addresses: dict[str, str]) -> dict[str, str]:
    # As in a container: the machine's environment has none of our settings.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ESPALIER_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
    declared = environment(service, SECRETS)
    return {**clean, "PATH": path, **declared, **addresses}


def is_well(service: str, env: dict[str, str], log: Path) -> bool:
    """By the service's own health check; beat has none, its log says when it sends a sweep."""
    if service == "beat":
        return "sweep" in log.read_text()
    kind, *command = SERVICES[service]["healthcheck"]["test"]
    assert kind == "CMD"
    return subprocess.run(command, env=env, capture_output=True, check=False).returncode == 0


def test_every_service_of_ours_runs_by_its_own_command_and_gets_healthy(parts: dict[str, str], tmp_path: Path) -> None:
    migrate = subprocess.run(
        SERVICES["migrate"]["command"],
        env=service_env("migrate", parts),
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert migrate.returncode == 0, migrate.stderr
    with ExitStack() as stack:
        running = {
            service: stack.enter_context(started(SERVICES[service]["command"], service_env(service, parts), tmp_path / f"{service}.log"))
            for service in OURS
            if service != "migrate"
        }
        for service, process in running.items():
            log = tmp_path / f"{service}.log"
            wait_until(service, lambda service=service, log=log: is_well(service, service_env(service, parts), log), process, log)

        # They are one platform: a key made through one and used at another, a file in the bucket.
        url = f"http://127.0.0.1:{parts['ESPALIER_API_PORT']}"
        assert httpx.get(f"{url}/healthz", timeout=30).status_code == 200
        made = subprocess.run(
            ["espalier", "tenant", "create", "acme", "--project", "support", "--json"],
            env=service_env("api", parts), capture_output=True, text=True, check=True,
        )  # fmt: skip
        headers = {"Authorization": f"Bearer {yaml.safe_load(made.stdout)['key']}"}
        content = b'{"messages": [{"role": "user", "content": "hi"}]}\n'
        uploaded = httpx.post(
            f"{url}/v1/files", headers=headers, files={"file": ("t.jsonl", content)}, data={"purpose": "fine-tune"}, timeout=30
        )
        assert uploaded.status_code == 200, uploaded.text
        stored = boto3.client(
            "s3", endpoint_url=parts["ESPALIER_S3_ENDPOINT"], region_name="us-east-1", aws_access_key_id="s3-id",
            aws_secret_access_key="s3-secret",
        ).list_objects_v2(Bucket="espalier", Prefix="main/blobs/")  # fmt: skip
        assert [item["Size"] for item in stored["Contents"]] == [len(content)]
