"""Runs with a second model: a teacher by name on the command line and in run.toml, no reward needed, a reward model that learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import policygrad as pg
from doubles.files import rows, write_rows
from doubles.trackers import Record
from policygrad.commands.train import list_train_flags
from policygrad.trackers.console import format_number, summarise_metrics
from policygrad.training.config.run import Run
from policygrad.training.config.serialization import load_config
from policygrad.training.trainer import train

Command = Callable[..., tuple[int, str, str]]
TAUGHT = replace(pg.DISTILL, reference=pg.Reference(model="tiny"))


def test_distillation_reduces_the_kl(small: Run, tmp_path: Path) -> None:
    """A random model learns from the embedded one: KL(π‖π_T) falls, and run.toml names the teacher."""
    record, output = Record(), str(tmp_path / "run")
    result = train(replace(small, algorithm=TAUGHT, steps=12, lr=1e-2, output=output), display=record)
    kl = [metrics["teacher/kl"] for _, metrics in record.steps]
    assert kl[-1] < 0.9 * kl[0]
    rerun = load_config(result.output / "run.toml", Run())
    assert rerun.algorithm.reference == pg.Reference(model="tiny")
    assert record.info.facts["reference"].startswith("tiny (0.70M")


def test_distillation_needs_no_rewards(small: Run, tmp_path: Path) -> None:
    """Prompts alone are enough for a teacher; grpo asks for a reward."""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i} + 1 =\n"} for i in range(40)])
    record = Record()
    run = replace(small, algorithm=TAUGHT, task=prompts, reward=(), steps=2, output=str(tmp_path / "run"))
    run = replace(run, samples_per_prompt=2, evaluation=pg.EvaluationConfig(problems=8))
    result = train(run, display=record)
    assert result.before is result.after is None
    assert "no reward" in record.info.facts["eval data"]
    measured = rows(result.output / "metrics.jsonl")
    assert all(row["updates/taken"] == 1 for row in measured if "step" in row and "teacher/kl" in row)
    assert not {"reward", "reward_std", "frac_reward_zero_std"} & set().union(*measured)
    assert all(row["reward"] is None for row in rows(result.output / "completions.jsonl"))
    message = [summarise_metrics(metrics) for _, metrics in record.steps]
    assert [argv[0][0] for argv in message] == ["teacher kl"] * 2
    assert message[0][0][1] == f"teacher kl {format_number(record.steps[0][1]['teacher/kl'])}"
    assert "reward" not in dict(message[0])
    with pytest.raises(pg.PolicygradError, match="has no reward of its own"):
        train(replace(run, algorithm=pg.GRPO, output=str(tmp_path / "grpo")), display=False)


@pytest.mark.full
def test_an_implicit_reward_model_is_trained(small: Run, tmp_path: Path) -> None:
    """PRIME on outcomes that a first letter decides: r_φ is 0 in the first rollout, and says something in every later one."""
    letter = "def letter(prompts, completions, **columns):\n    return [float(c[:1].isalpha()) for c in completions]\n"
    (tmp_path / "first.py").write_text(letter)
    algorithm = replace(pg.PRIME, filters=(), reward_model=pg.ImplicitReward(0.5, lr=3e-3))
    run = replace(small, algorithm=algorithm, reward=(f"{tmp_path / 'first.py'}:letter",), steps=3, lr=1e-4)
    result = train(replace(run, output=str(tmp_path / "run")), display=False)
    results = rows(result.output / "metrics.jsonl")
    assert results[0]["reward_model/reward"] == 0
    assert results[0]["reward_model/accuracy"] == 0.5
    assert all(abs(row["reward_model/reward"]) > 1e-4 for row in results[1:])
    assert any(row["reward_model/accuracy"] != 0.5 for row in results[1:])
    assert all({"reward_model/loss", "reward_model/grad_norm"} <= row.keys() for row in results)


def test_outcomes_outside_0_to_1_are_refused(small: Run, tmp_path: Path) -> None:
    (tmp_path / "far.py").write_text(
        "def far(prompts, completions, **columns):\n    return [7.0 for _ in completions]\n"
    )
    run = replace(small, algorithm=replace(pg.PRIME, filters=()), reward=(f"{tmp_path / 'far.py'}:far",))
    with pytest.raises(pg.ConfigError, match=r"outcomes in \[0, 1\].*7"):
        train(replace(run, output=str(tmp_path / "run")), display=False)


def test_teacher_on_the_command_line(run_command: Command) -> None:
    code, out, _ = run_command("train", "distill", "--teacher", "runs/grpo-1", "--dry-run")
    assert code == 0
    assert 'model = "runs/grpo-1"' in out
    same = run_command("train", "distill", "--algorithm.reference.model", "runs/grpo-1", "--dry-run")[1]
    assert same.partition("# memory:")[0] == out.partition("# memory:")[0]
    code, out, _ = run_command(
        "train", "grpo", "--teacher", "a/b", "--dry-run"
    )  # a KL to another model beside the reward
    assert code == 0
    assert 'model = "a/b"' in out
    assert "--teacher" in list_train_flags("distill")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("distill",), "distill learns from a teacher: set --teacher"),
        (("dapo", "--teacher", "tiny"), "reference.model is 'tiny', but no part of dapo uses a reference"),
        (("iterative_grpo", "--teacher", "tiny"), "Reference.model='tiny' is frozen"),
        (
            ("dapo", "--algorithm.reference", "none", "--teacher", "x"),
            "--teacher x sets a reference, but algorithm.reference is none",
        ),
    ],
)
def test_invalid_teacher_options_are_refused(run_command: Command, argv: tuple[str, ...], says: str) -> None:
    code, _, error = run_command("train", *argv, "--dry-run")
    assert code != 0
    assert says in " ".join(error.split())


def test_a_teacher_with_another_tokenizer_is_refused(small: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small.model)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(tmp_path / "other")
    other = AutoModelForCausalLM.from_pretrained(small.model)
    other.resize_token_embeddings(len(tokenizer))
    other.save_pretrained(tmp_path / "other")
    algorithm = replace(pg.DISTILL, reference=pg.Reference(model=str(tmp_path / "other")))
    with pytest.raises(pg.ModelError, match="its vocabulary differs"):
        train(replace(small, algorithm=algorithm, output=str(tmp_path / "run")), display=False)
    assert not (tmp_path / "run").exists()
