"""The reward pool: scores a rollout in killable worker processes; a bad sample costs itself, never the run."""

from __future__ import annotations

import math
import os
import selectors
import threading
import time
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self

from policygrad.errors import ConfigError, DataError, RewardError
from policygrad.rewards.base import ProcessScores, Reward, RewardFunction, RewardScores, StepScores
from policygrad.rewards.resolve import resolve_reward
from policygrad.rewards.workers import process
from policygrad.rewards.workers.failures import MIN_LOST_CALLS, UnresponsiveFunctionDetector
from policygrad.rewards.workers.limits import check_variable_names, explain_missing_variable, parse_size
from policygrad.rewards.workers.messages import (
    MAX_ABS_REWARD,
    Chunk,
    PendingCall,
    ProtocolError,
    RewardCaller,
    SampleResult,
    Signature,
    WorkerStart,
    format_failure,
    format_last_output,
    pickle_by_value,
    quote,
)
from policygrad.rewards.workers.process import NO_SANDBOX, WorkerLauncher, WorkerProcess, kill_workers
from policygrad.utils.progress import ProgressCallback, ignore_progress

# Where a worker stands, and what it works on.

START_TIMEOUT = 120.0  # seconds for a worker to import what its functions need; not part of any sample's budget
MAX_START_FAILURES = 3  # workers in a row that may end while they load what another has loaded before
DEDICATED_START_TIMEOUT = 3600.0  # for one that loads, or first downloads, a model
MAX_WORKERS, WORKERS_PER_CPU = (
    64,
    16,
)  # workers that any machine is trusted with, and those of each processor where it has more
StartWorker = Callable[[WorkerStart, Sequence[str]], WorkerProcess]
"""Starts a worker with these variables of the environment."""


@dataclass(frozen=True)
class WorkItem:
    """A chunk with the places of its samples in the rollout."""

    chunk: Chunk
    places: tuple[int, ...]
    lengths: tuple[int, ...]  # characters of their completions

    def call(self, number: int) -> tuple[int, tuple[int, ...]]:
        function, local = self.chunk.calls[number]
        return function, tuple(self.places[i] for i in local)

    def after(self, number: int) -> WorkItem | None:
        """What is left when so many calls are done."""
        calls = self.chunk.calls[number:]
        return replace(self, chunk=replace(self.chunk, calls=calls)) if calls else None


@dataclass
class WorkerSlot:
    """One place for a worker: the functions it runs, its worker, and the chunk that is at it."""

    start: WorkerStart
    variables: Sequence[str] = ()  # of the environment, by name
    limit: float = START_TIMEOUT  # seconds for its start
    starter: StartWorker = WorkerProcess
    worker: WorkerProcess | None = None
    ready: bool = False
    started: bool = False  # a worker has been ready here
    false_starts: int = 0  # since then, in a row
    answered: int = 0  # calls of this worker
    work: WorkItem | None = None
    done: int = 0  # calls of the chunk that are answered
    began: float = 0.0  # when the deadline was set
    deadline: float = 0.0  # of the start while not ready, else of the call after `done`
    last_lines: str = ""  # that the worker printed which was killed last

    def takes(self, work: WorkItem) -> bool:
        """Whether its worker has the functions that the chunk calls."""
        return all(self.start.functions[function][1] is not None for function, _ in work.chunk.calls)

    @property
    def called(self) -> int | None:
        """The function that is being called; None while the worker loads."""
        return self.work.chunk.calls[self.done][0] if self.work and self.ready else None

    @property
    def asked(self) -> PendingCall:
        """The call that is next to be answered."""
        assert self.work
        function, local = self.work.chunk.calls[self.done]
        lengths = tuple(self.work.lengths[i] for i in local)
        return PendingCall(self.answered, lengths, self.start.functions[function][2])

    def launch(self) -> None:
        self.worker, self.ready, self.answered = self.starter(self.start, self.variables), False, 0
        self.wind(self.limit)

    def wind(self, seconds: float) -> None:
        """Set the deadline, from now."""
        self.began = time.monotonic()
        self.deadline = self.began + seconds

    def printed(self) -> str:
        """Return the last lines that its worker has printed; "" where they are not captured, or there are none."""
        return self.worker.printed.last_lines() if self.worker and self.worker.printed else ""

    def kill(self) -> str:
        how = self.worker.kill() if self.worker else ""
        self.last_lines = self.printed()
        self.worker, self.ready = None, False
        return how


