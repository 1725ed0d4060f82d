"""One run in a process of its own: `policygrad train`, or `--resume` where it was stopped."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import IO, Any, Protocol

from policygrad.compare.plan import ComparisonPlan, Job, option_names, option_values
from policygrad.errors import RunError
from policygrad.models.loading import TRUST_FLAG
from policygrad.trackers.jsonl import METRICS, read_rows
from policygrad.training.config.trust import code_in_argv
from policygrad.training.interrupts import STOP_MESSAGE, StopController
from policygrad.utils.filesystem import HAS_FILE_LOCKS, hold_lock, read_json, write_atomically

# What a finished run's folder says: its learning curve over tokens, updates and seconds, and what it cost.

AXES = {"tokens": "sampled tokens", "updates": "updates", "seconds": "seconds of training"}
"""What a curve may be drawn over. Seconds are those of rollouts and updates: evaluations, loading and checkpoints are left out."""
FINAL_FRACTION = 0.2
"""The share of a run's last steps over which what it was like at its end is averaged."""
DIAGNOSTICS = {
    "completions/mean_length": "length",
    "completions/truncated_ratio": "truncated",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/low": "clipped_low",
    "clip_ratio/high": "clipped_high",
}
"""Metrics of a step -> what they are called at a run's end."""


@dataclass(frozen=True)
class RunOutcome:
    """One run. The curve's lists go together; their first point is before training."""

    tokens: tuple[float, ...]
    updates: tuple[float, ...]
    seconds: tuple[float, ...]
    score: tuple[float, ...]
    """Held-out means."""
    score_stderr: float
    """Standard error of the last one over the held-out problems; 0 where it is not known."""
    steps: int
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """What its last steps were like: length [tokens], share cut off, entropy [nats], KL to the reference [nats a token],
    shares clipped."""
    cost: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds, seconds on the clock and MiB of the whole command, evaluations included."""
    gated_fraction: float | None = None
    """Fraction of the tokens at which the gate cut or capped the weight, mean over all steps; None for a gate that does neither."""

    @property
    def before(self) -> float:
        return self.score[0]

    @property
    def after(self) -> float:
        return self.score[-1]

    def axis(self, name: str) -> tuple[float, ...]:
        """One of `AXES`."""
        return getattr(self, name)  # type: ignore[no-any-return]


def is_finished(folder: Path) -> bool:
    """Whether a run is at its end."""
    return (folder / "result.json").is_file()


def read_outcome(folder: Path) -> RunOutcome:
    """A finished run.

    Raises:
        RunError: the run has no held-out scores, or files that are no run's.
    """
    try:
        return _outcome(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the others: values of another kind
        raise RunError(
            f"{folder} cannot be read as a finished run: {error}; delete it, and --resume runs it again"
        ) from error


def _outcome(folder: Path) -> RunOutcome:
    result = read_json(folder / "result.json")
    rows = list[dict[str, Any]]()
    for number, (_, row) in enumerate(read_rows(folder / METRICS), 1):
        if row is None:
            raise ValueError(f"line {number} of {METRICS} is no JSON object with a step")
        rows.append(row)
    steps = {row["step"]: row for row in rows if "tokens/sampled" in row}
    scores = {row["step"]: row for row in rows if row.get("eval/reward") is not None}
    last = result.get("steps", max(steps, default=0))
    if 0 not in scores or last not in scores:
        raise RunError(f"{folder} has no held-out score before or after training: see the notes in {_log(folder)}")
    at = {0: (0.0, 0.0, 0.0)} | _totals(steps)
    points = sorted(step for step in scores if step in at)
    tokens, updates, seconds = zip(*(at[step] for step in points), strict=True)
    return RunOutcome(
        tokens=tokens,
        updates=updates,
        seconds=seconds,
        score=tuple(float(scores[step]["eval/reward"]) for step in points),
        score_stderr=float(scores[points[-1]].get("eval/reward_stderr") or 0.0),
        steps=int(last),
        diagnostics=_diagnostics([steps[step] for step in sorted(steps)]),
        cost=read_cost(folder),
        gated_fraction=_gated(list(steps.values())),
    )


def read_cost(folder: Path) -> dict[str, float]:
    """What the run's processes took, as the runner wrote it down; empty where nobody did.

    Raises:
        RunError: the file is not what a runner writes.
    """
    path = folder.with_name(folder.name + ".cost.json")
    if not path.exists():
        return {}
    try:
        costs: dict[str, float] = read_json(path)
        if not all(isinstance(value, int | float) for value in costs.values()):
            raise ValueError("a value is no number")
        return costs
    except (OSError, ValueError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(f"{path} cannot be read: {reason}; delete it, and the seconds are counted anew") from error


def _log(folder: Path) -> Path:
    return folder.with_name(folder.name + ".log")


def _totals(steps: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[float, float, float]]:
    """Tokens, updates and seconds up to and with every step."""
    totals, tokens, updates, seconds = {}, 0.0, 0.0, 0.0
    for step in sorted(steps):
        row = steps[step]
        tokens += row["tokens/sampled"]
        updates += row.get("updates/taken") or 0.0
        seconds += (row.get("time/rollout") or 0.0) + (row.get("time/update") or 0.0)
        totals[step] = (tokens, updates, seconds)
    return totals


def _diagnostics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the last fifth of the steps, of those metrics that they have."""
    tail = rows[-math.ceil(FINAL_FRACTION * len(rows)) :] if rows else ()
    means = {}
    for metric, name in DIAGNOSTICS.items():
        values = [row[metric] for row in tail if row.get(metric) is not None]
        if values:
            means[name] = sum(values) / len(values)
    return means


