"""Carry out the runs of a comparison in processes, and read their results."""

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
from typing import IO, Any

from policygrad.compare.plan import ComparisonPlan, Job
from policygrad.errors import RunError
from policygrad.models.loading import TRUST_FLAG
from policygrad.trackers.console import format_duration
from policygrad.trackers.jsonl import METRICS, read_rows
from policygrad.training.config.trust import code_in_argv
from policygrad.training.interrupts import STOP_MESSAGE, StopController
from policygrad.utils.argv import option_names, option_values
from policygrad.utils.filesystem import HAS_FILE_LOCKS, hold_lock, read_json, write_atomically

AXES = {"tokens": "sampled tokens", "updates": "updates", "seconds": "seconds of training"}
"""Axes of curves. Seconds are those of rollouts and updates, without evaluations, loading and checkpoints."""
FINAL_FRACTION = 0.2  # fraction of a run's steps over which its final diagnostics are averaged
# Metric of a step -> name of the final diagnostic.
DIAGNOSTICS = {
    "completions/mean_length": "length",
    "completions/truncated_ratio": "truncated",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/low": "clipped_low",
    "clip_ratio/high": "clipped_high",
}


@dataclass(frozen=True)
class RunOutcome:
    """Results of one run. The lists of the curve have equal length; the first point is before training."""

    tokens: tuple[float, ...]
    updates: tuple[float, ...]
    seconds: tuple[float, ...]
    score: tuple[float, ...]  # mean evaluation rewards
    score_stderr: float  # standard error of the last score over problems; 0 if unknown
    steps: int
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """Means over the last steps: length [tokens], fraction truncated, entropy [nats], KL to the reference [nats per token],
    fractions clipped."""
    cost: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds and wall seconds of the whole command, evaluations included."""
    lr: float | None = None
    """The largest learning rate of a step; None if the log has none."""
    gated_fraction: float | None = None
    """Fraction of tokens whose weight the gate cut or capped, mean over all steps; None for a gate that does neither."""

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
    """Return True for a finished run."""
    return (folder / "result.json").is_file()


def read_outcome(folder: Path) -> RunOutcome:
    """Read a finished run.

    Raises:
        RunError: The run has no evaluation scores, or its files are invalid.
    """
    try:
        return _parse_outcome(folder)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # the last three: values of a wrong type
        raise RunError(
            f"{folder} cannot be read as a finished run: {error}; delete it, then --resume repeats it"
        ) from error


def _parse_outcome(folder: Path) -> RunOutcome:
    result = read_json(folder / "result.json")
    rows = list[dict[str, Any]]()
    for number, (_, row) in enumerate(read_rows(folder / METRICS), 1):
        if row is None:
            raise ValueError(f"line {number} of {METRICS} is not a JSON object with a step")
        rows.append(row)
    steps = {row["step"]: row for row in rows if "tokens/sampled" in row}
    scores = {row["step"]: row for row in rows if row.get("eval/reward") is not None}
    last = result.get("steps", max(steps, default=0))
    if 0 not in scores or last not in scores:
        log = folder.with_name(folder.name + ".log")
        raise RunError(f"{folder} has no evaluation score before or after training: see the notes in {log}")
    tokens = updates = seconds = 0.0  # so far
    at = {0: (tokens, updates, seconds)}
    for step, row in sorted(steps.items()):
        tokens += row["tokens/sampled"]
        updates += row.get("updates/taken") or 0.0
        seconds += (row.get("time/rollout") or 0.0) + (row.get("time/update") or 0.0)
        at[step] = (tokens, updates, seconds)
    tail = [steps[step] for step in sorted(steps)[-math.ceil(FINAL_FRACTION * len(steps)) :]]
    finals = {name: [r[metric] for r in tail if r.get(metric) is not None] for metric, name in DIAGNOSTICS.items()}
    clipped = [
        r["clip_ratio/low"] + r["clip_ratio/high"] for r in steps.values() if r.get("clip_ratio/low") is not None
    ]
    points = sorted(step for step in scores if step in at)
    tokens_at, updates_at, seconds_at = zip(*(at[step] for step in points), strict=True)
    return RunOutcome(
        tokens=tokens_at,
        updates=updates_at,
        seconds=seconds_at,
        score=tuple(float(scores[step]["eval/reward"]) for step in points),
        score_stderr=float(scores[points[-1]].get("eval/reward_stderr") or 0.0),
        steps=int(last),
        diagnostics={name: sum(values) / len(values) for name, values in finals.items() if values},
        cost=read_cost(folder),
        lr=max((float(row["lr"]) for row in steps.values() if row.get("lr") is not None), default=None),
        gated_fraction=sum(clipped) / len(clipped) if clipped else None,
    )


def read_cost(folder: Path) -> dict[str, float]:
    """Read the cost of the run's processes; empty if it was not recorded. Raises RunError if the file is invalid."""
    path = folder.with_name(folder.name + ".cost.json")
    if not path.exists():
        return {}
    try:
        costs: dict[str, float] = read_json(path)
        if not all(isinstance(value, int | float) for value in costs.values()):
            raise ValueError("a value is not a number")
        return costs
    except (OSError, ValueError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(f"{path} cannot be read: {reason}; delete it, then the seconds are counted again") from error


PROGRAM = (sys.executable, "-P", "-m", "policygrad")
"""-P: `python -m` would put the current folder first, whose modules could hide the standard library's."""
LOG_TAIL_LINES = 12
REMOVABLE_OUTPUTS = ("checkpoints", "completions.jsonl", "model")
"""Outputs removed from finished tuning runs; from reported runs only the first."""


class SubprocessRunner:
    """Carries out each run in a process."""

    def __init__(self, threads: int, program: Sequence[str] = PROGRAM, allow: Sequence[str] = ()) -> None:
        """Create a runner without runs.

        Args:
            threads: Torch threads per run.
            program: The command before the arguments of `policygrad`.
            allow: User code that the runs' files may refer to, besides that in their arguments.
        """
        self.threads, self.program, self.allow = threads, tuple(program), tuple(allow)
        self._live: set[subprocess.Popen[bytes]] = set()
        self._lock, self._stopping = Lock(), False

    def __call__(self, argv: Sequence[str], folder: Path) -> None:
        """Start or resume `policygrad ARGV` in `folder`, until it is finished or `stop` is called.

        Raises:
            RunError: The run failed; the message ends with its output.
        """
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder.with_name(folder.name + ".lock"), wait=lambda: not self._stopping) as lock:
            if is_finished(folder):  # by a process that outlived an earlier comparison
                return
            if folder.exists() and not (folder / "run.toml").exists():  # killed before it wrote its configuration
                shutil.rmtree(folder)
            command, allow, trust = [*argv, "--output", str(folder)], {*self.allow}, False
            if (folder / "run.toml").exists():  # it has the options, but not the permissions
                command = ["train", "--resume", str(folder)]
                allow |= {*code_in_argv(argv), *option_values(argv, "--sampler.folder")}
                trust = TRUST_FLAG in option_names(argv)
            command += ["--allow-code", *sorted(allow)] if allow else []
            command += [TRUST_FLAG] if trust else []
            log = folder.with_name(folder.name + ".log")
            code = self._process([*command, "--plain"], folder, log, lock)
        if not is_finished(folder) and not self._stopping:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            how = f"ended with code {code}" if code else "was stopped early"
            raise RunError(f"policygrad {shlex.join(command)} {how}:\n{tail}")

    def _process(self, argv: Sequence[str], folder: Path, log: Path, lock: IO[bytes]) -> int:
        # a run is this program, as if it were started by hand, and inherits everything
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
                    start_new_session=True,  # we forward Ctrl-C, once
                    pass_fds=(lock.fileno(),) if HAS_FILE_LOCKS else (),  # held while the run lives, even if we die
                )
                self._live.add(process)
            try:
                used = dict[str, float]()
                if hasattr(os, "wait4"):  # it also has the CPU seconds of the process and its reward workers
                    _, status, usage = os.wait4(process.pid, 0)
                    process.returncode = os.waitstatus_to_exitcode(status)
                    used["cpu_seconds"] = usage.ru_utime + usage.ru_stime
                else:
                    process.wait()
            finally:
                with self._lock:
                    self._live.discard(process)
        used["seconds"] = time.perf_counter() - started
        before = read_cost(folder)  # of a resumed run, to which this is added
        rounded = {name: round(before.get(name, 0.0) + value, 1) for name, value in used.items()}
        rounded |= {"threads": self.threads, "processes": before.get("processes", 0) + 1}
        write_atomically(folder.with_name(folder.name + ".cost.json"), json.dumps(rounded) + "\n")
        return process.returncode

    def stop(self) -> None:
        """Stop runs after the current step, with a checkpoint; on a second call immediately."""
        with self._lock:
            repeated, self._stopping = self._stopping, True
            number = getattr(signal, "SIGKILL", signal.SIGTERM) if repeated else signal.SIGTERM
            for process in self._live:  # Popen.terminate would poll for the exit status, which another thread waits for
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)


