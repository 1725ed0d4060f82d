"""The reward pool: scores a rollout in killable worker processes. A bad sample costs only itself, never the run."""

from __future__ import annotations

import math
import os
import selectors
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from policygrad.errors import ConfigError, DataError, RewardError
from policygrad.rewards.base import (
    EPISODE_COLUMNS,
    Columns,
    ProcessScores,
    Reward,
    RewardFunction,
    RewardScores,
    StepScores,
)
from policygrad.rewards.resolve import resolve_reward
from policygrad.rewards.workers import process
from policygrad.rewards.workers.failures import MIN_LOST_CALLS, UnresponsiveFunctionDetector
from policygrad.rewards.workers.limits import parse_size
from policygrad.rewards.workers.messages import (
    MAX_ABS_REWARD,
    Chunk,
    PendingCall,
    ProtocolError,
    SampleResult,
    Samples,
    WorkerStart,
    format_failure,
    pickle_by_value,
    quote,
    select_samples,
)
from policygrad.rewards.workers.process import NO_SANDBOX, WorkerLauncher, WorkerProcess, kill_workers
from policygrad.rewards.workers.signature import Signature
from policygrad.utils.child_environment import check_variable_names, explain_missing_variable
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.utils.spans import span

if TYPE_CHECKING:
    from policygrad.rewards.config import RewardConfig
    from policygrad.rewards.workers.worker import RewardCaller

MIN_OVERLAP_SECONDS = 0.25
"""Scoring time that overlapping with sampling must hide to be worth handing completions over one by one."""
MAX_WORKERS, WORKERS_PER_CPU = 64, 16  # worker processes allowed on any machine, and per processor where that is more


class RewardScorer:
    """Scores the completions of a rollout with `run_rewards`: on this machine (`RewardPool`), or by actors of a cluster."""

    rewards: tuple[Reward, ...]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Columns,
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
        samples = (prompts, completions, self._drop_unread(columns))
        with span("score", completions=len(completions)):
            rewards, table = self.run_rewards(samples, process_rewards=False, incremental=incremental)
        failures = _FailureLog()
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
        messages = [*failures.messages.values(), *self.collect_notes()]
        feedback = ["\n".join(o.feedback for o in results if o.feedback) for results in zip(*table, strict=True)]
        logged = dict[str, list[float]]()
        for name, value in (metric for row in table for o in row for metric in o.metrics):
            logged.setdefault(name, []).append(value)
        feedback = feedback if any(feedback) else []
        return RewardScores(total, parts, dict(failures.counts), messages, weights, feedback, logged)

    def score_steps(self, prompts: Sequence[Any], completions: Sequence[str], columns: Columns) -> ProcessScores:
        """Return the weighted steps of completion i by all process rewards, merged; None where one of them fails.

        Arguments and errors are those of `score`.
        """
        with span("score steps", completions=len(completions)):
            samples = (prompts, completions, self._drop_unread(columns))
            rewards, table = self.run_rewards(samples, process_rewards=True)
        failures = _FailureLog()
        steps: list[StepScores | None] = []
        for results in zip(*table, strict=True):
            failed = failures.add_results(results)
            pairs = zip(rewards, results, strict=True)
            weighted = [(end, reward.weight * score) for reward, result in pairs for end, score in result.steps]
            if not failed and (large := [score for _, score in weighted if abs(score) > MAX_ABS_REWARD]):
                failures.add("inf", f"no steps: the weighted score {large[0]:g} is beyond ±{MAX_ABS_REWARD:g}")
                failed = True
            steps.append(None if failed else tuple(sorted(weighted, key=lambda step: step[0])))
        scores = ([score for result in row for _, score in result.steps] for row in table)
        parts = {reward.name: row for reward, row in zip(rewards, scores, strict=True)}
        return ProcessScores(steps, parts, dict(failures.counts), list(failures.messages.values()))

    def _drop_unread(self, columns: Columns) -> Columns:
        """Leave out the columns of the episodes that no function names: they need not be sent."""
        read = frozenset[str]().union(*(Signature.from_function(reward.function).episode for reward in self.rewards))
        return {name: values for name, values in columns.items() if name not in EPISODE_COLUMNS - read}

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
        self, prompts: Sequence[Any], columns: Columns
    ) -> AbstractContextManager[IncrementalScoring]:
        """Score finished completions of these prompts while others are still being sampled; `score` inside the context completes
        it.

        Call only where `is_overlap_worthwhile`.
        """
        raise NotImplementedError


