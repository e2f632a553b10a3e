"""The name under which a serving replica knows an adapter version: `<tenant_id>/<project>/<adapter>@<digest>`.

The digest makes the name immutable, so that nothing that a replica caches by name (prefix cache, loaded weights) can go stale. The tenant
in it is for operators who read a replica's list; only the digest decides what is loaded.
"""

import re
from dataclasses import dataclass

_SEGMENT = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?"
_NAME = re.compile(rf"(?P<tenant_id>{_SEGMENT})/(?P<project>{_SEGMENT})/(?P<adapter>{_SEGMENT})@(?P<digest>[0-9a-f]{{64}})")


@dataclass(frozen=True)
class ReplicaName:
    """The four parts. `digest`: SHA-256 of the version's manifest, 64 lower-case hex digits."""

    tenant_id: str
    project: str
    adapter: str
    digest: str

    def __post_init__(self) -> None:
        if _NAME.fullmatch(str(self)) is None:
            raise ValueError(f"{self} is not a replica name: segments hold letters, digits, '.', '_', '-'; the digest is 64 hex digits.")

    def __str__(self) -> str:
        return f"{self.tenant_id}/{self.project}/{self.adapter}@{self.digest}"


def parse_replica_name(name: str) -> ReplicaName | None:
    """Returns the parts, or None where `name` is not of this form (a base model, a path, another system's adapter)."""
    match = _NAME.fullmatch(name)
    return ReplicaName(**match.groupdict()) if match else None
