"""Training prompts that overlap with held-out ones are left out, and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import write_rows
from policygrad.errors import ConfigError, DataError
from policygrad.tasks import load_task
from policygrad.tasks.rows import NgramOverlap, RowOptions

ASKS = "Solve this problem and put the answer into a box please: "


def test_words_in_a_row_by_hand() -> None:
    held_out = NgramOverlap.from_prompts(["The quick brown fox jumps.", "3 + 4 ="], 4)
    assert "a QUICK, brown fox jumps over" in held_out
    assert "quick brown fox leaps" not in held_out
    assert "the quick brown  fox JUMPS" in held_out
    assert "3+4=" in held_out  # as many words as it takes
    assert "3 * 4 =" not in held_out
    assert "3" not in held_out
    short = NgramOverlap.from_prompts(["Brown fox"], 4)  # shorter than n: all of it, or nothing
    assert "brown fox" in short
    assert "a brown fox" not in short
    assert "..." not in NgramOverlap.from_prompts(["?!"], 4)


def test_what_all_held_out_prompts_share_is_a_template() -> None:
    names = [f"name{i}" for i in range(20)]
    held_out = NgramOverlap.from_prompts(
        [f"{ASKS}{name} has {i} apples and buys {i} more" for i, name in enumerate(names)], 6
    )
    assert f"{ASKS}Zoe owns 8 pears and sells a few more" not in held_out
    assert "today name7 has 7 apples and buys" in held_out


def test_messages_count_but_those_of_the_system() -> None:
    system = {"role": "system", "content": "one two three four"}
    held_out = NgramOverlap.from_prompts([(system, {"role": "user", "content": "five six seven eight"})], 4)
    assert (system, {"role": "user", "content": "nothing"}) not in held_out
    assert ({"role": "user", "content": "say five six seven eight"},) in held_out


def rows(*prompts: str) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "answer": "1"} for prompt in prompts]


def test_a_task_without_what_it_is_measured_on() -> None:
    train = rows("say a b c d now", "a b c x y z", "p q r s")
    with pytest.warns(UserWarning, match="rows: 1 of 3 rows left out of training, which have 4 words in a row"):
        task = load_task(train, eval_data=rows("a b c d e"), row_options=RowOptions(decontaminate=4))
    assert {task.train_example(i).prompt for i in range(2)} == {"a b c x y z", "p q r s"}
    assert [row.prompt for row in task.eval_examples(9)] == ["a b c d e"]
    with pytest.raises(DataError, match="every training prompt has 1 words in a row"):
        load_task(train, eval_data=rows("a b p"), row_options=RowOptions(decontaminate=1))
    with pytest.raises(DataError, match="makes its own examples"):
        load_task("gcd", row_options=RowOptions(decontaminate=8))


def test_the_sixteenth_that_is_held_out_counts_too() -> None:
    """Every prompt comes twice, with other punctuation: what is held out of one half takes the other's along."""
    twice = rows(*(f"what is {i} plus {i + 1}{mark}" for i in range(100) for mark in ("?", "!")))
    with pytest.warns(UserWarning, match="rows left out of training"):
        task = load_task(twice, row_options=RowOptions(decontaminate=8))
    measured = {row.prompt.rstrip("?!") for row in task.eval_examples(999)}  # type: ignore[union-attr]
    left = 200 - len(task.eval_examples(999))
    trained = {task.train_example(i).prompt.rstrip("?!") for i in range(left)}  # type: ignore[union-attr]
    assert not measured & trained


def test_it_is_an_option_of_train(run_command: Any, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "a.jsonl", rows("a b", "c d"))
    code, out, _ = run_command("train", "--task", data, "--task.decontaminate", "8", "--dry-run")
    assert code == 0
    assert "decontaminate = 8" in out
    with pytest.raises(ConfigError, match="decontaminate"):
        pg.Run(decontaminate=-1)
