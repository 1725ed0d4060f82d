"""What one program may take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from policygrad.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """What one program may take before it is ended. It is one process without threads in any case."""

    seconds: float = 8.0
    """From the moment it begins, by the clock; and as many of CPU."""
    memory: int = 1 << 30
    """Bytes of address space, the interpreter's (some 30 MiB) included."""
    files: int = 64 << 20
    """Bytes of all the files that it may write in its folder, which is all that it can write to, and gone afterwards."""
    output: int = 1 << 20
    """Bytes that it may print, to standard output and standard error each."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ConfigError(f"a sandbox's seconds must be above 0 and finite, not {self.seconds}")
        for name, least in (("memory", 64 << 20), ("files", 0), ("output", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"a sandbox's {name} must be at least {least:,} bytes, not {getattr(self, name):,}")
