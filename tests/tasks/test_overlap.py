"""Decontamination: training prompts that overlap with evaluation prompts are left out and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import write_rows
from doubles.vision_models import make_picture
from policygrad.errors import ConfigError, DataError
from policygrad.tasks import load_task
from policygrad.tasks.rows import EvalPrompts, RowOptions

ASKS = "Solve this problem and put the answer into a box please: "


def test_ngram_overlap_by_hand() -> None:
    held_out = EvalPrompts(["The quick brown fox jumps.", "3 + 4 ="], 4)
    assert "a QUICK, brown fox jumps over" in held_out
    assert "quick brown fox leaps" not in held_out
    assert "the quick brown  fox JUMPS" in held_out
    assert "3+4=" in held_out  # tokenized alike
    assert "3 * 4 =" not in held_out
    assert "3" not in held_out
    short = EvalPrompts(["Brown fox"], 4)  # shorter than n: only as a whole
    assert "brown fox" in short
    assert "a brown fox" not in short
    assert "..." not in EvalPrompts(["?!"], 4)


def test_ngrams_shared_by_all_evaluation_prompts_are_ignored() -> None:
    names = [f"name{i}" for i in range(20)]
    held_out = EvalPrompts([f"{ASKS}{name} has {i} apples and buys {i} more" for i, name in enumerate(names)], 6)
    assert f"{ASKS}Zoe owns 8 pears and sells a few more" not in held_out
    assert "today name7 has 7 apples and buys" in held_out


def test_words_of_prompts_with_pictures_count_beside_an_equal_picture() -> None:
    """Otherwise one question about many pictures would leave no row to train on."""

    def ask(seed: int, text: str) -> Any:
        content = ({"type": "image", "image": make_picture(8, 8, seed)}, {"type": "text", "text": text})
        return ({"role": "user", "content": content},)

    question = "How many circles are there?"
    held_out = EvalPrompts([ask(1, question), ask(2, question), "what is left of the tree"], 4)
    assert ask(1, question) in held_out
    assert ask(1, "Tell me: how many circles are there in all") in held_out
    assert ask(1, "Which color has the square") not in held_out
    assert ask(3, question) not in held_out
    assert question not in held_out
    assert "and what is left of the tree" in held_out


def test_messages_are_compared_except_system_messages() -> None:
    system = {"role": "system", "content": "one two three four"}
    held_out = EvalPrompts([(system, {"role": "user", "content": "five six seven eight"})], 4)
    assert (system, {"role": "user", "content": "nothing"}) not in held_out
    assert ({"role": "user", "content": "say five six seven eight"},) in held_out


def rows(*prompts: str) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "answer": "1"} for prompt in prompts]


def test_overlapping_training_rows_are_left_out() -> None:
    train = rows("say a b c d now", "a b c x y z", "p q r s")
    with pytest.warns(
        UserWarning, match="rows: 1 of 3 rows left out of training: .* share 4 consecutive words with one"
    ):
        task = load_task(train, eval_data=rows("a b c d e"), row_options=RowOptions(decontaminate=4))
    assert {task.train_example(i).prompt for i in range(2)} == {"a b c x y z", "p q r s"}
    assert [row.prompt for row in task.eval_examples(9)] == ["a b c d e"]
    with pytest.raises(DataError, match="all prompts are evaluation prompts or share 1 consecutive words with one"):
        load_task(train, eval_data=rows("a b p"), row_options=RowOptions(decontaminate=1))
    with pytest.raises(DataError, match="generates its examples"):
        load_task("gcd", row_options=RowOptions(decontaminate=8))


def test_held_out_rows_are_decontaminated_too() -> None:
    """Each prompt occurs twice, with different punctuation; no pair is in both training and evaluation."""
    twice = rows(*(f"what is {i} plus {i + 1}{mark}" for i in range(100) for mark in ("?", "!")))
    with pytest.warns(UserWarning, match="rows left out of training"):
        task = load_task(twice, row_options=RowOptions(decontaminate=8))
    evaluated = {row.prompt.rstrip("?!") for row in task.eval_examples(999)}  # type: ignore[union-attr]
    left = 200 - len(task.eval_examples(999))
    trained = {task.train_example(i).prompt.rstrip("?!") for i in range(left)}  # type: ignore[union-attr]
    assert not evaluated & trained


def test_decontaminate_is_an_option_of_train(run_command: Any, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "a.jsonl", rows("a b", "c d"))
    code, out, _ = run_command("train", "--task", data, "--task.decontaminate", "8", "--dry-run")
    assert code == 0
    assert "decontaminate = 8" in out
    with pytest.raises(ConfigError, match="decontaminate"):
        pg.Run(decontaminate=-1)
