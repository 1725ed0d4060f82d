"""Fills docs/lab/turns.md with what credit along turns costs in bias and variance: python scripts/make_turns.py

All figures are exact up to rounding; they are written to three digits.
"""

from __future__ import annotations

import re
from pathlib import Path

from make_lab import table
from policygrad.lab.findings import critics as turns
from policygrad.lab.report import single_threaded
from policygrad.lab.worlds import walk_setting

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lab" / "turns.md"
SIZE = 3
"""Episodes of a group."""


def blocks() -> dict[str, str]:
    """What stands between which marks."""
    setting = walk_setting()
    with single_threaded():
        plain, critics = turns.measure_turn_table(SIZE)
    return {
        "world": (
            f"Groups of {SIZE}; {setting.world.tree.size} episodes of up to three turns; J = "
            f"{float(setting.world.objective(setting.theta)):.3f}; a critic that errs by {turns.ERROR:g}, where there is one."
        ),
        "chains": table(plain),
        "critics": table(critics),
    }


def filled(text: str, found: dict[str, str]) -> str:
    """The page with the measured blocks in it."""
    for name, block in found.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        text, count = re.subn(
            f"{begin}.*?{end}",
            lambda _, begin=begin, end=end, block=block: f"{begin}\n{block}\n{end}",
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise SystemExit(f"{PAGE}: there must be one pair of marks {begin} and {end}")
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), blocks()), encoding="utf-8")
    print(PAGE)
