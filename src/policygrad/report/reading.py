"""What a run's folder says of it: its configuration, its numbers, what it ended with."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policygrad.errors import RunError
from policygrad.trackers.jsonl import COMPLETIONS, METRICS

CONFIGS = {"train": "run.toml", "sft": "sft.toml", "reward-model": "reward-model.toml"}
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
    """A file's JSON lines; what is torn, because it is being written, is left out."""
    try:
        with path.open("rb") as file:
            for line in file:
                row = parsed(line)
                if row is not None:
                    yield row
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; see to its permissions") from error


def parsed(line: bytes) -> dict[str, Any] | None:
    """An object with a step; None for anything else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _metrics(path: Path) -> dict[str, Points]:
    """By name; a step that is there twice counts as it was last written."""
    found: dict[str, dict[int, float]] = {}
    for row in rows(path):
        step = row.pop("step")
        for name, value in row.items():
            if isinstance(value, int | float):
                found.setdefault(name, {})[step] = float(value)
    return {name: tuple(sorted(points.items())) for name, points in found.items()}


def _config(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}; put a copy of it back") from error


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _versions(folder: Path) -> Mapping[str, str]:
    """Of the newest checkpoint, which says what the run began with."""
    for state in _states(folder):
        if versions := state.get("began", {}).get("versions"):
            return {str(name): str(version) for name, version in versions.items()}
    return {}


def _changes(folder: Path) -> tuple[str, ...]:
    """Of the newest checkpoint, which has those of all before it."""
    state = next(_states(folder), {})
    return tuple(f"after step {each['step']}: {', '.join(each['options'])}" for each in state.get("changes", ()))


def _states(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Of the checkpoints, the newest first."""
    for path in sorted((folder / "checkpoints").glob("step-*/state.json"), reverse=True):
        yield _json(path).get("state", {})
