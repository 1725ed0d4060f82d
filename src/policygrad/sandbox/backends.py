"""Sandbox backends, and which of them works on this machine: each is tried with a program before it is trusted."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError
from policygrad.sandbox import landlock, seccomp


@dataclass(frozen=True)
class Limits:
    """Limits of one program, which is killed when it exceeds one. It is always a single process without threads."""

    timeout: float = 8.0
    """Seconds from its start, by the clock; and as many of CPU."""
    memory: int = 1 << 30
    """Bytes of address space, the interpreter's (some 30 MiB) included."""
    files: int = 64 << 20
    """Bytes of all files in its folder, the only place it can write to, which is deleted afterwards."""
    output: int = 1 << 20
    """Bytes printed to standard output, and to standard error."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"a sandbox's timeout must be above 0 and finite, not {self.timeout}")
        for name, minimum in (("memory", 64 << 20), ("files", 0), ("output", 1)):
            if getattr(self, name) < minimum:
                raise ConfigError(f"a sandbox's {name} must be at least {minimum:,} bytes, not {getattr(self, name):,}")


class Bubblewrap:
    """Namespaces by bwrap, and seccomp: file system, network and process ids of its own, as an unprivileged user."""

    name = "bubblewrap"
    needs_folder = False  # True if its processes write into a folder of this machine, whose size has to be watched

    def command(self, inner: Sequence[str], readable: Sequence[str], files: int) -> list[str]:
        """Return the command that runs `inner` in the sandbox, with `files` bytes to write.

        It sees `readable`, read-only, and an empty writable folder in memory.
        """
        argv = [find_bwrap() or "bwrap", "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
        argv += ["--unshare-uts", "--unshare-cgroup-try"]
        argv += ["--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]  # the user "nobody"
        argv += ["--new-session", "--die-with-parent", "--hostname", "sandbox"]
        folder = writable_folder(readable)
        argv += ["--dev", "/dev", "--proc", "/proc", "--size", str(max(files, 4096)), "--tmpfs", folder]
        for path in sorted(readable, key=len):  # a path inside of another one after it
            if os.path.islink(path) and os.path.dirname(path) == "/":
                argv += ["--symlink", os.readlink(path), path]
            else:
                argv += ["--ro-bind-try", path, path]
        return [*argv, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder, "--", *inner]

    def restrictions(self, readable: Sequence[str], folder: str, *, alone: bool) -> dict[str, Any]:
        """Return what the process has to apply to itself before all else (process.apply_restrictions)."""
        return {"alone": alone, "landlock": None}


class Landlock:
    """Landlock and seccomp: the process sees the machine's process ids and file names, but can neither open nor signal them."""

    name = "landlock"
    needs_folder = True

    def command(self, inner: Sequence[str], readable: Sequence[str], files: int) -> list[str]:
        return list(inner)

    def restrictions(self, readable: Sequence[str], folder: str, *, alone: bool) -> dict[str, Any]:
        return {"alone": alone, "landlock": {"readable": list(readable), "writable": [folder, *_DEVICES]}}


SandboxBackend = Bubblewrap | Landlock
BACKENDS: dict[str, SandboxBackend] = {"bubblewrap": Bubblewrap(), "landlock": Landlock()}


@cache
def find_backend(name: str = "auto") -> SandboxBackend:
    """Return the backend of this name, or the first that works here. Tried once per process, by running a program in it.

    Raises:
        ConfigError: None works; says what each lacks, and the remedy.
    """
    from policygrad.sandbox.process import SandboxError, run_program  # which imports this module

    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"unknown sandbox {name!r}: choose auto, {', '.join(BACKENDS)}")
    failures = []
    for backend in BACKENDS.values() if name == "auto" else (BACKENDS[name],):
        if not sys.platform.startswith("linux"):
            failure = "it needs Linux"
        elif not seccomp.is_supported():
            failure = f"no seccomp filter is known for {os.uname().machine}"
        elif backend.name == "bubblewrap" and not find_bwrap():
            failure = "bwrap is not installed"
        elif backend.name == "landlock" and not landlock.get_abi_version():
            failure = "the kernel has none"
        else:
            try:
                result = run_program("print(6 * 7)", backend=backend)
            except SandboxError as error:
                failure = str(error)
            else:
                if result.stdout == "42\n":
                    return backend
                failure = f"a program in it ended with {result.summary}"
        failures.append(f"{backend.name}: {failure}")
    raise ConfigError(
        "no sandbox works on this machine: "
        + "; ".join(failures)
        + ". Install bubblewrap (apt install bubblewrap, dnf install bubblewrap), or boot a Linux kernel from 5.13 on with "
        "Landlock (lsm=landlock,… on its command line). In a container, allow it user namespaces, or the system calls landlock_* "
        "and seccomp (Docker: a newer version, or --security-opt seccomp=FILE). "
        "Programs that a model wrote are not run without a sandbox. `policygrad doctor` tells whether one works now"
    )


# What is readable in a sandbox.

SYSTEM_PATHS = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/full")
PACKAGES = str(Path(__file__).parents[2])  # the folder that holds this package, for the interpreter in the sandbox


def list_interpreter_paths() -> tuple[str, ...]:
    """Return what has to be readable for this Python, its packages and its libraries."""
    executable = Path(sys.executable)
    homes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, str(Path(__file__).parents[1])}
    homes |= {str(path.parent.parent) for path in (executable, executable.resolve())}
    outside = [home for home in homes if home != "/" and not any(map(Path(home).is_relative_to, SYSTEM_PATHS))]
    return (*SYSTEM_PATHS, *sorted(outside))


def find_bwrap() -> str | None:
    return shutil.which("bwrap")


def writable_folder(readable: Sequence[str]) -> str:
    """Return the writable folder inside bubblewrap: /tmp, unless that is to be read."""
    return "/run/tmp" if "/tmp" in readable else "/tmp"
