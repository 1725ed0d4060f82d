"""What a configuration's steps took, and what of it was spared: sums over steps, means over runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from policygrad.report.curves import Series
from policygrad.trackers.words import count, duration

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
