"""`policygrad eval`: the run's own task, reward and lengths; several models on the same problems; what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from policygrad.commands.evaluate import build_report, parse_options
from policygrad.commands.parsing import list_help_flags
from policygrad.compare.statistics import paired_difference
from policygrad.errors import ConfigError
from policygrad.rewards.builtin import find_answer_extractor
from policygrad.rewards.resolve import resolve_reward
from policygrad.rollout.evaluation import EvalSample, EvaluationResult
from policygrad.trackers.console import strip_control_chars
from policygrad.training.config.serialization import dump_config

Command = Callable[..., tuple[int, str, str]]
FEW = ("--problems", "2", "--samples", "1", "--max-tokens", "4")


@pytest.fixture(scope="module")
def trained(small: pg.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step that measured 6 problems with 4 samples each."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    run = replace(
        small, steps=1, seed=3, output=str(folder), evaluation=pg.EvaluationConfig(problems=6, samples_per_prompt=4)
    )
    pg.train(run, display=False)
    return folder


@pytest.fixture
def leave(small: pg.Run) -> tuple[str, ...]:
    """The words that let the run's own reward be imported, which lies in another folder than this one."""
    return "--allow-code", str(small.reward[0].rpartition(":")[0])


def test_eval_of_a_run_equals_its_own_evaluation(run_command: Command, trained: Path, leave: tuple[str, ...]) -> None:
    """Task, reward, lengths, seed, problems and samples are its own: the figure is the last one of its log, bit for bit."""
    code, out, err = run_command("eval", str(trained), "--json", *leave)
    assert code == 0, err
    results = json.loads(out)
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    last = next(row for row in reversed(rows) if "eval/reward" in row)
    assert results["mean"] == last["eval/reward"]
    assert results["stderr"] == last["eval/reward_stderr"]
    assert (results["problems"], results["samples"]) == (6, 4)


def test_completions_are_printed_in_full(run_command: Command, small: pg.Run, tmp_path: Path) -> None:
    argv = ("--task", str(small.task), "--reward", "exact_match")
    code, out, err = run_command("eval", str(small.model), *FEW, *argv, "--full", "--output", str(tmp_path / "found"))
    assert code == 0, err
    samples = [json.loads(line) for line in (tmp_path / "found" / "samples.jsonl").read_text().splitlines()]
    for number, sample in enumerate(samples, 1):
        head = f"--- problem {number}: reward {sample['reward']:.2f}, {sample['tokens']} tokens"
        head += ", cut off" * sample["truncated"]
        shown = f"{head}\n[prompt]\n{sample['prompt'].rstrip()}\n[completion]\n{sample['completion'].rstrip()}\n"
        assert strip_control_chars(shown) in out


