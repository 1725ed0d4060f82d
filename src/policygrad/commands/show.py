"""`policygrad algorithms` and `policygrad show`: what there is, and what each of it is."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from policygrad.algorithms import ALGORITHMS, algorithm
from policygrad.commands import describe as words
from policygrad.commands.describe import HEAD, NAME, QUIET, Line
from policygrad.errors import ConfigError
from policygrad.papers import PAPERS
from policygrad.training.config.parts import nearest, part_class, part_names
from policygrad.training.config.toml import algorithm_to_dict

Cells = dict[str, tuple[str, ...]]
"""Column -> the cell's parts."""


@dataclass(frozen=True)
class MatrixOptions:
    """The matrix: one row per named algorithm, one column per part of the equation."""

    json: bool = False
    """One JSON object, every part with its fields."""


def algorithms(args: list[str]) -> int:
    """`policygrad algorithms [--json]`."""
    options = tyro.cli(MatrixOptions, args=args, prog="policygrad algorithms", config=(tyro.conf.FlagCreatePairsOff,))
    if options.json:
        rows = {
            name: {**algorithm_to_dict(a), "departs": PAPERS[name].departs if name in PAPERS else ""}
            for name, a in ALGORITHMS.items()
        }
        print(json.dumps(rows, indent=1, ensure_ascii=False))
    elif sys.stdout.isatty():
        width = shutil.get_terminal_size((80, 24)).columns
        more = (("policygrad show NAME", NAME), (" explains one; what a cell leaves out is the default", QUIET))
        words.emit([((words.EQUATION, HEAD),), (), *matrix(width), (), more])
    else:
        words.emit(matrix(None))
    return 0


def matrix(width: int | None) -> list[Line]:
    """The table in the most telling form that fits: one line per algorithm, then one line per part, then fewer columns, then
    no columns. Only where there is room do values stand that are a part's defaults.

    width None: one line per algorithm however long, for grep and spreadsheets.
    """
    full = {name: words.matrix_row(a) for name, a in ALGORITHMS.items()}
    short = {name: words.matrix_row(a, changed=True) for name, a in ALGORITHMS.items()}
    if width is None:
        return _table(_joined(full))
    for rows in (_joined(full), _joined(short), full, short, _merged(short)):
        if _size(rows) <= width:
            return _table(rows)
    lead = max(map(len, short)) + 2
    return [
        line
        for name, row in short.items()
        for line in words.wrapped(
            ((name.ljust(lead), NAME),), " ".join(p for parts in row.values() for p in parts), width
        )
    ]


def _joined(rows: dict[str, Cells]) -> dict[str, Cells]:
    """Each cell on one line."""
    return {name: {k: (" ".join(v),) if v else () for k, v in row.items()} for name, row in rows.items()}


def _merged(rows: dict[str, Cells]) -> dict[str, Cells]:
    """Terms, shaping and filters in one column."""
    out: dict[str, Cells] = {}
    for name, row in rows.items():
        columns = list(row)
        rest = tuple(part for column in columns[4:] for part in row[column])
        out[name] = {**{column: row[column] for column in columns[:4]}, "k and more": rest}
    return out


def _widths(rows: dict[str, Cells]) -> list[int]:
    columns = next(iter(rows.values()))
    parts = [[len(part) for row in rows.values() for part in row[column]] for column in columns]
    return [max(map(len, rows)), *(max([len(column), *sizes]) for column, sizes in zip(columns, parts, strict=True))]


def _size(rows: dict[str, Cells]) -> int:
    widths = _widths(rows)
    return sum(widths) + 2 * (len(widths) - 1)


def _table(rows: dict[str, Cells]) -> list[Line]:
    widths = _widths(rows)
    columns = ["", *next(iter(rows.values()))]
    lines: list[Line] = [_row(columns, widths, HEAD)]
    for name, row in rows.items():
        cells = [(name,), *(parts or ("–",) for parts in row.values())]
        for i in range(max(map(len, cells))):
            lines.append(_row([cell[i] if i < len(cell) else "" for cell in cells], widths, ""))
    return lines


def _row(cells: list[str], widths: list[int], style: str) -> Line:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return ((padded[0], style or NAME), ("  " + "  ".join(padded[1:]).rstrip(), style))


@dataclass(frozen=True)
class ShowOptions:
    """An algorithm's equation, parts, defaults with sources, what it fixes and how it fails; or one part, such as Clip."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """One of `policygrad algorithms`, or a part's class."""


def show(args: list[str]) -> int:
    """`policygrad show NAME`."""
    name = tyro.cli(ShowOptions, args=args, prog="policygrad show").name
    if name in part_names():
        words.emit(words.describe_part(part_class(name, "show", "part"), words.page_width()))
        return 0
    if name.lower().replace("-", "_") not in ALGORITHMS:
        raise ConfigError(f"no algorithm or part is called {name!r}: {nearest(name, [*ALGORITHMS, *part_names()])}")
    words.emit(words.describe(algorithm(name), words.page_width()))
    return 0
