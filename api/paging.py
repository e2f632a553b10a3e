"""Lists as the OpenAI wire spells them, paged by the last id seen."""

from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Depends, Query
from pydantic import BaseModel
from sqlalchemy import Select, and_, or_
from sqlalchemy.orm import InstrumentedAttribute, Session

from core.errors import InvalidInput

Row = TypeVar("Row")
Item = TypeVar("Item", bound=BaseModel)
Order = Literal["asc", "desc"]
MAX_PAGE = 10_000


class ListObject(BaseModel, Generic[Item]):
    """One page."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class PageParams(BaseModel):
    """Which page."""

    after: str | None
    limit: int
    order: Order


def _page_params(
    after: Annotated[str | None, Query(max_length=128, description="Id of the last object of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Objects on the page.")] = 20,
    order: Annotated[Order, Query(description="desc: newest first.")] = "desc",
) -> PageParams:
    return PageParams(after=after, limit=limit, order=order)


Paging = Annotated[PageParams, Depends(_page_params)]


def fetch_page(
    session: Session,
    statement: Select[Row],
    params: PageParams,
    *,
    sort: InstrumentedAttribute[Any],
    key: InstrumentedAttribute[str],
) -> tuple[list[Row], bool]:
    """Rows of one page, and whether more follow.

    Args:
        statement: already scoped to what the caller may see; the cursor is looked up within it.
        sort: column that orders; ties are broken by `key`.
        key: the id column that `after` refers to.
    Raises:
        InvalidInput: `after` is not the id of an object of this list.
    """
    descending = params.order == "desc"
    if params.after is not None:
        cursor = session.execute(statement.where(key == params.after).with_only_columns(sort, key)).first()
        if cursor is None:
            raise InvalidInput(f"{params.after!r} is not the id of an object of this list; start again without it.", param="after")
        value, last_id = cursor
        beyond = sort < value if descending else sort > value
        beyond_id = key < last_id if descending else key > last_id
        statement = statement.where(or_(beyond, and_(sort == value, beyond_id)))
    ordering = (sort.desc(), key.desc()) if descending else (sort.asc(), key.asc())
    rows = list(session.scalars(statement.order_by(*ordering).limit(params.limit + 1)))
    return rows[: params.limit], len(rows) > params.limit


def list_object(items: list[Item], ids: list[str], *, has_more: bool = False) -> ListObject[Item]:
    """The list object around a page's items."""
    return ListObject[Item](data=items, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=has_more)
