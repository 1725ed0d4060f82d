"""Credit along turns in docs/lab.md: today's figures, and a row for every chain."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from policygrad.core.base import Advantage
from policygrad.core.turns import BiLevelGAE, TurnGAE
from policygrad.lab.findings.advantages import exact_figures, with_advantage
from policygrad.lab.findings.critics import COMPARED, ERROR, UNBIASED
from policygrad.lab.worlds import walk_setting

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "lab.md").read_text(encoding="utf-8")
TEXT = PAGE.split("<!-- chains: begin -->")[1].split("<!-- critics: end -->")[0]
WRITTEN = {
    name: [float(x) for x in cells.split("|")]
    for name, cells in re.findall(r"^\| `(.+?)` \| (.+) \|$", TEXT, re.MULTILINE)
}
SETTING = walk_setting()
ERRING = replace(SETTING, critic_error=ERROR)


def test_the_page_has_every_chain() -> None:
    assert {*UNBIASED, *COMPARED} < {*WRITTEN}
    assert all(WRITTEN[name][1] == 0 for name in UNBIASED)
    assert all(row[1] == 0 for name, row in WRITTEN.items() if re.search(r"\blam=1\)", name))


@pytest.mark.parametrize(
    ("name", "psi"),
    [
        ("TurnReturn, TurnLeaveOneOut", UNBIASED["TurnReturn, TurnLeaveOneOut"]),
        pytest.param("GroupInGroup", COMPARED["GroupInGroup"], marks=pytest.mark.full),
        pytest.param("TurnGAE(lam=0.9)", (TurnGAE(lam=0.9),), marks=pytest.mark.full),
        ("BiLevelGAE(turn_lam=0.9, lam=0.9)", (BiLevelGAE(lam=0.9, turn_lam=0.9),)),
    ],
)
def test_the_figures_are_current(name: str, psi: tuple[Advantage, ...]) -> None:
    setting = ERRING if "lam" in name else SETTING
    f = exact_figures(with_advantage(*psi), setting, 3)
    now = [f.scale, f.bias, f.cosine, f.variance, f.mse, f.snr, f.best_mse]
    assert WRITTEN[name] == pytest.approx(now, abs=6e-4), "python scripts/make_lab.py turns"
