"""What a run's folder says of it: its configuration, its numbers, what it ended with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from policygrad.errors import RunError
from policygrad.trackers.console import count, duration
from policygrad.trackers.jsonl import COMPLETIONS, METRICS, read_rows
from policygrad.training.config.serialization import short
from policygrad.utils.filesystem import read_json, read_toml

CONFIGS = {"train": "run.toml", "sft": "sft.toml", "reward-model": "reward-model.toml"}
LARGEST = 1e300
"""Beyond which a metric's value is shown as this: sums and means stay finite."""
Points = tuple[tuple[int, float], ...]
"""(step, value), steps ascending."""


@dataclass(frozen=True)
class RunFiles:
    """A run, finished or not."""

    folder: Path
    kind: str
    """The command that trains it: train, sft, reward-model."""
    config: Mapping[str, Any]
    """Nested, as the folder's TOML has it."""
    metrics: Mapping[str, Points]
    result: Mapping[str, Any]
    """Empty until the run is over."""
    versions: Mapping[str, str]
    """Of packages, and the device; empty before the first checkpoint."""
    changes: tuple[str, ...] = ()
    """Options that a resumed run changed, each as `after step 12: lr 0.01 -> 0.003`."""

    @property
    def completions(self) -> Path:
        return self.folder / COMPLETIONS

    @property
    def last(self) -> int:
        """The newest step with a number; 0 before the first."""
        return max((points[-1][0] for points in self.metrics.values()), default=0)


def is_run(folder: Path) -> bool:
    """Whether it is the folder of a run, finished or not."""
    return any((folder / name).is_file() for name in CONFIGS.values())


def read(folder: Path, empty: bool = False) -> RunFiles:
    """The run in this folder. empty: whether one without a single number will do.

    Raises:
        RunError: no run in it; a file that cannot be read; no number yet.
    """
    kind = next((kind for kind, name in CONFIGS.items() if (folder / name).is_file()), None)
    if kind is None:
        what = "holds no run" if folder.is_dir() else "is no folder"
        raise RunError(
            f"{folder} {what}: give a folder that --output of train, sft or reward-model named, such as runs/dapo-1; "
            f"it has one of {', '.join(CONFIGS.values())} in it"
        )
    metrics = _metrics(folder / METRICS)
    if not metrics and not empty:
        raise RunError(
            f"{folder / METRICS} has no numbers yet: wait for the run's first step, or --watch shows them as they come"
        )
    result = _json(folder / "result.json")
    return RunFiles(folder, kind, _config(folder / CONFIGS[kind]), metrics, result, _versions(folder), _changes(folder))


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """A file's JSON lines; what is torn, because it is being written, is left out.

    Raises:
        RunError: the file cannot be read, or a line of it cannot be used.
    """
    try:
        yield from (row for _, row in read_rows(path) if row is not None)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}; see to its permissions, or put a copy of it back"
        ) from error


def _metrics(path: Path) -> dict[str, Points]:
    """By name; a step that is there twice counts as it was last written."""
    found: dict[str, dict[int, float]] = {}
    for row in rows(path):
        step = row.pop("step")
        for name, value in row.items():
            if isinstance(value, int | float):
                found.setdefault(name, {})[step] = max(-LARGEST, min(LARGEST, float(value)))
    return {name: tuple(sorted(points.items())) for name, points in found.items()}


