"""The documentation's site: it builds without a warning, its links lead somewhere, and it asks nothing of the network."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import make_site

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MISSING = [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]
HEAD = '<h1 id="top">T</h1>'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once."""
    if MISSING:
        pytest.skip(f"{', '.join(MISSING)} not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("built") / "site"
    made = subprocess.run([sys.executable, make_site.__file__, str(folder)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.full
def test_links_and_anchors_of_the_site(site: Path) -> None:
    assert make_site.broken(site) == []


@pytest.mark.full
def test_every_page_is_in_the_site_and_at_its_side(site: Path) -> None:
    pages = {path.relative_to(make_site.ROOT / "docs") for path in (make_site.ROOT / "docs").rglob("*.md")}
    for page in pages - {Path("index.md")}:
        shown = (site / page.with_suffix(".html")).read_text(encoding="utf-8")
        side = shown[shown.index('class="sidebar-tree"') : shown.index("</aside>")]
        assert "current-page" in side, f"{page} does not stand at its own side"
        assert "Troubleshooting</a>" in side


@pytest.mark.full
def test_links_out_of_the_docs_are_names_of_files(site: Path) -> None:
    text = (site / "extending.html").read_text(encoding="utf-8")
    assert "src/policygrad/core/base.py" in text
    assert "../src" not in text
    assert (site / "results" / "algorithms.html").is_file()


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ('<a href="b.html#top">', []),
        ('<a href="https://example.org/#x">', []),
        ('<a href="#top">', []),
        ('<a href="b.html#bottom">', ["a.html: b.html#bottom"]),
        ('<a href="c.html">', ["a.html: c.html"]),
        ('<a href="../b.html">', ["a.html: ../b.html"]),
        ('<img alt="x" src="c.png">', ["a.html: c.png"]),
        ('<script src="https://example.org/x.js">', ["a.html: https://example.org/x.js"]),
        ('<link rel="stylesheet" href="//example.org/x.css">', ["a.html: //example.org/x.css"]),
    ],
)
def test_what_leads_nowhere_is_found(tmp_path: Path, body: str, wrong: list[str]) -> None:
    (tmp_path / "a.html").write_text(HEAD + body)
    (tmp_path / "b.html").write_text(HEAD)
    assert make_site.broken(tmp_path) == wrong


WIDE = """() => [...document.querySelectorAll("article pre, article .table-wrapper")]
    .filter((box) => box.scrollWidth > box.clientWidth + 1)
    .map((box) => `${box.scrollWidth} in ${box.clientWidth}: ${box.innerText.slice(0, 60)}`)"""


@pytest.mark.full
def test_formulas_and_tables_are_not_cut_at_1400_pixels(site: Path, chromium: Browser) -> None:
    names = [
        "algorithms/index",
        "algorithms/vapo",
        "algorithms/prorl",
        "small-models",
        "reference/reliability",
        "measured",
        "benchmarks",
    ]
    tab = chromium.new_page(viewport={"width": 1400, "height": 900})
    for name in names:
        tab.goto((site / f"{name}.html").as_uri())
        assert tab.evaluate(WIDE) == [], name
        assert tab.evaluate("() => document.documentElement.scrollWidth") <= 1400, name
