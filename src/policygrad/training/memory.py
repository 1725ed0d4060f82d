"""How much memory a run has taken."""

from __future__ import annotations

import os
import sys

import torch

MIB = 2**20


def resident() -> int:
    """Bytes that this process holds now, 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_memory() -> dict[str, float]:
    """MiB that this process has held at most, by name: `peak_memory_mib` of the host's, `peak_cuda_memory_mib` of the GPU's
    where tensors have been on one. Empty where the system does not count (Windows)."""
    peaks: dict[str, float] = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        peaks["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB
    if torch.cuda.is_available():
        held = max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
        peaks |= {"peak_cuda_memory_mib": held / MIB} if held else {}
    return peaks
