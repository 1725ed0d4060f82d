"""docs/measured.md and docs/measured.svg: the results of scripts/measure_algorithms.py, from its reports in "
"docs/results/."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from measure_algorithms import REGIME, UNGATED, describe_lack
from pages.markdown import Data, block, estimate, files, link, load, page, short, table
from pages.replay import replay_section
from pages.staleness import staleness_section
from policygrad.algorithms import ALGORITHMS
from policygrad.compare.plan import LADDERS, OVERRIDES


def ladder_section(name: str, result: Data | None, told: Collection[str] = ()) -> str:
    """Write a ladder's section, without the caveats that the page has told."""
    ladder, title = LADDERS[name], f"## {LADDERS[name].title}"
    default_command = f"python scripts/measure_algorithms.py --ladder {name} -- --jobs 2"
    command = block(default_command if result is None else result["measured_by"], "sh")
    if result is None:
        return f"{title}\n\n{ladder.why}\n\nNot measured yet:\n\n{command}"
    published = {rung.label: rung.published for rung in ladder.rungs}
    rows = [_rung(row, published.get(row["label"], "")) for row in result["rows"] if row["summary"]]
    head = (
        "row",
        "adds",
        "published",
        "tuned",
        "equal tokens",
        "equal updates",
        "area",
        "updates",
        "length",
        "cut off",
        "entropy",
    )
    lists = _list([*result["ranking"], *result["caveats"]], told)
    return "\n\n".join(
        [
            title,
            f"{ladder.why} Published: {ladder.source}. Here: {len(result['seeds'])} seeds, {result['tokens']:,} tokens a "
            f"run; length "
            "[tokens], share cut off and entropy [nats a token] are those of the last fifth of a run's steps.",
            table(head, rows),
            lists,
            command,
            f"{files(f'ladder-{name}')} hold every run.",
        ]
    )


def _rung(row: Data, published: str) -> tuple[str, ...]:
    summary, means = row["summary"], row["summary"]["means"]
    return (
        f"`{row['label']}`",
        row["change"].partition("; published")[0],
        published,
        "–" if row["option_value"] is None else f"{row['option_value']:g}",
        *(estimate(summary["equal"][axis]) for axis in ("tokens", "updates")),
        estimate(summary["area"]),
        f"{means['updates']:.0f}",
        f"{means['length']:.1f}" if "length" in means else "–",
        f"{means['truncated']:.0%}" if "truncated" in means else "–",
        f"{means['entropy']:.2f}" if "entropy" in means else "–",
    )


TITLE = "# Measurements"
INTRO = (
    "How well algorithms learn, how often their gates act, what old samples cost, and whether a replay buffer pays, all with the "
    "small model inside the package. "
    "How fast policygrad is, beside TRL, is in [benchmarks](benchmarks.md)."
)
HEAD = (
    "algorithm",
    "tuned",
    "equal tokens",
    "equal updates",
    "equal seconds",
    "area",
    "above / open / below",
    "updates",
    "CPU seconds",
    "tokens to it",
)

HARDLY = 0.1
"""Share of the way to the threshold; a row that gains less does not learn."""


def row_of(name: str) -> Data | None:
    """An algorithm's row, if it was measured and did not fail."""
    result = load() or {"rows": []}
    return next((row for row in result["rows"] if row["label"] == name and row["summary"]), None)


def summary_sentence(row: Data) -> str:
    """One algorithm's runs in a sentence."""
    summary, runs = row["summary"], len(row["runs"])
    rate = (
        f", {row['tuned_option'].removeprefix('--')} {row['option_value']:g}" if row["option_value"] is not None else ""
    )
    return (
        f"Held-out score {summary['before']:.3f} → {estimate(summary['final'])} ({runs} seed{'s' * (runs > 1)}{rate}, "
        f"{short(summary['means']['tokens'])} sampled tokens in {summary['means']['updates']:.0f} updates; interquartile "
        f"mean and 95 % bootstrap interval)."
    )


