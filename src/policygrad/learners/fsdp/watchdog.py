"""Hang detection for processes that learn together: a heartbeat per process and a watchdog in rank 0.

The watchdog is active only inside collective operations (an update, sampling). Work that rank 0 does alone, such as rewards and
callbacks, may take any time. Heartbeats are counted instead of timed, so a machine that was suspended has missed none.

`faulthandler.dump_traceback_later` cannot tell a rank that is stuck from the ranks that wait for it in a collective, or from one
that computes for minutes. faulthandler serves where Python code cannot: a rank stuck in C code that holds the interpreter lock.
"""

from __future__ import annotations

import faulthandler
import hmac
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import takewhile
from math import ceil
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from policygrad.errors import HangError
from policygrad.utils.rendezvous import connect_to_store, serve_store

if TYPE_CHECKING:
    from policygrad.learners.fsdp.processes import WorkerProcess

STORE_TIMEOUT = timedelta(days=30)  # long, so that workers wait for a suspended rank 0 (Ctrl-Z)
BEAT_SECONDS = 1.0  # seconds between heartbeats
MIN_CPU_FRACTION = 0.02
"""CPU seconds per second below which a process counts as idle; sending heartbeats takes a tenth of that."""
STACK_AFTER_BEATS = 3  # idle heartbeats after which the stack is sent along
_SIGNATURE_BYTES = 32  # SHA-256
START_SECONDS = 300.0  # that rank 0's machine has to answer before it has said how long it may be silent
EXIT_SECONDS = 10.0  # seconds that a process has to leave an operation or to exit by itself
Clock = Callable[[], float]  # returns seconds
SHORTAGE_KEY = "out of memory"  # in the ranks' store: what a rank that has exited since ran out of memory in
STACKS_FILE = "stacks.txt"  # in the run's folder: the stack of every process at a hang
_TORCH = str(Path(torch.__file__).parent) + os.sep
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep


class ControlStore:
    """A key-value store between ranks for use from any thread; unlike a collective, no call waits for another process.

    It is a TCPStore that rank 0 serves, which accepts values from whoever can reach its address. Every value is therefore signed
    with a key that only the ranks have; one without their signature counts as absent. Every method raises RuntimeError once
    rank 0 has exited.
    """

    def __init__(self, store: Store, key: bytes) -> None:
        self._store, self._key = store, key

    @classmethod
    def connect(cls, rank: int, group: dist.ProcessGroup, host: str, key: bytes) -> ControlStore:
        """Connect to the store that rank 0 serves at its address `host`; the port is broadcast in `group`."""
        server = serve_store(host, STORE_TIMEOUT) if rank == 0 else None
        port = torch.tensor([0 if server is None else server.port])
        dist.broadcast(port, src=0, group=group)
        return cls(server or connect_to_store(host, int(port), STORE_TIMEOUT), key)

    def set(self, key: str, text: str) -> None:
        """Store a text, replacing an earlier one."""
        content = zlib.compress(text.encode(), 1)  # a store value is limited to 8 MiB
        self._store.set(key, b64encode(self._sign(key, content) + content).decode())

    def contains(self, *keys: str) -> bool:
        return self._store.check(list(keys)) and all(self._fetch(key) is not None for key in keys)

    def get(self, key: str) -> str | None:
        return self._fetch(key) if self._store.check([key]) else None

    def pop(self, key: str) -> str:
        """Return the text and delete it. Raises KeyError if there is none that a rank has written."""
        text = self._fetch(key)
        if text is None:
            raise KeyError(key)
        self._store.delete_key(key)
        return text

    def _fetch(self, key: str) -> str | None:
        try:
            value = b64decode(self._store.get(key), validate=True)
        except ValueError:
            return None
        signature, content = value[:_SIGNATURE_BYTES], value[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(key, content)):
            return None
        return zlib.decompress(content).decode()

    def _sign(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self._key, key.encode() + b"\0" + content, "sha256")


@dataclass(frozen=True)
class Heartbeat:
    """The state of one process."""

    number: int  # consecutive number of the heartbeat
    idle_beats: int  # consecutive heartbeats without progress
    in_collective: bool = False  # the thread waits for other ranks
    location: str = ""  # innermost function outside torch and the standard library, with file and line
    stack: str = ""  # stack of an idle thread
    pid: int = 0
    host: str = ""


