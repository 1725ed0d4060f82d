"""Fills docs/lab.md with what `policygrad lab` measures: python scripts/make_lab.py

The numbers are exact up to rounding, where no standard error stands beside them; they are written to three digits.
"""

from __future__ import annotations

import re
from pathlib import Path

from policygrad.algorithms import ALGORITHMS
from policygrad.lab.measurement import Finding, Measurement
from policygrad.lab.report import LabReport, build_lab_report
from policygrad.lab.setting import supported_algorithms

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

SIZES, SIZED = (2, 4, 8), ("bias", "variance")
"""Completions of a group, and what is told over them."""


def figure(x: float) -> str:
    """Three digits after the point; what is zero to rounding is 0."""
    return "0" if abs(x) < 1e-9 else f"{x:.3f}"


def table(rows: list[Measurement]) -> str:
    """One row per algorithm."""
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---|" + "---:|" * len(COLUMNS)]
    for m in rows:
        lines.append(f"| `{m.name}` | {' | '.join(figure(getattr(m.figures, name)) for name in COLUMNS)} |")
    return "\n".join(lines)


def sizes(reports: list[LabReport], side: int) -> str:
    """One row per algorithm: bias and variance over the group's size, ± a standard error where groups were sampled."""
    heads = [f"{name}, G = {r.group_size}" for name in SIZED for r in reports]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for rows in zip(*(r.rows for r in reports), strict=True):
        measured = [row[side] for row in rows]
        cells = [
            figure(getattr(m.figures, name)) + (f" ± {getattr(m.errors, name):.3f}" if m.errors else "")
            for name in SIZED
            for m in measured
        ]
        lines.append(f"| `{measured[0].name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def finding(f: Finding) -> str:
    """One list item; a star is one, as in b*."""
    error = "" if f.error is None else f" (standard error {f.error:.2g})"
    claim, sentence = (text.replace("*", "\\*") for text in (f.claim, f.sentence))
    return f"- {'✓' if f.holds else '✗'} **{claim}** {sentence}{error}  \n  `policygrad lab --experiment {f.name}`"


def blocks(found: LabReport, reports: list[LabReport]) -> dict[str, str]:
    """What stands between which marks; `reports` of several group sizes."""
    on, off = ([pair[i] for pair in found.rows] for i in (0, 1))
    table_text = (
        f"Groups of {found.group_size}; {found.world}.\n\nOn-policy:\n\n{table(on)}\n\n"
        f"Off-policy, {found.kl:g} nats a completion away:\n\n{table(off)}"
    )
    size_text = (
        f"On-policy:\n\n{sizes(reports, 0)}\n\nOff-policy, {found.kl:g} nats a completion away:\n\n{sizes(reports, 1)}"
    )
    return {"table": table_text, "sizes": size_text, "findings": "\n".join(map(finding, found.findings))}


def filled(text: str, found: LabReport, reports: list[LabReport]) -> str:
    """The page with the measured blocks in it."""
    for name, block in blocks(found, reports).items():
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
    whole = build_lab_report(supported_algorithms(ALGORITHMS, 4))
    rows = supported_algorithms(ALGORITHMS, SIZES[0])
    over = [build_lab_report(rows, size, names=()) for size in SIZES]
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), whole, over), encoding="utf-8")
    print(PAGE)
