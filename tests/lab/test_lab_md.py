"""docs/lab.md: every algorithm and every finding stands there, with today's figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policygrad.algorithms import ALGORITHMS as MATRIX
from policygrad.lab.report import EXPERIMENTS, LabReport, build_lab_report
from policygrad.lab.setting import supported_algorithms

ALGORITHMS, SIZED = supported_algorithms(MATRIX, 4), supported_algorithms(MATRIX, 2)

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "lab.md").read_text(encoding="utf-8")


def rows_of(block: str) -> list[tuple[str, str]]:
    """(name, cells) of the tables between a block's marks."""
    text = TEXT.split(f"<!-- {block}: begin -->")[1].split(f"<!-- {block}: end -->")[0]
    return re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def result() -> LabReport:
    return build_lab_report(
        {name: ALGORITHMS[name] for name in ("rloo", "grpo", "dapo")}, names=("brevity", "group_mean")
    )


def test_the_table_is_that_of_the_matrix(result: LabReport) -> None:
    rows = rows_of("table")
    assert [name for name, _ in rows] == [*ALGORITHMS] * 2, "a row is missing or too many: python scripts/make_lab.py"
    half = len(ALGORITHMS)
    for side in (0, 1):
        written = {name: [float(x) for x in cells.split("|")] for name, cells in rows[side * half : (side + 1) * half]}
        for pair in result.rows:
            f = pair[side].figures
            now = [f.scale, f.bias, f.cosine, f.variance, f.mse, f.snr, f.best_mse]
            assert written[pair[side].name] == pytest.approx(now, abs=6e-4), "python scripts/make_lab.py"


def test_the_figures_by_group_size_are_current() -> None:
    rows = rows_of("sizes")
    assert [name for name, _ in rows] == [*SIZED] * 2
    result, half = build_lab_report({name: SIZED[name] for name in ("rloo", "ppo")}, 2, names=()), len(SIZED)
    for side in (0, 1):
        written = {name: cells.split("|") for name, cells in rows[side * half : (side + 1) * half]}
        for pair in result.rows:
            f, cells = pair[side].figures, written[pair[side].name]
            assert [float(cells[0]), float(cells[2])] == pytest.approx([f.bias, f.variance], abs=6e-4)
            assert ["±" in cell for cell in cells] == [False, True] * 2


def test_the_page_has_every_finding(result: LabReport) -> None:
    named = re.findall(r"`policygrad lab --experiment (\w+)`", TEXT)
    assert named == [*EXPERIMENTS]
    for measured in result.findings:
        assert measured.claim in TEXT
    assert result.findings[0].sentence in TEXT
