"""Runs as one HTML file that asks the network for nothing: what ran, its curves, its completions, its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from policygrad.catalog import ABOUT
from policygrad.pages.render import BANDS, framed
from policygrad.report.completions import ROWS, TEXT, Shown, embedded, shown
from policygrad.report.data import POINTS, RunFiles, Series, cost, drawn, grouped
from policygrad.trackers.glossary import glossary, meaning
from policygrad.training.config.serialization import parts, short

FIRST = (
    "reward",
    "held_out",
    "loss",
    "held_out/loss",
    "accuracy",
    "held_out/accuracy",
    "entropy",
    "kl",
    "kl_old",
    "completions/mean_length",
    "completions/truncated_ratio",
    "frac_reward_zero_std",
    "grad_norm",
    "mismatch/logp_mean",
    "ratio/max",
    "staleness/mean",
    "teacher/kl",
    "explained_variance",
)
"""What people look at first."""
QUIET = ("completions/truncated_ratio", "staleness/mean")
"""Of these, what is shown only where it is not 0 throughout."""
WIDE = 4
"""Series from which on curves have fewer points, so that the page stays as small."""


@dataclass(frozen=True)
class Card:
    """A series, in words."""

    label: str
    facts: dict[str, str]
    parts: dict[str, str]
    about: str
    """Where the algorithm is from; "" of one that is not the library's."""


def page(runs: Sequence[RunFiles], live: bool = False) -> str:
    """The page. live: it asks the server that it came from whether there is more.

    Raises:
        RunError: completions that cannot be read.
    """
    series = grouped(runs)
    ordered = [run for group in series for run in group.runs]
    there = [shown(run.completions, TEXT // len(ordered), ROWS // len(ordered)) for run in ordered]
    web = files("policygrad.report") / "web"
    return framed(
        web / "report.html",
        data(series, there),
        styles=(web / "report.css",),
        scripts=(BANDS, web / "curves.js", web / "diff.js", web / "completions.js", web / "report.js"),
        live=live,
        title=_title(series, ordered),
        cards=[_card(group) for group in series],
        several=any(len(group.runs) > 1 for group in series),
        running=[str(run.folder) for run in ordered if not run.result],
        cost=[cost(group) for group in series],
        completions=_counted(ordered, there),
        steps=_steps(ordered),
    )


def data(series: Sequence[Series], there: Sequence[Shown]) -> dict[str, Any]:
    """What the scripts draw."""
    names = dict.fromkeys(name for group in series for run in group.runs for name in run.metrics)
    most = max(60, POINTS * WIDE // max(WIDE, len(series)))
    metrics = {name: drawn(series, name, most) | _meaning(name) for name in names}
    return {
        "series": [group.label for group in series],
        "runs": [_run(group, run) for group in series for run in group.runs],
        "first": [name for name in FIRST if name in names and not (name in QUIET and _zero(metrics[name]))],
        "chapters": _chapters(list(names)),
        "metrics": metrics,
        "completions": embedded(there),
    }


def _run(group: Series, run: RunFiles) -> str:
    """A run's name among the others."""
    return f"{group.label}, seed {run.config.get('seed', '–')}"


def _zero(plot: dict[str, Any]) -> bool:
    return not any(any(line["value"]) for line in plot["lines"] if line)


def _meaning(name: str) -> dict[str, str]:
    """As docs/metrics.md has it; nothing of a metric that nobody has described."""
    said = meaning(name)
    if said is None:
        return {}
    more = {k: v for k, v in asdict(said).items() if k != "name" and v}
    if more.get("unit") == name:  # the page has "NAME, UNIT"
        del more["unit"]
    return more


def _chapters(names: Sequence[str]) -> dict[str, list[str]]:
    """The metrics that there are, by the glossary's chapters; those that it lacks come last."""
    place = {metric.name: chapter.title for chapter in glossary() for metric in chapter.metrics}
    found: dict[str, list[str]] = {title: [] for title in (*(chapter.title for chapter in glossary()), "Others")}
    for name in sorted(names):
        said = meaning(name)
        found[place[said.name] if said is not None else "Others"].append(name)
    return {title: metrics for title, metrics in found.items() if metrics}


def _title(series: Sequence[Series], runs: Sequence[RunFiles]) -> str:
    if len(series) == 1:
        task = runs[0].config.get("task") or runs[0].config.get("data", "")
        return f"{series[0].label} on {task}" if isinstance(task, str) and task else series[0].label
    return " and ".join(s.label for s in series) if len(series) == 2 else f"{len(series)} configurations"


def _card(group: Series) -> Card:
    """What ran."""
    config, runs = group.config, group.runs
    algorithm = config.get("algorithm", {})
    name = str(algorithm.get("name", ""))
    options = (
        "model",
        "task",
        "data",
        "reward",
        "lr",
        "prompts_per_step",
        "samples_per_prompt",
        "batch_size",
        "staleness",
    )
    facts = {key.replace("_", " "): short(config[key]) for key in options if config.get(key) not in (None, "", [], 0)}
    facts["seeds" if len(runs) > 1 else "seed"] = ", ".join(str(run.config.get("seed", "–")) for run in runs)
    facts["steps done"] = f"{_steps(runs)} of {config.get('steps', '–')}"
    if changes := [text for run in runs for text in run.changes]:
        facts["changed"] = "; ".join(dict.fromkeys(changes))
    if held := [run.metrics["held_out"] for run in runs if len(run.metrics.get("held_out", ())) > 1]:
        before, after = (sum(points[i][1] for points in held) / len(held) for i in (0, -1))
        facts["held-out reward"] = f"{before:.3f} → {after:.3f}"
    if versions := runs[0].versions:
        facts["versions"] = ", ".join(f"{k} {v}" for k, v in versions.items())
    facts["folders" if len(runs) > 1 else "folder"] = ", ".join(str(run.folder) for run in runs)
    about = ABOUT.get(name)
    known_for = f"{about.title}. {about.source.partition(';')[0]}." if about else ""
    return Card(group.label, facts, parts(algorithm), known_for)


def _steps(runs: Sequence[RunFiles]) -> str:
    """Return the steps that are done: 16, or `12 to 16` where runs differ."""
    done = sorted({run.last for run in runs})
    return " to ".join(map(str, dict.fromkeys((done[0], done[-1]))))


def _counted(runs: Sequence[RunFiles], there: Sequence[Shown]) -> dict[str, Any]:
    """How much of the completions is on the page."""
    rows = sum(len(found.rows) for found in there)
    steps = {(i, row["step"]) for i, found in enumerate(there) for row in found.rows}
    return {
        "rows": rows,
        "steps": len(steps),
        "of": sum(run.last for run in runs if run.completions.is_file()),
        "whole": all(found.whole for found in there),
    }
