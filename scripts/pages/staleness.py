"""docs/staleness.md: scores and times measured by scripts/measure_staleness.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from measure_staleness import BEHAVIOURS, NAMES, STALENESS, label
from pages.markdown import Data, block, estimate, files, link, load, page, short, table

INTRO = """# Training on samples of older weights

With `--max-staleness K` a rollout may be sampled from weights that are up to K steps old, so that sampler and learner need not
wait for each other. This page shows what that costs in learning, and what it gains in time.

π_old is the policy that sampled the tokens. If the learner computes it (`old_policy = "learner"`), tokens count as its own, times
the truncated ratio π_old/μ that corrects the difference to the sampler's weights μ. If it is taken from the sampler
(`old_policy = "sampler"`), the algorithm's own ratio π/μ has to correct the full difference."""

WORDS = {"corrected": "the learner's, corrected", "uncorrected": "the sampler's"}
CLOCK = """## Seconds

`policygrad.planning.pipeline.simulate` predicts a run's time without the run, from the lengths of rollouts, the seconds that
sampler and learner take, and the order of events of the training loop. A rollout's time is a constant, a part per round of the
server (16 completions at a time) and a part per token; an update's is a constant and a part per token. They are fitted by least
squares to the steps of the run with staleness 0 (once with full completions, once with chunks); nothing else is fitted. One
llama.cpp server runs next to the learner, each with one thread. The first step, and the last K, during which nothing is left to
sample, are left out."""


def staleness_page(result: Data | None = None, clock: Data | None = None) -> str:
    """Return the page, from the committed reports unless others are given."""
    result = load("staleness") if result is None else result
    clock = load("pipeline") if clock is None else clock
    scores = _scores(result) if result else [_missing("")]
    return page(INTRO, "## Scores", *scores, CLOCK, *(_clock(clock) if clock else [_missing(" --clock")]))


def _missing(option: str) -> str:
    return f"Not measured yet: `python scripts/measure_staleness.py{option}` runs it, and `make docs` writes this."


def _scores(result: Data) -> list[str]:
    rows = {row["label"]: row for row in result["rows"]}
    head = ("algorithm", "π_old", *(f"K = {k}" for k in STALENESS))
    body = [
        (link(name), WORDS[behaviour], *(_cell(rows.get(label(name, k, behaviour))) for k in STALENESS))
        for name in NAMES
        for behaviour in BEHAVIOURS
    ]
    runs, seeds = sum(len(row["runs"]) for row in result["rows"]), len(result["seeds"])
    text = (
        f"Held-out accuracy after {short(result['tokens'])} sampled tokens, {seeds} seeds: interquartile mean and 95 % bootstrap "
        "interval. Each algorithm has the learning rate that was best for it at K = 0 ([measured](measured.md)), which need not be "
        "best at another K; updates per rollout are its own."
    )
    return [
        text,
        table(head, body),
        f"{runs} runs; all of them: {files('staleness')}. {result.get('note', '')}".rstrip(),
        block(result["measured_by"], "sh"),
    ]


def _cell(row: Mapping[str, Any] | None) -> str:
    return "–" if row is None or not row["summary"] else estimate(row["summary"]["final"])


def _clock(clock: Data) -> list[str]:
    head = (
        "K",
        "completions",
        "s per step",
        "predicted",
        "error",
        "learner waits",
        "predicted",
        "sampler waits",
        "predicted",
    )
    body = [_line(row) for row in clock["rows"]]
    errors = [abs(row["predicted"]["step"] / row["seen"]["step"] - 1) for row in clock["rows"] if row["staleness"]]
    text = (
        f"The largest error of a step's time at K > 0 is {max(errors):.0%}. The smallest K within 5 % of the fastest, with "
        f"chunks: {clock['enough']['seen']} as measured, {clock['enough']['predicted']} as predicted. The best K up to 16 in a "
        "simulated run of 200 steps with lengths sampled from the measured ones: "
        + ", ".join(f"{k} {_answers(int(piece))}" for piece, k in clock["best"].items())
        + "."
    )
    return [table(head, body), text, block(clock["measured_by"], "sh")]


def _answers(piece: int) -> str:
    return f"in chunks of {piece}" if piece else "full"


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    seen, report = row["seen"], row["predicted"]
    return (
        str(row["staleness"]),
        _answers(row["piece"]),
        f"{seen['step']:.2f}",
        f"{report['step']:.2f}",
        f"{report['step'] / seen['step'] - 1:+.0%}",
        *(f"{side[name]:.0%}" for name in ("learner_idle", "sampler_idle") for side in (seen, report)),
    )
