"""Models that a project may call: the base, and its own adapters."""

from typing import Literal

from pydantic import BaseModel

from core.db import session_scope
from core.scope import Scope
from core.settings import get_settings
from core.tables import Adapter, AdapterVersion
from registry.names import fine_tuned_name, resolve

PLATFORM = "espalier"


class ModelObject(BaseModel):
    """Something that `model` of an inference request may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


def _base() -> ModelObject:
    return ModelObject(id=get_settings().base_model_name, created=0, owned_by=PLATFORM)


def list_models(scope: Scope) -> list[ModelObject]:
    """The base, then per adapter its movable name and the immutable names of its final versions, newest first."""
    statement = (
        scope.select(Adapter)
        .join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
        .where(AdapterVersion.kind == "final")
        .order_by(Adapter.name, AdapterVersion.number.desc())
        .with_only_columns(Adapter, AdapterVersion)
    )
    models = [_base()]
    with session_scope(readonly=True) as session:
        previous = ""
        for adapter, version in session.execute(statement):
            if adapter.name != previous:
                models.append(ModelObject(id=f"{scope.project}/{adapter.name}", created=int(adapter.created_at), owned_by=scope.project))
                previous = adapter.name
            name = fine_tuned_name(scope.project, adapter.name, version.digest)
            models.append(ModelObject(id=name, created=int(version.created_at), owned_by=scope.project))
    return models


def retrieve_model(scope: Scope, name: str) -> ModelObject:
    """What `name` means now, under the name that was asked for.

    Raises:
        NotFound: no such model in this project.
    """
    with session_scope(readonly=True) as session:
        resolved = resolve(session, scope, name)
        if resolved is None:
            return _base()
        return ModelObject(id=name, created=int(resolved.version.created_at), owned_by=scope.project)
