"""What a measurement was made on."""

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

BF16_FLAGS = ("avx512_bf16", "amx_bf16")
NO_BF16 = (
    "This CPU has no native bf16 (neither avx512_bf16 nor amx): with dtype auto ours computes in float32 here, while the peer runs in bf16 "
    "as asked, which is emulated and slow. These ratios say what a user of this machine gets, not what bf16 hardware would show."
)


@dataclass(frozen=True)
class Machine:
    """The machine of a run, as its JSON tells it."""

    cpu: str
    cores: int
    """That this process may use; the threads of both sides."""
    bf16_native: bool
    load_before: float
    """Runnable tasks over the last minute when the benchmark began; above about 0.5 others were at work and figures are too low."""

    def as_json(self) -> dict[str, object]:
        """All fields."""
        return asdict(self)


def this_machine() -> Machine:
    """Looks at the machine now; call it before anything is started."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return Machine(_cpu_name(cpuinfo), len(os.sched_getaffinity(0)), has_native_bf16(cpuinfo), os.getloadavg()[0])


def has_native_bf16(cpuinfo: str) -> bool:
    """Whether a CPU multiplies bf16 itself, by the text of /proc/cpuinfo."""
    words = set(cpuinfo.split())
    return any(flag in words for flag in BF16_FLAGS)


def _cpu_name(cpuinfo: str) -> str:
    names = [line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
