"""The one module that knows devices. Everything else asks it, so that no `.cuda()` hides elsewhere."""

import ctypes
import importlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

# A torch_npu that is merely installed breaks `import torch` where CANN is missing; it is imported below, on request.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch

from core.errors import InvalidInput


@dataclass(frozen=True)
class Device:
    """Where the engine computes and in which precision."""

    name: str
    """What torch calls it: cpu, cuda or npu."""
    dtype: torch.dtype
    """Precision of the base's weights and activations; LoRA factors are float32 always."""

    @property
    def torch(self) -> torch.device:
        """The torch device."""
        return torch.device(self.name)


def pick_device(name: str, dtype: str) -> Device:
    """Resolves the settings `device` and `dtype`.

    Raises:
        InvalidInput: the device was asked for by name and is not there.
    """
    resolved = _first_available() if name == "auto" else name
    if resolved == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(
            "device is cuda, but torch sees no GPU; set ESPALIER_DEVICE=cpu or install a CUDA build of torch.", param="device"
        )
    if resolved == "npu" and not npu_available():
        raise InvalidInput("device is npu, but torch_npu with CANN is not usable here; run `espalier doctor`.", param="device")
    return Device(resolved, _pick_dtype(resolved, dtype))


def npu_available() -> bool:
    """Whether torch_npu and its CANN libraries load and a device answers."""
    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        importlib.import_module("torch_npu")
    except ImportError:
        return False  # installed, but CANN's libraries (libhccl.so, ...) are not
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


def set_threads(num_threads: int | None) -> int:
    """Sizes the one compute team; returns its size."""
    count = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count


_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_memory() -> bool:
    """Makes the C library keep what is freed instead of giving each large buffer back at once.

    Activations come and go hundreds of times a second; mapped anew each time, every page of them would be faulted in and zeroed.

    Returns:
        Whether it could be set (glibc only).
    """
    libc = _glibc()
    if libc is None:
        return False
    return all(libc.mallopt(option, value) == 1 for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1)))


def release_memory() -> None:
    """Gives what is free back to the system; the next phase faults it in again."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def _first_available() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "npu" if npu_available() else "cpu"


def _pick_dtype(device: str, dtype: str) -> torch.dtype:
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    if device != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if _cpu_has_bf16() else torch.float32


def _cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 natively; elsewhere such matmuls are emulated and run at a fifth of fp32's rate."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
