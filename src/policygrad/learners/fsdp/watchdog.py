"""Rank 0's watch over the processes that learn together: the one that stands still while the others wait for it is named, with its
stack, and the run ends where it can go on.

It looks only while all do something together (an update, a draw). What rank 0 does alone, rewards and callbacks say, takes as long
as it takes. Beats are counted, not seconds, so that a machine that was suspended has missed none.
"""

from __future__ import annotations

import faulthandler
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
from math import ceil
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from policygrad.errors import HangError
from policygrad.learners.fsdp.torchrun import torchrun_rank

# Words between the processes that learn together, from whatever thread: nobody waits for anybody. It is a store beside the groups
# of torch.distributed, where all wait for all; rank 0 holds it, and whoever finds it gone knows that rank 0 is.

STORE_TIMEOUT = timedelta(days=30)
"""A rank 0 that is suspended (Ctrl-Z) is waited for."""


class ControlStore:
    """A store, by keys."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def connect(cls, rank: int, size: int, group: dist.ProcessGroup, host: str) -> ControlStore:
        """Rank 0's, which tells the others of the group where it is. host: its machine, unless torchrun says it."""
        host = os.environ["MASTER_ADDR"] if torchrun_rank() is not None else host
        server = TCPStore(host, 0, size, True, STORE_TIMEOUT, wait_for_workers=False) if rank == 0 else None
        box = [0 if server is None else server.port]
        dist.broadcast_object_list(box, src=0, group=group)
        return cls(
            TCPStore(host, box[0], size, False, STORE_TIMEOUT, wait_for_workers=False) if server is None else server
        )

    def set(self, key: str, text: str) -> None:
        """For whoever looks; in the place of what was there. Raises RuntimeError where rank 0 has gone."""
        self._store.set(key, b64encode(zlib.compress(text.encode(), 1)).decode())  # the store takes no more than 8 MiB

    def contains(self, *keys: str) -> bool:
        """Whether there is something under all of them."""
        return self._store.check(list(keys))

    def get(self, key: str) -> str | None:
        """What is there."""
        return self._fetch(key) if self._store.check([key]) else None

    def pop(self, key: str) -> str:
        """What is there, and then no longer is."""
        text = self._fetch(key)
        self._store.delete_key(key)
        return text

    def _fetch(self, key: str) -> str:
        return zlib.decompress(b64decode(self._store.get(key))).decode()


# What a process shows of itself every second: whether it moves, where it is, whether it waits for the others.
#
# A thread moves when it is not where it was a beat ago (the frames of its stack, and the instruction in each), or when its process
# has computed: a product of large matrices or a backward pass is one instruction for a long time. A thread that loops between the
# same instructions, asleep (it polls), stands still. It waits for others when the innermost frames are those of torch.distributed.

BEAT_SECONDS = 1.0
"""Seconds between beats."""
MIN_CPU_FRACTION = 0.02
"""Seconds on a processor in a second, below which a process computes nothing: its beats take a tenth of that."""
STACK_AFTER_BEATS = 3
"""Beats without a movement, after which the stack is shown."""
EXIT_SECONDS = 10.0
"""Seconds for a process to end by itself, once rank 0 has gone."""
_TORCH = str(Path(torch.__file__).parent) + os.sep
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_LIBRARY = str(Path(os.__file__).parent) + os.sep


@dataclass(frozen=True)
class Heartbeat:
    """What is shown."""

    number: int
    """Counts beats."""
    idle_beats: int
    """Beats in a row without a movement."""
    in_collective: bool = False
    """In a collective."""
    location: str = ""
    """The innermost function that is neither torch's nor the standard library's, its file and line."""
    stack: str = ""
    """Where it stands still."""
    pid: int = 0
    host: str = ""


