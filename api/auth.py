"""Who asks: a project's key opens a `Scope`, the operator's key opens the admin routes."""

import hmac
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from core.db import session_scope
from core.errors import NotAuthenticated
from core.keys import authenticate, hash_key
from core.scope import Scope
from core.settings import get_settings

_bearer = HTTPBearer(auto_error=False, description="A project's API key, or the operator's key on /v1/admin.")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


def require_scope(credentials: Credentials) -> Scope:
    """The project that the request's key opens.

    Raises:
        NotAuthenticated: no key, or one that is unknown or revoked.
    """
    if credentials is None:
        raise NotAuthenticated("No API key; send the header 'Authorization: Bearer <key>'.", code="missing_api_key")
    with session_scope(readonly=True) as session:
        return authenticate(session, credentials.credentials)


def require_admin(credentials: Credentials) -> None:
    """Lets the operator's key through.

    Raises:
        NotAuthenticated: no key, another key, or the platform has no operator's key.
    """
    expected = get_settings().admin_key
    if expected is None or not expected.get_secret_value():
        raise NotAuthenticated("This platform has no operator's key; set ESPALIER_ADMIN_KEY and restart.", code="no_admin_key")
    given = "" if credentials is None else credentials.credentials
    # Hashes have one length, so the comparison's time tells nothing about the key.
    if not hmac.compare_digest(hash_key(given), hash_key(expected.get_secret_value())):
        raise NotAuthenticated("Not the operator's key; send it as 'Authorization: Bearer <key>'.", code="invalid_admin_key")


CurrentScope = Annotated[Scope, Depends(require_scope)]
"""Parameter type of an endpoint that acts for a project."""
