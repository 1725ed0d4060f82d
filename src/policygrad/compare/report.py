"""The report of a comparison: rows, pairs of rows, and sentences about what can and cannot be concluded."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from policygrad.compare import summary
from policygrad.compare.plan import ComparisonPlan, ComparisonRow, Job
from policygrad.compare.runner import AXES, Results, RunOutcome
from policygrad.compare.statistics import (
    LEVEL,
    Estimate,
    fewest_runs,
    interquartile_mean,
    probability_of_improvement,
    separation_by_chance,
)
from policygrad.compare.summary import POINTS, RowSummary, TunedValue
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.compare.plan import ComparisonPlan


def pluralise(shown: object, noun: str) -> str:
    """Return `1 second` or `1,200 seconds`, for a formatted number and a noun in the plural."""
    return f"{shown} {noun.removesuffix('s') if str(shown) == '1' else noun}"


MAX_NAMED_PAIRS = 6
"""Maximum number of pairs named in a sentence."""
FEW_SEEDS = 10
"""Number of seeds below which the report warns that percentile intervals are too narrow."""
SETTINGS = {
    "updates_per_rollout": "Updates per rollout",
    "samples_per_prompt": "Samples per prompt",
    "prompts_per_step": "Prompts per step",
}
"""Settings that the report lists if rows differ in them."""


def add_statements(report: ComparisonReport) -> ComparisonReport:
    """Return the report with its sentences."""
    return replace(
        report,
        ranking=tuple(describe_ranking(report)),
        differences=tuple(describe_differences(report)),
        caveats=tuple(describe_caveats(report)),
    )


def describe_ranking(report: ComparisonReport) -> Iterable[str]:
    """Yield the highest row at equal tokens, updates and seconds, those not distinguishable from it, and whether the axes agree."""
    for number, kind in enumerate(report.kinds):
        rows = [row for row in report.rows if row.kind == number and row.summary]
        where = f" on {kind.measure.get('task')}" if len(report.kinds) > 1 else ""
        for axis, end in kind.equal.items() if len(rows) > 1 else ():
            best = max(rows, key=lambda row: row.summary.equal[axis].value if row.summary else 0.0)
            near = [p for p in report.pairs if best.label in (p.first, p.second) and not p.separated[axis]]
            close = [p.second if p.first == best.label else p.first for p in near]
            remark = f"; not told apart from it: {', '.join(close)}" if close else "; all others are below it"
            score = best.summary.equal[axis] if best.summary else None
            at = pluralise(f"{end:,.0f}" if end >= 10 else f"{end:.2g}", axis)
            yield f"At {at}{where}, which every run reaches, {best.label} is highest, {score}{remark}."
    both = [pair for pair in report.pairs if pair.separated["tokens"] and pair.separated["updates"]]
    turned = [p for p in both if (p.probability["tokens"].value > 0.5) != (p.probability["updates"].value > 0.5)]
    if both:
        names = ", ".join(f"{p.first} and {p.second}" for p in turned[:MAX_NAMED_PAIRS]) + " …" * (
            len(turned) > MAX_NAMED_PAIRS
        )
        yield (
            f"Of {len(both)} pairs that are apart at equal tokens and at equal updates, {len(turned)} "
            f"{'is' if len(turned) == 1 else 'are'} in the opposite order at equal updates{f' ({names})' if turned else ''}."
        )
    if report.ladder:
        yield from _describe_rungs(report)


def _describe_rungs(report: ComparisonReport) -> Iterable[str]:
    """Compare every rung of a ladder with the one below it."""
    rows = [row for row in report.rows if row.change and row.summary]
    for below, row in pairwise(rows):
        pair = next((p for p in report.pairs if {p.first, p.second} == {below.label, row.label}), None)
        if pair is None or row.summary is None or below.summary is None:
            continue
        change = row.summary.equal["tokens"].value - below.summary.equal["tokens"].value
        clear = "apart" if pair.separated["tokens"] else "not told apart"
        yield f"{row.label} ({row.change}): {change:+.3f} at equal tokens, {clear} from {below.label}."


def describe_differences(report: ComparisonReport) -> Iterable[str]:
    """Yield what else the rows differ in."""
    for name, title in SETTINGS.items():
        if by_value := _group_by_value({row.label: row.settings.get(name) for row in report.rows}):
            yield f"{title}: {by_value}."
    steps = {row.label: round(row.summary.means["updates"]) for row in report.rows if row.summary}
    if by_value := _group_by_value(steps):
        yield f"Updates within the budget, on average: {by_value}. The tables at equal updates compare them at the fewest."
    if by_value := _group_by_value({row.label: format_learning_rate(row) for row in report.rows}):
        chosen = (
            ", where there was a choice each row's best on the tuning seeds"
            if any(r.tuning for r in report.rows)
            else ""
        )
        yield f"Learning rates{chosen}: {by_value}."
    if changed := [row.label for row in report.rows if row.reason]:
        yield f"Options that are not the algorithm's own, for reasons given with the row: {', '.join(changed)}."
    if len(report.kinds) > 1:
        groups = list[str]()
        for kind in report.kinds:
            shown = [f"{name} {value}" for name, value in kind.measure.items() if name in SHOWN_MEASURES]
            groups.append(f"{', '.join(kind.labels)} ({', '.join(shown)})")
        yield f"Scores are of different things and are compared only among their own kind: {'; '.join(groups)}."
    if not report.ladder:
        return
    yield f"{report.ladder['why']}"


def describe_caveats(report: ComparisonReport) -> Iterable[str]:
    """Yield the limits of the conclusions."""
    done = [row for row in report.rows if row.summary]
    if report.stopped or any(len(row.runs) < len(report.seeds) for row in report.rows):
        short = ", ".join(f"{row.label} {len(row.runs)}" for row in report.rows if len(row.runs) < len(report.seeds))
        yield f"The comparison is incomplete: of {len(report.seeds)} seeds these are finished: {short}."
    few = (
        "; with so few the true coverage of a percentile interval is below its 95 %"
        if len(report.seeds) < FEW_SEEDS
        else ""
    )
    yield (
        f"Intervals are over {pluralise(len(report.seeds), 'seeds')} of the same held-out problems{few}. They do not "
        "cover other tasks, models or budgets."
    )
    if pairs := report.pairs:
        seeds = len(report.seeds)
        chance = separation_by_chance(seeds, seeds)
        clear = chance <= 1 - LEVEL
        remark = (
            f" With {seeds} seeds each, equal rows are completely separated in {chance:.0%} of cases, so none is clear."
        )
        open_ = sum(not pair.separated["tokens"] for pair in report.pairs)
        by_chance = f", and of {len(pairs)} pairs some exclude ½ by chance alone" if len(pairs) > 5 else ""
        yield (
            f"At equal tokens {open_} of {pluralise(len(pairs), 'pairs')} cannot be told apart: the interval of P(above) "
            f"holds ½{by_chance}.{'' if clear else remark}"
        )
    yield (
        "One task and one small model: rankings of post-training algorithms change with scale and task (Li 2026, arXiv:2603.19335, "
        "240 runs at 0.5B to 7B), so that an order here is no advice for another model."
    )
    yield from _describe_tuning(report)
    if same := _same(done):
        yield f"The same runs, to the digit, because nothing in which they differ came up: {'; '.join(same)}."
    yield (
        "Seconds are those of this machine, with what else ran on it; they leave out evaluations, loading and checkpoints. Between "
        "evaluations a curve is a straight line."
    )


def too_few_seeds(plan: ComparisonPlan) -> str:
    """Return a warning if so few seeds can never distinguish rows; "" if they can."""
    seeds, least = len(plan.seeds), fewest_runs()
    if len(plan.rows) < 2 or seeds >= least:
        return ""
    return (
        f"--seeds {seeds} cannot distinguish any two rows: equal rows are completely separated in "
        f"{separation_by_chance(seeds, seeds):.0%} of cases. Use --seeds {least} or more, or read the scores only as examples"
    )


def _describe_tuning(report: ComparisonReport) -> Iterable[str]:
    """Yield how learning rates were chosen."""
    if not any(row.tuning for row in report.rows):
        yield (
            "No learning rate was chosen: a row may be behind only because its best one is another (--lr-grid takes each row's "
            "own)."
        )
        return
    yield (
        "A learning rate is the best of its grid by the mean final score of "
        f"{pluralise(len(report.tuning_seeds), 'tuning seeds')} besides those reported; nothing else was tuned."
    )
    if edges := [f"{row.label} ({row.edge})" for row in report.rows if row.edge]:
        yield f"Best at the edge of its grid, so that a wider one might do better: {', '.join(edges)}."
    if fixed := [row.label for row in report.rows if not row.tuning]:
        yield f"Not tuned, for it has no such option or its options set it: {', '.join(fixed)}."


def _same(rows: list[RowReport]) -> list[str]:
    """Return groups of rows whose runs are equal, seed by seed."""
    seen: dict[Any, list[str]] = {}
    for row in rows:
        runs = tuple((run["seed"], *run["curve"]["score"], *run["curve"]["tokens"]) for run in row.runs)
        seen.setdefault((row.kind, runs), []).append(row.label)
    return [" = ".join(labels) for labels in seen.values() if len(labels) > 1]


def format_learning_rate(row: RowReport) -> str:
    """Return the policy's learning rate; `none` without one."""
    value = row.option_value if row.tuned_option == "--lr" and row.option_value is not None else row.settings.get("lr")
    return "none" if value is None else f"{value:g}"


