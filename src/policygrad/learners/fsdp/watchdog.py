"""Rank 0's watch over the processes that learn together: the one that stands still while the others wait for it is named, with its
stack, and the run ends where it can go on.

It looks only while all do something together (an update, a draw). What rank 0 does alone, rewards and callbacks say, takes as long
as it takes. Beats are counted, not seconds, so that a machine that was suspended has missed none.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from policygrad.errors import HangError
from policygrad.learners.fsdp.line import Line
from policygrad.learners.fsdp.pulse import BEAT, END, Beat, Pulse, beat_key, end_key

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
