"""Options become settings: the environment is written here, before anything reads it, so that child processes see the same."""

import os
from pathlib import Path

from core.settings import Settings, get_settings


def apply(
    *, data_dir: Path | None = None, port: int | None = None, engine_port: int | None = None, redis_port: int | None = None
) -> Settings:
    """Sets what was given on the command line, makes the data folder absolute, and returns the settings."""
    given = {"DATA_DIR": data_dir, "API_PORT": port, "ENGINE_PORT": engine_port, "REDIS_PORT": redis_port}
    os.environ.update({f"ESPALIER_{name}": str(value) for name, value in given.items() if value is not None})
    get_settings.cache_clear()
    os.environ["ESPALIER_DATA_DIR"] = str(get_settings().data_dir.absolute())
    get_settings.cache_clear()
    return get_settings()
