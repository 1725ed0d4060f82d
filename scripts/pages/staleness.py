"""The section of docs/measured.md on old samples: scores and times measured by scripts/measure_staleness.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from measure_staleness import BEHAVIOURS, NAMES, STALENESS, label
from pages.markdown import Data, block, estimate, files, link, load, short, table

INTRO = """## Samples of older weights

With `--max-staleness K` a rollout may be sampled from weights that are up to K steps old, so that sampler and learner need not
wait for each other. Below is what that costs in learning, and what it gains in time.

π_old is the policy that sampled the tokens. If the learner computes it (`old_policy = "learner"`), tokens count as its own, times
the truncated ratio π_old/μ that corrects the difference to the sampler's weights μ. If it is taken from the sampler
(`old_policy = "sampler"`), the algorithm's own ratio π/μ has to correct the full difference."""

WORDS = {"corrected": "the learner's, corrected", "uncorrected": "the sampler's"}
CLOCK = """### Seconds

One llama.cpp server, which generates 16 completions at a time, runs next to the learner, each with one thread.
The first step, and the last K, during which nothing is left to sample, are left out."""


def staleness_section(result: Data | None = None, clock: Data | None = None) -> str:
    """Return the section, from the committed reports unless others are given."""
    result = load("staleness") if result is None else result
    clock = load("staleness-seconds") if clock is None else clock
    scores = _scores(result) if result else [_missing("")]
    return "\n\n".join([INTRO, *scores, CLOCK, *(_clock(clock) if clock else [_missing(" --clock")])])


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
        "interval. Each algorithm has the learning rate that was best for it at K = 0 (above), which need not be "
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
    head = ("K", "completions", "s per step", "learner waits", "sampler waits")
    body = [
        (
            str(row["staleness"]),
            f"in chunks of {row['chunk_tokens']}" if row["chunk_tokens"] else "full",
            f"{row['step']:.2f}",
            f"{row['learner_idle']:.0%}",
            f"{row['sampler_idle']:.0%}",
        )
        for row in clock["rows"]
    ]
    return [table(head, body), block(clock["measured_by"], "sh")]