def _group_by_value(values: Mapping[str, Any]) -> str:
    """Return `1 (grpo, dapo), 4 (ppo)`; empty if all are equal."""
    labels: dict[Any, list[str]] = {}
    for label, value in values.items():
        labels.setdefault(value, []).append(label)
    if len(labels) < 2:
        return ""
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in labels.items())


SHOWN_MEASURES = ("task", "max_tokens", "model")
DEFAULT_THRESHOLD = 0.8
"""Threshold, as a fraction of the way from the score before training to the best row's final score."""
FORMAT = 1


@dataclass(frozen=True)
class RowReport:
    """A row, its settings and its results."""

    label: str
    algorithm: str
    command: str
    """Arguments of `policygrad train`, including the tuned option."""
    change: str
    reason: str
    settings: Mapping[str, Any]
    tuned_option: str
    option_value: float | None
    edge: str
    """`smallest` or `largest` if the chosen value is at that end of the grid; else empty."""
    tuning: tuple[TunedValue, ...]
    kind: int
    """Index into the kinds: only rows of one kind, measured on the same problems in the same way, are compared by score."""
    runs: tuple[Mapping[str, Any], ...]
    failed: tuple[Mapping[str, Any], ...]
    """Failed runs, tuning runs included: seed, value, error."""
    summary: RowSummary | None
    """None if no reported run succeeded."""


