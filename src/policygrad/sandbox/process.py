"""A sandboxed process and its parent's handle on it: start it, collect a bounded amount of what it writes, end it."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import select
import selectors
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import IO, Any

from policygrad.sandbox import function_tests, landlock, seccomp
from policygrad.sandbox.backends import PACKAGES, Limits, SandboxBackend, find_backend, list_interpreter_paths
from policygrad.utils.child_environment import ONE_THREAD
from policygrad.utils.processes import die_with_parent, kill_group

START_TIMEOUT = 60.0  # seconds until the sandbox is set up; not part of a program's time
_POLL_SECONDS = 0.02  # between looks at what it has written
_MAX_FILES = 1000
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[2]); from policygrad.sandbox.process import main; main(int(sys.argv[1]))"
)
# Nothing of this process's: a program that a model wrote gets none of the machine's variables, not even the default ones.
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    **ONE_THREAD,
    **dict.fromkeys(("PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE", "PYTHONUTF8", "PYTHONSAFEPATH"), "1"),
}


class SandboxError(Exception):
    """A process did not reach its program: the sandbox could not be set up."""


@dataclass(frozen=True)
class ProgramResult:
    """A program's end and output as the parent saw them: nothing here is the program's own account."""

    stop_reason: str  # "by itself", or the limit that ended it: "time", "output", "files"
    code: int  # its exit code, -n or 128 + n for signal n
    stdout: str
    stderr: str
    seconds: float  # since its sandbox was set up

    @property
    def succeeded(self) -> bool:
        """True if it ended by itself with exit code 0."""
        return self.stop_reason == "by itself" and self.code == 0

    @property
    def summary(self) -> str:
        if self.stop_reason != "by itself":
            return f"exceeded the {self.stop_reason} limit"
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
    """Run Python source as a script in a sandbox, with `stdin` on its standard input.

    It is one process, without network, files of this machine, environment variables or other processes; it writes to an empty
    folder that is deleted with it. show: print the value of its last expression.

    Raises:
        ConfigError: No sandbox works here.
        SandboxError: A sandbox failed.
    """
    limits = limits or Limits()
    chosen = find_backend(backend) if isinstance(backend, str) else backend
    outputs = {"stdout": limits.output, "stderr": limits.output}
    task = {"role": "program", "source": source, "show": show}
    with SandboxedProcess(chosen, limits, task, outputs, stdin=stdin) as process:
        exceeded = wait_for_exit([process], limits.timeout)
        seconds = time.monotonic() - process.started_at
        texts = {name: process.pipes[name].text() for name in outputs}
        return ProgramResult(exceeded or "by itself", process.end(), texts["stdout"], texts["stderr"], seconds)


@dataclass
class Pipe:
    """Bytes from a process, up to `max_bytes`; `full` if there were more."""

    descriptor: int
    max_bytes: int
    data: bytearray = field(default_factory=bytearray)
    open: bool = True
    full: bool = False

    def read(self) -> None:
        piece = os.read(self.descriptor, 1 << 16)
        self.open = bool(piece)
        self.data += piece[: self.max_bytes - len(self.data)]
        self.full = self.full or (len(self.data) >= self.max_bytes and bool(piece))

    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


_FileId = tuple[int, int]  # (device, inode)


class SandboxedProcess(contextlib.AbstractContextManager["SandboxedProcess"]):
    """A Python process in a sandbox; a context manager, which ends it. It reports first that the sandbox is set up.

    Args:
        task: Read by `main`.
        outputs: Pipes to read, stdout, stderr or verdict, each with its maximum bytes.
        shared: Other descriptors that it inherits.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        limits: Limits,
        task: dict[str, Any],
        outputs: dict[str, int],
        *,
        shared: Sequence[int] = (),
        stdin: str = "",
    ) -> None:
        self._limits = limits
        self._inherited: list[IO[bytes]] = []
        self._sizes: dict[_FileId, int] = {}  # of what it has written, as last seen
        self._resources = contextlib.ExitStack()
        self.folder = tempfile.mkdtemp(prefix="policygrad-") if backend.needs_folder else None
        if self.folder is not None:
            self._resources.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.pipes: dict[str, Pipe] = {}
        write_ends: dict[str, int] = {}
        for name, max_bytes in {"ready": 1000, **outputs}.items():
            read_end, write_ends[name] = os.pipe()
            self._resources.callback(os.close, read_end)
            os.set_blocking(read_end, False)
            self.pipes[name] = Pipe(read_end, max_bytes)
        readable = list_interpreter_paths()
        task_file = self._create_file(
            json.dumps(
                {
                    **task,
                    "restrictions": backend.restrictions(readable, self.folder or "", alone=True),
                    "limits": {"memory": limits.memory, "seconds": limits.timeout, "file_size": limits.files},
                    "packages": PACKAGES,
                    "ready": write_ends["ready"],
                    "verdict": write_ends.get("verdict"),
                }
            )
        ).fileno()
        try:
            self.process = subprocess.Popen(
                backend.command([sys.executable, "-P", "-c", _BOOT, str(task_file), PACKAGES], readable, limits.files),
                stdin=self._create_file(stdin) if stdin else subprocess.DEVNULL,
                stdout=write_ends.get("stdout", subprocess.DEVNULL),
                stderr=write_ends.get("stderr", subprocess.DEVNULL),
                env=_ENVIRONMENT | dict.fromkeys(("HOME", "TMPDIR"), self.folder or "/tmp"),
                cwd=self.folder or "/",
                start_new_session=True,
                pass_fds=(task_file, *(write_ends[name] for name in write_ends.keys() & {"ready", "verdict"}), *shared),
            )
        except OSError as error:
            self._resources.close()
            raise SandboxError(f"it cannot be started: {error}") from error
        finally:
            for descriptor in write_ends.values():
                os.close(descriptor)
        stats = [os.fstat(file.fileno()) for file in self._inherited]
        self._given = {_identify(status): status.st_blocks * 512 for status in stats}
        self.exit = os.pidfd_open(self.process.pid)
        self._resources.callback(os.close, self.exit)
        self.started_at = 0.0  # when the sandbox was set up, by the clock

    def __exit__(self, *exception: object) -> None:
        self.end()

    @property
    def ready(self) -> bool:
        """True once the sandbox is set up. Raises SandboxError where it never will be."""
        pipe = self.pipes["ready"]
        if pipe.open:
            return False
        if bytes(pipe.data) == _READY:
            return True
        failure = pipe.text()
        if not failure and "stderr" in self.pipes:
            failure = self.pipes["stderr"].text().strip().rpartition("\n")[2]
        raise SandboxError(failure or "the process ended before it was sandboxed")

    @property
    def exceeds_disk_limit(self) -> bool:
        """True if it has written too much to this machine's disk, or its files cannot be counted."""
        if self.folder is None:
            return False
        try:
            files = self._measure_files(self.folder)
        except PermissionError:  # it hides its files, or has just ended
            return not select.select([self.exit], [], [], 0)[0]
        self._sizes |= files
        used = sum(size - self._given.get(file, 0) for file, size in files.items())
        return used > self._limits.files or len(files) > _MAX_FILES

    def _measure_files(self, folder: str) -> dict[_FileId, int]:
        """Return the bytes of the files in its folder, at most `_MAX_FILES` + 1 of them, and of the deleted ones that it holds.

        The size of a deleted file that is mapped and no longer open cannot be read: it counts as last seen, and beyond the limit
        where it was never seen. A supervisor that is itself restricted by Landlock cannot read mappings, and counts open files
        alone. Raises PermissionError for a process that hides its files.
        """
        files, deleted = dict[_FileId, int](), dict[_FileId, int]()
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    files[_identify(status)] = status.st_blocks * 512
                if len(files) > _MAX_FILES:
                    break
        proc = f"/proc/{self.process.pid}"
        try:
            for name in os.listdir(f"{proc}/fd") if _can_read_proc() else range(landlock.MAX_OPEN_FILES):
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(f"{proc}/fd/{name}")
                    if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                        deleted[_identify(status)] = status.st_blocks * 512
            if not _can_read_proc():
                return files | deleted
            with open(f"{proc}/maps", encoding="utf-8", errors="replace") as maps:
                for line in maps:
                    if line.endswith(" (deleted)\n") and not line.partition("/")[2].startswith(("dev/zero", "SYSV")):
                        device, inode = line.split()[3:5]
                        major, minor = (int(part, 16) for part in device.split(":"))
                        file = (os.makedev(major, minor), int(inode))
                        deleted.setdefault(file, self._sizes.get(file, self._limits.files + 1))
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            return files
        return files | deleted

    def end(self) -> int:
        """Kill it, if it still runs, and delete all that it left. Returns its exit code, -9 for killed."""
        if self.process.poll() is None:
            kill_group(self.process.pid)
        code = self.process.wait()
        self._resources.close()
        return code

    def _create_file(self, text: str) -> IO[bytes]:
        file = self._resources.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._inherited.append(file)
        file.write(text.encode("utf-8", "surrogatepass"))
        file.seek(0)
        return file


