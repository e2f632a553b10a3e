"""The web application: every surface under one roof, one error format, one transaction per request."""

from importlib.metadata import version

from fastapi import FastAPI

from api import errors, health
from api.adapters import routes as adapter_routes
from api.gateway import routes as gateway_routes
from api.middleware import BodyLimit, RequestId
from api.openai import file_routes, job_routes, model_routes
from api.state import lifespan
from api.tenants import routes as tenant_routes
from core.settings import get_settings

MAX_JSON_BYTES = 16 << 20
# Room for the form around an uploaded file.
FORM_BYTES = 1 << 20


def create_app() -> FastAPI:
    """A new application over the current settings."""
    app = FastAPI(
        title="Espalier",
        version=version("espalier"),
        lifespan=lifespan,
        # The pages would load their scripts from a public network; /openapi.json feeds any viewer.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    upload_bytes = get_settings().max_upload_bytes + FORM_BYTES
    app.add_middleware(BodyLimit, limit_bytes=MAX_JSON_BYTES, larger={"/v1/files": upload_bytes})
    app.add_middleware(RequestId)
    errors.install(app)
    app.include_router(health.router)
    for surface in (file_routes, job_routes, model_routes, adapter_routes, tenant_routes, gateway_routes):
        app.include_router(surface.router)
    return app