def check_num_workers(count: int) -> None:
    """Raises ConfigError for more worker processes than this machine could start in any useful time."""
    processors = os.cpu_count() or 1
    if count > (most := max(MAX_WORKERS, WORKERS_PER_CPU * processors)):
        raise ConfigError(
            f"rewards.num_workers is {count}, each of them a process, and this machine has {processors} processors: give at most {most}"
        )


def create_slots(
    functions: Sequence[tuple[str, bytes, bool]],
    alone: Sequence[int],
    count: int,
    memory: int | None,
    variables: Sequence[str],
    starter: StartWorker,
    sandbox: str = NO_SANDBOX,
    show_output: bool = False,
) -> list[WorkerSlot]:
    """One for every function that wants to be `alone`, by number, and `count` that each load all the others, behind a wall."""
    others = set(range(len(functions))).difference(alone)

    def start(share: set[int], memory: int | None, sandbox: str = NO_SANDBOX) -> WorkerStart:
        each = ((name, code if f in share else None, p) for f, (name, code, p) in enumerate(functions))
        return WorkerStart(tuple(each), memory, sandbox=sandbox, show_output=show_output)

    own = [WorkerSlot(start({f}, None), variables, DEDICATED_START_TIMEOUT, starter) for f in alone]
    shared = start(others, memory, sandbox)
    return own + [WorkerSlot(shared, variables, starter=starter) for _ in range(count if others else 0)]


# How long a reward takes, as far as it has been measured.

_KEPT = 0.5
"""What the scorings so far count for, beside the next one: a reward may become quicker or slower as answers change."""


