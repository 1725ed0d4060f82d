"""One confined process, as its parent knows it: started, listened to, ended. What it says is bytes, and not kept without end."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import select
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import IO, Any, Self

from policygrad.sandbox.backends import PACKAGES, Limits, SandboxBackend, find_backend, list_interpreter_paths
from policygrad.sandbox.landlock import MAX_OPEN_FILES

START_TIMEOUT = 60.0  # seconds until the wall stands; not part of a program's time
_LOOK = 0.02  # seconds between looks at what it has written
_MOST_FILES = 1000
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[2]); from policygrad.sandbox.process import main; main(int(sys.argv[1]))"
)
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUTF8": "1",
    "PYTHONSAFEPATH": "1",
}


class SandboxError(Exception):
    """A process did not get as far as its program: the wall does not stand."""


@dataclass
class Pipe:
    """What arrives from the process; `full` when it was more than `most` bytes."""

    descriptor: int
    most: int
    data: bytearray = field(default_factory=bytearray)
    open: bool = True
    full: bool = False

    def read(self) -> None:
        piece = os.read(self.descriptor, 1 << 16)
        self.open = bool(piece)
        self.data += piece[: self.most - len(self.data)]
        self.full = self.full or (len(self.data) >= self.most and bool(piece))

    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


class SandboxedProcess:
    """A Python process behind a wall; a context manager, which ends it. The first thing it says is that the wall stands.

    task: what `inside.main` reads. listens: the pipes that the parent reads, stdout, stderr or verdict, each with its most bytes.
    shared: descriptors of others that it gets.
    """

    def __init__(
        self,
        wall: SandboxBackend,
        limits: Limits,
        task: dict[str, Any],
        listens: dict[str, int],
        *,
        shared: Sequence[int] = (),
        stdin: str = "",
    ) -> None:
        self._limits = limits
        self._kept: list[IO[bytes]] = []
        self._sizes: dict[_File, int] = {}  # of what it has written, as last seen
        self.folder = tempfile.mkdtemp(prefix="policygrad-") if wall.needs_folder else None
        self.pipes: dict[str, Pipe] = {}
        writing: dict[str, int] = {}
        for name, most in {"ready": 1000, **listens}.items():
            reading, writing[name] = os.pipe()
            os.set_blocking(reading, False)
            self.pipes[name] = Pipe(reading, most)
        readable = list_interpreter_paths()
        orders = wall.restrictions(readable, self.folder or "", alone=True)
        bounds = {"memory": limits.memory, "seconds": limits.timeout, "file_size": limits.files}
        whole = {**task, "orders": orders, "limits": bounds, "packages": PACKAGES, "ready": writing["ready"]}
        whole |= {"verdict": writing.get("verdict")}
        said = self._file(json.dumps(whole))
        inner = [sys.executable, "-P", "-c", _BOOT, str(said.fileno()), PACKAGES]
        try:
            self.process = subprocess.Popen(
                wall.command(inner, readable, limits.files),
                stdin=self._file(stdin) if stdin else subprocess.DEVNULL,
                stdout=writing.get("stdout", subprocess.DEVNULL),
                stderr=writing.get("stderr", subprocess.DEVNULL),
                env=_ENVIRONMENT
                if self.folder is None
                else {**_ENVIRONMENT, "HOME": self.folder, "TMPDIR": self.folder},
                cwd=self.folder or "/",
                start_new_session=True,
                pass_fds=(
                    said.fileno(),
                    writing["ready"],
                    *(writing[n] for n in ("verdict",) if n in writing),
                    *shared,
                ),
            )
        except OSError as error:
            self._tidy()
            raise SandboxError(f"it cannot be started: {error}") from error
        finally:
            for descriptor in writing.values():
                os.close(descriptor)
        self._given = {_named(one): one.st_blocks * 512 for one in (os.fstat(file.fileno()) for file in self._kept)}
        self.exit = os.pidfd_open(self.process.pid)
        self.started_at = 0.0  # when it became the program

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    @property
    def ready(self) -> bool:
        """Whether the wall stands. Raises SandboxError where it never will."""
        pipe = self.pipes["ready"]
        if pipe.open:
            return False
        if bytes(pipe.data) == b"ready":
            return True
        said = (
            pipe.text() or self.pipes["stderr"].text().strip().rpartition("\n")[2]
            if "stderr" in self.pipes
            else pipe.text()
        )
        raise SandboxError(said or "the process ended before it was confined")

    @property
    def exceeds_output_limit(self) -> bool:
        """Whether it has said too much."""
        return any(pipe.full for pipe in self.pipes.values())

    @property
    def exceeds_disk_limit(self) -> bool:
        """Whether it has written too much, where that is a folder of this machine's: files in it, and those that it has removed and
        still holds, open or mapped into its memory. Where they cannot be looked at, it has."""
        if self.folder is None:
            return False
        try:
            files = _files_in(self.folder) | _held(self.process.pid, self._sizes, self._limits.files)
        except PermissionError:  # it hides what it holds, or has just ended
            return not select.select([self.exit], [], [], 0)[0]
        self._sizes |= files
        used = sum(size - self._given.get(file, 0) for file, size in files.items())
        return used > self._limits.files or len(files) > _MOST_FILES

    def end(self) -> int:
        """Kill it, if it still runs, and take away all that it left. Returns its exit code, -9 for killed."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self._tidy()
        return code

    def _file(self, text: str) -> IO[bytes]:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rest
        self._kept.append(file)
        file.write(text.encode("utf-8", "surrogatepass"))
        file.seek(0)
        return file

    def _tidy(self) -> None:
        for file in self._kept:
            file.close()
        for pipe in self.pipes.values():
            if pipe.descriptor >= 0:
                os.close(pipe.descriptor)
                pipe.descriptor = -1
        if getattr(self, "exit", -1) >= 0:
            os.close(self.exit)
            self.exit = -1
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None


