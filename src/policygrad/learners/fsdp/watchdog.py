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
from policygrad.learners.fsdp.torchrun import launched

# Words between the processes that learn together, from whatever thread: nobody waits for anybody. It is a store beside the groups
# of torch.distributed, where all wait for all; rank 0 holds it, and whoever finds it gone knows that rank 0 is.

FOREVER = timedelta(days=30)
"""A rank 0 that is suspended (Ctrl-Z) is waited for."""


class Line:
    """A store, by keys."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def between(cls, rank: int, size: int, group: dist.ProcessGroup, host: str) -> Line:
        """Rank 0's, which tells the others of the group where it is. host: its machine, unless torchrun says it."""
        host = os.environ["MASTER_ADDR"] if launched() is not None else host
        own = TCPStore(host, 0, size, True, FOREVER, wait_for_workers=False) if rank == 0 else None
        box = [0 if own is None else own.port]
        dist.broadcast_object_list(box, src=0, group=group)
        return cls(TCPStore(host, box[0], size, False, FOREVER, wait_for_workers=False) if own is None else own)

    def post(self, key: str, words: str) -> None:
        """For whoever looks; in the place of what was there. Raises RuntimeError where rank 0 has gone."""
        self._store.set(key, b64encode(zlib.compress(words.encode(), 1)).decode())  # the store takes no more than 8 MiB

    def posted(self, *keys: str) -> bool:
        """Whether there is something under all of them."""
        return self._store.check(list(keys))

    def read(self, key: str) -> str | None:
        """What is there."""
        return self._got(key) if self._store.check([key]) else None

    def taken(self, key: str) -> str:
        """What is there, and then no longer is."""
        found = self._got(key)
        self._store.delete_key(key)
        return found

    def _got(self, key: str) -> str:
        return zlib.decompress(b64decode(self._store.get(key))).decode()


# What a process shows of itself every second: whether it moves, where it is, whether it waits for the others.
#
# A thread moves when it is not where it was a beat ago (the frames of its stack, and the instruction in each), or when its process
# has computed: a product of large matrices or a backward pass is one instruction for a long time. A thread that loops between the
# same instructions, asleep (it polls), stands still. It waits for others when the innermost frames are those of torch.distributed.

BEAT = 1.0
"""Seconds between beats."""
LEAST = 0.02
"""Seconds on a processor in a second, below which a process computes nothing: its beats take a tenth of that."""
SHOWN = 3
"""Beats without a movement, after which the stack is shown."""
END = 10.0
"""Seconds for a process to end by itself, once rank 0 has gone."""
_TORCH = str(Path(torch.__file__).parent) + os.sep
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_LIBRARY = str(Path(os.__file__).parent) + os.sep


@dataclass(frozen=True)
class Beat:
    """What is shown."""

    number: int
    """Counts beats."""
    still: int
    """Beats in a row without a movement."""
    waits: bool = False
    """In a collective."""
    place: str = ""
    """The innermost function that is neither torch's nor the standard library's, its file and line."""
    stack: str = ""
    """Where it stands still."""
    pid: int = 0
    host: str = ""


