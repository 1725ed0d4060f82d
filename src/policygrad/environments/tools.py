"""A tool: a typed function, its schema, and what comes of a call. What a policy does wrong is told to the policy."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from policygrad.environments.base import Action, Environment, Observation, Step, accepts_seed
from policygrad.errors import ConfigError, PolicygradError
from policygrad.models.chat_template import format_tool_response
from policygrad.models.tool_calls import ToolCall, ToolCallParser
from policygrad.rewards.workers.messages import quote, to_number
from policygrad.sandbox.python_tool import truncate_middle
from policygrad.tasks.base import Example, Prompt
from policygrad.utils.async_runner import OverdueError, await_with_timeout

MALFORMED, UNKNOWN, ARGUMENTS, RAISED, SLOW, EXCESS = "malformed", "unknown", "arguments", "raised", "slow", "excess"
FAILURES = (MALFORMED, UNKNOWN, ARGUMENTS, RAISED, SLOW, EXCESS)
"""Why a call has come to nothing: not readable, no such tool, arguments that do not fit, an exception, too long, one too many in a
turn."""
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": (list, tuple),
    "object": dict,
}


@dataclass(frozen=True)
class ToolResult:
    """What is said to a call."""

    text: str
    failure: str = ""
    """One of `FAILURE_REASONS`; "" = the tool has answered."""


@dataclass(frozen=True, eq=False)
class Tool:
    """A function that a policy may call."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    """As chat templates take it."""

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """A function, a bound method, or an object with `__call__`: its name is `name`, or its class's in small letters.

        Raises:
            ConfigError: without types or docstring, of which the schema is made (transformers.utils.get_json_schema).
        """
        from transformers.utils.chat_template_utils import (
            DocstringParsingException,
            TypeHintParsingException,
            get_json_schema,
        )

        plain = inspect.isroutine(function)
        name = getattr(function, "__name__" if plain else "name", "") or type(function).__name__.lower()
        if not callable(function):
            raise ConfigError(f"a tool is a function, and {function!r} is none")
        try:
            schema = get_json_schema(function if plain else function.__call__)  # type: ignore[operator]
        except (DocstringParsingException, TypeHintParsingException, NameError) as error:
            raise ConfigError(
                f"the tool {name!r} cannot be described to a model: {error}. Give every parameter a type and the function a "
                "docstring: what it does, then a line `Args:`, below it a line `parameter: what it is` for each"
            ) from error
        described = {key: value for key, value in schema["function"].items() if key != "return"}
        return cls(name, function, {**schema, "function": {**described, "name": name}})

    async def __call__(self, call: ToolCall, timeout: float) -> ToolResult:
        """The answer within so many seconds; a plain function runs in a thread of its own. What is slow and cannot be ended (that
        thread, a coroutine that ignores its cancellation) is left behind.

        Raises:
            PolicygradError: the tool's own, such as no wall to run programs behind: nothing that a policy can help.
        """
        try:
            bound = inspect.signature(self.function).bind(*call.positional, **call.arguments)
        except TypeError as error:
            return ToolResult(f"error: {self.name}: {error}", ARGUMENTS)
        for name, value in bound.arguments.items():
            wanted = self.schema["function"]["parameters"]["properties"].get(name, {})
            if not _fits(value, wanted):
                among = f"one of {_text(wanted['enum'])}" if "enum" in wanted else f"of type {_text(wanted['type'])}"
                return ToolResult(f"error: {self.name}: {name} is to be {among}, not {_text([value])[1:-1]}", ARGUMENTS)
        try:
            return ToolResult(_text(await await_with_timeout(timeout, self._result(bound))))
        except OverdueError:
            return ToolResult(f"error: {self.name} took longer than {timeout:g} seconds", SLOW)
        except PolicygradError:
            raise
        except Exception as error:
            return ToolResult(f"error: {type(error).__name__}: {error}", RAISED)

    async def _result(self, bound: inspect.BoundArguments) -> Any:
        called = self.function if inspect.isroutine(self.function) else self.function.__call__  # type: ignore[operator]
        if inspect.iscoroutinefunction(called):
            return await self.function(*bound.args, **bound.kwargs)
        found = await _in_a_thread(lambda: self.function(*bound.args, **bound.kwargs))
        return await found if isinstance(found, Awaitable) else found


async def _in_a_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns; a thread that nobody waits for any more keeps neither the loop nor the process from ending."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def tell(set_it: Callable[[Any], None], value: Any) -> None:
        if not found.done():
            set_it(value)

    def target() -> None:
        said: tuple[Callable[[Any], None], Any]
        try:
            said = found.set_result, work()
        except Exception as error:
            said = found.set_exception, error if not isinstance(error, StopIteration) else RuntimeError(repr(error))
        except BaseException as error:  # sys.exit() in a tool ends the tool
            said = found.set_exception, RuntimeError(repr(error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, *said)

    threading.Thread(target=target, daemon=True).start()
    return await found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _fits(value: Any, wanted: Mapping[str, Any]) -> bool:
    """Whether a value is of the schema's type, its elements not looked at; what says nothing of its type takes all."""
    kinds = wanted.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if value is None and wanted.get("nullable"):
        return True
    if "enum" in wanted and value not in wanted["enum"]:
        return False
    known = [_TYPES[kind] for kind in kinds if kind in _TYPES]
    if not known or len(known) < len(kinds):
        return True
    if isinstance(value, bool):
        return bool in known
    return any(isinstance(value, kind) for kind in known)


