"""Environments that an OpenEnv server plays: a session of its own for every episode, over a WebSocket.

The protocol is OpenEnv's (openenv-core 0.3, `core/env_server/http_server.py`): JSON messages {"type": "reset" | "step" | "close",
"data": …} on /ws, answered by {"type": "observation", "data": {"observation", "reward", "done"}} or {"type": "error", "data":
{"message", "code"}}; GET /schema says what an action is. The package itself is not needed here.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from policygrad.environments.base import Action, Environment, Observation, Step, finite
from policygrad.environments.openenv_words import Asked, asked_for, worded
from policygrad.environments.others import TERMINATED, TURNS, answered, http, opening
from policygrad.environments.websocket import WebSocket, websockets
from policygrad.errors import ConfigError, EngineError
from policygrad.tasks.types import Example

SEEDS = 1 << 31
"""A server's seed is below it: what a C int holds, as environments take theirs."""
LOST = (OSError, EOFError)
"""How a lost connection shows."""


class Connection(Protocol):
    """What is asked of a WebSocket."""

    async def send(self, message: str) -> None: ...
    async def recv(self) -> Any: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class OpenEnv:
    """Episodes on a server: `pg.OpenEnv("http://localhost:8000")`, on the command line `openenv:http://localhost:8000`.

    An episode is a session of the server from reset to end, and the episodes of a rollout are open side by side: it has to be
    started with `max_concurrent_envs` of at least prompts × samples. `reset` is given the group's seed, which a server that does
    not take one leaves out; what it then says must be the same for all samples of a prompt.

    What the policy reads is `observation(dict)` where that is given, else the observation's fields but reward, done and
    metadata: one alone as it stands, several as lines `name: value`. What it says fills the action's one required field, its
    only text field where none is required, or `text_field`; a number is read out of it; an action with several required fields is
    a JSON object in the turn. What cannot be read, or is refused by the server, is told as `error: …` and counted
    (`environment/malformed`, `environment/refused`). Rewards are the server's, of each step.

    Raises:
        ConfigError: no address, a budget that leaves nothing.
    """

    address: str
    """http(s)://host:port, or ws(s)://."""
    text_field: str | None = None
    """The action's field that the policy's words fill; None = by the server's schema."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of every action."""
    start: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of reset."""
    observation: Callable[[Mapping[str, Any]], str] | None = None
    """An observation in words."""
    instructions: str = ""
    """Stands before the first observation. The task's own prompt is not shown."""
    max_turns: int = 32
    """Turns of the policy; the tokens of all of them are the run's `max_tokens`."""
    seconds: float = 60.0
    """For an answer of the server."""
    patience: float = 10.0
    """Seconds to connect within."""
    connect: Callable[[str, float], Awaitable[Connection]] | None = None
    """Opens a WebSocket, given its address and the seconds; None = the package websockets."""

    def __post_init__(self) -> None:
        if not self.address or self.max_turns < 1 or not (self.seconds > 0 and self.patience > 0):
            raise ConfigError(
                "OpenEnv takes an address, such as http://localhost:8000, max_turns of at least 1, seconds and patience above 0, "
                f"not {self.address!r}, {self.max_turns}, {self.seconds:g} and {self.patience:g}"
            )
        if self.connect is None:
            websockets()

    @cached_property
    def _action(self) -> Asked:
        """What the server's schema asks for; asked once."""
        if self.text_field is not None:
            return Asked({self.text_field: {"type": "string"}}, self.fixed)
        return asked_for(self._schema(), self.fixed, http(self.address))

    def _schema(self) -> Mapping[str, Any]:
        address = f"{http(self.address)}/schema"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers stand beside the learner
        try:
            with opener.open(address, timeout=self.seconds) as answer:
                said = json.load(answer)
            action = said["action"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"{address} does not say what an action is ({type(error).__name__}: {error}): start the OpenEnv server there, or "
                "name the action's field, text_field="
            ) from error
        if not isinstance(action, Mapping):
            raise EngineError(f"{address} does not say what an action is: 'action' is {type(action).__name__}")
        return action

    async def schema(self) -> Asked:
        """What an action is; the first to ask waits in a thread."""
        known: Asked | None = self.__dict__.get("_action")
        if known is None:
            return await asyncio.to_thread(lambda: self._action)
        return known

    async def connection(self) -> Connection:
        """A new one.

        Raises:
            EngineError: no server there, or none that speaks WebSocket.
        """
        address = http(self.address).replace("http", "ws", 1) + "/ws"
        try:
            return await (self.connect or WebSocket.connect)(address, self.patience)
        except LOST as error:
            raise EngineError(
                f"there is no OpenEnv server at {address} ({type(error).__name__}: {error}): start it, or give its address"
            ) from error

    def __call__(self, example: Example, seed: int = 0) -> Environment:
        return _Episode(self, example, seed)


