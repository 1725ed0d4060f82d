"""The parent's handle on one worker process: start it, talk to it without blocking, kill it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from policygrad.errors import ConfigError, RewardError
from policygrad.rewards.base import Reward
from policygrad.rewards.workers.limits import filter_environment, raise_oom_score
from policygrad.rewards.workers.messages import (
    NONCE_BYTES,
    Chunk,
    ReplyParser,
    WorkerStart,
    encode_message,
    replace_control_characters,
)
from policygrad.sandbox import BACKENDS, backends, find_backend
from policygrad.sandbox.backends import list_interpreter_paths
from policygrad.sandbox.process import confine

# The processes that a worker started, wherever they have gone since: found and ended with it.
#
# A child may leave its worker's process group (`setsid`) and its parent (a double fork). On Linux a worker adopts what its children
# leave behind (PR_SET_CHILD_SUBREAPER), so that while it lives its family is the tree below it; where it has died, they are known
# by a variable in their environment. What gets away: a process of a worker that died by itself, outside of its group and with an
# environment of its own. Elsewhere only the process group is known.

TOKEN_VARIABLE = "POLICYGRAD_WORKER"
"""The variable by which processes are known; its value is the worker's."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ROUNDS = 50  # searches until nobody new is found: a family that forks faster than that is left
_UNCOLLECTED = 64  # ended processes that nobody waited for, each of which holds a process id


def adopt_descendants(parent: int) -> None:
    """In a worker. On Linux a parent that is killed takes a busy worker along (elsewhere it ends at the next message), and what
    the worker's children leave behind is the worker's."""
    if sys.platform == "linux":
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(0)


def has_too_many_zombies() -> bool:
    """Whether this process has adopted more ended processes than it should hold: its own children are its function's to collect,
    so nobody else may. The kernel gives adopted ones to the first thread, whose number is the process's."""
    try:
        fd = os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY)
    except OSError:  # no Linux, or a kernel without such files
        return False
    try:
        children = os.read(fd, 1 << 16).split()
    finally:
        os.close(fd)
    return len(children) > _UNCOLLECTED and sum(_ended(int(pid)) for pid in children) > _UNCOLLECTED


@dataclass(frozen=True)
class ProcessTree:
    """A worker and what it has started. running: whether it still lives itself."""

    leader: int
    token: str
    running: bool


def kill_trees(families: Sequence[ProcessTree]) -> None:
    """Kills these workers and all that they have started, by one search among the machine's processes for all of them; the caller
    collects the workers."""
    for family in families:
        if not family.running:
            _end_group(family.leader)  # at once, while nobody else can have its number
        elif sys.platform == "linux":
            _signal(family.leader, signal.SIGSTOP)  # it forks no more, and adopts until all others are gone
    running = [family.leader for family in families if family.running]
    if sys.platform == "linux":
        gone = {os.getpid(), *(family.leader for family in families)}
        tokens = {family.token for family in families}
        for _ in range(_ROUNDS):
            found = ({*_marked(tokens)} | _below(running)) - gone
            if not found:
                break
            for pid in found:
                _signal(pid, signal.SIGKILL)
            gone |= found
    for leader in running:
        _end_group(leader)


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _below(leaders: Sequence[int]) -> set[int]:
    """The processes below these."""
    children: dict[int, list[int]] = {}
    for pid in _processes() if leaders else ():
        if (state := _stat(pid)) is not None:
            children.setdefault(int(state[1]), []).append(pid)
    found, left = set[int](), list(leaders)
    while left:
        new = [pid for pid in children.get(left.pop(), []) if pid not in found]
        found.update(new)
        left += new
    return found


def _marked(tokens: Set[str]) -> Iterator[int]:
    """The processes that began with one of these tokens in their environment, as far as this one may read it."""
    mark = re.compile(rb"(?:^|\0)" + TOKEN_VARIABLE.encode() + rb"=([^\0]*)")
    for pid in _processes():
        with contextlib.suppress(OSError):  # another user's, or ended meanwhile
            if any(
                token.decode(errors="replace") in tokens
                for token in mark.findall(Path(f"/proc/{pid}/environ").read_bytes())
            ):
                yield pid


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _ended(pid: int) -> bool:
    state = _stat(pid)
    return state is not None and state[0] == "Z"


