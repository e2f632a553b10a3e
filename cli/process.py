"""Child processes that can't outlive their parent, and what they cost."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

PR_SET_PDEATHSIG = 1
# Loaded here: the child may only call what is there already.
_LIBC: ctypes.CDLL | None = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with(parent_pid: int) -> None:
    """Runs in the child before exec: the kernel kills it when the thread that forked it ends, however that ends.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call above.
    if os.getppid() != parent_pid:
        os._exit(1)


def spawn(command: Sequence[str], *, env: Mapping[str, str], log: IO[bytes], cwd: Path | None = None) -> subprocess.Popen[bytes]:
    """Starts a command as the leader of a session of its own, output to `log`. Call from the main thread only (see `_die_with`).

    A session of its own: a terminal's Ctrl-C reaches the supervisor alone, which then stops the parts in order.

    Raises:
        OSError: the command can't be started.
    """
    parent_pid = os.getpid()
    return subprocess.Popen(
        list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=dict(env), cwd=cwd, start_new_session=True,
        preexec_fn=lambda: _die_with(parent_pid),
    )  # fmt: skip


def signal_group(process: subprocess.Popen[bytes], signum: int) -> None:
    """Signals the whole session's process group; what is gone already is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)


def stop(process: subprocess.Popen[bytes], *, grace_s: float, hurry: threading.Event | None = None) -> None:
    """Asks the leader to end (TERM), waits `grace_s` seconds or until `hurry` is set, then kills what is left of its group.

    Only the leader is asked: a Celery parent stops its own children, and they treat the same signal in another way.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while process.poll() is None and time.monotonic() < deadline and not (hurry and hurry.is_set()):
            time.sleep(0.02)
    signal_group(process, signal.SIGKILL)
    process.wait()
    _wait_group_gone(process.pid, 2.0)


def _wait_group_gone(group: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.02)


def peak_memory_bytes(pid: int) -> int:
    """Peak resident bytes of a process and its living descendants, added up; 0 if it is gone.

    Shared pages count once per process, so forked workers are overstated.
    """
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_peak_of(member) for member in family)


def _peak_of(process: psutil.Process) -> int:
    try:
        if sys.platform == "linux":
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return process.memory_info().rss
    except (OSError, psutil.Error):
        return 0


def rotate(log: Path, *, limit_bytes: int) -> None:
    """Moves a log over the limit to `<name>.1` and empties it in place: writers that append go on in the emptied file."""
    if log.exists() and log.stat().st_size > limit_bytes:
        log.with_name(log.name + ".1").write_bytes(log.read_bytes()[-limit_bytes:])
        os.truncate(log, 0)


def tail(log: Path, num_lines: int = 15) -> str:
    """The last lines of a log."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