class Pulse:
    """Of one thread of this process at a time, seen from another."""

    def __init__(
        self,
        thread: int | None,
        computed: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """thread: its `threading.get_ident`. computed: seconds on a processor so far."""
        self._thread, self._computed, self._clock = thread, computed, clock
        self._number, self._still, self._stack = 0, 0, ""
        self._where: tuple[tuple[int, int], ...] = ()
        self._cpu, self._time = computed(), clock()

    def watch(self, thread: int) -> None:
        """This one from now on."""
        self._thread, self._where, self._still = thread, (), 0

    def beat(self) -> Beat:
        """How it is now."""
        frame = sys._current_frames().get(self._thread or 0)
        where = tuple((id(f.f_code), f.f_lasti) for f in frames(frame))
        cpu, now = self._computed(), self._clock()
        moved = where != self._where or cpu - self._cpu > LEAST * (now - self._time)
        self._where, self._cpu, self._time = where, cpu, now
        self._number, self._still = self._number + 1, 0 if moved else self._still + 1
        if self._still == SHOWN:
            self._stack = "".join(traceback.format_stack(frame))
        stack = self._stack if self._still >= SHOWN else ""
        found = Beat(self._number, self._still, waits(frame), place(frame), stack, os.getpid(), socket.gethostname())
        del frame  # it would keep alive what the thread works with
        return found


def frames(innermost: FrameType | None) -> Iterator[FrameType]:
    """Of a thread, outwards."""
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def waits(innermost: FrameType | None) -> bool:
    """Whether a thread is in a collective: in torch, there in torch.distributed, and in nobody else's code below that."""
    for frame in frames(innermost):
        file = frame.f_code.co_filename
        if file.startswith(_DISTRIBUTED):
            return True
        if not file.startswith(_TORCH):
            return False
    return False


def place(innermost: FrameType | None) -> str:
    """function (file:line): where a thread is, in words; of libraries only where there is nothing else."""
    frame = next((f for f in frames(innermost) if not _of_libraries(f.f_code.co_filename)), innermost)
    if frame is None:
        return "nowhere"
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _of_libraries(file: str) -> bool:
    return file.startswith(_TORCH) or (file.startswith(_LIBRARY) and "-packages" not in file)


def beat_key(rank: int) -> str:
    """Where a rank's beats are."""
    return f"beat of rank {rank}"


def end_key(rank: int) -> str:
    """Where it is said that a rank is to end."""
    return f"end of rank {rank}"


class Heart:
    """The beats of a process above rank 0, from a thread of its own, until `close`. It ends the process when rank 0 says so, or has
    gone and the process does not notice."""

    def __init__(self, line: Line, rank: int) -> None:
        self._line, self._rank, self._closed = line, rank, threading.Event()
        self._pulse = Pulse(threading.main_thread().ident)
        if hasattr(signal, "SIGUSR1"):
            with suppress(OSError, RuntimeError, ValueError):  # no standard error to write to
                faulthandler.register(signal.SIGUSR1)  # shows its stack also where no Python can run
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    def _beat(self) -> None:
        try:
            while not self._line.posted(end_key(self._rank)):
                self._line.post(beat_key(self._rank), json.dumps(asdict(self._pulse.beat())))
                if self._closed.wait(BEAT):
                    return
        except RuntimeError:  # rank 0's store has gone
            if self._closed.wait(END):
                return
        os._exit(1)

    def close(self) -> None:
        """The process is at its end."""
        self._closed.set()


STACKS = "stacks.txt"
"""In the run's folder: where each process stood."""


@dataclass(frozen=True)
class Finding:
    """Which ranks hang, and in words why one thinks so."""

    ranks: tuple[int, ...]
    words: str


def judge(beats: Sequence[Beat | None], silent: Sequence[int], limit: int) -> Finding | None:
    """Of all ranks their last beats, and how often one has looked since each came; None where all is well. limit: beats."""
    seconds = f"{limit * BEAT:g} seconds"
    mute = tuple(rank for rank, looks in enumerate(silent) if looks >= limit)
    if mute:
        return Finding(
            mute, f"{_named(mute)} did not answer for {seconds}: ended, stopped, or stuck where no Python can run"
        )
    still = [rank for rank, beat in enumerate(beats) if beat is not None and beat.still >= limit]
    stuck = tuple(rank for rank in still if not _of(beats, rank).waits)
    if stuck:
        places = ", ".join(_of(beats, rank).place for rank in stuck)
        return Finding(stuck, f"{_named(stuck)} hung in {places}: it stood there for {seconds}, and computed nothing")
    if len(still) == len(beats):
        places = ", ".join(f"rank {rank} in {_of(beats, rank).place}" for rank in still)
        return Finding(tuple(still[1:]), f"all processes waited for each other for {seconds}: {places}")
    return None


def _of(beats: Sequence[Beat | None], rank: int) -> Beat:
    beat = beats[rank]
    assert beat is not None
    return beat


def _named(ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


class Watchdog:
    """A thread of rank 0, from `start` to `close`."""

    def __init__(self, line: Line, size: int, kill: Callable[[int], bool]) -> None:
        """kill: ends a rank that this process has started; whether it has."""
        self._line, self._size, self._kill = line, size, kill
        self._pulse, self._closed = Pulse(None), threading.Event()
        self._thread: threading.Thread | None = None
        self._beats: list[Beat | None] = [None] * size
        self._silent = [0] * size
        self._what, self._turn = "", 0
        self._limit = 0
        self._folder: Path | None = None
        self.found = ""
        """In words, what hung, and how to go on."""

    def start(self, patience: float, folder: Path | None) -> None:
        """patience: seconds; 0 = any. folder: the run's."""
        self._limit, self._folder = ceil(patience / BEAT), folder
        if self._thread is None and self._size > 1:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Nobody is watched any longer."""
        self._closed.set()

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Around what all processes do; this thread is rank 0's part in it."""
        self._pulse.watch(threading.get_ident())
        self._turn, self._what = self._turn + 1, what
        try:
            yield
        finally:
            self._what = ""

    @property
    def mute(self) -> str:
        """In words, that another has not been heard of for as long as one waits; empty where all have."""
        mute = [rank for rank, looks in enumerate(self._silent) if self._limit and looks >= self._limit]
        return f"{_named(mute)} did not answer" if mute else ""

    def _watch(self) -> None:
        while not self._closed.wait(BEAT):
            self._look()
            what = self._what
            if what and self._limit and (found := judge(self._beats, self._silent, self._limit)) is not None:
                self._act(found, what)
                return

    def _look(self) -> None:
        self._beats[0] = self._pulse.beat()
        for rank in range(1, self._size):
            said, before = self._line.read(beat_key(rank)), self._beats[rank]
            beat = before if said is None else Beat(**json.loads(said))
            heard = beat is not None and (before is None or beat.number != before.number)
            self._beats[rank], self._silent[rank] = beat, 0 if heard else self._silent[rank] + 1

    def _act(self, found: Finding, what: str) -> None:
        """Ends who hangs, which ends the wait of the others; and this process too, where that does not."""
        turn = self._turn
        self._show(found)
        self.found = f"{found.words}, in the midst of {what!r}. {self._written()}"
        print(self.found, file=sys.stderr, flush=True)
        for rank in found.ranks:
            self._end(rank)
        if 0 in found.ranks or not self._left(turn):
            for rank in range(1, self._size):
                self._end(rank)
            print("error: rank 0 cannot be brought out of it, and ends", file=sys.stderr, flush=True)
            os._exit(HangError.code)

    def _left(self, turn: int) -> bool:
        """Whether this process comes out of what all did."""
        until = time.monotonic() + END
        while self._what and self._turn == turn:
            if time.monotonic() > until:
                return False
            time.sleep(BEAT / 10)
        return True

    def _show(self, found: Finding) -> None:
        """Has those of this machine that do not answer show their stacks, on standard error, as far as they can."""
        for rank in found.ranks:
            beat = self._beats[rank]
            if self._silent[rank] >= self._limit and beat is not None and beat.host == socket.gethostname():
                with suppress(OSError):
                    os.kill(beat.pid, signal.SIGUSR1)
                time.sleep(BEAT)

    def _written(self) -> str:
        """The stacks of all, in the run's folder or on standard error; in words where they are, and how to go on."""
        shown = "\n".join(self._stack(rank) for rank in range(self._size))
        if self._folder is None:
            print(shown, file=sys.stderr, flush=True)
            return "The stacks stand above"
        try:
            (self._folder / STACKS).write_text(shown, encoding="utf-8")
        except OSError:
            print(shown, file=sys.stderr, flush=True)
            return f"The stacks stand above; --resume {self._folder} goes on from the last checkpoint"
        return (
            f"The stacks are in {self._folder / STACKS}; --resume {self._folder} goes on from the last checkpoint, and "
            "--learner.patience is how long is waited"
        )

    def _stack(self, rank: int) -> str:
        beat = self._beats[rank]
        if beat is None:
            return f"rank {rank} has never been heard of\n"
        state = "waits for others" if beat.waits else "does not wait for others"
        told = f"rank {rank} (process {beat.pid} on {beat.host}) has stood still for {beat.still} beats, and {state}"
        silent = f", not heard of for {n}" if (n := self._silent[rank]) > 1 else ""
        return f"{told}{silent}; in {beat.place}\n{beat.stack}"

    def _end(self, rank: int) -> None:
        """By whatever way there is: as its parent, by a word, by its number on this machine."""
        if rank == 0 or self._kill(rank):
            return
        self._line.post(end_key(rank), "")
        beat = self._beats[rank]
        if beat is not None and beat.host == socket.gethostname():
            with suppress(OSError):
                os.kill(beat.pid, signal.SIGKILL)