class CallTimeEstimator:
    """Seconds that a call of each function takes, by number: a mean over calls in which older scorings count less and less."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self._calls: defaultdict[int, float] = defaultdict(float)

    def record(self, function: int, seconds: float) -> None:
        """One call."""
        self._seconds[function] += seconds
        self._calls[function] += 1

    def end_scoring(self) -> None:
        """A scoring is over."""
        for count in (self._seconds, self._calls):
            count.update({function: value * _KEPT for function, value in count.items()})

    def __getitem__(self, function: int) -> float:
        """Seconds; 0 where nothing is known."""
        return self._seconds[function] / self._calls[function] if function in self._calls else 0.0


# Says what rewards are waited for, once it takes longer than people expect.

REPORT_AFTER_SECONDS = 4.0  # seconds
_EVERY = 1.0  # seconds from word to word


class SlowCallReporter:
    """Follows one scoring of `total` answers. `due`: when to look again, by the clock. silence: seconds, None = SILENCE."""

    def __init__(
        self,
        report: ProgressCallback,
        names: Sequence[str],
        budgets: Sequence[float],
        total: int,
        silence: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell, self._names, self._budgets, self._total, self._clock = report, names, budgets, total, clock
        self._answers, self._told = 0, False
        self.due = clock() + (REPORT_AFTER_SECONDS if silence is None else silence)

    def record_results(self, count: int) -> None:
        self._answers += count

    def report_if_due(self, busy: Sequence[WorkerSlot]) -> None:
        """Says what is waited for longest, if it is time to."""
        if self._clock() < self.due or not busy:
            return
        slot = min(busy, key=lambda slot: slot.deadline)
        function = slot.called
        if function is None:
            text = f"waiting for a reward worker to load {slot.start.names}"
        else:
            text = f"waiting for reward {self._names[function]!r} (each call has up to {self._budgets[function]:g} s)"
        self._tell(text, self._answers, self._total)
        self._told, self.due = True, self._clock() + _EVERY

    def close(self) -> None:
        """All answers are there, or nobody waits for them any more."""
        if self._told:
            self._tell("", 0, 0)


# Hands chunks to worker processes, keeps a deadline per call, and replaces a worker that overruns, dies, grows or errs.

Report = Callable[[int, tuple[int, ...], list[SampleResult]], None]


class Dispatcher:
    """Runs work on its slots. `budgets[f]` is the time in seconds of one call of function f, called `names[f]`.

    phase: is told what a scoring waits for. patient: a function that never answers does not end it.
    """

    def __init__(
        self,
        slots: Sequence[WorkerSlot],
        names: Sequence[str],
        budgets: Sequence[float],
        *,
        phase: ProgressCallback,
        patient: bool,
    ) -> None:
        self._slots, self._names, self._budgets, self._phase = slots, names, budgets, phase
        self._never = UnresponsiveFunctionDetector(names, None if patient else max(2 * len(slots), MIN_LOST_CALLS))
        self._pace, self._measured = CallTimeEstimator(), math.inf  # of calls that began after that time

    def open(self) -> None:
        """Start every worker without waiting for it, so that imports overlap with the caller's work."""
        for slot in self._slots:
            slot.launch()

    def run(self, work: Sequence[WorkItem], report: Report, answered: int = 0) -> None:
        """Call `report(function, places, judgements)` once per call, in any order; also for what `turn` has begun.

        answered: samples' judgements that are there already.

        Raises:
            RewardError: no worker can load a function, or it never answers.
        """
        begun = [rest for slot in self._slots if slot.work and (rest := slot.work.after(slot.done))]
        total = answered + sum(len(places) for w in (*work, *begun) for _, places in w.chunk.calls)
        waits = SlowCallReporter(self._phase, self._names, self._budgets, total)
        waits.record_results(answered)

        def told(function: int, places: tuple[int, ...], judgements: list[SampleResult]) -> None:
            waits.record_results(len(places))
            report(function, places, judgements)

        queue, self._measured = deque(work), time.monotonic()
        try:
            while queue or any(slot.work for slot in self._slots):
                waits.report_if_due(self.poll(queue, told, waits.due))
            self._pace.end_scoring()
        finally:
            self._measured = math.inf
            waits.close()

    def poll(self, queue: deque[WorkItem], report: Report, due: float = 0.0) -> list[WorkerSlot]:
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

    def cancel_running(self) -> None:
        """Nobody waits any more for what is at work."""
        for slot in self._slots:
            if slot.work:
                slot.kill()
                slot.work = None

    def seconds(self, functions: Sequence[int]) -> float:
        """That one call of each takes, together, as measured; 0 where nothing is known, or one has never answered."""
        known = all(map(self._never.has_succeeded, functions))
        return sum(self._pace[function] for function in functions) if known else 0.0

    def _assign(self, slot: WorkerSlot, work: WorkItem) -> None:
        slot.work, slot.done = work, 0
        if slot.worker is None or not slot.worker.alive():
            slot.kill()
            slot.launch()
        elif slot.ready:
            self._send(slot)
        else:
            self._wind(slot)  # its answer may be waiting since long ago

    def _send(self, slot: WorkerSlot) -> None:
        assert slot.worker
        assert slot.work
        slot.worker.send(slot.work.chunk)
        self._next(slot)

    def _next(self, slot: WorkerSlot) -> None:
        """Set the deadline of the call that is next, or end the chunk."""
        assert slot.work
        if slot.done == len(slot.work.chunk.calls):
            slot.work = None
        else:
            self._wind(slot)

    def _wind(self, slot: WorkerSlot) -> None:
        """Set its deadline, from now."""
        slot.wind(slot.limit if slot.called is None else self._budgets[slot.called])

    def _read(self, slot: WorkerSlot, queue: deque[WorkItem], report: Report) -> str | None:
        """Take in what a worker says; what is wrong with it: "ended", or that it said something that is no answer."""
        assert slot.worker
        ended, inbox = slot.worker.receive(), slot.worker.inbox
        try:
            if not slot.ready and (started := inbox.parse_ready()) is not None:
                if started.error:
                    raise RewardError(started.error + explain_missing_variable(started.error, slot.variables))
                slot.ready, slot.started, slot.false_starts = True, True, 0
                if slot.worker.printed:
                    slot.worker.printed.forget()  # what imports print is of use only where they fail
                self._send(slot)
            while slot.ready and slot.work and (answer := inbox.parse_reply(slot.asked)) is not None:
                self._take(slot, answer.results, report)
                if answer.last:
                    self._recycle(slot, queue)
                    return None
        except ProtocolError as error:
            return f"said something that is no answer ({error})"
        return "ended" if ended else None

    def _take(self, slot: WorkerSlot, judgements: list[SampleResult], report: Report) -> None:
        assert slot.work
        function, places = slot.work.call(slot.done)
        if any(judgement.reason for judgement in judgements):
            printed = slot.printed()
            judgements = [replace(j, printed=printed) if j.reason else j for j in judgements]
        self._never.record_results(function, judgements)
        if slot.answered >= len(self._names):  # first calls may load what they need
            self._time(slot, function)
        report(function, places, judgements)
        slot.done += 1
        slot.answered += 1
        self._next(slot)

    def _time(self, slot: WorkerSlot, function: int) -> None:
        """Only of what is waited for: else an answer may have been there for long."""
        if slot.began >= self._measured:
            self._pace.record(function, time.monotonic() - slot.began)

    def _recycle(self, slot: WorkerSlot, queue: deque[WorkItem]) -> None:
        """A worker that has grown makes room for another, which does the rest of its chunk."""
        rest = slot.work.after(slot.done) if slot.work else None
        slot.kill()
        slot.work = None
        slot.launch()
        if rest:
            queue.appendleft(rest)

    def _replace(self, slot: WorkerSlot, wrong: str | None, queue: deque[WorkItem], report: Report) -> None:
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
        report(function, places, [SampleResult(None, reason, said, printed=slot.last_lines)] * len(places))
        if rest := work.after(slot.done + 1):
            (queue.appendleft if self._never.has_succeeded(function) else queue.append)(rest)
        self._never.record_lost(function, said.partition(";")[0])

    def _start_again(self, slot: WorkerSlot, work: WorkItem, queue: deque[WorkItem], wrong: str | None) -> None:
        """A worker came to nothing while it loaded: another may, where one did before, as when the machine has no memory left."""
        slot.false_starts += 1
        if slot.false_starts > (MAX_START_FAILURES if slot.started else 0):
            what = wrong or f"was not ready after {slot.limit:g} s"
            raise RewardError(
                f"a reward worker {what} while it loaded {slot.start.names}; import them by hand to see why"
                + format_last_output(slot.last_lines)
            )
        queue.appendleft(work)

    def _wait(self, busy: Sequence[WorkerSlot], due: float) -> list[WorkerSlot]:
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


