"""The real runner over a scripted engine, with leases that run out fast."""

from pathlib import Path

import pytest

from core.settings import get_settings
from tests.jobs import Platform


@pytest.fixture
def platform(fresh_settings: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    monkeypatch.setenv("ESPALIER_LEASE_TTL_S", "0.4")
    monkeypatch.setenv("ESPALIER_HEARTBEAT_S", "0.05")
    monkeypatch.setenv("ESPALIER_SWEEP_INTERVAL_S", "1")
    get_settings.cache_clear()
    return Platform(fresh_settings)