def measured_page(
    result: Data | None = None, ladders: Mapping[str, Data | None] | None = None, gates: Data | None = None
) -> str:
    """Write the page, with a row per algorithm, from the committed reports unless others are given."""
    result = load() if result is None else result
    gates = load("gates") if gates is None else gates
    ladders = {name: load(f"ladder-{name}") for name in LADDERS} if ladders is None else ladders
    default_command = "python scripts/measure_algorithms.py -- --jobs 2"
    command = block(default_command if result is None else result["measured_by"], "sh")
    if result is None:
        waiting = f"Not measured yet:\n\n{command}\n\nruns it, and `make docs` writes this page."
        rest = (*(ladder_section(name, ladders[name]) for name in LADDERS), staleness_section(), replay_section())
        return page(TITLE, waiting, *rest)
    told = set(result["caveats"])
    return page(
        TITLE,
        INTRO,
        f"## Every algorithm\n\n{_intro(result)}",
        "![Learning curves of every algorithm over sampled tokens, with the curve of grpo for comparison](measured.svg)",
        *(_table(result, number, kind) for number, kind in enumerate(result["kinds"])),
        _not_measured(result),
        _section("What the figures show", [*_by_updates(result), *_not_learned(result), *result["ranking"]]),
        _section("What cannot be concluded", result["caveats"]),
        f"### How it was measured\n\n{command}\n\nwhich is `policygrad compare` with every row. {files('algorithms')} hold "
        "every run and curve, the scores at every learning rate, and in what the rows differ besides the algorithm (updates per "
        "rollout, samples and prompts per step).",
        _overrides(),
        gates_section(result, gates, told),
        *(ladder_section(name, ladders[name], told) for name in LADDERS),
        staleness_section(),
        replay_section(),
    )


def _intro(result: Data) -> str:
    kind, seeds = result["kinds"][0]["measure"], len(result["seeds"])
    return (
        f"Each algorithm trains the [embedded model](small-models.md#the-text-model) until {result['tokens']:,} tokens have "
        f"been sampled, at the best learning rate of a grid, with {seeds} seeds. The rate is chosen on "
        f"{len(result['tuning_seeds'])} other seed{'s' * (len(result['tuning_seeds']) > 1)}, not reported here. "
        f"A score is the mean reward of {kind['samples']} samples on each of "
        f"{kind['problems']} held-out problems; a figure is the interquartile mean over seeds with its 95 % stratified "
        "bootstrap interval, as in Agarwal et al. 2021. Rows are compared at points that all of them reach: equal tokens, "
        "equal updates of the weights, equal seconds of training. *Tuned* is the learning rate, with \\* at the edge of its grid; "
        "*area* is the mean height of the curve over tokens; "
        "*above / open / below* counts the rows that this one beats, cannot be distinguished from, and loses to at equal "
        f"tokens; *it* is the threshold, {result['share']:.0%} of the way from the score before training to the best row's "
        "final one, and what it took to get there is a median over seeds."
    )


def _table(result: Data, number: int, kind: Data) -> str:
    """Write the table of the rows of one kind."""
    rows = [_row(result, row) for row in result["rows"] if row["kind"] == number and row["summary"]]
    if not rows:
        return ""
    ends = ", ".join(f"{end:,.0f} {axis}" for axis, end in kind["equal"].items())
    level = "" if kind["threshold"] is None else f" The threshold is {kind['threshold']:.3f}."
    head = f"On the task `{kind['measure']['task']}`; all rows are compared at {ends}.{level}"
    return f"{head}\n\n{table(HEAD, rows)}"


def _row(result: Data, row: Data) -> tuple[str, ...]:
    summary, means = row["summary"], row["summary"]["means"]
    few = "" if len(row["runs"]) == len(result["seeds"]) else f" ({len(row['runs'])} of {len(result['seeds'])} seeds)"
    reach = summary["reach"].get("tokens")
    return (
        link(row["label"]) + few,
        "–" if row["option_value"] is None else f"{row['option_value']:g}" + "\\*" * bool(row["edge"]),
        *(estimate(summary["equal"][axis]) for axis in ("tokens", "updates", "seconds")),
        estimate(summary["area"]),
        count_pairs(result, row["label"]),
        f"{means['updates']:.0f}",
        f"{means['cpu_seconds']:.0f}" if "cpu_seconds" in means else "–",
        "–" if reach is None else "not reached" if reach["median"] is None else short(reach["median"]),
    )


