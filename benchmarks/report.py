"""How every benchmark prints: a table for people, and with --json one object as the last line."""

import json
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

FILE_WIDTH = 170
"""Columns where standard output is no terminal: a table in a log must not wrap at 80."""


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on standard output."""
    table = Table()
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH, highlight=False)
    # Not the table's own title, which is folded to the table's width.
    console.print(title, style="italic", markup=False)
    console.print(table)


def say(line: str) -> None:
    """A line as soon as something is measured; the tables come at the end."""
    print(line, flush=True)


@contextmanager
def until_stopped() -> Generator[None]:
    """What runs in here ends early, without an error, on Ctrl-C or SIGTERM: what was measured by then is printed as usual."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        say("Stopped early; what follows is what was measured.")
    finally:
        signal.signal(signal.SIGTERM, previous)


def print_json(values: Mapping[str, object]) -> None:
    """The last line of a benchmark that was called with --json."""
    print(json.dumps(values))
