"""Tenancy. Code that answers a request never builds a query of its own over tenant data: it starts from `Scope`."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from sqlalchemy import Select, select
from sqlalchemy.orm import Mapped, Session

from core.errors import NotFound


class Owned(Protocol):
    """A table whose rows belong to a project."""

    id: Mapped[str]
    tenant_id: Mapped[str]
    project_id: Mapped[str]


T = TypeVar("T", bound=Owned)


@dataclass(frozen=True)
class Scope:
    """Whose data a request may touch."""

    tenant_id: str
    project_id: str
    project: str
    api_key_id: str

    def select(self, table: type[T]) -> Select[T]:
        """A SELECT over this project's rows only."""
        return select(table).where(table.tenant_id == self.tenant_id, table.project_id == self.project_id)

    def get(self, session: Session, table: type[T], object_id: str, *, what: str) -> T:
        """One row by id.

        Raises:
            NotFound: no such row, or it is another project's.
        """
        row = session.scalar(self.select(table).where(table.id == object_id))
        if row is None:
            raise NotFound(f"No {what} {object_id!r} in this project; list what there is to see its id.", param="id")
        return row
