"""scripts/measure_staleness.py: its rows are runs, what it reads off a run's logs, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import measure_staleness
import policygrad as pg
from doubles.comparison import StubRunner, plan, row
from pages import staleness
from policygrad.commands.compare import build_rows
from policygrad.compare.report import build_report
from policygrad.compare.runner import ComparisonRun
from results import load_result, read_result

RATES = dict.fromkeys(measure_staleness.NAMES, 3e-4)


@pytest.mark.full
def test_its_rows_are_runs_of_the_staleness_that_they_say() -> None:
    specs = measure_staleness.specs(RATES)
    assert len(specs) == len({spec.partition("=")[0] for spec in specs}) == 5 * (1 + 5 * 2)
    some = [spec for spec in specs if spec.startswith(("m2po.0=", "m2po.16.corrected", "dapo.4.uncorrected"))]
    found = build_rows(some, None, (), (), lr_grid=(), delta_grid=(), tokens=1000, overrides=True)
    words = {row.label: " ".join(row.argv) for row in found}
    assert list(words) == [
        "dapo.4.uncorrected",
        "m2po.0",
        "m2po.16.corrected",
    ]
    assert "--max-staleness 16" in words["m2po.16.corrected"]
    assert "--algorithm.old-policy learner" in words["m2po.16.corrected"]
    assert "--algorithm.old-policy sampler" in words["dapo.4.uncorrected"]


def test_rates_are_those_that_were_measured() -> None:
    rows = [{"label": name, "tuned_option": "--lr", "option_value": 1e-3} for name in measure_staleness.NAMES]
    assert measure_staleness.best_rates({"rows": rows}) == dict.fromkeys(measure_staleness.NAMES, 1e-3)
    with pytest.raises(SystemExit, match="no rate for ppo"):
        measure_staleness.best_rates({"rows": rows[:-1]})


def test_the_measurement_calls_compare_and_keeps_its_report_and_page(tmp_path: Path) -> None:
    def compare(words: list[str]) -> int:
        folder = Path(words[words.index("--output") + 1])
        folder.mkdir(parents=True)
        (folder / "comparison.json").write_text(json.dumps({"rows": [], "seeds": [0]}))
        (folder / "comparison.html").write_text("page")
        assert words[-2:] == ["--jobs", "2"]
        return 0

    assert measure_staleness.main(["--", "--jobs", "2"], compare, tmp_path / "results", tmp_path / "work") == 0
    reported = load_result("staleness", tmp_path / "results") or {}
    assert reported["measured_by"] == "python scripts/measure_staleness.py -- --jobs 2"
    assert read_result("staleness.html", tmp_path / "results") == "page"


def steps(staleness: int) -> list[dict[str, Any]]:
    """The metrics of three steps: sampled in 1 s, learned in 0.5 s, published in 0.25 s."""
    return [
        {"step": k, "time/rollout": 1.0 if not staleness else 0.5, "time/update": 0.75}
        | ({"time/sampler_idle": 0.2} if staleness else {})
        for k in (1, 2, 3)
    ]


def test_times_are_read_from_the_metrics_of_a_run() -> None:
    alternating, overlapping = measure_staleness.read_seconds(steps(0)), measure_staleness.read_seconds(steps(1))
    assert alternating == measure_staleness.Seconds(1.75, 1 / 1.75, 0.75 / 1.75)
    assert overlapping == measure_staleness.Seconds(1.25, 0.5 / 1.25, pytest.approx(0.2 / 1.25))


def test_the_last_steps_are_left_out_during_which_nothing_is_left_to_sample() -> None:
    metrics = steps(1)
    metrics[-1] |= {"time/rollout": 0.0, "time/sampler_idle": 0.75}
    assert measure_staleness.read_seconds(metrics, 1).step == 1.25
    assert measure_staleness.read_seconds(metrics).step == 1.0
    assert measure_staleness.read_seconds(metrics, 3).step == pytest.approx(3.25 / 3)  # a short run: all


def test_an_interrupted_run_starts_again_and_a_complete_one_is_read(tmp_path: Path) -> None:
    run = measure_staleness.configure("tiny", 3, 2, 8, tmp_path)
    assert (run.max_staleness, run.sampler.chunk_tokens) == (2, 8)
    assert run.sampler.max_concurrency == measure_staleness.PARALLEL
    calls = list[bool]()

    def train(run: pg.Run, *, display: bool, overwrite: bool) -> None:
        folder = Path(str(run.output))
        folder.mkdir(exist_ok=True)
        rows = [{"step": 0}, *steps(2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "run.toml").touch()
        calls.append(overwrite)
        if len(calls) >= 2:
            (folder / "result.json").write_text("{}")

    seconds = [measure_staleness.train_once(run, train) for _ in range(3)]
    assert calls == [False, True]
    assert seconds[0] == seconds[2]
    assert seconds[0].step == 1.25
    result = measure_staleness.measure("tiny", 3, tmp_path, train)
    assert [(row["staleness"], row["chunk_tokens"]) for row in result["rows"]] == list(measure_staleness.SETTINGS)
    page = staleness.staleness_section({}, result | {"measured_by": "python y"})
    assert "Not measured yet" not in page.partition("### Seconds")[2]


def test_the_page(tmp_path: Path) -> None:
    assert staleness.staleness_section({}, {}).count("Not measured yet") == 2
    rows = [row("grpo.0"), row("grpo.4.corrected"), row("grpo.4.uncorrected")]
    made = plan(*rows, seeds=3)
    runner = StubRunner({"grpo.0": 0.9, "grpo.4.corrected": 0.8, "grpo.4.uncorrected": 0.6})
    found = build_report(made, ComparisonRun(made, tmp_path, runner, 1, lambda text: None).run()).to_dict() | {
        "measured_by": "python x"
    }
    speed = {"learner_idle": 0.5, "sampler_idle": 0.25}
    clock = {
        "rows": [{"staleness": k, "chunk_tokens": 8 * k, "step": 2.0 + 0.1 * k} | speed for k in (0, 1)],
        "measured_by": "python y",
    }
    text = staleness.staleness_section(found, clock)
    assert "Not measured yet" not in text
    (corrected,) = [line for line in text.splitlines() if line.startswith("| [`grpo`]") and "the learner's" in line]
    cells = [cell.strip() for cell in corrected.split("|")[3:-1]]
    assert [cell == "–" for cell in cells] == [False, True, True, False, True, True]
    assert float(cells[0].split()[0]) > float(cells[3].split()[0]) > 0.7
    assert "| 0 | full | 2.00 | 50% | 25% |" in text
    assert "| 1 | in chunks of 8 | 2.10 | 50% | 25% |" in text