def _config(path: Path) -> Mapping[str, Any]:
    try:
        found = read_toml(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(f"{path} cannot be read: {reason}; put a copy of it back") from error
    if not isinstance(algorithm := found.get("algorithm", {}), Mapping):
        raise RunError(
            f"{path}: algorithm is {algorithm!r:.40}, where a run writes a table; put a copy of the file back"
        )
    return found


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _versions(folder: Path) -> Mapping[str, str]:
    """Of the newest checkpoint, which says what the run began with."""
    for state in _states(folder):
        began = state.get("began")
        versions = began.get("versions") if isinstance(began, dict) else None
        if versions and isinstance(versions, dict):
            return {str(name): str(version) for name, version in versions.items()}
    return {}


def _changes(folder: Path) -> tuple[str, ...]:
    """Of the newest checkpoint, which has those of all before it."""
    changes = next(_states(folder), {}).get("changes")
    each = [c for c in changes if isinstance(c, dict)] if isinstance(changes, list) else []
    return tuple(
        f"after step {c.get('step')}: {', '.join(map(str, c['options']))}"
        for c in each
        if isinstance(c.get("options"), list)
    )


def _states(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Of the checkpoints, the newest first."""
    for path in sorted((folder / "checkpoints").glob("step-*/state.json"), reverse=True):
        state = _json(path).get("state")
        yield state if isinstance(state, dict) else {}


# Runs of one configuration as one series, and every metric over the steps, thinned so that a page can hold it.

POINTS = 300
"""Of a curve; more are put together."""
OWN = ("seed", "output", "track", "overwrite")
"""Options in which two runs of one configuration may differ."""
NAMED = 3
"""Differences that a label names."""


@dataclass(frozen=True)
class Series:
    """Runs that differ in their seed alone."""

    label: str
    runs: tuple[RunFiles, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.runs[0].config


def grouped(runs: Sequence[RunFiles]) -> tuple[Series, ...]:
    """By configuration, in the order given, each with a label that tells it from the others."""
    found: dict[str, list[RunFiles]] = {}
    for run in runs:
        key = json.dumps([run.kind, {k: v for k, v in run.config.items() if k not in OWN}], sort_keys=True, default=str)
        found.setdefault(key, []).append(run)
    groups = list(found.values())
    names = [_name(group[0]) for group in groups]
    flat = [dict(_flat({k: v for k, v in group[0].config.items() if k not in OWN})) for group in groups]
    return tuple(
        Series(_label(name, flat[i], [f for f, n in zip(flat, names, strict=True) if n == name]), tuple(groups[i]))
        for i, name in enumerate(names)
    )


def _name(run: RunFiles) -> str:
    algorithm = run.config.get("algorithm", {})
    return str(algorithm.get("name", run.kind)) if isinstance(algorithm, Mapping) else run.kind


def _label(name: str, own: Mapping[str, str], alike: Sequence[Mapping[str, str]]) -> str:
    """The name, and where others have it too what differs between them."""
    keys = dict.fromkeys(key for flat in alike for key in flat)
    differ = [key for key in keys if len({flat.get(key) for flat in alike}) > 1]
    said = [f"{key.removeprefix('algorithm.')}={own.get(key, '–')}" for key in differ[:NAMED]]
    more = [f"and {len(differ) - NAMED} more"] if len(differ) > NAMED else []
    return " ".join([name, *said, *more])


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names and values in words."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, short(value)


def drawn(series: Sequence[Series], name: str, most: int = POINTS) -> dict[str, Any]:
    """A metric for the script: {x: [step], lines: [{value, low, high} or None, by series], per: steps of a point}.

    A value is the mean over runs and over the steps that a point stands for; low and high are the ends of these, left out where
    there is nothing to put together.
    """
    points = [[run.metrics.get(name, ()) for run in group.runs] for group in series]
    every = [p for group in points for p in group]
    last = max((p[-1][0] for p in every if p), default=0)
    per = max(1, -(-last // most)) if max(map(len, every), default=0) > most else 1
    found = [_together(group, per, last) for group in points]
    xs = sorted({x for line in found for x in line})
    return {"x": xs, "lines": [_line(line, xs) for line in found], "per": per}


def _together(points: Sequence[Points], per: int, last: int) -> dict[int, list[float]]:
    """All values by the last step of the `per` that they are put together with."""
    found: dict[int, list[float]] = {}
    for run in points:
        for step, value in run:
            found.setdefault(min(last, -(-step // per) * per), []).append(value)
    return found


def _line(values: Mapping[int, Sequence[float]], xs: Sequence[int]) -> dict[str, Any] | None:
    if not values:
        return None
    line: dict[str, Any] = {"value": [_rounded(fmean(values[x])) if x in values else None for x in xs]}
    if any(len(v) > 1 for v in values.values()):
        line["low"] = [_rounded(min(values[x])) if x in values else None for x in xs]
        line["high"] = [_rounded(max(values[x])) if x in values else None for x in xs]
    return line


def _rounded(x: float) -> float:
    """To what a pixel can show."""
    return float(f"{x:.5g}")


# What a configuration's steps took, and what of it was spared: sums over steps, means over runs.

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
    "dynamic/carried": "groups kept for the step after",
    "dynamic/discarded": "groups with spread discarded",
    "updates/taken": "updates taken",
    "updates/skipped": "updates skipped",
    "publication/bytes": "bytes of weights published",
}


@dataclass(frozen=True)
class Cost:
    """Of one series."""

    label: str
    sums: tuple[tuple[str, str, str], ...]
    """(metric, what it counts, how many)."""
    said: tuple[str, ...]
    """What was spared, or spent twice, in sentences."""
    times: tuple[tuple[str, str, float], ...]
    """(what, mean seconds in words, share of the step)."""


def cost(group: Series) -> Cost:
    """Means over the series' runs."""
    known = {name: x for name in SUMS if (x := _total(group, name)) is not None}
    shown = {name: x for name, x in known.items() if x or name in ("tokens/sampled", "completions/sampled")}
    step = {what: x for name, what in TIMES.items() if (x := _mean(group, name)) is not None}
    whole = sum(step.values()) or 1.0
    return Cost(
        group.label,
        tuple((name, SUMS[name], count(x)) for name, x in shown.items()),
        tuple(_said(known)),
        tuple((what, _seconds(x), x / whole) for what, x in step.items()),
    )


def _said(known: dict[str, float]) -> Sequence[str]:
    said = []
    sampled, trained = known.get("completions/sampled", 0.0), known.get("completions/trained", 0.0)
    if trained and sampled > trained:
        said.append(
            f"{sampled / trained:.2f} completions were sampled for each one trained on: filters left out the rest."
        )
    offered, computed = known.get("completions/offered", 0.0), known.get("completions/computed", 0.0)
    if offered > computed > 0:
        said.append(f"{1 - computed / offered:.0%} of the forward and backward passes were spared: zero coefficients.")
    if carried := known.get("dynamic/carried"):
        said.append(f"{count(carried)} groups for which a step had no room were used in the next one.")
    return said


def _total(group: Series, name: str) -> float | None:
    found = [sum(x for _, x in run.metrics[name]) for run in group.runs if name in run.metrics]
    return fmean(found) if found else None


def _mean(group: Series, name: str) -> float | None:
    found = [x for run in group.runs for _, x in run.metrics.get(name, ())]
    return fmean(found) if found else None


def _seconds(x: float) -> str:
    """0.52 s, 1m40s."""
    return f"{x:.2g} s" if x < 10 else duration(x)
