"""What this machine computes with, and what device `auto` and dtype `auto` mean on it. Torch is imported late."""

from __future__ import annotations

import ctypes
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import psutil

from rft_core.errors import SettingsError

# x86 CPUs with these flags multiply bfloat16 natively; others emulate it, up to a hundred times slower than float32.
NATIVE_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
CPU_INFO = Path("/proc/cpuinfo")
# mallopt(3): no block is mapped on its own (M_MMAP_MAX), and the top of the heap is never trimmed (M_TRIM_THRESHOLD).
KEEPING = ((-4, 0), (-1, -1))


def resolve_device(device: str) -> str:
    """`cpu` or `cuda` for `auto`, `cpu` or `cuda`. Raises SettingsError when CUDA is asked for and absent."""
    if device == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise SettingsError(
            f"model.device is cuda, but torch {torch.__version__} finds no CUDA device; set model.device to auto or "
            "cpu, or install a CUDA build of torch"
        )
    return "cpu"


def resolve_dtype(dtype: str, device: str) -> str:
    """`float32` or `bfloat16` for `auto`, on a resolved device: bfloat16 where it is multiplied natively."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if has_native_bfloat16(device) else "float32"


def has_native_bfloat16(device: str) -> bool:
    if device == "cpu":
        return bool(cpu_flags() & NATIVE_BFLOAT16_FLAGS)
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def has_matrix_unit() -> bool:
    """Whether this CPU multiplies matrices by AMX, several times faster than by vectors: all else then weighs more."""
    return "amx_bf16" in cpu_flags()


def cpu_flags(cpu_info: Path = CPU_INFO) -> frozenset[str]:
    """Instruction sets that the kernel names; empty where there is no such file (macOS, Windows)."""
    try:
        text = cpu_info.read_text()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(flags.split())


def cpu_name(cpu_info: Path = CPU_INFO) -> str:
    """The CPU's model as the kernel names it; `unknown` where it does not."""
    try:
        text = cpu_info.read_text()
    except OSError:
        return "unknown"
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, "unknown")


def num_cores() -> int:
    """Cores that this process may use: fewer than the machine has, in a container or under taskset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads() -> int:
    """Threads that torch takes by itself: the cores of this process, or OMP_NUM_THREADS."""
    import torch

    return torch.get_num_threads()


def use_threads(count: int) -> None:
    """The number of threads is part of the bits: sums are split among them."""
    import torch

    torch.set_num_threads(count)


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed for the next allocation; False where it is not glibc's.

    By itself it gives large blocks back to the kernel at once, and the pages of the next one are cleared again, which
    on a CPU is a sixth of an update.
    """
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if library is None or not hasattr(library, "mallopt") or not hasattr(library, "gnu_get_libc_version"):
        return False
    return all(library.mallopt(option, value) == 1 for option, value in KEEPING)


def has_compiler(device: str) -> bool:
    """Whether torch.compile finds what it makes code with: a C++ compiler on a CPU, Triton on CUDA."""
    if device == "cpu":
        return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
    return find_spec("triton") is not None


def free_memory_bytes() -> int:
    return psutil.virtual_memory().available


def total_memory_bytes(device: str) -> int:
    """What a resolved device has, free or not."""
    if device == "cpu":
        return psutil.virtual_memory().total
    import torch

    return torch.cuda.get_device_properties(device).total_memory
