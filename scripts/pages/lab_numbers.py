"""What docs/lab.md holds of an algorithm and of a finding: `make lab` measures it, and other pages repeat it from there."""

from __future__ import annotations

import re
from pathlib import Path

from pages.markdown import table

LAB = Path(__file__).resolve().parents[2] / "docs" / "lab.md"


def lab_section(name: str) -> str:
    """An algorithm's gradient against the true one, on- and off-policy."""
    world, head, sides = _measured(LAB.read_text(encoding="utf-8"))
    rows = [(side, *cells[name]) for side, cells in sides.items() if name in cells]
    if not rows:
        return "[The lab](../lab.md#what-is-measured) leaves it out, and says why."
    return (
        f"Its gradient against the true one, {world[0].lower()}{world[1:]} "
        f"[What the columns mean, and all algorithms](../lab.md#what-is-measured).\n\n{table(('', *head), rows)}"
    )


def _measured(text: str) -> tuple[str, list[str], dict[str, dict[str, list[str]]]]:
    """(what was measured, the columns, side -> algorithm -> cells)."""
    (block,) = re.findall(r"<!-- table: begin -->\n(.*?)<!-- table: end -->", text, re.DOTALL)
    world, *parts = re.split(r"\n\n(?=O(?:n|ff)-policy)", block.strip())
    sides: dict[str, dict[str, list[str]]] = {}
    head: list[str] = []
    for part in parts:
        side, _, rest = part.partition(":\n\n")
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in rest.splitlines())
        sides[side] = {row[0].strip("`"): row[1:] for row in rows}
    return world, head[1:], sides


def finding(name: str) -> tuple[bool, str, str]:
    """(whether the claim holds, the claim, what was found) of an experiment.

    Raises:
        SystemExit: the page has no such finding.
    """
    text = LAB.read_text(encoding="utf-8")
    found = re.search(rf"^- ([✓✗]) \*\*(.+?)\*\* (.+?)  \n  `policygrad lab --experiment {name}`$", text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"{LAB}: there is no finding {name!r}: make lab")
    return found[1] == "✓", found[2], found[3]


def quoted(name: str, folder: str) -> str:
    """A finding as a paragraph under its picture in `folder`."""
    holds, claim, sentence = finding(name)
    return (
        f"![{claim}]({folder}/{name}.svg)\n\n"
        f"{'✓' if holds else '✗'} **{claim}** {sentence} (`policygrad lab --experiment {name}`)"
    )