# A rollout's samples as chunks of work for reward workers.

_LARGEST_CHUNK = 64  # samples per message
_LARGEST_EARLY = 8  # enough to be busy with, and what comes later can still be shared out evenly
_CHUNKS_PER_WORKER = 4  # enough that one slow chunk does not leave the other workers idle


def create_work(
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    *,
    batched: Sequence[int] = (),
    single: Sequence[int],
    workers: int,
    places: Sequence[int] | None = None,
    early: bool = False,
) -> list[WorkItem]:
    """Chunks for the workers: functions that take the whole batch first, they are the longest calls.

    batched, single: numbers of the functions that get all samples, and one at a time. asked: places of the samples that they get
    one at a time, None = all. early: more are to come, and workers are looked after from time to time only.

    Raises:
        RewardError: a column that cannot be sent, by its name.
    """
    count = len(completions)
    chunks: list[tuple[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]] = []
    everything = tuple(range(count))
    if count:
        chunks += [(everything, [(f, everything)]) for f in batched]
    places = everything if places is None else places
    each, largest = (1, _LARGEST_EARLY) if early else (_CHUNKS_PER_WORKER, _LARGEST_CHUNK)
    size = min(math.ceil(len(places) / max(workers * each, 1)) or 1, largest)
    for first in range(0, len(places) if single else 0, size):
        places = tuple(places[first : first + size])
        chunks.append((places, [(f, (i,)) for i in range(len(places)) for f in single]))
    return [
        WorkItem(
            Chunk(_pack(select_samples(prompts, completions, columns, places)), tuple(calls)),
            places,
            tuple(len(completions[i]) for i in places),
        )
        for places, calls in chunks
    ]


def select_samples(
    prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]], places: Sequence[int]
) -> tuple[list[Any], list[str], dict[str, list[Any]]]:
    chosen = {name: [values[i] for i in places] for name, values in columns.items()}
    return [prompts[i] for i in places], [completions[i] for i in places], chosen


