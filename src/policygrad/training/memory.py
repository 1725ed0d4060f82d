"""How much memory a run has taken."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

MIB = 2**20


def peak_memory() -> dict[str, float]:
    """MiB that this process has held at most, by name: `peak_memory_mib` of the host's, `peak_cuda_memory_mib` of the GPU's
    where tensors have been on one. Empty where the system does not count (Windows)."""
    peaks: dict[str, float] = {}
    if sys.platform != "win32":
        peaks["peak_memory_mib"] = _most_resident() / MIB
    if torch.cuda.is_available():
        held = max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
        peaks |= {"peak_cuda_memory_mib": held / MIB} if held else {}
    return peaks


def _most_resident() -> float:
    """Bytes. On Linux by VmHWM: getrusage there begins with what the process that started this one held."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