@dataclass
class _FailureLog:
    """Failures counted by reason, and the first message of each distinct one."""

    counts: Counter[str] = field(default_factory=Counter)
    messages: dict[tuple[int, str, str], str] = field(default_factory=dict)

    def add_results(self, results: Sequence[SampleResult]) -> bool:
        """Count the failures among one sample's results; returns whether there are any."""
        for number, result in enumerate(results):
            if result.reason:
                self.add(result.reason, result.message, number, result.kind)
        return any(result.reason for result in results)

    def add(self, reason: str, message: str, number: int = -1, kind: str = "") -> None:
        self.counts[reason] += 1
        self.messages.setdefault((number, reason, kind), message)


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
        environment: Names of environment variables that workers get besides the default ones (docs/isolation.md).
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
        cpus = os.cpu_count() or 1
        if num_workers < 1:
            raise ConfigError(f"num_workers must be at least 1, got {num_workers}")
        if num_workers > (limit := max(MAX_WORKERS, WORKERS_PER_CPU * cpus)):
            raise ConfigError(
                f"rewards.num_workers={num_workers} is too many processes for {cpus} processors; give at most {limit}"
            )
        if not timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, got {timeout}")
        if not rewards:
            raise ConfigError(
                "a RewardPool needs at least one reward; policygrad.rewards.resolve.list_rewards() lists the built-in ones"
            )
        self.rewards = tuple(resolve_reward(reward) for reward in rewards)
        ((name, count),) = Counter(reward.name for reward in self.rewards).most_common(1)
        if count > 1:
            raise ConfigError(f"{count} rewards are called {name!r}; rename them: Reward('another name', function)")
        check_variable_names(environment, "environment")
        process.check_sandbox(sandbox, self.rewards)
        memory_limit = parse_size(memory)
        self._num_workers = num_workers
        self._noted_output = False  # the note that prints are captured is given once
        self._signatures = [Signature.from_function(reward.function) for reward in self.rewards]
        self._lock = threading.RLock()  # `score_incrementally` holds it around `score`
        self._local: dict[int, RewardCaller] = {}  # by number, the functions that run in this process
        pickled: list[bytes | None] = []
        for number in range(len(self.rewards)):
            pickled.append(self._pickle_function(number, sandbox))
        launcher = WorkerLauncher()
        timeouts = [reward.timeout or timeout for reward in self.rewards]

        def create_slot(functions: set[int], memory: int | None, sandbox: str, start_timeout: float) -> WorkerSlot:
            loaded = tuple(
                (reward.name, pickled[f] if f in functions else None, reward.process_reward)
                for f, reward in enumerate(self.rewards)
            )
            start = WorkerStart(loaded, memory, sandbox=sandbox, show_output=show_output)
            return WorkerSlot(start, environment, timeouts, start_timeout, launcher)

        sent = set(range(len(self.rewards))).difference(self._local)
        dedicated = {f for f in sent if self.rewards[f].dedicated_worker}
        self._slots = [create_slot({f}, None, NO_SANDBOX, DEDICATED_START_TIMEOUT) for f in sorted(dedicated)]
        if shared := sent - dedicated:
            self._slots += [create_slot(shared, memory_limit, sandbox, START_TIMEOUT) for _ in range(num_workers)]
        self._close = weakref.finalize(self, _close_pool, self._slots, launcher, os.getpid())
        self._dispatcher = Dispatcher(self._slots, progress, tolerate_unresponsive)
        for slot in self._slots:
            slot.launch()  # without waiting for it, so that imports overlap with the caller's work

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
        if any(self._signatures[f].episode for f in single):  # known once all episodes are there
            return False
        seconds = self._dispatcher.estimate_seconds([self.rewards[f].name for f in single])
        return seconds * count / self._num_workers >= MIN_OVERLAP_SECONDS

    @contextmanager
    def score_incrementally(self, prompts: Sequence[Any], columns: Columns) -> Iterator[IncrementalScoring]:
        _, single = self._worker_functions(process_rewards=False)
        with self._lock:
            incremental = IncrementalScoring(prompts, columns, single, self._dispatcher)
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
            signature.check_columns(reward.name, columns)
        count = len(completions)
        kind = [f for f, reward in enumerate(self.rewards) if reward.process_reward is process_rewards]
        table = {f: [SampleResult()] * count for f in kind}
        with self._lock:
            try:
                scored, places, queued = incremental.collect(completions) if incremental else ([], None, [])
                batched, single = self._worker_functions(process_rewards)
                work = self._dispatcher.create_work(samples, batched=batched, single=single, places=places)
                scored += self._dispatcher.run([*work, *queued], sum(len(call.places) for call in scored))
            except BaseException:
                self.close()  # workers may be in the middle of a chunk whose results are not wanted any more
                raise
            for f, caller in self._local.items():
                if f in table and count:
                    size = count if self.rewards[f].batched else 1
                    parts = [caller(*select_samples(samples, range(i, i + size))) for i in range(0, count, size)]
                    table[f] = [result for part in parts for result in part]
        for call in scored:
            for place, result in zip(call.places, call.results, strict=True):
                table[call.function][place] = result
        return [self.rewards[f] for f in table], list(table.values())

    def _worker_functions(self, process_rewards: bool) -> tuple[list[int], list[int]]:
        """Return the workers' functions of one kind: those that get the full batch, and those that get single samples."""
        kind = [f for f, reward in enumerate(self.rewards) if reward.process_reward is process_rewards]
        batched = [f for f in kind if f not in self._local and self.rewards[f].batched]
        return batched, [f for f in kind if f not in self._local and f not in batched]

    def _pickle_function(self, number: int, sandbox: str) -> bytes | None:
        """Pickle a function for the workers; one that cannot be pickled is prepared to run in this process, and None."""
        reward = self.rewards[number]
        try:
            return pickle_by_value(reward.function)
        except Exception as error:
            failure = f"reward {reward.name!r} cannot be sent to a worker process ({type(error).__name__}: {error})"
            remedy = "create what cannot be pickled inside the function"
            if sandbox != NO_SANDBOX:
                raise ConfigError(f"{failure}, so --rewards.sandbox cannot contain it; {remedy}") from error
            warnings.warn(f"{failure}; it runs in this process without a timeout; {remedy}", stacklevel=3)
        if (prepare := getattr(reward.function, "reward_prepare", None)) is not None:
            prepare()
        from policygrad.rewards.workers.worker import RewardCaller

        self._local[number] = RewardCaller(reward.name, reward.function, reward.process_reward)
        return None


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

    def __init__(self, prompts: Sequence[Any], columns: Columns, single: Sequence[int], dispatcher: Dispatcher) -> None:
        """`single`: functions that get one sample per call."""
        self._single, self._dispatcher = single, dispatcher
        self._completions = [""] * len(prompts)
        self._samples = (prompts, self._completions, columns)
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
                    self._queue += self._dispatcher.create_work(
                        self._samples, single=self._single, places=self._waiting, early=True
                    )
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


