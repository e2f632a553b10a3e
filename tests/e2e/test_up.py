"""`espalier up` as a user meets it: whole, on the tiny base model."""

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.platform import Platform


def wait_for_pid(platform: Platform, part: str, *, other_than: int, timeout_s: float = 60.0) -> int:
    """Pid of a part that came back healthy."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = json.loads((platform.data_dir / "status.json").read_text())["parts"][part]
        if found["state"] == "healthy" and found["pid"] not in (None, other_than):
            return int(found["pid"])
        time.sleep(0.2)
    raise AssertionError(f"{part} did not come back")


def pid_of(platform: Platform, part: str) -> int:
    return int(json.loads((platform.data_dir / "status.json").read_text())["parts"][part]["pid"])


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_up_survives_its_parts_refuses_a_second_keeps_state_and_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    platform = Platform(tmp_path / "data", tiny_model)
    cli = [sys.executable, "-P", "-m", "cli.main"]
    try:
        platform.start()
        client = platform.client("acme")
        file = client.files.create(file=("t.jsonl", b'{"messages": [{"role": "user", "content": "hi"}]}\n'), purpose="fine-tune")

        # Health at /healthz and on the command line.
        assert httpx.get(f"{platform.url}/healthz", timeout=10).status_code == 200
        status = subprocess.run([*cli, "status", "--json"], env=platform.env, capture_output=True, text=True, check=False)
        assert status.returncode == 0, status.stderr
        assert set(json.loads(status.stdout)["supervised"]["parts"]) == {"redis", "engine", "api", "worker", "beat"}

        # A second one on the folder is refused, and says by whom.
        second = subprocess.run([*cli, "up"], env=platform.env, capture_output=True, text=True, check=False, timeout=30)
        assert second.returncode == 3
        assert "already runs" in second.stderr

        # What dies comes back, and the platform serves again.
        for part in ("api", "redis"):
            old = pid_of(platform, part)
            platform.kill(part)
            wait_for_pid(platform, part, other_than=old)
        assert client.files.retrieve(file.id).filename == "t.jsonl"

        # Ctrl-C: exit code 0, no process left (Platform.stop checks).
        assert platform.stop() == 0

        # The same folder, started again: key, file and bytes are there. Then the supervisor itself is killed: its parts go with it.
        platform.start()
        assert client.files.content(file.id).content.startswith(b'{"messages"')
        supervisor = psutil.Process(json.loads((platform.data_dir / "status.json").read_text())["pid"])
        family = supervisor.children(recursive=True)
        assert len(family) >= 5
        supervisor.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
    finally:
        platform.stop()
