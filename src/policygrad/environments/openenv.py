"""Environments that an OpenEnv server plays: a session of its own for every episode, over a WebSocket.

The protocol is OpenEnv's (openenv-core 0.3, `core/env_server/http_server.py`): JSON messages {"type": "reset" | "step" | "close",
"data": …} on /ws, answered by {"type": "observation", "data": {"observation", "reward", "done"}} or {"type": "error", "data":
{"message", "code"}}; GET /schema says what an action is. The package itself is not needed here.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol, TypeVar

from policygrad.environments.base import Action, Environment, Observation, Step, is_finite_number
from policygrad.environments.registry import (
    TERMINATED,
    TURNS,
    initial_observation,
    parse_choice,
    reply_observation,
    to_http_url,
)
from policygrad.errors import ConfigError, EngineError, install_command
from policygrad.tasks.base import Example

# Between a policy's words and an OpenEnv server's objects: what an action is by its schema, what an observation says.

HIDDEN_FIELDS = ("reward", "done", "metadata")
"""Fields of an observation that are no words for the policy."""
_NO_NUMBER = 1 << 60
"""Counts words from where no turn says the number of one."""
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d{1,300}(?:\.\d{1,300})?(?![\w]|\.\d)")


@dataclass(frozen=True)
class ActionSchema:
    """What an action is made of."""

    fields: Mapping[str, Mapping[str, Any]]
    """Those that the policy fills, with their schemas."""
    constant_fields: Mapping[str, Any]
    """The others that are given."""
    as_json: bool = False
    """Whether the policy writes a JSON object, because there are several to fill."""

    def parse(self, text: str) -> dict[str, Any] | str:
        """The action that a turn says, or what is wrong with it."""
        if not self.as_json:
            ((name, schema),) = self.fields.items()
            value = parse_value(text, schema)
            return f"answer with {describe_schema(schema)}" if value is None else {**self.constant_fields, name: value}
        found = extract_json_objects(text)
        if not found:
            return f"answer with a JSON object with {', '.join(f'{n}, {describe_schema(s)}' for n, s in self.fields.items())}"
        if unknown := found[-1].keys() - self.fields.keys():
            return f"there is no field {min(unknown)!r}, there are {', '.join(self.fields)}"
        return {**self.constant_fields, **found[-1]}


def build_action_schema(schema: Mapping[str, Any], constant_fields: Mapping[str, Any], where: str) -> ActionSchema:
    """What the policy has to fill of an action: its required fields; where none is, its text field, or its only one.

    schema: the action's JSON schema. Raises ConfigError where the policy can fill none, or it is not clear which.
    """
    known = {n: resolve_schema(s, schema) for n, s in (schema.get("properties") or {}).items() if n != "metadata"}
    free = {name: s for name, s in known.items() if name not in constant_fields}
    if unknown := constant_fields.keys() - known.keys():
        raise ConfigError(f"{where}: an action has no field {min(unknown)!r}, it has {', '.join(known) or 'none'}")
    needed = [name for name in schema.get("required") or () if name in free]
    texts = [name for name, s in free.items() if s.get("type") == "string" and "const" not in s]
    names = needed or (texts if len(texts) == 1 else list(free) if len(free) == 1 else [])
    if not names:
        raise ConfigError(
            f"{where}: an action has the fields {', '.join(known) or 'none'}, and which of them words go into is not said: give "
            "text_field=, or fixed= with the others, from Python"
        )
    if len(names) == 1 and schema_kind(free[names[0]]) is not None:
        return ActionSchema({names[0]: free[names[0]]}, constant_fields)
    return ActionSchema(free, constant_fields, as_json=True)


def resolve_schema(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A field's schema, with what it refers to in its place, and of `X | None` the X."""
    found: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
    for key in ("anyOf", "oneOf", "allOf"):
        others = [s for s in found.get(key) or () if isinstance(s, Mapping) and s.get("type") != "null"]
        if len(others) == 1:
            found = {**{k: v for k, v in found.items() if k != key}, **others[0]}
    name = str(found.get("$ref", "")).rpartition("/")[2]
    target = (root.get("$defs") or {}).get(name)
    return {**{k: v for k, v in found.items() if k != "$ref"}, **target} if isinstance(target, Mapping) else found


def schema_kind(schema: Mapping[str, Any]) -> str | None:
    """What one field is filled with: one of several values, text, a number, yes or no; None = an object or a list."""
    if schema.get("enum"):
        return "enum"
    kind = schema.get("type", "string")
    return kind if kind in ("string", "integer", "number", "boolean") else None