_File = tuple[int, int]  # its device and its number there


def _named(found: os.stat_result) -> _File:
    return found.st_dev, found.st_ino


def _files_in(folder: str) -> dict[_File, int]:
    """Bytes of the files in a folder; not of more than `_MOST_FILES`, and one."""
    files: dict[_File, int] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                files[_named(found)] = found.st_blocks * 512
            if len(files) > _MOST_FILES:
                break
    return files


def _held(pid: int, sizes: Mapping[_File, int], most: int) -> dict[_File, int]:
    """Bytes of the files that a process holds and that no folder has. Of one that is mapped and no longer open the size cannot be
    asked for: it is what it was, and where it was never seen, more than may be. A supervisor that is itself behind Landlock may not
    read what is mapped, and counts open files alone. Raises PermissionError for a process that hides."""
    files: dict[_File, int] = {}
    try:
        for name in os.listdir(f"/proc/{pid}/fd") if _reads_proc() else range(MAX_OPEN_FILES):
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(f"/proc/{pid}/fd/{name}")
                if stat.S_ISREG(found.st_mode) and not found.st_nlink:
                    files[_named(found)] = found.st_blocks * 512
        if not _reads_proc():
            return files
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                if line.endswith(" (deleted)\n") and not line.partition("/")[2].startswith(("dev/zero", "SYSV")):
                    device, number = line.split()[3:5]
                    major, minor = (int(part, 16) for part in device.split(":"))
                    file = (os.makedev(major, minor), int(number))
                    files.setdefault(file, sizes.get(file, most + 1))
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return {}
    return files


@cache
def _reads_proc() -> bool:
    """Whether this process may open what Linux says of processes. Behind Landlock it may not, but ask what each has open."""
    try:
        with open("/proc/self/maps", "rb"):
            return True
    except PermissionError:
        return False


def wait_for_exit(processes: Sequence[SandboxedProcess], seconds: float) -> str | None:
    """Listen until the last of the processes has ended by itself; else why they are to be ended: time, output or files.

    The clock begins when all walls stand. Raises SandboxError where one does not.
    """
    main = processes[-1]
    deadline, running = time.monotonic() + START_TIMEOUT, False
    with selectors.DefaultSelector() as selector:
        for process in processes:
            for pipe in process.pipes.values():
                selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)
        selector.register(main.exit, selectors.EVENT_READ, None)
        ended = False
        while not (ended and not any(pipe.open for pipe in main.pipes.values())):
            left = deadline - time.monotonic()
            if left <= 0:
                if not running:
                    raise SandboxError(f"it was not up after {START_TIMEOUT:.0f} s")
                return "time"
            for key, _ in selector.select(min(left, _LOOK)):
                if key.data is None:
                    ended = True
                    selector.unregister(main.exit)
                    continue
                key.data.read()
                if not key.data.open:
                    selector.unregister(key.fd)
            if not running and all(process.ready for process in processes):
                main.started_at = time.monotonic()
                running, deadline = True, main.started_at + seconds
            if any(process.exceeds_output_limit for process in processes):
                return "output"
            if any(process.exceeds_disk_limit for process in processes):
                return "files"
    return None


