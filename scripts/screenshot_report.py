"""Pictures of a report for the docs: python scripts/screenshot_report.py RUN...

Writes docs/report/{wide,completions,dark}.png, 1280 pixels wide, and docs/report/narrow.png, 390 wide. Needs Chromium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser import View, pictures
from policygrad.report.data import read_run
from policygrad.report.page import render_report

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "report"
LARGEST = 200_000
"""Bytes of one picture."""
PICTURES: dict[str, View] = {
    "wide": (1280, 1240, "light", None),
    "completions": (1280, 1000, "light", "#completions"),
    "dark": (1280, 1000, "dark", "#curves"),
    "narrow": (390, 1400, "light", "#curves"),
}


def main() -> None:
    """Reads the runs, and takes the pictures."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "report.html"
        file.write_text(render_report([read_run(Path(run)) for run in sys.argv[1:]]), encoding="utf-8")
        pictures(file, PICTURES, FOLDER, ready="#first .curve", largest=LARGEST)


if __name__ == "__main__":
    main()
