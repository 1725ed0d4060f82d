"""The matrix for a terminal: one line per algorithm where there is room, else a few labelled lines each."""

from __future__ import annotations

from policygrad.algorithms import ALGORITHMS
from policygrad.commands import describe as words
from policygrad.commands.describe import HEAD, NAME, QUIET, Line
from policygrad.commands.families import families

_TIED = "\u00a0"
"""Between words of one part, which stay on a line where they can."""
Cells = dict[str, tuple[str, ...]]
"""Column -> the cell's parts."""


def matrix(width: int | None) -> list[Line]:
    """The table in the most telling form that fits: one line per algorithm, then without values that are a part's defaults, then
    one line per part, then a few lines per algorithm with each cell named. Algorithms of one family stand together.

    width None: one line per algorithm however long, for grep and spreadsheets.
    """
    grouped = families()
    names = [name for members in grouped.values() for name in members]
    full = {name: words.matrix_row(ALGORITHMS[name]) for name in names}
    short = {name: words.matrix_row(ALGORITHMS[name], changed=True) for name in names}
    if width is None:
        return _table(_joined(full), {})
    for rows in (_joined(full), _joined(short), short):
        if _size(rows) <= width:
            return _table(rows, grouped)
    return _blocks(short, grouped, width)


def _blocks(rows: dict[str, Cells], grouped: dict[str, list[str]], width: int) -> list[Line]:
    """`grpo  Ψ GroupMean GroupStd   r Token   w Clip …`, broken between cells; empty cells are left out."""
    lead = max(map(len, rows)) + 2 if width >= 72 else 4
    labels = [column.split() for column in next(iter(rows.values()))]
    legend = ", ".join(f"{symbol} {' '.join(name)}" for symbol, *name in labels if name)
    lines = [*words.wrapped((("", ""),), legend, width, QUIET)]
    for family, names in grouped.items():
        lines += [(), *words.wrapped((("", ""),), family, width, HEAD)]
        for name in names:
            named = [(column.split()[0], parts) for column, parts in rows[name].items() if parts]
            cells = [
                " ".join([f"{symbol} {parts[0]}".replace(" ", _TIED), *_tied(parts[1:])]) for symbol, parts in named
            ]
            lines += _packed(name, cells, lead, width)
    return lines


def _packed(name: str, cells: list[str], lead: int, width: int) -> list[Line]:
    """Cells one after the other, as many on a line as fit; one that is longer than a line breaks between parts, then words."""
    first = max(lead, len(name) + 2)
    lines, row, indent = list[Line](), "", first
    for cell in cells:
        if row and indent + len(row) + 3 + len(cell) > width:
            lines.append(_line(name if not lines else "", indent, row))
            row, indent = "", lead
        row = f"{row}   {cell}" if row else cell
        while indent + len(row) > width and (cut := _cut(row[: width - indent + 1])) > 0:
            lines.append(_line(name if not lines else "", indent, row[:cut]))
            row, indent = row[cut + 1 :], lead + 2
    return [*lines, _line(name if not lines else "", indent, row)]


def _cut(row: str) -> int:
    """Where a row that is too long ends: between parts, else between words; -1 where there is one word."""
    return found if (found := row.rfind(" ")) > 0 else row.rfind(_TIED)


def _tied(parts: tuple[str, ...]) -> list[str]:
    return [part.replace(" ", _TIED) for part in parts]


def _line(name: str, indent: int, text: str) -> Line:
    return ((name.ljust(indent), NAME), (text.replace(_TIED, " ").rstrip(), ""))


def _joined(rows: dict[str, Cells]) -> dict[str, Cells]:
    """Each cell on one line."""
    return {name: {k: (" ".join(v),) if v else () for k, v in row.items()} for name, row in rows.items()}


def _widths(rows: dict[str, Cells]) -> list[int]:
    columns = next(iter(rows.values()))
    parts = [[len(part) for row in rows.values() for part in row[column]] for column in columns]
    return [max(map(len, rows)), *(max([len(column), *sizes]) for column, sizes in zip(columns, parts, strict=True))]


def _size(rows: dict[str, Cells]) -> int:
    widths = _widths(rows)
    return sum(widths) + 2 * (len(widths) - 1)


def _table(rows: dict[str, Cells], grouped: dict[str, list[str]]) -> list[Line]:
    """Columns; a family's name above its first row."""
    widths = _widths(rows)
    columns = ["", *next(iter(rows.values()))]
    heads = {names[0]: family for family, names in grouped.items()}
    lines: list[Line] = [_row(columns, widths, HEAD)]
    for name, row in rows.items():
        if name in heads:
            lines += [(), ((heads[name], HEAD),)]
        cells = [(name,), *(parts or ("–",) for parts in row.values())]
        for i in range(max(map(len, cells))):
            lines.append(_row([cell[i] if i < len(cell) else "" for cell in cells], widths, ""))
    return lines


def _row(cells: list[str], widths: list[int], style: str) -> Line:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return ((padded[0], style or NAME), ("  " + "  ".join(padded[1:]).rstrip(), style))
