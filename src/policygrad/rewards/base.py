"""What a reward is, and what scoring a rollout yields."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from policygrad.errors import ConfigError

StepScores = tuple[tuple[int, float], ...]
"""Where the steps of a completion end, in characters of its text, each with its score."""
RewardResult = Sequence[float | Exception | None] | Sequence[StepScores | None]
RewardFunction = Callable[..., RewardResult | Awaitable[RewardResult]]
Function = TypeVar("Function", bound=Callable[..., Any])

FAILURE_REASONS = ("raised", "row", "timeout", "nan", "inf", "none", "type", "length", "crashed")


@dataclass(frozen=True)
class Reward:
    """A reward function with its place in the sum.

    `function(prompts, completions, **columns)` gets lists of length 1, or the whole batch when `batched`, and returns
    one number (or None: "does not apply") per completion; it may be `async`. A `process_reward` returns the completion's
    steps instead, a list of (end, score). `budget` is the time in seconds that one call may take, None = the pool's.
    `alone`: a batched function that one worker of its own loads, since it takes much memory (a reward model).
    """

    name: str
    function: RewardFunction
    weight: float = 1.0
    batched: bool = False
    timeout: float | None = None
    process_reward: bool = False
    dedicated_worker: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"reward {self.name!r}: a function is needed, got {type(self.function).__name__}")
        if not math.isfinite(self.weight):
            raise ConfigError(f"reward {self.name!r}: the weight {self.weight} is not a finite number")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ConfigError(
                f"reward {self.name!r}: the time budget {self.timeout} s must be positive and finite, or None"
            )
        if self.dedicated_worker and not self.batched:
            raise ConfigError(f"reward {self.name!r}: a worker of its own is for a batched function")


@dataclass(frozen=True)
class RewardScores:
    """Rewards of a rollout, in the order of its completions."""

    total: list[float | None]  # weighted sum of the parts that apply; None = no reward for this completion
    parts: dict[str, list[float | None]]  # by reward name; None = failed or does not apply
    failures: dict[str, int] = field(
        default_factory=dict
    )  # reason (one of FAILURES) -> completions, per reward function
    messages: list[str] = field(default_factory=list)  # the first of each distinct failure, for the log
    weights: dict[str, float] = field(
        default_factory=dict
    )  # by reward name, of the parts in the total; 1 where none is


@dataclass(frozen=True)
class ProcessScores:
    """The steps of a rollout's completions, in their order."""

    steps: list[
        StepScores | None
    ]  # of all process rewards together, scores weighted, by end; None = one of them failed
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
    """Decorate a reward function to ask for the whole batch, for another time budget, or for preparation.

    `batch`: one call gets all completions (what calls a server wants this); it then succeeds or fails as a whole.
    `budget`: seconds that one call may take. `prepare`: called once in every worker before the first sample, outside of
    any budget, for heavy imports. `process`: it returns, per completion, a list of (end, score): a step ends after `end`
    characters of the completion's text.
    """

    def mark(function: Function) -> Function:
        function.reward_options = {"batched": batch, "budget": timeout, "process_reward": process}  # type: ignore[attr-defined]
        if prepare is not None:
            function.reward_prepare = prepare  # type: ignore[attr-defined]
        return function

    return mark


# `name=value,name=value` behind a reward's name, read into a dataclass.

T = TypeVar("T")
OptionReader = Callable[[str], Any]
"""From a word to its value. Raises ValueError, whose text says what is needed."""


def parse_reward_options(kind: type[T], reward: str, text: str, readers: Mapping[str, OptionReader], **fixed: Any) -> T:
    """An instance of a dataclass. reward: its name, for messages. readers: of the options that are not words. given: fields that
    are no options, and neither are those that are not compared.

    Raises:
        ConfigError: an option that there is not, or a value that it cannot have.
    """
    option_names = [field.name for field in fields(kind) if field.compare and field.name not in fixed]  # type: ignore[arg-type]
    values = dict(fixed)
    for option in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (word.strip() for word in option.partition("="))
        if name not in option_names:
            raise ConfigError(
                f"reward {reward!r}: there is no option {name!r}; write {reward}:{','.join(f'{n}=…' for n in option_names)}"
            )
        try:
            values[name] = readers.get(name, str)(value)
        except ValueError as error:
            raise ConfigError(f"reward {reward!r}: {name} is {error}, not {value!r}") from None
    needed = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]  # type: ignore[arg-type]
    if missing := [name for name in needed if name not in values]:
        raise ConfigError(
            f"reward {reward!r} needs {' and '.join(missing)}: {reward}:…,{','.join(f'{n}=…' for n in missing)}"
        )
    return kind(**values)


def parse_int(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def parse_float(text: str) -> float:
    """A number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def parse_bool(text: str) -> bool:
    """yes or no."""
    if text.lower() not in ("yes", "no", "true", "false"):
        raise ValueError("yes or no")
    return text.lower() in ("yes", "true")


def parse_choice(*words: str) -> OptionReader:
    """One of these words."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(" or ".join(words))
        return text

    return read


def find_option(text: str, name: str) -> str | None:
    """What `parse_reward_options` would take for this option."""
    pairs = [option.partition("=") for option in text.split(",")]
    return next((value.strip() for word, equals, value in reversed(pairs) if equals and word.strip() == name), None)
