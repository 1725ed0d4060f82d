"""Known benchmarks during training: at the run's own evaluations, in log, summary and report; resumed; refused early."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import rows, write_rows
from doubles.resuming import rewind
from policygrad.report.data import read_run
from policygrad.report.page import render_report
from policygrad.trackers.glossary import find_metric_doc
from policygrad.training.config.evaluation import EvaluationConfig
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import dump_config, load_config
from policygrad.training.config.trust import CodePermissions

NAMES = ("eval/gsm8k/mean", "eval/gsm8k/stderr", "eval/gsm8k/pass_at_2", "eval/gsm8k/majority")


@pytest.fixture(scope="module")
def run(small: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> pg.Run:
    folder = tmp_path_factory.mktemp("benchmarks")
    write_rows(folder / "gsm8k.jsonl", [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(4)])
    evaluation = EvaluationConfig(
        problems=2,
        samples_per_prompt=1,
        every=1,
        benchmarks=("gsm8k",),
        benchmark_data=str(folder),
        benchmark_problems=2,
        benchmark_samples=2,
        benchmark_max_tokens=4,
    )
    sizes: dict[str, Any] = {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2}
    return replace(small, **sizes, evaluation=evaluation, output=str(folder / "run"))


@pytest.fixture(scope="module")
def complete(run: pg.Run) -> Path:
    """The folder of the run when it has ended."""
    return pg.train(run, display=False).output


def test_benchmarks_are_measured_with_the_run_s_own_evaluations(complete: Path) -> None:
    log = {row["step"]: row for row in rows(complete / "metrics.jsonl")}
    for step in (0, 1, 2):
        assert all(name in log[step] for name in (*NAMES, "eval/reward")), step
    changes = json.loads((complete / "result.json").read_text())["benchmarks"]
    assert changes == {"gsm8k": {"before": log[0]["eval/gsm8k/mean"], "after": log[2]["eval/gsm8k/mean"]}}
    for name in log[2]:
        if name.startswith("eval/gsm8k/"):
            described = find_metric_doc(name)
            assert described is not None
            assert described.name.startswith("eval/*/"), name
    assert "eval/gsm8k/mean" in render_report([read_run(complete)])


def test_a_run_without_problems_of_its_own_is_evaluated_on_benchmarks_alone(run: pg.Run, tmp_path: Path) -> None:
    evaluation = replace(run.evaluation, problems=0, every=0)
    result = pg.train(replace(run, evaluation=evaluation, output=str(tmp_path / "run")), display=False)
    log = {row["step"]: row for row in rows(result.output / "metrics.jsonl")}
    assert "eval/gsm8k/mean" in log[0]
    assert "eval/gsm8k/mean" not in log[1]
    assert "eval/gsm8k/mean" in log[2]
    assert result.before is result.after is None


@pytest.mark.full
def test_a_resumed_run_continues_bit_for_bit_and_may_name_other_benchmarks(
    run: pg.Run, complete: Path, tmp_path: Path
) -> None:
    pieces = rewind(complete, tmp_path / "pieces", 1)
    pg.train(resume=pieces, allow_code=("/",), display=False)

    def values(folder: Path) -> list[list[float]]:
        return [
            [row.get(name, -1.0) for name in (*NAMES, "eval/reward", "reward")]
            for row in rows(folder / "metrics.jsonl")
        ]

    assert values(complete) == values(pieces)
    write_rows(tmp_path / "gsm8k.jsonl", [{"question": "1+1?", "answer": "#### 2"}])
    write_rows(tmp_path / "amc23.jsonl", [{"question": "1?", "answer": 1.0}])
    evaluation = replace(run.evaluation, benchmarks=("gsm8k", "amc23"), benchmark_data=str(tmp_path))
    more = replace(run, steps=3, output=str(pieces), evaluation=evaluation)
    pg.train(more, resume=pieces, display=False)
    last = rows(pieces / "metrics.jsonl")[-1]
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
    run: pg.Run, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    run = replace(run, model="/no/such/model", output=str(tmp_path / "run"))
    with pytest.raises(pg.PolicygradError, match=message):
        pg.train(replace(run, evaluation=replace(run.evaluation, **changes)), display=False)