def count_pairs(result: Data, label: str) -> str:
    """Count, at equal tokens, the rows that this one is above of, not distinguishable from and below of: `12 / 5 / 3`."""
    counts = {"above": 0, "open": 0, "below": 0}
    for pair in result["pairs"]:
        if label not in (pair["first"], pair["second"]):
            continue
        higher = pair["probability"]["tokens"]["value"] > 0.5
        side = "above" if higher == (pair["first"] == label) else "below"
        counts[side if pair["separated"]["tokens"] else "open"] += 1
    return " / ".join(map(str, counts.values()))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Compute Spearman's ρ: the correlation of ranks, equal values sharing the mean of theirs; 0 where either is "
    "constant."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2 for value in values]

    a, b = ranks(x), ranks(y)
    middle = (len(a) + 1) / 2
    size = sum((i - middle) ** 2 for i in a) * sum((j - middle) ** 2 for j in b)
    return sum((i - middle) * (j - middle) for i, j in zip(a, b, strict=True)) / size**0.5 if size else 0.0


def _by_updates(result: Data) -> list[str]:
    """Compare the ranking with the number of updates, over the rows without a trust region."""
    rows = [
        row
        for row in result["rows"]
        if row["kind"] == 0
        and row["summary"]
        and row["algorithm"] in ALGORITHMS
        and ALGORITHMS[row["algorithm"]].update_rule.uses_lr
    ]
    if len(rows) < 3:
        return []
    updates = [row["summary"]["means"]["updates"] for row in rows]
    tokens, same = (
        rank_correlation(updates, [row["summary"]["equal"][axis]["value"] for row in rows])
        for axis in ("tokens", "updates")
    )
    return [
        f"Over the {len(rows)} rows without a trust region the score follows the number of updates that a row takes within "
        f"the budget: their rank correlation is {tokens:.2f} at equal tokens and {same:.2f} at equal updates. "
        f"The order mostly reflects "
        "how often a rollout is used, not the idea in a row."
    ]


def _not_learned(result: Data) -> list[str]:
    """Name the rows that are hardly above what they were before training, at equal tokens."""
    found = []
    for row in result["rows"]:
        summary, threshold = row["summary"], result["kinds"][row["kind"]]["threshold"]
        if not summary or threshold is None:
            continue
        score, before = summary["equal"]["tokens"], summary["before"]
        if score["value"] - before < HARDLY * (threshold - before):
            found.append(
                f"{row['label']} does not learn here: its score is {estimate(score)}, and {before:.3f} before training "
                f"({link(row['label'])} says why)."
            )
    return found


