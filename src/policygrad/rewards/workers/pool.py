"""The reward pool: scores a rollout in killable worker processes. A bad sample costs only itself, never the run."""

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
from typing import TYPE_CHECKING, Any, Self

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
    SampleResult,
    WorkerStart,
    format_failure,
    format_last_output,
    pickle_by_value,
    quote,
)
from policygrad.rewards.workers.process import NO_SANDBOX, WorkerLauncher, WorkerProcess, kill_workers
from policygrad.rewards.workers.worker import RewardCaller, Signature
from policygrad.utils.progress import ProgressCallback, ignore_progress

if TYPE_CHECKING:
    from policygrad.rewards.config import RewardConfig

MIN_OVERLAP_SECONDS = 0.25
"""Scoring time that overlapping with sampling must hide to be worth handing completions over one by one."""


class RewardScorer:
    """Scores the completions of a rollout with `run_rewards`: on this machine (`RewardPool`), or by actors of a cluster."""

    rewards: tuple[Reward, ...]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        incremental: IncrementalScoring | None = None,
    ) -> RewardScores:
        """Score completion i of prompt i, with value i of every column, by every reward that is not a process reward.

        Args:
            incremental: From `score_incrementally` for the same prompts and columns.

        Raises:
            DataError: The lists differ in length.
            RewardError: A column that a function needs is missing, no worker can load a function, or it never returns. Nothing is
                raised for what a function does with a sample.
        """
        samples = (prompts, completions, columns)
        rewards, table = self.run_rewards(samples, process_rewards=False, incremental=incremental)
        return combine_scores(rewards, table, completions, self.collect_notes())

    def score_steps(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> ProcessScores:
        """Return the steps of completion i by every process reward; same arguments and errors as `score`."""
        return combine_steps(*self.run_rewards((prompts, completions, columns), process_rewards=True))

    def run_rewards(
        self, samples: Samples, *, process_rewards: bool, incremental: IncrementalScoring | None = None
    ) -> tuple[list[Reward], list[list[SampleResult]]]:
        """Return the rewards of one kind, and the result of each for each completion; same arguments and errors as `score`."""
        raise NotImplementedError

    def collect_notes(self) -> list[str]:
        """Return messages about a scoring that are no failures."""
        return []

    def is_overlap_worthwhile(self, count: int) -> bool:
        """Return whether `score_incrementally` would save time for so many completions."""
        return False

    def score_incrementally(
        self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> AbstractContextManager[IncrementalScoring]:
        """Score finished completions of these prompts while others are still being sampled; `score` inside the context completes
        it.

        Call only where `is_overlap_worthwhile`.
        """
        raise NotImplementedError


class RewardPool(RewardScorer):
    """Persistent worker processes for a set of reward functions; a context manager.

    Each function is called with one sample at a time and a timeout, unless it is `batched`. A call that raises, times out, crashes
    or returns anything but finite numbers leaves its samples without a reward, and the reason is counted. A function that cannot be
    pickled runs in this process, without a timeout, after a warning.

    Args:
        rewards: Rewards, reward functions, or their names.
        num_workers: Worker processes; a reward with a `dedicated_worker` gets another one.
        timeout: Seconds per call, unless the reward has its own.
        memory: What a worker may use beyond what it has after loading, "4GiB", or "none"; a dedicated worker has no limit.
        environment: Names of environment variables that workers get besides the default ones (docs/rewards-isolation.md).
        sandbox: Sandbox around workers (process.SANDBOX_CHOICES), except dedicated ones.
        show_output: Send what functions print to standard error. Otherwise it is captured, and messages of failures end with its
            last lines.
        progress: Called with what scoring waits for, when that takes seconds.
        tolerate_unresponsive: Keep calling a function that has never returned a reward.
    """

    def __init__(
        self,
        rewards: Sequence[Reward | RewardFunction | str],
        *,
        num_workers: int = 2,
        timeout: float = 10.0,
        memory: str = "4GiB",
        environment: Sequence[str] = (),
        sandbox: str = NO_SANDBOX,
        show_output: bool = False,
        progress: ProgressCallback = ignore_progress,
        tolerate_unresponsive: bool = False,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers must be at least 1, got {num_workers}")
        check_num_workers(num_workers)
        if not timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, got {timeout}")
        self.rewards = tuple(resolve_reward(reward) for reward in rewards)
        _check_reward_names(self.rewards)
        check_variable_names(environment, "environment")
        process.check_sandbox(sandbox, self.rewards)
        self._sandbox, self._environment, self._num_workers = sandbox, tuple(environment), num_workers
        self._noted_output = False  # the note that prints are captured is given once
        self._signatures = [Signature.from_function(reward.function) for reward in self.rewards]
        self._lock = threading.RLock()  # `score_incrementally` holds it around `score`
        self._sent: list[int] = []  # indices of the rewards that run in workers, in the workers' order
        self._local: dict[int, RewardCaller] = {}  # by index, those that run in this process
        functions = self._pickle_functions()
        dedicated = [f for f, index in enumerate(self._sent) if self.rewards[index].dedicated_worker]
        starts = _create_starts(functions, dedicated, num_workers, parse_size(memory), sandbox, show_output)
        launcher = WorkerLauncher()
        self._slots = [WorkerSlot(start, environment, limit, launcher) for start, limit in starts]
        self._close = weakref.finalize(self, _close_pool, self._slots, launcher, os.getpid())
        self._dispatcher = Dispatcher(
            self._slots,
            [self.rewards[index].name for index in self._sent],
            [self.rewards[index].timeout or timeout for index in self._sent],
            progress=progress,
            tolerate_unresponsive=tolerate_unresponsive,
        )
        self._dispatcher.open()

    @classmethod
    def from_config(
        cls, rewards: Sequence[Reward], config: RewardConfig, progress: ProgressCallback = ignore_progress
    ) -> RewardPool:
        """Create the pool of a run."""
        return cls(
            rewards,
            num_workers=config.num_workers,
            timeout=config.timeout,
            memory=config.memory,
            environment=config.environment,
            sandbox=config.sandbox,
            show_output=config.show_output,
            progress=progress,
            tolerate_unresponsive=not config.max_failed_steps,
        )

    def close(self) -> None:
        """Kill the workers; may be called again. It also happens at exit and when the pool is garbage-collected."""
        self._close()

    def collect_notes(self) -> list[str]:
        if self._noted_output or not any(slot.last_output() or slot.killed_output for slot in self._slots):
            return []
        self._noted_output = True
        return ["what rewards print is not shown: --rewards.show-output shows it"]

    def is_overlap_worthwhile(self, count: int) -> bool:
        """Estimate from earlier calls of the rewards that get one sample at a time in a worker."""
        _, single = self._worker_functions(process_rewards=False)
        return self._dispatcher.estimate_seconds(single) * count / self._num_workers >= MIN_OVERLAP_SECONDS

    @contextmanager
    def score_incrementally(
        self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> Iterator[IncrementalScoring]:
        _, single = self._worker_functions(process_rewards=False)

        def create(completions: Sequence[str], places: Sequence[int]) -> list[WorkItem]:
            samples = (prompts, completions, columns)
            return create_work(samples, single=single, workers=len(self._slots), places=places, early=True)

        with self._lock:
            incremental = IncrementalScoring(len(prompts), self._dispatcher, create)
            try:
                yield incremental
            finally:
                incremental.close()
                self._dispatcher.cancel_running()

    def run_rewards(
        self, samples: Samples, *, process_rewards: bool, incremental: IncrementalScoring | None = None
    ) -> tuple[list[Reward], list[list[SampleResult]]]:
        if not self._close.alive:
            raise RewardError("this RewardPool is closed; score inside its `with` block")
        check_lengths(samples)
        _, completions, columns = samples
        for reward, signature in zip(self.rewards, self._signatures, strict=True):
            if missing := sorted(signature.required - columns.keys()):
                raise RewardError(
                    f"reward {reward.name!r} needs the column {missing[0]!r}, and the task has: {', '.join(columns) or 'none'}; "
                    "rename or add the column, or choose another reward"
                )
        count = len(completions)
        kind = [index for index, reward in enumerate(self.rewards) if reward.process_reward is process_rewards]
        table = {index: [SampleResult()] * count for index in kind}
        with self._lock:
            try:
                scored, places, queued = incremental.collect(completions) if incremental else ([], None, [])
                batched, single = self._worker_functions(process_rewards)
                workers = len(self._slots)
                work = create_work(samples, batched=batched, single=single, workers=workers, places=places)
                scored += self._dispatcher.run([*work, *queued], sum(len(call.places) for call in scored))
            except BaseException:
                self.close()  # workers may be in the middle of a chunk whose results are not wanted any more
                raise
            for index, caller in self._local.items() if count else ():
                groups = [range(count)] if self.rewards[index].batched else [range(i, i + 1) for i in range(count)]
                for group in groups if index in table else ():
                    results = caller(*select_samples(samples, group))
                    table[index][group.start : group.stop] = results
        for call in scored:
            index = self._sent[call.function]
            for place, result in zip(call.places, call.results, strict=True):
                table[index][place] = self._explain(result, index, call.places, completions)
        return [self.rewards[index] for index in kind], [table[index] for index in kind]

    def _explain(
        self, result: SampleResult, index: int, places: Sequence[int], completions: Sequence[str]
    ) -> SampleResult:
        """Complete the message of a failure in a worker: with the samples of a lost call, a remedy, and what was printed."""
        if not result.reason:
            return result
        message = result.message
        if result.reason in ("timeout", "crashed"):  # from the dispatcher, which does not know the samples
            message = format_failure(self.rewards[index].name, message, [completions[i] for i in places])
        elif result.reason == "raised":
            message += explain_missing_variable(message, self._environment)
        return replace(result, message=message + format_last_output(result.printed))

    def _worker_functions(self, process_rewards: bool) -> tuple[list[int], list[int]]:
        """Return the workers' functions of one kind: those that get the full batch, and those that get single samples."""
        functions = [f for f, index in enumerate(self._sent) if self.rewards[index].process_reward is process_rewards]
        batched = [f for f in functions if self.rewards[self._sent[f]].batched]
        return batched, [f for f in functions if f not in batched]

    def _pickle_functions(self) -> list[tuple[str, bytes, bool]]:
        """Pickle the functions for the workers; those that cannot be pickled are kept for this process."""
        functions = []
        for index, reward in enumerate(self.rewards):
            try:
                functions.append((reward.name, pickle_by_value(reward.function), reward.process_reward))
                self._sent.append(index)
            except Exception as error:
                failure = f"reward {reward.name!r} cannot be sent to a worker process ({type(error).__name__}: {error})"
                if self._sandbox != NO_SANDBOX:
                    raise ConfigError(
                        f"{failure}, so --rewards.sandbox cannot contain it; create what cannot be pickled inside the function"
                    ) from error
                warnings.warn(
                    f"{failure}; it runs in this process without a timeout. Create what cannot be pickled inside the function",
                    stacklevel=3,
                )
                prepare = getattr(reward.function, "reward_prepare", None)
                if prepare is not None:
                    prepare()
                self._local[index] = RewardCaller(reward.name, reward.function, reward.process_reward)
        return functions


MAX_WORKERS, WORKERS_PER_CPU = 64, 16  # allowed on any machine; and per processor where that is more


def check_num_workers(count: int) -> None:
    """Raise ConfigError for more worker processes than this machine could start in a useful time."""
    cpus = os.cpu_count() or 1
    if count > (limit := max(MAX_WORKERS, WORKERS_PER_CPU * cpus)):
        raise ConfigError(
            f"rewards.num_workers={count} is too many processes for {cpus} processors; give at most {limit}"
        )


def _check_reward_names(rewards: Sequence[Reward]) -> None:
    if not rewards:
        raise ConfigError(
            "a RewardPool needs at least one reward; policygrad.rewards.resolve.list_rewards() lists the built-in ones"
        )
    for name, count in Counter(reward.name for reward in rewards).items():
        if count > 1:
            raise ConfigError(
                f"{count} rewards are called {name!r}; give each its own: Reward('another name', function)"
            )


def _close_pool(slots: Sequence[WorkerSlot], launcher: WorkerLauncher, owner: int) -> None:
    if owner != os.getpid():  # a forked copy of the pool owns no workers
        return
    kill_workers([slot.worker for slot in slots if slot.worker is not None])
    for slot in slots:
        slot.worker, slot.ready = None, False
    launcher.close()  # last: workers end with its thread, and their process trees must be found while they live


class IncrementalScoring:
    """Scores completions as they finish, while others are still being sampled.

    It has no thread: the sampling code calls `add_completions` from time to time, which collects replies and hands out work.
    """

    def __init__(
        self,
        count: int,
        dispatcher: Dispatcher,
        create: Callable[[Sequence[str], Sequence[int]], list[WorkItem]],
    ) -> None:
        self._dispatcher, self._create = dispatcher, create
        self._completions = [""] * count
        self._submitted: list[int] = []  # places of finished completions
        self._waiting: list[int] = []  # those of them that are not in the queue yet
        self._queue = deque[WorkItem]()
        self._scored: list[ScoredCall] = []
        self._lock = threading.RLock()  # reentrant: an interrupt may have left it held
        self._open = True
        self._error: RewardError | None = None

    def add_completions(self, completions: Mapping[int, str]) -> None:
        """Submit finished completions by place. Never waits; an error is raised by `collect`."""
        with self._lock:
            if not self._open:
                return
            for place, completion in completions.items():
                self._completions[place] = completion
            self._submitted += completions
            self._waiting += completions
            try:
                if self._waiting and not self._queue:  # waiting completions go together in larger chunks
                    self._queue += self._create(self._completions, self._waiting)
                    self._waiting = []
                self._scored += self._dispatcher.poll(self._queue)
            except RewardError as error:
                self._error, self._open = error, False

    def close(self) -> None:
        """Accept no more completions: sampling may have been interrupted and still call."""
        with self._lock:
            self._open = False

    def collect(self, completions: Sequence[str]) -> tuple[list[ScoredCall], list[int], list[WorkItem]]:
        """Return the finished calls, the places that are not queued, and the work that was not handed out.

        Raises:
            RewardError: A worker cannot load a function.
        """
        self.close()
        if self._error is not None:
            raise self._error
        if any(self._completions[place] != completions[place] for place in self._submitted):  # changed since
            self._dispatcher.cancel_running()
            return [], list(range(len(completions))), []
        remaining = sorted({*range(len(completions))}.difference(self._submitted).union(self._waiting))
        return self._scored, remaining, list(self._queue)


def combine_scores(
    rewards: Sequence[Reward],
    table: list[list[SampleResult]],
    completions: Sequence[str],
    notes: Sequence[str] = (),
) -> RewardScores:
    """Compute weighted sums, count failures by reason, and collect the first message of each distinct failure, in sample order."""
    failures = _Failures()
    total: list[float | None] = []
    for place, completion in enumerate(completions):
        results = [row[place] for row in table]
        failed = failures.add_results(results)
        values = [r.weight * o.value for r, o in zip(rewards, results, strict=True) if o.value is not None]
        if rewards and not values and not failed:
            failures.add("none", f"no reward: all functions returned None (completion {quote(completion)})")
        value = sum(values) if values and not failed else None
        if value is not None and abs(value) > MAX_ABS_REWARD:
            failures.add("inf", f"no reward: the weighted sum {value:g} is beyond ±{MAX_ABS_REWARD:g}")
            value = None
        total.append(value)
    parts = {reward.name: [o.value for o in row] for reward, row in zip(rewards, table, strict=True)}
    weights = {reward.name: reward.weight for reward in rewards}
    return RewardScores(total, parts, dict(failures.counts), [*failures.messages.values(), *notes], weights)


def combine_steps(rewards: Sequence[Reward], table: list[list[SampleResult]]) -> ProcessScores:
    """Merge the weighted steps of all process rewards; a completion that fails for one of them has none."""
    failures = _Failures()
    steps: list[StepScores | None] = []
    for results in zip(*table, strict=True):
        failed = failures.add_results(results)
        weighted = [
            (end, reward.weight * score)
            for reward, result in zip(rewards, results, strict=True)
            for end, score in result.steps
        ]
        if not failed and (large := [score for _, score in weighted if abs(score) > MAX_ABS_REWARD]):
            failures.add("inf", f"no steps: the weighted score {large[0]:g} is beyond ±{MAX_ABS_REWARD:g}")
            failed = True
        steps.append(None if failed else tuple(sorted(weighted, key=lambda step: step[0])))
    parts = {
        reward.name: [score for result in row for _, score in result.steps]
        for reward, row in zip(rewards, table, strict=True)
    }
    return ProcessScores(steps, parts, dict(failures.counts), list(failures.messages.values()))


class _Failures:
    """Counts failures by reason and keeps the first message of each distinct one."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.messages: dict[tuple[int, str, str], str] = {}

    def add_results(self, results: Sequence[SampleResult]) -> bool:
        """Count the failures among one sample's results; returns whether there are any."""
        for number, result in enumerate(results):
            if result.reason:
                self.add(result.reason, result.message, number, result.kind)
        return any(result.reason for result in results)

    def add(self, reason: str, message: str, number: int = -1, kind: str = "") -> None:
        self.counts[reason] += 1
        self.messages.setdefault((number, reason, kind), message)


# A rollout's samples as chunks of work.

_MAX_CHUNK = 64  # samples per message
_MAX_EARLY_CHUNK = 8  # enough to keep a worker busy, while what comes later can still be shared out evenly
_CHUNKS_PER_WORKER = 4  # enough that one slow chunk does not leave the other workers idle


@dataclass(frozen=True)
class WorkItem:
    """A chunk with the places of its samples in the rollout."""

    chunk: Chunk
    places: tuple[int, ...]
    lengths: tuple[int, ...]  # characters of the completions

    def call(self, number: int) -> tuple[int, tuple[int, ...]]:
        """Return the function of a call and the places of its samples."""
        function, local = self.chunk.calls[number]
        return function, tuple(self.places[i] for i in local)

    def after(self, number: int) -> WorkItem | None:
        """Return what is left after so many calls."""
        calls = self.chunk.calls[number:]
        return replace(self, chunk=replace(self.chunk, calls=calls)) if calls else None


@dataclass(frozen=True)
class ScoredCall:
    """A finished call of a worker's function, with one result per sample."""

    function: int
    places: tuple[int, ...]
    results: list[SampleResult]


Samples = tuple[Sequence[Any], Sequence[str], Mapping[str, Sequence[Any]]]
"""(prompts, completions, columns)"""


def create_work(
    samples: Samples,
    *,
    batched: Sequence[int] = (),
    single: Sequence[int],
    workers: int,
    places: Sequence[int] | None = None,
    early: bool = False,
) -> list[WorkItem]:
    """Split samples into chunks for the workers; functions that take the full batch come first, as their calls are the longest.

    Args:
        batched: Functions that get all samples in one call.
        single: Functions that get one sample per call.
        places: Samples for the `single` functions; None = all.
        early: More samples follow, and workers are only polled from time to time.

    Raises:
        RewardError: A column cannot be sent; names it.
    """
    lengths = [len(completion) for completion in samples[1]]
    everything = tuple(range(len(lengths)))
    chunks: list[tuple[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]] = []
    if everything:
        chunks += [(everything, [(f, everything)]) for f in batched]
    places = everything if places is None else places
    chunks_per_worker, max_chunk = (1, _MAX_EARLY_CHUNK) if early else (_CHUNKS_PER_WORKER, _MAX_CHUNK)
    size = min(math.ceil(len(places) / max(workers * chunks_per_worker, 1)) or 1, max_chunk)
    for first in range(0, len(places) if single else 0, size):
        chunk = tuple(places[first : first + size])
        chunks.append((chunk, [(f, (i,)) for i in range(len(chunk)) for f in single]))
    return [
        WorkItem(
            Chunk(_pickle_samples(select_samples(samples, chunk)), tuple(calls)),
            chunk,
            tuple(lengths[i] for i in chunk),
        )
        for chunk, calls in chunks
    ]


def check_lengths(samples: Samples) -> None:
    """Raise DataError unless every completion has a prompt, and a value of each column."""
    prompts, completions, columns = samples
    for name, values in (("prompts", prompts), *columns.items()):
        if len(values) != len(completions):
            raise DataError(f"{name!r} has {len(values)} values for {len(completions)} completions; give one for each")


def select_samples(samples: Samples, places: Sequence[int]) -> Samples:
    prompts, completions, columns = samples
    chosen = {name: [values[i] for i in places] for name, values in columns.items()}
    return [prompts[i] for i in places], [completions[i] for i in places], chosen


def _pickle_samples(samples: Samples) -> bytes:
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


class Dispatcher:
    """Hands work to the workers, keeps a deadline per call, and replaces a worker that overruns, dies, grows or breaks the
    protocol.

    `timeouts[f]` is the time in seconds of one call of function f, called `names[f]`.
    """

    def __init__(
        self,
        slots: Sequence[WorkerSlot],
        names: Sequence[str],
        timeouts: Sequence[float],
        *,
        progress: ProgressCallback,
        tolerate_unresponsive: bool,
    ) -> None:
        self._slots, self._names, self._timeouts, self._progress = slots, names, timeouts, progress
        limit = None if tolerate_unresponsive else max(2 * len(slots), MIN_LOST_CALLS)
        self._detector = UnresponsiveFunctionDetector(names, limit)
        self._call_times = CallTimeEstimator()
        self._measure_from = math.inf  # only calls that began later are timed: an earlier one may have waited unread

    def open(self) -> None:
        """Start every worker without waiting for it, so that imports overlap with the caller's work."""
        for slot in self._slots:
            slot.launch()

    def run(self, work: Sequence[WorkItem], num_done: int = 0) -> list[ScoredCall]:
        """Do this work and what `poll` has started, and return the calls in any order. num_done: results the caller has already.

        Raises:
            RewardError: No worker can load a function, or it never returns.
        """
        started = [left for slot in self._slots if slot.work and (left := slot.work.after(slot.done))]
        total = num_done + sum(len(places) for item in (*work, *started) for _, places in item.chunk.calls)
        reporter = SlowCallReporter(self._progress, self._names, self._timeouts, total)
        reporter.record_results(num_done)
        queue, scored = deque(work), list[ScoredCall]()
        self._measure_from = time.monotonic()
        try:
            while queue or any(slot.work for slot in self._slots):
                calls = self.poll(queue, reporter.due)
                scored += calls
                reporter.record_results(sum(len(call.places) for call in calls))
                reporter.report_if_due([slot for slot in self._slots if slot.work])
            self._call_times.end_scoring()
        finally:
            self._measure_from = math.inf
            reporter.close()
        return scored

    def poll(self, queue: deque[WorkItem], due: float = 0.0) -> list[ScoredCall]:
        """Hand out work from the queue to idle workers, and return the calls that finish by the time `due`. Raises as `run`."""
        for slot in self._slots:
            item = next((item for item in queue if slot.accepts(item)), None) if slot.work is None else None
            if item is None:
                continue
            queue.remove(item)
            slot.work, slot.done = item, 0
            if slot.worker is None or not slot.worker.alive():
                slot.kill()
                slot.launch()
            elif slot.ready:
                self._send(slot)
            else:
                self._set_deadline(slot)  # anew: its first message may have been waiting for long
        busy = [slot for slot in self._slots if slot.work]
        readable = self._wait(busy, due) if busy else []
        now = time.monotonic()  # before killing workers, which takes time
        scored: list[ScoredCall] = []
        for slot in busy:
            failure = self._read(slot, queue, scored) if slot in readable else None
            if slot.work and (failure or now >= slot.deadline):
                self._replace(slot, failure, queue, scored)
        return scored

    def cancel_running(self) -> None:
        """Kill the workers that are at work; their results are not wanted any more."""
        for slot in self._slots:
            if slot.work:
                slot.kill()
                slot.work = None

    def estimate_seconds(self, functions: Sequence[int]) -> float:
        """Estimate the time of one call of each function, together; 0 where one has not been measured or never succeeded."""
        if not all(map(self._detector.has_succeeded, functions)):
            return 0.0
        return sum(self._call_times[function] for function in functions)

    def _send(self, slot: WorkerSlot) -> None:
        assert slot.worker
        assert slot.work
        slot.worker.send(slot.work.chunk)
        self._set_deadline(slot)

    def _set_deadline(self, slot: WorkerSlot) -> None:
        function = slot.current_function
        slot.set_deadline(slot.start_timeout if function is None else self._timeouts[function])

    def _read(self, slot: WorkerSlot, queue: deque[WorkItem], scored: list[ScoredCall]) -> str | None:
        """Process what a worker has sent. Returns "ended", or how it broke the protocol, where it has to be replaced."""
        assert slot.worker
        ended, replies = slot.worker.receive(), slot.worker.replies
        try:
            if not slot.ready and (ready := replies.parse_ready()) is not None:
                if ready.error:
                    raise RewardError(ready.error + explain_missing_variable(ready.error, slot.variables))
                slot.ready, slot.has_started, slot.start_failures = True, True, 0
                if slot.worker.output_tail:
                    slot.worker.output_tail.clear()  # what imports print is of use only where they fail
                self._send(slot)
            while slot.ready and slot.work and (reply := replies.parse_reply(slot.pending_call)) is not None:
                self._record(slot, reply.results, scored)
                if reply.last:
                    remaining = slot.work.after(slot.done) if slot.work else None
                    slot.kill()
                    slot.work = None
                    slot.launch()
                    if remaining:
                        queue.appendleft(remaining)
                    return None
        except ProtocolError as error:
            return f"sent an invalid reply ({error})"
        return "ended" if ended else None

    def _record(self, slot: WorkerSlot, results: list[SampleResult], scored: list[ScoredCall]) -> None:
        """Take the results of a worker's current call, and turn to its next one."""
        assert slot.work
        function, places = slot.work.call(slot.done)
        if any(result.reason for result in results):
            printed = slot.last_output()
            results = [replace(result, printed=printed) if result.reason else result for result in results]
        self._detector.record_results(function, results)
        if slot.num_calls >= len(self._names):  # a worker's first calls may load what they need
            self._measure(slot, function)
        scored.append(ScoredCall(function, places, results))
        slot.done += 1
        slot.num_calls += 1
        if slot.done == len(slot.work.chunk.calls):
            slot.work = None
        else:
            self._set_deadline(slot)

    def _measure(self, slot: WorkerSlot, function: int) -> None:
        if slot.deadline_set >= self._measure_from:
            self._call_times.record(function, time.monotonic() - slot.deadline_set)

    def _replace(self, slot: WorkerSlot, failure: str | None, queue: deque[WorkItem], scored: list[ScoredCall]) -> None:
        """Charge the call that overran or killed its worker, and put the remaining calls back: in front of the queue, or, where the
        function has never succeeded, at its end, so that other samples show whether it can."""
        assert slot.work
        was_ready, how, item = slot.ready, slot.kill(), slot.work
        slot.work = None
        if not was_ready:
            self._retry_start(slot, item, queue, f"ended ({how})" if failure == "ended" else failure)
            return
        function, places = item.call(slot.done)
        self._measure(slot, function)
        if failure:
            reason, what, remedy = "crashed", f"ended its worker process ({how})" if failure == "ended" else failure, ""
        else:
            reason, what = "timeout", f"took more than its timeout of {self._timeouts[function]:g} s and was stopped"
            remedy = "; @reward(timeout=...) sets it"
        result = SampleResult(None, reason, what + remedy, printed=slot.killed_output)
        scored.append(ScoredCall(function, places, [result] * len(places)))
        if remaining := item.after(slot.done + 1):
            (queue.appendleft if self._detector.has_succeeded(function) else queue.append)(remaining)
        self._detector.record_lost(function, what)

    def _retry_start(self, slot: WorkerSlot, item: WorkItem, queue: deque[WorkItem], failure: str | None) -> None:
        """Put back the work of a worker that ended while it loaded. Another is started where one has loaded before, as the
        machine may be short of memory for a while."""
        slot.start_failures += 1
        if slot.start_failures > (MAX_START_FAILURES if slot.has_started else 0):
            what = failure or f"was not ready after {slot.start_timeout:g} s"
            raise RewardError(
                f"a reward worker {what} while it loaded {slot.start.names}; import them by hand to see why"
                + format_last_output(slot.killed_output)
            )
        queue.appendleft(item)

    def _wait(self, busy: Sequence[WorkerSlot], due: float) -> list[WorkerSlot]:
        """Write what the pipes accept, until a worker sends something, a deadline passes, or `due`. Returns the readable slots."""
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
                    self._set_deadline(key.data)  # a call begins once its samples have arrived
            return readable


START_TIMEOUT = 120.0  # seconds for a worker to import what its functions need; not part of any call's timeout
DEDICATED_START_TIMEOUT = 3600.0  # for a worker that loads, or first downloads, a model
MAX_START_FAILURES = 3  # workers in a row that may end while they load what another has loaded before


@dataclass
class WorkerSlot:
    """A place for one worker process: the functions it runs, the process, and its current chunk."""

    start: WorkerStart
    variables: Sequence[str] = ()  # names of environment variables
    start_timeout: float = START_TIMEOUT
    launcher: Callable[[WorkerStart, Sequence[str]], WorkerProcess] = WorkerProcess
    worker: WorkerProcess | None = None
    ready: bool = False
    has_started: bool = False  # a worker has been ready here
    start_failures: int = 0  # in a row, since then
    num_calls: int = 0  # that this worker has replied to
    work: WorkItem | None = None
    done: int = 0  # finished calls of the chunk
    deadline_set: float = 0.0  # when the deadline was set, by the clock
    deadline: float = 0.0  # of the start while not ready, else of the current call
    killed_output: str = ""  # last lines that the worker printed which was killed last

    def accepts(self, item: WorkItem) -> bool:
        """Return whether the worker has all functions that the chunk calls."""
        return all(self.start.functions[function][1] is not None for function, _ in item.chunk.calls)

    @property
    def current_function(self) -> int | None:
        """The function being called; None while the worker loads."""
        return self.work.chunk.calls[self.done][0] if self.work and self.ready else None

    @property
    def pending_call(self) -> PendingCall:
        """The call whose reply is next."""
        assert self.work
        function, local = self.work.chunk.calls[self.done]
        lengths = tuple(self.work.lengths[i] for i in local)
        return PendingCall(self.num_calls, lengths, self.start.functions[function][2])

    def launch(self) -> None:
        self.worker, self.ready, self.num_calls = self.launcher(self.start, self.variables), False, 0
        self.set_deadline(self.start_timeout)

    def set_deadline(self, seconds: float) -> None:
        self.deadline_set = time.monotonic()
        self.deadline = self.deadline_set + seconds

    def last_output(self) -> str:
        """Return the last lines that the worker printed; "" where there are none or they are not captured."""
        return self.worker.output_tail.last_lines() if self.worker and self.worker.output_tail else ""

    def kill(self) -> str:
        """Kill the worker; returns how it had ended."""
        how = self.worker.kill() if self.worker else ""
        self.killed_output = self.last_output()
        self.worker, self.ready = None, False
        return how


def _create_starts(
    functions: Sequence[tuple[str, bytes, bool]],
    dedicated: Sequence[int],
    count: int,
    memory: int | None,
    sandbox: str,
    show_output: bool,
) -> list[tuple[WorkerStart, float]]:
    """Return each worker's first message and start timeout: one for every dedicated function, and `count` for the others."""

    def start(chosen: set[int], memory: int | None, sandbox: str) -> WorkerStart:
        each = ((name, code if f in chosen else None, steps) for f, (name, code, steps) in enumerate(functions))
        return WorkerStart(tuple(each), memory, sandbox=sandbox, show_output=show_output)

    shared = set(range(len(functions))).difference(dedicated)
    return [
        *((start({f}, None, NO_SANDBOX), DEDICATED_START_TIMEOUT) for f in dedicated),
        *[(start(shared, memory, sandbox), START_TIMEOUT)] * (count if shared else 0),
    ]


# weight of earlier scorings beside the next one: a reward may get faster or slower as completions change
_DISCOUNT = 0.5


class CallTimeEstimator:
    """Mean seconds per call of each function, with earlier scorings discounted."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self._calls: defaultdict[int, float] = defaultdict(float)

    def record(self, function: int, seconds: float) -> None:
        self._seconds[function] += seconds
        self._calls[function] += 1

    def end_scoring(self) -> None:
        for count in (self._seconds, self._calls):
            count.update({function: value * _DISCOUNT for function, value in count.items()})

    def __getitem__(self, function: int) -> float:
        """Return seconds; 0 for a function that was not measured."""
        return self._seconds[function] / self._calls[function] if function in self._calls else 0.0


REPORT_AFTER_SECONDS = 4.0
_REPORT_INTERVAL = 1.0  # seconds


class SlowCallReporter:
    """Reports what a scoring of `total` results waits for, once it takes longer than `after` seconds (REPORT_AFTER_SECONDS)."""

    def __init__(
        self,
        report: ProgressCallback,
        names: Sequence[str],
        timeouts: Sequence[float],
        total: int,
        after: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report, self._names, self._timeouts, self._total, self._clock = report, names, timeouts, total, clock
        self._num_results, self._reported = 0, False
        self.due = clock() + (REPORT_AFTER_SECONDS if after is None else after)  # time of the next report

    def record_results(self, count: int) -> None:
        self._num_results += count

    def report_if_due(self, busy: Sequence[WorkerSlot]) -> None:
        """Report the call with the earliest deadline."""
        if self._clock() < self.due or not busy:
            return
        slot = min(busy, key=lambda slot: slot.deadline)
        function = slot.current_function
        if function is None:
            text = f"waiting for a reward worker to load {slot.start.names}"
        else:
            text = f"waiting for reward {self._names[function]!r} (each call has up to {self._timeouts[function]:g} s)"
        self._report(text, self._num_results, self._total)
        self._reported, self.due = True, self._clock() + _REPORT_INTERVAL

    def close(self) -> None:
        """Clear the report: all results are there, or the scoring has ended."""
        if self._reported:
            self._report("", 0, 0)
