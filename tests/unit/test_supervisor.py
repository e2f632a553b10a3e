"""The supervisor on real processes: what dies comes back, what is stopped is gone, what can't start says why."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cli.health import PortTaken, require_free_port
from cli.lock import data_dir_lock, is_held, read_status, write_status
from cli.process import rotate
from cli.secrets_file import read_or_create, write_secret
from cli.supervisor import Part, PartFailed, Running, State, Supervisor
from core.errors import Conflict

# Writes its pid when it is up; has a child of its own, as a Celery worker does.
PART_CODE = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


def part(name: str, folder: Path, *, code: str = PART_CODE, after: tuple[str, ...] = (), start_timeout_s: float = 20.0) -> Part:
    marker = folder / f"{name}.pid"

    def healthy() -> bool:
        return marker.exists() and psutil.pid_exists(int(marker.read_text().split()[0]))

    return Part(name, [sys.executable, "-c", code, str(marker)], dict(os.environ), healthy, after=after, start_timeout_s=start_timeout_s)


def pids(folder: Path, name: str) -> list[int]:
    return [int(pid) for pid in (folder / f"{name}.pid").read_text().split()]


def wait_for(what: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def stopping() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_part_starts_only_when_what_it_needs_is_healthy_and_a_killed_one_comes_back(tmp_path: Path, stopping: threading.Event) -> None:
    order: list[str] = []
    killed: list[int] = []

    def on_change(running: Running) -> None:
        order.append(f"{running.part.name} {running.state}")
        if order.count("second healthy") == 1 and not killed:
            killed.append(pids(tmp_path, "first")[0])
            os.kill(killed[0], signal.SIGKILL)
        if order.count("first healthy") == 2:
            stopping.set()

    supervisor = Supervisor([part("first", tmp_path), part("second", tmp_path, after=("first",))], tmp_path / "logs", on_change)
    orphan_of_first: list[int] = []
    threading.Thread(target=lambda: (wait_for(lambda: bool(killed)), orphan_of_first.extend(pids(tmp_path, "first"))), daemon=True).start()
    supervisor.run(stopping)

    assert order.index("first healthy") < order.index("second starting")
    assert "first restarting" in order
    assert supervisor.running["first"].num_restarts == 1
    assert supervisor.running["first"].last_exit == -signal.SIGKILL
    assert order[-2:] == ["second stopped", "first stopped"]
    assert all(gone(pid) for name in ("first", "second") for pid in pids(tmp_path, name)), "a process or its child outlived the stop"
    assert all(gone(pid) for pid in orphan_of_first), "the killed part's child was left behind"


def test_a_part_that_never_starts_ends_it_all_with_the_end_of_its_log(tmp_path: Path, stopping: threading.Event) -> None:
    bad = part("bad", tmp_path, code="raise SystemExit('no such setting: colour')")
    supervisor = Supervisor([part("good", tmp_path), bad], tmp_path / "logs", lambda _: None)
    with pytest.raises(PartFailed, match="no such setting: colour"):
        supervisor.run(stopping)
    assert supervisor.running["good"].state in (State.STOPPED, State.WAITING)
    if (tmp_path / "good.pid").exists():
        assert all(gone(pid) for pid in pids(tmp_path, "good"))


def test_a_silent_part_is_given_up(tmp_path: Path, stopping: threading.Event) -> None:
    silent = part("silent", tmp_path, code="import time; time.sleep(600)", start_timeout_s=0.3)
    with pytest.raises(PartFailed, match="silent did not start"):
        Supervisor([silent], tmp_path / "logs", lambda _: None).run(stopping)


def test_in_a_hurry_nobody_is_waited_for(tmp_path: Path, stopping: threading.Event) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + PART_CODE
    hurry = threading.Event()

    def on_change(running: Running) -> None:
        if running.state is State.HEALTHY:
            stopping.set()
            threading.Timer(0.5, hurry.set).start()

    one = dataclasses.replace(part("deaf", tmp_path, code=deaf), grace_s=600.0)
    Supervisor([one], tmp_path / "logs", on_change).run(stopping, hurry)
    assert hurry.is_set(), "it did not wait at all"
    assert all(gone(pid) for pid in pids(tmp_path, "deaf"))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_parts_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, sys
from cli.process import spawn
log = open({str(tmp_path / "log")!r}, "ab")
child = spawn([sys.executable, "-c", "import time; time.sleep(600)"], env=os.environ, log=log)
print(child.pid, flush=True)
child.wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait()
    wait_for(lambda: gone(child), 5.0)


def test_one_up_a_data_folder(tmp_path: Path) -> None:
    with data_dir_lock(tmp_path):
        write_status(tmp_path, {"healthy": True})
        assert read_status(tmp_path) == {"healthy": True}
        with pytest.raises(Conflict, match=f"pid {os.getpid()}") as error, data_dir_lock(tmp_path):
            pass
        assert error.value.code == "data_dir_in_use"
    assert not is_held(tmp_path)
    assert read_status(tmp_path) is None


def test_a_taken_port_is_named_with_its_setting() -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"Port {port} .*--port or ESPALIER_API_PORT"):
            require_free_port("127.0.0.1", port, part="API", setting="ESPALIER_API_PORT", option="--port")
    require_free_port("127.0.0.1", port, part="API", setting="ESPALIER_API_PORT", option="--port")


def test_secrets_are_their_owners_alone_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "data" / "admin.key"
    first = read_or_create(path, lambda: "sk-1")
    assert read_or_create(path, lambda: "sk-2") == first == "sk-1"
    assert path.stat().st_mode & 0o777 == 0o600
    write_secret(path, "sk-3")
    assert path.read_text() == "sk-3\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_over_the_limit_goes_on_in_place(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        rotate(log, limit_bytes=1000)
        assert log.stat().st_size == 100
        writer.write(b"y" * 1000)
        rotate(log, limit_bytes=1000)
        writer.write(b"after\n")
    assert log.read_bytes() == b"after\n"
    assert (tmp_path / "part.log.1").read_bytes().endswith(b"y" * 900)


def test_doctor_json_says_what_it_found(tmp_path: Path) -> None:
    env = {**os.environ, "ESPALIER_ENGINE_URL": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cli.main", "doctor", "--json", "--data-dir", str(tmp_path)],
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["python"]["ok"]
    assert findings["redis"]["ok"]
    assert done.returncode in (0, 1)
