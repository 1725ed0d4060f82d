"""Pictures of a report for the docs: python scripts/screenshot_report.py RUN...

Writes docs/report/{wide,completions,dark}.png, 1280 pixels wide, and docs/report/narrow.png, 390 wide. Needs Chromium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser import chromium, picture
from policygrad.report.page import page
from policygrad.report.reading import read

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "report"
LARGEST = 200_000
"""Bytes of one picture."""
PICTURES = {  # name: (width, height, scheme, what stands at the top)
    "wide": (1280, 1240, "light", None),
    "completions": (1280, 1000, "light", "#completions"),
    "dark": (1280, 1000, "dark", "#curves"),
    "narrow": (390, 1400, "light", "#curves"),
}


def main() -> None:
    """Reads the runs, and takes the pictures."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, chromium() as browser:
        file = Path(place) / "report.html"
        file.write_text(page([read(Path(run)) for run in sys.argv[1:]]), encoding="utf-8")
        for name, view in PICTURES.items():
            png = picture(browser, file, *view, ready="#first .curve")
            if len(png) > LARGEST:
                raise SystemExit(f"{name}.png has {len(png)} bytes, more than {LARGEST}: make its view smaller")
            (FOLDER / f"{name}.png").write_bytes(png)
            print(FOLDER / f"{name}.png", len(png))


if __name__ == "__main__":
    main()
