"""Hands chunks to worker processes, keeps a deadline per call, and replaces a worker that overruns, dies, grows or errs."""

import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence

from policygrad.errors import RewardError
from policygrad.rewards.answers import NoAnswerError
from policygrad.rewards.calls import Judgement
from policygrad.rewards.patience import FEWEST, NeverAnswers
from policygrad.rewards.slots import FALSE_STARTS, Slot, Work
from policygrad.rewards.variables import hint
from policygrad.rewards.waits import Phase, Waits

_Report = Callable[[int, tuple[int, ...], list[Judgement]], None]


class Dispatcher:
    """Runs work on its slots. `budgets[f]` is the time in seconds of one call of function f, called `names[f]`.

    phase: is told what a scoring waits for. patient: a function that never answers does not end it.
    """

    def __init__(
        self, slots: Sequence[Slot], names: Sequence[str], budgets: Sequence[float], *, phase: Phase, patient: bool
    ) -> None:
        self._slots, self._names, self._budgets, self._phase = slots, names, budgets, phase
        self._never = NeverAnswers(names, None if patient else max(2 * len(slots), FEWEST))

    def open(self) -> None:
        """Start every worker without waiting for it, so that imports overlap with the caller's work."""
        for slot in self._slots:
            slot.launch()

    def run(self, work: Sequence[Work], report: _Report) -> None:
        """Call `report(function, places, judgements)` once per call, in any order.

        Raises:
            RewardError: no worker can load a function, or it never answers.
        """
        total = sum(len(places) for w in work for _, places in w.chunk.calls)
        waits = Waits(self._phase, self._names, self._budgets, total)

        def told(function: int, places: tuple[int, ...], judgements: list[Judgement]) -> None:
            waits.answered(len(places))
            report(function, places, judgements)

        try:
            self._run(deque(work), told, waits)
        finally:
            waits.over()

    def _run(self, queue: deque[Work], report: _Report, waits: Waits) -> None:
        while queue or any(slot.work for slot in self._slots):
            for slot in self._slots:
                chosen = next((w for w in queue if slot.takes(w)), None) if slot.work is None else None
                if chosen is not None:
                    queue.remove(chosen)
                    self._assign(slot, chosen)
            busy = [slot for slot in self._slots if slot.work]
            readable = _wait(busy, waits.due)
            now = time.monotonic()  # before others are killed, which takes its time
            for slot in busy:
                wrong = self._read(slot, queue, report) if slot in readable else None
                if slot.work and (wrong or now >= slot.deadline):
                    self._replace(slot, wrong, queue, report)
            waits.look([slot for slot in busy if slot.work])

    def _assign(self, slot: Slot, work: Work) -> None:
        slot.work, slot.done = work, 0
        if slot.worker is None or not slot.worker.alive():
            slot.kill()
            slot.launch()
        elif slot.ready:
            self._send(slot)
        else:
            slot.wind(slot.limit)  # its answer may be waiting since long ago

    def _send(self, slot: Slot) -> None:
        assert slot.worker
        assert slot.work
        slot.worker.send(slot.work.chunk)
        self._next(slot)

    def _next(self, slot: Slot) -> None:
        """Set the deadline of the call that is next, or end the chunk."""
        assert slot.work
        if slot.done == len(slot.work.chunk.calls):
            slot.work = None
        else:
            slot.wind(self._budgets[slot.work.call(slot.done)[0]])

    def _read(self, slot: Slot, queue: deque[Work], report: _Report) -> str | None:
        """Take in what a worker says; what is wrong with it: "ended", or that it said something that is no answer."""
        assert slot.worker
        ended, inbox = slot.worker.receive(), slot.worker.inbox
        try:
            if not slot.ready and (started := inbox.started()) is not None:
                if started.error:
                    raise RewardError(started.error + hint(started.error, slot.variables))
                slot.ready, slot.started, slot.false_starts = True, True, 0
                self._send(slot)
            while slot.ready and slot.work and (answer := inbox.answer(slot.asked)) is not None:
                self._take(slot, answer.judgements, report)
                if answer.last:
                    self._recycle(slot, queue)
                    return None
        except NoAnswerError as error:
            return f"said something that is no answer ({error})"
        return "ended" if ended else None

    def _take(self, slot: Slot, judgements: list[Judgement], report: _Report) -> None:
        assert slot.work
        function, places = slot.work.call(slot.done)
        self._never.answered(function, judgements)
        report(function, places, judgements)
        slot.done += 1
        slot.answered += 1
        self._next(slot)

    def _recycle(self, slot: Slot, queue: deque[Work]) -> None:
        """A worker that has grown makes room for another, which does the rest of its chunk."""
        rest = slot.work.after(slot.done) if slot.work else None
        slot.kill()
        slot.work = None
        slot.launch()
        if rest:
            queue.appendleft(rest)

    def _replace(self, slot: Slot, wrong: str | None, queue: deque[Work], report: _Report) -> None:
        """Charge the call that overran or killed its worker, and put the rest of the chunk back: in front, or, where the function
        has never answered, behind the others, so that other samples show whether it can."""
        assert slot.work
        was_ready, how, work = slot.ready, slot.kill(), slot.work
        slot.work = None
        if not was_ready:
            self._start_again(slot, work, queue, f"ended ({how})" if wrong == "ended" else wrong)
            return
        function, places = work.call(slot.done)
        if wrong:
            said, reason = f"ended its worker process ({how})" if wrong == "ended" else wrong, "crashed"
        else:
            said = f"took more than its budget of {self._budgets[function]:g} s and was stopped"
            said, reason = f"{said}; @reward(budget=...) sets it", "timeout"
        report(function, places, [Judgement(None, reason, said)] * len(places))
        if rest := work.after(slot.done + 1):
            (queue.appendleft if self._never.proven(function) else queue.append)(rest)
        self._never.lost(function, said.partition(";")[0])

    def _start_again(self, slot: Slot, work: Work, queue: deque[Work], wrong: str | None) -> None:
        """A worker came to nothing while it loaded: another may, where one did before, as when the machine has no memory left."""
        slot.false_starts += 1
        if slot.false_starts > (FALSE_STARTS if slot.started else 0):
            what = wrong or f"was not ready after {slot.limit:g} s"
            raise RewardError(
                f"a reward worker {what} while it loaded {slot.start.names}; import them by hand to see why"
            )
        queue.appendleft(work)


def _wait(slots: Sequence[Slot], due: float) -> list[Slot]:
    """Block until a worker says something, a deadline passes or something is due; write what the pipes take. Slots with news."""
    with selectors.DefaultSelector() as selector:
        for slot in slots:
            assert slot.worker
            selector.register(slot.worker.output, selectors.EVENT_READ, slot)
            if slot.worker.writing:
                selector.register(slot.worker.input, selectors.EVENT_WRITE, slot)
        timeout = min(due, *(slot.deadline for slot in slots)) - time.monotonic()
        readable = []
        for key, events in selector.select(max(timeout, 0.0)):
            if events & selectors.EVENT_READ:
                readable.append(key.data)
            else:
                key.data.worker.flush()
        return readable
