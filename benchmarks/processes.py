"""Peak memory of a family of processes, sampled from outside."""

import threading
from collections import defaultdict

import psutil

# What a part's command line shows, most telling first.
_MARKS = {"engine.host": "engine", "api.main": "api", " worker ": "worker", " beat ": "beat", "valkey": "redis", "redis-server": "redis"}


class PeakMemory:
    """Samples proportional memory (PSS where the kernel tells, so that shared pages count once) of a process and all below it.

    Use as a context manager around the run; `peak_bytes` has one entry a part and `total`.
    """

    def __init__(self, pid: int, *, interval_s: float = 1.0) -> None:
        self._root = psutil.Process(pid)
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak_bytes: dict[str, int] = defaultdict(int)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            now: dict[str, int] = defaultdict(int)
            for process in self._family():
                try:
                    size = _memory_bytes(process)
                    now[_part(process)] += size
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            now["total"] = sum(now.values())
            for part, size in now.items():
                self.peak_bytes[part] = max(self.peak_bytes[part], size)

    def _family(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _memory_bytes(process: psutil.Process) -> int:
    full = process.memory_full_info()
    return int(getattr(full, "pss", full.rss))


def _part(process: psutil.Process) -> str:
    command = " ".join(process.cmdline()) + " "
    return next((part for mark, part in _MARKS.items() if mark in command), "command line")
