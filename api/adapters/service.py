"""Looking at adapters and moving their aliases, inside one project."""

from typing import Literal, cast

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.adapters.schemas import AdapterObject, AliasObject, VersionObject
from api.paging import PageParams, fetch_page
from core.db import session_scope
from core.errors import NotFound
from core.scope import Scope
from core.tables import Adapter, AdapterVersion, Alias
from registry import aliases
from registry.names import fine_tuned_name, parse_model_name, resolve_version


def list_adapters(scope: Scope, params: PageParams) -> tuple[list[AdapterObject], bool]:
    """One page of the project's adapters."""
    with session_scope(readonly=True) as session:
        rows, has_more = fetch_page(session, scope.select(Adapter), params, sort=Adapter.created_at, key=Adapter.id)
        return [_adapter_object(session, scope, row) for row in rows], has_more


def retrieve_adapter(scope: Scope, name: str) -> AdapterObject:
    """One adapter of the project."""
    with session_scope(readonly=True) as session:
        return _adapter_object(session, scope, get_adapter(session, scope, name))


def list_versions(scope: Scope, name: str, params: PageParams) -> tuple[list[VersionObject], bool]:
    """One page of an adapter's versions."""
    with session_scope(readonly=True) as session:
        adapter = get_adapter(session, scope, name)
        statement = select(AdapterVersion).where(AdapterVersion.adapter_id == adapter.id)
        rows, has_more = fetch_page(session, statement, params, sort=AdapterVersion.number, key=AdapterVersion.id)
        names = _alias_names(session, adapter)
        return [_version_object(scope, adapter, row, names) for row in rows], has_more


def retrieve_version(scope: Scope, name: str, version: str) -> VersionObject:
    """One version of an adapter."""
    with session_scope(readonly=True) as session:
        adapter = get_adapter(session, scope, name)
        return _version_object(scope, adapter, get_version(session, adapter, version), _alias_names(session, adapter))


def move_alias(scope: Scope, name: str, alias: str, version: str) -> AliasObject:
    """Makes an alias mean a version."""
    with session_scope() as session:
        adapter = get_adapter(session, scope, name)
        target = get_version(session, adapter, version)
        moved = aliases.move(session, adapter, alias, target)
        return AliasObject(name=alias, adapter=adapter.name, version=target.number, digest=target.digest, updated_at=int(moved.updated_at))


def delete_alias(scope: Scope, name: str, alias: str) -> None:
    """Removes an alias."""
    with session_scope() as session:
        aliases.delete(session, get_adapter(session, scope, name), alias)


def get_adapter(session: Session, scope: Scope, name: str) -> Adapter:
    """An adapter of the project by name.

    Raises:
        NotFound: no such adapter here.
    """
    row = session.scalar(scope.select(Adapter).where(Adapter.name == name))
    if row is None:
        raise NotFound(f"No adapter {name!r} in this project; list the adapters to see their names.", param="name")
    return row


def get_version(session: Session, adapter: Adapter, version: str) -> AdapterVersion:
    """A version by number, digest (prefix) or alias.

    Raises:
        NotFound: the adapter has none that this means.
    """
    parsed = parse_model_name(f"{adapter.name}@{version}")
    row = None if parsed is None else resolve_version(session, adapter, parsed)
    if row is None:
        message = f"Adapter {adapter.name!r} has no version {version!r}; give a number, a digest (at least 12 digits) or an alias of it."
        raise NotFound(message, param="version")
    return row


def _adapter_object(session: Session, scope: Scope, adapter: Adapter) -> AdapterObject:
    numbers = select(Alias.name, AdapterVersion.number).join(AdapterVersion, Alias.version_id == AdapterVersion.id)
    count = select(func.count()).select_from(AdapterVersion).where(AdapterVersion.adapter_id == adapter.id)
    return AdapterObject(
        id=adapter.id,
        name=adapter.name,
        model=f"{scope.project}/{adapter.name}",
        base_model=adapter.base_model,
        created_at=int(adapter.created_at),
        num_versions=session.scalar(count) or 0,
        aliases={row[0]: row[1] for row in session.execute(numbers.where(Alias.adapter_id == adapter.id).order_by(Alias.name))},
    )


def _version_object(scope: Scope, adapter: Adapter, row: AdapterVersion, names: dict[str, list[str]]) -> VersionObject:
    return VersionObject(
        id=row.id,
        adapter=adapter.name,
        number=row.number,
        digest=row.digest,
        model=fine_tuned_name(scope.project, adapter.name, row.digest),
        kind=cast("Literal['final', 'checkpoint']", row.kind),
        bytes=row.num_bytes,
        created_at=int(row.created_at),
        job_id=row.job_id,
        aliases=names.get(row.id, []),
        tar_sha256=row.tar_sha256,
        lineage=row.lineage,
    )


def _alias_names(session: Session, adapter: Adapter) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for alias in aliases.list_aliases(session, adapter):
        names.setdefault(alias.version_id, []).append(alias.name)
    return names
