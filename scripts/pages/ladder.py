"""A ladder's section of docs/measured.md: what each part of a method added, beside what its paper says."""

from __future__ import annotations

from pages.markdown import block, table
from pages.reports import Data, estimate, files
from policygrad.compare.plan import LADDERS


def ladder_section(name: str, found: Data | None) -> str:
    """A ladder's section."""
    ladder, title = LADDERS[name], f"## {LADDERS[name].title}"
    called = f"python scripts/measure_algorithms.py --ladder {name} -- --jobs 2"
    command = block(called if found is None else found["measured_by"], "sh")
    if found is None:
        return f"{title}\n\n{ladder.why}\n\nNot measured yet:\n\n{command}"
    published = {rung.label: rung.published for rung in ladder.rungs}
    rows = [_rung(row, published.get(row["label"], "")) for row in found["rows"] if row["summary"]]
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
    lists = "\n".join(f"- {text}" for text in [*found["ranking"], *found["caveats"]])
    return "\n\n".join(
        [
            title,
            f"{ladder.why} Published: {ladder.source}. Here: {len(found['seeds'])} seeds, {found['tokens']:,} tokens a run; length "
            "[tokens], share cut off and entropy [nats a token] are those of the last fifth of a run's steps.",
            table(head, rows),
            lists,
            command,
            f"{files(f'ladder-{name}')} hold every run and every curve.",
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
