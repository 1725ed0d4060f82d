"""Read a run's folder, group runs by configuration, and compute their curves and costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from policygrad.errors import RunError
from policygrad.trackers.console import Z_95, format_count, format_duration
from policygrad.trackers.jsonl import COMPLETIONS, METRICS, NOTES, RunNote, read_rows, summarise_notes
from policygrad.training.config.serialization import format_option
from policygrad.utils.filesystem import read_json, read_toml

CONFIG_FILES = {"train": "run.toml", "sft": "sft.toml", "reward-model": "reward-model.toml"}
MAX_VALUE = 1e300  # limit of metric values, so that sums and means stay finite
Points = tuple[tuple[int, float], ...]  # (step, value), steps ascending


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's folder. The run may be unfinished."""

    folder: Path
    kind: str  # the command that trained it: train, sft or reward-model
    config: Mapping[str, Any]  # nested, as in the folder's TOML file
    metrics: Mapping[str, Points]
    result: Mapping[str, Any]  # empty until the run is finished
    versions: Mapping[str, str]  # versions of packages, and the device; empty before the first checkpoint
    verified: str = ""  # the outcome of `policygrad verify`, as a sentence; "" = it was not verified
    changes: tuple[str, ...] = ()  # options changed on resume, as `after step 12: lr 0.01 -> 0.003`
    notes: tuple[RunNote, ...] = ()  # what the run noted, the most frequent first

    @property
    def completions_file(self) -> Path:
        return self.folder / COMPLETIONS

    @property
    def last_step(self) -> int:
        """The last step with a metric; 0 before the first."""
        return max((points[-1][0] for points in self.metrics.values()), default=0)


def is_run(folder: Path) -> bool:
    """Return True for the folder of a run, finished or not."""
    return any((folder / name).is_file() for name in CONFIG_FILES.values())


def read_run(folder: Path, empty: bool = False) -> RunRecord:
    """Read the run in a folder. empty: Accept a run without any metrics.

    Raises:
        RunError: The folder has no run, a file cannot be read, or there are no metrics yet.
    """
    kind = next((kind for kind, name in CONFIG_FILES.items() if (folder / name).is_file()), None)
    if kind is None:
        what = "holds no run" if folder.is_dir() else "is not a folder"
        raise RunError(
            f"{folder} {what}: give the --output folder of train, sft or reward-model, such as runs/dapo-1, which "
            f"contains {' or '.join(CONFIG_FILES.values())}"
        )
    by_step: dict[str, dict[int, float]] = {}  # of a step written twice the last line counts
    for row in read_json_rows(folder / METRICS):
        step = row.pop("step")
        for name, value in row.items():
            if isinstance(value, int | float):
                by_step.setdefault(name, {})[step] = max(-MAX_VALUE, min(MAX_VALUE, float(value)))
    metrics = {name: tuple(sorted(points.items())) for name, points in by_step.items()}
    if not metrics and not empty:
        raise RunError(f"{folder / METRICS} has no metrics yet: wait for the run's first step, or use --watch")
    config = _read_config(folder / CONFIG_FILES[kind])
    versions, changes = _read_history(folder)
    verified = str(_json(folder / "verify.json").get("summary", ""))
    notes = summarise_notes(read_json_rows(folder / NOTES))
    return RunRecord(folder, kind, config, metrics, _json(folder / "result.json"), versions, verified, changes, notes)


def read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON lines of a file, without incomplete ones, which are being written.

    Raises:
        RunError: The file cannot be read, or a line cannot be used.
    """
    try:
        yield from (row for _, row in read_rows(path) if row is not None)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}; check its permissions, or restore it from a copy"
        ) from error


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = read_toml(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(f"{path} cannot be read: {reason}; restore it from a copy") from error
    if not isinstance(algorithm := config.get("algorithm", {}), Mapping):
        raise RunError(f"{path}: algorithm is {algorithm!r:.40}, but should be a table; restore the file from a copy")
    return config


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_history(folder: Path) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Return the versions in the newest checkpoint that has them, and the changed options in the newest, which has all."""
    newest_first = sorted((folder / "checkpoints").glob("step-*/state.json"), reverse=True)
    states = [state if isinstance(state := _json(path).get("state"), dict) else {} for path in newest_first]
    fingerprints = [f for state in states if isinstance(f := state.get("fingerprint"), dict)]
    versions = next((v for f in fingerprints if (v := f.get("versions")) and isinstance(v, dict)), {})
    changes = states[0].get("option_changes") if states else None
    each = [c for c in changes if isinstance(c, dict)] if isinstance(changes, list) else []
    return {str(name): str(version) for name, version in versions.items()}, tuple(
        f"after step {c.get('step')}: {', '.join(map(str, c['options']))}"
        for c in each
        if isinstance(c.get("options"), list)
    )


