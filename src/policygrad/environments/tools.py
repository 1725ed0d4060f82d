"""Tools: functions that the policy may call, or those of a server, and conversations with them. It is told of its own mistakes."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from policygrad.errors import ConfigError, PolicygradError
from policygrad.models.chat.rendering import format_tool_response, join_tool_responses
from policygrad.models.chat.turns import ToolCall, ToolCallParser
from policygrad.rewards.workers.messages import quote, to_number
from policygrad.rollout.environment import Action, Capabilities, Environment, Observation, Step, accepts_seed
from policygrad.sandbox.python_tool import truncate_middle
from policygrad.tasks.base import Example, Prompt
from policygrad.utils.async_runner import OverdueError, await_with_timeout, run_in_daemon_thread
from policygrad.utils.message_parts import content_text
from policygrad.utils.pictures import to_parts

MALFORMED, UNKNOWN, ARGUMENTS, RAISED, SLOW, EXCESS = "malformed", "unknown", "arguments", "raised", "slow", "excess"
FAILURES = (MALFORMED, UNKNOWN, ARGUMENTS, RAISED, SLOW, EXCESS)
"""Why a call failed: unreadable, no such tool, arguments that do not match, an exception, a timeout, too many calls in a turn."""
ANSWER, TURNS = "answer", "turns"
"""Reasons for a conversation's end besides the token budget: a turn without a call, or the limit on turns."""
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": (list, tuple),
    "object": dict,
}


@dataclass(frozen=True)
class ToolUse:
    """Conversations with tools: `pg.train(run, environment=pg.ToolUse((add,)))`, or `--environment mine.py:NAME`.

    A turn that calls no tool is the answer, and ends the episode. Calls that cannot be read or that fail are reported to the
    policy as `error: …` and counted: `environment/calls`, `environment/calls_malformed`, `…_unknown`, `…_arguments`,
    `…_raised`, `…_slow`, `…_excess`.

    If `reward`, `call_reward` or a function that creates tools raises, or a reward is not a number, the episode is not trained
    on, like a completion whose reward function fails.

    Raises:
        ConfigError: A tool without types or docstring, two tools of one name, or a limit below its minimum.
    """

    tools: Sequence[Callable[..., Any] | ToolSource] | Callable[..., Sequence[Callable[..., Any] | ToolSource]]
    """Functions with types and a docstring, plain or async, and the tools of servers (`pg.McpTools`); or a function from an example
    (and `seed`) to those of its episode."""
    reward: Callable[..., Any] | None = None
    """Scores an episode from its answer ("" = none), its example and what `reward_columns` names, plain or async; None = the run's
    reward functions."""
    call_reward: Callable[[ToolCall, ToolResult], Any] | None = None
    """Scores each call of a turn; the scores are added up. It may return None for a call without a reward."""
    max_turns: int = 8
    """Maximum turns of the policy. The run's `max_tokens` limits the tokens of all turns together."""
    timeout: float = 10.0
    """Seconds per call."""
    max_output_chars: int = 4000
    """Longer tool outputs are shortened in the middle."""
    max_calls: int = 16
    """Calls executed per turn; the policy is told that further ones were not."""
    tools_in_prompt: bool = True
    """Whether the prompt lists the tools: through the chat template, or before the first message if it does not support tools."""
    parser: ToolCallParser | None = None
    """Parses calls; None = in the format of the model's chat template."""
    capabilities: ClassVar[Capabilities] = Capabilities(has_known_columns=True)
    reward_columns: Sequence[str] = ()
    """Attributes of the tools' objects (`shop` of `shop.buy`) that rewards see as they are at the episode's end: the run's reward
    functions as columns, `reward` as keyword arguments. Plain data: numbers, text, lists, dicts."""

    def __post_init__(self) -> None:
        if self.max_turns < 1 or not self.timeout > 0 or self.max_output_chars < 1 or self.max_calls < 1:
            raise ConfigError(
                "ToolUse: max_turns, max_output_chars and max_calls must be at least 1, and timeout above 0, not "
                f"{self.max_turns}, {self.max_output_chars}, {self.max_calls} and {self.timeout:g}"
            )
        if isinstance(self.reward_columns, str):
            raise ConfigError(f"ToolUse: reward_columns is a tuple of names, ({self.reward_columns!r},), not one text")
        self._fixed_tools  # noqa: B018  an invalid tool fails here, not in the first episode

    @cached_property
    def _fixed_tools(self) -> tuple[Tool | ToolSource, ...]:
        return () if callable(self.tools) else describe_tools(self.tools)

    def __call__(self, example: Example, seed: int = 0) -> Environment:
        tools = self.tools
        if not callable(tools):
            return _Conversation(self, example, self._fixed_tools)
        chosen = tools(example, seed=seed) if accepts_seed(tools) else tools(example)
        return _Conversation(self, example, describe_tools(chosen))

    def opening(self, example: Example) -> Observation | None:
        """Return the first observation of an example's episodes, if the descriptions of all tools are known."""
        if callable(self.tools):
            return None
        tools = list[Tool]()
        for item in self._fixed_tools:
            described = [item] if isinstance(item, Tool) else item.tools if isinstance(item, DescribesTools) else None
            if described is None:
                return None
            tools += described
        return self.show(example, index_tools(tools).values())

    def show(self, example: Example, tools: Iterable[Tool]) -> Observation:
        """Return an episode's first observation."""
        return Observation(example.prompt, tuple(tool.schema for tool in tools) if self.tools_in_prompt else ())

    def __enter__(self) -> Self:
        """Begin a run: servers whose tools are used are tried."""
        with ExitStack() as stack:
            for source in self._sources:
                stack.enter_context(source)
            stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End a run."""
        with ExitStack() as stack:
            for source in self._sources:
                stack.push(source)

    @property
    def _sources(self) -> list[ToolSource]:
        return [item for item in self._fixed_tools if isinstance(item, ToolSource)]


@dataclass(frozen=True)
class ToolResult:
    """The text returned to the policy for a call."""

    text: str
    failure: str = ""  # one of `FAILURES`; "" = success
    parts: tuple[Mapping[str, Any], ...] | None = None  # what it shows instead, if there is a picture

    @property
    def content(self) -> Any:
        """The content of a message."""
        return self.parts or self.text

    def shorten(self, max_chars: int) -> ToolResult:
        """Return it with texts of at most `max_chars` characters."""
        parts = self.parts and tuple(
            {**part, "text": truncate_middle(part["text"], max_chars)} if part["type"] == "text" else part
            for part in self.parts
        )
        return replace(self, text=truncate_middle(self.text, max_chars), parts=parts)


class ToolError(Exception):
    """A failure of a tool that the policy reads as it is written: `error: …`."""


@runtime_checkable
class ToolSource(Protocol):
    """Tools that are described elsewhere, such as by a server. It is entered when a run begins, and left when the run ends."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool | None: ...

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """Return the tools of one episode, which ends when the context is left."""


