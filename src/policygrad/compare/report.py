"""The report of a comparison: rows, pairs of rows, and sentences about what can and cannot be concluded."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations, pairwise
from typing import Any

from policygrad.compare import summary
from policygrad.compare.plan import ComparisonPlan, ComparisonRow, Job, RowDescription
from policygrad.compare.runner import AXES, Results, RunOutcome, mean_final_score
from policygrad.compare.statistics import (
    LEVEL,
    Estimate,
    fewest_runs,
    interquartile_mean,
    iqm_difference,
    probability_of_improvement,
    separation_by_chance,
)
from policygrad.compare.summary import RowSummary, TunedValue
from policygrad.errors import ConfigError


def pluralise(shown: object, noun: str) -> str:
    """Return `1 second` or `1,200 seconds`, for a formatted number and a noun in the plural."""
    return f"{shown} {noun.removesuffix('s') if str(shown) == '1' else noun}"


NEAR_END = 0.02  # fraction of an axis by which a curve may stop before its row's end
FEW_SEEDS = 10  # number of seeds below which the report warns that percentile intervals are too narrow
# Settings that the report lists if rows differ in them.
SETTINGS = {
    "updates_per_rollout": "Updates per rollout",
    "samples_per_prompt": "Samples per prompt",
    "prompts_per_step": "Prompts per step",
}


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
        names = ", ".join(f"{p.first} and {p.second}" for p in turned[:6]) + " …" * (len(turned) > 6)
        yield (
            f"Of {pluralise(len(both), 'pairs')} apart at equal tokens and at equal updates, {len(turned)} "
            f"{'is' if len(turned) == 1 else 'are'} in the opposite order at equal updates{f' ({names})' if turned else ''}."
        )
    rungs = [row for row in report.rows if row.change and row.summary] if report.ladder else []
    for below, row in pairwise(rungs):  # each with the one below it
        pair = next((p for p in report.pairs if {p.first, p.second} == {below.label, row.label}), None)
        if pair is not None and row.summary is not None and below.summary is not None:
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
        tuned = any(row.tuning for row in report.rows)
        chosen = ", where there was a choice each row's best on the tuning seeds" if tuned else ""
        yield f"Learning rates{chosen}: {by_value}."
    if changed := [row.label for row in report.rows if row.reason]:
        yield f"Options that are not the algorithm's own, for reasons given with the row: {', '.join(changed)}."
    if len(report.kinds) > 1:
        shown = [", ".join(f"{k} {v}" for k, v in kind.measure.items() if k in SHOWN_MEASURES) for kind in report.kinds]
        groups = [f"{', '.join(kind.labels)} ({text})" for kind, text in zip(report.kinds, shown, strict=True)]
        yield f"Scores are of different things and are compared only among their own kind: {'; '.join(groups)}."
    if report.ladder:
        yield str(report.ladder["why"])


def describe_caveats(report: ComparisonReport) -> Iterable[str]:
    """Yield the limits of the conclusions."""
    done = [row for row in report.rows if row.summary]
    if report.stopped or any(len(row.runs) < len(report.seeds) for row in report.rows):
        short = ", ".join(f"{row.label} {len(row.runs)}" for row in report.rows if len(row.runs) < len(report.seeds))
        yield f"The comparison is incomplete: of {len(report.seeds)} seeds these are finished: {short}."
    seeds, chance = len(report.seeds), separation_by_chance(len(report.seeds), len(report.seeds))
    few = "; with so few the true coverage of a percentile interval is below its 95 %" if seeds < FEW_SEEDS else ""
    yield (
        f"Intervals are over {pluralise(seeds, 'seeds')} of the same held-out problems{few}. They do not cover other tasks, models "
        "or budgets."
    )
    if pairs := report.pairs:
        open_ = sum(not pair.separated["tokens"] for pair in pairs)
        by_chance = f", and of {len(pairs)} pairs some exclude ½ by chance alone" if len(pairs) > 5 else ""
        none_clear = (
            f" With {seeds} seeds each, equal rows are completely separated in {chance:.0%} of cases, so none is clear."
        )
        yield (
            f"At equal tokens {open_} of {pluralise(len(pairs), 'pairs')} cannot be told apart: the interval of P(above) "
            f"holds ½{by_chance}.{'' if chance <= 1 - LEVEL else none_clear}"
        )
    yield (
        "One task and one small model: rankings of post-training algorithms change with scale and task (Li 2026, arXiv:2603.19335, "
        "240 runs at 0.5B to 7B), so that an order here is no advice for another model."
    )
    if any(row.tuning for row in report.rows):
        yield (
            "A learning rate is the best of its grid by the mean final score of "
            f"{pluralise(len(report.tuning_seeds), 'tuning seeds')} besides those reported; nothing else was tuned."
        )
        if edges := [f"{row.label} ({row.edge})" for row in report.rows if row.edge]:
            yield f"Best at the edge of its grid, so that a wider one might do better: {', '.join(edges)}."
        if fixed := [row.label for row in report.rows if not row.tuning]:
            yield f"Not tuned, for it has no such option or its options set it: {', '.join(fixed)}."
    else:
        yield (
            "No learning rate was chosen: a row may be behind only because its best one is another (--lr-grid takes each row's "
            "own)."
        )
    by_runs: dict[Any, list[str]] = {}
    for row in done:
        runs = tuple((run["seed"], *run["curve"]["score"], *run["curve"]["tokens"]) for run in row.runs)
        by_runs.setdefault((row.kind, runs), []).append(row.label)
    if same := [" = ".join(labels) for labels in by_runs.values() if len(labels) > 1]:
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


def format_learning_rate(row: RowReport) -> str:
    """Return the policy's learning rate, as its runs logged it, or else as planned; `none` without one."""
    planned = (
        row.option_value if row.tuned_option == "--lr" and row.option_value is not None else row.settings.get("lr")
    )
    used = None if row.summary is None or planned is None else row.summary.means.get("lr")
    value = planned if used is None else used
    return "none" if value is None else f"{value:.3g}"