class _Episode:
    """One episode, which is one session."""

    def __init__(self, asked: OpenEnv, example: Example, seed: int) -> None:
        self.asked, self.example, self.seed = asked, example, seed
        self.turns = 0
        self._connection: Connection | None = None

    async def reset(self) -> Observation:
        await self.asked.schema()
        self._connection = await self.asked.connection()
        said = await self._ask("reset", {**self.asked.start, "seed": self.seed % SEEDS})
        if isinstance(said, str):
            raise EngineError(f"the OpenEnv server at {self.asked.address} refused to reset: {said}")
        return opening(self.example, self._words(said), self.asked.instructions)

    async def step(self, action: Action) -> Step:
        self.turns += 1
        last = action.truncated or self.turns >= self.asked.max_turns
        metrics = {"malformed": 0.0, "refused": 0.0}
        read = (await self.asked.schema()).read(action.text)
        if isinstance(read, str):
            metrics["malformed"], reward, words = 1.0, 0.0, f"error: {read}"
        else:
            said = await self._ask("step", read)
            if isinstance(said, str):
                metrics["refused"], reward, words = 1.0, 0.0, f"error: {said}"
            else:
                reward = self._worth(said)
                if said.get("done"):
                    return Step(reward=reward, metrics=metrics, ended=TERMINATED)
                words = self._words(said)
        if last:
            return Step(reward=reward, metrics=metrics, ended=TURNS)
        return Step(answered(self.example, words), reward, metrics)

    async def close(self) -> None:
        """The session's end; a connection that is lost has ended it already."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*LOST):  # its patience too
                await asyncio.wait_for(_ended(connection), self.asked.patience)
            with suppress(*LOST):
                await asyncio.wait_for(connection.close(), self.asked.patience)

    def _worth(self, said: Mapping[str, Any]) -> float:
        reward = said.get("reward") or 0.0
        if not finite(reward):
            raise EngineError(
                f"the OpenEnv server at {self.asked.address} gives the reward {reward!r}: it is a finite number"
            )
        return float(reward)

    def _words(self, said: Mapping[str, Any]) -> str:
        seen = said.get("observation")
        if not isinstance(seen, Mapping):
            raise EngineError(f"the OpenEnv server at {self.asked.address} shows {seen!r}: an observation is an object")
        return (self.asked.observation or worded)(seen)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any] | str:
        """What the server answers, or why it refuses.

        Raises:
            EngineError: no answer in time, a lost connection, no room for a session, an answer that is none.
        """
        assert self._connection is not None
        where = f"the OpenEnv server at {self.asked.address}"
        try:
            with suppress(*LOST):  # what it said before it hung up is read first
                await self._connection.send(json.dumps({"type": kind, "data": data}))
            raw = await asyncio.wait_for(self._connection.recv(), self.asked.seconds)
            answer = json.loads(raw)
            said = answer["data"]
        except TimeoutError as error:
            raise EngineError(
                f"{where} has not answered a {kind} within {self.asked.seconds:g} seconds: seconds="
            ) from error
        except LOST as error:
            raise EngineError(
                f"{where} has hung up at a {kind} ({str(error) or type(error).__name__}), in turn {self.turns}"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{where} answers a {kind} with what is no message of OpenEnv's: {error}") from error
        if answer.get("type") != "error":
            return said if isinstance(said, Mapping) else {}
        if not isinstance(said, Mapping):
            return str(said)
        message, code = str(said.get("message", said)), said.get("code")
        if code == "CAPACITY_REACHED":
            raise EngineError(
                f"{where} has no room for another session: {message}. A rollout opens prompts × samples of them, an evaluation "
                "64 × samples at most: start the server with max_concurrent_envs as large, or lower --prompts-per-step"
            )
        if code in ("FACTORY_ERROR", "SESSION_ERROR"):
            raise EngineError(f"{where} cannot begin a session: {message}")
        return f"{message}{_details(said)}"


async def _ended(connection: Connection) -> None:
    """Returns, by the error of a lost connection, when the server has hung up: it does so once the session's place is free."""
    await connection.send(json.dumps({"type": "close"}))
    while True:
        await connection.recv()


def _details(said: Mapping[str, Any]) -> str:
    """What pydantic found, a line for each field."""
    found = [e for e in said.get("errors") or () if isinstance(e, Mapping)]
    words = [f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg', '')}" for e in found[:4]]
    return f" ({'; '.join(words)})" if words else ""