def _stat(pid: int) -> list[str] | None:
    """State, parent and so on of a process; None where it is gone. Its name, in brackets before them, may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


# A reward worker behind a wall (`--rewards.sandbox`): no network, nothing to write but a folder of its own, few files to read.

NO_SANDBOX = "none"
SANDBOX_CHOICES = (NO_SANDBOX, "auto", *BACKENDS)
_FILES = 1 << 30  # bytes of a worker's folder, where the wall makes one of its own
_MACHINE = ("/sys/devices/system/cpu", "/sys/devices/system/node", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf")
_PROC = ("/proc/cpuinfo", "/proc/meminfo", "/proc/self/statm", "/proc/self/task/{pid}/children")
_FIRST = 1  # the process above a worker behind bubblewrap


def check_sandbox(sandbox: str, rewards: Sequence[Reward] = ()) -> None:
    """Raises ConfigError for a wall that there is not, or that does not stand here, and for rewards that ask servers behind one."""
    if sandbox not in SANDBOX_CHOICES:
        raise ConfigError(f"rewards.sandbox {sandbox!r}: choose {', '.join(SANDBOX_CHOICES)}")
    if sandbox == NO_SANDBOX:
        return
    asks = [reward.name for reward in rewards if getattr(reward.function, "reward_network", False)]
    if asks:
        raise ConfigError(
            f"reward {asks[0]!r} asks a server, and behind --rewards.sandbox {sandbox} there is no network: set it to none, or "
            "leave the reward away"
        )
    find_backend(sandbox)


@dataclass(frozen=True)
class WorkerCommand:
    """How a worker is started, behind a wall or not."""

    command: Sequence[str]
    environment: dict[str, str]
    folder: str | None = None  # of its own, to be taken away after it

    def cleanup(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def build_command(sandbox: str, program: str, environment: dict[str, str]) -> WorkerCommand:
    """The command of an interpreter that runs `program` with three arguments: the import path, the parent's process id, and what
    `enter` is to do."""
    inner = [sys.executable, "-P", "-c", program, json.dumps(sys.path)]
    if sandbox == NO_SANDBOX:
        return WorkerCommand([*inner, str(os.getpid()), ""], environment)
    wall = find_backend(sandbox)
    readable = [
        *list_interpreter_paths(),
        *(path for path in map(os.path.abspath, filter(None, sys.path)) if path != "/"),
        *_MACHINE,
    ]
    folder = tempfile.mkdtemp(prefix="policygrad-worker-") if wall.needs_folder else None
    orders = wall.restrictions(readable, folder or "", alone=False)
    parent = os.getpid() if folder else _FIRST
    command = wall.command([*inner, str(parent), json.dumps(orders)], readable, _FILES)
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder or backends.writable_folder(readable))
    return WorkerCommand(command, {**environment, **places}, folder)


def enter(orders: str) -> None:
    """In the worker, before all else: put up what the wall leaves to the process itself. "" = there is none."""
    if not orders:
        return
    raise_oom_score()  # afterwards it may not
    wall: dict[str, Any] = json.loads(orders)
    if wall["landlock"] is not None:
        wall["landlock"]["readable"] += [path.format(pid=os.getpid()) for path in _PROC]
    confine(wall, None)


_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from policygrad.rewards.workers.process import enter; "
    "enter(sys.argv[3]); from policygrad.rewards.workers.worker import main; main(int(sys.argv[2]))"
)
_PIECE = 1 << 20  # bytes per read
_KEPT, _LINES, _WIDTH = (
    4096,
    3,
    200,
)  # of what a worker prints: bytes, and of an error message lines and their characters


class OutputTail:
    """Keeps the last of what a worker prints. A thread reads it as it comes, so that a print never waits for room in the pipe."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe, self._lock, self._open = pipe, threading.Lock(), True
        self._bytes = b""
        threading.Thread(target=self._follow, daemon=True, name="reward output").start()

    def last_lines(self) -> str:
        """Return the last lines that were printed, as one line; "" where nothing was."""
        self._read()
        lines = [line.strip()[:_WIDTH] for line in self._bytes.decode(errors="replace").splitlines() if line.strip()]
        return replace_control_characters(" / ".join(lines[-_LINES:]))

    def forget(self) -> None:
        """Drop what has been printed so far."""
        self._read()
        self._bytes = b""

    def _follow(self) -> None:
        waits = select.poll()
        waits.register(self._pipe, select.POLLIN)
        while self._open:
            waits.poll()
            self._read()
        os.close(self._pipe)

    def _read(self) -> None:
        with self._lock:
            if not self._open:
                return
            try:
                data = os.read(self._pipe, _PIECE)
            except BlockingIOError:
                return
            self._bytes = (self._bytes + data)[-_KEPT:]
            self._open = bool(data)


