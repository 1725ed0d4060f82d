"""The comparison's page: one file that asks for nothing, all rows in it, and in a browser the axis, the legend and the sorting."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from doubles.comparison import MEASURE, StubRunner, plan, row
from policygrad.compare.page import MAX_SHOWN_ROWS, render_comparison
from policygrad.compare.report import ComparisonReport, build_report, format_learning_rate
from policygrad.compare.runner import ComparisonRun

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LABELS = [f"row_{i}" for i in range(MAX_SHOWN_ROWS + 1)]
NASTY = "</script><b>bad"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> ComparisonReport:
    """Nine rows, some tuned, one of another kind, one that fails, one with a text that would break out."""
    rows = [row(label, (1e-4, 1e-3) if i % 2 else ()) for i, label in enumerate(LABELS)]
    rows += [
        row("other", measure=MEASURE | {"task": "embedded_steps"}),
        row("broken", reason=NASTY, change="adds π_ref"),
    ]
    runner = StubRunner(
        {label: 0.4 + 0.05 * i for i, label in enumerate(LABELS)}, fails=lambda argv: argv[1] == "broken"
    )
    made = plan(*rows, seeds=3, ladder={"source": "Yu et al. 2025", "why": "lengths matter"})
    return build_report(made, ComparisonRun(made, tmp_path_factory.mktemp("c"), runner, 2, lambda text: None).run())


@pytest.fixture(scope="module")
def text(result: ComparisonReport) -> str:
    return render_comparison(result)


class Tags(HTMLParser):
    """Every start tag with its attributes, and tags left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closes another"


def embedded(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_is_one_file_without_network_access(text: str) -> None:
    parsed = Tags(text)
    assert parsed.open == []
    assert not [a for _, a in parsed.seen if "src" in a]
    ids = [a["id"] for _, a in parsed.seen if "id" in a]
    assert len(ids) == len(set(ids))
    links = [a["href"] for _, a in parsed.seen if "href" in a]
    assert all(link == "data:," or link[1:] in ids for link in links)
    policy = next(a["content"] for _, a in parsed.seen if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg|http-equiv", "", text)
    assert "url(" not in re.sub(r"url\(#", "", text)


def test_the_page_names_model_task_and_learning_rates(result: ComparisonReport, text: str) -> None:
    shown = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", text))
    assert (
        f"model {MEASURE['model']}, task {MEASURE['task']}; other: model {MEASURE['model']}, task embedded_steps."
        in shown
    )
    table = re.search(r'<table class="sortable fitted">(.*?)</table>', text, re.DOTALL)
    assert table is not None
    rates = dict(re.findall(r'<th scope="row">(\w+)</th>\s*<td data-v="[^"]*">([^<]*)</td>', table[1]))
    assert {label: rates[label].rstrip("*") for label in LABELS} == {
        row.label: format_learning_rate(row) for row in result.rows[:9]
    }


def test_entropy_kl_and_length_are_shown_with_the_score(text: str) -> None:
    heads = re.findall(r"<button[^>]*>([^<]+)</button></th>", text)
    at = heads.index("runs that get there")
    assert heads[at + 1 : at + 5] == ["entropy", "KL", "length", "cut off"]


def test_the_page_has_every_row_and_escapes_text(result: ComparisonReport, text: str) -> None:
    data = embedded(text)
    drawn = {r["label"] for kind in data["kinds"] for r in kind["rows"]}
    assert drawn == {r.label for r in result.rows} - {"broken"}
    assert sum(r["hidden"] for r in data["kinds"][0]["rows"]) == 1  # the one of the least area
    assert NASTY not in text
    assert "no run succeeded" in text
    assert "adds π<sub>ref</sub>" in text or "adds π_ref" in text
    assert all(row.command in text for row in result.rows)
    matrix = data["pairs"]["tokens"]
    assert matrix["row_0"]["row_1"][0] == pytest.approx(1 - matrix["row_1"]["row_0"][0])
    assert data["rates"]["--lr"]["series"] == LABELS[1::2]
    curve = data["kinds"][0]["rows"][0]["curves"]["seconds"]
    assert len(curve["value"]) == len(curve["low"]) == len(data["axes"]["seconds"]["values"])


@pytest.fixture(scope="module")
def file(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page") / "comparison.html"
    place.write_text(text, encoding="utf-8")
    return place


def opened(chromium: Browser, file: Path, width: int = 1280, scheme: str = "light") -> tuple[Page, list[str]]:
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else wrong.append(r.url))
    page.goto(file.as_uri())
    page.wait_for_selector("[data-curves] .curve")
    return page, wrong


@pytest.mark.full
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_the_page_fits_the_window_in_light_and_dark(chromium: Browser, file: Path, width: int, scheme: str) -> None:
    page, wrong = opened(chromium, file, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    if width == 1280:
        tables = "[...document.querySelectorAll('table.fitted')]"
        widths = page.evaluate(f"{tables}.map((table) => [table.scrollWidth, table.parentNode.clientWidth])")
        assert all(table <= window for table, window in widths)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) > 600) == (scheme == "light")
    page.close()
    assert wrong == []


@pytest.mark.full
def test_axis_legend_hover_pairs_and_sorting(chromium: Browser, file: Path) -> None:
    page, wrong = opened(chromium, file)
    figure = page.locator('[data-curves="0"]')
    assert figure.locator(".curve").count() == figure.locator(".band").count() == MAX_SHOWN_ROWS
    figure.get_by_role("button", name="show all").click()
    assert figure.locator(".curve").count() == MAX_SHOWN_ROWS + 1
    figure.get_by_role("button", name="row_3", exact=True).click()
    assert figure.locator('.curve[data-series="3"]').count() == 0
    page.get_by_role("button", name="seconds of training").click()
    assert figure.locator("svg text", has_text="seconds of training").count() == 1
    figure.locator("svg[role=img]").hover(position={"x": 400, "y": 100})
    tip = page.locator("#tip")
    assert "seconds of training" in tip.inner_text()
    assert "row_3" not in tip.inner_text()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    cell = page.locator('[data-pairs="0"] tbody tr').nth(1).locator("td").first
    for button, measure in (("area under the curve", "area"), ("at equal tokens", "tokens")):
        page.get_by_role("button", name=button).click()
        assert cell.inner_text() == f"{embedded(file.read_text())['pairs'][measure]['row_1']['row_0'][0]:.2f}"
    head = page.locator("table.sortable").first.locator("thead button", has_text=re.compile("^area"))
    first = page.locator("table.sortable").first.locator("tbody th").first
    head.click()
    assert first.inner_text() == LABELS[-1]  # the best, where runs that failed have no number and come last
    head.click()
    assert first.inner_text() == LABELS[0]
    page.close()
    assert wrong == []