class ThreadMonitor:
    """Of one thread of this process at a time, seen from another."""

    def __init__(
        self,
        thread: int | None,
        cpu_seconds: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """thread: its `threading.get_ident`. computed: seconds on a processor so far."""
        self._thread, self._cpu_seconds, self._clock = thread, cpu_seconds, clock
        self._number, self._idle_beats, self._stack = 0, 0, ""
        self._frames: tuple[tuple[int, int], ...] = ()
        self._cpu, self._time = cpu_seconds(), clock()

    def watch(self, thread: int) -> None:
        """This one from now on."""
        self._thread, self._frames, self._idle_beats = thread, (), 0

    def beat(self) -> Heartbeat:
        """How it is now."""
        frame = sys._current_frames().get(self._thread or 0)
        frames_now = tuple((id(f.f_code), f.f_lasti) for f in iter_frames(frame))
        cpu, now = self._cpu_seconds(), self._clock()
        moved = frames_now != self._frames or cpu - self._cpu > MIN_CPU_FRACTION * (now - self._time)
        self._frames, self._cpu, self._time = frames_now, cpu, now
        self._number, self._idle_beats = self._number + 1, 0 if moved else self._idle_beats + 1
        if self._idle_beats == STACK_AFTER_BEATS:
            self._stack = "".join(traceback.format_stack(frame))
        stack = self._stack if self._idle_beats >= STACK_AFTER_BEATS else ""
        heartbeat = Heartbeat(
            self._number,
            self._idle_beats,
            is_in_collective(frame),
            describe_location(frame),
            stack,
            os.getpid(),
            socket.gethostname(),
        )
        del frame  # it would keep alive what the thread works with
        return heartbeat


def iter_frames(innermost: FrameType | None) -> Iterator[FrameType]:
    """Of a thread, outwards."""
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def is_in_collective(innermost: FrameType | None) -> bool:
    """Whether a thread is in a collective: in torch, there in torch.distributed, and in nobody else's code below that."""
    for frame in iter_frames(innermost):
        file = frame.f_code.co_filename
        if file.startswith(_DISTRIBUTED):
            return True
        if not file.startswith(_TORCH):
            return False
    return False


def describe_location(innermost: FrameType | None) -> str:
    """function (file:line): where a thread is, in words; of libraries only where there is nothing else."""
    frame = next((f for f in iter_frames(innermost) if not _is_library(f.f_code.co_filename)), innermost)
    if frame is None:
        return "nowhere"
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _is_library(file: str) -> bool:
    return file.startswith(_TORCH) or (file.startswith(_LIBRARY) and "-packages" not in file)


def heartbeat_key(rank: int) -> str:
    """Where a rank's beats are."""
    return f"beat of rank {rank}"


def exit_key(rank: int) -> str:
    """Where it is said that a rank is to end."""
    return f"end of rank {rank}"


class HeartbeatThread:
    """The beats of a process above rank 0, from a thread of its own, until `close`. It ends the process when rank 0 says so, or has
    gone and the process does not notice."""

    def __init__(self, line: ControlStore, rank: int) -> None:
        self._store, self._rank, self._closed = line, rank, threading.Event()
        self._monitor = ThreadMonitor(threading.main_thread().ident)
        if hasattr(signal, "SIGUSR1"):
            with suppress(OSError, RuntimeError, ValueError):  # no standard error to write to
                faulthandler.register(signal.SIGUSR1)  # shows its stack also where no Python can run
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    def _beat(self) -> None:
        try:
            while not self._store.contains(exit_key(self._rank)):
                self._store.set(heartbeat_key(self._rank), json.dumps(asdict(self._monitor.beat())))
                if self._closed.wait(BEAT_SECONDS):
                    return
        except RuntimeError:  # rank 0's store has gone
            if self._closed.wait(EXIT_SECONDS):
                return
        os._exit(1)

    def close(self) -> None:
        """The process is at its end."""
        self._closed.set()


STACKS_FILE = "stacks.txt"
"""In the run's folder: where each process stood."""


@dataclass(frozen=True)
class HangDiagnosis:
    """Which ranks hang, and in words why one thinks so."""

    ranks: tuple[int, ...]
    message: str


def diagnose_hang(beats: Sequence[Heartbeat | None], missed: Sequence[int], limit: int) -> HangDiagnosis | None:
    """Of all ranks their last beats, and how often one has looked since each came; None where all is well. limit: beats."""
    seconds = f"{limit * BEAT_SECONDS:g} seconds"
    unresponsive = tuple(rank for rank, looks in enumerate(missed) if looks >= limit)
    if unresponsive:
        return HangDiagnosis(
            unresponsive,
            f"{_named(unresponsive)} did not answer for {seconds}: ended, stopped, or stuck where no Python can run",
        )
    idle = [rank for rank, beat in enumerate(beats) if beat is not None and beat.idle_beats >= limit]
    stuck = tuple(rank for rank in idle if not _of(beats, rank).in_collective)
    if stuck:
        locations = ", ".join(_of(beats, rank).location for rank in stuck)
        return HangDiagnosis(
            stuck, f"{_named(stuck)} hung in {locations}: it stood there for {seconds}, and computed nothing"
        )
    if len(idle) == len(beats):
        locations = ", ".join(f"rank {rank} in {_of(beats, rank).location}" for rank in idle)
        return HangDiagnosis(tuple(idle[1:]), f"all processes waited for each other for {seconds}: {locations}")
    return None


def _of(beats: Sequence[Heartbeat | None], rank: int) -> Heartbeat:
    beat = beats[rank]
    assert beat is not None
    return beat


def _named(ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


class Watchdog:
    """A thread of rank 0, from `start` to `close`."""

    def __init__(self, line: ControlStore, size: int, kill: Callable[[int], bool]) -> None:
        """kill: ends a rank that this process has started; whether it has."""
        self._store, self._size, self._kill = line, size, kill
        self._monitor, self._closed = ThreadMonitor(None), threading.Event()
        self._thread: threading.Thread | None = None
        self._beats: list[Heartbeat | None] = [None] * size
        self._missed = [0] * size
        self._operation, self._operation_count = "", 0
        self._limit = 0
        self._folder: Path | None = None
        self.diagnosis = ""
        """In words, what hung, and how to go on."""

    def start(self, timeout: float, folder: Path | None) -> None:
        """patience: seconds; 0 = any. folder: the run's."""
        self._limit, self._folder = ceil(timeout / BEAT_SECONDS), folder
        if self._thread is None and self._size > 1:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Nobody is watched any longer."""
        self._closed.set()

    @contextmanager
    def watch_collective(self, operation: str) -> Iterator[None]:
        """Around what all processes do; this thread is rank 0's part in it."""
        self._monitor.watch(threading.get_ident())
        self._operation_count, self._operation = self._operation_count + 1, operation
        try:
            yield
        finally:
            self._operation = ""

    @property
    def unresponsive(self) -> str:
        """In words, that another has not been heard of for as long as one waits; empty where all have."""
        ranks = [rank for rank, looks in enumerate(self._missed) if self._limit and looks >= self._limit]
        return f"{_named(ranks)} did not answer" if ranks else ""

    def _watch(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            self._collect_heartbeats()
            operation = self._operation
            if (
                operation
                and self._limit
                and (diagnosis := diagnose_hang(self._beats, self._missed, self._limit)) is not None
            ):
                self._end_hang(diagnosis, operation)
                return

    def _collect_heartbeats(self) -> None:
        self._beats[0] = self._monitor.beat()
        for rank in range(1, self._size):
            text, before = self._store.get(heartbeat_key(rank)), self._beats[rank]
            beat = before if text is None else Heartbeat(**json.loads(text))
            arrived = beat is not None and (before is None or beat.number != before.number)
            self._beats[rank], self._missed[rank] = beat, 0 if arrived else self._missed[rank] + 1

    def _end_hang(self, diagnosis: HangDiagnosis, operation: str) -> None:
        """Ends who hangs, which ends the wait of the others; and this process too, where that does not."""
        count = self._operation_count
        self._request_stacks(diagnosis)
        self.diagnosis = f"{diagnosis.message}, in the midst of {operation!r}. {self._write_stacks()}"
        print(self.diagnosis, file=sys.stderr, flush=True)
        for rank in diagnosis.ranks:
            self._kill_rank(rank)
        if 0 in diagnosis.ranks or not self._wait_until_left(count):
            for rank in range(1, self._size):
                self._kill_rank(rank)
            print("error: rank 0 cannot be brought out of it, and ends", file=sys.stderr, flush=True)
            os._exit(HangError.code)

    def _wait_until_left(self, count: int) -> bool:
        """Whether this process comes out of what all did."""
        until = time.monotonic() + EXIT_SECONDS
        while self._operation and self._operation_count == count:
            if time.monotonic() > until:
                return False
            time.sleep(BEAT_SECONDS / 10)
        return True

    def _request_stacks(self, diagnosis: HangDiagnosis) -> None:
        """Has those of this machine that do not answer show their stacks, on standard error, as far as they can."""
        for rank in diagnosis.ranks:
            beat = self._beats[rank]
            if self._missed[rank] >= self._limit and beat is not None and beat.host == socket.gethostname():
                with suppress(OSError):
                    os.kill(beat.pid, signal.SIGUSR1)
                time.sleep(BEAT_SECONDS)

    def _write_stacks(self) -> str:
        """The stacks of all, in the run's folder or on standard error; in words where they are, and how to go on."""
        shown = "\n".join(self._stack(rank) for rank in range(self._size))
        if self._folder is None:
            print(shown, file=sys.stderr, flush=True)
            return "The stacks stand above"
        try:
            (self._folder / STACKS_FILE).write_text(shown, encoding="utf-8")
        except OSError:
            print(shown, file=sys.stderr, flush=True)
            return f"The stacks stand above; --resume {self._folder} goes on from the last checkpoint"
        return (
            f"The stacks are in {self._folder / STACKS_FILE}; --resume {self._folder} goes on from the last checkpoint, and "
            "--learner.hang-timeout is how long is waited"
        )

    def _stack(self, rank: int) -> str:
        beat = self._beats[rank]
        if beat is None:
            return f"rank {rank} has never been heard of\n"
        state = "waits for others" if beat.in_collective else "does not wait for others"
        state_text = (
            f"rank {rank} (process {beat.pid} on {beat.host}) has stood still for {beat.idle_beats} beats, and {state}"
        )
        silent = f", not heard of for {n}" if (n := self._missed[rank]) > 1 else ""
        return f"{state_text}{silent}; in {beat.location}\n{beat.stack}"

    def _kill_rank(self, rank: int) -> None:
        """By whatever way there is: as its parent, by a word, by its number on this machine."""
        if rank == 0 or self._kill(rank):
            return
        self._store.set(exit_key(rank), "")
        beat = self._beats[rank]
        if beat is not None and beat.host == socket.gethostname():
            with suppress(OSError):
                os.kill(beat.pid, signal.SIGKILL)