MAX_POINTS = 300  # maximum points of a curve; steps beyond it are merged
PER_RUN_OPTIONS = (
    "seed",
    "output",
    "track",
    "trace_mib",
    "metrics_port",
    "overwrite",
)  # options in which runs of one configuration may differ
MAX_NAMED_OPTIONS = 3  # maximum number of differing options in a label
MAX_VALUE_CHARS = 24  # maximum length of an option's value in a label


@dataclass(frozen=True)
class Series:
    """Runs that differ only in their seed."""

    label: str
    runs: tuple[RunRecord, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.runs[0].config

    @property
    def steps(self) -> str:
        """Number of steps done: 16, or `12 to 16` if runs differ."""
        done = sorted({run.last_step for run in self.runs})
        return " to ".join(map(str, dict.fromkeys((done[0], done[-1]))))


def group_runs(runs: Sequence[RunRecord]) -> tuple[Series, ...]:
    """Group runs by configuration, in the order given, each with a unique label."""
    by_config: dict[str, list[RunRecord]] = {}
    for run in runs:
        key = json.dumps([run.kind, _shared_options(run)], sort_keys=True, default=str)
        by_config.setdefault(key, []).append(run)
    groups = [
        (run.config.get("algorithm", {}).get("name", run.kind), dict(_flatten(_shared_options(run))))
        for run, *_ in by_config.values()
    ]
    series = []
    for (name, options), members in zip(groups, by_config.values(), strict=True):
        same = [o for n, o in groups if n == name]
        keys = dict.fromkeys(key for o in same for key in o)
        differing = [key for key in keys if len({o.get(key) for o in same}) > 1]
        label = [f"{_shorten_key(key, differing)}={_shorten_value(options.get(key, '–'))}" for key in differing]
        if len(label) > MAX_NAMED_OPTIONS:
            label[MAX_NAMED_OPTIONS:] = [f"and {len(label) - MAX_NAMED_OPTIONS} more"]
        if not label or len({n for n, _ in groups}) > 1:  # what all runs have in common names none of them
            label.insert(0, str(name))
        series.append(Series(" ".join(label), tuple(members)))
    labels = [each.label for each in series]
    return tuple(
        replace(each, label=f"{each.label} ({each.runs[0].folder.name})") if labels.count(each.label) > 1 else each
        for each in series
    )


def _shorten_key(key: str, keys: Sequence[str]) -> str:
    """Return the last word of an option's name, where no other of these ends in it."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key.removeprefix("algorithm.")


def _shorten_value(value: str) -> str:
    """Return the end of a path, and the beginning of another long value."""
    value = value.rstrip("/").rpartition("/")[2] or value
    return value if len(value) <= MAX_VALUE_CHARS else f"{value[: MAX_VALUE_CHARS - 1]}…"


def _shared_options(run: RunRecord) -> dict[str, Any]:
    return {name: value for name, value in run.config.items() if name not in PER_RUN_OPTIONS}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names and formatted values."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, format_option(value)


def build_curves(series: Sequence[Series], name: str, most: int = MAX_POINTS) -> dict[str, Any]:
    """Return a metric for the script: {x: [step], lines: [{value, low, high} or None, by series], per: steps per point}.

    `value` is the mean over runs and over the steps of a point, `low` and `high` are the smallest and largest of these; they are
    left out if every point has one value. Of a single run with a standard error (`NAME_stderr`) they are the 95 % interval, and
    `error` is true.
    """
    points = [[run.metrics.get(name, ()) for run in group.runs] for group in series]
    every = [p for group in points for p in group]
    last = max((p[-1][0] for p in every if p), default=0)
    per = max(1, -(-last // most)) if max(map(len, every), default=0) > most else 1
    merged: list[dict[int, list[float]]] = []  # by series, all values by the last of the `per` steps that make a point
    for group in points:
        merged.append({})
        for step, value in chain.from_iterable(group):
            merged[-1].setdefault(min(last, -(-step // per) * per), []).append(value)
    xs = sorted({x for values in merged for x in values})
    lines = [_line(values, xs) if values else None for values in merged]
    has_error = False
    for line, each in zip(lines, series, strict=True):  # of one run the band is what its evaluation's error says
        errors = dict(each.runs[0].metrics.get(f"{name}_stderr", ()))
        if line is not None and "low" not in line and len(each.runs) == 1 and any(errors.values()):
            has_error = True
            for key, sign in (("low", -1), ("high", 1)):
                line[key] = [
                    None if y is None else _round(y + sign * Z_95 * errors.get(x, 0.0))
                    for x, y in zip(xs, line["value"], strict=True)
                ]
    return {"x": xs, "lines": lines, "per": per, **({"error": True} if has_error else {})}


def _line(values: Mapping[int, Sequence[float]], xs: Sequence[int]) -> dict[str, Any]:
    summaries: dict[str, Callable[[Sequence[float]], float]] = {"value": fmean}
    if any(len(v) > 1 for v in values.values()):
        summaries |= {"low": min, "high": max}
    # Five digits are more than a pixel shows.
    return {key: [_round(f(values[x])) if x in values else None for x in xs] for key, f in summaries.items()}


def _round(x: float) -> float:
    return float(f"{x:.5g}")


TIMES = {"time/rollout": "waiting for samples and rewards", "time/update": "learning", "time/step": "the step"}
SUMS = {
    "tokens/sampled": "tokens sampled",
    "tokens/greedy": "of these for greedy baselines",
    "tokens/values": "of these for values",
    "tokens/vine": "of these for the vine",
    "tokens": "tokens read",
    "completions/sampled": "completions sampled",
    "completions/trained": "of these trained on",
    "completions/offered": "completions offered to updates",
    "completions/computed": "of these computed",
    "tokens/offered": "tokens of their texts, each by itself",
    "tokens/computed": "of these computed, shared ones once",
    "dynamic/leftover": "groups kept for the step after",
    "dynamic/discarded": "groups with spread discarded",
    "replay/used": "groups of earlier steps trained on again",
    "updates/taken": "updates taken",
    "updates/skipped": "updates skipped",
    "publication/bytes": "bytes of weights published",
}


@dataclass(frozen=True)
class RunCost:
    """Cost of one series: sums over steps, means over runs."""

    label: str
    sums: tuple[tuple[str, str, str], ...]  # (metric, description, formatted sum)
    notes: tuple[str, ...]  # sentences about what was saved, or sampled in vain
    times: tuple[tuple[str, str, float], ...]  # (description, formatted mean seconds, fraction of the step)


def compute_cost(group: Series) -> RunCost:
    """Compute the mean cost over the series' runs."""
    per_run = {
        name: [sum(x for _, x in run.metrics[name]) for run in group.runs if name in run.metrics] for name in SUMS
    }
    totals = {name: fmean(sums) for name, sums in per_run.items() if sums}
    per_step = {what: [x for run in group.runs for _, x in run.metrics.get(name, ())] for name, what in TIMES.items()}
    step = {what: fmean(seconds) for what, seconds in per_step.items() if seconds}
    displayed = {name: x for name, x in totals.items() if x or name in ("tokens/sampled", "completions/sampled")}
    notes = []
    sampled, trained = totals.get("completions/sampled", 0.0), totals.get("completions/trained", 0.0)
    if trained and sampled > trained:
        notes.append(f"{sampled / trained:.2f} completions were sampled per trained one; filters dropped the others.")
    offered, computed = totals.get("completions/offered", 0.0), totals.get("completions/computed", 0.0)
    if offered > computed > 0:
        notes.append(
            f"{1 - computed / offered:.0%} of the forward and backward passes were skipped, for zero coefficients."
        )
    texts, read = totals.get("tokens/offered", 0.0), totals.get("tokens/computed", 0.0)
    if texts > read > 0:
        notes.append(f"{1 - read / texts:.0%} of the tokens in updates were not computed again, as texts share them.")
    if carried := totals.get("dynamic/leftover"):
        notes.append(f"{format_count(carried)} leftover groups of a step were used in the next one.")
    if replayed := totals.get("replay/used"):
        notes.append(f"{format_count(replayed)} groups of earlier steps took the place of groups of equal rewards.")
    total_seconds = sum(step.values()) or 1.0
    return RunCost(
        group.label,
        tuple((name, SUMS[name], format_count(x)) for name, x in displayed.items()),
        tuple(notes),
        tuple((what, f"{x:.2g} s" if x < 10 else format_duration(x), x / total_seconds) for what, x in step.items()),
    )
