"""The web application: every surface under one roof, one error format, one transaction per request."""

from importlib.metadata import version

from fastapi import FastAPI

from api import errors, health
from api.adapters import routes as adapter_routes
from api.gateway import routes as gateway_routes
from api.middleware import RequestId
from api.openai import file_routes, job_routes, model_routes
from api.state import lifespan
from api.tenants import routes as tenant_routes
from core.settings import get_settings

MAX_JSON_BYTES = 16 << 20


def create_app() -> FastAPI:
    """A new application over the current settings."""
    app = FastAPI(
        title="Espalier",
        version=version("espalier"),
        lifespan=lifespan,
        max_body_size=MAX_JSON_BYTES,
        # The pages would load their scripts from a public network; /openapi.json feeds any viewer.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(RequestId)
    errors.install(app)
    app.include_router(health.router)
    app.include_router(file_routes.make_router(get_settings().max_upload_bytes))
    for surface in (job_routes, model_routes, adapter_routes, tenant_routes, gateway_routes):
        app.include_router(surface.router)
    return app
