"""What a process shows of itself every second: whether it moves, where it is, whether it waits for the others.

A thread moves when it is not where it was a beat ago (the frames of its stack, and the instruction in each), or when its process
has computed: a product of large matrices or a backward pass is one instruction for a long time. A thread that loops between the
same instructions, asleep (it polls), stands still. It waits for others when the innermost frames are those of torch.distributed.
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
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch

from policygrad.learners.fsdp.line import Line

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