def _pack(samples: tuple[list[Any], list[str], dict[str, list[Any]]]) -> bytes:
    try:
        return pickle_by_value(samples)
    except Exception as error:
        for name, values in (("prompts", samples[0]), *samples[2].items()):
            try:
                pickle_by_value(values)
            except Exception:
                raise RewardError(
                    f"column {name!r} cannot be sent to a reward worker: {error}; use plain data"
                ) from error
        raise


# A scoring that begins before its completions are all there: those that are over are judged while others are still drawn.
#
# There is no thread in it: whoever draws looks in from time to time, which takes what workers have said and hands out what is
# there.


class IncrementalScoring:
    """What is judged so far of `count` completions, by place. `plan(completions, places)`: the work that these places are."""

    def __init__(
        self, count: int, dispatcher: Dispatcher, plan: Callable[[Sequence[str], Sequence[int]], list[WorkItem]]
    ) -> None:
        self._dispatcher, self._plan = dispatcher, plan
        self._completions = [""] * count
        self._told: list[int] = []  # places that have one
        self._waiting: list[int] = []
        self._queue = deque[WorkItem]()
        self._said: list[tuple[int, tuple[int, ...], list[SampleResult]]] = []
        self._lock = threading.RLock()  # not to hang where an interrupt has left it held
        self._open = True
        self._error: RewardError | None = None

    def add_completions(self, completions: Mapping[int, str]) -> None:
        """These are over too, by place. It never waits, and it raises nothing that `take` will not."""
        with self._lock:
            if not self._open:
                return
            for place, completion in completions.items():
                self._completions[place] = completion
            self._told += completions
            self._waiting += completions
            try:
                if self._waiting and not self._queue:  # what has waited together goes in larger chunks
                    self._queue += self._plan(self._completions, self._waiting)
                    self._waiting = []
                self._dispatcher.poll(self._queue, lambda *said: self._said.append(said))
            except RewardError as error:
                self._error, self._open = error, False

    def close(self) -> None:
        """Nothing more is begun: what draws may have been interrupted, and still look in."""
        with self._lock:
            self._open = False

    def collect(self, completions: Sequence[str], report: Report) -> tuple[list[int], list[WorkItem], int]:
        """(places that nobody was asked about, work that was not handed out, judgements that are there), and those are reported.

        Raises:
            RewardError: a worker cannot load a function.
        """
        self.close()
        if self._error is not None:
            raise self._error
        if any(self._completions[place] != completions[place] for place in self._told):  # they were changed afterwards
            self._dispatcher.cancel_running()
            return list(range(len(completions))), [], 0
        for said in self._said:
            report(*said)
        rest = sorted({*range(len(completions))}.difference(self._told).union(self._waiting))
        return rest, list(self._queue), sum(len(places) for _, places, _ in self._said)


# From what every function said of every completion to the scores of a rollout.


def combine_scores(
    rewards: Sequence[Reward], table: list[list[SampleResult]], completions: Sequence[str]
) -> RewardScores:
    """Weighted sums, counts by reason, and the first message (in the order of samples) of each distinct failure."""
    failures: Counter[str] = Counter()
    messages: dict[tuple[int, str, str], str] = {}
    total: list[float | None] = []
    for place, completion in enumerate(completions):
        judgements = [row[place] for row in table]
        for number, judgement in enumerate(judgements):
            if judgement.reason:
                failures[judgement.reason] += 1
                key = (number, judgement.reason, judgement.kind)
                messages.setdefault(key, judgement.message)
        values = [r.weight * o.value for r, o in zip(rewards, judgements, strict=True) if o.value is not None]
        failed = any(judgement.reason for judgement in judgements)
        if rewards and not values and not failed:
            failures["none"] += 1
            messages.setdefault(
                (-1, "none", ""), f"no reward: all functions returned None (completion {quote(completion)})"
            )
        whole = sum(values) if values and not failed else None
        if whole is not None and abs(whole) > MAX_ABS_REWARD:
            failures["inf"] += 1
            messages.setdefault((-1, "inf", ""), f"no reward: the weighted sum {whole:g} is beyond ±{MAX_ABS_REWARD:g}")
            whole = None
        total.append(whole)
    parts = {reward.name: [o.value for o in row] for reward, row in zip(rewards, table, strict=True)}
    weights = {reward.name: reward.weight for reward in rewards}
    return RewardScores(total, parts, dict(failures), list(messages.values()), weights)


