"""What pages repeat of the lab, and the pictures: gates, the primer's figures, their axes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import make_docs
from make_lab import PRIMER_FIGURES
from pages import algorithms as lab_numbers
from pages import figures as gate
from policygrad.algorithms import ALGORITHMS
from policygrad.lab.report import EXPERIMENTS
from policygrad.lab.setting import supported_algorithms
from policygrad.pages.charts import Scale, chart

DRAWN = {
    "x": {"label": "x", "values": (0.0, 1.0, 2.0), "log": False},
    "series": ["a", "b"],
    "panels": [
        {
            "label": "y < 2",
            "log": False,
            "low": 0.0,
            "high": None,
            "lines": [{"series": 0, "values": [0.0, 1.0, 2.0]}, {"series": 1, "values": [1.0, None, 0.5]}],
        }
    ],
}


def test_scales() -> None:
    assert [Scale(0, 2, 100, 300)(x) for x in (0, 0.5, 2)] == [100, 150, 300]
    assert Scale(0, 2, 0, 1).ticks() == [0, 0.5, 1, 1.5, 2]
    assert Scale(0.998, 1.002, 0, 1).ticks() == pytest.approx([0.998, 0.999, 1.0, 1.001, 1.002])
    log = Scale(0.01, 100, 0, 4, log=True)
    assert [log(x) for x in (0.01, 1, 100)] == pytest.approx([0, 2, 4])
    assert log.ticks() == pytest.approx([0.01, 0.1, 1, 10, 100])
    assert Scale(0.02, 0.3, 0, 1, log=True).ticks() == pytest.approx([0.02, 0.05, 0.1, 0.2])


def test_a_chart() -> None:
    svg = chart("A & B", DRAWN)
    root = ElementTree.fromstring(svg)
    assert root.find("{*}title").text == "A & B"
    curves = [p.get("d") for p in root.iter("{http://www.w3.org/2000/svg}path") if "curve c" in (p.get("class") or "")]
    assert len(curves) == 4  # two of the legend
    assert [d.count("L") for d in curves[2:]] == [2, 1]  # a point that is None is left out
    assert "y &lt; 2" in svg
    assert "prefers-color-scheme: dark" in svg


def test_a_gates_curve_is_broken_where_it_jumps() -> None:
    assert gate._unbroken([0.0, 0.1, 2.0, 2.1], 1.0) == [[0.0, 0.1, None, None], [None, None, 2.0, 2.1]]
    assert gate.reach(ALGORITHMS["grpo"]) == (0.0, 2.0)
    assert gate.reach(ALGORITHMS["gspo"]) == pytest.approx((0.998, 1.002))
    curve = 'class="curve c'
    assert gate.gate_figure("grpo").count(curve) == 2 + 4  # the legend, and each sign's piece before and after its jump
    assert gate.gate_figure("reinforce").count(curve) == 2 + 2


def test_every_algorithm_shows_its_gate_and_its_numbers() -> None:
    supported = supported_algorithms(ALGORITHMS, 4)
    for name, algorithm in ALGORITHMS.items():
        page = (make_docs.DOCS / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
        (picture,) = re.findall(r"\]\((gates/\w+\.svg)\)", page)
        assert (make_docs.DOCS / "algorithms" / picture).is_file(), name
        assert ("On-policy: scale " in page) == (name in supported), name
        assert repr(ALGORITHMS[gate.owner(name)].gate) == repr(algorithm.gate), name


def test_the_labs_numbers_are_repeated() -> None:
    lab = lab_numbers.LAB.read_text(encoding="utf-8")
    (row, *_) = re.findall(r"^\| `rloo` \|(.*)\|$", lab, re.MULTILINE)
    scale, bias, _, variance, _, snr, _ = (cell.strip() for cell in row.split("|"))
    expected = f"On-policy: scale {scale}, bias {bias}, variance {variance}, SNR {snr}."
    assert expected in lab_numbers.lab_section("rloo")
    assert "does not measure it" in lab_numbers.lab_section("trpo_vine")


def test_findings_are_quoted_whole() -> None:
    lab = lab_numbers.LAB.read_text(encoding="utf-8")
    for name in EXPERIMENTS:
        holds, claim, sentence = lab_numbers.read_finding(name)
        assert f"- {'✓' if holds else '✗'} **{claim}** {sentence}  \n  `policygrad lab --experiment {name}`" in lab
    with pytest.raises(SystemExit, match="there is no finding 'none'"):
        lab_numbers.read_finding("none")


def test_the_primers_figures_are_those_of_its_page() -> None:
    folder: Path = make_docs.DOCS / "primer"
    assert {path.stem for path in folder.glob("*.svg")} == set(PRIMER_FIGURES)
    page = (make_docs.DOCS / "primer.md").read_text(encoding="utf-8")
    assert re.findall(r"primer/(\w+)\.svg", page) == list(PRIMER_FIGURES)