class ThreadMonitor:
    """Measures the progress of one thread of this process from another thread.

    A thread makes progress if its stack (functions and instructions) has changed since the last heartbeat, or if the process has
    used the CPU: a large matrix product or a backward pass is a single instruction for a long time. A thread that sleeps in a
    polling loop makes no progress. A thread is in a collective if its innermost frames belong to torch.distributed.
    """

    def __init__(
        self, thread: int | None, cpu_seconds: Clock = time.process_time, clock: Clock = time.monotonic
    ) -> None:
        """`thread` is its `threading.get_ident()`; the clocks return the CPU time of the process and the time."""
        self._cpu_seconds, self._clock = cpu_seconds, clock
        self._number, self._stack = 0, ""
        self._cpu, self._time = cpu_seconds(), clock()
        self.watch(thread)

    def watch(self, thread: int | None) -> None:
        """Monitor another thread from now on."""
        self._thread, self._idle_beats = thread, 0
        self._frames: tuple[tuple[int, int], ...] = ()

    def beat(self) -> Heartbeat:
        """Measure the thread now."""
        frame = sys._current_frames().get(self._thread or 0)
        frames_now = tuple((id(f.f_code), f.f_lasti) for f in iter_frames(frame))
        cpu, now = self._cpu_seconds(), self._clock()
        moved = frames_now != self._frames or cpu - self._cpu > MIN_CPU_FRACTION * (now - self._time)
        self._frames, self._cpu, self._time = frames_now, cpu, now
        self._number, self._idle_beats = self._number + 1, 0 if moved else self._idle_beats + 1
        if self._idle_beats == STACK_AFTER_BEATS:
            self._stack = "".join(traceback.format_stack(frame))
        stack = self._stack if self._idle_beats >= STACK_AFTER_BEATS else ""
        waits, location = is_in_collective(frame), describe_location(frame)
        del frame  # it would keep the thread's local variables alive
        return Heartbeat(self._number, self._idle_beats, waits, location, stack, os.getpid(), socket.gethostname())


def iter_frames(innermost: FrameType | None) -> Iterator[FrameType]:
    """Iterate over a thread's frames from the innermost outwards."""
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def is_in_collective(innermost: FrameType | None) -> bool:
    """Return whether a thread is in torch.distributed, with nothing but torch's own frames further in."""
    files = (frame.f_code.co_filename for frame in iter_frames(innermost))
    return any(file.startswith(_DISTRIBUTED) for file in takewhile(lambda file: file.startswith(_TORCH), files))


def describe_location(innermost: FrameType | None) -> str:
    """Return "function (file:line)" of the innermost frame outside torch and the standard library, if there is one."""

    def is_library(file: str) -> bool:
        return file.startswith(_TORCH) or (file.startswith(_STANDARD_LIBRARY) and "-packages" not in file)

    frame = next((f for f in iter_frames(innermost) if not is_library(f.f_code.co_filename)), innermost)
    if frame is None:
        return "nowhere"
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def heartbeat_key(rank: int) -> str:
    return f"heartbeat {rank}"