@dataclass(frozen=True)
class RowPair:
    """P(the first is above the second) at equal tokens, updates and seconds, and for the area under the curves."""

    first: str
    second: str
    probability: Mapping[str, Estimate]
    separated: Mapping[str, bool]
    """True if the interval excludes ½, with enough runs that chance alone seldom separates them."""


@dataclass(frozen=True)
class Kind:
    """Rows whose scores are comparable."""

    measure: Mapping[str, Any]
    labels: tuple[str, ...]
    equal: Mapping[str, float]
    """Axis -> the point that every run of these rows reaches."""
    threshold: float | None
    """Threshold score; None if no row learned anything."""


@dataclass(frozen=True)
class ComparisonReport:
    """The report of a finished or stopped comparison."""

    command: str
    version: str
    tokens: int
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    ladder: Mapping[str, Any]
    share: float
    """Fraction of the way at which the threshold is."""
    stopped: bool
    kinds: tuple[Kind, ...]
    axes: Mapping[str, tuple[float, ...]]
    """Axis -> the points of all curves."""
    rows: tuple[RowReport, ...]
    pairs: tuple[RowPair, ...]
    ranking: tuple[str, ...] = ()
    """Sentences about the ranking."""
    differences: tuple[str, ...] = ()
    """Sentences about differences besides the algorithm."""
    caveats: tuple[str, ...] = ()
    """Sentences about what cannot be concluded."""
    format: int = field(default=FORMAT)

    def row(self, label: str) -> RowReport:
        return next(row for row in self.rows if row.label == label)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values."""
        return json.loads(json.dumps(asdict(self), allow_nan=False))  # type: ignore[no-any-return]


def build_report(plan: ComparisonPlan, results: Results, share: float = DEFAULT_THRESHOLD) -> ComparisonReport:
    """Build the report from results. share: in (0, 1], see `DEFAULT_THRESHOLD`."""
    if not 0 < share <= 1:
        raise ConfigError(f"the threshold is a share of the way in (0, 1], not {share:g}")
    outcomes = {row.label: dict[Job, RunOutcome]() for row in plan.rows}  # finished reported runs, by seed
    for job in plan.reported_jobs(results.chosen):
        if job in results.outcomes:
            outcomes[job.row][job] = results.outcomes[job]
    measures = list(dict.fromkeys(json.dumps(row.measure, sort_keys=True) for row in plan.rows))
    kind_of = {row.label: measures.index(json.dumps(row.measure, sort_keys=True)) for row in plan.rows}
    kinds = tuple(_kind(i, plan, kind_of, outcomes, share) for i in range(len(measures)))
    axes = dict[str, tuple[float, ...]]()
    for axis in AXES:  # points from 0 to the end of the longest run
        end = max((o.axis(axis)[-1] for runs in outcomes.values() for o in runs.values()), default=0.0)
        axes[axis] = tuple(round(end * i / (POINTS - 1), 3) for i in range(POINTS)) if end else (0.0,)
    rows = tuple(
        _row(plan, row, results, kinds[kind_of[row.label]], kind_of[row.label], outcomes, axes) for row in plan.rows
    )
    unannotated = ComparisonReport(
        command=plan.command,
        version=plan.version,
        tokens=plan.tokens,
        seeds=plan.seeds,
        tuning_seeds=plan.tuning_seeds if any(row.is_tuned for row in plan.rows) else (),
        ladder=plan.ladder,
        share=share,
        stopped=results.stopped,
        kinds=kinds,
        axes=axes,
        rows=rows,
        pairs=_pairs(rows),
    )
    return add_statements(unannotated)


def _kind(
    number: int,
    plan: ComparisonPlan,
    kind_of: Mapping[str, int],
    outcomes: Mapping[str, Mapping[Job, RunOutcome]],
    share: float,
) -> Kind:
    rows = [row for row in plan.rows if kind_of[row.label] == number]
    runs = {row.label: list(outcomes[row.label].values()) for row in rows if outcomes[row.label]}
    everything = [o for outcomes in runs.values() for o in outcomes]
    level = None
    if everything:
        before = sum(o.before for o in everything) / len(everything)
        best = max(float(interquartile_mean([o.after for o in outcomes])) for outcomes in runs.values())
        level = before + share * (best - before) if best > before else None
    equal = summary.common_endpoints(everything) if everything else {}
    return Kind(rows[0].measure, tuple(row.label for row in rows), equal, level)


def _row(
    plan: ComparisonPlan,
    row: ComparisonRow,
    results: Results,
    kind: Kind,
    number: int,
    outcomes: Mapping[str, Mapping[Job, RunOutcome]],
    axes: Mapping[str, Sequence[float]],
) -> RowReport:
    value, runs = results.chosen.get(row.label), outcomes[row.label]
    job = Job(row.label, value, plan.seeds[0])
    edges = {min(row.grid): "smallest", max(row.grid): "largest"} if row.is_tuned else {}
    failed = [
        {"seed": job.seed, "value": job.option_value, "error": error}
        for job, error in results.failures.items()
        if job.row == row.label
    ]
    return RowReport(
        label=row.label,
        algorithm=row.algorithm,
        command=shlex.join(plan.train_argv(job)[1:-4]),
        change=row.change,
        reason=row.reason,
        settings=row.settings,
        tuned_option=row.tuned_option,
        option_value=value,
        edge=edges.get(value, "") if value is not None else "",
        tuning=summary.list_tuned_values(plan, row, results),
        kind=number,
        runs=tuple(
            summary.describe_run(job, o, shlex.join(["policygrad", *plan.train_argv(job)])) for job, o in runs.items()
        ),
        failed=tuple(failed),
        summary=summary.summarise_row(list(runs.values()), kind.equal, axes, kind.threshold) if runs else None,
    )


def _pairs(rows: Sequence[RowReport]) -> tuple[RowPair, ...]:
    """Compare all pairs of one kind."""
    pairs = list[RowPair]()
    for a, b in combinations(rows, 2):
        if a.kind != b.kind or a.summary is None or b.summary is None:
            continue
        x, y = a.summary.scores, b.summary.scores
        probabilities = {name: probability_of_improvement(x[name], y[name]) for name in x}
        enough = separation_by_chance(len(x["tokens"]), len(y["tokens"])) <= 1 - LEVEL
        separated = {name: enough and not p.low <= 0.5 <= p.high for name, p in probabilities.items()}
        pairs.append(RowPair(a.label, b.label, probabilities, separated))
    return tuple(pairs)
