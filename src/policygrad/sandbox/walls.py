"""The walls that there are, and which of them stands on this machine: each is tried before it is trusted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from policygrad.errors import ConfigError
from policygrad.sandbox import bubblewrap, landlock, seccomp

SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/full")
PACKAGES = str(Path(__file__).parents[2])
"""The folder that holds this package, for the interpreter inside."""


class Wall(Protocol):
    """How a process is kept apart."""

    @property
    def name(self) -> str:
        """By which it is asked for."""

    @property
    def folder(self) -> bool:
        """Whether its processes write into a folder of this machine's, whose size has to be watched."""

    def command(self, inner: Sequence[str], readable: Sequence[str], files: int) -> list[str]:
        """The command that runs `inner` behind it."""

    def orders(self, readable: Sequence[str], folder: str, *, alone: bool) -> dict[str, Any]:
        """What the process has to do itself, before all else (inside.confine)."""


@dataclass(frozen=True)
class Bubblewrap:
    """Namespaces made by bwrap, and seccomp."""

    name: str = "bubblewrap"
    folder: bool = False

    def command(self, inner: Sequence[str], readable: Sequence[str], files: int) -> list[str]:
        return bubblewrap.command(inner, readable, files)

    def orders(self, readable: Sequence[str], folder: str, *, alone: bool) -> dict[str, Any]:
        return {"alone": alone, "landlock": None}


@dataclass(frozen=True)
class Landlock:
    """Landlock and seccomp: the process sees the machine's process ids and file names, and can neither open nor signal them."""

    name: str = "landlock"
    folder: bool = True

    def command(self, inner: Sequence[str], readable: Sequence[str], files: int) -> list[str]:
        return list(inner)

    def orders(self, readable: Sequence[str], folder: str, *, alone: bool) -> dict[str, Any]:
        return {"alone": alone, "landlock": {"readable": list(readable), "writable": [folder, *_DEVICES]}}


WALLS: dict[str, Wall] = {"bubblewrap": Bubblewrap(), "landlock": Landlock()}


def interpreter() -> tuple[str, ...]:
    """What has to be readable for this Python, its packages and its libraries."""
    executable = Path(sys.executable)
    homes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    homes |= {str(path.parent.parent) for path in (executable, executable.resolve())}
    homes.add(str(Path(__file__).parents[1]))
    return (*SYSTEM, *sorted(home for home in homes if home != "/" and not any(_below(home, s) for s in SYSTEM)))


@cache
def standing(name: str = "auto") -> Wall:
    """The wall of this name, or the first that stands here. Tried once per process, by running a program behind it.

    Raises ConfigError, with what each lacks and the way out.
    """
    if name != "auto" and name not in WALLS:
        raise ConfigError(f"there is no wall {name!r}: choose auto, {', '.join(WALLS)}")
    lacks = []
    for wall in WALLS.values() if name == "auto" else (WALLS[name],):
        missing = _missing(wall)
        if missing is None:
            return wall
        lacks.append(f"{wall.name}: {missing}")
    raise ConfigError(
        "programs cannot be kept apart from this machine: "
        + "; ".join(lacks)
        + ". Install bubblewrap (apt install bubblewrap, dnf install bubblewrap), or boot a Linux kernel from 5.13 on with "
        "Landlock (lsm=landlock,… on its command line). In a container, allow it user namespaces, or the system calls landlock_* "
        "and seccomp (Docker: a newer version, or --security-opt seccomp=FILE). "
        "Programs of a model's are not run without a wall"
    )


def _missing(wall: Wall) -> str | None:
    """What keeps a wall from standing here; None = it stands."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if not seccomp.known():
        return f"no seccomp filter is known for {os.uname().machine}"
    needs: dict[str, Callable[[], str | None]] = {
        "bubblewrap": lambda: None if bubblewrap.program() else "bwrap is not installed",
        "landlock": lambda: None if landlock.version() else "the kernel has none",
    }
    return needs[wall.name]() or _refusal(wall)


def _refusal(wall: Wall) -> str | None:
    """What happens when a program runs behind it; None = as it should."""
    from policygrad.sandbox.program import run  # which needs a wall
    from policygrad.sandbox.session import WallError

    try:
        outcome = run("print(6 * 7)", wall=wall)
    except WallError as error:
        return str(error)
    return None if outcome.stdout == "42\n" else f"a program behind it ended with {outcome.said}"


def _below(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)
