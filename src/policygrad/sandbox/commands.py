"""Shell commands that a policy or a task wrote: in bubblewrap, with folders of this machine at chosen places, within limits."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from policygrad.sandbox.backends import SYSTEM_PATHS, find_bwrap
from policygrad.utils.processes import kill_group, list_descendants

_POLL_SECONDS = 0.2  # between looks at a command's processes
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_PASSED = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "CONTAINER_HOST")
"""Variables by which a container engine finds its service; nothing inside a container or bubblewrap gets them."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class CommandLimits:
    """What a command may use, with all that it starts."""

    seconds: float
    output: int = 1 << 20
    """Bytes that it prints; more end it."""
    memory: int = 2 << 30
    """Bytes of memory of all its processes."""
    disk: int = 2 << 30
    """Bytes of all files that it leaves, and of one file."""
    processes: int = 256


@dataclass(frozen=True)
class CommandResult:
    """How a command ended, and the beginning of what it printed."""

    code: int
    output: str
    exceeded: str = ""
    """The limit that it was ended for: time, output, memory, processes or disk; "" = it ended by itself."""

    @property
    def summary(self) -> str:
        """How it ended, in words."""
        return f"exceeded the {self.exceeded} limit" if self.exceeded else f"exit code {self.code}"


@dataclass
class CommandRunner:
    """Runs commands one after the other, and ends the one that runs when it is closed by another thread.

    Args:
        measure: Returns the bytes on the disk that commands have left.
    """

    measure: Callable[[], int] = lambda: 0
    is_closed: bool = False
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, argv: Sequence[str], limits: CommandLimits) -> CommandResult:
        """Run a program and wait for its end. It gets none of this process's variables but those of `_PASSED`.

        Raises:
            OSError: It cannot be started, or this runner is closed.
        """
        if self.is_closed:
            raise OSError("the episode is over")
        variables = {name: os.environ[name] for name in _PASSED if name in os.environ}
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd="/",
            start_new_session=True,
        )
        self._running.append(process)
        try:
            if self.is_closed:  # while it was started
                kill_group(process.pid)
            output, exceeded = self._watch(process, limits)
            if exceeded:
                kill_group(process.pid)
            code = process.wait()
        finally:
            kill_group(process.pid)
            process.wait()
            self._running.remove(process)
            if process.stdout is not None:
                process.stdout.close()
        if not exceeded and self.measure() > limits.disk:
            exceeded = "disk"
        return CommandResult(code, output.decode("utf-8", "replace"), exceeded)

    def close(self) -> None:
        """End the command that runs; no other can be started."""
        self.is_closed = True
        for process in list(self._running):
            kill_group(process.pid)

    def _watch(self, process: subprocess.Popen[bytes], limits: CommandLimits) -> tuple[bytes, str]:
        """Read what a process prints until it ends. Return that, and the limit that it exceeds."""
        assert process.stdout is not None
        output, deadline, next_look = bytearray(), time.monotonic() + limits.seconds, 0.0
        os.set_blocking(process.stdout.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            is_open = True
            while is_open or process.poll() is None:
                now = time.monotonic()
                if now > deadline:
                    return bytes(output), "time"
                if is_open:
                    for _ in selector.select(min(_POLL_SECONDS, max(deadline - now, 0.0))):
                        piece = os.read(process.stdout.fileno(), 1 << 16)
                        is_open = bool(piece)
                        output += piece[: limits.output - len(output)]
                        if piece and len(output) >= limits.output:
                            return bytes(output), "output"
                else:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(min(_POLL_SECONDS, max(deadline - now, 0.0)))
                if now >= next_look:
                    if exceeded := self._look(process.pid, limits):
                        return bytes(output), exceeded
                    next_look = now + max(_POLL_SECONDS, 10 * (time.monotonic() - now))
        return bytes(output), ""

    def _look(self, pid: int, limits: CommandLimits) -> str:
        """Return the limit that a process and what it has started exceed now; "" = none."""
        pids = list_descendants(pid)
        if len(pids) > limits.processes:
            return "processes"
        if sum(map(_measure_memory, pids)) > limits.memory:
            return "memory"
        return "disk" if self.measure() > limits.disk else ""


def _measure_memory(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE
    return 0


# Inside, before the command: its memory, files and processes are limited by the kernel too, and it is the first that is killed
# where this machine's memory runs out.
_LIMITED = """echo 1000 >/proc/self/oom_score_adj
ulimit -c 0 -n 1024 -f "$1" -v "$2" -u "$3"
shift 3
exec "$@"
"""


def confine_command(
    argv: Sequence[str],
    mounts: Mapping[str, Path],
    folder: str,
    limits: CommandLimits,
    variables: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the command that runs another one in bubblewrap: without network, other processes, or files of this machine but its
    programs, read-only, and `mounts`.

    Args:
        mounts: Folders that it may write to, by the path at which it sees them; one below another after it.
        folder: Where it begins.
    """
    command = [find_bwrap() or "bwrap", "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
    command += ["--unshare-uts", "--unshare-cgroup-try", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    command += ["--new-session", "--die-with-parent", "--hostname", "sandbox", "--clearenv"]
    for name, value in {"PATH": _PATH, "HOME": "/tmp", "LANG": "C.UTF-8", **(variables or {})}.items():
        command += ["--setenv", name, value]
    command += ["--dev", "/dev", "--proc", "/proc"]
    for path in SYSTEM_PATHS:
        if os.path.islink(path) and os.path.dirname(path) == "/":
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    for path, source in mounts.items():
        command += ["--bind", str(source), path]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder, "--"]
    # programs reserve more memory than they use, which the runner watches; threads count as processes
    sizes = [str(limits.disk // 1024), str(4 * limits.memory // 1024), str(4 * limits.processes)]
    return [*command, "/bin/bash", "-c", _LIMITED, "bash", *sizes, *argv]
