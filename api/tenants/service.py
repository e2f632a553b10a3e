"""What the operator does. Not scoped: the operator sees all tenants, and none of their data."""

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from api.paging import PageParams, fetch_page
from api.tenants.schemas import KeyObject, ProjectObject, TenantObject
from core.clock import now_s
from core.db import session_scope
from core.errors import Conflict, InvalidInput, NotFound
from core.ids import new_id
from core.keys import create_key
from core.tables import ApiKey, Project, Tenant
from core.tenants import NAME


def create_tenant(name: str) -> TenantObject:
    """Makes a tenant.

    Raises:
        InvalidInput: the name. Conflict: there is one of that name.
    """
    _check_name(name)
    row = Tenant(id=new_id("tenant"), name=name)
    _insert(row, f"There is a tenant {name!r} already; use it, or choose another name.")
    return _tenant_object(row)


def list_tenants(params: PageParams) -> tuple[list[TenantObject], bool]:
    """One page of all tenants."""
    with session_scope(readonly=True) as session:
        rows, has_more = fetch_page(session, select(Tenant), params, sort=Tenant.created_at, key=Tenant.id)
        return [_tenant_object(row) for row in rows], has_more


def create_project(tenant: str, name: str) -> ProjectObject:
    """Makes a project of a tenant.

    Raises:
        InvalidInput: the name. NotFound: the tenant. Conflict: the tenant has one of that name.
    """
    _check_name(name)
    with session_scope(readonly=True) as session:
        owner = _tenant(session, tenant)
    row = Project(id=new_id("proj"), tenant_id=owner.id, name=name)
    _insert(row, f"Tenant {tenant!r} has a project {name!r} already; use it, or choose another name.")
    return _project_object(owner, row)


def list_projects(tenant: str, params: PageParams) -> tuple[list[ProjectObject], bool]:
    """One page of a tenant's projects."""
    with session_scope(readonly=True) as session:
        owner = _tenant(session, tenant)
        statement = select(Project).where(Project.tenant_id == owner.id)
        rows, has_more = fetch_page(session, statement, params, sort=Project.created_at, key=Project.id)
        return [_project_object(owner, row) for row in rows], has_more


def make_key(tenant: str, project: str, name: str) -> KeyObject:
    """Makes a key of a project; the answer is the only place where it is ever shown."""
    with session_scope() as session:
        owner = _project(session, tenant, project)
        row, key = create_key(session, owner, name)
        session.flush()
        return _key_object(owner, row).model_copy(update={"api_key": key})


def list_keys(tenant: str, project: str, params: PageParams) -> tuple[list[KeyObject], bool]:
    """One page of a project's keys, revoked ones too."""
    with session_scope(readonly=True) as session:
        owner = _project(session, tenant, project)
        statement = select(ApiKey).where(ApiKey.project_id == owner.id)
        rows, has_more = fetch_page(session, statement, params, sort=ApiKey.created_at, key=ApiKey.id)
        return [_key_object(owner, row) for row in rows], has_more


def revoke_key(tenant: str, project: str, key_id: str) -> KeyObject:
    """Ends a key at once; ending it again changes nothing.

    Raises:
        NotFound: the project has no such key.
    """
    with session_scope() as session:
        owner = _project(session, tenant, project)
        row = session.scalar(select(ApiKey).where(ApiKey.project_id == owner.id, ApiKey.id == key_id))
        if row is None:
            raise NotFound(f"Project {project!r} has no key {key_id!r}; list its keys to see their ids.", param="key_id")
        row.revoked_at = row.revoked_at or now_s()
        return _key_object(owner, row)


def _insert(row: Tenant | Project, taken: str) -> None:
    try:
        with session_scope() as session:
            session.add(row)
    except IntegrityError:
        raise Conflict(taken, param="name", code="name_taken") from None


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        message = f"name: {name!r} can't be one; use 1 to 63 of a-z, 0-9, '-' and '_', the first and last a letter or digit."
        raise InvalidInput(message, param="name")


def _tenant(session: Session, name: str) -> Tenant:
    row = session.scalar(select(Tenant).where(Tenant.name == name))
    if row is None:
        raise NotFound(f"No tenant {name!r}; make it first, or list the tenants.", param="tenant")
    return row


def _project(session: Session, tenant: str, name: str) -> Project:
    owner = _tenant(session, tenant)
    row = session.scalar(select(Project).where(Project.tenant_id == owner.id, Project.name == name))
    if row is None:
        raise NotFound(f"Tenant {tenant!r} has no project {name!r}; make it first, or list its projects.", param="project")
    return row


def _tenant_object(row: Tenant) -> TenantObject:
    return TenantObject(id=row.id, name=row.name, created_at=int(row.created_at))


def _project_object(owner: Tenant, row: Project) -> ProjectObject:
    return ProjectObject(id=row.id, tenant=owner.name, name=row.name, created_at=int(row.created_at))


def _key_object(owner: Project, row: ApiKey) -> KeyObject:
    revoked_at = None if row.revoked_at is None else int(row.revoked_at)
    return KeyObject(id=row.id, project=owner.name, name=row.name, hint=row.hint, created_at=int(row.created_at), revoked_at=revoked_at)
