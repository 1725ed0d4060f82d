"""Rewards, and the scores of a rollout."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from policygrad.errors import ConfigError

StepScores = tuple[tuple[int, float], ...]
"""(end, score) of each step of a completion; a step ends after `end` characters of its text."""
LoggedMetrics = tuple[tuple[str, float], ...]
"""(name, value) of what a reward function logged, in order; a name may come several times."""
Columns = Mapping[str, Sequence[Any]]  # values of the task's columns by name, one per completion
Feedback = Mapping[str, Any]
"""`score`, a number, and `feedback`, a text about the completion: an error message, a critique."""
RewardResult = Sequence[float | Feedback | Exception | None] | Sequence[StepScores | None]
RewardFunction = Callable[..., RewardResult | Awaitable[RewardResult]]
Function = TypeVar("Function", bound=Callable[..., Any])

COMPLETION_IDS, TRAINER_STATE = "completion_ids", "trainer_state"
EPISODE_COLUMNS = frozenset({COMPLETION_IDS, TRAINER_STATE})
"""What a rollout adds to the task's columns for functions that name them: each completion's token ids, and a TrainerState."""
FAILURE_REASONS = ("raised", "row", "timeout", "nan", "inf", "none", "type", "length", "crashed")


@dataclass(frozen=True)
class TrainerState:
    """Where the run is, for reward functions with an argument `trainer_state`, as TRL's have."""

    global_step: int
    """Number of finished steps; 0 in evaluations, which are compared with each other."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state has no {name!r} here: it has `global_step`, the number of finished steps, alone"
        )


@dataclass(frozen=True)
class Reward:
    """A reward function and its weight in the sum.

    `function(prompts, completions, **columns)` gets lists of length 1, or the full batch when `batched`, and returns one number (or
    None: "does not apply") per completion; it may be `async`. In place of a number it may return `{"score": number, "feedback":
    text}`, whose text a reference can read (`Reference.templates`).
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    batched: bool = False
    timeout: float | None = None  # seconds per call; None = the pool's
    process_reward: bool = False  # the function returns the steps of each completion, a list of (end, score)
    dedicated_worker: bool = False
    """Load a batched function in one worker of its own, as it takes much memory (a reward model)."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"reward {self.name!r}: a function is needed, got {type(self.function).__name__}")
        if not math.isfinite(self.weight):
            raise ConfigError(f"reward {self.name!r}: the weight {self.weight} is not a finite number")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ConfigError(f"reward {self.name!r}: the timeout {self.timeout} must be positive and finite, or None")
        if self.dedicated_worker and not self.batched:
            raise ConfigError(f"reward {self.name!r}: only a batched function can have a dedicated worker")


@dataclass(frozen=True)
class LoggedRewards:
    """What a reward function returned, and each (name, value) that it logged meanwhile."""

    rewards: Any
    metrics: LoggedMetrics


@dataclass(frozen=True)
class RewardScores:
    """Rewards of a rollout, in the order of its completions."""

    total: list[float | None]  # weighted sum of the parts that apply; None = no reward for this completion
    parts: dict[str, list[float | None]]  # by reward name; None = failed or does not apply
    failures: dict[str, int] = field(default_factory=dict)  # completions per function, by reason (FAILURE_REASONS)
    messages: list[str] = field(default_factory=list)  # first message of each distinct failure
    weights: dict[str, float] = field(default_factory=dict)  # by reward name; 1 where none is given
    feedback: list[str] = field(default_factory=list)  # what the functions wrote about each completion; [] if nothing
    logged: dict[str, list[float]] = field(default_factory=dict)  # by name: the values that functions logged


@dataclass(frozen=True)
class ProcessScores:
    """Steps of a rollout's completions, in their order."""

    steps: list[StepScores | None]  # of all process rewards, weighted and sorted by end; None = one of them failed
    parts: dict[str, list[float]]  # by reward name: the score of every step, unweighted
    failures: dict[str, int]  # as in RewardScores
    messages: list[str]


def reward(
    *,
    batch: bool = False,
    timeout: float | None = None,
    prepare: Callable[[], object] | None = None,
    process: bool = False,
) -> Callable[[Function], Function]:
    """Decorate a reward function with options.

    Args:
        batch: Pass all completions in one call, as a function that calls a server wants; it then succeeds or fails for all of them.
        timeout: Seconds per call.
        prepare: Called once in every worker before the first sample, without a timeout, for slow imports.
        process: The function returns, per completion, a list of (end, score): a step ends after `end` characters of the text.
    """

    def mark(function: Function) -> Function:
        function.reward_options = {"batched": batch, "timeout": timeout, "process_reward": process}  # type: ignore[attr-defined]
        if prepare is not None:
            function.reward_prepare = prepare  # type: ignore[attr-defined]
        return function

    return mark


# Options in a reward's name, `name=value,name=value`.

T = TypeVar("T")


def parse_reward_options(kind: type[T], reward: str, text: str, **fixed: Any) -> T:
    """Create a dataclass from options, its fields that are compared.

    Args:
        reward: Its name, for messages.
        fixed: Values of fields that are not options.

    Raises:
        ConfigError: An unknown option or an impossible value.
    """
    options = {field.name: field for field in fields(kind) if field.compare and field.name not in fixed}  # type: ignore[arg-type]
    types, values = get_type_hints(kind), dict(fixed)
    for option in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in option.partition("="))
        if name not in options:
            raise ConfigError(
                f"reward {reward!r} has no option {name!r}; write {reward}:{','.join(f'{n}=…' for n in options)}"
            )
        try:
            values[name] = _parse_value(types[name], value)
        except ValueError as error:
            raise ConfigError(f"reward {reward!r}: {name} is {error}, not {value!r}") from None
    required = [name for name, field in options.items() if field.default is field.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise ConfigError(
            f"reward {reward!r} needs {' and '.join(missing)}: {reward}:…,{','.join(f'{n}=…' for n in missing)}"
        )
    return kind(**values)


def _parse_value(kind: Any, text: str) -> Any:
    """Parse a value of this type. Raises ValueError with a text for "NAME is …, not VALUE"."""
    if get_origin(kind) is UnionType:  # X | None
        return None if text == "none" else _parse_value(get_args(kind)[0], text)
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError(" or ".join(get_args(kind)))
        return text
    if kind is bool:
        if text.lower() not in ("yes", "no", "true", "false"):
            raise ValueError("yes or no")
        return text.lower() in ("yes", "true")
    if kind == tuple[str, ...]:
        return tuple(filter(None, text.split("+")))
    try:
        if kind != tuple[float, float]:
            return kind(text)
        low, high = map(float, text.split(".."))
    except ValueError:
        raise ValueError({int: "a whole number", float: "a number"}.get(kind, "LOW..HIGH")) from None
    if not -1e9 < low < high < 1e9:
        raise ValueError("LOW..HIGH")
    return low, high
