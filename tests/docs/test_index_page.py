"""docs/index.md, after the first run: the part that is changed, and the advantages that the page computes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles.files import rows

PAGE = (Path(__file__).parents[2] / "docs" / "index.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("### Change one part")[2].partition("\n## ")[0]
FEWER = ("--steps", "1", "--evaluation.problems", "0", "--checkpoint.every", "100", "--plain")


@pytest.mark.full
def test_the_first_group_has_the_advantages_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    [line] = re.findall(r"^    policygrad (train .*)$", SECTION, re.MULTILINE)
    for argv in (["train", "grpo", "--output", "grpo"], shlex.split(line)):
        code, _, err = run_command(*argv, *FEWER)
        assert code == 0, err
    for folder, right, wrong in (("grpo", 1.207, -0.724), ("no-std", 0.625, -0.375)):
        group = [row for row in rows(Path(folder, "completions.jsonl")) if row["group"] == 0]
        assert "92 - 18" in group[0]["prompt"]
        assert [row["reward"] for row in group].count(1.0) == 3
        assert len(group) == 8
        for row in group:
            assert row["advantage"] == pytest.approx(right if row["reward"] else wrong, abs=5e-4)
        for value in (right, wrong):
            assert f"{value:g}".replace("-", "−") in SECTION
