"""The schema's history. `upgrade()` brings a database to the newest; `python -m migrations` is Alembic's own command line."""

from pathlib import Path

from alembic import command
from alembic.config import Config

INI_PATH = Path(__file__).parent / "alembic.ini"
URL_ATTRIBUTE = "database_url"


def alembic_config(url: str | None = None) -> Config:
    """Alembic's configuration for a database; default the configured one."""
    config = Config(INI_PATH)
    config.attributes[URL_ATTRIBUTE] = url
    return config


def upgrade(url: str | None = None) -> None:
    """Brings a database (SQLAlchemy URL; default the configured one) to the newest schema, in one transaction.

    Processes that start together may all call it: one does the work, the others wait and find it done.

    Raises:
        sqlalchemy.exc.OperationalError: the database does not answer, or a table stayed locked for longer than the lock timeout.
    """
    command.upgrade(alembic_config(url), "head")
