"""`policygrad eval --benchmark`: tables, JSON, files, several models, changed settings, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import rows, write_rows
from policygrad.commands.evaluate import build_benchmark_report
from policygrad.rollout.evaluation import EvalSample, EvaluationResult, standard_error, weighted_mean
from policygrad.tasks.benchmarks import BenchmarkSampling, load_benchmarks
from policygrad.training.benchmarks import BenchmarkResult

Command = Callable[..., tuple[int, str, str]]
SHORT = ("--max-tokens", "6", "--show", "1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write_rows(folder / "gsm8k.jsonl", [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(4)])
    write_rows(
        folder / "gpqa_diamond.jsonl",
        [
            {"Question": f"{i}?", "Correct Answer": "a", **{f"Incorrect Answer {j}": str(j) for j in (1, 2, 3)}}
            for i in range(3)
        ],
    )
    return str(folder)


@pytest.mark.full
def test_a_benchmark_is_measured_with_its_own_settings(run_command: Command, small: pg.Run, data: str) -> None:
    code, out, err = run_command("eval", str(small.model), "--benchmark", "gsm8k", "--benchmark-data", data, "--json")
    assert code == 0, err
    [report] = json.loads(out)["benchmarks"]
    assert (report["benchmark"], report["task"], report["problems"], report["samples"]) == ("gsm8k", "gsm8k", 4, 1)
    assert report["revision"] == load_benchmarks()["gsm8k"].revision
    room = report["settings"]["max_tokens"]
    assert report["settings"] == {"temperature": 0.0, "top_p": 1.0, "max_tokens": room, "samples": 1}
    assert room < 2048  # what is left of the model's 256 positions
    assert f"gsm8k: max_tokens is {room} instead of 2048, since the model has 256 positions" in report["notes"][0]
    low, high = report["interval"]
    assert low <= report["mean"] <= high
    assert set(report["pass_interval"]) == {"1"}


def test_several_models_and_benchmarks_give_tables_and_files(
    run_command: Command, small: pg.Run, data: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.symlink_to(str(small.model))
    argv = ("eval", str(small.model), str(other), "--benchmark", "gsm8k,gpqa_diamond", "--benchmark-data", data)
    folder = tmp_path / "results"
    code, out, err = run_command(*argv, *SHORT, "--samples", "2", "--problems", "2", "--output", str(folder))
    assert code == 0, err
    assert "on gsm8k: 2 problems × 2 samples" in out
    assert out.count("95% bootstrap intervals over the same problems") == 2
    assert out.splitlines()[-3].startswith("mean ± standard error")
    report = json.loads((folder / "gpqa_diamond" / "eval.json").read_text())
    assert [row["model"] for row in report["models"]] == [str(small.model), str(other)]
    assert report["differences"][0]["mean"]["value"] == 0.0  # the same model, and the same random numbers
    assert report["models"][0]["settings"] == {"temperature": 0.6, "top_p": 0.95, "max_tokens": 6, "samples": 2}
    samples = rows(folder / "gsm8k" / "samples.jsonl")
    assert len(samples) == 2 * 2 * 2
    assert {"problem", "prompt", "completion", "reward", "answer", "tokens"} <= samples[0].keys()


def test_a_run_gives_its_seed_and_precision_and_no_code(
    run_command: Command, small: pg.Run, data: str, tmp_path: Path
) -> None:
    run = replace(small, steps=1, seed=7, output=str(tmp_path / "run"))
    pg.train(run, display=False)
    argv = ("eval", str(tmp_path / "run"), "--benchmark", "gsm8k", "--benchmark-data", data, *SHORT)
    code, out, err = run_command(*argv)  # its reward is a file of its own, which is not imported
    assert code == 0, err
    assert "on gsm8k: 4 problems × 1 samples" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--benchmark", "gsm8"), "did you mean gsm8k?"),
        (("--benchmark", "gsm8k", "--task", "gcd"), "--task and --benchmark exclude each other"),
        (("--benchmark", "gsm8k", "--reward", "math"), "--reward and --benchmark exclude each other"),
        (("--benchmark", "gsm8k", "--problems", "-1"), "--problems must be at least 1"),
        (
            ("--benchmark", "aime24"),
            "aime24.jsonl is not there. Without network: write the rows of Maxwell-Jia/AIME_2024",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(
    run_command: Command, data: str, argv: tuple[str, ...], message: str
) -> None:
    code, _, err = run_command("eval", "/nowhere/model", *argv, "--benchmark-data", data)
    assert code == 2
    assert message in err


def test_a_prompt_that_is_too_long_names_the_benchmark(run_command: Command, small: pg.Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "gsm8k.jsonl", [{"question": "why? " * 300, "answer": "1"}])
    argv = ("eval", str(small.model), "--benchmark", "gsm8k", "--benchmark-data", str(tmp_path))
    assert "benchmark gsm8k does not fit the model" in run_command(*argv)[2]


def test_the_list_and_show_tell_of_every_benchmark(run_command: Command) -> None:
    code, out, _ = run_command("eval", "--benchmark", "list")
    assert code == 0
    assert all(f"\n{name} " in out for name in load_benchmarks())
    listed = json.loads(run_command("eval", "--benchmark", "list", "--json")[1])["benchmarks"]
    assert [each["name"] for each in listed] == list(load_benchmarks())
    code, out, _ = run_command("show", "mmlu_pro")
    assert code == 0
    assert "TIGER-Lab/MMLU-Pro" in out
    assert "Let's think step by step" in out


# --- the figures


def result(benchmark: str, values: list[list[float]], settings: BenchmarkSampling, **more: Any) -> BenchmarkResult:
    problems = tuple(tuple(EvalSample("", value, (("r", value),)) for value in row) for row in values)
    known = load_benchmarks()[benchmark]
    return BenchmarkResult(known, settings, EvaluationResult(problems, ("",) * len(values)), {}, **more)


def test_a_reported_value_is_beside_the_measured_one_with_what_differs() -> None:
    settings = BenchmarkSampling(0.6, 0.95, 16384, 4)
    model = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
    measured = result("math500", [[1.0] * 4, [0.0, 1.0, 1.0, 1.0]], settings)
    report = build_benchmark_report({model: measured}, 1.0)
    [reported] = report["reported"]
    assert reported["value"] == 0.928
    assert reported["difference"] == pytest.approx(0.875 - 0.928)
    assert reported["settings_differ"] == [
        *("max tokens 16384 instead of 32768", "samples per problem 4 instead of 64"),
        "2 of 500 problems",
    ]
    other = build_benchmark_report({"runs/mine": measured}, 1.0)
    assert other["reported"] == []


def test_instruction_accuracy_weighs_a_prompt_by_its_instructions() -> None:
    value, error = weighted_mean([1.0, 0.5], [1, 4])
    assert value == pytest.approx(3 / 5)
    residuals = [1 * (1.0 - 0.6) / 2.5, 4 * (0.5 - 0.6) / 2.5]
    assert error == pytest.approx(standard_error(residuals))
    assert weighted_mean([0.2, 0.6], [1, 1]) == (pytest.approx(0.4), pytest.approx(standard_error([0.2, 0.6])))
    assert weighted_mean([], []) == (0.0, 0.0)
