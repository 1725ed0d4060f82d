"""What docs/many-processes.md shows of scripts/measure_ranks.py."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from pages.markdown import table
from pages.reports import load


def accuracy_block(found: Mapping[str, Any] | None = None) -> str:
    """The block. found: other results than the committed ones."""
    found = load("ranks") if found is None else found
    if not found:
        return "Not run yet: `python scripts/measure_ranks.py` runs them, and `make docs` writes what came of it."
    runs = found["runs"]
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed}, key=int)
    body = []
    for ranks, by_seed in runs.items():
        after = [f"{by_seed[seed]['after']:.3f}" if seed in by_seed else "" for seed in seeds]
        before = fmean(run["before"] for run in by_seed.values())
        mean = fmean(run["after"] for run in by_seed.values())
        body.append((ranks, f"{before:.3f}", *after, f"{mean:.3f}"))
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return "\n\n".join(
        (
            f"`python scripts/measure_ranks.py` ({versions}): held-out accuracy of `policygrad train --learner.world-size N`, "
            "before (mean of the seeds) and after.",
            table(("processes", "before", *(f"seed {seed}" for seed in seeds), "mean"), body),
        )
    )
