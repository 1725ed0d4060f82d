"""What differs between the rows of a comparison besides the algorithm, and what it cannot tell, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policygrad.compare.report import Report, RowReport

FEW = 10
"""Seeds below which a percentile interval is said to be too narrow."""
SETTINGS = {
    "updates_per_rollout": "Updates per rollout",
    "samples_per_prompt": "Samples per prompt",
    "prompts_per_step": "Prompts per step",
}
"""Settings of a row that are told in words, where rows differ."""


def said(found: Report) -> Report:
    """The report with its sentences."""
    return replace(found, differs=tuple(differs(found)), limits=tuple(limits(found)))


def differs(found: Report) -> Iterable[str]:
    """What else the rows differ in."""
    for name, words in SETTINGS.items():
        if told := _told({row.label: row.settings.get(name) for row in found.rows}):
            yield f"{words}: {told}."
    steps = {row.label: round(row.summary.means["updates"]) for row in found.rows if row.summary}
    if told := _told(steps):
        yield f"Updates within the budget, on average: {told}. The tables at equal updates compare them at the fewest."
    if told := _told({row.label: _rate(row) for row in found.rows}):
        chosen = (
            ", where there was a choice each row's best on the tuning seeds"
            if any(r.tuning for r in found.rows)
            else ""
        )
        yield f"Learning rates{chosen}: {told}."
    if own := [row.label for row in found.rows if row.reason]:
        yield f"Options that are not the algorithm's own, for reasons given with the row: {', '.join(own)}."
    if len(found.kinds) > 1:
        groups = "; ".join(f"{', '.join(kind.labels)} ({_measure(kind.measure)})" for kind in found.kinds)
        yield f"Scores are of different things and are compared only among their own kind: {groups}."
    if not found.ladder:
        return
    yield f"{found.ladder['why']}"


def limits(found: Report) -> Iterable[str]:
    """What must not be read into it."""
    done = [row for row in found.rows if row.summary]
    if found.stopped or any(len(row.runs) < len(found.seeds) for row in found.rows):
        short = ", ".join(f"{row.label} {len(row.runs)}" for row in found.rows if len(row.runs) < len(found.seeds))
        yield f"It is not whole: of {len(found.seeds)} seeds there are {short}."
    few = "; with so few the true coverage of a percentile interval is below its 95 %" if len(found.seeds) < FEW else ""
    yield (
        f"Intervals are over {len(found.seeds)} seed{'s' * (len(found.seeds) > 1)} of the same held-out problems{few}. They do not "
        "cover other tasks, models or budgets."
    )
    pairs = [pair.probability["tokens"] for pair in found.pairs]
    if pairs:
        open_ = sum(p.low <= 0.5 <= p.high for p in pairs)
        by_chance = f", and of {len(pairs)} pairs some exclude ½ by chance alone" if len(pairs) > 5 else ""
        yield (
            f"At equal tokens {open_} of {len(pairs)} pair{'s' * (len(pairs) > 1)} cannot be told apart: the interval of P(above) "
            f"holds ½{by_chance}."
        )
    yield (
        "One task and one small model: rankings of post-training algorithms change with scale and task (Li 2026, arXiv:2603.19335, "
        "240 runs at 0.5B to 7B), so that an order here is no advice for another model."
    )
    yield from _rates(found)
    if same := _same(done):
        yield f"The same runs, to the digit, because nothing in which they differ came up: {'; '.join(same)}."
    yield (
        "Seconds are those of this machine, with what else ran on it; they leave out evaluations, loading and checkpoints. Between "
        "evaluations a curve is a straight line."
    )


def _rates(found: Report) -> Iterable[str]:
    """What is to be said of learning rates."""
    if not any(row.tuning for row in found.rows):
        yield (
            "No learning rate was chosen: a row may be behind only because its best one is another (--lr-grid takes each row's "
            "own)."
        )
        return
    yield (
        f"A learning rate is the best of its grid by the mean final score of {len(found.tuning_seeds)} tuning "
        f"seed{'s' * (len(found.tuning_seeds) > 1)}, which are not reported; nothing else was tuned."
    )
    if edges := [f"{row.label} ({row.edge})" for row in found.rows if row.edge]:
        yield f"Best at the edge of its grid, so that a wider one might do better: {', '.join(edges)}."
    if fixed := [row.label for row in found.rows if not row.tuning]:
        yield f"Not tuned, for it has no such option or its options set it: {', '.join(fixed)}."


def _same(rows: list[RowReport]) -> list[str]:
    """Rows whose runs are equal, seed by seed."""
    seen: dict[Any, list[str]] = {}
    for row in rows:
        runs = tuple((run["seed"], *run["curve"]["score"], *run["curve"]["tokens"]) for run in row.runs)
        seen.setdefault((row.kind, runs), []).append(row.label)
    return [" = ".join(labels) for labels in seen.values() if len(labels) > 1]


def _rate(row: RowReport) -> str:
    """The policy's, as it ran."""
    rate = row.value if row.knob == "--lr" and row.value is not None else row.settings.get("lr")
    return "none" if rate is None else f"{rate:g}"


def _told(values: Mapping[str, Any]) -> str:
    """`1 (grpo, dapo), 4 (ppo)`; empty where all are equal."""
    labels: dict[Any, list[str]] = {}
    for label, value in values.items():
        labels.setdefault(value, []).append(label)
    if len(labels) < 2:
        return ""
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in labels.items())


def _measure(measure: Mapping[str, Any]) -> str:
    shown = [f"{name} {value}" for name, value in measure.items() if name in ("task", "max_tokens", "model")]
    return ", ".join(shown)
