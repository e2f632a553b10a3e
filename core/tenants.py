"""Tenants and projects by name: made on first use, reused after."""

import re
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.errors import InvalidInput
from core.ids import new_id
from core.tables import Project, Tenant

# Names stand in adapter names, URLs and folders: no slash, no dot, nothing that a shell or a file system minds.
NAME = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?")


class Ensured(NamedTuple):
    """A project and what had to be made for it."""

    tenant: Tenant
    project: Project
    tenant_created: bool
    project_created: bool


def ensure_project(session: Session, tenant_name: str, project_name: str) -> Ensured:
    """The project of that name of the tenant of that name, made where missing.

    Raises:
        InvalidInput: a name that can't be one.
    """
    for param, name in (("tenant", tenant_name), ("project", project_name)):
        if not NAME.fullmatch(name):
            raise InvalidInput(
                f"{name!r} can't name a {param}; use 1 to 63 of a-z, 0-9, '-' and '_', the first and last a letter or digit.", param=param
            )
    tenant = session.scalar(select(Tenant).where(Tenant.name == tenant_name))
    tenant_created = tenant is None
    if tenant is None:
        tenant = Tenant(id=new_id("tenant"), name=tenant_name)
        session.add(tenant)
        session.flush()
    project = session.scalar(select(Project).where(Project.tenant_id == tenant.id, Project.name == project_name))
    project_created = project is None
    if project is None:
        project = Project(id=new_id("proj"), tenant_id=tenant.id, name=project_name)
        session.add(project)
        session.flush()
    return Ensured(tenant, project, tenant_created, project_created)
