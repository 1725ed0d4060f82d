"""Episodes about the tasks of a verifiers taskset: our turns, its tools and its rewards."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policygrad.environments.base import Action, Environment, Observation, Step, is_finite_number
from policygrad.environments.tools import ANSWER, ToolUse
from policygrad.errors import ConfigError
from policygrad.tasks.base import Example
from policygrad.tasks.verifiers import INDEX_COLUMN, TASKSET_COLUMN, VERIFIERS_PREFIX, load_taskset, load_taskset_tasks


@dataclass(frozen=True)
class Verifiers:
    """Episodes about `--task verifiers:ID`: `pg.Verifiers("ID")`, on the command line `--environment verifiers:ID` with that task.

    A turn without a call of a tool is the answer and ends the episode; then the task's rewards are called, offline as `vf replay`
    does, on a trace of the conversation, and their weighted sum is the reward. Tools are the methods of the taskset's and the
    task's Toolsets, called in this process, under the names that verifiers gives them. What was measured is logged as
    `environment/reward_NAME` and `environment/metric_NAME`. An episode whose rewards raise, or are no finite number, takes no part
    and is counted (`environment/failed`).

    Raises:
        ConfigError: no such taskset, or one that needs a runtime, an Env, a user or a state of verifiers' own.
    """

    name: str
    """The taskset's id."""
    max_turns: int = 8
    """Turns of the policy; the tokens of all of them are the run's `max_tokens`."""
    timeout: float = 10.0
    """For one call of a tool."""

    def __post_init__(self) -> None:
        load_taskset_tasks(self.name)

    def __call__(self, example: Example) -> Environment:
        if example.columns.get(TASKSET_COLUMN) != self.name:
            raise ConfigError(
                f"--environment {VERIFIERS_PREFIX}{self.name} is about that taskset's tasks: give --task {VERIFIERS_PREFIX}{self.name} too"
            )
        return _Episode(self, example, load_taskset_tasks(self.name)[example.columns[INDEX_COLUMN]])


class _Episode:
    """One episode."""

    def __init__(self, asked: Verifiers, example: Example, task: Any) -> None:
        self.asked, self.example, self.task = asked, example, task
        self.talk: list[tuple[Any, bool]] = []
        """Messages as verifiers has them, and whether the policy said them."""
        self.inner: Environment | None = None

    async def reset(self) -> Observation:
        self.talk = [(message, False) for message in _prompted(self.example)]
        functions = await _functions(self.asked.name, self.task)
        if not functions:
            return Observation(self.example.prompt)
        self.inner = ToolUse(functions, max_turns=self.asked.max_turns, timeout=self.asked.timeout)(self.example)
        return await self.inner.reset()

    async def step(self, action: Action) -> Step:
        step = Step(stop_reason=ANSWER) if self.inner is None else await self.inner.step(action)
        calls = action.calls if self.inner is not None else ()
        ids = [f"call_{len(self.talk)}_{i}" for i in range(len(calls))]
        self.talk.append((_said(action.text, list(zip(ids, calls, strict=True))), True))
        if step.observation is not None and not action.truncated:
            self.talk += [(message, False) for message in _answers(step.observation.content, ids)]
            return step
        reward, measured = await self._scored()
        return Step(reward=reward, metrics={**step.metrics, **measured}, stop_reason=step.stop_reason)

    async def _scored(self) -> tuple[float | None, dict[str, float]]:
        """(the episode's reward, its parts and metrics)."""
        trace = _trace(self.task, self.talk)
        try:
            await self.task.score(trace)
        except Exception:  # a reward function of somebody's own, at what a policy wrote
            return None, {"failed": 1.0}
        if not is_finite_number(trace.reward):
            return None, {"failed": 1.0}
        parts = {f"reward_{name}": found.score for name, found in trace.rewards.items() if found is not None}
        metrics = {f"metric_{name}": float(value) for name, value in trace.metrics.items() if is_finite_number(value)}
        return float(trace.reward), {"failed": 0.0, **metrics, **parts}


