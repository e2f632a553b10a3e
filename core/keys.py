"""API keys: made once, shown once, kept as a hash."""

import hashlib
import secrets

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.errors import NotAuthenticated
from core.ids import new_id
from core.scope import Scope
from core.tables import ApiKey, Project

KEY_PREFIX = "sk-esp-"


def hash_key(key: str) -> str:
    """SHA-256 in hex. Keys carry 256 random bits, so a slow hash would add cost and no safety."""
    return hashlib.sha256(key.encode()).hexdigest()


def create_key(session: Session, project: Project, name: str) -> tuple[ApiKey, str]:
    """Returns the row and the key itself; the key is not stored and can't be shown again."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    row = ApiKey(id=new_id("key"), tenant_id=project.tenant_id, project_id=project.id, name=name, sha256=hash_key(key), hint=key[:12])
    session.add(row)
    return row, key


def authenticate(session: Session, key: str) -> Scope:
    """The scope that a key opens.

    Raises:
        NotAuthenticated: unknown or revoked.
    """
    statement = select(ApiKey, Project).join(Project, ApiKey.project_id == Project.id)
    found = session.execute(statement.where(ApiKey.sha256 == hash_key(key), ApiKey.revoked_at.is_(None))).first()
    if found is None:
        raise NotAuthenticated("The API key is unknown or revoked; ask your platform team for a new one.")
    api_key, project = found
    return Scope(tenant_id=api_key.tenant_id, project_id=project.id, project=project.name, api_key_id=api_key.id)
