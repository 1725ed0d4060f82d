"""The machine's memory."""

from __future__ import annotations

from pathlib import Path


def read_meminfo() -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; empty where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}


def measure_free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the bytes that this process may still take, also within its container; infinite where the system does not say."""
    free = float(read_meminfo().get("MemAvailable", float("inf")))
    try:
        limit, used = ((cgroup / f"memory.{name}").read_text(encoding="utf-8").strip() for name in ("max", "current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="utf-8").splitlines())
    except OSError:  # no container, or an older kernel's
        return free
    cached = int(stat["active_file"]) + int(stat["inactive_file"])  # which the kernel gives back
    return free if limit == "max" else min(free, int(limit) - int(used) + cached)
