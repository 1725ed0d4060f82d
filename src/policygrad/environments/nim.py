"""Nim with one pile, the built-in game of two players: whoever takes the last stone wins."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import ClassVar

from policygrad.environments.games import GameStep, SelfPlay
from policygrad.environments.observations import initial_observation, reply_observation
from policygrad.rollout.environment import Action, Observation
from policygrad.tasks.base import Example

SMALLEST, LARGEST, MOST = 4, 9, 3
"""Stones of the pile at the start, and the most that a player may take. The player to move loses against perfect play where the
pile is a multiple of MOST + 1; otherwise the remainder is the only winning move."""
ILLEGAL, WON = "illegal", "won"
"""Reasons for a game's end."""


class Nim:
    """A pile of 4 to 9 stones. Players take 1, 2 or 3 in turn; who takes the last one wins, who makes an illegal move loses.

    A move is the last number of a turn. Each player reads the stones that are left; rewards are 1 and −1. The pile depends on the
    seed.
    """

    roles: Sequence[str] = ("first", "second")
    waits: ClassVar[bool] = False

    def __init__(self, example: Example, seed: int = 0) -> None:
        self.example = example
        self.stones = Random(seed).randint(SMALLEST, LARGEST)
        self.moved = [False, False]

    async def reset(self) -> Mapping[int, Observation]:
        return {0: self._observe(0)}

    async def step(self, moves: Mapping[int, Action]) -> GameStep:
        [(player, action)] = moves.items()
        self.moved[player] = True
        number = parse_move(action.text)
        if number is None or not 1 <= number <= min(MOST, self.stones):
            rewards = {player: -1.0, 1 - player: 1.0}
            return GameStep(rewards=rewards, metrics={"illegal": 1.0}, stop_reason=ILLEGAL)
        optimal = float(number == self.stones % (MOST + 1)) if self.stones % (MOST + 1) else None
        metrics = {"illegal": 0.0} | ({} if optimal is None else {"optimal": optimal, "winnable": 1.0})
        self.stones -= number
        if not self.stones:
            return GameStep(rewards={player: 1.0, 1 - player: -1.0}, metrics=metrics, stop_reason=WON)
        return GameStep({1 - player: self._observe(1 - player)}, metrics=metrics)

    def legal_moves(self, player: int) -> Sequence[str]:
        return [str(number) for number in range(1, min(MOST, self.stones) + 1)]

    def _observe(self, player: int) -> Observation:
        text = f"Take 1, 2 or 3 of {self.stones}:"
        return (reply_observation if self.moved[player] else initial_observation)(self.example, text)


def parse_move(text: str) -> int | None:
    """Return the last number of a text, or None."""
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers and len(numbers[-1]) < 10 else None


NIM = SelfPlay(Nim)
"""`--environment nim`. Evaluations are against an opponent that moves at random."""