def _group_by_value(values: Mapping[str, Any]) -> str:
    """Return `1 (grpo, dapo), 4 (ppo)`; empty if all are equal."""
    labels: dict[Any, list[str]] = {}
    for label, value in values.items():
        labels.setdefault(value, []).append(label)
    if len(labels) < 2:
        return ""
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in labels.items())


SHOWN_MEASURES = ("task", "max_tokens", "model")
METRICS = {
    "tokens": "scores higher than {} at equal tokens",
    "updates": "scores higher than {} at equal updates",
    "seconds": "scores higher than {} at equal seconds",
    "area": "has more area under its learning curve than {}",
}
"""What two rows are compared by -> the sentence about them."""
DEFAULT_METRIC = "tokens"
DECISION_RULE = (
    "A sentence about two rows is allowed if every planned run of both is finished, both have enough seeds (at least "
    f"{fewest_runs()} each, or equal rows would be completely separated in more than {1 - LEVEL:.0%} of cases), the "
    f"{LEVEL:.0%} interval of P(above) excludes ½, and the {LEVEL:.0%} interval of the difference of the interquartile "
    "means excludes 0."
)
STOPPING_RULE = (
    "Every row is trained with every seed until the budget of tokens is used up. No run is stopped, repeated or left out because "
    "of its score, and no seed is added afterwards; a failed run may be repeated with the same seed."
)
DEFAULT_THRESHOLD = 0.8
"""Threshold, as a fraction of the way from the score before training to the best row's final score."""


