"""A plan in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policygrad.commands.describe import HEAD, NAME, QUIET, Line, wrapped
from policygrad.planning.plan import Plan
from policygrad.planning.remedies import Remedy
from policygrad.planning.told import Table, assumptions, summary, tables, title


def table(
    plan: Plan, others: Sequence[Plan], ways: Sequence[Remedy], steps: int, price: float | None, width: int
) -> list[Line]:
    """The whole plan, running text within `width`."""
    text = max(40, min(width, 100))
    lines: list[Line] = [*wrapped((), title(plan), text, HEAD), *wrapped((), summary(plan, steps, price), text), ()]
    for part in tables(plan, others, ways, steps, price):
        lines += [*_table(part, text), ()]
    lines.append((("Assumed", HEAD),))
    for sentence in assumptions(plan):
        lines += wrapped((("  · ", QUIET),), sentence, text)
    return lines


def _table(part: Table, width: int) -> Iterator[Line]:
    """Names to the left, figures to the right."""
    yield ((part.title, HEAD),)
    cells = [part.head, *part.rows] if any(part.head) else list(part.rows)
    widths = [max(len(row[i]) for row in cells) for i in range(len(part.head))]
    for number, row in enumerate(cells):
        style = QUIET if any(part.head) and number == 0 else ""
        first, *rest = row
        figures = [
            cell.ljust(w) if _is_text(part, i) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(rest, widths[1:], strict=True), 1)
        ]
        yield ((f"  {first.ljust(widths[0])}", style or NAME), ("  " + "  ".join(figures), style))
    if part.note:
        yield from wrapped((("  ", ""),), part.note, width, QUIET)


def _is_text(part: Table, column: int) -> bool:
    """Whether a column has no figures, by its first row."""
    return bool(part.rows) and not any(c.isdigit() or c == "–" for c in part.rows[0][column]) and not part.head[column]
