"""docs/environments.md: every block and every command of it runs, at a small size, and does what the page says."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import rows
from doubles.scripted_sampler import conversation
from policygrad.models.loading import load_model
from policygrad.models.tokenizer import load_tokenizer

TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
PAGE = TEXT.partition("## Tools of MCP servers")[0]
BLOCKS: dict[str, str] = dict(re.findall(r"```python (\w+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [shlex.split(line) for line in re.findall(r"^    (policygrad .*)$", PAGE, re.MULTILINE)]
SMALL = {  # what makes seconds of minutes; an option that is given twice is the last
    "sft": ("--epochs", "1"),
    "train": (
        "--steps",
        "1",
        "--prompts-per-step",
        "2",
        "--samples-per-prompt",
        "2",
        "--max-tokens",
        "24",
        "--evaluation.problems",
        "2",
        "--evaluation.samples-per-prompt",
        "1",
    ),
    "eval": ("--problems", "2", "--samples", "1", "--max-tokens", "24"),
}


def block(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(BLOCKS[name], name, "exec", dont_inherit=True), names)
    return names


def said(environment: Any, *turns: str) -> Any:
    """The episode about 12 times 34 in which the policy says these turns."""
    asked = pg.Example(({"role": "user", "content": "12 times 34 ="},), {"answer": "408"})
    group, _ = conversation(load_tokenizer("tiny", load_model("tiny")), environment, asked, turns)
    return group.trajectories[0]


@pytest.mark.full
def test_the_way_from_a_function_to_a_trained_tool_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("products.py").write_text(BLOCKS["products"])
    block("products")["write"](64)
    shown = [row["messages"] for row in rows(Path("demonstrations.jsonl"))]
    assert [len(talk) for talk in shown[:2]] == [4, 2]
    assert [argv[1] for argv in COMMANDS] == ["sft", "eval", "train", "eval"]
    for argv in COMMANDS:
        code, _, err = run_command(*argv[1:], *SMALL[argv[1]])
        assert code == 0, err
    assert any("environment/calls" in row for row in rows(Path("trained/metrics.jsonl")))


def test_the_tool_is_what_earns_the_reward() -> None:
    products = block("products")["PRODUCTS"]
    right = said(products, "<tool_call>multiply(12, 34)</tool_call>", "<answer>408</answer>")
    assert (right.reward, right.stop_reason) == (1.0, "answer")
    assert said(products, "<answer>407</answer>").reward == 0.0
    shown = "<tool_response>\n408\n</tool_response>"
    assert shown in right.text  # as the conversations that the model was shown have it


def test_a_hidden_number_is_found_by_asking() -> None:
    environment = block("hidden")["GUESSING"]
    low, high, turns = 0, 99, list[str]()
    while low <= high and len(turns) < 7:  # halving finds one of 100 in seven
        middle = (low + high) // 2
        turns.append(f'<tool_call>{{"name": "compare", "arguments": {{"guess": {middle}}}}}</tool_call>')
        trajectory = said(environment, *turns, "found")
        answer = re.findall(r"<tool_response>\n(\w+)\n", trajectory.text)[-1]
        if answer == "right":
            break
        low, high = (middle + 1, high) if answer == "higher" else (low, middle - 1)
    assert answer == "right"
    assert trajectory.reward == 1.0


def test_an_environment_of_one_s_own_pays_each_turn() -> None:
    guess = block("guess")["Guess"]
    result = [said(guess, *[str(digit)] * 4) for digit in range(10)]  # of one seed, so of one number
    (one,) = (t for t in result if t.stop_reason == "found")
    assert (one.reward, len(one.turn_rewards)) == (1.0, 1)
    others = [t for t in result if t is not one]
    assert {t.stop_reason for t in others} == {"turns"}
    assert all(len(t.turn_rewards) == 4 and 0 <= t.reward < 0.4 for t in others)


def test_the_shop_s_reward_sees_the_cart() -> None:
    shopping = block("shop")["SHOPPING"]
    call = '<tool_call>{"name": "buy", "arguments": {"what": "tea"}}</tool_call>'
    bought, nothing = said(shopping, call, "Done."), said(shopping, "Done.")
    assert (bought.reward, bought.columns) == (1.0, {"cart": ["tea"]})
    assert (nothing.reward, nothing.columns) == (0.0, {"cart": []})