def gates_section(result: Data, gates: Data | None, told: Collection[str] = ()) -> str:
    """Write on how many tokens gates acted, at the rows' own settings and in a regime in which they act."""
    title, command = "## Where gates act", "python scripts/measure_algorithms.py --gates"
    if gates is None:
        return f"{title}\n\nNot measured yet:\n\n{block(command, 'sh')}"
    means_above = {row["label"]: row["summary"]["means"] for row in result["rows"] if row["summary"]}
    rows = []
    for row in gates["rows"]:
        if row["summary"] is None:
            continue
        means, before = row["summary"]["means"], means_above.get(row["label"], {})
        rows.append(
            (
                f"`{row['label']}`" if row["label"] == UNGATED else link(row["label"]),
                _share(before["clipped_low"] + before["clipped_high"]) if "clipped_low" in before else "–",
                _share(means["gated_fraction"]) if "gated_fraction" in means else "–",
                estimate(row["summary"]["equal"]["tokens"]),
                estimate(row["summary"]["equal"]["updates"]),
                f"{means['updates']:.0f}",
            )
        )
    head = ("algorithm", "acted above", "acts here", "equal tokens", "equal updates", "updates")
    ends = gates["kinds"][0]["equal"]
    text = (
        "In the table above some gates hardly act: a row with one update per rollout has r = 1 throughout, and other "
        "rows have "
        "wide bounds for learning rates at which the policy hardly moves. There, a row's rank says nothing about its "
        "gate. Here "
        f"every row has `{' '.join(REGIME)}`: many updates on old samples at a high learning rate, with the sampler's "
        f"policy as "
        "π_old. *Acted* is the share of tokens whose weight the gate cut to 0 or capped: over the last fifth of the "
        "steps above, "
        f"over all steps here. `{UNGATED}` is dapo with its gate replaced by `Importance`, w = r. Learning rates were not "
        f"tuned. "
        f"{len(gates['seeds'])} seeds; rows are compared at {ends['tokens']:,.0f} tokens and {ends['updates']:,.0f} "
        f"updates."
    )
    lists = _list([*gates["ranking"], *gates["caveats"]], told)
    return "\n\n".join(
        [title, text, table(head, rows), lists, block(gates["measured_by"], "sh"), f"{files('gates')} hold every run."]
    )


def _share(x: float) -> str:
    """Format with two digits, however small: 15 %, 0.63 %, 0.009 %."""
    return "0 %" if x == 0 else f"{100 * x:.2g} %" if x >= 1e-4 else f"{100 * x:.4f} %"


def _not_measured(result: Data) -> str:
    """List the rows that are missing, and why; those that are left out for the same reason together."""
    present = {row["label"] for row in result["rows"]}
    left_out: dict[str, list[str]] = {}
    for name, reason in result.get("left_out", {}).items():
        if name in ALGORITHMS:
            left_out.setdefault(describe_lack(name) or reason, []).append(link(name))
    reasons = {
        name: "not measured yet"
        for name in ALGORITHMS
        if name not in present and name not in result.get("left_out", {})
    }
    failed = {
        row["label"]: f"every run failed: {row['failed'][-1]['error'].splitlines()[-1]}"
        if row["failed"]
        else "no run yet"
        for row in result["rows"]
        if not row["summary"]
    }
    others = [f"- {link(name)}: {reason}" for name, reason in (reasons | failed).items() if name in ALGORITHMS]
    return "\n".join([*(f"- {', '.join(names)}: {reason}" for reason, names in left_out.items()), *others])


def _overrides() -> str:
    rows = [(link(name), f"`{' '.join(o.options)}`", o.reason) for name, o in OVERRIDES.items() if name in ALGORITHMS]
    head = "Options that do not suit answers of ten tokens were changed:"
    changes = [f"{head}\n\n{table(('algorithm', 'options', 'why'), rows)}"] if rows else []
    return "\n\n".join(["### Options", *changes, _remarks()])


def _remarks() -> str:
    """List what to know when comparing rows; derived from their parts, so that it holds for new rows too."""
    fitted = [link(name) for name, a in ALGORITHMS.items() if a.critic is not None and a.critic.pretrain]
    alone = [link(name) for name, a in ALGORITHMS.items() if not a.update_rule.uses_lr]
    remarks = [
        (
            list(map(link, ALGORITHMS)),
            "tokens count everything sampled for training, including value estimates",
        ),
        (fitted, "tokens include the rollouts that fit the critic before training"),
        (
            alone,
            "the policy's step has no learning rate: its length δ is tuned, and the critic's learning rate is the default",
        ),
    ]
    every = len(ALGORITHMS)
    return "\n".join(
        f"- {'All' if len(names) == every else ', '.join(names)}: {text}." for names, text in remarks if names
    )


def _section(title: str, sentences: Sequence[str]) -> str:
    return f"### {title}\n\n{_list(sentences)}" if sentences else ""