def _identify(status: os.stat_result) -> _FileId:
    return status.st_dev, status.st_ino


@cache
def _can_read_proc() -> bool:
    """Return whether this process may open files in /proc. Restricted by Landlock it may only stat what each process has open."""
    try:
        with open("/proc/self/maps", "rb"):
            return True
    except PermissionError:
        return False


def wait_for_exit(processes: Sequence[SandboxedProcess], seconds: float) -> str | None:
    """Read until the last of the processes ends by itself, or return the limit that is exceeded: time, output or files.

    The time starts when all sandboxes are set up. Raises SandboxError where one cannot be.
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
                    raise SandboxError(f"it was not set up after {START_TIMEOUT:.0f} s")
                return "time"
            for key, _ in selector.select(min(left, _POLL_SECONDS)):
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
            if any(pipe.full for process in processes for pipe in process.pipes.values()):
                return "output"
            if any(process.exceeds_disk_limit for process in processes):
                return "files"
    return None


# Inside the sandbox: restrict the process, report that it is ready, and become the program.

_READY = b"ready"


def main(descriptor: int) -> None:
    """Read the task from this file, restrict this process for good, and do the task."""
    with open(descriptor, encoding="utf-8") as file:
        task: dict[str, Any] = json.load(file)
    try:
        apply_restrictions(task["restrictions"], task["limits"])
    except OSError as error:
        os.write(task["ready"], str(error).encode())
        os._exit(1)
    os.write(task["ready"], _READY)
    os.close(task["ready"])
    sys.path.remove(task["packages"])
    sys.argv[:] = ["program.py"]
    if task["role"] == "program":
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        tree = ast.parse(task["source"], "program.py")
        last = tree.body.pop() if task["show"] and tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "program.py", "exec"), module.__dict__)
        if isinstance(last, ast.Expr):  # print its value, as a console does
            value = eval(compile(ast.Expression(last.value), "program.py", "eval"), module.__dict__)
            if value is not None:
                print(repr(value))
    elif task["role"] == "candidate":
        function_tests.serve_candidate(task["source"], *task["pipes"])
    else:
        questions, answers = task["pipes"]
        function_tests.run_examiner(task["examination"], questions, answers, task["verdict"])


def apply_restrictions(restrictions: dict[str, Any], limits: dict[str, Any] | None) -> None:
    """Apply what the backend leaves to the process itself. It cannot be undone. Raises OSError."""
    landlock.drop_capabilities()
    if restrictions["alone"]:
        die_with_parent()
    if limits is not None:
        landlock.set_limits(**limits)
    rules = restrictions["landlock"]
    if rules is not None:
        landlock.restrict(rules["readable"], rules["writable"], folders=not restrictions["alone"])
    seccomp.install_filter(alone=restrictions["alone"], attributes=rules is not None)
