"""The walls that there are, and which of them stands on this machine: each is tried before it is trusted."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from policygrad.errors import ConfigError
from policygrad.sandbox import landlock, seccomp

# The wall of bubblewrap (bwrap): a file system, a network and process ids of its own, as a user of no rights.

_NOBODY = "65534"


def find_bwrap() -> str | None:
    """Where bwrap is; None = not installed."""
    return shutil.which("bwrap")


def writable_folder(readable: Sequence[str]) -> str:
    """Where the process may write: /tmp, unless that is to be read."""
    return "/run/tmp" if "/tmp" in readable else "/tmp"


def build_bwrap_command(inner: Sequence[str], readable: Sequence[str], files: int) -> list[str]:
    """`inner` behind the wall: it sees `readable`, unchangeable, and an empty `folder` of `files` bytes, gone with it."""
    words = [
        find_bwrap() or "bwrap",
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
    ]
    words += ["--unshare-cgroup-try", "--uid", _NOBODY, "--gid", _NOBODY, "--cap-drop", "ALL"]
    words += ["--new-session", "--die-with-parent", "--hostname", "sandbox"]
    words += ["--dev", "/dev", "--proc", "/proc", "--size", str(max(files, 4096)), "--tmpfs", writable_folder(readable)]
    for path in sorted(readable, key=len):  # what is inside another after it
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path] if os.path.dirname(path) == "/" else []
        words += ["--ro-bind-try", path, path] if not os.path.islink(path) or os.path.dirname(path) != "/" else []
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", writable_folder(readable), "--", *inner]


SYSTEM_PATHS = (
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


class SandboxBackend(Protocol):
    """How a process is kept apart."""

    @property
    def name(self) -> str:
        """By which it is asked for."""

    @property
    def needs_folder(self) -> bool:
        """Whether its processes write into a folder of this machine's, whose size has to be watched."""

    def command(self, inner: Sequence[str], readable: Sequence[str], files: int) -> list[str]:
        """The command that runs `inner` behind it."""

    def restrictions(self, readable: Sequence[str], folder: str, *, alone: bool) -> dict[str, Any]:
        """What the process has to do itself, before all else (inside.confine)."""


@dataclass(frozen=True)
class Bubblewrap:
    """Namespaces made by bwrap, and seccomp."""

    name: str = "bubblewrap"
    needs_folder: bool = False

    def command(self, inner: Sequence[str], readable: Sequence[str], files: int) -> list[str]:
        return build_bwrap_command(inner, readable, files)

    def restrictions(self, readable: Sequence[str], folder: str, *, alone: bool) -> dict[str, Any]:
        return {"alone": alone, "landlock": None}


@dataclass(frozen=True)
class Landlock:
    """Landlock and seccomp: the process sees the machine's process ids and file names, and can neither open nor signal them."""

    name: str = "landlock"
    needs_folder: bool = True

    def command(self, inner: Sequence[str], readable: Sequence[str], files: int) -> list[str]:
        return list(inner)

    def restrictions(self, readable: Sequence[str], folder: str, *, alone: bool) -> dict[str, Any]:
        return {"alone": alone, "landlock": {"readable": list(readable), "writable": [folder, *_DEVICES]}}


BACKENDS: dict[str, SandboxBackend] = {"bubblewrap": Bubblewrap(), "landlock": Landlock()}


def list_interpreter_paths() -> tuple[str, ...]:
    """What has to be readable for this Python, its packages and its libraries."""
    executable = Path(sys.executable)
    homes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    homes |= {str(path.parent.parent) for path in (executable, executable.resolve())}
    homes.add(str(Path(__file__).parents[1]))
    return (
        *SYSTEM_PATHS,
        *sorted(home for home in homes if home != "/" and not any(_below(home, s) for s in SYSTEM_PATHS)),
    )


@cache
def find_backend(name: str = "auto") -> SandboxBackend:
    """The wall of this name, or the first that stands here. Tried once per process, by running a program behind it.

    Raises ConfigError, with what each lacks and the way out.
    """
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"there is no wall {name!r}: choose auto, {', '.join(BACKENDS)}")
    lacks = []
    for wall in BACKENDS.values() if name == "auto" else (BACKENDS[name],):
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


def _missing(wall: SandboxBackend) -> str | None:
    """What keeps a wall from standing here; None = it stands."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if not seccomp.is_supported():
        return f"no seccomp filter is known for {os.uname().machine}"
    needs: dict[str, Callable[[], str | None]] = {
        "bubblewrap": lambda: None if find_bwrap() else "bwrap is not installed",
        "landlock": lambda: None if landlock.get_abi_version() else "the kernel has none",
    }
    return needs[wall.name]() or _refusal(wall)


def _refusal(wall: SandboxBackend) -> str | None:
    """What happens when a program runs behind it; None = as it should."""
    from policygrad.sandbox.process import (
        SandboxError,
        run_program,  # which needs a wall
    )

    try:
        outcome = run_program("print(6 * 7)", backend=wall)
    except SandboxError as error:
        return str(error)
    return None if outcome.stdout == "42\n" else f"a program behind it ended with {outcome.summary}"


def _below(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


# What one program may take.


@dataclass(frozen=True)
class Limits:
    """What one program may take before it is ended. It is one process without threads in any case."""

    timeout: float = 8.0
    """From the moment it begins, by the clock; and as many of CPU."""
    memory: int = 1 << 30
    """Bytes of address space, the interpreter's (some 30 MiB) included."""
    files: int = 64 << 20
    """Bytes of all the files that it may write in its folder, which is all that it can write to, and gone afterwards."""
    output: int = 1 << 20
    """Bytes that it may print, to standard output and standard error each."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"a sandbox's seconds must be above 0 and finite, not {self.timeout}")
        for name, least in (("memory", 64 << 20), ("files", 0), ("output", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"a sandbox's {name} must be at least {least:,} bytes, not {getattr(self, name):,}")
