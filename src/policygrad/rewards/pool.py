"""The reward pool: scores a rollout in killable worker processes; a bad sample costs itself, never the run."""

import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

from policygrad.errors import ConfigError, DataError, RewardError
from policygrad.rewards import walled
from policygrad.rewards.begun import Begun
from policygrad.rewards.calls import Caller, Judgement, Signature, last_words, tell
from policygrad.rewards.dispatch import Dispatcher
from policygrad.rewards.memory import size
from policygrad.rewards.plan import plan, take
from policygrad.rewards.resolve import resolve
from policygrad.rewards.slots import Slot, Work, check_workers, slots_for
from policygrad.rewards.starting import Starter
from policygrad.rewards.subprocess import kill
from policygrad.rewards.summary import gather, summarise
from policygrad.rewards.types import ProcessScores, Reward, RewardFunction, RewardScores
from policygrad.rewards.variables import check_names, hint
from policygrad.rewards.waits import Phase, nobody
from policygrad.rewards.wire import by_value

WORTH = 0.25
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
        workers: int = 2,
        budget: float = 10.0,
        memory: str = "4GiB",
        environment: Sequence[str] = (),
        sandbox: str = walled.NONE,
        show_output: bool = False,
        phase: Phase = nobody,
        patient: bool = False,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        check_workers(workers)
        if not budget > 0:
            raise ConfigError(f"budget must be a positive number of seconds, got {budget}")
        self.rewards = tuple(resolve(reward) for reward in rewards)
        _check_names(self.rewards)
        check_names(environment, "environment")
        walled.check(sandbox, self.rewards)
        self._sandbox = sandbox
        self._noted = False  # that prints are captured
        self._environment = tuple(environment)
        self._signatures = [Signature.of(reward.function) for reward in self.rewards]
        self._lock = threading.RLock()  # which `begin` holds around `score`
        self._sent: list[int] = []  # numbers of the rewards that run in workers, in the order the workers know them
        self._here: dict[int, Caller] = {}  # those that run in this process
        functions = self._place()
        alone, starter = [f for f, number in enumerate(self._sent) if self.rewards[number].alone], Starter()
        self._slots = slots_for(functions, alone, workers, size(memory), environment, starter, sandbox, show_output)
        self._close = weakref.finalize(self, _kill, self._slots, starter, os.getpid())
        budgets = [self.rewards[number].budget or budget for number in self._sent]
        names = [self.rewards[number].name for number in self._sent]
        self._shared = workers
        self._dispatcher = Dispatcher(self._slots, names, budgets, phase=phase, patient=patient)
        self._dispatcher.open()

    def __enter__(self) -> "RewardPool":
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
        begun: Begun | None = None,
    ) -> RewardScores:
        """Score completion i of prompt i, with value i of every column, by every reward that is no process reward.

        begun: what `begin` has given for these prompts and columns.

        Raises DataError for lists of different lengths, and RewardError when a function needs a column that is not
        there, no worker can load it, or it never answers; never because of what a function does with a sample.
        """
        rewards, table = self.judge(prompts, completions, columns, process_rewards=False, begun=begun)
        scores = summarise(rewards, table, completions)
        if not self._noted and any(slot.printed() or slot.last_lines for slot in self._slots):
            self._noted = True
            scores.messages.append("what rewards print is not shown: --rewards.show-output shows it")
        return scores

    def pays(self, count: int) -> bool:
        """Whether so many completions take so long to judge, as far as earlier scorings tell, that `begin` hides `WORTH`: by the
        rewards that get one sample at a time, in a worker."""
        return self._dispatcher.seconds(self._called(False)[1]) * count / self._shared >= WORTH

    @contextmanager
    def begin(self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> Iterator[Begun]:
        """For one scoring of these by `score`, inside the context: completions that are over before others are judged meanwhile."""
        single = self._called(False)[1]

        def planned(completions: Sequence[str], places: Sequence[int]) -> list[Work]:
            workers = len(self._slots)
            return plan(prompts, completions, columns, single=single, workers=workers, asked=places, early=True)

        with self._lock:
            begun = Begun(len(prompts), self._dispatcher, planned)
            try:
                yield begun
            finally:
                begun.close()
                self._dispatcher.drop()

    def steps(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> ProcessScores:
        """The steps of completion i by every process reward; the same arguments and errors as `score`."""
        rewards, table = self.judge(prompts, completions, columns, process_rewards=True)
        return gather(rewards, table)

    def judge(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        *,
        process_rewards: bool,
        begun: Begun | None = None,
    ) -> tuple[list[Reward], list[list[Judgement]]]:
        """The rewards of one kind, and what each said of each completion. The same arguments and errors as `score`."""
        if not self._close.alive:
            raise RewardError("this RewardPool is closed; score inside its `with` block")
        self._check(prompts, completions, columns)
        chosen = {number for number, reward in enumerate(self.rewards) if reward.process_reward is process_rewards}
        table: list[list[Judgement]] = [[Judgement()] * len(completions) for _ in self.rewards]

        def report(number: int, places: Sequence[int], judgements: Sequence[Judgement]) -> None:
            for place, judgement in zip(places, judgements, strict=True):
                if judgement.reason in ("timeout", "crashed"):  # told by the dispatcher, which knows no samples
                    message = tell(self.rewards[number].name, judgement.message, [completions[i] for i in places])
                    judgement = replace(judgement, message=message)
                elif judgement.reason == "raised" and number not in self._here:
                    way_out = hint(judgement.message, self._environment)
                    judgement = replace(judgement, message=judgement.message + way_out)
                if judgement.printed:
                    judgement = replace(judgement, message=judgement.message + last_words(judgement.printed))
                table[number][place] = judgement

        def answered(function: int, places: Sequence[int], judgements: Sequence[Judgement]) -> None:
            report(self._sent[function], places, judgements)

        with self._lock:
            try:
                asked, left, there = begun.take(completions, answered) if begun else (None, [], 0)
                (batched, single), workers = self._called(process_rewards), len(self._slots)
                work = plan(prompts, completions, columns, batched=batched, single=single, workers=workers, asked=asked)
                self._dispatcher.run([*work, *left], answered, there)
            except BaseException:
                self.close()  # workers may be in the middle of a chunk that nobody waits for any more
                raise
            for number, caller in self._here.items():
                for places in self._groups(self.rewards[number], len(completions)) if number in chosen else ():
                    report(number, places, caller(*take(prompts, completions, columns, places)))
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
                functions.append((reward.name, by_value(reward.function), reward.process_reward))
                self._sent.append(number)
            except Exception as error:
                if self._sandbox != walled.NONE:
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
                self._here[number] = Caller(reward.name, reward.function, reward.process_reward)
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
            "a RewardPool needs at least one reward; policygrad.rewards.known_rewards() lists the built-in ones"
        )
    names = Counter(reward.name for reward in rewards)
    for name, count in names.items():
        if count > 1:
            raise ConfigError(
                f"{count} rewards are called {name!r}; give each its own: Reward('another name', function)"
            )


def _kill(slots: Sequence[Slot], starter: Starter, owner: int) -> None:
    if owner != os.getpid():  # a forked copy of the pool owns no workers
        return
    kill([slot.worker for slot in slots if slot.worker is not None])
    for slot in slots:
        slot.worker, slot.ready = None, False
    starter.close()  # at last: its end is that of the workers, who are to be found alive with all that they have started
