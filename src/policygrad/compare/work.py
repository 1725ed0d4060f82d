"""Runs what a plan asks for and is not there yet, some at a time; what is finished is not run again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from policygrad.compare import outcomes
from policygrad.compare.outcomes import Outcome
from policygrad.compare.plan import Job, Plan
from policygrad.compare.runner import Runner, tidy
from policygrad.errors import RunError
from policygrad.training.stopping import WORDS, Stopping

LOOK = 0.2
"""Seconds between looks at whether Ctrl-C was pressed."""


@dataclass(frozen=True)
class Results:
    """What has come of a plan so far."""

    outcomes: Mapping[Job, Outcome]
    failures: Mapping[Job, str]
    """What a run that failed said last."""
    chosen: Mapping[str, float | None]
    """Each row's value of its knob; a row of whose tuning runs none succeeded is not in it."""
    stopped: bool = False
    """By a signal, before everything was done."""


@dataclass
class Work:
    """A comparison under way."""

    plan: Plan
    folder: Path
    runner: Runner
    jobs: int
    """Runs at a time."""
    say: Callable[[str], None]
    outcomes: dict[Job, Outcome] = field(default_factory=dict)
    failures: dict[Job, str] = field(default_factory=dict)

    def do(self) -> Results:
        """The runs that choose, then those that are reported at what was chosen."""
        with Stopping() as stopping:
            going = self._all(self.plan.tuning(), stopping)
            chosen = choose(self.plan, self.outcomes) if going else {}
            going = going and self._all(self.plan.reported(chosen), stopping)
        return Results(self.outcomes, self.failures, chosen, stopped=not going)

    def _all(self, jobs: Sequence[Job], stopping: Stopping) -> bool:
        """False when it was stopped before the end."""
        todo = [job for job in jobs if not self._known(job)]
        if jobs:
            self.say(f"{len(todo)} of {len(jobs)} {'tuning ' if jobs[0].tuning else ''}runs to do")
        with ThreadPoolExecutor(self.jobs) as pool:
            left = {pool.submit(self._one, job): job for job in todo}
            took: list[float] = []
            told = False
            try:
                while left:
                    done, _ = wait(left, timeout=LOOK, return_when=FIRST_COMPLETED)
                    for future in done:
                        self._collect(future, left.pop(future), took, len(left))
                    if stopping.asked and not told:
                        told = True
                        self.say(WORDS)
                        for future in left:
                            future.cancel()
                        self.runner.stop()
            except KeyboardInterrupt:  # the second Ctrl-C
                for future in left:
                    future.cancel()
                self.runner.stop()
                raise
        return not stopping.asked

    def _known(self, job: Job) -> bool:
        """Whether the run is there already; what it says is then read."""
        folder = self.folder / job.folder
        if not outcomes.finished(folder):
            return False
        self._read(job, folder)
        return True

    def _read(self, job: Job, folder: Path) -> None:
        try:
            self.outcomes[job] = outcomes.read(folder)
        except RunError as error:
            self.failures[job] = str(error)

    def _one(self, job: Job) -> float:
        """Seconds that it took."""
        folder, began = self.folder / job.folder, time.perf_counter()
        self.runner(self.plan.train_words(job), folder)
        if outcomes.finished(folder):
            tidy(folder, tuning=job.tuning)
        return time.perf_counter() - began

    def _collect(self, future: Future[float], job: Job, took: list[float], left: int) -> None:
        """A run is over, one way or another."""
        folder = self.folder / job.folder
        if future.cancelled():
            return
        try:
            seconds = future.result()
        except RunError as error:
            self.failures[job] = str(error)
            self.say(f"{job}: failed\n{error}")
            return
        if not outcomes.finished(folder):  # stopped, and to be gone on with
            return
        self._read(job, folder)
        if job in self.failures:
            self.say(f"{job}: {self.failures[job]}")
            return
        took.append(seconds)
        found = self.outcomes[job]
        ahead = f"  {left} left, about {_span(statistics.fmean(took) * left / self.jobs)}" if left else ""
        score = f"{found.before:.3f} -> {found.after:.3f}"
        self.say(
            f"{job}: {score}  {found.tokens[-1]:,.0f} tokens  {found.updates[-1]:.0f} updates  {seconds:.0f} s{ahead}"
        )


def mean_final(plan: Plan, label: str, value: float, found: Mapping[Job, Outcome]) -> float | None:
    """A value's mean final score over the tuning seeds; None where a run is missing."""
    jobs = [Job(label, value, seed) for seed in plan.tuning_seeds]
    return statistics.fmean(found[job].after for job in jobs) if all(job in found for job in jobs) else None


def choose(plan: Plan, found: Mapping[Job, Outcome]) -> dict[str, float | None]:
    """Each row's value: the best mean final score over the tuning seeds; of equals the smaller. A value of which a run failed
    is out."""
    chosen: dict[str, float | None] = {}
    for row in plan.rows:
        if not row.tuned:
            chosen[row.label] = row.grid[0] if row.grid else None
            continue
        means = {value: mean_final(plan, row.label, value, found) for value in sorted(row.grid)}
        there = {value: mean for value, mean in means.items() if mean is not None}
        if there:
            chosen[row.label] = max(there, key=lambda value: (there[value], -value))
    return chosen


def _span(seconds: float) -> str:
    """12 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
