"""/v1/admin: with the operator's key only."""

from fastapi import APIRouter, Depends

from api.auth import require_admin
from api.paging import ListObject, Paging, list_object
from api.tenants import service
from api.tenants.schemas import KeyCreate, KeyObject, ProjectCreate, ProjectObject, TenantCreate, TenantObject

router = APIRouter(prefix="/v1/admin/tenants", tags=["admin"], dependencies=[Depends(require_admin)])


@router.post("")
def create_tenant(body: TenantCreate) -> TenantObject:
    return service.create_tenant(body.name)


@router.get("")
def list_tenants(params: Paging) -> ListObject[TenantObject]:
    items, has_more = service.list_tenants(params)
    return list_object(items, [item.id for item in items], has_more=has_more)


@router.post("/{tenant}/projects")
def create_project(tenant: str, body: ProjectCreate) -> ProjectObject:
    return service.create_project(tenant, body.name)


@router.get("/{tenant}/projects")
def list_projects(tenant: str, params: Paging) -> ListObject[ProjectObject]:
    items, has_more = service.list_projects(tenant, params)
    return list_object(items, [item.id for item in items], has_more=has_more)


@router.post("/{tenant}/projects/{project}/keys")
def create_key(tenant: str, project: str, body: KeyCreate) -> KeyObject:
    return service.make_key(tenant, project, body.name)


@router.get("/{tenant}/projects/{project}/keys")
def list_keys(tenant: str, project: str, params: Paging) -> ListObject[KeyObject]:
    items, has_more = service.list_keys(tenant, project, params)
    return list_object(items, [item.id for item in items], has_more=has_more)


@router.delete("/{tenant}/projects/{project}/keys/{key_id}")
def revoke_key(tenant: str, project: str, key_id: str) -> KeyObject:
    return service.revoke_key(tenant, project, key_id)
