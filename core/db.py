"""Sessions. One request is one transaction; what must be told to others is told after the commit."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session, sessionmaker

from core.settings import get_settings

BUSY_TIMEOUT_MS = 30_000


def make_engine(url: str) -> Engine:
    """An engine with the settings that this project relies on.

    SQLite runs in WAL with a busy timeout, and each transaction begins IMMEDIATE: a deferred one that reads and then writes can fail
    with "database is locked" at once, whatever the timeout.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True, pool_size=10, max_overflow=20)
    if parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: object) -> None:  # pyright: ignore[reportUnusedFunction]
        # SQLAlchemy opens the transaction itself, below.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"busy_timeout={BUSY_TIMEOUT_MS}", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.exec_driver_sql("BEGIN" if connection.get_execution_options().get("readonly") else "BEGIN IMMEDIATE")

    return engine


@lru_cache(maxsize=4)
def _sessionmaker(url: str) -> sessionmaker[Session]:
    return sessionmaker(make_engine(url), expire_on_commit=False)


def get_engine() -> Engine:
    """The process's engine for the configured database."""
    engine = _sessionmaker(get_settings().resolved_database_url).kw["bind"]
    assert isinstance(engine, Engine)
    return engine


def dispose_engine() -> None:
    """Closes all connections; a forked process calls it first, since connections don't survive a fork."""
    get_engine().dispose(close=False)


@contextmanager
def session_scope(*, readonly: bool = False) -> Generator[Session]:
    """A transaction: committed at the end, rolled back on any exception.

    Args:
        readonly: takes no write lock on SQLite; for requests that only look.
    """
    session = _sessionmaker(get_settings().resolved_database_url)()
    if readonly:
        session.connection(execution_options={"readonly": True})
    try:
        yield session
        session.commit()
    except BaseException:
        session.rollback()
        raise
    finally:
        session.close()
    callbacks: list[Callable[[], None]] = session.info.pop("after_commit", [])
    for callback in callbacks:
        callback()


def after_commit(session: Session, callback: Callable[[], None]) -> None:
    """Runs `callback` once the session's transaction is committed, never before and not after a rollback."""
    session.info.setdefault("after_commit", []).append(callback)
