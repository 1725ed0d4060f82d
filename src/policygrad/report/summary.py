"""What a report answers first: the result with its error, what was trained, the equation, and the step in progress."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from policygrad.errors import PolicygradError
from policygrad.report.data import RunRecord, Series
from policygrad.trackers.console import Z_95, format_duration
from policygrad.trackers.jsonl import METRICS, RunNote, name_kind
from policygrad.training.config.serialization import format_option

RESULTS = {
    "eval/reward": "held-out reward",
    "eval/accuracy": "held-out accuracy",
    "eval/loss": "held-out loss",
    "reward": "reward in training",
    "loss": "loss in training",
}
"""Metrics of which a run's result is told, the first that it has."""
RECENT_STEPS = 20  # steps from which the length of the one in progress is estimated
LOCK = "lock"


@dataclass(frozen=True)
class ResultSummary:
    """The result of one series, over its runs."""

    label: str
    metric: str  # what it is of, in words; empty without any
    before: float | None
    after: float | None
    half_width: float  # of the change's 95 % interval over problems; 0 = not known
    low: float  # smallest and largest change of a run, where there are several
    high: float
    num_runs: int
    what: str  # model, algorithm, task, steps and time

    @property
    def change(self) -> str:
        """The change with its uncertainty: `+0.67 ± 0.06 at 95 %`, `+0.67 (+0.65 to +0.70 over 3 seeds)`."""
        if self.before is None or self.after is None:
            return ""
        change = self.after - self.before
        if self.num_runs > 1:
            return f"{change:+.3f} ({self.low:+.3f} to {self.high:+.3f} over {self.num_runs} runs)"
        if not self.half_width:
            return f"{change:+.3f}"
        noise = ", within noise" if abs(change) <= self.half_width else ""
        return f"{change:+.3f} ± {self.half_width:.3f} at 95 %{noise}"

    @property
    def interval(self) -> tuple[float, float] | None:
        """The change's 95 % interval, or its range over runs."""
        if self.before is None or self.after is None or not (self.half_width or self.num_runs > 1):
            return None
        change = self.after - self.before
        return (self.low, self.high) if self.num_runs > 1 else (change - self.half_width, change + self.half_width)


def summarise_result(group: Series) -> ResultSummary:
    """Summarise what came out of a series of runs."""
    runs = group.runs
    metric = next((name for name in RESULTS if any(len(run.metrics.get(name, ())) > 1 for run in runs)), "")
    ends = [_ends(run, metric) for run in runs if len(run.metrics.get(metric, ())) > 1]
    changes = [after - before for before, after in ends]
    errors = runs[0].metrics.get(f"{metric}_stderr", ())
    return ResultSummary(
        group.label,
        RESULTS.get(metric, ""),
        fmean(before for before, _ in ends) if ends else None,
        fmean(after for _, after in ends) if ends else None,
        Z_95 * math.hypot(errors[0][1], errors[-1][1]) if len(runs) == 1 and len(errors) > 1 else 0.0,
        min(changes, default=0.0),
        max(changes, default=0.0),
        len(ends),
        _describe_training(group),
    )


def _ends(run: RunRecord, metric: str) -> tuple[float, float]:
    """Return the first and the last value; of a metric of every step means over the first and the last tenth."""
    values = [value for _, value in run.metrics[metric]]
    many = 1 if metric.startswith("eval/") else max(1, len(values) // 10)
    return fmean(values[:many]), fmean(values[-many:])


def _describe_training(group: Series) -> str:
    """Return `dapo on embedded, model tiny, 40 of 40 steps in 34s`."""
    config, runs = group.config, group.runs
    algorithm = config.get("algorithm", {}).get("name", runs[0].kind)
    task = config.get("task") or config.get("data")
    done, planned = group.steps, config.get("steps")
    count = done if planned is None or done == str(planned) else f"{done} of {planned}"
    seconds = fmean(map(_count_seconds, runs))
    parts = [
        f"{algorithm} on {format_option(task)}" if task else str(algorithm),
        f"model {format_option(config['model'])}" if config.get("model") else "",
        f"{count} step{'s' * (count != '1')}" + (f" in {format_duration(seconds)}" if seconds else ""),
        f"{len(runs)} runs" if len(runs) > 1 else "",
    ]
    return ", ".join(filter(None, parts))


def _count_seconds(run: RunRecord) -> float:
    """Return the seconds of a run's steps."""
    return sum(x for name in ("time/rollout", "time/update", "time/step") for _, x in run.metrics.get(name, ()))


def load_equation(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the equation's symbols with their formulas in this run; empty where its parts are not policygrad's own."""
    from policygrad.algorithms import ALGORITHMS
    from policygrad.core.algorithm import Algorithm
    from policygrad.training.config.serialization import from_dict

    table = config.get("algorithm", {})
    if not table or any(":" in name for name in _part_names(table)):  # code of the user's is not imported for a page
        return {}
    try:
        usual = ALGORITHMS.get(str(table.get("name", "")), Algorithm())
        return dict(from_dict(table, usual, "run.toml", "algorithm").equation())
    except PolicygradError:
        return {}


def _part_names(value: Any) -> list[str]:
    """Return the names of all parts in nested tables."""
    if isinstance(value, Mapping):
        own = [str(value["part"])] if "part" in value else []
        return own + [name for inner in value.values() for name in _part_names(inner)]
    return [name for inner in value for name in _part_names(inner)] if isinstance(value, list) else []


@dataclass(frozen=True)
class StepInProgress:
    """The step that a run is taking."""

    run: str
    step: int
    of: int | None
    since: float  # when the step before it was logged, in seconds since 1970
    usual: float  # seconds of the last steps, on average; 0 before the first
    is_running: bool  # False if the process that held the run's folder has ended


def find_step_in_progress(run: RunRecord) -> StepInProgress | None:
    """Return the step that an unfinished run is taking; None for a finished one."""
    if run.result:
        return None
    times = [dict(run.metrics.get(name, ())) for name in ("time/rollout", "time/update", "time/step")]
    recent = sorted({step for each in times for step in each})[-RECENT_STEPS:]
    usual = fmean(sum(each.get(step, 0.0) for each in times) for step in recent) if recent else 0.0
    planned = run.config.get("steps")
    try:
        since = (run.folder / METRICS).stat().st_mtime
    except OSError:
        since = 0.0
    of = planned if isinstance(planned, int) else None
    return StepInProgress(run.folder.name, run.last_step + 1, of, since, usual, _is_running(run.folder / LOCK))


def _is_running(lock: Path) -> bool:
    """Return False if the process that the lock names is known to have ended; of another machine's nothing is known."""
    try:
        owner = json.loads(lock.read_text(encoding="utf-8"))
        pid, host = int(owner["pid"]), owner["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return True
    if host != socket.gethostname() or os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def list_notes(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return (which runs, note) of what the runs noted, each kind once, those of most runs first; "" for a single run."""
    by_kind: dict[str, list[tuple[RunRecord, RunNote]]] = {}
    for run in runs:
        for note in run.notes:
            by_kind.setdefault(name_kind(note.text), []).append((run, note))
    listed = list[tuple[str, str]]()
    for found in sorted(by_kind.values(), key=lambda found: -len(found)):
        notes = [note for _, note in found]
        text = RunNote(
            notes[-1].text, sum(note.count for note in notes), max(note.last_step for note in notes)
        ).describe()
        which = str(found[0][0].folder) if len(found) == 1 else f"{len(found)} of {len(runs)} runs"
        listed.append((which if len(runs) > 1 else "", text))
    return listed