def test_several_models_get_the_same_problems_and_random_numbers(
    run_command: Command, trained: Path, small: pg.Run, leave: tuple[str, ...], tmp_path: Path
) -> None:
    same = tmp_path / "same"
    same.symlink_to(trained / "model")
    argv = (str(trained), str(same), str(small.model), "--output", str(tmp_path / "found"), *leave)
    code, out, err = run_command("eval", *argv)
    assert code == 0, err
    assert "95% bootstrap intervals over the same problems" in out
    report = json.loads((tmp_path / "found" / "eval.json").read_text())
    assert [row["model"] for row in report["models"]] == [str(trained), str(same), str(small.model)]
    to_itself, to_base = report["differences"]
    zero = {"value": 0.0, "low": 0.0, "high": 0.0}
    assert to_itself["mean"] == to_itself["majority"] == zero
    assert set(to_itself["pass"]) == {"1", "2", "4"}
    assert to_base["mean"]["value"] == pytest.approx(report["models"][0]["mean"] - report["models"][2]["mean"])
    rows = [json.loads(line) for line in (tmp_path / "found" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 6 * 4
    prompts = {model: [row["prompt"] for row in rows if row["model"] == model] for model in (str(trained), str(same))}
    assert prompts[str(trained)] == prompts[str(same)]
    assert all(row["rewards"] == {small.reward[0]: row["reward"]} for row in rows)
    code, _, err = run_command("eval", *argv)
    assert code == 2
    assert "is not empty; choose another --output" in err


def test_options_are_those_of_train(trained: Path, small: pg.Run, leave: tuple[str, ...]) -> None:
    own = parse_options([str(trained), *leave])
    assert (own.task, own.reward, own.sampling, own.seed) == (small.task, small.reward, small.sampling, 3)
    short = ("--problems", "3", "--samples", "2", "--device", "cpu", "--dtype", "bf16", "--timeout", "7")
    long = (
        "evaluation.problems",
        "evaluation.samples-per-prompt",
        "learner.device",
        "learner.dtype",
        "rewards.timeout",
    )
    named = [word for name, word in zip(long, short[1::2], strict=True) for word in (f"--{name}", word)]
    assert parse_options(["tiny", *short]) == parse_options(["tiny", *named])
    assert {f"--{name}" for name in long} | set(short[::2]) <= set(list_help_flags(lambda: parse_options(["--help"])))
    assert parse_options(["tiny"]).task == "embedded"


def test_another_task_does_not_inherit_task_options(tmp_path: Path) -> None:
    run = pg.Run(task="a.jsonl", eval_data="b.jsonl", row_map="mine.py:f", skip_bad_rows=True, reward=("format",))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run.toml").write_text(dump_config(run))
    own = parse_options([str(tmp_path), "--allow-code", "mine.py"])
    assert (own.eval_data, own.row_map, own.skip_bad_rows) == ("b.jsonl", "mine.py:f", True)
    other = parse_options([str(tmp_path), "--task", "gcd", "--allow-code", "mine.py"])
    assert (other.task, other.eval_data, other.row_map, other.skip_bad_rows, other.reward) == (
        *("gcd", None, None, False),
        ("format",),
    )


def test_eval_of_a_run_drops_its_process_rewards(small: pg.Run, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    steps = small.reward[0].replace("starts_with_a_digit", "digits")
    (tmp_path / "run.toml").write_text(dump_config(replace(small, reward=(small.reward[0], steps))))
    assert parse_options([str(tmp_path), "--allow-code", steps.rpartition(":")[0]]).reward == small.reward
    assert parse_options([str(tmp_path), "--allow-code", steps.rpartition(":")[0], "--reward", steps]).reward == (
        steps,
    )


def test_eval_of_a_run_with_python_objects_needs_options(tmp_path: Path) -> None:
    run = pg.Run(task=[{"prompt": "1+1=", "answer": "2"}], reward=(len,))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run.toml").write_text(dump_config(run))
    with pytest.raises(ConfigError, match=r"the task of the run .* was a Python object.*--task"):
        parse_options([str(tmp_path), "--reward", "math"])
    with pytest.raises(ConfigError, match=r"the reward of the run .* --reward"):
        parse_options([str(tmp_path), "--task", "gcd"])
    assert parse_options([str(tmp_path), "--task", "gcd", "--reward", "format"]).reward == ("format",)


def test_one_model_twice_is_refused(run_command: Command) -> None:
    assert "tiny is given twice" in run_command("eval", "tiny", "tiny", *FEW)[2]


# --- the figures


def result(*rows: list[tuple[float | None, str | None]]) -> EvaluationResult:
    problems = tuple(tuple(EvalSample("", reward, answer=answer) for reward, answer in row) for row in rows)
    return EvaluationResult(problems, ("",) * len(rows))


def test_majority_vote_scores_the_most_frequent_answer() -> None:
    results = result(
        [(1.0, "4"), (0.0, "5"), (1.0, "4"), (0.0, None)],  # 4 has two votes
        [(0.0, "5"), (1.0, "4"), (0.0, None), (None, None)],  # a tie: the mean of 0 and 1
        [(0.0, None), (1.0, None), (0.0, None), (0.0, None)],  # nobody votes
        [(0.5, "7"), (0.0, "7"), (1.0, "8"), (None, "7")],  # an answer is worth its mean
    )
    assert results.majority_per_problem == (1.0, 0.5, 0.0, 0.5 / 3)
    assert results.majority == pytest.approx((1.5 + 0.5 / 3) / 4)
    assert results.mean_per_problem == (0.5, 0.25, 0.25, 0.375)
    assert results.num_failed == 2


@pytest.mark.parametrize(
    ("scores", "threshold", "is_noted"),
    [((0.0, 0.7), 1.0, True), ((0.0, 0.7), 0.5, False), ((0.0, 1.0), 1.0, False), ((0.0, 0.0), 1.0, False)],
)
def test_a_threshold_above_every_score_is_noted(scores: tuple[float, ...], threshold: float, is_noted: bool) -> None:
    """A reward whose maximum lies below the threshold makes pass@k 0 for ever, which looked like a poor model."""
    outcome = result([(score, None) for score in scores])
    notes = " ".join(build_report("task", None, len(scores), threshold, {"model": outcome})["notes"])
    assert ("the highest score was 0.7" in notes and "--threshold" in notes) is is_noted


def test_pass_at_k_by_enumeration() -> None:
    """c of n = 4 are right: of the six pairs without replacement, those with a right one in them."""
    results = result([(1.0, ""), (0.0, ""), (0.0, ""), (0.0, "")], [(1.0, ""), (1.0, ""), (0.0, ""), (0.0, "")])
    assert results.pass_at_per_problem(2) == (3 / 6, pytest.approx(5 / 6))
    assert results.pass_at(1) == results.mean


@pytest.mark.parametrize(
    ("reward", "equal", "other"),
    [
        ("gsm8k", ("so #### 1,234", "The answer is 1234.0."), "1235"),
        ("math", (r"\boxed{\frac{1}{2}}", "The answer is 0.5"), "1/3"),
        ("math", (r"\boxed{x+1}", "$x + 1$"), "$x$"),
        ("exact_match", ("I say <answer>4</answer>", "4"), "5"),
    ],
)
def test_votes_use_the_rewards_answer_parsing(reward: str, equal: tuple[str, str], other: str) -> None:
    voted = find_answer_extractor((resolve_reward("format"), resolve_reward(reward)))
    assert voted(equal[0]) == voted(equal[1]) != voted(other)
    assert voted("") is None


def test_paired_bootstrap_by_enumeration() -> None:
    """Of two problems with differences 0 and 1 a replication is 0, ½ or 1, with probabilities ¼, ½, ¼."""
    results = paired_difference([0.5, 1.0], [0.5, 0.0])
    assert (results.value, results.low, results.high) == (0.5, 0.0, 1.0)
    narrow = paired_difference([0.9, 0.1, 0.5], [0.8, 0.0, 0.4])  # how hard a problem is cancels out
    assert (narrow.low, narrow.high) == pytest.approx((0.1, 0.1))
    with pytest.raises(ValueError, match="same problems"):
        paired_difference([1.0], [1.0, 0.0])


@pytest.mark.full
def test_the_heading_names_the_evaluation_data(
    run_command: Command, small: pg.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, first in (("train.jsonl", 0), ("test.jsonl", 40)):
        lines = [json.dumps({"prompt": f"{a} + 1 =\n", "answer": str(a + 1)}) for a in range(first, first + 40)]
        Path(name).write_text("\n".join(lines) + "\n")
    data = ("--task", "train.jsonl", "--reward", "exact_match", *FEW)
    code, out, err = run_command("eval", str(small.model), *data)
    assert (code, out.splitlines()[0]) == (0, f"{small.model} on train.jsonl: 2 problems × 1 samples"), err
    code, out, err = run_command("eval", str(small.model), *data, "--eval-data", "test.jsonl")
    assert (code, out.splitlines()[0]) == (0, f"{small.model} on test.jsonl: 2 problems × 1 samples"), err
    code, out, err = run_command("eval", str(small.model), *data, "--eval-data", "test.jsonl", "--json")
    assert (code, json.loads(out)["task"], json.loads(out)["eval_data"]) == (0, "train.jsonl", "test.jsonl"), err
