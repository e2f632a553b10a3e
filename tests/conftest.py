"""Fixtures that several suites share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from core import db
from core.settings import get_settings
from tests.postgres import database_url, postgres  # noqa: F401
from tests.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a byte-level tokenizer and a chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-base"))


@pytest.fixture
def fresh_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data folder of its own; settings are read anew. Yields the folder."""
    monkeypatch.setenv("ESPALIER_DATA_DIR", str(tmp_path))
    get_settings.cache_clear()
    yield tmp_path
    db.dispose_engine()
    get_settings.cache_clear()
