"""What --export writes: figures that open anywhere, every number as CSV, LaTeX tables with intervals, sentences, the command."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ElementTree
from typing import Any

from policygrad.pages.charts import chart
from policygrad.pages.export import Export, Figure, Interval, Table, escape_latex, render_export

BAND = {"series": 0, "values": [0.2, None, 0.8], "band_low": [0.1, None, 0.7], "band_high": [0.3, None, 0.9]}
POINTS = {"series": 1, "values": [0.5, 0.5, None], "names": ["near", "far", "none"]}


def drawn(*lines: dict[str, Any]) -> dict[str, Any]:
    panel = {"label": "score <b>", "log": False, "low": None, "high": None, "lines": [*lines]}
    return {"x": {"label": "tokens", "values": (0.0, 1.0, 2.0), "log": False}, "series": ["a", "b"], "panels": [panel]}


def test_a_chart_has_bands_and_named_points_and_nothing_from_elsewhere() -> None:
    text = chart("Scores", drawn(BAND, POINTS), dark=False)
    root = ElementTree.fromstring(text)
    kinds = [node.tag.rpartition("}")[2] for node in root.iter()]
    assert kinds.count("circle") == 2 + 2  # each evaluation of the band, and both points
    assert text.count("fill-opacity") == 1
    assert "prefers-color-scheme" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme" in chart("Scores", drawn(BAND))


def test_names_that_would_cover_one_another_are_left_to_the_points_titles() -> None:
    close = POINTS | {"values": [0.5, None, None]}
    text = chart(
        "Scores", drawn(close, POINTS | {"series": 0, "values": [0.5, None, None], "names": ["over", "x", "x"]})
    )
    assert text.count("<title>near</title>") == text.count("<title>over</title>") == 1
    assert text.count(">near</text>") == 1
    assert text.count(">over</text>") == 0


def test_files_hold_figures_numbers_tables_and_sentences() -> None:
    table = Table(
        "scores", "Scores of 50 % & more.", ("row", "score", "n"), (("dr_grpo", Interval(0.5, 0.4, 0.61), 4.0),)
    )
    figures = (Figure("curve", "A curve", drawn(BAND)), Figure("empty", "Nothing", drawn()))
    texts = render_export(Export("Mine", "policygrad compare 'a b'", ("a is above b.",), figures, (table,)))
    assert sorted(texts) == ["README.md", "curve.csv", "curve.svg", "scores.csv", "scores.tex"]
    rows = [*csv.reader(texts["curve.csv"].splitlines())]
    assert rows[0] == ["tokens", "a", "a, low", "a, high"]
    assert rows[1:] == [["0.0", "0.2", "0.1", "0.3"], ["1.0", "", "", ""], ["2.0", "0.8", "0.7", "0.9"]]
    assert texts["scores.csv"].splitlines() == ['row,score,"score, low","score, high",n', "dr_grpo,0.5,0.4,0.61,4.0"]
    assert r"dr\_grpo & $0.500$ {\scriptsize [$0.400$, $0.610$]} & $4$ \\" in texts["scores.tex"]
    assert r"\caption{Scores of 50 \% \& more.}" in texts["scores.tex"]
    assert texts["scores.tex"].startswith("% policygrad compare 'a b'\n")
    for said in ("policygrad compare 'a b'", "a is above b.", "`curve.svg`", "rsvg-convert"):
        assert said in texts["README.md"]


def test_latex_reads_signs_as_they_are() -> None:
    assert escape_latex("a_b ± 5 % of ∇J → ½") == r"a\_b $\pm$ 5 \% of $\nabla$J $\to$ $\frac{1}{2}$"
