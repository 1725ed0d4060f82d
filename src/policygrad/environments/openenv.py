"""Environments on an OpenEnv server: one session per episode, over a WebSocket.

The protocol is OpenEnv's (openenv-core 0.3, `core/env_server/http_server.py`): JSON messages {"type": "reset" | "step" | "close",
"data": …} on /ws, answered by {"type": "observation", "data": {"observation", "reward", "done"}} or {"type": "error", "data":
{"message", "code"}}; GET /schema describes an action. Where an action is the call of a tool (`core/env_server/mcp_types.py`), a
step is {"type": "list_tools"} or {"type": "call_tool", "tool_name", "arguments"}. The package itself is not needed here.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

from policygrad.environments.observations import (
    TERMINATED,
    TURNS,
    Shown,
    initial_observation,
    parse_choice,
    reply_observation,
)
from policygrad.environments.registry import to_http_url
from policygrad.environments.tools import Tool, ToolError, ToolUse
from policygrad.errors import ConfigError, DataError, EngineError, import_optional
from policygrad.rollout.environment import Action, Environment, Observation, Step, is_finite_number
from policygrad.tasks.base import Example, Prompt
from policygrad.utils.async_runner import run_on_background_loop
from policygrad.utils.filesystem import reject_constant
from policygrad.utils.pictures import Picture, to_parts

HIDDEN_FIELDS = ("reward", "done", "metadata")  # fields of an observation that the policy does not see
SEED_BOUND = 1 << 31  # servers get seeds below this, which fit into a C int
MAX_MESSAGE_BYTES = 16 << 20
CONNECTION_ERRORS = (OSError, EOFError)  # raised by a lost connection; they include TimeoutError
T = TypeVar("T")
_NO_NUMBER = 1 << 60  # choices are numbered from here where a turn must name them by words
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d{1,300}(?:\.\d{1,300})?(?![\w]|\.\d)")


class Connection(Protocol):
    """The methods that are used of a WebSocket."""

    async def send(self, message: str) -> None: ...
    async def recv(self) -> Any: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class OpenEnv:
    """Episodes on a server: `pg.OpenEnv("http://localhost:8000")`, or `--environment openenv:http://localhost:8000`.

    An episode is one session of the server, and all episodes of a rollout are open concurrently: start the server with
    `max_concurrent_envs` of at least prompts × samples. `reset` is given the group's seed, unless the server takes none; the
    first observation must be the same for all samples of a prompt.

    The policy reads `describe(observation)` if given; else the observation's fields except reward, done and metadata. Its turn
    fills the action's one required field, or `text_field`; an action with several required fields is a JSON object. Turns that
    cannot be parsed, or that the server refuses, get the reply `error: …` and are counted (`environment/malformed`, `/refused`).
    Rewards are the server's, per step. Where an action is the call of a tool, the policy is given the server's tools as in
    `ToolUse`, and a turn without a call ends the episode.

    Raises:
        ConfigError: No address, or a limit below its minimum.
    """

    address: str
    """http(s)://host:port, or ws(s)://."""
    text_field: str | None = None
    """The action's field for the policy's text; None = determined by the server's schema."""
    constant_fields: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of every action."""
    reset_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of reset."""
    describe: Callable[[Mapping[str, Any]], Any] | None = None
    """Converts an observation to text, a picture, or a list of texts and pictures."""
    instructions: str = ""
    """Text before the first observation. The task's own prompt is not shown."""
    max_turns: int = 32
    """Maximum turns of the policy. The run's `max_tokens` limits the tokens of all turns together."""
    timeout: float = 60.0
    """Seconds to wait for a response of the server."""
    connect_timeout: float = 10.0
    """Seconds to wait for a connection."""
    connect: Callable[[str, float], Awaitable[Connection]] | None = None
    """Opens a WebSocket, given its address and a timeout in seconds; None = use the package websockets."""

    def __post_init__(self) -> None:
        if not self.address or self.max_turns < 1 or not (self.timeout > 0 and self.connect_timeout > 0):
            raise ConfigError(
                "OpenEnv needs an address such as http://localhost:8000, max_turns of at least 1, and timeout and connect_timeout "
                f"above 0, not {self.address!r}, {self.max_turns}, {self.timeout:g} and {self.connect_timeout:g}"
            )
        if self.connect is None:
            import_websockets()

    @cached_property
    def _action_schema(self) -> ActionSchema | None:
        if self.text_field is not None:
            return ActionSchema({self.text_field: {"type": "string"}}, self.constant_fields)
        url = f"{to_http_url(self.address)}/schema"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers are local: no proxies
        try:
            with opener.open(url, timeout=self.timeout) as response:
                schema = json.load(response)["action"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"{url} does not describe an action ({type(error).__name__}: {error}): start the OpenEnv server there, or name "
                "the action's field, text_field="
            ) from error
        if not isinstance(schema, Mapping):
            raise EngineError(f"{url} does not describe an action: 'action' is {type(schema).__name__}")
        if not self.constant_fields and is_tool_call(schema):
            return None
        return build_action_schema(schema, self.constant_fields, to_http_url(self.address))

    async def action_schema(self) -> ActionSchema | None:
        """Return the schema of an action, requested from the server once, in a thread; None = an action is the call of a tool."""
        if "_action_schema" in self.__dict__:
            return self._action_schema
        return await asyncio.to_thread(lambda: self._action_schema)

    def __call__(self, example: Example, seed: int = 0) -> Environment:
        return _Episode(self, example, seed)


