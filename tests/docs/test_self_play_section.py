"""docs/environments.md, on self-play: its files are files, its commands run with fewer steps, and its games are what it says."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import policygrad as pg
from doubles.files import rows

TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
PAGE = TEXT.partition("## Self-play")[2]
BLOCKS: dict[str, str] = dict(re.findall(r"```python (\w+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [
    shlex.split(line) for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]
FEWER = {
    "train": (
        "--steps",
        "2",
        "--prompts-per-step",
        "4",
        "--evaluation.problems",
        "4",
        "--evaluation.samples-per-prompt",
        "1",
        "--rewards.num-workers",
        "1",
        "--plain",
    ),
    "eval": ("--problems", "4", "--samples", "2"),
}


def block(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(BLOCKS[name], name, "exec", dont_inherit=True), names)
    return names


@pytest.mark.full
def test_the_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in BLOCKS.items():
        Path(f"{name}.py").write_text(text)
    assert [argv[1] for argv in COMMANDS] == ["train", "eval", "train", "train"]
    for argv in COMMANDS:
        code, _, err = run_command(*argv[1:], *FEWER[argv[1]])
        assert code == 0, err
    measured = set().union(*rows(Path("nim-run/metrics.jsonl")))
    for name in ("environment/moves", "environment/ended_illegal", "reward/role/first", "environment/won/first"):
        assert name in measured
    code, _, err = run_command("train", "dr_grpo", "--environment", "against.py:GAME", *FEWER["train"], "--output", "x")
    assert code == 0, err


def test_the_larger_number_wins_unless_it_exceeds_the_sum() -> None:
    bidding = block("bidding")["Bidding"]

    def result(left: str, right: str) -> dict[int, float]:
        game = bidding(pg.Example("1"), 7)
        asyncio.run(game.reset())
        game.digits = [3, 4]
        return dict(asyncio.run(game.step({0: pg.Action(left), 1: pg.Action(right)})).rewards)

    assert result("I say 7", "6") == {0: 1.0, 1: -1.0}
    assert result("8", "1") == {0: -1.0, 1: 1.0}
    assert result("5", "5") == {0: 0.0, 1: 0.0}
    assert bidding(pg.Example("1"), 7).digits == bidding(pg.Example("1"), 7).digits


def test_the_careful_opponent_wins_from_any_pile_but_a_multiple_of_four() -> None:
    turn = pg.Turn(0, "first", "Take 1, 2 or 3 of 7:\n", (), (), 0)
    assert block("against")["careful"](turn) == "3"
