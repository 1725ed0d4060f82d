"""A server of OpenEnv's own classes: a number from 0 to 9 is to be found; `uvicorn doubles.openenv_server:app`."""

from __future__ import annotations

import os
import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Answer(Observation):
    message: str = ""


class Hidden(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.turns = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Answer:
        self.number, self.turns = random.Random(seed).randrange(10), 0
        return Answer(message=f"Find a digit. Its parity is {self.number % 2}.")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Answer:
        self.turns += 1
        if action.number == 99:
            os._exit(1)
        if action.number > 9:
            raise ValueError("a digit is below ten")
        result = action.number == self.number
        output = "yes" if result else "higher" if action.number < self.number else "lower"
        return Answer(message=output, reward=float(result), done=result)

    @property
    def state(self) -> State:
        return State(step_count=self.turns)


app = create_fastapi_app(Hidden, Guess, Answer, max_concurrent_envs=int(os.environ.get("SESSIONS", "64")))
