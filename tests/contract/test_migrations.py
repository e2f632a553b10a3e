"""The schema's history on both databases.

1. From nothing to the newest schema, after which the models and the database agree (`alembic check`).
2. Foreign keys are real, the one that jobs and versions have on each other included.
3. Several processes that start together migrate once.
4. Down to nothing and up again.
5. SQL can be printed in place of being run.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import IntegrityError, OperationalError

import migrations
from core.db import make_engine
from core.tables import Base
from tests.postgres import Postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
    else:
        with request.getfixturevalue("postgres").database(migrated=False) as url:
            yield url


def test_empty_to_head_leaves_nothing_to_do(empty_url: str) -> None:
    migrations.upgrade(empty_url)
    command.check(migrations.alembic_config(empty_url))
    migrations.upgrade(empty_url)

    engine = create_engine(empty_url)
    assert set(inspect(engine).get_table_names()) == {*Base.metadata.tables, "alembic_version"}
    engine.dispose()


def test_circular_foreign_key_is_enforced(empty_url: str) -> None:
    migrations.upgrade(empty_url)
    engine = make_engine(empty_url)
    referred = {
        (table, key["name"], key["referred_table"])
        for table in ("jobs", "adapter_versions")
        for key in inspect(engine).get_foreign_keys(table)
    }
    assert ("jobs", "fk_jobs_adapter_version_id", "adapter_versions") in referred
    assert ("adapter_versions", "fk_adapter_versions_job_id", "jobs") in referred
    with pytest.raises(IntegrityError), engine.begin() as connection:
        connection.execute(text("INSERT INTO projects (id, tenant_id, name, created_at) VALUES ('p', 'nobody', 'p', 0)"))
    engine.dispose()


def test_processes_that_start_together_migrate_once(empty_url: str) -> None:
    code = "import sys, migrations; migrations.upgrade(sys.argv[1])"
    processes = [subprocess.Popen([sys.executable, "-c", code, empty_url], stderr=subprocess.PIPE) for _ in range(3)]
    errors = [process.communicate(timeout=60)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    command.check(migrations.alembic_config(empty_url))


def test_down_and_up_again(empty_url: str) -> None:
    config = migrations.alembic_config(empty_url)
    migrations.upgrade(empty_url)
    command.downgrade(config, "base")
    engine = create_engine(empty_url)
    assert inspect(engine).get_table_names() == ["alembic_version"]
    engine.dispose()
    migrations.upgrade(empty_url)
    command.check(config)


def test_sql_is_printed_offline(empty_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    command.upgrade(migrations.alembic_config(empty_url), "head", sql=True)
    sql = capsys.readouterr().out
    assert all(f"CREATE TABLE {table}" in sql for table in Base.metadata.tables)
    assert "fk_jobs_adapter_version_id" in sql


def test_a_locked_table_does_not_queue_everyone(postgres: Postgres) -> None:
    """A migration that can't get its lock gives up (and changes nothing) rather than making every later request wait behind it."""
    with postgres.database(migrated=True) as url:
        engine = make_engine(url)
        with engine.begin() as reader:
            reader.execute(text("SELECT * FROM jobs"))
            with pytest.raises(OperationalError, match="lock timeout"):
                command.downgrade(migrations.alembic_config(url), "base")
        command.check(migrations.alembic_config(url))
        engine.dispose()


def test_command_line_migrates_the_configured_database(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "migrations"],
        env={"ESPALIER_DATA_DIR": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    command.check(migrations.alembic_config(f"sqlite:///{tmp_path / 'espalier.db'}"))