async def _functions(identity: str, task: Any) -> list[Callable[..., Any]]:
    """The tools of one episode; Toolsets are made and set up for it alone."""
    from verifiers.v1.state import State
    from verifiers.v1.utils.decorators import discover_decorated

    shared = load_taskset(identity)
    found = list[Callable[..., Any]]()
    for toolset in (*shared.toolsets(shared.config), *type(task).toolsets(task.config)):
        kind = type(toolset).__name__
        if getattr(toolset.config, "url", None):
            raise ConfigError(
                f"{VERIFIERS_PREFIX}{identity}: {kind} is a server elsewhere ({toolset.config.url}): only its class can be called"
            )
        if type(toolset.state) is not State:
            raise ConfigError(
                f"{VERIFIERS_PREFIX}{identity}: {kind} keeps a state in verifiers' own rollouts, which there are none of here"
            )
        await toolset.setup()
        await toolset.setup_task(task.data)
        found += [_function(method, toolset.server_name) for method in discover_decorated(toolset, "tool")]
    return found


def _function(method: Any, server: str) -> Callable[..., Any]:
    """A Toolset's method as a tool: named as verifiers names it, with a line below `Args:` for what has none."""
    name = str(getattr(method, "tool_name", None) or method.__name__)

    @functools.wraps(method)
    def plain(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    @functools.wraps(method)
    async def waiting(*args: Any, **kwargs: Any) -> Any:
        return await method(*args, **kwargs)

    function: Any = waiting if inspect.iscoroutinefunction(method) else plain
    function.__name__ = f"{server}_{name}" if server else name
    function.__doc__ = document_parameters(inspect.getdoc(method) or name, tuple(inspect.signature(method).parameters))
    made: Callable[..., Any] = function
    return made


def document_parameters(text: str, parameters: Sequence[str]) -> str:
    """A docstring in which every parameter stands below `Args:`, by its name where it is not described."""
    if not parameters or "Args:" in text:
        return text
    return "\n".join([text, "", "Args:", *(f"    {name}: {name.replace('_', ' ')}" for name in parameters)])


def _prompted(example: Example) -> Iterator[Any]:
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

    kinds: Mapping[str, Any] = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    for message in example.prompt:
        assert not isinstance(message, str)  # rows of a taskset are messages
        yield kinds[message["role"]](content=message["content"])


def _said(text: str, calls: Sequence[tuple[str, Any]]) -> Any:
    """A turn as verifiers has it, reasoning apart where a tag ends it."""
    from verifiers.v1.types import AssistantMessage, ToolCall

    reasoning, closed, rest = text.partition("</think>")
    made = [
        ToolCall(id=identity, name=call.name, arguments=json.dumps(dict(call.arguments)))
        for identity, call in calls
        if not call.error
    ]
    return AssistantMessage(
        content=(rest if closed else text).strip(),
        reasoning_content=reasoning.replace("<think>", "", 1).strip() if closed else None,
        tool_calls=made or None,
    )


def _answers(content: Any, ids: Sequence[str]) -> Iterator[Any]:
    """What tools said; where the template has no role for them, all of it to the first call."""
    from verifiers.v1.types import ToolMessage

    texts = [content] if isinstance(content, str) else [message["content"] for message in content]
    for identity, text in zip(ids, texts, strict=False):
        yield ToolMessage(tool_call_id=identity, content=text)


def _trace(task: Any, talk: Sequence[tuple[Any, bool]]) -> Any:
    """The conversation as rewards read it: one path of messages."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    nodes = [
        MessageNode(parent=place - 1 if place else None, message=message, sampled=sampled)
        for place, (message, sampled) in enumerate(talk)
    ]
    about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    return Trace(
        task=about,
        agent=AgentInfo(config=AgentConfig()),
        state=state_cls(type(task))(),
        nodes=nodes,
        is_completed=True,
        ok=True,
        stop_condition="agent_completed",
    )
