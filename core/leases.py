"""Leases with fencing tokens (Kleppmann 2016): a holder that was paused or cut off can't write over its successor."""

from dataclasses import dataclass

from sqlalchemy import CursorResult, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core.clock import now_s
from core.errors import LeaseLost
from core.tables import Lease


@dataclass(frozen=True)
class Held:
    """A lease that was acquired. `token` goes with every write."""

    resource: str
    holder: str
    token: int
    took_over: bool
    """True when the previous holder let it expire (it died), not when it released it."""


def acquire(session: Session, resource: str, holder: str, *, ttl_s: float) -> Held | None:
    """Claims the resource, or returns None while another holder's lease is live.

    The row is created at the first claim and never deleted, so tokens only grow.
    """
    now = now_s()
    row = session.scalar(select(Lease).where(Lease.resource == resource).with_for_update())
    if row is None:
        try:
            with session.begin_nested():
                session.add(Lease(resource=resource, holder=holder, token=1, expires_at=now + ttl_s))
        except IntegrityError:
            return None  # another first claim won the primary key
        return Held(resource, holder, 1, took_over=False)
    if row.expires_at > now:
        return None
    took_over = row.holder != ""
    row.holder, row.token, row.expires_at = holder, row.token + 1, now + ttl_s
    session.flush()
    return Held(resource, holder, row.token, took_over)


def renew(session: Session, held: Held, *, ttl_s: float) -> None:
    """Heartbeat.

    Raises:
        LeaseLost: somebody else holds it now.
    """
    _fenced_update(session, held, expires_at=now_s() + ttl_s)


def release(session: Session, held: Held) -> None:
    """Gives the resource back; the next claim does not count as taking over from the dead.

    Raises:
        LeaseLost: somebody else holds it now.
    """
    _fenced_update(session, held, holder="", expires_at=0.0)


def check(session: Session, held: Held) -> None:
    """Call inside the transaction of every write made under the lease: the row lock orders it against a takeover.

    Raises:
        LeaseLost: somebody else holds it now; the caller's transaction must not commit.
    """
    row = session.scalar(select(Lease).where(Lease.resource == held.resource).with_for_update())
    if row is None or row.token != held.token or row.holder != held.holder:
        raise LeaseLost(f"Lease on {held.resource} with token {held.token} was taken over; this holder stops.")


def is_live(session: Session, resource: str) -> bool:
    """Whether somebody holds the resource now."""
    row = session.get(Lease, resource)
    return row is not None and row.expires_at > now_s()


def _fenced_update(session: Session, held: Held, **values: object) -> None:
    statement = update(Lease).where(Lease.resource == held.resource, Lease.token == held.token, Lease.holder == held.holder)
    result = session.execute(statement.values(**values))
    assert isinstance(result, CursorResult)
    if result.rowcount != 1:
        raise LeaseLost(f"Lease on {held.resource} with token {held.token} was taken over; this holder stops.")
