"""Episodes on the tasks of a verifiers taskset, with its tools and rewards."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policygrad.environments.tools import ANSWER, ToolUse
from policygrad.errors import ConfigError
from policygrad.rollout.environment import Action, Environment, Observation, Step, is_finite_number
from policygrad.tasks.base import Example
from policygrad.tasks.registry import VERIFIERS_PREFIX
from policygrad.tasks.verifiers import INDEX_COLUMN, TASKSET_COLUMN, load_taskset, load_taskset_tasks


@dataclass(frozen=True)
class Verifiers:
    """Episodes on `--task verifiers:ID`: `pg.Verifiers("ID")`, or `--environment verifiers:ID` with that task.

    A turn without a tool call is the answer and ends the episode. The reward is the weighted sum of the task's rewards, called on a
    trace of the conversation as in `vf replay`; scores are logged as `environment/reward_NAME` and `environment/metric_NAME`. Tools
    are called in this process. An episode whose rewards raise or are not finite is counted and not trained on.

    Raises:
        ConfigError: No such taskset, or one that needs a runtime, an Env, a user or a state of verifiers.
    """

    name: str
    """The taskset's id."""
    max_turns: int = 8
    """Maximum turns of the policy. The run's `max_tokens` limits the tokens of all turns together."""
    timeout: float = 10.0
    """Seconds per tool call."""

    def __post_init__(self) -> None:
        load_taskset_tasks(self.name)

    def __call__(self, example: Example) -> Environment:
        if example.columns.get(TASKSET_COLUMN) != self.name:
            name = f"{VERIFIERS_PREFIX}{self.name}"
            raise ConfigError(f"--environment {name} needs the tasks of that taskset: give --task {name} too")
        return _Episode(self, example, load_taskset_tasks(self.name)[example.columns[INDEX_COLUMN]])


class _Episode:
    def __init__(self, config: Verifiers, example: Example, task: Any) -> None:
        self.config, self.example, self.task = config, example, task
        self.messages: list[tuple[Any, bool]] = []
        """verifiers' messages, and whether the policy sampled them."""
        self.conversation: Environment | None = None

    async def reset(self) -> Observation:
        from verifiers.v1.state import State
        from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage
        from verifiers.v1.utils.decorators import discover_decorated

        kinds: Mapping[str, Any] = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
        self.messages = []
        for message in self.example.prompt:
            assert not isinstance(message, str)  # rows of a taskset are messages
            self.messages.append((kinds[message["role"]](content=message["content"]), False))
        tools = list[Callable[..., Any]]()  # from Toolsets created and set up for this episode alone
        taskset = load_taskset(self.config.name)
        for toolset in (*taskset.toolsets(taskset.config), *type(self.task).toolsets(self.task.config)):
            kind = f"{VERIFIERS_PREFIX}{self.config.name}: {type(toolset).__name__}"
            if getattr(toolset.config, "url", None):
                raise ConfigError(f"{kind} is a remote server ({toolset.config.url}): only its class can be called")
            if type(toolset.state) is not State:
                raise ConfigError(f"{kind} keeps a state in verifiers' rollouts, which is unsupported")
            await toolset.setup()
            await toolset.setup_task(self.task.data)
            tools += [_wrap_tool(method, toolset.server_name) for method in discover_decorated(toolset, "tool")]
        if not tools:
            return Observation(self.example.prompt)
        factory = ToolUse(tools, max_turns=self.config.max_turns, timeout=self.config.timeout)
        self.conversation = factory(self.example)
        return await self.conversation.reset()

    async def step(self, action: Action) -> Step:
        from verifiers.v1.types import AssistantMessage, ToolCall, ToolMessage

        step = Step(stop_reason=ANSWER) if self.conversation is None else await self.conversation.step(action)
        calls = action.calls if self.conversation is not None else ()
        ids = [f"call_{len(self.messages)}_{i}" for i in range(len(calls))]
        tool_calls = [
            ToolCall(id=identity, name=call.name, arguments=json.dumps(dict(call.arguments)))
            for identity, call in zip(ids, calls, strict=True)
            if not call.error
        ]
        message = AssistantMessage(
            content=action.message.content.strip(),
            reasoning_content=action.message.reasoning.strip() or None,
            tool_calls=tool_calls or None,
        )
        self.messages.append((message, True))
        if step.observation is None or action.truncated:
            reward, metrics = await self._score()
            return Step(reward=reward, metrics={**step.metrics, **metrics}, stop_reason=step.stop_reason)
        content = step.observation.content
        texts = [content] if isinstance(content, str) else [message["content"] for message in content]
        # without a tool role in the template, all results are one text, which is given to the first call
        results = [ToolMessage(tool_call_id=i, content=text) for i, text in zip(ids, texts, strict=False)]
        self.messages += [(result, False) for result in results]
        return step

    async def _score(self) -> tuple[float, dict[str, float]]:
        """Return the episode's reward, and its parts and metrics. What a reward, a metric or a judge raises ends the episode, like
        any error of an environment."""
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask

        task: Any = self.task
        trace = Trace(  # the conversation as a single path of messages
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=AgentInfo(config=AgentConfig()),
            state=state_cls(type(task))(),
            nodes=[
                MessageNode(parent=i - 1 if i else None, message=message, sampled=sampled)
                for i, (message, sampled) in enumerate(self.messages)
            ],
            is_completed=True,
            ok=True,
            stop_condition="agent_completed",
        )
        try:
            await self.task.score(trace)
        except Exception as error:  # a reward's, a metric's or a judge's, which verifiers wraps in its own
            raise error.__cause__ if isinstance(error.__cause__, Exception) else error  # noqa: B904
        if not is_finite_number(trace.reward):
            raise ValueError(f"the rewards add up to {trace.reward!r}, which is not a finite number")
        parts = {f"reward_{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {f"metric_{name}": float(value) for name, value in trace.metrics.items() if is_finite_number(value)}
        return float(trace.reward), {**metrics, **parts}


def _wrap_tool(method: Any, server: str) -> Callable[..., Any]:
    """Wrap a Toolset's method as a tool with verifiers' name for it, documenting all parameters."""
    name = str(getattr(method, "tool_name", None) or method.__name__)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:  # the coroutine of an async method
        return method(*args, **kwargs)

    call.__name__ = f"{server}_{name}" if server else name
    call.__doc__ = document_parameters(inspect.getdoc(method) or name, tuple(inspect.signature(method).parameters))
    return call


def document_parameters(text: str, parameters: Sequence[str]) -> str:
    """Add a section `Args:` to a docstring without one, describing each parameter by its name."""
    if not parameters or "Args:" in text:
        return text
    return "\n".join([text, "", "Args:", *(f"    {name}: {name.replace('_', ' ')}" for name in parameters)])
