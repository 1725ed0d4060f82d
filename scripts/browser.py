"""A headless Chromium of the system (Debian's package `chromium`), driven by Playwright: for the pages' screenshots and tests."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",  # as root, as in a container
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def missing() -> str | None:
    """Why there is no browser; None if there is one."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install -e '.[dev]'"
    return None if executable() else f"no {' or '.join(NAMES)} on the PATH: apt-get install chromium"


def executable() -> str | None:
    """POLICYGRAD_CHROMIUM, or the first on the PATH."""
    return os.environ.get("POLICYGRAD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with an empty profile of its own.

    Raises:
        RuntimeError: there is none, with the way out.
    """
    if (reason := missing()) is not None:
        raise RuntimeError(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable(), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def picture(
    browser: Browser, page: Path, width: int, height: int, scheme: str, top: str | None = None, *, ready: str
) -> bytes:
    """A PNG, as small as it gets without loss. top: a selector of what stands at the top; ready: of what is waited for."""
    from PIL import Image

    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce")
    tab.goto(page.as_uri())
    tab.wait_for_selector(ready)
    if top is not None:
        tab.evaluate("selector => document.querySelector(selector).scrollIntoView()", top)
    shot = Image.open(io.BytesIO(tab.screenshot()))
    tab.close()
    small = io.BytesIO()
    shot.convert("RGB").save(small, "PNG", optimize=True)
    return small.getvalue()


View = tuple[int, int, str, str | None]
"""Width, height, colour scheme, what stands at the top."""


def pictures(page: Path, views: Mapping[str, View], folder: Path, *, ready: str, largest: int) -> None:
    """Writes a picture of every view into the folder, and says how large it is. largest: bytes that one may have.

    Raises:
        SystemExit: a picture that is larger.
    """
    folder.mkdir(exist_ok=True)
    with chromium() as browser:
        for name, view in views.items():
            png = picture(browser, page, *view, ready=ready)
            if len(png) > largest:
                raise SystemExit(f"{name}.png has {len(png)} bytes, more than {largest}: make its view smaller")
            (folder / f"{name}.png").write_bytes(png)
            print(folder / f"{name}.png", len(png))