class HeartbeatThread:
    """Sends a rank's heartbeats until `close`, and ends the process if rank 0 requests it, has exited unnoticed, or is on a machine
    that is heard of no more."""

    def __init__(self, store: ControlStore, rank: int, machine: str = "") -> None:
        """`machine`: the name of rank 0's, if it is another one than this. One that is suspended on this machine is waited for."""
        self._store, self._rank, self._machine, self._closed = store, rank, machine, threading.Event()
        self.limit = ceil(START_SECONDS / BEAT_SECONDS)
        """Checks without an answer of rank 0's machine that mean that it is gone; 0 = never."""
        self._answers = 0
        self._monitor = ThreadMonitor(threading.main_thread().ident)
        if hasattr(signal, "SIGUSR1"):
            with suppress(OSError, RuntimeError, ValueError):  # there is no standard error to write to
                faulthandler.register(signal.SIGUSR1)  # prints the stack even while C code holds the interpreter lock
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()
        if machine:
            threading.Thread(target=self._watch_machine, name="watchdog of rank 0", daemon=True).start()

    def allow(self, timeout: float) -> None:
        """Wait for an answer of rank 0's machine for so many seconds from now on; 0 = for ever."""
        self.limit = ceil(timeout / BEAT_SECONDS)

    def _watch_machine(self) -> None:
        """End this process once the other thread waits for too long: a machine without power ends no connection."""
        missed = before = 0
        while not self._closed.wait(BEAT_SECONDS):
            missed, before = 0 if self._answers != before else missed + 1, self._answers
            if self.limit and missed >= self.limit:
                print(
                    f"error: rank {self._rank} on {socket.gethostname()} has heard nothing of rank 0 on {self._machine} for "
                    f"{missed * BEAT_SECONDS:g} seconds: the machine or the network between the two is gone; exiting",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(HangError.code)

    def _run(self) -> None:
        try:
            while not self._store.contains(f"exit {self._rank}"):
                self._store.set(heartbeat_key(self._rank), json.dumps(asdict(self._monitor.beat())))
                self._answers += 1
                if self._closed.wait(BEAT_SECONDS):
                    return
        except RuntimeError:  # rank 0's store is gone
            if self._closed.wait(EXIT_SECONDS):
                return
        os._exit(1)

    def close(self) -> None:
        """Stop sending: the process is about to exit."""
        self._closed.set()


@dataclass(frozen=True)
class HangDiagnosis:
    """The ranks that hang, and why they are believed to."""

    ranks: tuple[int, ...]
    message: str


def diagnose_hang(beats: Sequence[Heartbeat | None], missed: Sequence[int], limit: int) -> HangDiagnosis | None:
    """Decide which ranks hang, from the last heartbeat of each and the checks `missed` since; None if none does.

    `limit`: heartbeats without progress, or checks without a heartbeat, that mean a hang.
    """
    seconds = f"{limit * BEAT_SECONDS:g} seconds"
    if unresponsive := tuple(rank for rank, checks in enumerate(missed) if checks >= limit):
        reason = f"did not answer for {seconds}: ended, stopped, or stuck in C code that does not let Python run"
        return HangDiagnosis(unresponsive, f"{_join_ranks(unresponsive, beats)} {reason}")
    idle = {rank: beat for rank, beat in enumerate(beats) if beat is not None and beat.idle_beats >= limit}
    if stuck := {rank: beat for rank, beat in idle.items() if not beat.in_collective}:
        locations = ", ".join(beat.location for beat in stuck.values())
        return HangDiagnosis(
            tuple(stuck),
            f"{_join_ranks(tuple(stuck), beats)} hung in {locations}: no progress and no CPU time for {seconds}",
        )
    if len(idle) == len(beats):
        locations = ", ".join(f"rank {rank} in {beat.location}" for rank, beat in idle.items())
        return HangDiagnosis(tuple(idle)[1:], f"all processes waited for each other for {seconds}: {locations}")
    return None


def _join_ranks(ranks: Sequence[int], beats: Sequence[Heartbeat | None]) -> str:
    """Name ranks, each with its machine if that is another than rank 0's."""
    here = "" if beats[0] is None else beats[0].host
    machines = ["" if beat is None or beat.host in ("", here) else f" on {beat.host}" for beat in beats]
    return " and ".join(f"rank {rank}{machines[rank]}" for rank in ranks)


class Watchdog:
    """A thread in rank 0 that ends a run whose processes hang, from `start` to `close`."""

    def __init__(self, store: ControlStore, size: int, processes: Sequence[WorkerProcess]) -> None:
        """`processes` are the ranks above 0 if this process has started them."""
        self._store, self._size, self._processes = store, size, processes
        self._monitor, self._closed = ThreadMonitor(None), threading.Event()
        self._thread: threading.Thread | None = None
        self._beats: list[Heartbeat | None] = [None] * size
        self._missed = [0] * size
        self._operation, self._operation_count = "", 0
        self._limit = 0
        self._folder: Path | None = None
        self.diagnosis = ""  # what hung, and how to resume; empty while nothing has
        self.before_exit: Callable[[], None] = lambda: None
        """Called before this process is ended while rank 0 is stuck in a collective."""

    def start(self, timeout: float, folder: Path | None) -> None:
        """Watch for a `timeout` in seconds without progress (0 = for ever); `folder` receives the stacks, or stderr if None."""
        self._limit, self._folder = ceil(timeout / BEAT_SECONDS), folder
        if self._thread is None and self._size > 1:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()

    @contextmanager
    def watch_collective(self, operation: str) -> Iterator[None]:
        """Enclose a collective operation, which the calling thread takes part in for rank 0."""
        self._monitor.watch(threading.get_ident())
        self._operation_count, self._operation = self._operation_count + 1, operation
        try:
            yield
        finally:
            self._operation = ""

    @property
    def unresponsive(self) -> str:
        """The ranks without a heartbeat for as long as the timeout, as text; empty if there is none."""
        ranks = [rank for rank, checks in enumerate(self._missed) if self._limit and checks >= self._limit]
        return f"{_join_ranks(ranks, self._beats)} did not answer" if ranks else ""

    def _watch(self) -> None:
        diagnosis: HangDiagnosis | None = None
        while diagnosis is None:
            if self._closed.wait(BEAT_SECONDS):
                return
            self._beats[0] = self._monitor.beat()
            for rank in range(1, self._size):
                text, before = self._store.get(heartbeat_key(rank)), self._beats[rank]
                beat = before if text is None else Heartbeat(**json.loads(text))
                arrived = beat is not None and (before is None or beat.number != before.number)
                self._beats[rank], self._missed[rank] = beat, 0 if arrived else self._missed[rank] + 1
            operation, shortage = self._operation, self._store.get(SHORTAGE_KEY)
            if operation and shortage is not None:  # rank 0 need not wait until the missing heartbeats mean a hang
                diagnosis = HangDiagnosis((), json.loads(shortage)["message"])
            elif operation and self._limit:
                diagnosis = diagnose_hang(self._beats, self._missed, self._limit)
        # kill the ranks that hang, which fails the collective in the others; exit if rank 0 does not leave it either
        count = self._operation_count
        for rank in diagnosis.ranks:  # one that is stuck in C code still prints its stack by faulthandler
            if self._missed[rank] >= self._limit and self._signal_local(rank, signal.SIGUSR1):
                time.sleep(BEAT_SECONDS)
        if diagnosis.ranks:
            self.diagnosis = f"{diagnosis.message}, during {operation!r}. {self._write_stacks()}"
            print(self.diagnosis, file=sys.stderr, flush=True)
        for rank in diagnosis.ranks:
            self._kill_rank(rank)
        # a rank that has exited by itself ends the collective by that, once rank 0 comes to it
        patience = EXIT_SECONDS if diagnosis.ranks else max(EXIT_SECONDS, self._limit * BEAT_SECONDS or float("inf"))
        deadline = time.monotonic() + patience
        stuck = 0 in diagnosis.ranks
        while not stuck and self._operation and self._operation_count == count:
            stuck = time.monotonic() > deadline
            time.sleep(BEAT_SECONDS / 10)
        if stuck:
            for rank in range(1, self._size):
                self._kill_rank(rank)
            self.before_exit()
            reason = "" if diagnosis.ranks else f": {diagnosis.message}; --resume {self._folder} goes on"
            print(f"error: rank 0 is stuck and could not be interrupted{reason}; exiting", file=sys.stderr, flush=True)
            os._exit(HangError.code)

    def _signal_local(self, rank: int, number: int) -> bool:
        beat = self._beats[rank]
        if beat is None or beat.host != socket.gethostname():
            return False
        with suppress(OSError):
            os.kill(beat.pid, number)
        return True

    def _write_stacks(self) -> str:
        """Write the stacks of all ranks to the run's folder or standard error; return where they are and how to resume."""
        stacks = []
        for rank, beat in enumerate(self._beats):
            if beat is None:
                stacks.append(f"rank {rank} has never sent a heartbeat\n")
                continue
            state = "waits for other ranks" if beat.in_collective else "does not wait for other ranks"
            missed = f", its last heartbeat was {n} checks ago" if (n := self._missed[rank]) > 1 else ""
            stacks.append(
                f"rank {rank} (process {beat.pid} on {beat.host}) has made no progress for {beat.idle_beats} heartbeats and "
                f"{state}{missed}; in {beat.location}\n{beat.stack}"
            )
        text = "\n".join(stacks)
        resume = f"resume from the last checkpoint with --resume {self._folder}"
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / STACKS_FILE).write_text(text, encoding="utf-8")
                return f"The stacks are in {self._folder / STACKS_FILE}; {resume}, and raise --learner.hang-timeout if nothing hung"
        print(text, file=sys.stderr, flush=True)
        return "The stacks are above" if self._folder is None else f"The stacks are above; {resume}"

    def _kill_rank(self, rank: int) -> None:
        """Kill a rank as its parent, or else through the store and, on this machine, by its process id."""
        if rank != 0 and self._processes:
            self._processes[rank - 1].kill()
        elif rank != 0:
            self._store.set(f"exit {rank}", "")
            self._signal_local(rank, signal.SIGKILL)
