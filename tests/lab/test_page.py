"""docs/lab.md: every algorithm and every finding stands there, with today's figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policygrad.algorithms import ALGORITHMS
from policygrad.lab.experiments import EXPERIMENTS
from policygrad.lab.report import Report, report

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "lab.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def found() -> Report:
    return report({name: ALGORITHMS[name] for name in ("rloo", "grpo", "dapo")}, names=("z_score", "group_mean"))


def test_the_table_is_that_of_the_matrix(found: Report) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", TEXT, re.MULTILINE)
    assert [name for name, _ in rows] == [*ALGORITHMS] * 2, "a row is missing or too many: python scripts/make_lab.py"
    half = len(ALGORITHMS)
    for side in (0, 1):
        written = {name: [float(x) for x in cells.split("|")] for name, cells in rows[side * half : (side + 1) * half]}
        for pair in found.rows:
            f = pair[side].figures
            now = [f.scale, f.bias, f.cosine, f.variance, f.mse, f.snr, f.best_mse]
            assert written[pair[side].name] == pytest.approx(now, abs=6e-4), "python scripts/make_lab.py"


def test_every_finding_stands_there(found: Report) -> None:
    named = re.findall(r"`policygrad lab --experiment (\w+)`", TEXT)
    assert named == [*EXPERIMENTS]
    for finding in found.findings:
        assert finding.claim in TEXT
    assert found.findings[0].sentence in TEXT
