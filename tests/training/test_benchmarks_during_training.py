"""Known benchmarks during training: at the run's own evaluations, in log, summary and report; resumed; refused early."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows, write_rows
from policygrad.report.data import read_run
from policygrad.report.page import render_report
from policygrad.trackers.glossary import find_metric_doc
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import dump_config, load_config
from policygrad.training.config.trust import CodePermissions

NAMES = ("eval/gsm8k/mean", "eval/gsm8k/stderr", "eval/gsm8k/pass_at_2", "eval/gsm8k/majority")


@pytest.fixture
def run(small: pg.Run, tmp_path: Path) -> pg.Run:
    write_rows(tmp_path / "gsm8k.jsonl", [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(4)])
    evaluation = EvaluationConfig(
        problems=4,
        samples_per_prompt=1,
        every=1,
        benchmarks=("gsm8k",),
        benchmark_data=str(tmp_path),
        benchmark_problems=2,
        benchmark_samples=2,
        benchmark_max_tokens=4,
    )
    return replace(small, steps=2, evaluation=evaluation, output=str(tmp_path / "run"))


def test_benchmarks_are_measured_with_the_run_s_own_evaluations(run: pg.Run) -> None:
    folder = pg.train(run, display=False).output
    log = {row["step"]: row for row in rows(folder / "metrics.jsonl")}
    for step in (0, 1, 2):
        assert all(name in log[step] for name in (*NAMES, "eval/reward")), step
    changes = json.loads((folder / "result.json").read_text())["benchmarks"]
    assert changes == {"gsm8k": {"before": log[0]["eval/gsm8k/mean"], "after": log[2]["eval/gsm8k/mean"]}}
    for name in log[2]:
        if name.startswith("eval/gsm8k/"):
            described = find_metric_doc(name)
            assert described is not None
            assert described.name.startswith("eval/*/"), name
    assert "eval/gsm8k/mean" in render_report([read_run(folder)])


def test_a_run_without_problems_of_its_own_is_evaluated_on_benchmarks_alone(run: pg.Run) -> None:
    result = pg.train(replace(run, evaluation=replace(run.evaluation, problems=0, every=0)), display=False)
    log = {row["step"]: row for row in rows(result.output / "metrics.jsonl")}
    assert "eval/gsm8k/mean" in log[0]
    assert "eval/gsm8k/mean" not in log[1]
    assert "eval/gsm8k/mean" in log[2]
    assert result.before is result.after is None


def test_a_resumed_run_continues_bit_for_bit_and_may_name_other_benchmarks(run: pg.Run, tmp_path: Path) -> None:
    complete = pg.train(run, display=False).output
    halves = replace(run, output=str(tmp_path / "halves"))
    pg.train(halves, stop_after=1, display=False)
    pg.train(halves, resume=str(tmp_path / "halves"), display=False)

    def values(folder: Path) -> list[list[float]]:
        return [
            [row.get(name, -1.0) for name in (*NAMES, "eval/reward", "reward")]
            for row in rows(folder / "metrics.jsonl")
        ]

    assert values(complete) == values(tmp_path / "halves")
    write_rows(tmp_path / "amc23.jsonl", [{"question": "1?", "answer": 1.0}])
    more = replace(run, steps=3, output=str(tmp_path / "halves"))
    more = replace(more, evaluation=replace(run.evaluation, benchmarks=("gsm8k", "amc23")))
    pg.train(more, resume=str(tmp_path / "halves"), display=False)
    last = rows(tmp_path / "halves" / "metrics.jsonl")[-1]
    assert {"eval/gsm8k/mean", "eval/amc23/mean"} <= last.keys()


def test_the_configuration_keeps_the_benchmarks(run: pg.Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump_config(replace(run, reward=("exact_match",))))
    read = load_config(tmp_path / "run.toml", Run(), CodePermissions())
    assert read.evaluation == run.evaluation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"benchmarks": ("gsm8",)}, "did you mean gsm8k"),
        ({"benchmark_samples": 0}, "evaluation.benchmark_samples and evaluation.benchmark_max_tokens at least 1"),
        ({"benchmarks": ("aime24",)}, "aime24.jsonl is not there"),
        ({"benchmark_data": "/nowhere"}, "/nowhere is no folder"),
    ],
)
def test_what_is_missing_is_refused_before_the_model_is_loaded(
    run: pg.Run, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(pg.PolicygradError, match=message):
        pg.train(replace(run, model="/no/such/model", evaluation=replace(run.evaluation, **changes)), display=False)
