"""Render runs as one offline HTML file: configuration, curves, completions and cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from policygrad.catalog import CATALOG
from policygrad.pages.render import BANDS, render_page
from policygrad.report.advantages import load_chain
from policygrad.report.completions import (
    MAX_PAGE_CHARS,
    MAX_ROWS,
    CompletionExcerpt,
    embed_completions,
    excerpt_completions,
)
from policygrad.report.data import MAX_POINTS, RunRecord, Series, build_curves, compute_cost, group_runs
from policygrad.report.summary import find_step_in_progress, list_notes, load_equation, summarise_result
from policygrad.report.timing import summarise_traces
from policygrad.trackers.glossary import find_metric_doc, load_glossary
from policygrad.trackers.trace import trace_files
from policygrad.training.config.serialization import format_option, format_parts

# Metrics shown first.
KEY_METRICS = (
    *("reward", "eval/reward", "loss", "eval/loss", "accuracy", "eval/accuracy", "entropy", "completions/mean_length"),
    *("clip_ratio/high", "clip_ratio/low", "kl", "kl_old"),
    *("completions/truncated_ratio", "frac_reward_zero_std", "grad_norm"),
    *("mismatch/logp_mean", "ratio/max", "staleness/mean", "teacher/kl", "explained_variance"),
)
HIDDEN_WHEN_ZERO = ("completions/truncated_ratio", "staleness/mean", "clip_ratio/high", "clip_ratio/low")
"""Metrics of these that are hidden if they are always 0."""
# Options in the description of a series.
CARD_OPTIONS = (
    *("model", "task", "data", "reward", "lr", "prompts_per_step", "samples_per_prompt", "batch_size"),
    "max_staleness",
)
FULL_DETAIL_SERIES = 4  # number of series beyond which curves get fewer points, to limit the size of the page


def render_report(runs: Sequence[RunRecord], live: bool = False, folder: Path | None = None) -> str:
    """Render the page.

    Args:
        live: The page polls its server for changes.
        folder: Place of the page, which its links to verifications are relative to; None = no links.

    Raises:
        RunError: Completions cannot be read.
    """
    series = group_runs(runs)
    ordered = [run for group in series for run in group.runs]
    share = (MAX_PAGE_CHARS // len(ordered), MAX_ROWS // len(ordered))
    excerpts = [
        replace(excerpt_completions(run.completions_file, *share), chain=load_chain(run.config)) for run in ordered
    ]
    web = files("policygrad.report") / "web"
    return render_page(
        web / "report.html",
        build_page_data(series, excerpts)
        | {"progress": [asdict(step) for run in ordered if live and (step := find_step_in_progress(run)) is not None]},
        styles=(web / "report.css",),
        scripts=(BANDS, web / "curves.js", web / "diff.js", web / "completions.js", web / "report.js"),
        live=live,
        title=name_report(series),
        answers=[summarise_result(group) for group in series],
        notes=list_notes(ordered),
        cards=[_describe_series(group, folder) for group in series],
        several=any(len(group.runs) > 1 for group in series),
        running=[str(run.folder) for run in ordered if not run.result],
        cost=[compute_cost(group) for group in series],
        completions={
            "rows": sum(len(excerpt.rows) for excerpt in excerpts),
            "steps": len({(i, row["step"]) for i, excerpt in enumerate(excerpts) for row in excerpt.rows}),
            "of": sum(run.last_step for run in ordered if run.completions_file.is_file()),
            "whole": all(excerpt.is_complete for excerpt in excerpts),
        },
        traces=[] if live else [trace for run in ordered for trace in _describe_trace(run, folder, len(ordered) > 1)],
    )


def name_report(series: Sequence[Series]) -> str:
    """Return `dapo on embedded`, `dapo and gspo`, `dapo: lr=0.1 and lr=0.2` or `dapo, 5 configurations`."""
    names = {str(group.config.get("algorithm", {}).get("name", group.runs[0].kind)) for group in series}
    task = series[0].config.get("task") or series[0].config.get("data")
    if len(series) == 1:
        return f"{series[0].label} on {task}" if task and isinstance(task, str) else series[0].label
    common = f"{min(names)}" if len(names) == 1 else ""
    if len(series) == 2:
        return f"{common}: {series[0].label} and {series[1].label}".removeprefix(": ")
    return f"{common}, {len(series)} configurations".removeprefix(", ")


def _describe_trace(run: RunRecord, folder: Path | None, several: bool) -> list[dict[str, Any]]:
    """Return the run's name if there are several, the links to its trace's files and what it says; nothing without a trace."""
    if not (paths := trace_files(run.folder)):
        return []
    summary = summarise_traces(run.folder)
    links = [] if folder is None else [os.path.relpath(path, folder) for path in paths]
    return [{"run": str(run.folder) if several else "", "links": links, "lines": summary.describe() if summary else []}]


def build_page_data(series: Sequence[Series], excerpts: Sequence[CompletionExcerpt]) -> dict[str, Any]:
    """Return the data that the scripts draw."""
    names = dict.fromkeys(name for group in series for run in group.runs for name in run.metrics)
    most = max(60, MAX_POINTS * FULL_DETAIL_SERIES // max(FULL_DETAIL_SERIES, len(series)))
    metrics = {name: build_curves(series, name, most) for name in names}
    # Metrics by the glossary's sections, with its descriptions; those without one come last.
    place = {metric.name: chapter.title for chapter in load_glossary() for metric in chapter.metrics}
    titles = [*(chapter.title for chapter in load_glossary()), "Others"]
    sections: dict[str, list[str]] = {title: [] for title in titles}
    for name in sorted(names):
        doc = find_metric_doc(name)
        sections["Others" if doc is None else place[doc.name]].append(name)
        more = {} if doc is None else {k: v for k, v in asdict(doc).items() if k != "name" and v}
        if more.get("unit") == name:  # the page shows "NAME, UNIT"
            del more["unit"]
        metrics[name] |= more
    return {
        "series": [group.label for group in series],
        "runs": [f"{group.label}, seed {run.config.get('seed', '–')}" for group in series for run in group.runs],
        "first": choose_first_metrics(series),
        "chapters": {title: named for title, named in sections.items() if named},
        "metrics": metrics,
        "completions": embed_completions(excerpts),
    }


def choose_first_metrics(series: Sequence[Series]) -> list[str]:
    """Return the metrics that are shown first, without those that are always 0 where that says nothing."""

    def is_shown(name: str) -> bool:
        values = [value for group in series for run in group.runs for _, value in run.metrics.get(name, ())]
        return any(values) if name in HIDDEN_WHEN_ZERO else bool(values)

    return [name for name in KEY_METRICS if is_shown(name)]


def _describe_series(group: Series, folder: Path | None) -> dict[str, Any]:
    """Return the label, facts, parts, equation, origin (title and source of the algorithm; "" for a custom one) and verifications
    for its card."""
    config, runs = group.config, group.runs
    algorithm = config.get("algorithm", {})
    name = str(algorithm.get("name", ""))
    given = {key: config[key] for key in CARD_OPTIONS if config.get(key) not in (None, "", [], 0)}
    facts = {key.replace("_", " "): format_option(value) for key, value in given.items()}
    facts["seeds" if len(runs) > 1 else "seed"] = ", ".join(str(run.config.get("seed", "–")) for run in runs)
    facts["steps done"] = f"{group.steps} of {config.get('steps', '–')}"
    if changes := [text for run in runs for text in run.changes]:
        facts["changed"] = "; ".join(dict.fromkeys(changes))
    if versions := runs[0].versions:
        facts["versions"] = ", ".join(f"{k} {v}" for k, v in versions.items())
    facts["folders" if len(runs) > 1 else "folder"] = ", ".join(str(run.folder) for run in runs)
    verified = [
        {
            "run": str(run.folder) if len(runs) > 1 else "",
            "link": "" if folder is None else os.path.relpath(run.folder / "verify.html", folder),
            "summary": run.verified,
        }
        for run in runs
        if run.verified
    ]
    about = CATALOG.get(name)
    origin = f"{about.title}. {about.source.partition(';')[0]}." if about else ""
    return {
        "label": group.label,
        "facts": facts,
        "parts": format_parts(algorithm),
        "equation": load_equation(config),
        "about": origin,
        "verified": verified,
    }
