"""scripts/measure_replay.py: its rows are runs with the filters that they say, and the section says what its intervals allow."""

from __future__ import annotations

import json
from pathlib import Path

import measure_replay

import policygrad as pg
from doubles.comparison import StubRunner, plan, row
from pages import replay
from policygrad.commands.compare import build_rows
from policygrad.compare.report import build_report
from policygrad.compare.runner import ComparisonRun
from results import load_result, read_result


def test_its_rows_are_runs_with_the_filters_that_they_say() -> None:
    given = [spec for spec in measure_replay.specs() if spec.startswith(("none=", "replay_2", "replay_once", "drop="))]
    found = build_rows(given, None, (), (), lr_grid=(), delta_grid=(), tokens=1000, overrides=True)
    words = {row.label: " ".join(row.argv) for row in found}
    assert "--algorithm.filters" not in words["none"]
    assert words["replay_2_steps"].endswith("ReplayBuffer --algorithm.filters.replay-buffer.max-age 2")
    assert words["replay_once"].endswith("--algorithm.filters.replay-buffer.no-reuse")
    assert words["drop"].endswith("DropZeroVariance --algorithm.filters.drop-zero-variance.mode drop")
    assert list(replay.NAMES) == list(measure_replay.FILTERS)
    assert "64 groups for 8 steps" in replay.NAMES["replay"]
    assert pg.parts.ReplayBuffer() == pg.parts.ReplayBuffer(size=64, max_age=8)


def test_the_measurement_calls_compare_and_keeps_its_report_and_page(tmp_path: Path) -> None:
    def compare(words: list[str]) -> int:
        folder = Path(words[words.index("--output") + 1])
        folder.mkdir(parents=True)
        (folder / "comparison.json").write_text(json.dumps({"rows": [], "seeds": [0]}))
        (folder / "comparison.html").write_text("page")
        assert words[-7:] == ["--jobs", "2", "--", *measure_replay.SHAPE]
        return 0

    assert measure_replay.main(["--", "--jobs", "2"], compare, tmp_path / "results", tmp_path / "work") == 0
    reported = load_result("replay", tmp_path / "results") or {}
    assert reported["measured_by"] == "python scripts/measure_replay.py -- --jobs 2"
    assert read_result("replay.html", tmp_path / "results") == "page"


def test_the_section_says_what_the_intervals_allow(tmp_path: Path) -> None:
    heights = {"none": 0.6, "replay": 0.8, "refill": 0.95, "drop": 0.8}
    made = plan(*(row(name, grid=(1e-3,)) for name in heights), seeds=5, tuning=1)
    found = build_report(made, ComparisonRun(made, tmp_path, StubRunner(heights), 1, lambda text: None).run()).to_dict()
    text = replay.replay_section(found | {"measured_by": "python x"})
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        replay.NAMES[name] for name in ("none", "replay", "drop", "refill")
    ]
    (verdict,) = [line for line in text.splitlines() if "At equal tokens" in line]
    assert verdict.startswith("Here it does. ")
    assert "is above *nothing*" in verdict
    assert "it is below *`DropZeroVariance`, further prompts*" in verdict
    assert "cannot be told from *`DropZeroVariance`, dropped*" in verdict
    assert "those of the 4 rows at 0.001 lie between" in verdict
