"""Lines of styled text: wrapped to the terminal, printed plain into a pipe and in colour on a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

StyledLine = tuple[tuple[str, str], ...]  # pieces (text, rich style) of one line
Column = tuple[str, Sequence[str]]  # heading and cells
HEAD, NAME, FORMULA, QUIET = "bold", "bold cyan", "green", "dim"


class TextRow(NamedTuple):
    """A line before it is wrapped: `text` follows `lead` and hangs below its own first word. Without text, `lead` is the line."""

    lead: StyledLine
    text: str | None = None
    style: str = ""


def wrap_rows(rows: Iterable[TextRow], width: int) -> list[StyledLine]:
    """Wrap every row to the width."""
    return [
        line
        for row in rows
        for line in ([row.lead] if row.text is None else wrap_styled(row.lead, row.text, width, row.style))
    ]


def print_lines(lines: Sequence[StyledLine]) -> None:
    """Print the lines, styled on a terminal."""
    if not sys.stdout.isatty():
        print("\n".join("".join(text for text, _ in line).rstrip() for line in lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text.assemble(*line))


def wrap_paragraphs(*texts: str) -> str:
    """Wrap a description for tyro, which keeps lines that begin with a space and wraps no others."""
    lines = [line for text in texts for line in textwrap.wrap(text, get_page_width() - 1, break_on_hyphens=False)]
    return "\n".join(f" {line}" for line in lines)


def get_page_width() -> int:
    """Return the columns for running text: the terminal's, at most 100; 80 in a pipe."""
    return max(40, min(100, shutil.get_terminal_size((80, 24)).columns))


def get_terminal_width() -> int:
    """Return the columns for tables: the terminal's; 100 in a pipe."""
    return shutil.get_terminal_size((100, 24)).columns


def wrap_styled(lead: StyledLine, text: str, width: int, style: str = "") -> Iterator[StyledLine]:
    """Wrap `text` after `lead`, with a hanging indent."""
    indent = sum(len(piece) for piece, _ in lead)
    rows = textwrap.wrap(text, max(24, width - indent), break_long_words=False, break_on_hyphens=False) or [""]
    yield (*lead, (rows[0], style))
    for row in rows[1:]:
        yield ((" " * indent, ""), (row, style))


def align_columns(columns: Sequence[Column], width: int) -> list[StyledLine]:
    """Align columns; those that do not fit follow below, each block with the labels."""
    widths = [max(map(len, [head, *cells])) for head, cells in columns]
    lines: list[StyledLine] = []
    remaining = list(range(1, len(columns)))
    while remaining:
        block = [remaining.pop(0)]
        while remaining and widths[0] + sum(widths[i] + 2 for i in [*block, remaining[0]]) <= width:
            block.append(remaining.pop(0))
        head = " " * widths[0] + "".join("  " + columns[i][0].rjust(widths[i]) for i in block)
        lines.append(((head, HEAD),))
        for number, label in enumerate(columns[0][1]):
            cells = "".join("  " + columns[i][1][number].rjust(widths[i]) for i in block)
            lines.append(((label.ljust(widths[0]), NAME), (cells, "")))
    return lines