# A rollout's samples as chunks of work.

_MAX_CHUNK = 64  # samples per message
_MAX_EARLY_CHUNK = 8  # enough to keep a worker busy, while what comes later can still be shared out evenly
_CHUNKS_PER_WORKER = 4  # enough that one slow chunk does not leave the other workers idle


@dataclass(frozen=True)
class WorkItem:
    """A chunk with the places of its samples in the rollout."""

    chunk: Chunk
    places: tuple[int, ...]
    completions: tuple[str, ...]

    @classmethod
    def create(cls, samples: Samples, places: Sequence[int], calls: Iterable[tuple[int, tuple[int, ...]]]) -> WorkItem:
        """Pickle the samples at these places. Raises RewardError, with its name, for a column that cannot be sent."""
        prompts, completions, columns = chosen = select_samples(samples, places)
        try:
            pickled = pickle_by_value(chosen)
        except Exception as error:
            for name, values in (("prompts", prompts), *columns.items()):
                try:
                    pickle_by_value(values)
                except Exception:
                    raise RewardError(
                        f"column {name!r} cannot be sent to a reward worker: {error}; use plain data"
                    ) from error
            raise
        return cls(Chunk(pickled, tuple(calls)), tuple(places), tuple(completions))

    def call(self, number: int) -> tuple[int, tuple[int, ...]]:
        """Return the function of a call and the places of its samples."""
        function, local = self.chunk.calls[number]
        return function, tuple(self.places[i] for i in local)

    def after(self, number: int) -> WorkItem | None:
        """Return what is left after so many calls; None = nothing."""
        calls = self.chunk.calls[number:]
        return replace(self, chunk=replace(self.chunk, calls=calls)) if calls else None