def _list(sentences: Sequence[str], told: Collection[str] = ()) -> str:
    return "\n".join(f"- {text}" for text in sentences if text not in told)


ACROSS, WIDTH, HEIGHT, LEFT, TOP = 6, 178, 132, 40, 34
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - 22, HEIGHT - 50
BASELINE = "grpo"
STYLE = """
  .page { fill: #ffffff } .grid { stroke: #d8dee4 } .band { fill: #0969da; opacity: .18 } .curve { fill: none; stroke: #0969da;
  stroke-width: 1.8 } .baseline { fill: none; stroke: #8c959f; stroke-width: 1.2; stroke-dasharray: 3 3 }
  text { font-family: ui-sans-serif, system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; font-size: 12px }
  .small { font-size: 10px; fill: #57606a }"""
DARK = """
  .page { fill: #0d1117 } .grid { stroke: #30363d } .band { fill: #58a6ff } .curve { stroke: #58a6ff } .baseline { stroke: #8b949e }
  text { fill: #e6edf3 } .small { fill: #9198a1 }"""


def curves(result: dict[str, Any] | None) -> str:
    """Draw the learning curves as an SVG, or 'Not measured yet'."""
    rows = [row for row in result["rows"] if row["summary"]] if result else []
    if result is None or not rows:
        return _svg(400, 60, ['<text x="20" y="35">Not measured yet.</text>'])
    xs = result["axes"]["tokens"]
    baseline = next((row["summary"]["curves"]["tokens"]["value"] for row in rows if row["label"] == BASELINE), None)
    down = -(-len(rows) // ACROSS)
    shapes = [
        f'<text class="small" x="{LEFT}" y="16">held-out score over sampled tokens, 0 to {xs[-1]:,.0f}; dashed: {BASELINE}</text>'
    ]
    for number, row in enumerate(rows):
        x, y = LEFT + number % ACROSS * WIDTH, TOP + number // ACROSS * HEIGHT
        shapes += _panel(x, y, row, xs, None if row["label"] == BASELINE else baseline, first=number % ACROSS == 0)
    return _svg(LEFT + ACROSS * WIDTH, TOP + down * HEIGHT, shapes)


def _panel(
    x: float, y: float, row: dict[str, Any], xs: Sequence[float], baseline: list[float] | None, *, first: bool
) -> list[str]:
    curve = row["summary"]["curves"]["tokens"]
    bottom, end = y + 16 + PLOT_HEIGHT, xs[-1] or 1.0

    def points(values: Sequence[float | None], order: int = 1) -> list[str]:
        pairs = [(a, v) for a, v in zip(xs, values, strict=True) if v is not None][::order]
        return [f"{x + PLOT_WIDTH * a / end:.1f} {bottom - PLOT_HEIGHT * v:.1f}" for a, v in pairs]

    shapes = [f'<text x="{x}" y="{y + 10}">{escape(row["label"])}</text>']
    for level in (0.0, 0.5, 1.0):
        height = bottom - PLOT_HEIGHT * level
        shapes.append(f'<path class="grid" d="M{x} {height:.1f}h{PLOT_WIDTH}"/>')
        if first:
            shapes.append(f'<text class="small" x="{x - 6}" y="{height + 3:.1f}" text-anchor="end">{level:g}</text>')
    if baseline is not None:
        shapes.append(f'<path class="baseline" d="M{"L".join(points(baseline))}"/>')
    shapes.append(f'<path class="band" d="M{"L".join([*points(curve["high"]), *points(curve["low"], -1)])}Z"/>')
    return [*shapes, f'<path class="curve" d="M{"L".join(points(curve["value"]))}"/>']


def _svg(width: float, height: float, shapes: Sequence[str]) -> str:
    style = f"<style>{STYLE}\n  @media (prefers-color-scheme: dark) {{{DARK}\n  }}\n</style>"
    page = f'<rect class="page" width="{width:g}" height="{height:g}" rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    title = "<title>Learning curves of every algorithm</title>"
    return "\n".join([head, title, style, page, *shapes, "</svg>"]) + "\n"
