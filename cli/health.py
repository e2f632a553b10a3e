"""Real questions to the parts, each answered or given up within a few seconds."""

import socket
import time
from pathlib import Path
from typing import Any

import httpx

from core.errors import EspalierError

TIMEOUT_S = 2.0
# /healthz itself asks other parts, up to 2 s each.
HEALTHZ_TIMEOUT_S = 4.0


class PortTaken(EspalierError):
    """Something else listens where a part should."""

    default_code = "port_taken"


def http_answers(url: str) -> bool:
    """Whether a GET gives 200."""
    try:
        return httpx.get(url, timeout=TIMEOUT_S, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def api_answers(url: str) -> bool:
    """Whether the API itself serves: 503 is its answer while another part is down."""
    try:
        return httpx.get(url, timeout=HEALTHZ_TIMEOUT_S, trust_env=False).status_code in (200, 503)
    except httpx.HTTPError:
        return False


def redis_answers(url: str) -> bool:
    """Whether a Redis-protocol server answers PING and is done loading."""
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        with Redis.from_url(url, socket_connect_timeout=TIMEOUT_S, socket_timeout=TIMEOUT_S) as client:
            return bool(client.ping())
    except RedisError:
        return False


class WorkerPing:
    """Asks one Celery worker by its node name; a worker whose pool is full still answers."""

    def __init__(self, broker_url: str, node: str) -> None:
        self._broker_url, self._node = broker_url, node
        self._app: Any = None

    def __call__(self) -> bool:
        from celery import Celery
        from kombu.exceptions import KombuError
        from redis.exceptions import RedisError

        if self._app is None:
            self._app = Celery(broker=self._broker_url, set_as_current=False)
        try:
            return bool(self._app.control.ping(destination=[self._node], timeout=TIMEOUT_S))
        except (KombuError, RedisError, OSError):
            return False


def written_lately(file: Path, *, within_s: float) -> bool:
    """Whether a file that is not empty was written in the last `within_s` seconds."""
    return file.exists() and file.stat().st_size > 0 and time.time() - file.stat().st_mtime < within_s


def require_free_port(host: str, port: int, *, part: str, setting: str, option: str) -> None:
    """Checks that a part will be able to listen.

    Raises:
        PortTaken: with the port, the part and the ways to choose another.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTaken(
                f"Port {port} on {host}, wanted by the {part}, can't be had ({error.strerror}). Free it, or choose another with {option} "
                f"or {setting}.",
                param=setting,
            ) from None