def _gated(rows: Sequence[Mapping[str, Any]]) -> float | None:
    values = [row["clip_ratio/low"] + row["clip_ratio/high"] for row in rows if row.get("clip_ratio/low") is not None]
    return sum(values) / len(values) if values else None


PROGRAM = (sys.executable, "-P", "-m", "policygrad")
"""-P: without it modules of the current folder would hide the standard library's, as `python -m` puts that folder first."""
LOG_TAIL_LINES = 12
"""Lines of a failed run's log that are shown."""
REMOVABLE_OUTPUTS = ("checkpoints", "completions.jsonl", "model")
"""What a run of a tuning seed leaves out when it is done; a reported one only its checkpoints."""


class Runner(Protocol):
    """Does one run. Anything with these two methods can stand in for the processes."""

    def __call__(self, argv: Sequence[str], folder: Path) -> None:
        """Begins or goes on with the run of `policygrad WORDS` in `folder`, until it is finished or `stop` is called.

        Raises:
            RunError: it failed; with the end of what it said.
        """
        ...

    def stop(self) -> None:
        """Has whatever is running end soon, so that it can be gone on with."""
        ...


class SubprocessRunner:
    """A process per run, each with its share of the cores. program: what stands before the words of `policygrad`. allow: code
    that files of the runs may name, besides what their words name."""

    def __init__(self, threads: int, program: Sequence[str] = PROGRAM, allow: Sequence[str] = ()) -> None:
        self.threads, self.program, self.allow = threads, tuple(program), tuple(allow)
        self._live: set[subprocess.Popen[bytes]] = set()
        self._lock, self._stopping = Lock(), False

    def __call__(self, argv: Sequence[str], folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder.with_name(folder.name + ".lock"), wait=lambda: not self._stopping) as lock:
            if is_finished(folder):  # by a process that outlived the comparison that began it
                return
            if folder.exists() and not (folder / "run.toml").exists():  # killed before it was anything
                shutil.rmtree(folder)
            resumes = (folder / "run.toml").exists()
            named = (*code_in_argv(argv), *option_values(argv, "--sampler.folder")) if resumes else ()
            allow = sorted({*self.allow, *named})  # the run's file permits nothing itself
            permitted = ["--allow-code", *allow] if allow else []
            if resumes and TRUST_FLAG in option_names(argv):
                permitted += [TRUST_FLAG]
            command = ["train", "--resume", str(folder)] if resumes else [*argv, "--output", str(folder)]
            command += permitted
            log = folder.with_name(folder.name + ".log")
            code = self._process([*command, "--plain"], folder, log, lock)
        if not is_finished(folder) and not self._stopping:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            how = f"ended with code {code}" if code else "was stopped before its end"
            raise RunError(f"policygrad {shlex.join(command)} {how}:\n{tail}")

    def _process(self, argv: Sequence[str], folder: Path, log: Path, lock: IO[bytes]) -> int:
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        command, started = [*self.program, *argv], time.perf_counter()
        with log.open("ab") as output:
            with self._lock:
                if self._stopping:
                    return 0
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is ours to pass on, once
                    pass_fds=(lock.fileno(),)
                    if HAS_FILE_LOCKS
                    else (),  # held for as long as the run lives, whatever becomes of us
                )
                self._live.add(process)
            try:
                used = _wait(process)
            finally:
                with self._lock:
                    self._live.discard(process)
        _add_cost(folder, used | {"seconds": time.perf_counter() - started}, self.threads)
        return process.returncode

    def stop(self) -> None:
        """The first time runs end after the step at hand, with a checkpoint; the second time at once."""
        with self._lock:
            repeated, self._stopping = self._stopping, True
            number = getattr(signal, "SIGKILL", signal.SIGTERM) if repeated else signal.SIGTERM
            for (
                process
            ) in self._live:  # Popen's own terminate would look for its end, which is being waited for elsewhere
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)