class WorkerProcess:
    """A fresh interpreter with this one's import path, in a session of its own so that its children die with it.

    variables: names of environment variables that it gets besides those in `variables.py`.
    """

    def __init__(self, start: WorkerStart, variables: Sequence[str] = ()) -> None:
        self._token, nonce = secrets.token_hex(16), secrets.token_bytes(NONCE_BYTES)
        environment = {**filter_environment(os.environ, variables), TOKEN_VARIABLE: self._token}
        self._place = build_command(start.sandbox, _BOOT, environment)
        self._process = subprocess.Popen(
            self._place.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if start.show_output else subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=self._place.environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self.printed = None if self._process.stderr is None else OutputTail(os.dup(self._process.stderr.fileno()))
        if self._process.stderr is not None:
            self._process.stderr.close()
        self.inbox = ReplyParser(nonce)
        self._outbox = memoryview(b"")
        self.send(replace(start, nonce=nonce))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def writing(self) -> bool:
        """Whether `flush` still has bytes to write."""
        return len(self._outbox) > 0

    def send(self, message: WorkerStart | Chunk) -> None:
        """Queue a message, and write what the pipe takes now."""
        self._outbox = memoryview(bytes(self._outbox) + encode_message(message))
        self.flush()

    def flush(self) -> None:
        try:
            while self._outbox:
                self._outbox = self._outbox[os.write(self.input, self._outbox) :]
        except BlockingIOError:
            pass
        except OSError:  # the worker is gone; reading from it says so
            self._outbox = memoryview(b"")

    def receive(self) -> bool:
        """Put into `inbox` what has arrived, a piece at most: who writes without end does not hold up the others. True when the
        worker has ended."""
        try:
            data = os.read(self.output, _PIECE)
        except BlockingIOError:
            return False
        self.inbox.feed(data)
        return not data

    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def tree(self) -> ProcessTree:
        """It, with what it has started."""
        return ProcessTree(self.pid, self._token, running=self._process.poll() is None)

    def kill(self) -> str:
        """End the worker and what it started, at once. Returns how it had ended by itself, or "signal SIGKILL"."""
        (how,) = kill_workers([self])
        return how

    def collect(self) -> str:
        """What has ended is put away; how it ended."""
        code = self._process.wait()
        self._place.cleanup()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"


def kill_workers(workers: Sequence[WorkerProcess]) -> list[str]:
    """End these workers and what they started, at once, and together: a machine may have thousands of processes to look through.
    Returns how each had ended by itself, or "signal SIGKILL"."""
    kill_trees([worker.tree for worker in workers])
    return [worker.collect() for worker in workers]


# Workers are started by a thread that lives as long as the pool: on Linux a worker ends with the thread that started it
# (PR_SET_PDEATHSIG, see prctl(2)), and whoever scores may be a thread that is soon over.

_Asked = SimpleQueue[tuple[Future[WorkerProcess], WorkerStart, Sequence[str]] | None]


class WorkerLauncher:
    """Called as `WorkerProcess` is, from any thread."""

    def __init__(self) -> None:
        self._asked: _Asked = SimpleQueue()
        self._lock = threading.Lock()
        self._over = False
        threading.Thread(target=_serve, args=(self._asked,), daemon=True, name="reward workers").start()

    def __call__(self, start: WorkerStart, variables: Sequence[str] = ()) -> WorkerProcess:
        """Raises RewardError after `close`, and what starting a process raises."""
        future: Future[WorkerProcess] = Future()
        with self._lock:
            if self._over:
                raise RewardError("this RewardPool is closed; score inside its `with` block")
            self._asked.put((future, start, variables))
        return future.result()

    def close(self) -> None:
        """No worker is started any more, and those that are left end."""
        with self._lock:
            self._over = True
            self._asked.put(None)


def _serve(asked: _Asked) -> None:
    while (task := asked.get()) is not None:
        future, start, variables = task
        try:
            future.set_result(WorkerProcess(start, variables))
        except BaseException as error:  # told to whoever asked
            future.set_exception(error)
        del task, future  # the worker is its slot's alone
