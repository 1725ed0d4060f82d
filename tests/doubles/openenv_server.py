"""Servers of OpenEnv's own classes: a number from 0 to 9 is to be found, by actions or by tools (`tools_app`);
`uvicorn doubles.openenv_server:app`."""

from __future__ import annotations

import os
import random
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


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


class HiddenBehindTools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("hidden")
        self.number, self.is_found = 0, False

        @tools.tool
        def look() -> str:
            """Tells the number."""
            return f"It is {self.number}."

        @tools.tool
        def guess(number: int) -> str:
            """Ends with a guess."""
            self.is_found = number == self.number
            return "yes" if self.is_found else "no"

        super().__init__(tools)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Observation:
        self.number, self.is_found = random.Random(seed).randrange(10), False
        return Observation(done=False, reward=0.0)

    async def step_async(self, action: Any, timeout_s: float | None = None, **options: Any) -> Observation:
        result = await super().step_async(action, timeout_s=timeout_s, **options)
        is_over = getattr(action, "tool_name", "") == "guess"
        return result.model_copy(update={"done": is_over, "reward": float(is_over and self.is_found)})

    def _step_impl(self, action: Any, timeout_s: float | None = None, **options: Any) -> Observation:
        raise ValueError("there are tools alone")

    @property
    def state(self) -> State:
        return State()


tools_app = create_fastapi_app(
    HiddenBehindTools,
    CallToolAction,
    CallToolObservation,
    max_concurrent_envs=int(os.environ.get("SESSIONS", "64")),
)
