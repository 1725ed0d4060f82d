"""The machine's memory: how much is free for this process, and a limit that turns the kernel's kill into an error."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""Which groups this process belongs to; within a container its own are at the top."""


def read_meminfo() -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes; empty where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}


def measure_free_memory(cgroup: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """Return the bytes that this process may still take, also within its container; infinite where the system does not say."""
    free = float(read_meminfo().get("MemAvailable", float("inf")))
    return min(free, *(_measure_free_of_group(folder) for folder in _list_groups(cgroup, membership)))


def _list_groups(cgroup: Path, membership: Path) -> list[Path]:
    """Return the folders that limit this process: of each version of cgroups the top, its own group, and those in between."""
    tops = [cgroup, cgroup / "memory"]
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return tops
    groups = list[Path]()
    for line in lines:  # number:controllers:/path
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            top = cgroup / "memory" if controllers else cgroup
            group = top / path.strip("/")
            groups += [group, *(folder for folder in group.parents if folder.is_relative_to(top))]
    return list(dict.fromkeys([*tops, *groups]))


def _measure_free_of_group(folder: Path) -> float:
    """Return the bytes that a group may still take; infinite without a limit. Files that the kernel gives back are free."""
    for limit_name, used_name, caches in (
        ("memory.max", "memory.current", ("active_file", "inactive_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    ):
        try:
            limit, used = ((folder / name).read_text(encoding="utf-8").strip() for name in (limit_name, used_name))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
        except OSError:  # no container, or the other version's
            continue
        if limit != "max":
            return int(limit) - int(used) + sum(int(stat.get(name, 0)) for name in caches)
    return float("inf")


_lock = threading.Lock()
_depth, _before = 0, (0, 0)  # of `refusing_what_is_not_free`, which several threads may be in


@contextmanager
def refusing_what_is_not_free() -> Iterator[None]:
    """Let this process's allocations fail beyond what is free when the block begins, swap included.

    Without it the kernel grants them and later kills the process, which nothing can catch. Only Linux has such a limit
    (`RLIMIT_DATA`: private writable memory).
    """
    global _depth, _before
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        _before = (soft, hard) if _depth == 0 else _before
        _depth += 1
        free = measure_free_memory() + read_meminfo().get("SwapFree", 0)
        limits = [x for x in _before if x != resource.RLIM_INFINITY]
        limits += [_data_bytes() + max(0, int(free))] if free < float("inf") else []
        _set_limit(min(limits, default=resource.RLIM_INFINITY))
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _set_limit(_before[0])


def _set_limit(soft: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (soft, _before[1]))


def _data_bytes() -> int:
    """Return this process's private writable memory, whether it was touched or not."""
    return int(Path("/proc/self/statm").read_bytes().split()[5]) * os.sysconf("SC_PAGE_SIZE")