def parse_value(text: str, schema: Mapping[str, Any]) -> Any:
    """The value that a turn gives one field; None where it gives none. The last number, or word of those there are."""
    kind, said = schema_kind(schema), text.strip()
    if kind == "enum":
        values = list(schema["enum"])
        place = match_choice(said, [str(value) for value in values])
        return None if place is None else values[place]
    if kind == "boolean":
        place = match_choice(said, ["no", "yes", "false", "true"])
        return None if place is None else bool(place % 2)
    if kind == "string":
        return said
    numbers = _NUMBER.findall(said)
    if not numbers:
        return None
    if kind == "number":
        return float(numbers[-1])
    return int(numbers[-1]) if "." not in numbers[-1] else None


def match_choice(text: str, words: Sequence[str]) -> int | None:
    """The place of the last of these words that stands in the text."""
    if text in words:
        return words.index(text)
    found = parse_choice(text, tuple(words), first=_NO_NUMBER)
    return None if found is None else found - _NO_NUMBER


def describe_schema(schema: Mapping[str, Any]) -> str:
    """What a field takes, for the policy."""
    kind = schema_kind(schema)
    if kind == "enum":
        return f"one of {', '.join(str(value) for value in schema['enum'])}"
    words = {"boolean": "yes or no", "integer": "a whole number", "number": "a number", "string": "text"}
    return words.get(kind or "", "JSON")


def extract_json_objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects that stand in a text one behind the other."""
    found, decoder, at = list[dict[str, Any]](), json.JSONDecoder(parse_constant=_refused), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
            found.append(value)
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)
    return found


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def render_observation(seen: Mapping[str, Any]) -> str:
    """An observation in words: a single field as it stands, several as lines `name: value`; what is empty is left out."""
    shown = {
        name: value for name, value in seen.items() if name not in HIDDEN_FIELDS and value not in (None, "", [], {})
    }
    if len(shown) == 1:
        return _text(next(iter(shown.values())))
    return "\n".join(f"{name}: {_text(value)}" for name, value in shown.items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# WebSockets that answer a server's pings while this process computes; the one file that imports websockets.
#
# A server asks every so many seconds whether somebody is there (uvicorn every 20, and hangs up after 20 more), and sampling
# here may hold up the loop that episodes are played in for longer. So connections live in a loop and a thread of their own.

T = TypeVar("T")
MAX_MESSAGE_BYTES = 16 << 20
"""Bytes of a message."""


class WebSocket:
    """A connection, for any loop. What is lost is a ConnectionError."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @classmethod
    async def connect(cls, address: str, seconds: float) -> WebSocket:
        """ws(s)://…; proxies of the environment are not asked: servers stand beside the learner.

        Raises:
            ConnectionError: nobody there, or nobody who speaks WebSocket; OSError, TimeoutError.
        """
        client = import_websockets().asyncio.client
        return cls(await _there(_opened(client, address, seconds)))

    async def send(self, message: str) -> None:
        await _there(self._inner.send(message))

    async def recv(self) -> Any:
        """The next message, text or bytes."""
        return await _there(self._inner.recv())

    async def close(self) -> None:
        await _there(self._inner.close())


async def _opened(client: Any, address: str, seconds: float) -> Any:
    return await client.connect(address, open_timeout=seconds, max_size=MAX_MESSAGE_BYTES, proxy=None)


async def _there(work: Coroutine[Any, Any, T]) -> T:
    """What `work` comes to in the connections' loop."""
    try:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))
    except import_websockets().exceptions.WebSocketException as error:
        raise ConnectionError(str(error) or type(error).__name__) from error


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The connections' loop, which runs as long as the process does."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="websockets").start()
    return loop


