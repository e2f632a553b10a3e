"""What is measured, each a command that prints a table: `python -m benchmarks.NAME [--json]`."""
