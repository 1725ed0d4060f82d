"""The whole RLHF path by its command line: demonstrations → SFT, preferences → reward model, then PPO with the KL in the reward."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from doubles.files import rows, write_rows
from policygrad import cli
from policygrad.models.classifier import encode_for_scoring, load_classifier, load_classifier_tokenizer, score

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_preferences.py"


def run(*args: str) -> None:
    assert cli.main([*args, "--plain"]) == 0


def write_data(folder: Path, problems: int, samples: int) -> tuple[int, int]:
    """Write sft.jsonl and pairs.jsonl by the script; (demonstrations, pairs)."""
    specification = importlib.util.spec_from_file_location("make_preferences", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    written: tuple[int, int] = script.make(folder, problems=problems, samples=samples)
    return written


def check_scores(ppo: str, judge: str) -> None:
    """The rewards of the run are what the reward model that was trained says of its completions."""
    model, tokenizer = load_classifier(f"{judge}/model"), load_classifier_tokenizer(f"{judge}/model")
    sampled = rows(Path(ppo, "completions.jsonl"))[:40]
    scores = score(model, [encode_for_scoring(tokenizer, row["prompt"], row["completion"]) for row in sampled])
    assert torch.allclose(scores, torch.tensor([row["reward"] for row in sampled]), atol=1e-4)


@pytest.mark.full
def test_each_stage_of_the_path_takes_what_the_one_before_has_written(random_model: Path, tmp_path: Path) -> None:
    """With a random model, which learns nothing in so few steps."""
    folder = tmp_path / "data"
    folder.mkdir()
    sums = [{"prompt": f"{i} + 1 =\n", "chosen": str(i + 1), "rejected": "no"} for i in range(8)]
    write_rows(folder / "pairs.jsonl", sums)
    write_rows(folder / "sft.jsonl", [{"prompt": row["prompt"], "completion": row["chosen"]} for row in sums])
    sft, judge, ppo = (str(tmp_path / name) for name in ("sft", "rm", "ppo"))
    first = ("--model", str(random_model), "--batch-size", "4", "--epochs", "1", "--lr", "3e-3")
    run("sft", "--data", f"{folder}/sft.jsonl", *first, "--output", sft)
    run("reward-model", "--data", f"{folder}/pairs.jsonl", *first, "--output", judge)
    sizes = ("--steps", "2", "--prompts-per-step", "2", "--samples-per-prompt", "4", "--max-tokens", "6")
    reward = ("--reward", f"model:{judge}", "--evaluation.problems", "0", "--lr", "3e-3")
    task = ("--task", write_rows(folder / "sums.jsonl", [{"prompt": row["prompt"]} for row in sums]))
    run("train", "ppo", "--model", sft, *task, *reward, *sizes, "--output", ppo)
    metrics = [row for row in rows(Path(ppo, "metrics.jsonl")) if "reward" in row]
    assert all(row["grad_norm"] > 0 and row["reward_std"] > 0 for row in metrics)
    assert metrics[-1]["kl"] > 1e-4  # it has left the SFT model, which is its reference
    check_scores(ppo, judge)


@pytest.mark.full
def test_sft_then_a_reward_model_then_ppo_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demonstrations, pairs = write_data(tmp_path / "data", problems=160, samples=8)
    assert demonstrations > 96
    assert pairs > 128
    sft, judge, ppo = (str(tmp_path / name) for name in ("sft", "rm", "ppo"))

    run("sft", "--data", f"{tmp_path}/data/sft.jsonl", "--batch-size", "32", "--output", sft)
    result = json.loads(Path(sft, "result.json").read_text())
    assert result["after"]["eval/loss"] < 0.9 * result["before"]["eval/loss"]

    preferences = ("--data", f"{tmp_path}/data/pairs.jsonl", "--batch-size", "32", "--epochs", "2")
    run("reward-model", *preferences, "--output", judge)
    result = json.loads(Path(judge, "result.json").read_text())
    before, after = result["before"], result["after"]
    assert after["eval/accuracy"] - 2 * after["eval/accuracy_stderr"] > 0.6
    assert after["eval/accuracy"] > before["eval/accuracy"]
    assert after["eval/margin"] > 0.5

    sizes = (
        "--steps",
        "4",
        "--prompts-per-step",
        "24",
        "--evaluation.problems",
        "32",
        "--evaluation.samples-per-prompt",
        "4",
    )
    run("train", "ppo", "--model", sft, "--reward", f"model:{judge}", "--lr", "3e-4", *sizes, "--output", ppo)
    result = json.loads(Path(ppo, "result.json").read_text())
    assert result["eval_reward_after"] > result["eval_reward_before"] + 0.1
    assert "held-out reward" in capsys.readouterr().out
    metrics = [row for row in rows(Path(ppo, "metrics.jsonl")) if "reward" in row]
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert all(row["grad_norm"] > 0 and row["reward_std"] > 0 for row in metrics)
    assert metrics[-1]["kl"] > 1e-4
    check_scores(ppo, judge)
