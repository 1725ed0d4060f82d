"""The environment protocol: one episode, in text. Token ids stay with the rollout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

from policygrad.errors import EngineError, ModelError
from policygrad.models.chat.control_tokens import replace_surrogates
from policygrad.models.chat.turns import AssistantMessage, ToolCall, ToolCallParser
from policygrad.rewards.workers.messages import MAX_ABS_REWARD, MAX_FEEDBACK, quote, to_number
from policygrad.tasks.base import Example, Prompt

ENVIRONMENT, TOKENS, CONTEXT = "environment", "tokens", "context"
"""Reasons for an episode's end: its environment, the token budget, the model's context."""
INITIAL = "initial"
"""Name of the policy as it was before training, where another model takes part in an episode."""
FAILED = "failed"  # the reason when an environment raised or timed out: the episode has no reward and is not trained on
DEFAULT_TIMEOUT = 300.0  # seconds that one call of an environment may take
RESERVED_METRICS, STOP_METRIC_PREFIX = ("turns", "branches", "branched_ratio"), "ended_"
"""Metrics recorded for every environment, and the prefix of those that count the reasons for an end; not for `Step.metrics`."""


class MalformedError(EngineError):
    """An invalid Observation or Step. The episode adds the name of the environment and the row."""


@dataclass(frozen=True)
class Observation:
    """What the policy reads next: plain text, or chat messages that the tokenizer's template renders.

    Lone surrogates, which no tokenizer accepts, become U+FFFD.

    Raises:
        EngineError: Content that is neither text nor messages, or a message without a role.
    """

    content: Prompt
    tools: Sequence[Mapping[str, Any]] = ()
    """Tool schemas for the chat template; read from the first observation of an episode."""
    state: Hashable | None = None
    """Identifies the environment's state. Algorithms that compare turns (gigpo) group those of a group's episodes that begin in
    equal states. None = the content identifies it."""

    def __post_init__(self) -> None:
        content: Any = self.content  # a user's
        if not isinstance(content, str | list | tuple):
            kind = type(content).__name__
            raise MalformedError(
                f"Observation.content must be text or a list of chat messages, not {kind} {quote(content)}"
            )
        for number, message in enumerate(() if isinstance(content, str) else content, 1):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise MalformedError(
                    f"message {number} of an Observation has no role: {quote(message)}. Write it as "
                    '{"role": "user", "content": "..."}'
                )
        object.__setattr__(self, "content", replace_surrogates(self.content))
        object.__setattr__(self, "tools", replace_surrogates(self.tools))


@dataclass(frozen=True)
class Action:
    """One turn of the policy."""

    text: str
    """The decoded tokens, without end and padding tokens."""
    truncated: bool = False
    """True when the token budget ended the turn."""
    reader: Callable[[str], AssistantMessage] | None = None
    """Reads the text in the model's format; None = in that of models without one (`hermes`)."""
    has_tools: bool = False
    """True when the prompt lists tools, so that a call in another format than the model's is one that cannot be read."""

    @cached_property
    def message(self) -> AssistantMessage:
        """The turn as a message: its content, reasoning and tool calls."""
        if self.reader is not None:
            return self.reader(self.text)
        from policygrad.models.chat.formats import TAGGED

        return TAGGED.parse(self.text)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: the message, and not what reads it."""
        return {**vars(self), "message": self.message, "reader": None}

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls in the text, none in an unfinished thought; those that cannot be parsed carry an error.

        Raises:
            ModelError: The model's format is unknown.
        """
        if self.message.unread:
            raise ModelError(self.message.unread)
        if self.has_tools and not self.message.calls:
            from policygrad.models.chat.formats import find_foreign_mark

            if mark := find_foreign_mark(self.message.content):
                return (ToolCall(error=f"{mark!r} is not how this model calls tools: use the format of the prompt"),)
        return self.message.calls

    def parse_calls(self, parser: ToolCallParser) -> tuple[ToolCall, ...]:
        """Return the tool calls as another parser reads them."""
        return () if self.message.is_thinking else parser(self.text)


@dataclass(frozen=True)
class Step:
    """The result of an action. The episode continues if there is an observation.

    Raises:
        EngineError: An invalid observation, a reward or metric that is not a finite number, or a reserved metric name.
    """

    observation: Observation | None = None
    """The next observation; None = the episode is over."""
    reward: float | None = None
    """Reward of this turn, any real number (int, bool and NumPy scalars too). An episode's rewards are added up, together with
    those of the run's reward functions. None = no reward from the environment."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log as environment/NAME: summed over an episode's turns, averaged over the episodes that have them."""
    stop_reason: str = ENVIRONMENT
    """Why the episode ended, one word for metrics and logs; used when there is no observation."""
    feedback: str = ""
    """What there is to say about the episode, such as an error message, for algorithms that read it (`sdpo`) and logs."""

    def __post_init__(self) -> None:
        if not isinstance(self.observation, Observation | None):
            kind = type(self.observation).__name__
            raise MalformedError(f"Step.observation must be an Observation (pg.Observation) or None, not {kind}")
        if self.reward is not None:
            object.__setattr__(self, "reward", _require_finite("reward", self.reward))
        metrics = {}
        for name, value in self.metrics.items():
            if not isinstance(name, str) or name in RESERVED_METRICS or name.startswith(STOP_METRIC_PREFIX):
                reserved = ", ".join(f"environment/{word}" for word in (*RESERVED_METRICS, f"{STOP_METRIC_PREFIX}…"))
                raise MalformedError(f"Step.metrics has the name {quote(name)}: use text other than {reserved}")
            metrics[str(replace_surrogates(name))] = _require_finite(f"metrics[{name!r}]", value)
        object.__setattr__(self, "metrics", metrics)
        object.__setattr__(self, "stop_reason", replace_surrogates(str(self.stop_reason)))
        object.__setattr__(self, "feedback", str(replace_surrogates(str(self.feedback)))[:MAX_FEEDBACK])


