"""Hands chunks to worker processes, keeps a deadline per call, and replaces a worker that overruns, dies, grows or errs."""

import math
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from policygrad.errors import RewardError
from policygrad.rewards.answers import NoAnswerError
from policygrad.rewards.calls import Judgement, last_words
from policygrad.rewards.pace import Pace
from policygrad.rewards.patience import FEWEST, NeverAnswers
from policygrad.rewards.slots import FALSE_STARTS, Slot, Work
from policygrad.rewards.variables import hint
from policygrad.rewards.waits import Phase, Waits

Report = Callable[[int, tuple[int, ...], list[Judgement]], None]


class Dispatcher:
    """Runs work on its slots. `budgets[f]` is the time in seconds of one call of function f, called `names[f]`.

    phase: is told what a scoring waits for. patient: a function that never answers does not end it.
    """

    def __init__(
        self, slots: Sequence[Slot], names: Sequence[str], budgets: Sequence[float], *, phase: Phase, patient: bool
    ) -> None:
        self._slots, self._names, self._budgets, self._phase = slots, names, budgets, phase
        self._never = NeverAnswers(names, None if patient else max(2 * len(slots), FEWEST))
        self._pace, self._measured = Pace(), math.inf  # of calls that began after that time

    def open(self) -> None:
        """Start every worker without waiting for it, so that imports overlap with the caller's work."""
        for slot in self._slots:
            slot.launch()

    def run(self, work: Sequence[Work], report: Report, answered: int = 0) -> None:
        """Call `report(function, places, judgements)` once per call, in any order; also for what `turn` has begun.

        answered: samples' judgements that are there already.

        Raises:
            RewardError: no worker can load a function, or it never answers.
        """
        begun = [rest for slot in self._slots if slot.work and (rest := slot.work.after(slot.done))]
        total = answered + sum(len(places) for w in (*work, *begun) for _, places in w.chunk.calls)
        waits = Waits(self._phase, self._names, self._budgets, total)
        waits.answered(answered)

        def told(function: int, places: tuple[int, ...], judgements: list[Judgement]) -> None:
            waits.answered(len(places))
            report(function, places, judgements)

        queue, self._measured = deque(work), time.monotonic()
        try:
            while queue or any(slot.work for slot in self._slots):
                waits.look(self.turn(queue, told, waits.due))
            self._pace.scored()
        finally:
            self._measured = math.inf
            waits.over()

    def turn(self, queue: deque[Work], report: Report, due: float = 0.0) -> list[Slot]:
        """Hands out what is in the queue, as far as there is room, and takes what has been answered, for which it waits until
        `due` at most, by the clock; those that are at work. Raises as `run` does."""
        for slot in self._slots:
            chosen = next((w for w in queue if slot.takes(w)), None) if slot.work is None else None
            if chosen is not None:
                queue.remove(chosen)
                self._assign(slot, chosen)
        busy = [slot for slot in self._slots if slot.work]
        readable = self._wait(busy, due) if busy else []
        now = time.monotonic()  # before others are killed, which takes its time
        for slot in busy:
            wrong = self._read(slot, queue, report) if slot in readable else None
            if slot.work and (wrong or now >= slot.deadline):
                self._replace(slot, wrong, queue, report)
        return [slot for slot in busy if slot.work]

    def drop(self) -> None:
        """Nobody waits any more for what is at work."""
        for slot in self._slots:
            if slot.work:
                slot.kill()
                slot.work = None

    def seconds(self, functions: Sequence[int]) -> float:
        """That one call of each takes, together, as measured; 0 where nothing is known, or one has never answered."""
        known = all(map(self._never.proven, functions))
        return sum(self._pace[function] for function in functions) if known else 0.0

    def _assign(self, slot: Slot, work: Work) -> None:
        slot.work, slot.done = work, 0
        if slot.worker is None or not slot.worker.alive():
            slot.kill()
            slot.launch()
        elif slot.ready:
            self._send(slot)
        else:
            self._wind(slot)  # its answer may be waiting since long ago

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
            self._wind(slot)

    def _wind(self, slot: Slot) -> None:
        """Set its deadline, from now."""
        slot.wind(slot.limit if slot.called is None else self._budgets[slot.called])

    def _read(self, slot: Slot, queue: deque[Work], report: Report) -> str | None:
        """Take in what a worker says; what is wrong with it: "ended", or that it said something that is no answer."""
        assert slot.worker
        ended, inbox = slot.worker.receive(), slot.worker.inbox
        try:
            if not slot.ready and (started := inbox.started()) is not None:
                if started.error:
                    raise RewardError(started.error + hint(started.error, slot.variables))
                slot.ready, slot.started, slot.false_starts = True, True, 0
                if slot.worker.printed:
                    slot.worker.printed.forget()  # what imports print is of use only where they fail
                self._send(slot)
            while slot.ready and slot.work and (answer := inbox.answer(slot.asked)) is not None:
                self._take(slot, answer.judgements, report)
                if answer.last:
                    self._recycle(slot, queue)
                    return None
        except NoAnswerError as error:
            return f"said something that is no answer ({error})"
        return "ended" if ended else None

    def _take(self, slot: Slot, judgements: list[Judgement], report: Report) -> None:
        assert slot.work
        function, places = slot.work.call(slot.done)
        if any(judgement.reason for judgement in judgements):
            printed = slot.printed()
            judgements = [replace(j, printed=printed) if j.reason else j for j in judgements]
        self._never.answered(function, judgements)
        if slot.answered >= len(self._names):  # first calls may load what they need
            self._time(slot, function)
        report(function, places, judgements)
        slot.done += 1
        slot.answered += 1
        self._next(slot)

    def _time(self, slot: Slot, function: int) -> None:
        """Only of what is waited for: else an answer may have been there for long."""
        if slot.began >= self._measured:
            self._pace.took(function, time.monotonic() - slot.began)

    def _recycle(self, slot: Slot, queue: deque[Work]) -> None:
        """A worker that has grown makes room for another, which does the rest of its chunk."""
        rest = slot.work.after(slot.done) if slot.work else None
        slot.kill()
        slot.work = None
        slot.launch()
        if rest:
            queue.appendleft(rest)

    def _replace(self, slot: Slot, wrong: str | None, queue: deque[Work], report: Report) -> None:
        """Charge the call that overran or killed its worker, and put the rest of the chunk back: in front, or, where the function
        has never answered, behind the others, so that other samples show whether it can."""
        assert slot.work
        was_ready, how, work = slot.ready, slot.kill(), slot.work
        slot.work = None
        if not was_ready:
            self._start_again(slot, work, queue, f"ended ({how})" if wrong == "ended" else wrong)
            return
        function, places = work.call(slot.done)
        self._time(slot, function)
        if wrong:
            said, reason = f"ended its worker process ({how})" if wrong == "ended" else wrong, "crashed"
        else:
            said = f"took more than its budget of {self._budgets[function]:g} s and was stopped"
            said, reason = f"{said}; @reward(budget=...) sets it", "timeout"
        report(function, places, [Judgement(None, reason, said, printed=slot.last_lines)] * len(places))
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
                + last_words(slot.last_lines)
            )
        queue.appendleft(work)

    def _wait(self, busy: Sequence[Slot], due: float) -> list[Slot]:
        """Block until a worker says something, a deadline passes or something is due; write what the pipes take. Slots with
        news."""
        with selectors.DefaultSelector() as selector:
            for slot in busy:
                assert slot.worker
                selector.register(slot.worker.output, selectors.EVENT_READ, slot)
                if slot.worker.writing:
                    selector.register(slot.worker.input, selectors.EVENT_WRITE, slot)
            timeout = min(due, *(slot.deadline for slot in busy)) - time.monotonic()
            readable = []
            for key, events in selector.select(max(timeout, 0.0)):
                if events & selectors.EVENT_READ:
                    readable.append(key.data)
                else:
                    key.data.worker.flush()
                    self._wind(key.data)  # a call begins when its samples are there
            return readable
