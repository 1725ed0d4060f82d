"""What docs/environments.md shows of scripts/measure_environments.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pages.markdown import table
from pages.reports import load

HEAD = ("task", "seed", "before", "after", "gain", "steps", "sampled tokens", "changes by")


def learned_block(found: Mapping[str, Any] | None = None) -> str:
    """The block. found: other results than the committed ones."""
    found = load("environments") if found is None else found
    if not found:
        return (
            "Not run yet: `python scripts/measure_environments.py` runs them, and `make docs` writes what came of it."
        )
    body = []
    for task in found.values():
        for seed, run in task["seeds"].items():
            before, after = run["before"], run["after"]
            cells = (
                f"{before:.3f}",
                f"{after:.3f}",
                f"{after - before:+.3f}",
                str(task["steps"]),
                f"{run['tokens']:,}",
            )
            body.append((task["title"], seed, *cells, _ends(run["ends"])))
    one = next(iter(found.values()))
    versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
    said = [
        f"- {task['title']}: `{task['said'][0]}` in the first step, `{task['said'][1]}` in the last"
        for task in found.values()
    ]
    return "\n\n".join(
        (
            f"`python scripts/measure_environments.py` ({versions}): GRPO on what demonstrations have made of the embedded model. "
            "Before and after are mean rewards of two samples on each of the held-out problems.",
            table(HEAD, body),
            "The first completion of a step, of the first seed (` / ` stands between turns):",
            "\n".join(said),
        )
    )


def _ends(ends: Mapping[str, list[float]]) -> str:
    """What else moved, from the first step to the last."""
    return ", ".join(f"{name.rpartition('/')[2].replace('_', ' ')} {a:.2f} → {b:.2f}" for name, (a, b) in ends.items())