# Conversations with tools: the policy calls, is answered, calls again, and says what it has found.

ANSWER, TURNS = "answer", "turns"
"""What ends a conversation, besides the budget of tokens: the policy, by a turn without a call, or the number of turns."""


@dataclass(frozen=True)
class ToolUse:
    """An environment's factory: `pg.train(run, environment=pg.ToolUse((add,)))`, or on the command line `mine.py:NAME`.

    A turn that calls no tool is the answer and ends the episode. What cannot be read, or fails, is told to the policy as
    `error: …`, and counted: `environment/calls`, `environment/calls_malformed`, `…_unknown`, `…_arguments`, `…_raised`, `…_slow`,
    `…_excess`.

    Where `reward`, `call_reward` or a function that makes tools raises, or a reward is no number, the episode takes no part, as a
    completion whose reward function fails.

    Raises:
        ConfigError: a tool that cannot be described, two of one name, a budget that leaves nothing.
    """

    tools: Sequence[Callable[..., Any]] | Callable[..., Sequence[Callable[..., Any]]]
    """Functions with types and a docstring, plain or async; or a function from an example (and `seed`) to those of one episode."""
    reward: Callable[[str, Example], Any] | None = None
    """Of an episode, from its answer ("" = none) and its example, plain or async; None = the run's reward functions."""
    call_reward: Callable[[ToolCall, ToolResult], Any] | None = None
    """Of a turn: of each of its calls, added up; it may return None for a call that earns nothing."""
    max_turns: int = 8
    """Turns of the policy; the tokens of all of them are the run's `max_tokens`."""
    timeout: float = 10.0
    """For one call."""
    max_output_chars: int = 4000
    """Characters of an answer; what is longer loses its middle."""
    max_calls: int = 16
    """Calls of one turn that are made; the policy is told that the others were not."""
    tools_in_prompt: bool = True
    """Whether the prompt says what tools there are: by the chat template, or, where it knows none, before the first message."""
    parser: ToolCallParser | None = None
    """How calls are written; None = as the model's chat template has it."""

    def __post_init__(self) -> None:
        if self.max_turns < 1 or not self.timeout > 0 or self.max_output_chars < 1 or self.max_calls < 1:
            raise ConfigError(
                "ToolUse: max_turns and longest must be at least 1, max_calls too, and seconds above 0, not "
                f"{self.max_turns}, {self.max_output_chars}, {self.max_calls} and {self.timeout:g}"
            )
        if not callable(self.tools):
            self._described  # noqa: B018  refuses what cannot be described now, not in the first episode

    @cached_property
    def _described(self) -> dict[str, Tool]:
        return {} if callable(self.tools) else make_tools(self.tools)

    def __call__(self, example: Example, seed: int = 0) -> Environment:
        given = self.tools
        if not callable(given):
            return _Conversation(self, example, self._described)
        return _Conversation(
            self, example, make_tools(given(example, seed=seed) if accepts_seed(given) else given(example))
        )