def combine_steps(rewards: Sequence[Reward], table: list[list[SampleResult]]) -> ProcessScores:
    """The steps of all process rewards together; what fails for one of them has none."""
    failures: Counter[str] = Counter()
    messages: dict[tuple[int, str, str], str] = {}
    steps: list[StepScores | None] = []
    for judgements in zip(*table, strict=True):
        for number, judgement in enumerate(judgements):
            if judgement.reason:
                failures[judgement.reason] += 1
                messages.setdefault((number, judgement.reason, judgement.kind), judgement.message)
        weighted = [
            (end, reward.weight * score)
            for reward, judgement in zip(rewards, judgements, strict=True)
            for end, score in judgement.steps
        ]
        failed = any(judgement.reason for judgement in judgements)
        if not failed and (large := [score for _, score in weighted if abs(score) > MAX_ABS_REWARD]):
            failures["inf"] += 1
            messages.setdefault(
                (-1, "inf", ""), f"no steps: the weighted score {large[0]:g} is beyond ±{MAX_ABS_REWARD:g}"
            )
            failed = True
        steps.append(None if failed else tuple(sorted(weighted, key=lambda step: step[0])))
    parts = {
        reward.name: [score for judgement in row for _, score in judgement.steps]
        for reward, row in zip(rewards, table, strict=True)
    }
    return ProcessScores(steps, parts, dict(failures), list(messages.values()))


MIN_OVERLAP_SECONDS = 0.25
"""Seconds of judging that must be hidden behind sampling before it is: handing completions over one by one takes time too."""


