"""From a model name in a request to one immutable adapter version, inside the caller's project only."""

from dataclasses import dataclass

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from core.errors import NotFound
from core.scope import Scope
from core.settings import get_settings
from core.tables import Adapter, AdapterVersion, Alias
from registry.naming import LATEST, ModelName, check_name, fine_tuned_name, parse_model_name, replica_name

__all__ = ["Resolved", "check_name", "fine_tuned_name", "parse_model_name", "replica_name", "resolve", "resolve_version"]

DEFAULT_ALIAS = "prod"


@dataclass(frozen=True)
class Resolved:
    """What a model name means now."""

    adapter: Adapter
    version: AdapterVersion
    replica_name: str
    public_name: str
    """Immutable: the name to keep in order to get the same answers later."""


def resolve(session: Session, scope: Scope, name: str) -> Resolved | None:
    """The adapter version that `name` means, or None when it is the base model's name.

    Without a selector: the alias `prod` if it exists, else the newest final version. `@latest`: the newest final version.

    Raises:
        NotFound: no such model in the caller's project (code model_not_found, param model); another project's or tenant's model gives
            the very same words as one that does not exist.
    """
    if name == get_settings().base_model_name:
        return None
    parsed = parse_model_name(name)
    if parsed is None or parsed.project not in (None, scope.project):
        raise _unknown(name)
    adapter = session.scalar(scope.select(Adapter).where(Adapter.name == parsed.adapter))
    version = None if adapter is None else resolve_version(session, adapter, parsed)
    if adapter is None or version is None:
        raise _unknown(name)
    return Resolved(
        adapter,
        version,
        replica_name(scope.tenant_id, scope.project, adapter.name, version.digest),
        fine_tuned_name(scope.project, adapter.name, version.digest),
    )


def resolve_version(session: Session, adapter: Adapter, name: ModelName) -> AdapterVersion | None:
    """The version of `adapter` that the name's selector means; None when there is none (or a digest prefix fits several)."""
    versions = select(AdapterVersion).where(AdapterVersion.adapter_id == adapter.id)
    if name.number is not None:
        return session.scalar(versions.where(AdapterVersion.number == name.number))
    if name.digest_prefix is not None:
        # A half-open range of strings, and not LIKE: it uses the index on both databases.
        above = name.digest_prefix + "g"
        found = session.scalars(versions.where(AdapterVersion.digest >= name.digest_prefix, AdapterVersion.digest < above).limit(2)).all()
        return found[0] if len(found) == 1 else None
    if name.alias is not None and name.alias != LATEST:
        return session.scalar(_by_alias(versions, adapter, name.alias))
    newest = versions.where(AdapterVersion.kind == "final").order_by(AdapterVersion.number.desc()).limit(1)
    if name.alias == LATEST:
        return session.scalar(newest)
    return session.scalar(_by_alias(versions, adapter, DEFAULT_ALIAS)) or session.scalar(newest)


def _by_alias(versions: Select[AdapterVersion], adapter: Adapter, alias: str) -> Select[AdapterVersion]:
    return versions.join(Alias, Alias.version_id == AdapterVersion.id).where(Alias.adapter_id == adapter.id, Alias.name == alias)


def _unknown(name: str) -> NotFound:
    return NotFound(
        f"The model {name!r} does not exist in this project; list the models to see what it can call.",
        param="model",
        code="model_not_found",
    )
