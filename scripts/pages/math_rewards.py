"""What docs/math-rewards.md shows of scripts/measure_math.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pages.markdown import block, table
from pages.reports import load

KINDS = {"right": "right answers, written in another way, that got 0", "wrong": "wrong answers that got 1"}


def judged_block(found: Mapping[str, Any] | None = None) -> str:
    """The block. found: other results than the committed ones."""
    found = load("math_rewards") if found is None else found
    if not found:
        return "Not run yet: `python scripts/measure_math.py` runs it, and `make docs` writes what came of it."
    body = [
        (
            text,
            data,
            f"{_sum(rows, 'answers'):,}",
            *(f"{_errors(rows, judge):,}" for judge in ("policygrad", "math_verify")),
        )
        for kind, text in KINDS.items()
        for data, rows in found[kind].items()
    ]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    parts = [
        f"Errors of `math` and of math-verify alone ({versions}):",
        table(("", "of", "answers", "`math`", "math-verify"), body),
        "By the way of writing, where one of them errs; each answer stands in a box or a sentence:",
        table(("", "written as", "answers", "`math`", "math-verify", "such as"), _ways(found)),
        block(found["measured_by"], "sh"),
    ]
    return "\n\n".join(parts)


def _ways(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for kind in KINDS:
        for data, ways in found[kind].items():
            for way in ways:
                errors = [way["errors"][judge] for judge in ("policygrad", "math_verify")]
                if any(errors):
                    examples = way["examples"].get("policygrad") or way["examples"]["math_verify"]
                    reference, completion = examples[0]
                    shown = f"`{reference}` and `{' '.join(completion.split())}`"
                    rows.append((f"{data}, {kind}", way["name"], f"{way['answers']:,}", *map(str, errors), shown))
    return rows


def _sum(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(row[name] for row in rows)


def _errors(rows: Sequence[Mapping[str, Any]], judge: str) -> int:
    return sum(row["errors"][judge] for row in rows)
