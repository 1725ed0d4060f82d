"""Hands chunks to worker processes, keeps a deadline per call, and replaces a worker that overruns or dies."""

import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from policygrad.errors import RewardError
from policygrad.rewards.calls import Judgement
from policygrad.rewards.subprocess import WorkerProcess
from policygrad.rewards.wire import Chunk, Started, WorkerStart

START_LIMIT = 120.0  # seconds for a worker to import what its functions need; not part of any sample's budget
ALONE_LIMIT = 3600.0  # for one that loads, or first downloads, a model

_Report = Callable[[int, tuple[int, ...], list[Judgement]], None]


@dataclass
class Slot:
    """One place for a worker: the functions it runs, its worker, and the chunk that is at it."""

    start: WorkerStart
    limit: float = START_LIMIT  # seconds for its start
    worker: WorkerProcess | None = None
    ready: bool = False
    work: "Work | None" = None
    done: int = 0  # calls of the chunk that are answered
    deadline: float = 0.0  # of the start while not ready, else of the call after `done`

    def takes(self, work: "Work") -> bool:
        """Whether its worker has the functions that the chunk calls."""
        return all(self.start.functions[function][1] is not None for function, _ in work.chunk.calls)

    def kill(self) -> str:
        how = self.worker.kill() if self.worker else ""
        self.worker, self.ready = None, False
        return how


@dataclass(frozen=True)
class Work:
    """A chunk with the places of its samples in the rollout."""

    chunk: Chunk
    places: tuple[int, ...]

    def call(self, number: int) -> tuple[int, tuple[int, ...]]:
        function, local = self.chunk.calls[number]
        return function, tuple(self.places[i] for i in local)

    def after(self, number: int) -> "Work | None":
        calls = self.chunk.calls[number + 1 :]
        return replace(self, chunk=replace(self.chunk, calls=calls)) if calls else None


class Dispatcher:
    """Runs work on its slots. `budgets[f]` is the time in seconds of one call of function f."""

    def __init__(self, slots: Sequence[Slot], budgets: Sequence[float]) -> None:
        self._slots = slots
        self._budgets = budgets

    def open(self) -> None:
        """WorkerStart every worker without waiting for it, so that imports overlap with the caller's work."""
        for slot in self._slots:
            self._launch(slot)

    def run(self, work: Sequence[Work], report: _Report) -> None:
        """Call `report(function, places, judgements)` once per call, in any order. Raises RewardError if none can run."""
        queue = deque(work)
        while queue or any(slot.work for slot in self._slots):
            for slot in self._slots:
                chosen = next((w for w in queue if slot.takes(w)), None) if slot.work is None else None
                if chosen is not None:
                    queue.remove(chosen)
                    self._assign(slot, chosen)
            busy = [slot for slot in self._slots if slot.work]
            readable = _wait(busy)
            now = time.monotonic()
            for slot in busy:
                ended = slot in readable and self._read(slot, now, report)
                if slot.work and (ended or now >= slot.deadline):
                    self._replace(slot, ended, queue, report)

    def _launch(self, slot: Slot) -> None:
        slot.worker, slot.ready = WorkerProcess(slot.start), False
        slot.deadline = time.monotonic() + slot.limit

    def _assign(self, slot: Slot, work: Work) -> None:
        slot.work, slot.done = work, 0
        if slot.worker is None or not slot.worker.alive():
            slot.kill()
            self._launch(slot)
        elif slot.ready:
            self._send(slot)
        else:
            slot.deadline = time.monotonic() + slot.limit  # its answer may be waiting since long ago

    def _send(self, slot: Slot) -> None:
        assert slot.worker
        assert slot.work
        slot.worker.send(slot.work.chunk)
        self._wind(slot, time.monotonic())

    def _wind(self, slot: Slot, now: float) -> None:
        """Set the deadline of the call that is next, or end the chunk."""
        assert slot.work
        if slot.done == len(slot.work.chunk.calls):
            slot.work = None
        else:
            slot.deadline = now + self._budgets[slot.work.call(slot.done)[0]]

    def _read(self, slot: Slot, now: float, report: _Report) -> bool:
        """Take in the worker's messages; True when it has ended."""
        assert slot.worker
        messages, ended = slot.worker.receive()
        for message in messages:
            if isinstance(message, Started):
                if message.error:
                    raise RewardError(message.error)
                slot.ready = True
                self._send(slot)
            elif slot.work:
                report(*slot.work.call(slot.done), message)
                slot.done += 1
                self._wind(slot, now)
        return ended

    def _replace(self, slot: Slot, ended: bool, queue: deque[Work], report: _Report) -> None:
        """Charge the call that overran or killed its worker, and put the rest of the chunk back in front."""
        assert slot.work
        was_ready, how, work = slot.ready, slot.kill(), slot.work
        if not was_ready:
            names = ", ".join(name for name, function, *_ in slot.start.functions if function is not None)
            what = f"ended ({how})" if ended else f"was not ready after {slot.limit:g} s"
            raise RewardError(f"a reward worker {what} while it loaded {names}; import them by hand to see why")
        function, places = work.call(slot.done)
        if ended:
            said, reason = f"ended its worker process ({how})", "crashed"
        else:
            budget = self._budgets[function]
            said, reason = (
                f"took more than its budget of {budget:g} s and was stopped; @reward(budget=...) sets it",
                "timeout",
            )
        report(function, places, [Judgement(None, reason, said)] * len(places))
        slot.work = None
        if rest := work.after(slot.done):
            queue.appendleft(rest)


def _wait(slots: Sequence[Slot]) -> list[Slot]:
    """Block until a worker says something or a deadline passes; write what the pipes take. Slots with news."""
    with selectors.DefaultSelector() as selector:
        for slot in slots:
            assert slot.worker
            selector.register(slot.worker.output, selectors.EVENT_READ, slot)
            if slot.worker.writing:
                selector.register(slot.worker.input, selectors.EVENT_WRITE, slot)
        timeout = min(slot.deadline for slot in slots) - time.monotonic()
        readable = []
        for key, events in selector.select(max(timeout, 0.0)):
            if events & selectors.EVENT_READ:
                readable.append(key.data)
            else:
                key.data.worker.flush()
        return readable