@dataclass(frozen=True, kw_only=True)
class RowReport(RowDescription):
    """A row and its results."""

    command: str  # arguments of `policygrad train`, including the tuned option
    option_value: float | None
    edge: str  # `smallest` or `largest` if the chosen value is at that end of the grid; else empty
    tuning: tuple[TunedValue, ...]
    kind: int
    """Index into the kinds: only rows of one kind, measured on the same problems in the same way, are compared by score."""
    runs: tuple[Mapping[str, Any], ...]
    failed: tuple[Mapping[str, Any], ...]  # failed runs, tuning runs included: seed, value, error
    summary: RowSummary | None  # None if no reported run succeeded


@dataclass(frozen=True)
class RowPair:
    """P(the first is above the second) at equal tokens, updates and seconds, and for the area under the curves."""

    first: str
    second: str
    probability: Mapping[str, Estimate]
    difference: Mapping[str, Estimate]
    """The first's interquartile mean less the second's."""
    separated: Mapping[str, bool]
    """True if the intervals exclude ½ and 0, with enough runs that chance alone seldom separates them."""


@dataclass(frozen=True)
class Claim:
    """A sentence about two rows, and whether the intervals allow it."""

    text: str
    """The sentence, with the difference, its interval and the number of seeds."""
    higher: str
    """The row with the higher interquartile mean."""
    lower: str
    """The other row."""
    metric: str
    """What they are compared by: tokens, updates, seconds or area."""
    difference: Estimate
    """Difference of the interquartile means, with its 95 % interval."""
    probability: Estimate
    """P(a run of `higher` is above one of `lower`), with its 95 % interval."""
    allowed: bool
    """True if the sentence may be stated, by the decision rule in docs/compare.md."""
    reason: str
    """The condition that decided."""


@dataclass(frozen=True)
class PreregistrationNote:
    """What a report says about the comparison's preregistration."""

    sha256: str
    """Of the file's bytes."""
    date: str
    """When the file was written, by the clock of that machine, in UTC."""
    deviations: tuple[str, ...] = ()
    """How the comparison differs from the file; empty if it was carried out as written."""


@dataclass(frozen=True)
class Kind:
    """Rows whose scores are comparable."""

    measure: Mapping[str, Any]
    labels: tuple[str, ...]
    equal: Mapping[str, float]  # axis -> the point that every run of these rows reaches
    threshold: float | None  # threshold score; None if no row learned anything


