"""The HTML report in headless Chromium: no error, the plots, hover, legend, switches, keyboard, both widths and schemes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from policygrad.algorithms import ALGORITHMS
from policygrad.commands.lab import build_lab_page
from policygrad.lab.report import build_lab_report
from policygrad.lab.setting import supported_algorithms

ROWS = supported_algorithms(ALGORITHMS, 2)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.full
NAMES = ("z_score", "gate_weights", "gae_curve", "bound_over_step", "k1_in_loss", "occupancy_sum")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lab") / "lab.html"
    place.write_text(build_lab_page(build_lab_report(ROWS, 2, names=NAMES), ROWS), encoding="utf-8")
    return place


def opened(
    chromium: Browser, file: Path, width: int = 1280, scheme: str = "light", touch: bool = False
) -> tuple[Page, list[str]]:
    """(the page, what went wrong on it so far and from now on)."""
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=touch)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else wrong.append(request.url)
    )
    page.goto(file.as_uri())
    page.wait_for_selector("#k1_in_loss .curve")
    return page, wrong


@pytest.fixture
def page(chromium: Browser, file: Path) -> Iterator[Page]:
    page, wrong = opened(chromium, file)
    yield page
    page.close()
    assert wrong == []


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_loads_without_errors_and_fits(chromium: Browser, file: Path, width: int, scheme: str) -> None:
    page, wrong = opened(chromium, file, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    inside = page.evaluate(
        "[...document.querySelectorAll('.plot svg[role=img]')].every(svg => { const b = svg.getBoundingClientRect();"
        " return b.width > 100 && b.height > 100 && [...svg.querySelectorAll('text')].every(t => {"
        " const r = t.getBoundingClientRect(); return r.left >= b.left - 2 && r.right <= innerWidth; }); })"
    )
    assert inside
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) > 600) == (scheme == "light")
    page.close()
    assert wrong == []


def test_the_page_has_the_plots(page: Page) -> None:
    drawn = {name: page.locator(f"#{name} .curve").count() for name in NAMES}
    assert drawn == {
        "z_score": 4,
        "gate_weights": 14,
        "gae_curve": 15,
        "bound_over_step": 4,
        "k1_in_loss": 4,
        "occupancy_sum": 0,
    }
    names = " ".join(page.locator("#scatter .point").evaluate_all("nodes => nodes.map(n => n.dataset.name)")).split()
    assert sorted(names) == sorted(ROWS)
    paths = page.locator(".curve").evaluate_all("nodes => nodes.map(n => n.getAttribute('d'))")
    assert all(d.startswith("M") and "L" in d and "NaN" not in d for d in paths)
    assert page.locator("#matrix tbody tr").count() == page.locator("#figures tbody tr").count() == len(ROWS)


def test_hover_shows_the_values_beside_the_line(page: Page) -> None:
    svg, tip = page.locator("#k1_in_loss svg[role=img]"), page.locator("#tip")
    assert tip.is_hidden()
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    svg.hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    assert tip.is_visible()
    text = tip.inner_text()
    assert text.startswith("rollout: ")
    assert all(name in text for name in ("no KL", "k1 in the loss", "k2 in the loss", "k1 in the reward"))
    page.mouse.move(2, 2)
    assert tip.is_hidden()


def test_hover_over_a_point_names_its_algorithms(page: Page) -> None:
    point = page.locator("#scatter .point[data-name='grpo_process']")
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    text = page.locator("#tip").inner_text()
    assert "grpo_process" in text
    assert "variance" in text


def test_the_legend_hides_a_series_in_every_panel_and_shows_it_again(page: Page) -> None:
    button = page.locator("#gae_curve .legend button", has_text=re.compile("^errs by 0.3"))
    series = button.get_attribute("data-series")
    curves = page.locator(f"#gae_curve .curve[data-series='{series}']")
    assert curves.count() == 3
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert curves.count() == 0
    assert page.locator("#gae_curve .curve").count() == 12
    button.press("Enter")
    assert curves.count() == 3
    assert button.get_attribute("aria-pressed") == "true"


def test_all_series_can_be_hidden(page: Page) -> None:
    for button in page.locator("#z_score .legend button").all():
        button.click()
    assert page.locator("#z_score .curve").count() == 0
    svg = page.locator("#z_score svg[role=img]")
    svg.hover()
    svg.press("ArrowRight")


def test_the_legend_of_the_scatter_hides_a_family(page: Page) -> None:
    before = page.locator("#scatter .point").count()
    page.locator("#scatter .legend button").first.click()
    assert page.locator("#scatter .point").count() < before
    assert page.locator("#scatter .point[data-name*='rloo']").count() == 0


def test_the_switches_change_scatter_sentence_and_table(page: Page) -> None:
    def state() -> tuple[str, ...]:
        cell = page.locator("#figures tbody tr", has_text="iterative_grpo").locator("td").nth(1).inner_text()
        d = page.locator("#scatter .point").first.get_attribute("d")
        return page.locator("#scatter-finding").inner_text(), cell, d

    assert page.get_by_role("button", name="length absorbed").get_attribute("aria-pressed") == "true"
    assert "length absorbed" in state()[0]
    page.get_by_role("button", name="as it is").click()
    first = state()
    assert first[0].startswith("On-policy reinforce, rloo, remax, astar_po and topr are unbiased")
    page.get_by_role("button", name="off-policy").click()
    second = state()
    assert second[0].startswith("Off-policy")
    assert all(a != b for a, b in zip(first, second, strict=True))
    page.get_by_role("button", name="length absorbed").click()
    assert "length absorbed" in state()[0]
    assert page.get_by_role("button", name="length absorbed").get_attribute("aria-pressed") == "true"


def test_the_table_is_sorted_by_a_click(page: Page) -> None:
    page.locator("#figures thead button", has_text="bias").click()
    values = [float(x) for x in page.locator("#figures tbody tr td:nth-child(3)").all_inner_texts()]
    assert values == sorted(values)
    page.locator("#figures thead button", has_text="bias").click()
    values = [float(x) for x in page.locator("#figures tbody tr td:nth-child(3)").all_inner_texts()]
    assert values == sorted(values, reverse=True)
    assert page.locator("#figures thead th").nth(2).get_attribute("aria-sort") == "descending"


def test_the_keyboard_reads_a_plot(page: Page) -> None:
    tip, svg = page.locator("#tip"), page.locator("#z_score svg[role=img]")
    svg.focus()
    svg.press("Home")
    assert tip.inner_text().startswith("p, how often the prompt is solved: 0.02")
    svg.press("ArrowRight")
    assert "0.05" in tip.inner_text()
    svg.press("Escape")
    assert tip.is_hidden()
    scatter = page.locator("#scatter svg[role=img]")
    scatter.focus()
    scatter.press("ArrowRight")
    assert "bias" in tip.inner_text()


def test_the_numbers_are_a_table_too(page: Page) -> None:
    details = page.locator("#bound_over_step details")
    details.locator("summary").click()
    rows = details.locator("tbody tr")
    rows.first.wait_for()
    assert 20 < rows.count() < 35
    assert "bound, KL" in details.locator("thead").inner_text()


def test_sampled_results_are_marked(chromium: Browser, tmp_path: Path) -> None:
    chosen, place = {name: ALGORITHMS[name] for name in ("rloo", "grpo")}, tmp_path / "sampled.html"
    place.write_text(build_lab_page(build_lab_report(chosen, 8, names=()), chosen), encoding="utf-8")
    page = chromium.new_page()
    page.goto(place.as_uri())
    page.wait_for_selector("#scatter .point")
    page.get_by_role("button", name="as it is").click()
    assert re.search(r"the least bias is rloo's, [\d.]+ ± 0\.0\d+;", page.locator("#scatter-finding").inner_text())
    assert re.fullmatch(
        r"0\.\d{3}", page.locator("#figures tbody tr", has_text="rloo").locator("td").nth(1).inner_text()
    )
    svg = page.locator("#scatter svg[role=img]")
    svg.focus()
    svg.press("ArrowRight")
    assert "±" in page.locator("#tip").inner_text()
    page.close()


def test_a_plot_shows_values_on_touch(chromium: Browser, file: Path) -> None:
    page, wrong = opened(chromium, file, 390, touch=True)
    svg = page.locator("#k1_in_loss svg[role=img]")
    svg.scroll_into_view_if_needed()
    svg.tap(position={"x": 200, "y": 60})
    box = page.locator("#tip").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    page.close()
    assert wrong == []