@dataclass(frozen=True)
class ScoredCall:
    """A finished call of a worker's function, with one result per sample."""

    function: int
    places: tuple[int, ...]
    results: list[SampleResult]


def check_lengths(samples: Samples) -> None:
    """Raise DataError unless every completion has a prompt, and a value of each column."""
    prompts, completions, columns = samples
    for name, values in (("prompts", prompts), *columns.items()):
        if len(values) != len(completions):
            raise DataError(f"{name!r} has {len(values)} values for {len(completions)} completions; give one for each")


class Dispatcher:
    """Hands work to the workers, keeps a deadline per call, and replaces a worker that overruns, dies, grows or breaks the
    protocol.
    """

    def __init__(self, slots: Sequence[WorkerSlot], progress: ProgressCallback, tolerate_unresponsive: bool) -> None:
        self._slots, self._progress = slots, progress
        limit = None if tolerate_unresponsive else max(2 * len(slots), MIN_LOST_CALLS)
        self._detector = UnresponsiveFunctionDetector(limit)
        self._call_times = CallTimeEstimator()
        self._measure_from = math.inf  # only calls that began later are timed: an earlier one may have waited unread

    def create_work(
        self,
        samples: Samples,
        *,
        batched: Sequence[int] = (),
        single: Sequence[int],
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
        everything = tuple(range(len(samples[1])))
        places = everything if places is None else places
        work = [WorkItem.create(samples, everything, [(f, everything)]) for f in batched if everything]
        if single:
            chunks_per_worker, max_chunk = (1, _MAX_EARLY_CHUNK) if early else (_CHUNKS_PER_WORKER, _MAX_CHUNK)
            size = min(math.ceil(len(places) / (len(self._slots) * chunks_per_worker)) or 1, max_chunk)
            for first in range(0, len(places), size):
                chunk = places[first : first + size]
                work.append(WorkItem.create(samples, chunk, ((f, (i,)) for i in range(len(chunk)) for f in single)))
        return work

    def run(self, work: Sequence[WorkItem], num_done: int = 0) -> list[ScoredCall]:
        """Do this work and what `poll` has started, and return the calls in any order. num_done: results the caller has already.

        Raises:
            RewardError: No worker can load a function, or it never returns.
        """
        started = [left for slot in self._slots if slot.work and (left := slot.work.after(slot.done))]
        total = num_done + sum(len(places) for item in (*work, *started) for _, places in item.chunk.calls)
        reporter = SlowCallReporter(self._progress, total, num_done)
        queue, scored = deque(work), list[ScoredCall]()
        self._measure_from = time.monotonic()
        try:
            while queue or any(slot.work for slot in self._slots):
                calls = self.poll(queue, reporter.due)
                scored += calls
                reporter.num_results += sum(len(call.places) for call in calls)
                reporter.report_if_due([slot for slot in self._slots if slot.work])
            self._call_times.end_scoring()
        finally:
            self._measure_from = math.inf
            reporter.close()
        return scored

    def poll(self, queue: deque[WorkItem], due: float = 0.0) -> list[ScoredCall]:
        """Hand out work from the queue to idle workers, and return the calls that finish by the time `due`. Raises as `run`."""
        for slot in self._slots:
            item = None if slot.work else next((item for item in queue if slot.accepts(item)), None)
            if item is None:
                continue
            queue.remove(item)
            if slot.worker is None or not slot.worker.alive():
                slot.launch()
            slot.work, slot.done = item, 0
            if slot.ready:
                slot.send_work()
            else:
                slot.set_deadline()  # anew: its first message may have been waiting for long
        busy = [slot for slot in self._slots if slot.work]
        if not busy:
            return []
        # write what the pipes accept, until a worker sends something, a deadline passes, or `due`
        readable = []
        with selectors.DefaultSelector() as selector:
            for slot in busy:
                assert slot.worker
                selector.register(slot.worker.output, selectors.EVENT_READ, slot)
                if slot.worker.outbox:
                    selector.register(slot.worker.input, selectors.EVENT_WRITE, slot)
            timeout = min(due, *(slot.deadline for slot in busy)) - time.monotonic()
            for key, events in selector.select(max(timeout, 0.0)):
                if events & selectors.EVENT_READ:
                    readable.append(key.data)
                else:
                    key.data.worker.flush()
                    key.data.set_deadline()  # a call begins once its samples have arrived
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

    def estimate_seconds(self, names: Sequence[str]) -> float:
        """Estimate the time of one call of each function, together; 0 where one has not been measured or never succeeded."""
        return sum(map(self._call_times.get, names)) if all(map(self._detector.has_succeeded, names)) else 0.0

    def _read(self, slot: WorkerSlot, queue: deque[WorkItem], scored: list[ScoredCall]) -> str | None:
        """Process what a worker has sent. Returns "ended", or how it broke the protocol, where it has to be replaced."""
        assert slot.worker
        ended, replies = slot.worker.receive(), slot.worker.replies
        try:
            if not slot.ready and (error := replies.parse_ready()) is not None:
                if error:
                    raise RewardError(error + _explain_missing(error, slot))
                slot.ready, slot.has_started, slot.start_failures = True, True, 0
                if slot.worker.output_tail:
                    slot.worker.output_tail.clear()  # what imports print is of use only where they fail
                slot.send_work()
            while slot.ready and slot.work and (reply := replies.parse_reply(slot.pending_call)) is not None:
                self._record(slot, reply.results, scored)
                if reply.last:
                    remaining = slot.work.after(slot.done) if slot.work else None
                    slot.launch()
                    if remaining:
                        queue.appendleft(remaining)
                    return None
        except ProtocolError as invalid:
            return f"sent an invalid reply ({invalid})"
        return "ended" if ended else None

    def _record(self, slot: WorkerSlot, results: list[SampleResult], scored: list[ScoredCall]) -> None:
        """Take the results of a worker's current call, and turn to its next one."""
        assert slot.work
        function, places = slot.work.call(slot.done)
        name = slot.start.functions[function][0]
        printed = slot.last_output() if any(result.reason for result in results) else ""
        for i, result in enumerate(results):
            if result.reason:
                hint = _explain_missing(result.message, slot) if result.reason == "raised" else ""
                results[i] = replace(result, message=result.message + hint + printed)
        self._detector.record_results(name, results)
        if slot.num_calls >= len(slot.start.functions):  # a worker's first calls may load what they need
            self._measure(slot, name)
        scored.append(ScoredCall(function, places, results))
        slot.done += 1
        slot.num_calls += 1
        if slot.done == len(slot.work.chunk.calls):
            slot.work = None
        else:
            slot.set_deadline()

    def _measure(self, slot: WorkerSlot, name: str) -> None:
        if slot.deadline_set >= self._measure_from:
            self._call_times.record(name, time.monotonic() - slot.deadline_set)

    def _replace(self, slot: WorkerSlot, failure: str | None, queue: deque[WorkItem], scored: list[ScoredCall]) -> None:
        """Kill a worker that overran, ended or broke the protocol, and charge its call. The remaining calls go to the front of the
        queue, or, where the function has never succeeded, to its end, so that other samples show whether it can.

        One that ended while it loaded is charged to no call. Another is started where one has loaded before, as the machine may be
        short of memory for a while.
        """
        assert slot.work
        item, was_ready, how = slot.work, slot.ready, slot.kill()
        if not was_ready:
            slot.start_failures += 1
            if slot.start_failures > (MAX_START_FAILURES if slot.has_started else 0):
                what = f"ended ({how})" if failure == "ended" else failure
                raise RewardError(
                    f"a reward worker {what or f'was not ready after {slot.start_timeout:g} s'} while it loaded "
                    f"{slot.start.names}; import them by hand to see why{slot.killed_output}"
                )
            queue.appendleft(item)
            return
        function, places = item.call(slot.done)
        name = slot.start.functions[function][0]
        self._measure(slot, name)
        if failure:
            reason, what, remedy = "crashed", f"ended its worker process ({how})" if failure == "ended" else failure, ""
        else:
            reason, what = "timeout", f"took more than its timeout of {slot.timeouts[function]:g} s and was stopped"
            remedy = "; @reward(timeout=...) sets it"
        texts = [item.completions[i] for i in item.chunk.calls[slot.done][1]]
        message = format_failure(name, what + remedy, texts) + slot.killed_output
        scored.append(ScoredCall(function, places, [SampleResult(None, reason, message)] * len(places)))
        if remaining := item.after(slot.done + 1):
            (queue.appendleft if self._detector.has_succeeded(name) else queue.append)(remaining)
        self._detector.record_lost(name, what)


START_TIMEOUT = 120.0  # seconds for a worker to import what its functions need; not part of any call's timeout
DEDICATED_START_TIMEOUT = 3600.0  # for a worker that loads, or first downloads, a model
MAX_START_FAILURES = 3  # workers in a row that may end while they load what another has loaded before


def _explain_missing(message: str, slot: WorkerSlot) -> str:
    return explain_missing_variable(message, slot.variables, "reward workers", "--rewards.environment")


@dataclass
class WorkerSlot:
    """A place for one worker process: the functions it runs, the process, and its current chunk."""

    start: WorkerStart
    variables: Sequence[str] = ()  # names of environment variables
    timeouts: Sequence[float] = ()  # seconds per call of each function
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
    killed_output: str = ""  # `last_output` of the worker that was killed last

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
        lengths = tuple(len(self.work.completions[i]) for i in local)
        return PendingCall(self.num_calls, lengths, self.start.functions[function][2])

    def launch(self) -> None:
        """Start a worker in place of the current one."""
        self.kill()
        self.worker, self.num_calls = self.launcher(self.start, self.variables), 0
        self.set_deadline()

    def send_work(self) -> None:
        assert self.worker
        assert self.work
        self.worker.send(self.work.chunk)
        self.set_deadline()

    def set_deadline(self) -> None:
        """Set the deadline of the start or the current call."""
        function = self.current_function
        self.deadline_set = time.monotonic()
        self.deadline = self.deadline_set + (self.start_timeout if function is None else self.timeouts[function])

    def last_output(self) -> str:
        """Return the end of a failure's message: the last lines that the worker printed; "" where none are captured."""
        printed = self.worker.output_tail.last_lines() if self.worker and self.worker.output_tail else ""
        return f"; its worker printed last: {printed}" if printed else ""

    def kill(self) -> str:
        """Kill the worker, without finishing its work; returns how it had ended."""
        (how,) = kill_workers([self.worker]) if self.worker else ("",)
        self.killed_output = self.last_output()
        self.worker, self.ready, self.work = None, False, None
        return how


class CallTimeEstimator:
    """Mean seconds per call of each function, with earlier scorings discounted."""

    DISCOUNT = 0.5  # of earlier scorings beside the next one: a reward may get faster or slower as completions change

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, float]] = {}  # seconds and calls, by the function's name

    def record(self, name: str, seconds: float) -> None:
        total, calls = self._totals.get(name, (0.0, 0.0))
        self._totals[name] = (total + seconds, calls + 1)

    def end_scoring(self) -> None:
        self._totals = {f: (total * self.DISCOUNT, calls * self.DISCOUNT) for f, (total, calls) in self._totals.items()}

    def get(self, name: str) -> float:
        """Return seconds; 0 for a function that was not measured."""
        total, calls = self._totals.get(name, (0.0, 1.0))
        return total / calls


REPORT_AFTER_SECONDS = 4.0
_REPORT_INTERVAL = 1.0  # seconds


class SlowCallReporter:
    """Reports what a scoring of `total` results waits for, once it takes longer than REPORT_AFTER_SECONDS."""

    def __init__(
        self,
        report: ProgressCallback,
        total: int,
        num_results: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report, self._total, self._clock = report, total, clock
        self.num_results, self._reported = num_results, False
        self.due = clock() + REPORT_AFTER_SECONDS  # time of the next report

    def report_if_due(self, busy: Sequence[WorkerSlot]) -> None:
        """Report the call with the earliest deadline."""
        if self._clock() < self.due or not busy:
            return
        slot = min(busy, key=lambda slot: slot.deadline)
        function = slot.current_function
        if function is None:
            text = f"waiting for a reward worker to load {slot.start.names}"
        else:
            name, seconds = slot.start.functions[function][0], slot.timeouts[function]
            text = f"waiting for reward {name!r} (each call has up to {seconds:g} s)"
        self._report(text, self.num_results, self._total)
        self._reported, self.due = True, self._clock() + _REPORT_INTERVAL

    def close(self) -> None:
        """Clear the report: all results are there, or the scoring has ended."""
        if self._reported:
            self._report("", 0, 0)
