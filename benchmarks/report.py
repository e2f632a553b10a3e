"""How every benchmark prints: a table for people, and with --json one object as the last line."""

import json
import sys
from collections.abc import Mapping, Sequence

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


def print_json(values: Mapping[str, object]) -> None:
    """The last line of a benchmark that was called with --json."""
    print(json.dumps(values))
