"""What the process opens once and every request shares."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

import httpx
from fastapi import Depends, FastAPI, Request

from api.gateway.replicas import Replicas
from core.settings import get_settings
from registry.store import ObjectStore, open_store

# A completion may take minutes to start on a busy replica; a replica that does not take the connection in 5 s is down.
UPSTREAM_TIMEOUT = httpx.Timeout(connect=5.0, read=600.0, write=30.0, pool=10.0)
UPSTREAM_LIMITS = httpx.Limits(max_connections=1024, max_keepalive_connections=64)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """Opens the object store and the HTTP client towards engine and replicas; closes the client at the end."""
    settings = get_settings()
    app.state.store = open_store(settings.resolved_store_url)
    # trust_env off: a proxy from the environment must never see what tenants send to private replicas.
    async with httpx.AsyncClient(timeout=UPSTREAM_TIMEOUT, limits=UPSTREAM_LIMITS, trust_env=False) as client:
        app.state.replicas = Replicas(client, app.state.store, settings)
        try:
            yield
        finally:
            app.state.replicas.close()


def _store(request: Request) -> ObjectStore:
    return request.app.state.store


Store = Annotated[ObjectStore, Depends(_store)]
