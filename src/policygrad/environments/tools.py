"""A tool: a typed function, its schema, and what comes of a call. What a policy does wrong is told to the policy."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from policygrad.errors import ConfigError, PolicygradError
from policygrad.models.tool_calls import ToolCall
from policygrad.waiting import OverdueError, within

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
class Answer:
    """What is said to a call."""

    text: str
    failed: str = ""
    """One of `FAILURES`; "" = the tool has answered."""


@dataclass(frozen=True, eq=False)
class Tool:
    """A function that a policy may call."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    """As chat templates take it."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
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

    async def __call__(self, call: ToolCall, seconds: float) -> Answer:
        """The answer within so many seconds; a plain function runs in a thread of its own. What is slow and cannot be ended (that
        thread, a coroutine that ignores its cancellation) is left behind.

        Raises:
            PolicygradError: the tool's own, such as no wall to run programs behind: nothing that a policy can help.
        """
        try:
            bound = inspect.signature(self.function).bind(*call.positional, **call.arguments)
        except TypeError as error:
            return Answer(f"error: {self.name}: {error}", ARGUMENTS)
        for name, value in bound.arguments.items():
            wanted = self.schema["function"]["parameters"]["properties"].get(name, {})
            if not _fits(value, wanted):
                among = f"one of {_text(wanted['enum'])}" if "enum" in wanted else f"of type {_text(wanted['type'])}"
                return Answer(f"error: {self.name}: {name} is to be {among}, not {_text([value])[1:-1]}", ARGUMENTS)
        try:
            return Answer(_text(await within(seconds, self._result(bound))))
        except OverdueError:
            return Answer(f"error: {self.name} took longer than {seconds:g} seconds", SLOW)
        except PolicygradError:
            raise
        except Exception as error:
            return Answer(f"error: {type(error).__name__}: {error}", RAISED)

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
