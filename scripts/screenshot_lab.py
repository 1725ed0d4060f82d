"""Pictures of the lab's page for the docs: python scripts/screenshot_lab.py

Writes docs/lab/{wide,training,dark}.png, 1280 pixels wide, and docs/lab/narrow.png, 390 wide. Needs Chromium.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from browser import View, pictures
from policygrad.algorithms import ALGORITHMS
from policygrad.commands.lab import build_lab_page
from policygrad.lab.report import build_lab_report
from policygrad.lab.setting import supported_algorithms

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "lab"
LARGEST = 300_000
"""Bytes of one picture."""
PICTURES: dict[str, View] = {
    "wide": (1280, 1240, "light", None),
    "training": (1280, 1000, "light", "#entropy_collapse"),
    "dark": (1280, 1000, "dark", "#gate_weights"),
    "narrow": (390, 1500, "light", None),
}


def main() -> None:
    """Measures, and takes the pictures."""
    with tempfile.TemporaryDirectory() as place:
        page = Path(place) / "lab.html"
        page.write_text(
            build_lab_page(build_lab_report(rows := supported_algorithms(ALGORITHMS)), rows), encoding="utf-8"
        )
        pictures(page, PICTURES, FOLDER, ready="#scatter .point", largest=LARGEST)


if __name__ == "__main__":
    main()
