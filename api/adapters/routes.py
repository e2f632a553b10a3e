"""/v1/adapters."""

from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from api.adapters import content, service
from api.adapters.schemas import AdapterObject, AliasDeleted, AliasMove, AliasObject, VersionObject
from api.auth import CurrentScope
from api.paging import ListObject, Paging, list_object
from api.state import Store

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])


@router.get("")
def list_(scope: CurrentScope, params: Paging) -> ListObject[AdapterObject]:
    items, has_more = service.list_adapters(scope, params)
    return list_object(items, [item.id for item in items], has_more=has_more)


@router.get("/{name}")
def retrieve(scope: CurrentScope, name: str) -> AdapterObject:
    return service.retrieve_adapter(scope, name)


@router.get("/{name}/versions")
def list_versions(scope: CurrentScope, name: str, params: Paging) -> ListObject[VersionObject]:
    items, has_more = service.list_versions(scope, name, params)
    return list_object(items, [item.id for item in items], has_more=has_more)


@router.get("/{name}/versions/{version}")
def retrieve_version(scope: CurrentScope, name: str, version: str) -> VersionObject:
    return service.retrieve_version(scope, name, version)


@router.get("/{name}/versions/{version}/content")
def download_content(
    scope: CurrentScope,
    store: Store,
    name: str,
    version: str,
    file: Annotated[str | None, Query(description="adapter_config.json or adapter_model.safetensors; default a tar of both.")] = None,
    range: Annotated[str | None, Header()] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    return content.respond(scope, store, name, version, file, range_header=range, if_none_match=if_none_match)


@router.put("/{name}/aliases/{alias}")
def move_alias(scope: CurrentScope, name: str, alias: str, body: AliasMove) -> AliasObject:
    return service.move_alias(scope, name, alias, str(body.version))


@router.delete("/{name}/aliases/{alias}")
def delete_alias(scope: CurrentScope, name: str, alias: str) -> AliasDeleted:
    service.delete_alias(scope, name, alias)
    return AliasDeleted(name=alias)
