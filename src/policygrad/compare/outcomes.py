"""What a finished run's folder says: its learning curve over tokens, updates and seconds, and what it cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policygrad.contents import read_json
from policygrad.errors import RunError
from policygrad.trackers.jsonl import METRICS, read_rows

AXES = {"tokens": "sampled tokens", "updates": "updates", "seconds": "seconds of training"}
"""What a curve may be drawn over. Seconds are those of rollouts and updates: evaluations, loading and checkpoints are left out."""
LAST = 0.2
"""The share of a run's last steps over which what it was like at its end is averaged."""
SIGNS = {
    "completions/mean_length": "length",
    "completions/truncated_ratio": "truncated",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/low": "clipped_low",
    "clip_ratio/high": "clipped_high",
}
"""Metrics of a step -> what they are called at a run's end."""


@dataclass(frozen=True)
class Outcome:
    """One run. The curve's lists go together; their first point is before training."""

    tokens: tuple[float, ...]
    updates: tuple[float, ...]
    seconds: tuple[float, ...]
    score: tuple[float, ...]
    """Held-out means."""
    error: float
    """Standard error of the last one over the held-out problems; 0 where it is not known."""
    steps: int
    signs: Mapping[str, float] = field(default_factory=dict)
    """What its last steps were like: length [tokens], share cut off, entropy [nats], KL to the reference [nats a token],
    shares clipped."""
    cost: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds, seconds on the clock and MiB of the whole command, evaluations included."""
    gated: float | None = None
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


def finished(folder: Path) -> bool:
    """Whether a run is at its end."""
    return (folder / "result.json").is_file()


def read(folder: Path) -> Outcome:
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


def _outcome(folder: Path) -> Outcome:
    result = read_json(folder / "result.json")
    rows = list[dict[str, Any]]()
    for number, (_, row) in enumerate(read_rows(folder / METRICS), 1):
        if row is None:
            raise ValueError(f"line {number} of {METRICS} is no JSON object with a step")
        rows.append(row)
    steps = {row["step"]: row for row in rows if "tokens/sampled" in row}
    scores = {row["step"]: row for row in rows if row.get("held_out") is not None}
    last = result.get("steps", max(steps, default=0))
    if 0 not in scores or last not in scores:
        raise RunError(f"{folder} has no held-out score before or after training: see the notes in {_log(folder)}")
    at = {0: (0.0, 0.0, 0.0)} | _totals(steps)
    points = sorted(step for step in scores if step in at)
    tokens, updates, seconds = zip(*(at[step] for step in points), strict=True)
    return Outcome(
        tokens=tokens,
        updates=updates,
        seconds=seconds,
        score=tuple(float(scores[step]["held_out"]) for step in points),
        error=float(scores[points[-1]].get("held_out_stderr") or 0.0),
        steps=int(last),
        signs=_signs([steps[step] for step in sorted(steps)]),
        cost=cost(folder),
        gated=_gated(list(steps.values())),
    )


def cost(folder: Path) -> dict[str, float]:
    """What the run's processes took, as the runner wrote it down; empty where nobody did.

    Raises:
        RunError: the file is not what a runner writes.
    """
    path = folder.with_name(folder.name + ".cost.json")
    if not path.exists():
        return {}
    try:
        found: dict[str, float] = read_json(path)
        if not all(isinstance(value, int | float) for value in found.values()):
            raise ValueError("a value is no number")
        return found
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


def _signs(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the last fifth of the steps, of those metrics that they have."""
    tail = rows[-math.ceil(LAST * len(rows)) :] if rows else ()
    found = {}
    for metric, name in SIGNS.items():
        values = [row[metric] for row in tail if row.get(metric) is not None]
        if values:
            found[name] = sum(values) / len(values)
    return found


def _gated(rows: Sequence[Mapping[str, Any]]) -> float | None:
    values = [row["clip_ratio/low"] + row["clip_ratio/high"] for row in rows if row.get("clip_ratio/low") is not None]
    return sum(values) / len(values) if values else None
