"""A picture of the site, docs/site/site.png, from what `make site` has built: python scripts/screenshot_site.py. Needs Chromium."""

from __future__ import annotations

from pathlib import Path

from browser import View, pictures

ROOT = Path(__file__).resolve().parents[1]
PAGE, FOLDER = ROOT / "build" / "site" / "algorithms" / "sapo.html", ROOT / "docs" / "site"
PICTURES: dict[str, View] = {"site": (1180, 900, "light", None)}
LARGEST = 150_000
"""Bytes."""


def main() -> None:
    """The page of an algorithm."""
    pictures(PAGE, PICTURES, FOLDER, ready="article h1", largest=LARGEST)


if __name__ == "__main__":
    main()
