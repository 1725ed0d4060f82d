"""A comparison in the terminal: one row per algorithm, then what it is about, then what cannot be concluded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policygrad.commands.describe import HEAD, NAME, QUIET, Line, wrapped
from policygrad.compare.counts import counted
from policygrad.compare.outcomes import AXES
from policygrad.compare.report import Kind, Report, RowReport
from policygrad.compare.statements import rate
from policygrad.compare.statistics import Estimate

Column = tuple[str, Callable[[RowReport], str]]
NONE = "–"


def table(found: Report, width: int) -> list[Line]:
    """The whole report, no line longer than `width` where its columns allow."""
    text = max(40, min(width, 110))
    lines: list[Line] = []
    for number, kind in enumerate(found.kinds):
        rows = [row for row in found.rows if row.kind == number]
        lines += [*_heading(found, kind, width), *_columns(rows, _figures(found, rows), width), ()]
        lines += [*_reach(found, kind, rows, width), *_above(found, rows, width)]
    lines += _tuning(found, width)
    for title, sentences in (
        ("What it says", found.says),
        ("What differs besides the algorithm", found.differs),
        ("What cannot be concluded", found.limits),
    ):
        if not sentences:
            continue
        lines.append(((title, HEAD),))
        for sentence in sentences:
            lines += wrapped((("  · ", QUIET),), sentence, text)
        lines.append(())
    for row in found.rows:
        for failure in row.failed:
            at = "" if failure["value"] is None else f" at {failure['value']:g}"
            lines += wrapped(
                (("failed  ", HEAD),),
                f"{row.label}{at}, seed {failure['seed']}: {failure['error'].splitlines()[-1]}",
                text,
            )
    return lines


def _heading(found: Report, kind: Kind, width: int) -> list[Line]:
    task, model = kind.measure.get("task", ""), kind.measure.get("model", "")
    head = f"{task}, {model}: {found.tokens:,} tokens a run, {counted(len(found.seeds), 'seeds')}"
    says = (
        "interquartile mean of held-out scores [95 % bootstrap interval over seeds]; * = at the edge of its grid; entropy, KL to "
        "the reference (nats a token), length and share cut off: means over the last fifth of the steps"
    )
    return [*wrapped((), head, width, HEAD), *wrapped((), says, width, QUIET)]


def _figures(found: Report, rows: Sequence[RowReport]) -> list[Column]:
    """Columns of the table; a value, its interval and what it cost."""

    def equal(axis: str) -> Callable[[RowReport], str]:
        return lambda row: _estimate(row.summary.equal[axis]) if row.summary else NONE

    columns: list[Column] = [("", lambda row: row.label)]
    columns.append(("lr", lambda row: rate(row) + "*" * (bool(row.edge) and row.knob == "--lr")))
    if any(row.value is not None and row.knob != "--lr" for row in rows):
        columns.append(("tuned", lambda row: NONE if row.value is None else f"{row.value:g}" + "*" * bool(row.edge)))
    columns += [(f"equal {axis}", equal(axis)) for axis in AXES]
    columns += [("area", lambda row: _estimate(row.summary.area) if row.summary else NONE)]
    columns += [("entropy", _mean("entropy", _fine)), ("KL", _mean("kl", _fine))]
    columns += [("length", _mean("length")), ("cut off", _percent("truncated"))]
    columns += [(name, _mean(name)) for name in ("updates", "tokens", "seconds")]
    columns.append(("seeds", lambda row: str(len(row.runs))))
    return columns


def _mean(name: str, told: Callable[[float], str] | None = None) -> Callable[[RowReport], str]:
    told = told or _short
    return lambda row: told(row.summary.means[name]) if row.summary and name in row.summary.means else NONE


def _percent(name: str) -> Callable[[RowReport], str]:
    return lambda row: f"{row.summary.means[name]:.0%}" if row.summary and name in row.summary.means else NONE


def _reach(found: Report, kind: Kind, rows: Sequence[RowReport], width: int) -> list[Line]:
    """Tokens, updates and seconds to the threshold."""
    if not any(row.summary for row in rows):
        return []
    if kind.threshold is None:
        return [*wrapped((), "No row's score rose: there is no threshold to reach.", width), ()]

    def cell(axis: str) -> Callable[[RowReport], str]:
        def told(row: RowReport) -> str:
            reach = row.summary.reach[axis] if row.summary else None
            if reach is None:
                return NONE
            return "not reached" if reach.median is None else _short(reach.median)

        return told

    columns: list[Column] = [("", lambda row: row.label), *((axis, cell(axis)) for axis in AXES)]
    columns.append(("runs that reach it", lambda row: _share(row)))
    head = f"To a score of {kind.threshold:.3f}, {found.share:.0%} of the way: median over seeds"
    return [*wrapped((), head, width, HEAD), *_columns(rows, columns, width), ()]


def _share(row: RowReport) -> str:
    if row.summary is None:
        return NONE
    reach = row.summary.reach["tokens"]
    return f"{reach.reached} of {len(reach.each)}"


def _above(found: Report, rows: Sequence[RowReport], width: int) -> list[Line]:
    """P(row above column) at equal tokens; a star where the interval leaves ½ out."""
    labels = [row.label for row in rows if row.summary]
    if len(labels) < 2:
        return []
    cells: dict[tuple[str, str], str] = {}
    for pair in found.pairs:
        p = pair.probability["tokens"]
        star = "*" * pair.apart["tokens"]
        cells[pair.first, pair.second] = f"{p.value:.2f}{star}"
        cells[pair.second, pair.first] = f"{1 - p.value:.2f}{star}"
    columns: list[Column] = [("", lambda row: row.label)]
    columns += [(label, lambda row, label=label: cells.get((row.label, label), NONE)) for label in labels]  # type: ignore[misc]
    head = "P(row above column) at equal tokens; * = told apart, the 95 % interval leaves ½ out"
    return [*wrapped((), head, width, HEAD), *_columns([row for row in rows if row.summary], columns, width), ()]


def _tuning(found: Report, width: int) -> list[Line]:
    """Mean final score of every value on the tuning seeds."""
    rows = [row for row in found.rows if row.tuning]
    if not rows:
        return []
    values = sorted({tried.value for row in rows for tried in row.tuning})

    def cell(value: float) -> Callable[[RowReport], str]:
        def told(row: RowReport) -> str:
            mean = next((tried.mean for tried in row.tuning if tried.value == value), None)
            return NONE if mean is None else f"{mean:.3f}{'*' * (value == row.value)}"

        return told

    columns: list[Column] = [("", lambda row: row.label), *((f"{value:g}", cell(value)) for value in values)]
    head = f"Mean final score by value, seeds {', '.join(map(str, found.tuning_seeds))}; * = chosen"
    return [*wrapped((), head, width, HEAD), *_columns(rows, columns, width), ()]


def _columns(rows: Sequence[RowReport], columns: Sequence[Column], width: int) -> list[Line]:
    """Rows in aligned columns; those that do not fit come below, each block with the labels."""
    cells = [[cell(row) for row in rows] for _, cell in columns]
    widths = [max(map(len, [head, *column])) for (head, _), column in zip(columns, cells, strict=True)]
    lines: list[Line] = []
    rest = list(range(1, len(columns)))
    while rest:
        block = [rest.pop(0)]
        while rest and widths[0] + sum(widths[i] + 2 for i in [*block, rest[0]]) <= width:
            block.append(rest.pop(0))
        head = " " * widths[0] + "".join("  " + columns[i][0].rjust(widths[i]) for i in block)
        lines.append(((head, HEAD),))
        for number in range(len(rows)):
            told = "".join("  " + cells[i][number].rjust(widths[i]) for i in block)
            lines.append(((cells[0][number].ljust(widths[0]), NAME), (told, "")))
    return lines


def _estimate(x: Estimate) -> str:
    return f"{x.value:.3f} [{x.low:.3f} {x.high:.3f}]"


def _fine(x: float) -> str:
    """0.56, 0.0031: nats a token."""
    return f"{x:.2g}"


def _short(x: float) -> str:
    """38, 1.2k, 250k."""
    if x < 1000:
        return f"{x:.0f}" if x >= 10 else f"{x:.1f}"
    return f"{x / 1000:.3g}k" if x < 1e6 else f"{x / 1e6:.3g}M"
