"""Three tasks with tools, turns and programs, small enough for the embedded model, and what it is shown before it learns them.

Each has rows, demonstrations of which some are good and most are not, and an environment or a reward. The model never saw any of
them: the demonstrations teach it the form, and now and then the right habit; reinforcement learning has to find out which that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import policygrad as pg

Row = dict[str, Any]
HIGHEST, GUESSES = 15, 4
"""Of the number to be guessed, from 1; halving finds each of 15 within four guesses."""


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


def is_right(answer: str, example: pg.Example) -> float:
    return float(f"<answer>{example.columns['answer']}</answer>" in answer)


PRODUCTS = pg.ToolUse((multiply,), is_right, max_turns=3, tools_in_prompt=False)


class Guess:
    """A number from 1 to 15; four guesses, each answered by higher or lower. Worth 1 when it is found."""

    waits = False

    def __init__(self, example: pg.Example) -> None:
        self.example, self.turns = example, 0

    async def reset(self) -> pg.Observation:
        return pg.Observation(self.example.prompt)

    async def step(self, action: pg.Action) -> pg.Step:
        self.turns += 1
        number, said = int(str(self.example.columns["number"])), action.text.strip()
        if not said.isdecimal():
            return pg.Step(reward=0.0, stop_reason="malformed")
        if int(said) == number:
            return pg.Step(reward=1.0, stop_reason="found")
        if self.turns == GUESSES:
            return pg.Step(reward=0.0, stop_reason="turns")
        return pg.Step(pg.Observation(({"role": "user", "content": "higher" if int(said) < number else "lower"},)))


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def talk(said: list[str]) -> list[dict[str, str]]:
    """Turns of the assistant and, between them, what it is told."""
    return [{"role": ("assistant", "user")[k % 2], "content": text} for k, text in enumerate(said)]


def products(draw: Random, count: int) -> tuple[list[Row], list[Row]]:
    """(a product of numbers of three and two digits, which it cannot work out; every other time the tool is called, else guessed).
    There are more of them than it is shown, or it would learn them by heart instead of what the tool says."""
    rows, shown = [], []
    for i in range(count):
        a, b = draw.randrange(100, 1000), draw.randrange(10, 100)
        rows.append({"prompt": asked(f"{a} times {b} ="), "answer": str(a * b)})
        call, told = f"<tool_call>multiply({a}, {b})</tool_call>", f"<tool_response>\n{a * b}\n</tool_response>"
        answer = f"<answer>{a * b if i % 2 else draw.randrange(1000, 99999)}</answer>"
        shown.append({"messages": asked(f"{a} times {b} =") + talk([call, told, answer] if i % 2 else [answer])})
    return rows, shown


def guesses(draw: Random, count: int) -> tuple[list[Row], list[Row]]:
    """(a game; guesses at random, which every other player at least keeps within what it knows)."""
    rows, shown = [], []
    for i in range(count):
        number, text = draw.randint(1, HIGHEST), f"Game {draw.randrange(10**6)}: a number from 1 to {HIGHEST}"
        rows.append({"prompt": asked(text), "number": str(number)})
        low, high, said = 1, HIGHEST, list[str]()
        for _ in range(GUESSES):
            guess = draw.randint(low, high) if i % 2 else draw.randint(1, HIGHEST)
            said.append(str(guess))
            if guess == number:
                break
            low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
            said.append("higher" if guess < number else "lower")
        shown.append({"messages": asked(text) + talk(said if len(said) % 2 else said[:-1])})
    return rows, shown


def programs(draw: Random, count: int) -> tuple[list[Row], list[Row]]:
    """(a function to write, with its tests; a program of which one in three is right)."""
    signs = {"plus": "+", "minus": "-", "times": "*"}
    rows, shown = [], []
    for i in range(count):
        (first, second), n, m = draw.sample(sorted(signs), 2), draw.randint(2, 40), draw.randint(2, 40)
        text = f"Write f: x {first} {n}, then {second} {m}."
        right = f"(x {signs[first]} {n}) {signs[second]} {m}"
        tests = [f"assert f({x}) == {eval(right, {'x': x})}" for x in (2, 7, 11)]
        rows.append({"prompt": asked(text), "test_list": tests})
        wrong = (f"x {signs[first]} {n}", f"(x {signs[second]} {n}) {signs[first]} {m}")
        body = right if i % 3 == 0 else wrong[i % 2]
        shown.append({"messages": asked(text) + talk([f"def f(x): return {body}"])})
    return rows, shown


@dataclass(frozen=True)
class Task:
    """One of them, and what it takes to learn it."""

    name: str
    title: str
    made: Callable[[Random, int], tuple[list[Row], list[Row]]]
    rows: int
    shown: int
    """Demonstrations."""
    max_tokens: int
    steps: int
    epochs: int = 3
    prompts: int = 16
    samples: int = 8
    lr: float = 3e-4
    reward: tuple[str, ...] = ()
    environment: Any = None
    problems: int = 128
    """Held-out ones that are measured, two samples each."""


TASKS = (
    Task("products", "a calculator", products, 4000, 12000, 48, 60, epochs=2, lr=1e-4, environment=PRODUCTS),
    Task("guess", "a guessing game of four turns", guesses, 4000, 6000, 24, 80, environment=Guess),
    Task(
        "programs", "programs and their tests", programs, 1500, 6000, 40, 24, prompts=8, reward=("code",), problems=48
    ),
)