class RewardPool:
    """Persistent workers for a set of reward functions; a context manager.

    Every function is called with one sample at a time, under a time budget in seconds, unless it is `batched`. What
    raises, overruns, crashes, or returns something that is no finite number has no reward, with the reason counted.
    A function that cannot be pickled runs in this process, without a budget, with a warning.

    memory: what a worker may take beyond what it has when it is loaded, "4GiB", or "none"; a reward that is `alone` has no limit.
    environment: names of environment variables that workers get besides the usual ones (docs/rewards-isolation.md). sandbox: the
    wall around workers (walled.CHOICES), but for those of a reward that is `alone`. show_output: what functions print goes to
    standard error; otherwise it is captured, and messages of failures end with its last lines. phase: is told what a scoring waits
    for, when it takes seconds. patient: a function that has never answered is asked on and on.
    """

    def __init__(
        self,
        rewards: Sequence[Reward | RewardFunction | str],
        *,
        num_workers: int = 2,
        timeout: float = 10.0,
        memory: str = "4GiB",
        environment: Sequence[str] = (),
        sandbox: str = process.NO_SANDBOX,
        show_output: bool = False,
        progress: ProgressCallback = ignore_progress,
        tolerate_unresponsive: bool = False,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"workers must be at least 1, got {num_workers}")
        check_num_workers(num_workers)
        if not timeout > 0:
            raise ConfigError(f"budget must be a positive number of seconds, got {timeout}")
        self.rewards = tuple(resolve_reward(reward) for reward in rewards)
        _check_names(self.rewards)
        check_variable_names(environment, "environment")
        process.check_sandbox(sandbox, self.rewards)
        self._sandbox = sandbox
        self._noted = False  # that prints are captured
        self._environment = tuple(environment)
        self._signatures = [Signature.from_function(reward.function) for reward in self.rewards]
        self._lock = threading.RLock()  # which `begin` holds around `score`
        self._sent: list[int] = []  # numbers of the rewards that run in workers, in the order the workers know them
        self._here: dict[int, RewardCaller] = {}  # those that run in this process
        functions = self._place()
        alone, starter = (
            [f for f, number in enumerate(self._sent) if self.rewards[number].dedicated_worker],
            WorkerLauncher(),
        )
        self._slots = create_slots(
            functions, alone, num_workers, parse_size(memory), environment, starter, sandbox, show_output
        )
        self._close = weakref.finalize(self, _kill, self._slots, starter, os.getpid())
        budgets = [self.rewards[number].timeout or timeout for number in self._sent]
        names = [self.rewards[number].name for number in self._sent]
        self._shared = num_workers
        self._dispatcher = Dispatcher(self._slots, names, budgets, phase=progress, patient=tolerate_unresponsive)
        self._dispatcher.open()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers; again is no error. It also happens at exit and when the pool is garbage."""
        self._close()

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        incremental: IncrementalScoring | None = None,
    ) -> RewardScores:
        """Score completion i of prompt i, with value i of every column, by every reward that is no process reward.

        begun: what `begin` has given for these prompts and columns.

        Raises DataError for lists of different lengths, and RewardError when a function needs a column that is not
        there, no worker can load it, or it never answers; never because of what a function does with a sample.
        """
        rewards, table = self.run_rewards(prompts, completions, columns, process_rewards=False, incremental=incremental)
        scores = combine_scores(rewards, table, completions)
        if not self._noted and any(slot.printed() or slot.last_lines for slot in self._slots):
            self._noted = True
            scores.messages.append("what rewards print is not shown: --rewards.show-output shows it")
        return scores

    def is_overlap_worthwhile(self, count: int) -> bool:
        """Whether so many completions take so long to judge, as far as earlier scorings tell, that `begin` hides `MIN_OVERLAP_SECONDS`: by the
        rewards that get one sample at a time, in a worker."""
        return self._dispatcher.seconds(self._called(False)[1]) * count / self._shared >= MIN_OVERLAP_SECONDS

    @contextmanager
    def score_incrementally(
        self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> Iterator[IncrementalScoring]:
        """For one scoring of these by `score`, inside the context: completions that are over before others are judged meanwhile."""
        single = self._called(False)[1]

        def planned(completions: Sequence[str], places: Sequence[int]) -> list[WorkItem]:
            workers = len(self._slots)
            return create_work(prompts, completions, columns, single=single, workers=workers, places=places, early=True)

        with self._lock:
            begun = IncrementalScoring(len(prompts), self._dispatcher, planned)
            try:
                yield begun
            finally:
                begun.close()
                self._dispatcher.cancel_running()

    def score_steps(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> ProcessScores:
        """The steps of completion i by every process reward; the same arguments and errors as `score`."""
        rewards, table = self.run_rewards(prompts, completions, columns, process_rewards=True)
        return combine_steps(rewards, table)

    def run_rewards(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        *,
        process_rewards: bool,
        incremental: IncrementalScoring | None = None,
    ) -> tuple[list[Reward], list[list[SampleResult]]]:
        """The rewards of one kind, and what each said of each completion. The same arguments and errors as `score`."""
        if not self._close.alive:
            raise RewardError("this RewardPool is closed; score inside its `with` block")
        self._check(prompts, completions, columns)
        chosen = {number for number, reward in enumerate(self.rewards) if reward.process_reward is process_rewards}
        table: list[list[SampleResult]] = [[SampleResult()] * len(completions) for _ in self.rewards]

        def report(number: int, places: Sequence[int], judgements: Sequence[SampleResult]) -> None:
            for place, judgement in zip(places, judgements, strict=True):
                if judgement.reason in ("timeout", "crashed"):  # told by the dispatcher, which knows no samples
                    message = format_failure(
                        self.rewards[number].name, judgement.message, [completions[i] for i in places]
                    )
                    judgement = replace(judgement, message=message)
                elif judgement.reason == "raised" and number not in self._here:
                    way_out = explain_missing_variable(judgement.message, self._environment)
                    judgement = replace(judgement, message=judgement.message + way_out)
                if judgement.printed:
                    judgement = replace(judgement, message=judgement.message + format_last_output(judgement.printed))
                table[number][place] = judgement

        def answered(function: int, places: Sequence[int], judgements: Sequence[SampleResult]) -> None:
            report(self._sent[function], places, judgements)

        with self._lock:
            try:
                asked, left, there = incremental.collect(completions, answered) if incremental else (None, [], 0)
                (batched, single), workers = self._called(process_rewards), len(self._slots)
                work = create_work(
                    prompts, completions, columns, batched=batched, single=single, workers=workers, places=asked
                )
                self._dispatcher.run([*work, *left], answered, there)
            except BaseException:
                self.close()  # workers may be in the middle of a chunk that nobody waits for any more
                raise
            for number, caller in self._here.items():
                for places in self._groups(self.rewards[number], len(completions)) if number in chosen else ():
                    report(number, places, caller(*select_samples(prompts, completions, columns, places)))
        return [self.rewards[number] for number in sorted(chosen)], [table[number] for number in sorted(chosen)]

    def _called(self, process_rewards: bool) -> tuple[list[int], list[int]]:
        """Functions of one kind that run in workers: those that get the whole batch, and those that get one sample at a time."""
        called = [f for f, n in enumerate(self._sent) if self.rewards[n].process_reward is process_rewards]
        batched = [f for f in called if self.rewards[self._sent[f]].batched]
        return batched, [f for f in called if f not in batched]

    def _place(self) -> list[tuple[str, bytes, bool]]:
        """Decide where each reward runs; returns the pickled functions for the workers."""
        functions = []
        for number, reward in enumerate(self.rewards):
            try:
                functions.append((reward.name, pickle_by_value(reward.function), reward.process_reward))
                self._sent.append(number)
            except Exception as error:
                if self._sandbox != process.NO_SANDBOX:
                    raise ConfigError(
                        f"reward {reward.name!r} cannot be sent to a worker process ({type(error).__name__}: {error}), so no "
                        "wall can be around it (--rewards.sandbox); create what cannot be pickled inside the function"
                    ) from error
                warnings.warn(
                    f"reward {reward.name!r} cannot be sent to a worker process ({type(error).__name__}: {error}); it runs "
                    "in this process without a time budget. Create what cannot be pickled inside the function",
                    stacklevel=3,
                )
                prepare = getattr(reward.function, "reward_prepare", None)
                if prepare is not None:
                    prepare()
                self._here[number] = RewardCaller(reward.name, reward.function, reward.process_reward)
        return functions

    def _check(self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> None:
        for name, values in (("prompts", prompts), *columns.items()):
            if len(values) != len(completions):
                raise DataError(
                    f"{name!r} has {len(values)} values for {len(completions)} completions; give one for each"
                )
        for reward, signature in zip(self.rewards, self._signatures, strict=True):
            if missing := sorted(signature.required - columns.keys()):
                have = ", ".join(columns) or "none"
                raise RewardError(
                    f"reward {reward.name!r} needs the column {missing[0]!r}, and the task has: {have}; "
                    "rename or add the column, or choose another reward"
                )

    def _groups(self, reward: Reward, count: int) -> list[tuple[int, ...]]:
        if reward.batched:
            return [tuple(range(count))] if count else []
        return [(i,) for i in range(count)]


def _check_names(rewards: Sequence[Reward]) -> None:
    if not rewards:
        raise ConfigError(
            "a RewardPool needs at least one reward; policygrad.rewards.list_rewards() lists the built-in ones"
        )
    names = Counter(reward.name for reward in rewards)
    for name, count in names.items():
        if count > 1:
            raise ConfigError(
                f"{count} rewards are called {name!r}; give each its own: Reward('another name', function)"
            )


def _kill(slots: Sequence[WorkerSlot], starter: WorkerLauncher, owner: int) -> None:
    if owner != os.getpid():  # a forked copy of the pool owns no workers
        return
    kill_workers([slot.worker for slot in slots if slot.worker is not None])
    for slot in slots:
        slot.worker, slot.ready = None, False
    starter.close()  # at last: its end is that of the workers, who are to be found alive with all that they have started


# What judges a rollout's completions: a pool of worker processes on this machine, or many of those elsewhere.


class RewardScorer(Protocol):
    """What `RewardPool` does for a rollout; a context manager."""

    rewards: tuple[Reward, ...]

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        incremental: IncrementalScoring | None = None,
    ) -> RewardScores:
        """As `RewardPool.score`."""
        ...

    def score_steps(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> ProcessScores:
        """As `RewardPool.score_steps`."""
        ...

    def is_overlap_worthwhile(self, count: int) -> bool:
        """Whether it is worth while to `begin` before so many completions are all there."""
        ...

    def score_incrementally(
        self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> AbstractContextManager[IncrementalScoring]:
        """As `RewardPool.score_incrementally`; asked for only where it `pays`."""
        ...
