"""The HTML report as text: it asks for nothing, leaves out nothing, and its colours can be told from the paper."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from importlib.resources import files

import pytest
import torch

import policygrad as pg
from policygrad.algorithms import ALGORITHMS
from policygrad.commands.lab import build_lab_page
from policygrad.lab.measurement import MeasuredClaim
from policygrad.lab.page import SECTIONS, classify_algorithm, group_findings
from policygrad.lab.plots import PLOTS, choose_plot
from policygrad.lab.report import EXPERIMENTS, LabReport, build_lab_report
from policygrad.pages.render import render_math


@dataclass(frozen=True)
class Halved(pg.Gate):
    """A user's gate, with a name that would break out of a page that does not escape it."""

    def weight(self, ratio: torch.Tensor, psi: torch.Tensor, batch: pg.Batch) -> torch.Tensor:
        return ratio / 2

    def value(self, ratio: torch.Tensor, psi: torch.Tensor, batch: pg.Batch) -> torch.Tensor:
        return ratio * psi / 2


NAMES = ("leave_one_out", "z_score", "product_ratio", "gate_weights", "gae_curve", "bound_over_step", "occupancy_sum")
NASTY = "</script><b>&mine"
CHOSEN = {name: ALGORITHMS[name] for name in ("reinforce", "rloo", "grpo", "dr_grpo", "ppo", "vineppo")}
CHOSEN |= {NASTY: replace(pg.DR_GRPO, gate=Halved())}


@pytest.fixture(scope="module")
def result() -> LabReport:
    return build_lab_report(CHOSEN, 2, names=NAMES)


@pytest.fixture(scope="module")
def text(result: LabReport) -> str:
    return build_lab_page(result, CHOSEN)


def embedded(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


class Tags(HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


@pytest.mark.full
def test_the_page_is_one_file_without_network_access(text: str) -> None:
    tags = Tags(text).seen
    assert not [a for tag, a in tags if "src" in a]
    links = [a["href"] for tag, a in tags if "href" in a]
    assert all(link.startswith(("#", "data:")) for link in links)
    policy = next(a["content"] for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg|http-equiv", "", text)
    assert "url(" not in re.sub(r"url\(#", "", text)
    assert len(text.encode()) < 400_000


@pytest.mark.full
def test_every_link_leads_to_a_part_of_the_page_and_no_name_is_used_twice(text: str) -> None:
    tags = Tags(text).seen
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for _, a in tags if a.get("href", "").startswith("#")} <= set(ids)


def test_the_page_shows_every_finding(result: LabReport, text: str) -> None:
    plots = embedded(text)["plots"]
    for measured in result.findings:
        assert str(render_math(measured.sentence)) in text
        assert (measured.name in plots) == bool(measured.curves)
    assert {a["data-plot"] for _, a in Tags(text).seen if "data-plot" in a} == set(plots)


def test_every_experiment_has_a_section_and_every_plot_an_experiment() -> None:
    named = [name for names in SECTIONS.values() for name in names]
    assert sorted(named) == sorted(EXPERIMENTS)
    assert set(PLOTS) <= set(EXPERIMENTS)


def test_custom_names_are_escaped(text: str) -> None:
    assert NASTY not in text
    data = embedded(text)
    row = next(row for row in data["algorithms"] if row["name"] == NASTY)
    usual = next(row for row in data["algorithms"] if row["name"] == "dr_grpo")
    assert row["sides"][0]["scale"] == pytest.approx(usual["sides"][0]["scale"] / 2)
    assert data["families"][row["family"]] == "your own"
    gates = data["plots"]["gate_weights"]["panels"]
    assert gates[-1]["label"] == NASTY
    x = data["plots"]["gate_weights"]["x"]["values"]
    assert gates[-1]["lines"][0]["values"] == [r / 2 for r in x]


def test_numbers_that_are_not_finite_are_none_in_the_page(result: LabReport) -> None:
    on, off = result.rows[0]
    broken = replace(on, figures=replace(on.figures, snr=float("inf")))
    rows = embedded(build_lab_page(replace(result, rows=((broken, off),), findings=()), CHOSEN))["algorithms"]
    assert rows[0]["sides"][0]["snr"] is None


def test_families() -> None:
    names = {
        "reinforce": 0,
        "rloo": 0,
        "dr_grpo": 0,
        "opo": 0,
        "grpo": 1,
        "magistral": 1,
        "grpo_process": 1,
        "cispo": 1,
    }
    names |= {"ppo": 2, "a2c": 2, "vapo": 2, "vineppo": 2, "trpo": 2}
    assert {name: classify_algorithm(name, ALGORITHMS[name]) for name in names} == names


def test_findings_without_a_plot_get_a_default_plot() -> None:
    measured = MeasuredClaim("new", "c", True, "s", {}, curves={"x": (2.0, 1.0), "a_b": (4.0, 3.0)})
    drawn = choose_plot(measured).to_data(measured)
    assert drawn["x"] == {"label": "x", "values": [1.0, 2.0], "log": False}
    assert drawn["series"] == ["a b"]
    assert drawn["panels"][0]["lines"] == [{"series": 0, "values": [3.0, 4.0]}]
    assert group_findings([measured]) == {"Other findings": [measured]}
    assert choose_plot(replace(measured, curves={})) is None


def test_typesetting() -> None:
    assert str(render_math("KL(π‖π_ref) < G^-0.71.")) == "KL(π‖π<sub>ref</sub>) &lt; G<sup>-0.71</sup>."


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_colours_stand_out_from_the_paper_in_both_schemes() -> None:
    """WCAG 2.2, 1.4.3: 4.5 for text; series colour their names too."""
    style = (files("policygrad.pages") / "web" / "page.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    )
    assert set(light) == set(dark)
    for scheme in (light, dark):
        paper = luminance(scheme["paper"])
        for name in ("ink", "soft", "accent", *(f"s{i}" for i in range(7))):
            other = luminance(scheme[name])
            contrast = (max(paper, other) + 0.05) / (min(paper, other) + 0.05)
            assert contrast >= 4.5, f"{name}: {contrast:.2f}"