def _wait(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Waits, and returns this child's own CPU seconds, its reward workers' included, where the system tells."""
    if not hasattr(os, "wait4"):
        process.wait()
        return {}
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {"cpu_seconds": usage.ru_utime + usage.ru_stime}


def _add_cost(folder: Path, used: dict[str, float], threads: int) -> None:
    """Of a run that was stopped and gone on with, seconds add up."""
    before = read_cost(folder)
    rounded = {name: round(before.get(name, 0.0) + value, 1) for name, value in used.items()}
    rounded |= {"threads": threads, "processes": before.get("processes", 0) + 1}
    write_atomically(folder.with_name(folder.name + ".cost.json"), json.dumps(rounded) + "\n")


def clean_run_folder(folder: Path, *, tuning: bool) -> None:
    """Takes away what a finished run is not needed for any more: of hundreds of runs it would fill a disk."""
    for name in REMOVABLE_OUTPUTS if tuning else REMOVABLE_OUTPUTS[:1]:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


# Runs what a plan asks for and is not there yet, some at a time; what is finished is not run again.

POLL_SECONDS = 0.2
"""Seconds between looks at whether Ctrl-C was pressed."""


@dataclass(frozen=True)
class Results:
    """What has come of a plan so far."""

    outcomes: Mapping[Job, RunOutcome]
    failures: Mapping[Job, str]
    """What a run that failed said last."""
    chosen: Mapping[str, float | None]
    """Each row's value of its knob; a row of whose tuning runs none succeeded is not in it."""
    stopped: bool = False
    """By a signal, before everything was done."""


@dataclass
class ComparisonRun:
    """A comparison under way."""

    plan: ComparisonPlan
    folder: Path
    runner: Runner
    jobs: int
    """Runs at a time."""
    print_line: Callable[[str], None]
    outcomes: dict[Job, RunOutcome] = field(default_factory=dict)
    failures: dict[Job, str] = field(default_factory=dict)

    def run(self) -> Results:
        """The runs that choose, then those that are reported at what was chosen."""
        with StopController() as stopping:
            completed = self._run_jobs(self.plan.tuning_jobs(), stopping)
            chosen = choose_values(self.plan, self.outcomes) if completed else {}
            completed = completed and self._run_jobs(self.plan.reported_jobs(chosen), stopping)
        return Results(self.outcomes, self.failures, chosen, stopped=not completed)

    def _run_jobs(self, jobs: Sequence[Job], stopping: StopController) -> bool:
        """False when it was stopped before the end."""
        todo = [job for job in jobs if not self._load_finished(job)]
        if jobs:
            self.print_line(f"{len(todo)} of {len(jobs)} {'tuning ' if jobs[0].is_tuning else ''}runs to do")
        with ThreadPoolExecutor(self.jobs) as pool:
            left = {pool.submit(self._one, job): job for job in todo}
            took: list[float] = []
            announced = False
            try:
                while left:
                    done, _ = wait(left, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                    for future in done:
                        self._collect(future, left.pop(future), took, len(left))
                    if stopping.requested and not announced:
                        announced = True
                        self.print_line(STOP_MESSAGE)
                        for future in left:
                            future.cancel()
                        self.runner.stop()
            except KeyboardInterrupt:  # the second Ctrl-C
                for future in left:
                    future.cancel()
                self.runner.stop()
                raise
        return not stopping.requested

    def _load_finished(self, job: Job) -> bool:
        """Whether the run is there already; what it says is then read."""
        folder = self.folder / job.folder
        if not is_finished(folder):
            return False
        self._read(job, folder)
        return True

    def _read(self, job: Job, folder: Path) -> None:
        try:
            self.outcomes[job] = read_outcome(folder)
        except RunError as error:
            self.failures[job] = str(error)

    def _one(self, job: Job) -> float:
        """Seconds that it took."""
        folder, started = self.folder / job.folder, time.perf_counter()
        self.runner(self.plan.train_argv(job), folder)
        if is_finished(folder):
            clean_run_folder(folder, tuning=job.is_tuning)
        return time.perf_counter() - started

    def _collect(self, future: Future[float], job: Job, took: list[float], left: int) -> None:
        """A run is over, one way or another."""
        folder = self.folder / job.folder
        if future.cancelled():
            return
        try:
            seconds = future.result()
        except RunError as error:
            self.failures[job] = str(error)
            self.print_line(f"{job}: failed\n{error}")
            return
        if not is_finished(folder):  # stopped, and to be gone on with
            return
        self._read(job, folder)
        if job in self.failures:
            self.print_line(f"{job}: {self.failures[job]}")
            return
        took.append(seconds)
        outcome = self.outcomes[job]
        remaining = f"  {left} left, about {_span(statistics.fmean(took) * left / self.jobs)}" if left else ""
        score = f"{outcome.before:.3f} -> {outcome.after:.3f}"
        self.print_line(
            f"{job}: {score}  {outcome.tokens[-1]:,.0f} tokens  {outcome.updates[-1]:.0f} updates  {seconds:.0f} s{remaining}"
        )


def mean_final_score(
    plan: ComparisonPlan, label: str, value: float, outcomes: Mapping[Job, RunOutcome]
) -> float | None:
    """A value's mean final score over the tuning seeds; None where a run is missing."""
    jobs = [Job(label, value, seed) for seed in plan.tuning_seeds]
    return statistics.fmean(outcomes[job].after for job in jobs) if all(job in outcomes for job in jobs) else None


def choose_values(plan: ComparisonPlan, outcomes: Mapping[Job, RunOutcome]) -> dict[str, float | None]:
    """Each row's value: the best mean final score over the tuning seeds; of equals the smaller. A value of which a run failed
    is out."""
    chosen: dict[str, float | None] = {}
    for row in plan.rows:
        if not row.is_tuned:
            chosen[row.label] = row.grid[0] if row.grid else None
            continue
        means = {value: mean_final_score(plan, row.label, value, outcomes) for value in sorted(row.grid)}
        complete = {value: mean for value, mean in means.items() if mean is not None}
        if complete:
            chosen[row.label] = max(complete, key=lambda value: (complete[value], -value))
    return chosen


def _span(seconds: float) -> str:
    """12 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