@dataclass(frozen=True)
class ComparisonReport:
    """The report of a finished or stopped comparison."""

    command: str
    version: str
    tokens: int
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    ladder: Mapping[str, Any]
    share: float  # see `DEFAULT_THRESHOLD`
    stopped: bool
    kinds: tuple[Kind, ...]
    axes: Mapping[str, tuple[float, ...]]  # axis -> the points of all curves
    rows: tuple[RowReport, ...]
    pairs: tuple[RowPair, ...]
    metric: str = DEFAULT_METRIC
    """The metric of the claims."""
    claims: tuple[Claim, ...] = ()
    """A sentence about each pair of comparable rows."""
    preregistration: PreregistrationNote | None = None
    ranking: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()  # sentences about differences besides the algorithm
    caveats: tuple[str, ...] = ()  # sentences about what cannot be concluded
    format: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values."""
        return json.loads(json.dumps(asdict(self), allow_nan=False))  # type: ignore[no-any-return]


def build_report(
    plan: ComparisonPlan,
    results: Results,
    share: float = DEFAULT_THRESHOLD,
    metric: str = DEFAULT_METRIC,
    preregistration: PreregistrationNote | None = None,
) -> ComparisonReport:
    """Build the report from results. share: in (0, 1], see `DEFAULT_THRESHOLD`. metric: of the claims, one of `METRICS`."""
    if not 0 < share <= 1:
        raise ConfigError(f"the threshold is a share of the way in (0, 1], not {share:g}")
    outcomes = {row.label: dict[Job, RunOutcome]() for row in plan.rows}  # finished reported runs, by seed
    for job in plan.reported_jobs(results.chosen):
        if job in results.outcomes:
            outcomes[job.row][job] = results.outcomes[job]
    measures = list(dict.fromkeys(json.dumps(row.measure, sort_keys=True) for row in plan.rows))
    kind_of = {row.label: measures.index(json.dumps(row.measure, sort_keys=True)) for row in plan.rows}
    groups = [[row for row in plan.rows if kind_of[row.label] == number] for number in range(len(measures))]
    kinds = tuple(_kind(rows, [[*outcomes[row.label].values()] for row in rows], share) for rows in groups)
    axes = dict[str, tuple[float, ...]]()
    every = [o for runs in outcomes.values() for o in runs.values()]
    for axis in AXES:
        furthest = max((o.axis(axis) for o in every), key=lambda points: (points[-1], len(points)), default=(0.0,))
        ends = [min(o.axis(axis)[-1] for o in runs.values()) for runs in outcomes.values() if runs]
        axes[axis] = _choose_points(furthest, ends)
    rows = tuple(
        _row(plan, row, results, kinds[kind_of[row.label]], kind_of[row.label], outcomes[row.label], axes)
        for row in plan.rows
    )
    pairs = list[RowPair]()
    for a, b in combinations(rows, 2):
        if a.kind == b.kind and a.summary is not None and b.summary is not None:
            x, y = a.summary.scores, b.summary.scores
            probabilities = {name: probability_of_improvement(x[name], y[name]) for name in x}
            differences = {name: iqm_difference(x[name], y[name]) for name in x}
            enough = separation_by_chance(len(x["tokens"]), len(y["tokens"])) <= 1 - LEVEL
            separated = {
                name: enough and not p.low <= 0.5 <= p.high and not differences[name].low <= 0 <= differences[name].high
                for name, p in probabilities.items()
            }
            pairs.append(RowPair(a.label, b.label, probabilities, differences, separated))
    report = ComparisonReport(
        **{name: getattr(plan, name) for name in ("command", "version", "tokens", "seeds", "ladder")},
        tuning_seeds=plan.tuning_seeds if any(row.is_tuned for row in plan.rows) else (),
        share=share,
        stopped=results.stopped,
        kinds=kinds,
        axes=axes,
        rows=rows,
        pairs=tuple(pairs),
        metric=metric,
        preregistration=preregistration,
    )
    return replace(
        report,
        claims=tuple(make_claim(report, pair) for pair in pairs),
        ranking=tuple(describe_ranking(report)),
        differences=tuple(describe_differences(report)),
        caveats=tuple(describe_caveats(report)),
    )


def _choose_points(furthest: Sequence[float], ends: Sequence[float]) -> tuple[float, ...]:
    """Return the points of all curves: the evaluations of the run that goes furthest, for nothing was measured between them, and
    the ends of rows that no point below is near."""
    points = sorted(set(furthest))
    for end in sorted(ends):
        if not any(0 <= end - point <= NEAR_END * points[-1] for point in points):
            points = sorted([*points, end])
    return tuple(points)


def make_claim(report: ComparisonReport, pair: RowPair) -> Claim:
    """Return the sentence about a pair by the report's metric, and whether the decision rule allows it."""
    first, second = pair.first, pair.second
    difference, p = pair.difference[report.metric], pair.probability[report.metric]
    if difference.value < 0:
        first, second = second, first
        difference = Estimate(-difference.value, -difference.high, -difference.low)
        p = Estimate(1 - p.value, 1 - p.high, 1 - p.low)
    runs = {row.label: len(row.runs) for row in report.rows}
    n, m, planned = runs[first], runs[second], len(report.seeds)
    chance = separation_by_chance(n, m)
    if short := [f"{label} {runs[label]}" for label in (first, second) if runs[label] < planned]:
        reason = f"of {planned} planned seeds these are finished: {', '.join(short)}"
    elif chance > 1 - LEVEL:
        reason = f"with {n} and {m} seeds equal rows are completely separated in {chance:.0%} of cases"
    elif p.low <= 0.5 <= p.high:
        reason = f"the interval of P(above), {p.low:.2f} to {p.high:.2f}, holds ½"
    elif difference.low <= 0 <= difference.high:
        reason = f"the interval of the difference, {difference.low:.3f} to {difference.high:.3f}, holds 0"
    else:
        reason = "the intervals of P(above) and of the difference exclude ½ and 0"
    is_allowed = not short and pair.separated[report.metric]
    if report.preregistration is not None and report.preregistration.deviations:
        reason += "; not as preregistered"
    figures = (
        f"difference {difference.value:.3f}, {LEVEL:.0%} interval {difference.low:.3f} to {difference.high:.3f}, "
        f"P(above) {p.value:.2f}, {pluralise(n if n == m else f'{n} and {m}', 'seeds')}"
    )
    text = f"{first} {METRICS[report.metric].format(second)} ({figures})"
    return Claim(text, first, second, report.metric, difference, p, is_allowed, reason)


