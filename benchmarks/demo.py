"""What the demo costs: wall seconds of the whole run and of its job, peak memory of each part.

`python -m benchmarks.demo [--json] [--steps N]`. The demo runs in a new data folder, so the base model is converted too (its
seconds are part of the whole and told apart by the demo itself).
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.processes import PeakMemory
from benchmarks.report import print_json, print_table
from tests.platform import free_port


def main() -> int:
    """Runs it; the exit code is the demo's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--steps", type=int, help="optimizer steps of the job; default the demo's own")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="espalier-demo-") as folder:
        command = [sys.executable, "-m", "cli.main", "demo", "--data-dir", str(Path(folder) / "data")]
        for option in ("--port", "--engine-port", "--redis-port"):
            command += [option, str(free_port())]
        if options.steps:
            command += ["--steps", str(options.steps)]
        started = time.monotonic()
        process = subprocess.Popen(command)
        with PeakMemory(process.pid) as memory:
            code = process.wait()
        wall_s = time.monotonic() - started
    rows = [(part, size / 2**20) for part, size in sorted(memory.peak_bytes.items(), key=lambda item: -item[1])]
    print_table(f"The demo: {wall_s:.0f} s, exit code {code}", ("part", "peak MiB"), rows)
    if options.json:
        print_json({"wall_s": wall_s, "exit_code": code, "peak_bytes": dict(memory.peak_bytes)})
    return code


if __name__ == "__main__":
    raise SystemExit(main())
