"""Limits of a reward worker: its memory, its rank when the machine runs out of memory, its sandbox."""

import contextlib
import errno
import os
import re
import sys
from pathlib import Path
from typing import Literal

from policygrad.errors import ConfigError

# Here and not with the options, for which workers would have to import the command line's parser.
SandboxChoice = Literal["none", "auto", "bubblewrap", "landlock"]
"""Sandbox around reward workers; auto = the first that works on this machine."""
_UNITS = {"": 1 << 30, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")
MIN_MEMORY = 1 << 20  # bytes
MAX_OOM_SCORE = 1000  # the end of the kernel's scale for oom_score_adj


def parse_size(text: str, option: str = "memory") -> int | None:
    """Parse `2GiB`, `500MB` or `2` (GiB) to bytes; `none` is None.

    Raises:
        ConfigError: not a size, or less than 1 MiB.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{option} is a text such as '4GiB', not {text!r}")
    if text.strip().lower() == "none":
        return None
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if not match or not unit:
        raise ConfigError(f"{option} {text!r} is not a size: write 4GiB, 500MB, 4 (GiB), or none for no limit")
    size = float(match.group(1)) * unit
    if not MIN_MEMORY <= size < 1 << 62:
        raise ConfigError(f"{option} {text!r} is not between 1 MiB and 4 EiB: write 4GiB, or none for no limit")
    return int(size)


def format_size(count: int) -> str:
    """Format bytes as 4 GiB or 64 MiB."""
    unit, factor = ("GiB", 1 << 30) if count >= 1000 << 20 else ("MiB", 1 << 20)
    return f"{count / factor:.3g} {unit}"


def raise_oom_score() -> None:
    """On Linux, make the kernel kill this process and its children before any other when memory runs out."""
    with contextlib.suppress(OSError):  # not Linux, or no such file in a container: the memory limit holds all the same
        Path("/proc/self/oom_score_adj").write_text(str(MAX_OOM_SCORE))


def get_resident_bytes() -> int:
    """Return the memory that this process occupies; 0 where it is unknown (elsewhere than on Linux)."""
    return _read_statm(1)


class MemoryLimit:
    """Limits this process to `count` bytes more than it has now; None = no limit. Only Linux enforces it.

    The kernel refuses what exceeds it, and Python raises MemoryError. RLIMIT_DATA counts private writable memory, not address space
    that is only reserved, as CUDA does. A child process has a limit of its own, of the same size.
    """

    def __init__(self, count: int | None) -> None:
        self._start, self._count = get_resident_bytes(), count
        if count is None or not sys.platform.startswith("linux"):
            return
        import resource

        limit = _read_statm(5) + count
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def hint(self, error: BaseException) -> str:
        """Return the remedy for an error that this limit may have caused; else ""."""
        try:
            text = str(error)
        except Exception:  # an error whose text cannot be shown
            text = ""
        no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        if self._count is None or not (no_memory or "can't allocate memory" in text):  # torch has no class for it
            return ""
        return f"; a worker may use {format_size(self._count)} beyond what it has after loading (--rewards.memory)"

    @property
    def is_half_used(self) -> bool:
        """True once the process has grown by more than half of its limit: what it retains between calls will become too much."""
        return self._count is not None and get_resident_bytes() - self._start > self._count // 2


def _read_statm(field: int) -> int:
    """Return a field of /proc/self/statm in bytes: 1 = resident, 5 = data and stack."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[field]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