def make_tools(functions: Sequence[Callable[..., Any]]) -> dict[str, Tool]:
    """Tools by their names.

    Raises:
        ConfigError: two of one name, or what `Tool.from_function` refuses.
    """
    tools = [Tool.from_function(function) for function in functions]
    twice = [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]
    if twice:
        raise ConfigError(f"two tools are called {twice[0]!r}: a call would not say which; rename one")
    return {tool.name: tool for tool in tools}


class _Conversation:
    """One episode."""

    def __init__(self, asked: ToolUse, example: Example, tools: dict[str, Tool]) -> None:
        self.asked, self.example, self.tools = asked, example, tools
        self.turns = 0

    async def reset(self) -> Observation:
        schemas = tuple(tool.schema for tool in self.tools.values()) if self.asked.tools_in_prompt else ()
        return Observation(self.example.prompt, schemas)

    async def step(self, action: Action) -> Step:
        self.turns += 1
        calls = self.asked.parser(action.text) if self.asked.parser else action.calls
        metrics = {"calls": float(len(calls))} | {f"calls_{why}": 0.0 for why in FAILURES}
        if not calls:
            return Step(reward=await self._reward(action.text), metrics=metrics, stop_reason=ANSWER)
        if action.truncated or self.turns >= self.asked.max_turns:
            metrics["calls_malformed"] = float(sum(bool(call.error) for call in calls))
            return Step(reward=await self._reward(""), metrics=metrics, stop_reason=TURNS)
        most = self.asked.max_calls
        answers = [await self._answer(call) for call in calls[:most]]
        for answer in answers:
            if answer.failure:
                metrics[f"calls_{answer.failure}"] += 1.0
        own = self._calls_reward(calls[:most], answers)
        if excess := len(calls[most:]):
            metrics[f"calls_{EXCESS}"] = float(excess)
            answers.append(ToolResult(f"error: {excess} more calls were not made: a turn has at most {most}", EXCESS))
        return Step(Observation(self._said(answers)), own, metrics)

    def _calls_reward(self, calls: Sequence[ToolCall], answers: Sequence[ToolResult]) -> float | None:
        """What the calls of a turn earn together; None where no function says."""
        worth = self.asked.call_reward
        if worth is None:
            return None
        return sum(_reward("call_reward", worth(c, a)) or 0.0 for c, a in zip(calls, answers, strict=True))

    async def on_truncated(self) -> float | None:
        """There is no room for an answer."""
        return await self._reward("")

    async def _answer(self, call: ToolCall) -> ToolResult:
        if call.error:
            return ToolResult(f"error: {call.error}", MALFORMED)
        if (tool := self.tools.get(call.name)) is None:
            return ToolResult(
                f"error: there is no tool {call.name!r}, there are {', '.join(self.tools) or 'none'}", UNKNOWN
            )
        answer = await tool(call, self.asked.timeout)
        return ToolResult(truncate_middle(answer.text, self.asked.max_output_chars), answer.failure)

    def _said(self, answers: Sequence[ToolResult]) -> Prompt:
        """Text goes on as text; messages by the role that templates with tools have, or as the user."""
        tagged = "\n".join(format_tool_response(answer.text) for answer in answers)
        if isinstance(self.example.prompt, str):
            return f"\n{tagged}\n"
        if not self.asked.tools_in_prompt:
            return ({"role": "user", "content": tagged},)
        return tuple({"role": "tool", "content": answer.text} for answer in answers)

    async def _reward(self, answer: str) -> float | None:
        if self.asked.reward is None:
            return None
        found = self.asked.reward(answer, self.example)
        return _reward("reward", await found if inspect.isawaitable(found) else found)


def _reward(name: str, value: Any) -> float | None:
    """Raises ValueError for what is no finite number and not None."""
    number, reason = to_number(value)
    if reason:
        raise ValueError(f"{name} returned {quote(value)}, which is no finite number")
    return number