@runtime_checkable
class DescribesTools(Protocol):
    """A source that knows its tools once it is entered."""

    @property
    def tools(self) -> Sequence[Tool] | None:
        """The tools as in an episode, to read their descriptions; None = they are known only in an episode."""


@dataclass(frozen=True, eq=False)
class Tool:
    """A function that the policy may call, with its arguments by name."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]  # the JSON schema for chat templates
    prepare: Callable[[], Awaitable[object]] | None = None
    """Awaited before each call, outside of its time limit: what it raises is not the call's failure but the episode's."""

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """Describe a function, a bound method, or an object with `__call__`, named by its `name` or its lower-case class name.

        Raises:
            ConfigError: No types or docstring, from which the schema is made (transformers.utils.get_json_schema).
        """
        from transformers.utils import chat_template_utils as templates

        is_function = inspect.isroutine(function)
        name = getattr(function, "__name__" if is_function else "name", "") or type(function).__name__.lower()
        if not callable(function):
            raise ConfigError(f"a tool must be a function, not {function!r}")
        try:
            schema = templates.get_json_schema(function if is_function else function.__call__)  # type: ignore[operator]
        except (templates.DocstringParsingException, templates.TypeHintParsingException, NameError) as error:
            raise ConfigError(
                f"the tool {name!r} cannot be described to a model: {error}. Give every parameter a type and the function a "
                "docstring: what it does, then a line `Args:`, then a line `parameter: description` for each"
            ) from error
        parameters = inspect.signature(function).parameters.values()
        if unnamed := [p for p in parameters if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]:
            raise ConfigError(
                f"the tool {name!r} has the parameter {unnamed[0].name!r}, which a call cannot give by name: write one parameter "
                "for each argument, without * and /"
            )
        described = {key: value for key, value in schema["function"].items() if key != "return"}
        return cls(name, function, {**schema, "function": {**described, "name": name}})

    async def __call__(self, call: ToolCall, timeout: float) -> ToolResult:
        """Execute a call within a number of seconds, a plain function in its own thread.

        After a timeout, what cannot be cancelled (that thread, or a coroutine that ignores cancellation) is abandoned.

        Raises:
            PolicygradError: An error that the policy cannot avoid, such as a missing sandbox.
        """
        if self.prepare is not None:
            await self.prepare()
        parameters = self.schema["function"].get("parameters") or {}
        properties = parameters.get("properties") or {}
        try:
            arguments = match_arguments(call, parameters)
        except TypeError as error:
            return ToolResult(f"error: {self.name}: {error}", ARGUMENTS)
        for name, value in arguments.items():
            schema = properties.get(name, {})
            schema = schema if isinstance(schema, Mapping) else {}  # `true` stands for any value
            if value is None and schema.get("nullable"):
                continue
            kinds = schema.get("type", ())
            kinds = [kinds] if isinstance(kinds, str) else kinds
            if isinstance(value, float) and value.is_integer() and "integer" in kinds and "number" not in kinds:
                arguments[name] = value = int(value)  # as JSON schema has it, 5.0 is an integer
            types = [_TYPES[kind] for kind in kinds if kind in _TYPES]
            is_valid = "enum" not in schema or value in schema["enum"]
            if types and len(types) == len(kinds):  # else it has no type, or an unknown one; elements are not checked
                is_valid &= bool in types if isinstance(value, bool) else any(isinstance(value, kind) for kind in types)
            if not is_valid:
                rule, values = ("one of", schema["enum"]) if "enum" in schema else ("of type", schema["type"])
                required = f"{rule} {_to_text(values)}"
                message = f"error: {self.name}: {name} is to be {required}, not {_to_text([value])[1:-1]}"
                return ToolResult(message, ARGUMENTS)
        try:
            value = await await_with_timeout(timeout, self._run(arguments))
            parts = to_parts(value)
            return ToolResult(_to_text(value)) if parts is None else ToolResult(content_text(parts), parts=parts)
        except OverdueError:
            return ToolResult(f"error: {self.name} took longer than {timeout:g} seconds", SLOW)
        except ToolError as error:
            return ToolResult(f"error: {error}", RAISED)
        except PolicygradError:
            raise
        except Exception as error:
            return ToolResult(f"error: {type(error).__name__}: {error}", RAISED)

    async def _run(self, arguments: Mapping[str, Any]) -> Any:
        function = self.function if inspect.isroutine(self.function) else self.function.__call__  # type: ignore[operator]
        if inspect.iscoroutinefunction(function):
            return await self.function(**arguments)

        def call() -> Any:
            try:
                return self.function(**arguments)
            except (StopIteration, SystemExit, asyncio.CancelledError) as error:  # these end the tool only
                raise RuntimeError(repr(error)) from error

        result = await run_in_daemon_thread(call)
        return await result if isinstance(result, Awaitable) else result


def describe_tools(tools: Sequence[Callable[..., Any] | ToolSource]) -> tuple[Tool | ToolSource, ...]:
    """Make tools of functions; those of a source are known when it is opened.

    Raises:
        ConfigError: Two functions of one name, or one that `Tool.from_function` refuses; a source outside of a sequence.
    """
    if isinstance(tools, ToolSource):
        raise ConfigError(
            f"tools must be a sequence, such as ({type(tools).__name__}(…),), not one source of tools alone"
        )
    described = tuple(t if isinstance(t, Tool | ToolSource) else Tool.from_function(t) for t in tools)
    index_tools(tool for tool in described if isinstance(tool, Tool))
    return described


def index_tools(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Return tools by name. Raises ConfigError for two of one name."""
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if by_name.setdefault(tool.name, tool) is not tool:
            raise ConfigError(f"two tools are named {tool.name!r}, so a call would be ambiguous; rename one")
    return by_name


