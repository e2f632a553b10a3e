"""Which immutable thing a request's `model` means, and what replicas call it."""

import hashlib
from dataclasses import dataclass

from core.db import session_scope
from core.scope import Scope
from registry.names import resolve


@dataclass(frozen=True)
class Target:
    """What to ask a replica for."""

    asked_name: str
    """As the client wrote it; answers carry it."""
    replica_name: str
    """As replicas know it; never shown to a client."""
    usage_name: str
    """Immutable public name that tokens are counted under."""
    digest: str | None
    """Of the adapter version; None for the base."""


def find_target(scope: Scope, name: str) -> Target:
    """Resolves a name inside the caller's project.

    Raises:
        NotFound: no such model there (code model_not_found).
    """
    with session_scope(readonly=True) as session:
        resolved = resolve(session, scope, name)
    if resolved is None:
        return Target(name, name, name, None)
    return Target(name, resolved.replica_name, resolved.public_name, resolved.version.digest)


def cache_salt(scope: Scope) -> str:
    """Keeps one tenant's prefix cache from being timed by another; a client's own salt is never passed on."""
    return hashlib.sha256(f"espalier prefix cache of {scope.tenant_id}".encode()).hexdigest()