def is_finite_number(value: Any) -> bool:
    """Return True for a number from which an advantage can be computed."""
    return to_number(value)[0] is not None


def _require_finite(what: str, value: Any) -> float:
    number, _ = to_number(value)
    if number is None:
        raise MalformedError(f"Step has {what} = {quote(value)}: give a finite number up to {MAX_ABS_REWARD:g} in size")
    return number


class Environment(Protocol):
    """One episode. The episodes of a rollout run concurrently, so awaiting a tool blocks no other episode.

    An environment that never awaits may set `waits = False`: it is then called without a task of its own. One that holds a
    resource, such as a connection, may have a method `close`, plain or async, which is called once however the episode ends.

    `reward_columns`, a tuple of names, lets the run's reward functions see its state: the attributes of these names, as they are at
    the episode's end, reach them as columns beside the task's. They hold plain data (numbers, text, lists, dicts).
    """

    async def reset(self) -> Observation:
        """Return the first observation, which must be the same for every sample of an example."""

    async def step(self, action: Action) -> Step:
        """Apply an action."""


@runtime_checkable
class SupportsTruncation(Protocol):
    """An environment that is notified when its episode is cut off between turns by the token budget or the context."""

    async def on_truncated(self) -> float | None:
        """Return a number to add to the last turn's reward, or None."""


@runtime_checkable
class KnowsOpening(Protocol):
    """A factory that knows what its episodes begin with before one is begun, so that a run checks its rows when it starts."""

    def opening(self, example: Example) -> Observation | None:
        """Return the first observation of an example's episodes; None = it is known only in an episode."""


@runtime_checkable
class ParsesCalls(Protocol):
    """A factory whose episodes may read tool calls by a parser of their own; None = in the model's format."""

    @property
    def parser(self) -> object: ...


@dataclass(frozen=True)
class Capabilities:
    """What the episodes of a kind of environment are like, as far as a run must know before one begins: its attribute
    `capabilities`."""

    is_single_answer: bool = False
    """An episode is one completion of the example's prompt, so that another one can be scored in its place, its beginning be
    continued, and another prompt be put before it."""
    has_known_columns: bool = False
    """Reward functions are given the example's columns and its `reward_columns`, which are known before an episode."""
    is_repeatable: bool = True
    """The same requests are sampled together whenever an episode is repeated: not where they come when a program sends them."""
    plays_itself: bool = False
    """Several roles of the policy play against each other, and are compared within their role."""
    stays_because: str = ""
    """Why its episodes run where the trainer does, and not in the actors of a cluster; "" = they run anywhere."""


EnvironmentFactory = Callable[..., Environment]
"""Creates the environment of one episode: `f(example)`, or `f(example, seed)` when the environment itself is random.

The seed is derived from the run's seed, the step and the example: the episodes of a group begin in the same state, and a resumed
run reproduces it. A factory that is a context manager is entered when a run starts and left when it ends.
"""


def find_capabilities(kind: object) -> Capabilities:
    """Return what a kind of environment says of its episodes; the default if it says nothing."""
    capabilities = getattr(kind, "capabilities", None)
    return capabilities if isinstance(capabilities, Capabilities) else Capabilities()


def make_environment(factory: EnvironmentFactory, example: Example, seed: int) -> Environment:
    """Create the environment of one episode, passing the seed if the factory accepts one."""
    return factory(example, seed=seed) if accepts_seed(factory) else factory(example)


def accepts_seed(function: Callable[..., Any]) -> bool:
    """Return True when a function has a parameter `seed`."""
    try:
        return "seed" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return False


@dataclass(frozen=True)
class SingleTurn:
    """The default environment: shows the example's prompt, and ends with the first action. Reward functions score it."""

    example: Example
    waits: ClassVar[bool] = False
    capabilities: ClassVar[Capabilities] = Capabilities(is_single_answer=True, has_known_columns=True)

    def __init_subclass__(cls) -> None:
        if "capabilities" not in vars(cls):  # a subclass may take further turns, and says so itself if it does not
            cls.capabilities = Capabilities()

    async def reset(self) -> Observation:
        return Observation(self.example.prompt, self.example.tools)

    async def step(self, action: Action) -> Step:
        return Step()