def match_arguments(call: ToolCall, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name.

    Args:
        parameters: The tool's JSON schema of an object. Other names than its properties are accepted only if it says so
            (additionalProperties).

    Raises:
        TypeError: Arguments that do not match, in the words of a Python function.
    """
    names = tuple(parameters.get("properties") or {})
    if len(call.positional) > len(names):
        raise TypeError("too many positional arguments")
    arguments = dict(zip(names, call.positional, strict=False))
    for name, value in call.arguments.items():
        if name in arguments:
            raise TypeError(f"multiple values for argument {name!r}")
        if name not in names and not parameters.get("additionalProperties"):
            raise TypeError(f"got an unexpected keyword argument {name!r}")
        arguments[name] = value
    for name in parameters.get("required") or ():
        if name not in arguments:
            raise TypeError(f"missing a required argument: {name!r}")
    return arguments


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


class _Conversation:
    def __init__(self, config: ToolUse, example: Example, tools: Sequence[Tool | ToolSource]) -> None:
        self.config, self.example, self.turns = config, example, 0
        self.reward_columns = tuple(config.reward_columns)
        self._given, self._sources = tools, AsyncExitStack()
        self.tools: dict[str, Tool] = {}

    async def reset(self) -> Observation:
        tools = list[Tool]()
        for item in self._given:
            tools += [item] if isinstance(item, Tool) else await self._sources.enter_async_context(item.open())
        self.tools = index_tools(tools)
        return self.config.show(self.example, self.tools.values())

    async def step(self, action: Action) -> Step:
        self.turns += 1
        calls = action.calls if self.config.parser is None else action.parse_calls(self.config.parser)
        metrics = {"calls": float(len(calls))} | {f"calls_{failure}": 0.0 for failure in FAILURES}
        if not calls:
            return Step(reward=await self._score(action.text), metrics=metrics, stop_reason=ANSWER)
        if action.truncated or self.turns >= self.config.max_turns:
            metrics["calls_malformed"] = float(sum(bool(call.error) for call in calls))
            return Step(reward=await self._score(""), metrics=metrics, stop_reason=TURNS)
        limit = self.config.max_calls
        results = list[ToolResult]()
        for call in calls[:limit]:
            if call.error:
                result = ToolResult(f"error: {call.error}", MALFORMED)
            elif (tool := self.tools.get(call.name)) is None:
                names = ", ".join(self.tools) or "none"
                result = ToolResult(f"error: there is no tool {call.name!r}, there are {names}", UNKNOWN)
            else:
                result = await tool(call, self.config.timeout)
                result = result.shorten(self.config.max_output_chars)
            results.append(result)
            if result.failure:
                metrics[f"calls_{result.failure}"] += 1.0
        reward = None
        if (score := self.config.call_reward) is not None:
            pairs = zip(calls[:limit], results, strict=True)
            reward = sum(_check_reward("call_reward", score(call, result)) or 0.0 for call, result in pairs)
        if excess := len(calls[limit:]):
            metrics[f"calls_{EXCESS}"] = float(excess)
            message = f"error: {excess} more calls were not made: a turn has at most {limit}"
            results.append(ToolResult(message, EXCESS))
        # the results have the prompt's form: text, or messages with the role tool, or user if the prompt lists no tools
        replies = tuple({"role": "tool", "content": result.content} for result in results)
        if isinstance(self.example.prompt, str):
            tagged = "\n".join(format_tool_response(result.text) for result in results)
            reply: Prompt = f"\n{tagged}\n"
        elif self.config.tools_in_prompt:
            reply = replies
        else:
            reply = ({"role": "user", "content": join_tool_responses(replies)},)
        return Step(Observation(reply), reward, metrics)

    def __getattr__(self, name: str) -> Any:
        """Return the state of the tools that `reward_columns` names."""
        if name not in self.__dict__.get("reward_columns", ()):
            raise AttributeError(name)
        for tool in self.tools.values():
            owner = getattr(tool.function, "__self__", tool.function)
            if hasattr(owner, name):
                return getattr(owner, name)
        raise AttributeError(
            f"no tool's object has the attribute {name!r}, which ToolUse.reward_columns names: give methods of one that has it"
        )

    async def on_truncated(self) -> float | None:
        return await self._score("")

    async def close(self) -> None:
        await self._sources.aclose()

    async def _score(self, answer: str) -> float | None:
        if self.config.reward is None:
            return None
        columns = {name: getattr(self, name) for name in self.reward_columns}
        reward = self.config.reward(answer, self.example, **columns)
        return _check_reward("reward", await reward if inspect.isawaitable(reward) else reward)


def _check_reward(name: str, value: Any) -> float | None:
    """Raise ValueError unless the value is a finite number or None."""
    number, reason = to_number(value)
    if reason:
        raise ValueError(f"{name} returned {quote(value)}, which is not a finite number")
    return number