def clean_run_folder(folder: Path, *, tuning: bool) -> None:
    """Remove outputs that are no longer needed: those of hundreds of runs could fill a disk."""
    for name in REMOVABLE_OUTPUTS if tuning else REMOVABLE_OUTPUTS[:1]:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


POLL_SECONDS = 0.2  # seconds between checks for Ctrl-C


@dataclass(frozen=True)
class Results:
    """The results of a plan so far."""

    outcomes: Mapping[Job, RunOutcome]
    failures: Mapping[Job, str]
    chosen: Mapping[str, float | None]
    """Row -> value of its tuned option; without rows of which no tuning run succeeded."""
    stopped: bool = False


@dataclass
class ComparisonRun:
    """Carries out a plan: several runs at a time, skipping finished ones."""

    plan: ComparisonPlan
    folder: Path
    runner: SubprocessRunner
    jobs: int
    """Runs at a time."""
    print_line: Callable[[str], None]
    outcomes: dict[Job, RunOutcome] = field(default_factory=dict)
    failures: dict[Job, str] = field(default_factory=dict)

    def run(self) -> Results:
        """Carry out the tuning runs, then the reported runs at the chosen values."""
        with StopController() as stopping:
            completed = self._run_jobs(self.plan.tuning_jobs(), stopping)
            chosen = choose_values(self.plan, self.outcomes) if completed else {}
            completed = completed and self._run_jobs(self.plan.reported_jobs(chosen), stopping)
        return Results(self.outcomes, self.failures, chosen, stopped=not completed)

    def _run_jobs(self, jobs: Sequence[Job], stopping: StopController) -> bool:
        """Carry out runs; return False if they were stopped early."""
        todo = [job for job in jobs if not is_finished(self.folder / job.folder)]
        for job in (job for job in jobs if job not in todo):
            self._read(job)
        if jobs:
            kind = "tuning run" if jobs[0].is_tuning else "run"
            self.print_line(f"{len(todo)} of {len(jobs)} {kind}{'s' * (len(jobs) != 1)} to do")
        with ThreadPoolExecutor(self.jobs) as pool:
            left = {pool.submit(self._carry_out, job): job for job in todo}
            took: list[float] = []
            announced = False
            try:
                while left:
                    done, _ = wait(left, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                    for future in done:
                        job = left.pop(future)
                        if not future.cancelled():
                            self._collect(future, job, took, len(left))
                    if stopping.requested and not announced:
                        announced = True
                        if not stopping.announced:
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

    def _read(self, job: Job) -> None:
        try:
            self.outcomes[job] = read_outcome(self.folder / job.folder)
        except RunError as error:
            self.failures[job] = str(error)

    def _carry_out(self, job: Job) -> float:
        """Carry out one run; return its seconds."""
        folder, started = self.folder / job.folder, time.perf_counter()
        self.runner(self.plan.train_argv(job), folder)
        if is_finished(folder):
            clean_run_folder(folder, tuning=job.is_tuning)
        return time.perf_counter() - started

    def _collect(self, future: Future[float], job: Job, took: list[float], left: int) -> None:
        """Read and print the result of a run that ended; one that was stopped, to be resumed, has none."""
        try:
            seconds = future.result()
        except RunError as error:
            self.failures[job] = str(error)
            self.print_line(f"{job}: failed\n{error}")
            return
        if not is_finished(self.folder / job.folder):
            return
        self._read(job)
        if job in self.failures:
            self.print_line(f"{job}: {self.failures[job]}")
            return
        took.append(seconds)
        outcome, remaining = self.outcomes[job], format_duration(statistics.fmean(took) * left / self.jobs)
        self.print_line(
            f"{job}: {outcome.before:.3f} -> {outcome.after:.3f}  {outcome.tokens[-1]:,.0f} tokens  "
            f"{outcome.updates[-1]:.0f} updates  {seconds:.0f} s"
            + (f"  {left} left, about {remaining}" if left else "")
        )


def mean_final_score(
    plan: ComparisonPlan, label: str, value: float, outcomes: Mapping[Job, RunOutcome]
) -> float | None:
    """Return the mean final score of a value over the tuning seeds; None if a run is missing."""
    jobs = [Job(label, value, seed) for seed in plan.tuning_seeds]
    return statistics.fmean(outcomes[job].after for job in jobs) if all(job in outcomes for job in jobs) else None


def choose_values(plan: ComparisonPlan, outcomes: Mapping[Job, RunOutcome]) -> dict[str, float | None]:
    """Return each row's value with the best mean final score over the tuning seeds, the smaller of equals.

    Values with a failed run are left out.
    """
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
