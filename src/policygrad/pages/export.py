"""Figures to take away: what `--export FOLDER` writes. SVG figures, CSV files, LaTeX tables with intervals, and in README.md the
sentences that the data allow and the command that made them.

Figures are SVG alone: a PDF would need another library here, and `rsvg-convert -f pdf` or Inkscape makes one of each.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from policygrad.pages.charts import chart

README = "README.md"
FIGURE_WIDTH = 460
"""Width of a panel, in pixels."""


class Interval(NamedTuple):
    """A number with its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, error: float) -> Interval:
        """Return the 95 % interval of a value with this standard error."""
        return cls(value, value - 1.96 * error, value + 1.96 * error)


Cell = str | float | Interval | None
"""A cell of a table; None = there is nothing."""


@dataclass(frozen=True)
class Figure:
    """A figure, written as NAME.svg and NAME.csv."""

    name: str
    title: str
    drawn: Mapping[str, Any]
    """As `policygrad.pages.charts.chart` takes it."""


@dataclass(frozen=True)
class Table:
    """A table, written as NAME.tex and NAME.csv."""

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Export:
    """Everything that is written into a folder."""

    title: str
    command: str
    """The command that made it."""
    sentences: tuple[str, ...]
    """What the data allow to say, and what not."""
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]


def render_export(export: Export) -> dict[str, str]:
    """Return the texts of all files by name."""
    texts: dict[str, str] = {}
    for figure in export.figures:
        panels = figure.drawn["panels"]
        if any(value is not None for panel in panels for line in panel["lines"] for value in line["values"]):
            width = FIGURE_WIDTH if len(panels) == 1 else FIGURE_WIDTH * 3 // 4
            texts[f"{figure.name}.svg"] = chart(figure.title, figure.drawn, width, dark=False)
            texts[f"{figure.name}.csv"] = format_csv(*list_points(figure.drawn))
    for table in export.tables:
        texts[f"{table.name}.tex"] = format_latex(table, export.command)
        texts[f"{table.name}.csv"] = format_csv(*list_cells(table))
    return texts | {README: format_readme(export, sorted(texts))}


def format_readme(export: Export, names: Sequence[str]) -> str:
    """Return the sentences, the command and the list of files."""
    listed = [f"- `{name}`" for name in names]
    sentences = [f"- {sentence}" for sentence in export.sentences] or ["- None: see the tables."]
    pdf = "Figures are SVG. For LaTeX: `rsvg-convert -f pdf NAME.svg -o NAME.pdf`, or Inkscape, or the package svg."
    command = ["```sh", export.command, "```"]
    blocks = [f"# {export.title}", "Made by", "\n".join(command), "What the data allow to say:", "\n".join(sentences)]
    return "\n\n".join([*blocks, "\n".join(listed), pdf]) + "\n"


def list_points(drawn: Mapping[str, Any]) -> tuple[list[str], list[list[Cell]]]:
    """Return the names of the columns and the rows of a figure's numbers: x, and each line with its band."""
    several = len(drawn["panels"]) > 1
    columns: list[tuple[str, Sequence[Any]]] = [(drawn["x"]["label"], drawn["x"]["values"])]
    for panel in drawn["panels"]:
        for line in panel["lines"]:
            name = drawn["series"][line["series"]] + (f", {panel['label']}" if several else "")
            if "names" in line:
                columns.append((f"{name}, name", line["names"]))
            columns.append((name, line["values"]))
            for key, word in (("band_low", "low"), ("band_high", "high")):
                columns += [(f"{name}, {word}", line[key])] if key in line else []
    return [name for name, _ in columns], [list(row) for row in zip(*(values for _, values in columns), strict=True)]


def list_cells(table: Table) -> tuple[list[str], list[list[Cell]]]:
    """Return a table's columns and rows for CSV: an interval has three columns."""
    split = [any(isinstance(row[i], Interval) for row in table.rows) for i in range(len(table.columns))]
    columns = list[str]()
    for name, is_interval in zip(table.columns, split, strict=True):
        columns += [name, f"{name}, low", f"{name}, high"] if is_interval else [name]
    rows = list[list[Cell]]()
    for row in table.rows:
        cells = list[Cell]()
        for cell, is_interval in zip(row, split, strict=True):
            three = [*cell] if isinstance(cell, Interval) else [cell, None, None]
            cells += three if is_interval else [cell]
        rows.append(cells)
    return columns, rows


def format_csv(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a CSV file; nothing where there is no value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
    return text.getvalue()


def format_latex(table: Table, command: str) -> str:
    """Return a LaTeX table that needs no package; the command that made it is a comment."""
    heads = " & ".join(map(escape_latex, table.columns))
    aligned = "l" + "r" * (len(table.columns) - 1)
    rows = [" & ".join(format_latex_cell(cell) for cell in row) + r" \\" for row in table.rows]
    lines = [f"% {line}" for line in command.splitlines()]
    lines += [
        r"\begin{table}",
        r"\centering",
        rf"\begin{{tabular}}{{{aligned}}}",
        r"\hline",
        heads + r" \\",
        r"\hline",
        *rows,
    ]
    lines += [r"\hline", r"\end{tabular}", rf"\caption{{{escape_latex(table.caption)}}}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def format_latex_cell(cell: Cell) -> str:
    """Return a number in three digits, with its interval in small."""
    if isinstance(cell, Interval):
        return rf"${cell.value:.3f}$ {{\scriptsize [${cell.low:.3f}$, ${cell.high:.3f}$]}}"
    if cell is None:
        return "--"
    if isinstance(cell, str):
        return escape_latex(cell)
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"${cell:.4g}$"


LATEX = {char: rf"\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "…": r"\ldots{}",
    "²": "$^2$",
    "½": r"$\frac{1}{2}$",
    "−": "$-$",
    "‖": r"$\|$",
    **{char: f"${char}$" for char in "<>"},
    **{char: rf"$\{name}$" for char, name in zip("±→≤≥≠∞", ("pm", "to", "le", "ge", "ne", "infty"), strict=True)},
    **{char: rf"$\{name}$" for char, name in zip("∇·×÷Σ", ("nabla", "cdot", "times", "div", "Sigma"), strict=True)},
    **{char: rf"$\{name}$" for char, name in zip("πΨλβδ", ("pi", "Psi", "lambda", "beta", "delta"), strict=True)},
    **{char: rf"$\{name}$" for char, name in zip("θεφμ", ("theta", "epsilon", "phi", "mu"), strict=True)},
}
"""What LaTeX reads otherwise, and signs that its usual letters lack."""


def escape_latex(text: str) -> str:
    """Return text that LaTeX sets as it is."""
    return "".join(LATEX.get(char, char) for char in text)
