"""What a run's folder says of it: its configuration, its numbers, what it ended with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policygrad.contents import read_json, read_toml
from policygrad.errors import RunError
from policygrad.trackers.jsonl import COMPLETIONS, METRICS, read_rows

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
