"""`python -m migrations` brings the configured database to the newest schema; with arguments it is Alembic's command line."""

import sys

from alembic.config import CommandLine

from migrations import INI_PATH


def main() -> None:
    """Runs Alembic with this package's configuration."""
    CommandLine(prog="python -m migrations").main(["-c", str(INI_PATH), *(sys.argv[1:] or ["upgrade", "head"])])


if __name__ == "__main__":
    main()
