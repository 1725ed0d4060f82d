"""Fills docs/lab.md with what `policygrad lab` measures: python scripts/make_lab.py

The numbers are exact up to rounding; they are written to three digits.
"""

from __future__ import annotations

import re
from pathlib import Path

from policygrad.algorithms import ALGORITHMS
from policygrad.lab.finding import Finding
from policygrad.lab.measurement import Measured
from policygrad.lab.report import Report, report

PAGE = Path(__file__).resolve().parents[1] / "docs" / "lab.md"
COLUMNS = {
    "scale": "scale",
    "bias": "bias",
    "cosine": "cosine",
    "variance": "variance",
    "mse": "MSE",
    "snr": "SNR",
    "best_mse": "best",
}


def figure(x: float) -> str:
    """Three digits after the point; what is zero to rounding is 0."""
    return "0" if abs(x) < 1e-9 else f"{x:.3f}"


def table(rows: list[Measured]) -> str:
    """One row per algorithm."""
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---|" + "---:|" * len(COLUMNS)]
    for m in rows:
        lines.append(f"| `{m.name}` | {' | '.join(figure(getattr(m.figures, name)) for name in COLUMNS)} |")
    return "\n".join(lines)


def finding(f: Finding) -> str:
    """One list item."""
    error = "" if f.error is None else f" (standard error {f.error:.2g})"
    return f"- {'✓' if f.holds else '✗'} **{f.claim}** {f.sentence}{error}  \n  `policygrad lab --experiment {f.name}`"


def blocks(found: Report) -> dict[str, str]:
    """What stands between which marks."""
    on, off = ([pair[i] for pair in found.rows] for i in (0, 1))
    table_text = (
        f"Groups of {found.group_size}; {found.world}.\n\nOn-policy:\n\n{table(on)}\n\n"
        f"Off-policy, {found.kl:g} nats a completion away:\n\n{table(off)}"
    )
    return {"table": table_text, "findings": "\n".join(map(finding, found.findings))}


def filled(text: str, found: Report) -> str:
    """The page with the measured blocks in it."""
    for name, block in blocks(found).items():
        text, count = re.subn(
            f"<!-- {name}: begin -->.*?<!-- {name}: end -->",
            lambda _, name=name, block=block: f"<!-- {name}: begin -->\n{block}\n<!-- {name}: end -->",
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise SystemExit(f"{PAGE}: there must be one pair of marks <!-- {name}: begin --> and <!-- {name}: end -->")
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), report(ALGORITHMS)), encoding="utf-8")
    print(PAGE)
