"""Alembic's entry: the tables of core.tables on the database of the settings, on SQLite and on PostgreSQL."""

from typing import Any

from alembic import context
from sqlalchemy import Connection, text

from core.db import make_engine
from core.settings import get_settings
from core.tables import Base
from migrations import URL_ATTRIBUTE

# Waiting longer for a table would queue every request that comes after behind this migration.
LOCK_TIMEOUT_MS = 5_000
# Any fixed number: processes that migrate at once take turns by it.
ADVISORY_LOCK_KEY = 0x4553_5041

OPTIONS: dict[str, Any] = {
    "target_metadata": Base.metadata,
    # SQLite can't alter a table in place; Alembic makes a new one and copies.
    "render_as_batch": True,
    "compare_server_default": True,
}


def database_url() -> str:
    return context.config.attributes.get(URL_ATTRIBUTE) or get_settings().resolved_database_url


def run_offline() -> None:
    """Prints SQL in place of running it."""
    context.configure(url=database_url(), literal_binds=True, dialect_opts={"paramstyle": "named"}, **OPTIONS)
    with context.begin_transaction():
        context.run_migrations()


def run_online() -> None:
    engine = make_engine(database_url())
    try:
        with engine.connect() as connection:
            if connection.dialect.name == "sqlite":
                migrate_sqlite(connection)
            else:
                migrate_postgresql(connection)
    finally:
        engine.dispose()


def migrate_sqlite(connection: Connection) -> None:
    # Without this, replacing a table would delete the rows that refer to it. SQLite ignores the pragma inside a transaction.
    raw: Any = connection.connection.dbapi_connection
    raw.execute("PRAGMA foreign_keys=OFF")
    # core.db opens each transaction itself, so that here DDL is transactional (Alembic assumes that pysqlite's is not).
    context.configure(connection=connection, transactional_ddl=True, **OPTIONS)
    with context.begin_transaction():
        context.run_migrations()
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
        if broken:
            raise RuntimeError(f"The migration would leave {len(broken)} rows that refer to nothing, the first in {broken[0][0]}; undone.")


def migrate_postgresql(connection: Connection) -> None:
    context.configure(connection=connection, **OPTIONS)
    with context.begin_transaction():
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK_KEY})
        connection.execute(text(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}"))
        context.run_migrations()


if context.is_offline_mode():
    run_offline()
else:
    run_online()
