"""Peak memory of one process, as the kernel keeps it (Linux)."""

from pathlib import Path


def peak_bytes(pid: int) -> int:
    """Greatest resident memory of a process so far (VmHWM: exact, no sampling), shared pages included."""
    return 1024 * _field_kib(Path(f"/proc/{pid}/status").read_text(), "VmHWM")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process now."""
    return 1024 * _field_kib(Path(f"/proc/{pid}/status").read_text(), "VmRSS")


def reset_peak(pid: int) -> None:
    """Starts the peak anew from what is resident now. Source: proc(5), /proc/pid/clear_refs, value 5."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _field_kib(status: str, name: str) -> int:
    for line in status.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(f"/proc/<pid>/status has no {name}")
