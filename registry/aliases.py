"""Aliases: movable names of immutable versions. Callers pass an adapter that they got by their scope."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.clock import now_s
from core.errors import InvalidInput, NotFound
from core.tables import Adapter, AdapterVersion, Alias
from registry.naming import check_alias


def move(session: Session, adapter: Adapter, name: str, version: AdapterVersion) -> Alias:
    """Makes `name` mean `version`, whatever it meant before; the change is whole at the transaction's commit.

    Raises:
        InvalidInput: the name can't be an alias, or the version is another adapter's.
    """
    check_alias(name)
    if version.adapter_id != adapter.id:
        raise InvalidInput(f"That version is not one of adapter {adapter.name!r}; give one of its own.", param="version")
    # The adapter's row is the lock: two first moves of one alias would both insert.
    session.execute(select(Adapter.id).where(Adapter.id == adapter.id).with_for_update())
    alias = session.get(Alias, (adapter.id, name), populate_existing=True)
    if alias is None:
        alias = Alias(adapter_id=adapter.id, name=name, version_id=version.id, updated_at=now_s())
        session.add(alias)
    else:
        alias.version_id, alias.updated_at = version.id, now_s()
    session.flush()
    return alias


def list_aliases(session: Session, adapter: Adapter) -> Sequence[Alias]:
    """An adapter's aliases by name."""
    return session.scalars(select(Alias).where(Alias.adapter_id == adapter.id).order_by(Alias.name)).all()


def delete(session: Session, adapter: Adapter, name: str) -> None:
    """Removes an alias; the version stays.

    Raises:
        NotFound: the adapter has no such alias.
    """
    alias = session.get(Alias, (adapter.id, name))
    if alias is None:
        raise NotFound(f"Adapter {adapter.name!r} has no alias {name!r}; list its aliases to see them.", param="alias")
    session.delete(alias)
    session.flush()
