"""docs/measured.md: what scripts/measure_algorithms.py has measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from measure_algorithms import OVERRIDES, RESULTS, SEEDS, TOKENS, results
from pages.markdown import block, page, table
from policygrad.algorithms import ALGORITHMS

Row = dict[str, Any]
HEAD = ("algorithm", "before", "after", "gain", "steps", "tokens", "CPU seconds", "peak MiB", "override")


def by_algorithm() -> dict[str, list[Row]]:
    """Finished runs of each algorithm, by seed."""
    found: dict[str, list[Row]] = {}
    for row in sorted(results(), key=lambda row: row["seed"]):
        found.setdefault(row["name"], []).append(row)
    return found


def mean(rows: Sequence[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def spread(rows: Sequence[Row], key: str) -> str:
    """mean ± standard deviation over the seeds."""
    values = [row[key] for row in rows]
    return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


def summary_sentence(rows: Sequence[Row]) -> str:
    """One algorithm's runs in a sentence."""
    seeds = f"{len(rows)} seed{'s' * (len(rows) > 1)}"
    tokens, seconds = mean(rows, "tokens"), mean(rows, "cpu_seconds")
    return (
        f"Held-out score {spread(rows, 'before')} → {spread(rows, 'after')} ({seeds}, {tokens / 1e3:.0f}k sampled tokens, "
        f"{seconds:.0f} CPU seconds each; `{rows[0]['command']}`)."
    )


def measured_page() -> str:
    """The page: a row per algorithm, measured or not."""
    found = by_algorithm()
    rows = [_row(name, found.get(name, [])) for name in ALGORITHMS]
    return page(
        "# Every algorithm, measured",
        f"The same small model, the same tokens: each algorithm trains the [embedded model](base-model.md) with the default "
        f"learning rate until {TOKENS:,} tokens have been sampled, once per seed ({', '.join(map(str, SEEDS))}). The score is "
        "the mean reward of 8 samples on each of 256 held-out problems, before and after; ± is the standard deviation over "
        "the seeds. Tokens are all that were sampled for training, those of value estimates included. CPU seconds are those of "
        "the whole command, both evaluations and the reward workers included (the machine had other work, so that seconds on "
        f"the clock would say little){_threads(found)}.",
        table(HEAD, rows),
        _overrides(),
        _same(found),
        f"Measured by\n\n{block('python scripts/measure_algorithms.py --threads 1 --jobs 2', 'sh')}",
        f"which goes on where it stopped; {_where(found)}. A task this small says that an algorithm works and what it costs, "
        "not which is best on yours: 0.7M parameters, ten-token answers, exact rewards, and one learning rate for all.",
    )


def _threads(found: dict[str, list[Row]]) -> str:
    threads = sorted({row["threads"] for rows in found.values() for row in rows})
    return f", with {' or '.join(map(str, threads))} thread{'s' * (threads != [1])} per run" if threads else ""


def _where(found: dict[str, list[Row]]) -> str:
    link = f"[{RESULTS.name}](results/{RESULTS.name})" if found else f"`docs/results/{RESULTS.name}`"
    return f"the runs are in {link}, one line each"


def _row(name: str, rows: list[Row]) -> tuple[str, ...]:
    link = f"[`{name}`](algorithms/{name}.md)"
    mark = "yes, below" if name in OVERRIDES else ""
    if not rows:
        return (link, "not measured yet", *[""] * (len(HEAD) - 3), mark)
    few = "" if len(rows) == len(SEEDS) else f" ({len(rows)} of {len(SEEDS)} seeds)"
    gain = mean(rows, "after") - mean(rows, "before")
    return (
        link,
        spread(rows, "before"),
        spread(rows, "after") + few,
        f"{gain:+.3f}",
        f"{mean(rows, 'steps'):.0f}",
        f"{mean(rows, 'tokens') / 1e3:.0f}k",
        f"{mean(rows, 'cpu_seconds'):.0f}",
        f"{mean(rows, 'peak_mib'):.0f}",
        mark,
    )


def _same(found: dict[str, list[Row]]) -> str:
    """Which algorithms' runs are one and the same."""
    runs: dict[tuple[Any, ...], list[str]] = {}
    for name in ALGORITHMS:
        if name in found:
            outcome = tuple((row["seed"], row["after"], row["steps"], row["tokens"]) for row in found[name])
            runs.setdefault(outcome, []).append(f"`{name}`")
    same = [" = ".join(names) for names in runs.values() if len(names) > 1]
    if not same:
        return ""
    return (
        "While a rollout feeds one update every ratio is 1, where every gate's weight is 1: algorithms that differ in "
        f"nothing else that came up here take the same steps, to the digit ({'; '.join(same)}). More updates per rollout tell "
        "them apart: `--algorithm.step.epochs`."
    )


def _overrides() -> str:
    rows = [(f"`{name}`", f"`{' '.join(o.options)}`", o.reason) for name, o in OVERRIDES.items() if name in ALGORITHMS]
    if not rows:
        return ""
    head = "Where a default does not suit answers of ten tokens, it was changed:"
    return f"{head}\n\n{table(('algorithm', 'options', 'why'), rows)}\n\n{_remarks()}"


def _remarks() -> str:
    """What has to be known to compare rows; derived, so that it holds for rows to come."""
    tasks = [f"`{name}`" for name, override in OVERRIDES.items() if "--task" in override.options and name in ALGORITHMS]
    fitted = [f"`{name}`" for name, a in ALGORITHMS.items() if a.critic is not None and a.critic.pretrain]
    alone = [f"`{name}`" for name, a in ALGORITHMS.items() if not a.step.uses_lr]
    remarks = [
        (tasks, "another task is measured on its own held-out problems: compare the gain, not the score"),
        (fitted, "the rollouts that fit the critic before training are part of the tokens"),
        (alone, "the policy's step has no learning rate; the critic's has"),
    ]
    return "\n".join(f"- {', '.join(names)}: {text}." for names, text in remarks if names)
