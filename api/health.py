"""/healthz: a real question to each part, each answered or given up within 2 s."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import httpx
from fastapi import APIRouter
from pydantic import BaseModel
from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import JSONResponse

from api.state import Store
from core.db import session_scope
from core.errors import EspalierError
from core.settings import get_settings
from registry.store import ObjectStore

TIMEOUT_S = 2.0
router = APIRouter(tags=["health"])


class PartHealth(BaseModel):
    """One part."""

    status: Literal["ok", "down"]
    needed: bool
    latency_ms: float


class Health(BaseModel):
    """The whole: down when a needed part is."""

    status: Literal["ok", "down"]
    parts: dict[str, PartHealth]


@router.get("/healthz", responses={503: {"model": Health}})
def healthz(store: Store) -> JSONResponse:
    """Open to all, so it tells no address, version or error text. Serving needs one replica, not each."""
    settings = get_settings()
    replicas = {f"replica-{index}": url for index, url in enumerate(settings.resolved_replica_urls)}
    checks: dict[str, Callable[[], bool]] = {
        "database": _database,
        "store": lambda: _store(store),
        "broker": _broker,
        "engine": lambda: _answers(settings.resolved_engine_url),
        **{name: _asker(url) for name, url in replicas.items()},
    }
    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        results = dict(zip(checks, pool.map(_timed, checks.values()), strict=True))
    parts = {
        name: PartHealth(status="ok" if well else "down", needed=name not in replicas, latency_ms=latency_ms)
        for name, (well, latency_ms) in results.items()
    }
    well = all(part.status == "ok" for part in parts.values() if part.needed) and any(results[name][0] for name in replicas)
    body = Health(status="ok" if well else "down", parts=parts)
    return JSONResponse(body.model_dump(), 200 if well else 503)


def _timed(check: Callable[[], bool]) -> tuple[bool, float]:
    started_s = time.perf_counter()
    well = check()
    return well, round((time.perf_counter() - started_s) * 1000, 1)


def _database() -> bool:
    try:
        with session_scope(readonly=True) as session:
            return session.scalar(text("SELECT 1")) == 1
    except SQLAlchemyError:
        return False


def _store(store: ObjectStore) -> bool:
    try:
        store.exists("healthz")
    except EspalierError:
        return False
    return True


def _broker() -> bool:
    try:
        with Redis.from_url(get_settings().resolved_broker_url, socket_connect_timeout=TIMEOUT_S, socket_timeout=TIMEOUT_S) as client:
            return bool(client.ping())
    except (RedisError, ValueError):
        return False


def _asker(url: str) -> Callable[[], bool]:
    return lambda: _answers(url)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=TIMEOUT_S, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