# A program run behind a wall, and what came of it.


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended and what it printed. All of it is the parent's to see: nothing here is the program's own account."""

    stop_reason: str  # "by itself", or the limit that ended it: "time", "output", "files"
    code: int  # its exit code, -n or 128 + n for signal n
    stdout: str
    stderr: str
    seconds: float  # since its wall stood

    @property
    def succeeded(self) -> bool:
        """It ended by itself with exit code 0; what it was to print is another question."""
        return self.stop_reason == "by itself" and self.code == 0

    @property
    def summary(self) -> str:
        """In a few words."""
        if self.stop_reason != "by itself":
            return f"more {self.stop_reason} than it may take"
        last = self.stderr.strip().rpartition("\n")[2]
        return "exit code 0" if self.code == 0 else f"exit code {self.code}" + (f": {last}" if last else "")


def run_program(
    source: str,
    stdin: str = "",
    limits: Limits | None = None,
    backend: SandboxBackend | str = "auto",
    *,
    show: bool = False,
) -> ProgramResult:
    """Run Python source as a script behind a wall, with this on its standard input.

    It is one process, without network, files of this machine, environment variables or another process; it writes to an empty
    folder that goes with it. show: print what its last expression is worth. Raises ConfigError where no wall stands, SandboxError
    where one falls.
    """
    limits = limits or Limits()
    chosen = find_backend(backend) if isinstance(backend, str) else backend
    listens = {"stdout": limits.output, "stderr": limits.output}
    with SandboxedProcess(
        chosen, limits, {"role": "program", "source": source, "show": show}, listens, stdin=stdin
    ) as process:
        broken = wait_for_exit([process], limits.timeout)
        seconds = time.monotonic() - process.started_at
        texts = {name: process.pipes[name].text() for name in listens}
        return ProgramResult(broken or "by itself", process.end(), texts["stdout"], texts["stderr"], seconds)


# What runs first behind a wall: it gives up what it has, says that it is ready, and becomes the program.

_READY = b"ready"


def main(descriptor: int) -> None:
    """Read the task from this file, confine this process for good, and do it."""
    with open(descriptor, encoding="utf-8") as file:
        task: dict[str, Any] = json.load(file)
    from policygrad.sandbox import function_tests  # before the walls close

    try:
        confine(task["orders"], task["limits"])
    except OSError as error:
        os.write(task["ready"], str(error).encode())
        os._exit(1)
    os.write(task["ready"], _READY)
    os.close(task["ready"])
    sys.path.remove(task["packages"])
    sys.argv[:] = ["program.py"]
    if task["role"] == "program":
        _become(task["source"], show=task["show"])
    elif task["role"] == "candidate":
        function_tests.serve_candidate(task["source"], *task["pipes"])
    else:
        asks, answers = task["pipes"]
        function_tests.run_examiner(task["examination"], asks, answers, task["verdict"])


def confine(orders: dict[str, Any], limits: dict[str, Any] | None) -> None:
    """Put up what the wall leaves to the process itself. It cannot be undone. Raises OSError."""
    from policygrad.sandbox import landlock, seccomp

    landlock.drop_capabilities()
    if orders["alone"]:
        landlock.set_parent_death_signal()
    if limits is not None:
        landlock.set_limits(**limits)
    rules = orders["landlock"]
    if rules is not None:
        landlock.restrict(rules["readable"], rules["writable"], folders=not orders["alone"])
    seccomp.install_filter(alone=orders["alone"], attributes=rules is not None)


def _become(source: str, *, show: bool) -> None:
    """Run the source as a script would run. show: print the value of an expression at its end, as a console does."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    tree = ast.parse(source, "program.py")
    last = tree.body.pop() if show and tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "program.py", "exec"), module.__dict__)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "program.py", "eval"), module.__dict__)
        if value is not None:
            print(repr(value))
