"""`espalier tenant create`: works on the database itself, so that it needs no running platform."""

import json as jsonlib

from sqlalchemy import select

from core.db import session_scope
from core.keys import create_key
from core.tables import ApiKey
from core.tenants import ensure_project


def make_key(tenant: str, project: str, *, key_name: str) -> str:
    """A new key of the project, which is made where missing, and so is the tenant.

    Raises:
        InvalidInput: a name that can't be one.
    """
    with session_scope() as session:
        _, key = create_key(session, ensure_project(session, tenant, project).project, key_name)
    return key


def create_tenant(tenant: str, project: str, *, key_name: str, new_key: bool, json: bool) -> int:
    """Makes what is missing and says what it did.

    Args:
        new_key: makes a key even if the project has one that is not revoked.
    Returns:
        0.
    Raises:
        InvalidInput: a name that can't be one.
    """
    with session_scope() as session:
        found = ensure_project(session, tenant, project)
        has_key = session.scalar(select(ApiKey.id).where(ApiKey.project_id == found.project.id, ApiKey.revoked_at.is_(None))) is not None
        key = None
        if new_key or not has_key:
            _, key = create_key(session, found.project, key_name)
        result = {
            "tenant": tenant, "tenant_id": found.tenant.id, "tenant_created": found.tenant_created,
            "project": project, "project_id": found.project.id, "project_created": found.project_created, "key": key,
        }  # fmt: skip
    if json:
        print(jsonlib.dumps(result))
        return 0
    for what in ("tenant", "project"):
        print(f"{what}: {result[what]} ({result[what + '_id']}), {'made' if result[what + '_created'] else 'was there'}")
    if key is None:
        print("key: the project has one already; --new-key makes another.")
    else:
        print(f"key: {key}\nIt is shown this once and can't be read again.")
    return 0
