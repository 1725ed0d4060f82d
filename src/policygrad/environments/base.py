"""What an environment is: one episode's world, in words. Token ids never leave the rollout's hands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from policygrad.errors import EngineError
from policygrad.models.control_tokens import replace_surrogates
from policygrad.models.tool_calls import TAGGED_PARSER, ToolCall, ToolCallParser
from policygrad.rewards.workers.messages import MAX_ABS_REWARD, quote, to_number
from policygrad.tasks.base import Example, Prompt

ENVIRONMENT, TOKENS, CONTEXT = "environment", "tokens", "context"
"""What may end an episode: its environment, the budget of tokens, the model's context."""
DEFAULT_TIMEOUT = 300.0
"""Seconds that one call of an environment may take, by default."""
FAILED = "failed"
"""What ends one whose environment raised or was not over in time, so that it has no reward and takes no part."""
RESERVED_METRICS, STOP_METRIC_PREFIX = ("turns", "branches", "branched_ratio"), "ended_"
"""Metrics of every environment, and how those begin that say what ended an episode: names that no `Step.metrics` can take."""


class MalformedError(EngineError):
    """An Observation or a Step that an environment cannot have meant. The episode adds which environment and which row it was."""


@dataclass(frozen=True)
class Observation:
    """What the policy reads next: text as it stands, or chat messages that the tokenizer's template renders.

    Half a surrogate pair, which no tokenizer takes, becomes U+FFFD.

    Raises:
        EngineError: content that is neither text nor messages, a message without a role.
    """

    content: Prompt
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools as the template takes them; of the first observation of an episode."""
    state: Hashable | None = None
    """What tells the world's state here from others: turns of a group's episodes that begin in equal states are compared by the
    algorithms that compare turns (gigpo). None = what is said, word for word."""

    def __post_init__(self) -> None:
        _check_content(self.content)
        object.__setattr__(self, "content", replace_surrogates(self.content))
        object.__setattr__(self, "tools", replace_surrogates(self.tools))


@dataclass(frozen=True)
class Action:
    """What the policy said in its turn."""

    text: str
    """The sampled tokens decoded, without end and padding tokens."""
    truncated: bool = False
    """The token budget ended it, not the policy."""
    parser: ToolCallParser = TAGGED_PARSER
    """How the model writes calls of tools."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tools that it calls, by its model's convention; one that cannot be read says why."""
        return self.parser(self.text)


@dataclass(frozen=True)
class Step:
    """What came of an action. The episode goes on where there is an observation.

    Raises:
        EngineError: an observation that is none, a reward or a metric that is no finite number, a metric with a name of our own.
    """

    observation: Observation | None = None
    """What is said to the policy; None = the episode is over."""
    reward: float | None = None
    """Of this turn, any real number (int, bool and NumPy scalars too); an episode's rewards add up, to what the run's reward
    functions say of it. None = none of its own."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the log, as environment/NAME: an episode's turns are added up, and averaged over the episodes that have them."""
    stop_reason: str = ENVIRONMENT
    """What ended the episode, a word for metrics and logs; of a step without an observation."""

    def __post_init__(self) -> None:
        if not isinstance(self.observation, Observation | None):
            kind = type(self.observation).__name__
            raise MalformedError(f"Step.observation is an Observation (pg.Observation) or None, not {kind}")
        if self.reward is not None:
            object.__setattr__(self, "reward", _number("reward", self.reward))
        metrics = {_metric(name): _number(f"metrics[{name!r}]", value) for name, value in self.metrics.items()}
        object.__setattr__(self, "metrics", metrics)
        object.__setattr__(self, "ended", replace_surrogates(str(self.stop_reason)))


def is_finite_number(value: Any) -> bool:
    """Whether it is a number that an advantage can be made of."""
    number, _ = to_number(value)
    return number is not None


def _number(what: str, value: Any) -> float:
    number, _ = to_number(value)
    if number is None:
        raise MalformedError(
            f"Step has {what} = {quote(value)}: give a finite number, at most {MAX_ABS_REWARD:g} in size"
        )
    return number


def _metric(name: Any) -> str:
    if not isinstance(name, str) or name in RESERVED_METRICS or name.startswith(STOP_METRIC_PREFIX):
        ours = ", ".join(f"environment/{word}" for word in (*RESERVED_METRICS, f"{STOP_METRIC_PREFIX}…"))
        raise MalformedError(
            f"Step.metrics has {quote(name)}: a name is text, and none of {ours}, which are measured already"
        )
    return str(replace_surrogates(name))


def _check_content(content: Any) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list | tuple):
        kind = type(content).__name__
        raise MalformedError(f"Observation.content is text or a list of chat messages, not {kind} {quote(content)}")
    for place, message in enumerate(content, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise MalformedError(
                f"message {place} of an Observation has no role: {quote(message)}. Write it as "
                '{"role": "user", "content": "..."}'
            )


class Environment(Protocol):
    """One episode. Those of a rollout take their turns together, so awaiting a tool holds up nobody's thread.

    One that never waits may say so with `waits = False`: it is then called without a task of its own. One that holds something,
    a connection, may have a `close`, plain or async: it is called once, whatever has ended the episode.
    """

    async def reset(self) -> Observation:
        """What the policy reads first; the same for every sample of an example."""
        ...

    async def step(self, action: Action) -> Step:
        """What the world says to an action."""
        ...


@runtime_checkable
class SupportsTruncation(Protocol):
    """An environment that has something to say when its episode is broken off: between turns, as nothing more can be said."""

    async def on_truncated(self) -> float | None:
        """What is added to the last turn's reward."""
        ...


EnvironmentFactory = Callable[..., Environment]
"""A fresh environment for one episode about an example, `f(example)`; or `f(example, seed)` where the world itself draws.

It is made of the run's seed, the step and the example: the episodes of a group begin in one state, which a resumed run finds again.
"""


def make_environment(environment: EnvironmentFactory, example: Example, seed: int) -> Environment:
    """The environment of one episode; with the seed where there is a parameter of that name."""
    return environment(example, seed=seed) if accepts_seed(environment) else environment(example)


def accepts_seed(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `seed`."""
    try:
        return "seed" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some of C have no signature
        return False


# A prompt and one answer: the world of tasks whose reward functions judge the answer.


@dataclass(frozen=True)
class SingleTurn:
    """Asks the example's prompt; the first answer ends the episode."""

    example: Example
    waits: ClassVar[bool] = False

    async def reset(self) -> Observation:
        return Observation(self.example.prompt)

    async def step(self, action: Action) -> Step:
        return Step()
