"""The tasks that docs/environments.md measures: they can be done, by the good half of what is shown; the page says what came."""

from __future__ import annotations

import asyncio
from random import Random

import policygrad as pg
from measure_environments import GUESSES, HIGHEST, TASKS, Guess, asked, guesses, products, programs
from pages.blocks import learned_block


def test_a_calculator_is_shown_every_other_time_and_copied_right() -> None:
    rows, shown = products(Random(0), 40)
    right = {row["prompt"][0]["content"]: row["answer"] for row in rows}
    for i, talk in enumerate(row["messages"] for row in shown):
        assert len(talk) == (4 if i % 2 else 2)
        if i % 2:
            answer = right[talk[0]["content"]]
            assert talk[2]["content"] == f"<tool_response>\n{answer}\n</tool_response>"
            assert talk[3]["content"] == f"<answer>{answer}</answer>"


def played(number: int, guess: list[int]) -> tuple[float, str, int]:
    """(reward, what ended it, turns) of a game of these guesses."""

    async def play() -> tuple[float, str, int]:
        game = Guess(pg.Example(tuple(asked("a number")), {"number": str(number)}))
        for turn, output in enumerate(guess, 1):
            step = await game.step(pg.Action(str(output)))
            if step.observation is None:
                return float(step.reward or 0.0), step.stop_reason, turn
        raise AssertionError("it goes on")

    return asyncio.run(play())


def test_halving_finds_every_number_in_time() -> None:
    for number in range(1, HIGHEST + 1):
        low, high, output = 1, HIGHEST, list[int]()
        while not output or output[-1] != number:
            output.append((low + high) // 2)
            low, high = (output[-1] + 1, high) if output[-1] < number else (low, output[-1] - 1)
        assert len(output) <= GUESSES
        assert played(number, output) == (1.0, "found", len(output))
    assert played(9, [1, 2, 3, 4]) == (0.0, "turns", 4)
    game = Guess(pg.Example("a number", {"number": "9"}))
    assert asyncio.run(game.step(pg.Action("nine"))).stop_reason == "malformed"


def test_games_are_shown_by_the_rules() -> None:
    rows, shown = guesses(Random(0), 60)
    for row, talk in zip(rows, (row["messages"][1:] for row in shown), strict=True):
        number = int(row["number"])
        assert talk[-1]["role"] == "assistant"
        assert sum(turn["role"] == "assistant" for turn in talk) <= GUESSES
        for guess, report in zip(talk[::2], talk[1::2], strict=False):
            assert report["content"] == ("higher" if int(guess["content"]) < number else "lower")


def test_one_program_in_three_passes_its_tests() -> None:
    rows, shown = programs(Random(0), 90)
    passed = []
    for row, talk in zip(rows, shown, strict=True):
        scope: dict[str, object] = {}
        exec(talk["messages"][1]["content"], scope)
        try:
            for test in row["test_list"]:
                exec(test, scope)
        except AssertionError:
            passed.append(False)
        else:
            passed.append(True)
    assert passed[::3] == [True] * 30
    assert sum(passed) < 40  # a wrong one may be right by chance: x * 2 - 2 and x - 2 * 2 never are for all three


def test_the_block_says_what_was_measured() -> None:
    run = {"before": 0.25, "after": 0.75, "tokens": 12345, "eval/reward": [], "ends": {"environment/turns": [3.0, 2.5]}}
    versions = {"policygrad": "1", "torch": "2"}
    task = {
        "title": "a game",
        "steps": 9,
        "seeds": {"0": run},
        "said": ["8 / higher", "8 / lower / 4"],
        "versions": versions,
    }
    text = learned_block({"game": task})
    assert "| a game | 0 | 0.250 | 0.750 | +0.500 | 9 | 12,345 | turns 3.00 → 2.50 |" in text
    assert "`8 / lower / 4` in the last" in text
    assert "Not run yet" in learned_block({})
    assert len({task.name for task in TASKS}) == len(TASKS) == 3