def import_websockets() -> Any:
    """The package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import websockets.asyncio.client
        import websockets.exceptions
    except ImportError as error:
        raise ConfigError(
            f"openenv:… needs websockets, which is not installed: {install_command('openenv')}"
        ) from error
    return websockets


SEED_BOUND = 1 << 31
"""A server's seed is below it: what a C int holds, as environments take theirs."""
CONNECTION_ERRORS = (OSError, EOFError)
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
    constant_fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of every action."""
    reset_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of reset."""
    describe: Callable[[Mapping[str, Any]], str] | None = None
    """An observation in words."""
    instructions: str = ""
    """Stands before the first observation. The task's own prompt is not shown."""
    max_turns: int = 32
    """Turns of the policy; the tokens of all of them are the run's `max_tokens`."""
    timeout: float = 60.0
    """For an answer of the server."""
    connect_timeout: float = 10.0
    """Seconds to connect within."""
    connect: Callable[[str, float], Awaitable[Connection]] | None = None
    """Opens a WebSocket, given its address and the seconds; None = the package websockets."""

    def __post_init__(self) -> None:
        if not self.address or self.max_turns < 1 or not (self.timeout > 0 and self.connect_timeout > 0):
            raise ConfigError(
                "OpenEnv takes an address, such as http://localhost:8000, max_turns of at least 1, seconds and patience above 0, "
                f"not {self.address!r}, {self.max_turns}, {self.timeout:g} and {self.connect_timeout:g}"
            )
        if self.connect is None:
            import_websockets()

    @cached_property
    def _action(self) -> ActionSchema:
        """What the server's schema asks for; asked once."""
        if self.text_field is not None:
            return ActionSchema({self.text_field: {"type": "string"}}, self.constant_fields)
        return build_action_schema(self._schema(), self.constant_fields, to_http_url(self.address))

    def _schema(self) -> Mapping[str, Any]:
        address = f"{to_http_url(self.address)}/schema"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers stand beside the learner
        try:
            with opener.open(address, timeout=self.timeout) as answer:
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

    async def schema(self) -> ActionSchema:
        """What an action is; the first to ask waits in a thread."""
        known: ActionSchema | None = self.__dict__.get("_action")
        if known is None:
            return await asyncio.to_thread(lambda: self._action)
        return known

    async def connection(self) -> Connection:
        """A new one.

        Raises:
            EngineError: no server there, or none that speaks WebSocket.
        """
        address = to_http_url(self.address).replace("http", "ws", 1) + "/ws"
        try:
            return await (self.connect or WebSocket.connect)(address, self.connect_timeout)
        except CONNECTION_ERRORS as error:
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
        said = await self._ask("reset", {**self.asked.reset_options, "seed": self.seed % SEED_BOUND})
        if isinstance(said, str):
            raise EngineError(f"the OpenEnv server at {self.asked.address} refused to reset: {said}")
        return initial_observation(self.example, self._words(said), self.asked.instructions)

    async def step(self, action: Action) -> Step:
        self.turns += 1
        last = action.truncated or self.turns >= self.asked.max_turns
        metrics = {"malformed": 0.0, "refused": 0.0}
        read = (await self.asked.schema()).parse(action.text)
        if isinstance(read, str):
            metrics["malformed"], reward, words = 1.0, 0.0, f"error: {read}"
        else:
            said = await self._ask("step", read)
            if isinstance(said, str):
                metrics["refused"], reward, words = 1.0, 0.0, f"error: {said}"
            else:
                reward = self._worth(said)
                if said.get("done"):
                    return Step(reward=reward, metrics=metrics, stop_reason=TERMINATED)
                words = self._words(said)
        if last:
            return Step(reward=reward, metrics=metrics, stop_reason=TURNS)
        return Step(reply_observation(self.example, words), reward, metrics)

    async def close(self) -> None:
        """The session's end; a connection that is lost has ended it already."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*CONNECTION_ERRORS):  # its patience too
                await asyncio.wait_for(_ended(connection), self.asked.connect_timeout)
            with suppress(*CONNECTION_ERRORS):
                await asyncio.wait_for(connection.close(), self.asked.connect_timeout)

    def _worth(self, said: Mapping[str, Any]) -> float:
        reward = said.get("reward") or 0.0
        if not is_finite_number(reward):
            raise EngineError(
                f"the OpenEnv server at {self.asked.address} gives the reward {reward!r}: it is a finite number"
            )
        return float(reward)

    def _words(self, said: Mapping[str, Any]) -> str:
        seen = said.get("observation")
        if not isinstance(seen, Mapping):
            raise EngineError(f"the OpenEnv server at {self.asked.address} shows {seen!r}: an observation is an object")
        return (self.asked.describe or render_observation)(seen)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any] | str:
        """What the server answers, or why it refuses.

        Raises:
            EngineError: no answer in time, a lost connection, no room for a session, an answer that is none.
        """
        assert self._connection is not None
        where = f"the OpenEnv server at {self.asked.address}"
        try:
            with suppress(*CONNECTION_ERRORS):  # what it said before it hung up is read first
                await self._connection.send(json.dumps({"type": kind, "data": data}))
            raw = await asyncio.wait_for(self._connection.recv(), self.asked.timeout)
            answer = json.loads(raw)
            said = answer["data"]
        except TimeoutError as error:
            raise EngineError(
                f"{where} has not answered a {kind} within {self.asked.timeout:g} seconds: seconds="
            ) from error
        except CONNECTION_ERRORS as error:
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
