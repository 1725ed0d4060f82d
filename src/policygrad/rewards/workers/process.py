"""The trainer's handle on one worker process: start it, exchange bytes without blocking, kill it with everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, get_args

from policygrad.errors import ConfigError, RewardError
from policygrad.rewards.base import Reward
from policygrad.rewards.workers.limits import SandboxChoice, raise_oom_score
from policygrad.rewards.workers.messages import NONCE_BYTES, Chunk, ReplyParser, WorkerStart, replace_control_characters
from policygrad.utils.child_environment import ONE_THREAD, filter_environment
from policygrad.utils.processes import (
    Tail,
    adopt_orphans,
    die_with_parent,
    kill_group,
    last_lines,
    python_command,
    send_signal,
)

_BOOT = (
    "from policygrad.rewards.workers.process import enter_sandbox; enter_sandbox(sys.argv[2]); "
    "from policygrad.rewards.workers.worker import main; main(int(sys.argv[1]))"
)
_READ_BYTES = 1 << 20  # per read


class WorkerProcess:
    """A fresh interpreter with this one's import path, in its own session so that its children are killed with it.

    variables: names of environment variables that it gets besides `child_environment.PASSED_VARIABLES`.
    """

    def __init__(self, start: WorkerStart, variables: Sequence[str] = ()) -> None:
        self.token, nonce = secrets.token_hex(16), secrets.token_bytes(NONCE_BYTES)
        # one thread, as there is a worker for every other
        environment = {**filter_environment(os.environ, variables), **ONE_THREAD, TOKEN_VARIABLE: self.token}
        argv, self._folder = build_command(start.sandbox, environment)
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if start.show_output else subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self.output_tail: OutputTail | None = None
        if self._process.stderr is not None:
            self.output_tail = OutputTail(os.dup(self._process.stderr.fileno()))
            self._process.stderr.close()
        self.replies = ReplyParser(nonce)
        self.outbox = memoryview(b"")  # what `flush` has to write
        self.send(replace(start, nonce=nonce))

    def send(self, message: WorkerStart | Chunk) -> None:
        """Queue a message, and write what the pipe accepts now."""
        self.outbox = memoryview(bytes(self.outbox) + pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        self.flush()

    def flush(self) -> None:
        try:
            while self.outbox:
                self.outbox = self.outbox[os.write(self.input, self.outbox) :]
        except BlockingIOError:
            pass
        except OSError:  # the worker has ended; reading from it shows that
            self.outbox = memoryview(b"")

    def receive(self) -> bool:
        """Feed what has arrived to `replies`, and return whether the worker has ended.

        Reads a bounded amount, so that a worker which writes endlessly does not hold up the others.
        """
        try:
            data = os.read(self.output, _READ_BYTES)
        except BlockingIOError:
            return False
        self.replies.feed(data)
        return not data

    def alive(self) -> bool:
        return self._process.poll() is None

    def collect(self) -> str:
        """Reap the ended process and clean up after it. Returns how it ended."""
        with self._process:  # waits for it and closes its pipes
            pass
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        code = self._process.returncode
        names = {number.value: number.name for number in signal.Signals}
        return f"exit code {code}" if code >= 0 else f"signal {names.get(-code, -code)}"


_Request = tuple[Future[WorkerProcess], WorkerStart, Sequence[str]]


class WorkerLauncher:
    """Starts workers in a thread that lives as long as the pool; called as `WorkerProcess` is, from any thread.

    On Linux a worker ends with the thread that started it (PR_SET_PDEATHSIG, see prctl(2)), and the thread that scores may be
    short-lived.
    """

    def __init__(self) -> None:
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._launch_workers, daemon=True, name="reward workers").start()

    def __call__(self, start: WorkerStart, variables: Sequence[str] = ()) -> WorkerProcess:
        """Raises RewardError after `close`, and whatever starting a process raises."""
        future: Future[WorkerProcess] = Future()
        with self._lock:
            if self._closed:
                raise RewardError("this RewardPool is closed; score inside its `with` block")
            self._requests.put((future, start, variables))
        return future.result()

    def close(self) -> None:
        """End the thread, and with it the workers that are left."""
        with self._lock:
            self._closed = True
            self._requests.put(None)

    def _launch_workers(self) -> None:
        while (request := self._requests.get()) is not None:
            future, start, variables = request
            try:
                future.set_result(WorkerProcess(start, variables))
            except BaseException as error:  # raised where the result is waited for
                future.set_exception(error)
            del request, future  # only the slot keeps the worker


_MAX_TAIL, _MAX_LINES, _MAX_WIDTH = 4096, 3, 200  # bytes kept; lines and characters per line of an error message


class OutputTail:
    """The last of what a worker prints. A thread reads it as it comes, so that a print never blocks on a full pipe."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe, self._lock, self._open = pipe, threading.Lock(), True
        self._tail = Tail(_MAX_TAIL)
        threading.Thread(target=self._read_until_closed, daemon=True, name="reward output").start()

    def last_lines(self) -> str:
        """Return the last printed lines, joined into one; "" where nothing was printed."""
        self._read()
        return replace_control_characters(" / ".join(last_lines(self._tail.data, _MAX_LINES, _MAX_WIDTH)))

    def clear(self) -> None:
        """Drop what has been printed so far."""
        self._read()
        self._tail = Tail(_MAX_TAIL)

    def _read_until_closed(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while self._open:
            poll.poll()
            self._read()
        os.close(self._pipe)

    def _read(self) -> None:
        with self._lock:
            if not self._open:
                return
            try:
                data = os.read(self._pipe, _READ_BYTES)
            except BlockingIOError:
                return
            self._tail.add(data)
            self._open = bool(data)


# The processes that a worker started.
#
# A child can leave its worker's process group (`setsid`) and its parent (a double fork). On Linux a worker adopts orphaned
# descendants (PR_SET_CHILD_SUBREAPER), so that while it lives they are the tree below it; once it has died, a variable in their
# environment identifies them. What escapes: a process outside of the group with an environment of its own, whose worker died by
# itself. Elsewhere than on Linux only the process group is known.
#
# Not by psutil: its import adds some 35 ms to the start of every worker, `children()` looks at every process of the machine after
# every call, and there is no one search for several workers' trees and tokens.

TOKEN_VARIABLE = "POLICYGRAD_WORKER"  # in the environment of a worker's descendants; its value is the worker's token
_MAX_ROUNDS = 50  # searches for new processes: trees that fork faster than that are left
_MAX_ZOMBIES = 64  # ended children that were not waited for, each of which holds a process id


def adopt_descendants(parent: int) -> None:
    """In a worker: adopt its orphaned descendants, and end with the process `parent`.

    Elsewhere than on Linux a worker whose parent is killed ends at its next message.
    """
    die_with_parent()
    adopt_orphans()
    if os.getppid() != parent:
        os._exit(0)


def has_too_many_zombies() -> bool:
    """Return whether this process has adopted too many ended processes.

    It cannot reap them itself: its own children are the reward function's to wait for. The kernel lists adopted children under the
    main thread, whose id is the process's.
    """
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_bytes().split()
    except OSError:  # not Linux, or a kernel without these files
        return False
    if len(children) <= _MAX_ZOMBIES:
        return False
    stats = [_read_stat(int(pid)) for pid in children]
    return sum(stat is not None and stat[0] == "Z" for stat in stats) > _MAX_ZOMBIES


def kill_workers(workers: Sequence[WorkerProcess]) -> list[str]:
    """Kill workers and what they started, by one search, as a machine may have thousands of processes.

    Returns how each had ended by itself, or "signal SIGKILL".
    """
    running = [worker.pid for worker in workers if worker.alive()]
    for worker in workers:
        if worker.pid not in running:
            kill_group(worker.pid)  # at once, before its id can be reused
        elif sys.platform == "linux":
            send_signal([worker.pid], signal.SIGSTOP)  # it forks no more, and adopts until its descendants are gone
    if sys.platform == "linux":
        killed = {os.getpid(), *(worker.pid for worker in workers)}
        tokens = {worker.token.encode() for worker in workers}
        for _ in range(_MAX_ROUNDS):
            descendants = _find_descendants(running, tokens) - killed
            if not descendants:
                break
            send_signal(descendants, signal.SIGKILL)
            killed |= descendants
    for pid in running:
        kill_group(pid)
    return [worker.collect() for worker in workers]


def _find_descendants(leaders: Sequence[int], tokens: set[bytes]) -> set[int]:
    """Return the processes below the leaders, and those that started with one of the tokens in their environment."""
    mark = re.compile(rb"(?:^|\0)" + TOKEN_VARIABLE.encode() + rb"=([^\0]*)")
    children: dict[int, list[int]] = {}
    descendants = set[int]()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # another user's, or ended meanwhile
            if tokens.intersection(mark.findall(Path(f"/proc/{pid}/environ").read_bytes())):
                descendants.add(pid)
        if (stat := _read_stat(pid)) is not None:
            children.setdefault(int(stat[1]), []).append(pid)
    unvisited = list(leaders)
    while unvisited:
        new = set(children.pop(unvisited.pop(), ()))
        descendants |= new
        unvisited += new
    return descendants


def _read_stat(pid: int) -> list[str] | None:
    """Return a process's state, parent id and so on, which follow its name in brackets; None where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


# A worker in a sandbox (`--rewards.sandbox`): no network, no files to write except in its own folder, few to read.

NO_SANDBOX = "none"
SANDBOX_CHOICES: tuple[str, ...] = get_args(SandboxChoice)
_MAX_FOLDER_BYTES = 1 << 30  # where the sandbox makes the worker's folder in memory
_CPU_PATHS = ("/sys/devices/system/cpu", "/sys/devices/system/node")
_USER_PATHS = ("/etc/passwd", "/etc/group", "/etc/nsswitch.conf")
_PROC_PATHS = ("/proc/cpuinfo", "/proc/meminfo", "/proc/self/statm", "/proc/self/task/{pid}/children")
_BUBBLEWRAP_PID = 1  # of a worker's parent inside bubblewrap


def check_sandbox(sandbox: str, rewards: Sequence[Reward] = ()) -> None:
    """Raise ConfigError for an unknown sandbox, one that does not work here, or rewards that need the network inside one."""
    if sandbox not in SANDBOX_CHOICES:
        raise ConfigError(f"rewards.sandbox={sandbox!r} is unknown: choose {', '.join(SANDBOX_CHOICES)}")
    if sandbox == NO_SANDBOX:
        return
    for reward in rewards:
        if getattr(reward.function, "reward_network", False):
            raise ConfigError(
                f"reward {reward.name!r} calls a server, and --rewards.sandbox {sandbox} has no network: set it to none, or drop "
                "the reward"
            )
    from policygrad.sandbox.backends import find_backend

    find_backend(sandbox)


def build_command(sandbox: str, environment: dict[str, str]) -> tuple[list[str], str | None]:
    """Build a worker's command, whose arguments are its import path, its parent's process id and restrictions for
    `enter_sandbox`; and create its temporary folder, which is added to the environment. None: the sandbox makes its own."""
    if sandbox == NO_SANDBOX:
        return python_command(_BOOT, str(os.getpid()), ""), None
    from policygrad.sandbox.backends import find_backend, list_interpreter_paths, writable_folder

    backend = find_backend(sandbox)
    import_path = (path for path in map(os.path.abspath, filter(None, sys.path)) if path != "/")
    readable = [*list_interpreter_paths(), *import_path, *_CPU_PATHS, *_USER_PATHS]
    folder = tempfile.mkdtemp(prefix="policygrad-worker-") if backend.needs_folder else None
    environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), folder or writable_folder(readable))
    restrictions = backend.restrictions(readable, folder or "", alone=False)
    parent = os.getpid() if folder else _BUBBLEWRAP_PID
    inner = python_command(_BOOT, str(parent), json.dumps(restrictions))
    return backend.command(inner, readable, _MAX_FOLDER_BYTES), folder


def enter_sandbox(restrictions: str) -> None:
    """In a worker, first of all: apply the restrictions that the sandbox leaves to the process itself; "" = none."""
    if not restrictions:
        return
    raise_oom_score()  # not possible afterwards
    rules: dict[str, Any] = json.loads(restrictions)
    if rules["landlock"] is not None:
        rules["landlock"]["readable"] += [path.format(pid=os.getpid()) for path in _PROC_PATHS]
    from policygrad.sandbox.process import apply_restrictions

    apply_restrictions(rules, None)