def describe_claims(report: ComparisonReport) -> Iterable[str]:
    """Yield the sentences that the intervals allow, and how many they do not."""
    for claim in report.claims:
        if claim.allowed:
            yield f"{claim.text}."
    if refused := [claim for claim in report.claims if not claim.allowed]:
        yield (
            f"Not allowed: a sentence about {len(refused)} of {pluralise(len(report.claims), 'pairs')}, which does not show that "
            "they are equal; the page and the JSON have each one's reason."
        )


def describe_preregistration(report: ComparisonReport) -> str:
    """Return whether the comparison was preregistered, and how it differs from that; "" if it was not."""
    note = report.preregistration
    if note is None:
        return ""
    deviations = f"with deviations: {'; '.join(note.deviations)}" if note.deviations else "carried out as written"
    return f"Preregistered on {note.date}, sha256 {note.sha256}; {deviations}."


def _kind(rows: Sequence[ComparisonRow], outcomes: Sequence[Sequence[RunOutcome]], share: float) -> Kind:
    every = [outcome for runs in outcomes for outcome in runs]
    level, equal = None, dict[str, float]()
    if every:
        before = sum(o.before for o in every) / len(every)
        best = max(float(interquartile_mean([o.after for o in runs])) for runs in outcomes if runs)
        level = before + share * (best - before) if best > before else None
        equal = {axis: min(o.axis(axis)[-1] for o in every) for axis in AXES}
    return Kind(rows[0].measure, tuple(row.label for row in rows), equal, level)


def _row(
    plan: ComparisonPlan,
    row: ComparisonRow,
    results: Results,
    kind: Kind,
    number: int,
    runs: Mapping[Job, RunOutcome],
    axes: Mapping[str, Sequence[float]],
) -> RowReport:
    value = results.chosen.get(row.label)
    job = Job(row.label, value, plan.seeds[0])
    edges = {min(row.grid): "smallest", max(row.grid): "largest"} if row.is_tuned else {}
    failures = [(job, error) for job, error in results.failures.items() if job.row == row.label]
    tuning = []
    for tried in row.grid if row.is_tuned else ():
        jobs = [Job(row.label, tried, seed) for seed in plan.tuning_seeds]
        scores = tuple(results.outcomes[job].after for job in jobs if job in results.outcomes)
        tuning.append(TunedValue(tried, scores, mean_final_score(plan, row.label, tried, results.outcomes)))
    return RowReport(
        **{f.name: getattr(row, f.name) for f in fields(RowDescription)},
        command=shlex.join(plan.train_argv(job)[1:-4]),
        option_value=value,
        edge=edges.get(value, "") if value is not None else "",
        tuning=tuple(tuning),
        kind=number,
        runs=tuple(
            summary.describe_run(job, o, shlex.join(["policygrad", *plan.train_argv(job)])) for job, o in runs.items()
        ),
        failed=tuple({"seed": job.seed, "value": job.option_value, "error": error} for job, error in failures),
        summary=summary.summarise_row(list(runs.values()), kind.equal, axes, kind.threshold) if runs else None,
    )
