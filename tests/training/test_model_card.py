"""The model card: what a reader is told, and what of the machine is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import policygrad as pg
from policygrad.training.model_card import as_merged_card, render_model_card

CONFIG = {
    "model": "HuggingFaceTB/SmolLM2-135M",
    "task": "/home/me/secret/problems.jsonl",
    "eval_data": "",
    "reward": ["math", "0.5*/home/me/secret/mine.py:short"],
    "lr": 1e-6,
    "seed": 3,
    "sampling": {"max_tokens": 64, "temperature": 0.7},
    "learner": {"lora": "rank=4"},
    "evaluation": {"problems": 32, "samples_per_prompt": 8},
    "algorithm": {"name": "dapo", "gate": {"part": "Clip", "low": 0.2}, "terms": [], "critic": "none"},
}


def test_the_card_has_method_data_and_evaluation() -> None:
    text = render_model_card("train", "dapo-1", CONFIG, {"held-out accuracy": "0.20 -> 0.45"}, {"tokens": 2100})
    head, _, body = text.removeprefix("---\n").partition("---\n")
    assert head.splitlines() == [
        "base_model: HuggingFaceTB/SmolLM2-135M",
        "library_name: peft",
        "pipeline_tag: text-generation",
        "tags:",
        "- policygrad",
        "- reinforcement-learning",
    ]
    assert "| task | problems.jsonl |" in body
    assert "| reward | math, 0.5*mine.py:short |" in body
    assert "| tokens sampled | 2.1k |" in body
    assert "| gate w | `Clip(low=0.2)` |" in body
    assert "| held-out accuracy | 0.20 -> 0.45 |" in body
    assert "at most 32 problems, 8 samples each at temperature 0.7" in body
    assert "secret" not in text
    assert "library_name: transformers" in as_merged_card(text)
    assert "`policygrad export FOLDER --format gguf`" in body
    assert "gguf" not in render_model_card("reward-model", "rm-1", CONFIG, {}, {})


def test_the_card_of_a_model_that_sees_says_so() -> None:
    text = render_model_card("train", "a", CONFIG, {}, {}, reads_pictures=True)
    assert "pipeline_tag: image-text-to-text" in text
    assert "gguf" not in text  # written for language models alone


def test_a_mix_appears_without_folders() -> None:
    text = render_model_card(
        "train", "a", CONFIG | {"task": "0.7*/home/me/secret/a.jsonl + 2*/home/me/secret/b.jsonl"}, {}, {}
    )
    assert "| task | 0.7*a.jsonl+2*b.jsonl |" in text
    assert "secret" not in text


def test_a_local_base_model_is_not_linked_to_the_hub() -> None:
    text = render_model_card("sft", "a", CONFIG | {"model": "/home/me/secret/base", "algorithm": {}}, {}, {})
    assert "base_model:" not in text
    assert "| base model | base |" in text
    assert "The model was not evaluated." in text


def test_a_run_writes_a_card_beside_its_model(tmp_path: Path) -> None:
    """Of so few prompts none are held out, and the card does not say that they were."""
    task = [{"prompt": f"1 + {i} =", "answer": str(1 + i)} for i in range(2)]
    evaluation = pg.EvaluationConfig(problems=2, samples_per_prompt=2)
    sizes: dict[str, Any] = {
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "sampling": pg.SamplingParams(max_tokens=8),
    }
    run = pg.Run(steps=1, task=task, reward=("exact_match",), evaluation=evaluation, **sizes)
    result = pg.train(replace(run, output=str(tmp_path / "mine")), display=False)
    text = (result.output / "model" / "README.md").read_text(encoding="utf-8")
    assert "# mine\n\ntiny, trained by `dapo`, with policygrad" in text
    assert "the training prompts, which are too few" in text
    assert f"{result.before:.2f} -> {result.after:.2f}" in text
    assert str(tmp_path) not in text