class _Episode:
    """One episode, in one session."""

    def __init__(self, config: OpenEnv, example: Example, seed: int) -> None:
        self.config, self.example, self.seed = config, example, seed
        self.turns, self.shows_pictures = 0, False
        self._server = f"the OpenEnv server at {config.address}"
        self._connection: Connection | None = None
        self._tools: _ToolCalls | None = None

    async def reset(self) -> Observation:
        schema = await self.config.action_schema()
        address = to_http_url(self.config.address).replace("http", "ws", 1) + "/ws"
        try:
            self._connection = await (self.config.connect or WebSocket.connect)(address, self.config.connect_timeout)
        except CONNECTION_ERRORS as error:  # also a server without WebSockets
            raise EngineError(
                f"there is no OpenEnv server at {address} ({type(error).__name__}: {error}): start it, or correct the address"
            ) from error
        if schema is None:  # before the reset, so that it is no step of the episode
            self._tools = _ToolCalls(self.config, self.example, await self._list_tools(), self._call_tool)
        result = await self._request("reset", {**self.config.reset_options, "seed": self.seed % SEED_BOUND})
        if isinstance(result, str):
            raise EngineError(f"{self._server} refused to reset: {result}")
        shown = self._describe(result)
        self.shows_pictures = not isinstance(shown, str)
        first = initial_observation(self.example, shown, self.config.instructions)
        if self._tools is None:
            return first
        is_empty = isinstance(shown, str) and not shown.strip() and not self.config.instructions.strip()
        return await self._tools.open(self.example.prompt if is_empty else first.content)

    async def step(self, action: Action) -> Step:
        self.turns += 1
        if self._tools is not None:
            return await self._tools.step(action)
        metrics, reward = {"malformed": 0.0, "refused": 0.0}, 0.0
        schema = await self.config.action_schema()
        assert schema is not None
        parsed = schema.parse(action.text)
        if isinstance(parsed, str):
            metrics["malformed"], reply = 1.0, cast(Shown, f"error: {parsed}")
        else:
            result = await self._request("step", parsed)
            if isinstance(result, str):
                metrics["refused"], reply = 1.0, f"error: {result}"
            else:
                reward = self._read_reward(result)
                if result.get("done"):
                    return Step(reward=reward, metrics=metrics, stop_reason=TERMINATED)
                reply = self._describe(result)
        if action.truncated or self.turns >= self.config.max_turns:
            return Step(reward=reward, metrics=metrics, stop_reason=TURNS)
        return Step(reply_observation(self.example, reply, as_messages=self.shows_pictures), reward, metrics)

    async def close(self) -> None:
        """End the session, unless the connection is lost already."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*CONNECTION_ERRORS):  # the server hangs up once the session's slot is free
                async with asyncio.timeout(self.config.connect_timeout):
                    await connection.send(json.dumps({"type": "close"}))
                    while True:
                        await connection.recv()
            with suppress(*CONNECTION_ERRORS):
                await asyncio.wait_for(connection.close(), self.config.connect_timeout)

    async def _list_tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools as the server describes them. Raises ConfigError if there are none."""
        listed = await self._request("step", {"type": "list_tools"})
        tools = None if isinstance(listed, str) else (listed.get("observation") or {}).get("tools")
        if not tools:  # an environment may allow no step before the reset
            answer = await self._request("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
            tools = None if isinstance(answer, str) else (answer.get("result") or {}).get("tools")
        if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) and tool.get("name") for tool in tools):
            tools = ()
        if not tools:
            raise ConfigError(
                f"an action of {self._server} is the call of a tool, and it lists none: from Python, give text_field=, or "
                "constant_fields= with the fields that are fixed"
            )
        return tools

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> tuple[Any, float, bool]:
        """Call a tool; return (what it shows or the ToolError, the reward, whether the episode is over)."""
        result = await self._request("step", {"type": "call_tool", "tool_name": name, "arguments": arguments})
        if isinstance(result, str):
            return ToolError(result), 0.0, False
        reward, is_over = self._read_reward(result), bool(result.get("done"))
        try:
            return self._render(result, show_tool_result), reward, is_over
        except ToolError as error:
            return error, reward, is_over

    def _read_reward(self, result: Mapping[str, Any]) -> float:
        reward = result.get("reward") or 0.0
        if not is_finite_number(reward):
            raise EngineError(f"{self._server} gives the reward {reward!r}: it must be a finite number")
        return float(reward)

    def _describe(self, result: Mapping[str, Any]) -> Shown:
        described = self._render(result, render_observation)
        return to_parts(described) or cast(str, described)

    def _render(self, result: Mapping[str, Any], render: Callable[[Mapping[str, Any]], Any]) -> Any:
        observation = result.get("observation")
        if not isinstance(observation, Mapping):
            raise EngineError(f"{self._server} returns the observation {observation!r}: it must be an object")
        return (self.config.describe or render)(observation)

    async def _request(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any] | str:
        """Send a request; return the response's data, or the reason why the server refuses.

        Raises:
            EngineError: A timeout, a lost connection, no capacity for a session, or an invalid response.
        """
        assert self._connection is not None
        try:
            with suppress(*CONNECTION_ERRORS):  # the server's last message before it hung up is read first
                await self._connection.send(json.dumps({"type": kind, "data": data}))
            message = await asyncio.wait_for(self._connection.recv(), self.config.timeout)
            response = json.loads(message)
            result = response["data"]
        except TimeoutError as error:
            raise EngineError(
                f"{self._server} did not answer a {kind} within {self.config.timeout:g} seconds: raise timeout="
            ) from error
        except CONNECTION_ERRORS as error:
            raise EngineError(
                f"{self._server} closed the connection during a {kind} ({str(error) or type(error).__name__}), in turn {self.turns}"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"{self._server} answers a {kind} with a message that is not OpenEnv's: {error}"
            ) from error
        if response.get("type") != "error":
            return result if isinstance(result, Mapping) else {}
        if not isinstance(result, Mapping):
            return str(result)
        reason, code = str(result.get("message", result)), result.get("code")
        if code == "CAPACITY_REACHED":
            raise EngineError(
                f"{self._server} has no capacity for another session: {reason.rstrip('.')}. A rollout opens prompts × samples "
                "sessions, an evaluation at most 64 × samples: start the server with max_concurrent_envs as large, or lower "
                "--prompts-per-step"
            )
        if code in ("FACTORY_ERROR", "SESSION_ERROR"):
            raise EngineError(f"{self._server} cannot start a session: {reason}")
        errors = [e for e in result.get("errors") or () if isinstance(e, Mapping)][:4]  # pydantic's, one per field
        details = "; ".join(f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg', '')}" for e in errors)
        return f"{reason} ({details})" if details else reason


class _ToolCalls:
    """The turns of an episode whose actions are calls of the server's tools."""

    def __init__(
        self,
        config: OpenEnv,
        example: Example,
        described: Sequence[Mapping[str, Any]],
        call: Callable[[str, Mapping[str, Any]], Awaitable[tuple[Any, float, bool]]],
    ) -> None:
        self._config, self._call, self._turns = config, call, 0
        self._reward, self._is_over = 0.0, False
        tools = [self._make_tool(tool) for tool in described]
        # the last turn's calls are made too, and a server that does not answer is noticed by the request
        use = ToolUse(tools, max_turns=config.max_turns + 1, timeout=config.timeout + config.connect_timeout)
        self._conversation = use(example)

    async def open(self, content: Prompt) -> Observation:
        """Return the first observation, with the tools."""
        return replace(await self._conversation.reset(), content=content)

    async def step(self, action: Action) -> Step:
        """Make the calls of a turn; their rewards are added up."""
        self._turns, self._reward = self._turns + 1, 0.0
        step = await self._conversation.step(action)
        is_last = action.truncated or self._turns >= self._config.max_turns
        if self._is_over or step.observation is None or is_last:
            reason = TERMINATED if self._is_over else step.stop_reason if step.observation is None else TURNS
            return Step(reward=self._reward, metrics=step.metrics, stop_reason=reason)
        return replace(step, reward=self._reward)

    def _make_tool(self, described: Mapping[str, Any]) -> Tool:
        name = str(described["name"])
        schema = described.get("input_schema") or described.get("inputSchema")
        function = {
            "name": name,
            "description": str(described.get("description") or ""),
            "parameters": schema if isinstance(schema, Mapping) else {"type": "object", "additionalProperties": True},
        }

        async def call(**arguments: Any) -> Any:
            if self._is_over:
                raise ToolError("the episode is over")
            shown, reward, self._is_over = await self._call(name, arguments)
            self._reward += reward
            if isinstance(shown, ToolError):
                raise shown
            return shown

        return Tool(name, call, {"type": "function", "function": function})


def show_tool_result(observation: Mapping[str, Any]) -> Any:
    """Return what the policy reads of a call's observation: its contents, texts and pictures, or else the result itself.

    Raises:
        ToolError: The call failed.
    """
    if error := observation.get("error"):
        raise ToolError(str(error.get("message") or error) if isinstance(error, Mapping) else str(error))
    if "result" not in observation:
        return render_observation(observation)
    result = observation["result"]
    if not isinstance(result, Mapping) or not isinstance(result.get("content"), list):
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    shown: list[Any] = [_show_block(block) for block in result["content"]]
    texts = [item for item in shown if isinstance(item, str)]
    if result.get("is_error"):
        raise ToolError("\n".join(texts) or "the call failed")
    return shown if len(texts) < len(shown) else "\n".join(texts)


def _show_block(block: Any) -> str | Picture:
    if isinstance(block, Mapping) and block.get("type") == "text":
        return str(block.get("text", ""))
    if isinstance(block, Mapping) and block.get("type") == "image":
        try:
            picture = Picture(data=base64.b64decode(str(block.get("data"))), source="the result of a tool")
            picture.decode()
        except (DataError, ValueError) as error:
            raise ToolError(str(error)) from error
        return picture
    return json.dumps(block, ensure_ascii=False)


# Between the policy's text and the server's objects.


def is_tool_call(schema: Mapping[str, Any]) -> bool:
    """Return True if an action with this JSON schema is the call of a tool, or has no fields: an environment of tools alone may
    leave the class of its actions open."""
    fields = (schema.get("properties") or {}).keys() - {"metadata"}
    kind = resolve_schema((schema.get("properties") or {}).get("type"), schema)
    return ({"tool_name", "arguments"} <= fields and kind.get("const") == "call_tool") or not fields


@dataclass(frozen=True)
class ActionSchema:
    """The fields of an action."""

    fields: Mapping[str, Mapping[str, Any]]  # those that the policy fills, with their schemas
    constant_fields: Mapping[str, Any]  # those with a constant value
    as_json: bool = False  # True when the policy writes a JSON object, because it fills several fields

    def parse(self, text: str) -> dict[str, Any] | str:
        """Return the action that a turn describes, or an error message."""
        if not self.as_json:
            ((name, schema),) = self.fields.items()
            value = parse_value(text, schema)
            if value is None:
                return f"answer with {describe_schema(schema)}"
            return {**self.constant_fields, name: value}
        objects = extract_json_objects(text)
        if not objects:
            fields = ", ".join(f"{name}, {describe_schema(schema)}" for name, schema in self.fields.items())
            return f"answer with a JSON object with {fields}"
        if unknown := objects[-1].keys() - self.fields.keys():
            return f"there is no field {min(unknown)!r}, there are {', '.join(self.fields)}"
        return {**self.constant_fields, **objects[-1]}


def build_action_schema(schema: Mapping[str, Any], constant_fields: Mapping[str, Any], where: str) -> ActionSchema:
    """Choose the fields that the policy fills: the required ones; without any, the only text field or the only field.

    Args:
        schema: The action's JSON schema.

    Raises:
        ConfigError: The policy can fill no field, or the choice is ambiguous.
    """
    fields = {n: resolve_schema(s, schema) for n, s in (schema.get("properties") or {}).items() if n != "metadata"}
    free = {name: s for name, s in fields.items() if name not in constant_fields}
    if unknown := constant_fields.keys() - fields.keys():
        raise ConfigError(f"{where}: an action has no field {min(unknown)!r}, it has {', '.join(fields) or 'none'}")
    required = [name for name in schema.get("required") or () if name in free]
    texts = [name for name, s in free.items() if s.get("type") == "string" and "const" not in s]
    names = required or (texts if len(texts) == 1 else list(free) if len(free) == 1 else [])
    if not names:
        raise ConfigError(
            f"{where}: an action has the fields {', '.join(fields) or 'none'}, and it is unclear which one takes the text: from "
            "Python, give text_field=, or constant_fields= with the others"
        )
    if len(names) == 1 and schema_kind(free[names[0]]) is not None:
        return ActionSchema({names[0]: free[names[0]]}, constant_fields)
    return ActionSchema(free, constant_fields, as_json=True)


def resolve_schema(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Resolve a field's reference, and reduce `X | None` to X."""
    resolved: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
    for key in ("anyOf", "oneOf", "allOf"):
        options = [s for s in resolved.get(key) or () if isinstance(s, Mapping) and s.get("type") != "null"]
        if len(options) == 1:
            resolved = {**{k: v for k, v in resolved.items() if k != key}, **options[0]}
    name = str(resolved.get("$ref", "")).rpartition("/")[2]
    target = (root.get("$defs") or {}).get(name)
    return {**{k: v for k, v in resolved.items() if k != "$ref"}, **target} if isinstance(target, Mapping) else resolved


def schema_kind(schema: Mapping[str, Any]) -> str | None:
    """Return enum, string, integer, number or boolean; None for an object or a list."""
    if schema.get("enum"):
        return "enum"
    kind = schema.get("type", "string")
    return kind if kind in ("string", "integer", "number", "boolean") else None


def parse_value(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value that a turn gives a field, the last one named, or None."""
    kind, text = schema_kind(schema), text.strip()
    if kind == "string":
        return text
    if kind in ("enum", "boolean"):
        values = [False, True] * 2 if kind == "boolean" else list(schema["enum"])
        names = ("no", "yes", "false", "true") if kind == "boolean" else tuple(map(str, values))
        if text in names:
            return values[names.index(text)]
        number = parse_choice(text, names, first=_NO_NUMBER)
        return None if number is None else values[number - _NO_NUMBER]
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    if kind == "number":
        return float(numbers[-1])
    return int(numbers[-1]) if "." not in numbers[-1] else None


def describe_schema(schema: Mapping[str, Any]) -> str:
    """Describe a field's values for the policy."""
    kind = schema_kind(schema)
    if kind == "enum":
        return f"one of {', '.join(str(value) for value in schema['enum'])}"
    descriptions = {"boolean": "yes or no", "integer": "a whole number", "number": "a number", "string": "text"}
    return descriptions.get(kind or "", "JSON")


def extract_json_objects(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects in a text, in order."""
    objects, decoder = list[dict[str, Any]](), json.JSONDecoder(parse_constant=reject_constant)
    start = text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
            objects.append(value)
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return objects


def render_observation(observation: Mapping[str, Any]) -> str:
    """Render an observation's non-empty fields: a single one as it is, several as lines `name: value`."""

    def render(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    empty: tuple[Any, ...] = (None, "", [], {})
    fields = {name: render(v) for name, v in observation.items() if name not in HIDDEN_FIELDS and v not in empty}
    if len(fields) == 1:
        return next(iter(fields.values()))
    return "\n".join(f"{name}: {text}" for name, text in fields.items())


# WebSockets answer the server's pings from their own event loop and thread. A server pings regularly (uvicorn every 20 seconds,
# and it hangs up after 20 more), and sampling may block the loop in which episodes run for longer than that.


class WebSocket:
    """A connection that can be used from any event loop. A lost connection raises ConnectionError."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls, address: str, timeout: float) -> WebSocket:
        """Open ws(s)://…, without the environment's proxies, since servers are local. timeout: seconds.

        Raises:
            ConnectionError: No server, or one that does not support WebSockets; also OSError and TimeoutError.
        """
        client = import_websockets().asyncio.client

        async def connect() -> Any:
            return await client.connect(address, open_timeout=timeout, max_size=MAX_MESSAGE_BYTES, proxy=None)

        return cls(await _run_on_websocket_loop(connect()))

    async def send(self, message: str) -> None:
        await _run_on_websocket_loop(self._connection.send(message))

    async def recv(self) -> Any:
        """Return the next message, text or bytes."""
        return await _run_on_websocket_loop(self._connection.recv())

    async def close(self) -> None:
        await _run_on_websocket_loop(self._connection.close())


async def _run_on_websocket_loop(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await run_on_background_loop(work)
    except import_websockets().exceptions.WebSocketException as error:
        raise ConnectionError(str(error) or type(error).__name__) from error


def import_websockets() -> Any:
    """Return the package websockets. Raises ConfigError if it is not installed."""
    return import_optional("websockets.asyncio.client", "openenv:…", "openenv")
