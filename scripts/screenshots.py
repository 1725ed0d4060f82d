"""Take the pictures of the documentation: python scripts/screenshots.py lab | report RUN… | site | terminal RUN [--step N]

lab, report and site need Chromium and write PNGs to docs/lab, docs/report and docs/site (site shows what `make site` has built);
terminal draws what `policygrad train` shows during a run, from the run's files, as docs/train.svg. Tests use `open_browser` too.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DOCS = Path(__file__).resolve().parents[1] / "docs"
SITE = DOCS.parent / "build" / "site"


@dataclass(frozen=True)
class View:
    """How a page is photographed."""

    width: int
    height: int
    color_scheme: str = "light"
    scroll_to: str | None = None
    """A selector of the element at the top."""


def take_lab_pictures() -> None:
    """Measure, and photograph the lab's page."""
    from policygrad.algorithms import ALGORITHMS
    from policygrad.commands.lab import build_lab_page
    from policygrad.lab.report import build_lab_report
    from policygrad.lab.setting import supported_algorithms

    algorithms = supported_algorithms(ALGORITHMS)
    views = {
        "wide": View(1280, 1240),
        "training": View(1280, 1000, scroll_to="#entropy_collapse"),
        "dark": View(1280, 1000, "dark", "#gate_weights"),
        "narrow": View(390, 1500),
    }
    with _page(build_lab_page(build_lab_report(algorithms), algorithms)) as page:
        take_pictures(page, views, DOCS / "lab", ready="#scatter .point", max_bytes=300_000)


def take_report_pictures(runs: list[Path]) -> None:
    """Photograph a report of these runs."""
    from policygrad.report.data import read_run
    from policygrad.report.page import render_report

    views = {
        "wide": View(1280, 1000),
        "completions": View(1280, 1000, scroll_to="#completions"),
        "dark": View(1280, 1000, "dark", "#curves"),
        "narrow": View(390, 1400, scroll_to="#curves"),
    }
    with _page(render_report([read_run(run) for run in runs])) as page:
        take_pictures(page, views, DOCS / "report", ready="#first .curve", max_bytes=200_000)


def take_site_picture() -> None:
    """Photograph an algorithm's page of the site."""
    page = SITE / "algorithms" / "sapo.html"
    take_pictures(page, {"site": View(1180, 900)}, DOCS / "site", ready="article h1", max_bytes=150_000)


def draw_terminal(run_folder: Path, last_step: int, output: Path) -> None:
    """Feed a run's files to the terminal display, step by step, and save what it shows at the end as an SVG."""
    from rich.console import Console

    from policygrad.trackers import RunInfo
    from policygrad.trackers.rich_display import TerminalTracker
    from policygrad.training.config.run import Run
    from policygrad.training.config.serialization import load_config

    run = load_config(run_folder / "run.toml", Run())
    seconds = 0.0
    tracker = TerminalTracker(Console(file=io.StringIO(), width=100, force_terminal=True), lambda: seconds)
    tracker.start(RunInfo("", steps=run.steps, token_budget=run.tokens))
    samples: dict[int, list[dict[str, object]]] = {}
    for line in (run_folder / "completions.jsonl").open(encoding="utf-8"):
        row = json.loads(line)
        samples.setdefault(row["step"], []).append(row)
    for line in (run_folder / "metrics.jsonl").open(encoding="utf-8"):
        row = json.loads(line)
        if "reward" in row and row["step"] <= last_step:
            seconds += row["time/rollout"] + row["time/update"]
            tracker.log(row["step"], row, samples[row["step"]])
    tracker.close()
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]policygrad · {run.algorithm.name} on {run.task}[/bold]")
    console.print(tracker)
    console.save_svg(str(output), title="policygrad train")


def take_pictures(page: Path, views: dict[str, View], folder: Path, *, ready: str, max_bytes: int) -> None:
    """Write FOLDER/NAME.png for every view, once the element `ready` is there.

    Raises:
        SystemExit: a picture is larger than `max_bytes`.
    """
    folder.mkdir(exist_ok=True)
    with open_browser() as browser:
        for name, view in views.items():
            png = _take_picture(browser, page, view, ready)
            if len(png) > max_bytes:
                raise SystemExit(f"{name}.png has {len(png)} bytes, more than {max_bytes}: make its view smaller")
            (folder / f"{name}.png").write_bytes(png)
            print(folder / f"{name}.png", len(png))


def _take_picture(browser: Browser, page: Path, view: View, ready: str) -> bytes:
    from PIL import Image

    tab = browser.new_page(
        viewport={"width": view.width, "height": view.height}, color_scheme=view.color_scheme, reduced_motion="reduce"
    )
    tab.goto(page.as_uri())
    tab.wait_for_selector(ready)
    if view.scroll_to is not None:
        tab.evaluate("selector => document.querySelector(selector).scrollIntoView()", view.scroll_to)
    png = io.BytesIO()
    Image.open(io.BytesIO(tab.screenshot())).convert("RGB").save(png, "PNG", optimize=True)
    tab.close()
    return png.getvalue()


@contextmanager
def _page(html: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(html, encoding="utf-8")
        yield page


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start a headless Chromium with an empty profile.

    Raises:
        RuntimeError: it cannot be started; the message says what to install.
    """
    if (reason := why_no_browser()) is not None:
        raise RuntimeError(reason)
    from playwright.sync_api import sync_playwright

    options = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    options += ["--no-sandbox", "--disable-component-update", "--disable-sync"]  # no sandbox: root, as in a container
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_find_chromium(), args=options)
        try:
            yield browser
        finally:
            browser.close()


def why_no_browser() -> str | None:
    """Return what is missing to start a browser; None if one can be started."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install -e '.[dev]'"
    return None if _find_chromium() else "no chromium or google-chrome on the PATH: apt-get install chromium"


def _find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("POLICYGRAD_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def main() -> None:
    """Take the pictures that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("lab")
    kinds.add_parser("report").add_argument("runs", type=Path, nargs="+")
    kinds.add_parser("site")
    terminal = kinds.add_parser("terminal")
    terminal.add_argument("run", type=Path)
    terminal.add_argument("--step", type=int, default=10**9, help="the last step to show")
    terminal.add_argument("--output", type=Path, default=DOCS / "train.svg")
    args = parser.parse_args()
    if args.kind == "lab":
        take_lab_pictures()
    elif args.kind == "report":
        take_report_pictures(args.runs)
    elif args.kind == "site":
        take_site_picture()
    else:
        draw_terminal(args.run, args.step, args.output)


if __name__ == "__main__":
    main()
