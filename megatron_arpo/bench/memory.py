"""How much memory an action needs at its peak, beyond what the process holds before it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch


def peak_bytes_of(action: Callable[[], object]) -> int:
    """On CUDA what PyTorch allocates at most, on CPU the growth of the resident set."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel starts to look for the peak anew
    before = _resident("VmRSS")
    action()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


class WatchesMemory:
    """Mixed into what runs in a process of its own: how much its resident set grows at most."""

    def start_watch(self) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = {name: _resident(name) for name in ("VmRSS", "RssShmem")}

    def largest_growth(self) -> int:
        """Of what is this process's own, in bytes since `start_watch`: shared memory that it maps is left out, as far as it is still
        mapped."""
        return _resident("VmHWM") - self._before["VmRSS"] - (_resident("RssShmem") - self._before["RssShmem"])
