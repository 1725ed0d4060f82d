"""A picture of the site, docs/site/site.png, from what `make site` has built: python scripts/screenshot_site.py. Needs Chromium."""

from __future__ import annotations

from pathlib import Path

from browser import chromium, picture

ROOT = Path(__file__).resolve().parents[1]
SITE, PICTURE = ROOT / "build" / "site", ROOT / "docs" / "site" / "site.png"
VIEW = (1180, 900, "light")
LARGEST = 150_000
"""Bytes."""


def main() -> None:
    """The page of an algorithm."""
    with chromium() as browser:
        png = picture(browser, SITE / "algorithms" / "sapo.html", *VIEW, ready="article h1")
    if len(png) > LARGEST:
        raise SystemExit(f"the picture has {len(png)} bytes, more than {LARGEST}: make its view smaller")
    PICTURE.write_bytes(png)
    print(PICTURE, len(png))


if __name__ == "__main__":
    main()
