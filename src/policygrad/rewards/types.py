"""What a reward is, and what scoring a rollout yields."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from policygrad.errors import ConfigError

ScoredSteps = tuple[tuple[int, float], ...]
"""Where the steps of a completion end, in characters of its text, each with its score."""
Answer = Sequence[float | Exception | None] | Sequence[ScoredSteps | None]
RewardFunction = Callable[..., Answer | Awaitable[Answer]]
Function = TypeVar("Function", bound=Callable[..., Any])

FAILURES = ("raised", "row", "timeout", "nan", "inf", "none", "type", "length", "crashed")


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
    budget: float | None = None
    process_reward: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"reward {self.name!r}: a function is needed, got {type(self.function).__name__}")
        if not math.isfinite(self.weight):
            raise ConfigError(f"reward {self.name!r}: the weight {self.weight} is not a finite number")
        if self.budget is not None and not 0 < self.budget < math.inf:
            raise ConfigError(
                f"reward {self.name!r}: the time budget {self.budget} s must be positive and finite, or None"
            )
        if self.alone and not self.batched:
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
        ScoredSteps | None
    ]  # of all process rewards together, scores weighted, by end; None = one of them failed
    parts: dict[str, list[float]]  # by reward name: the score of every step, unweighted
    failures: dict[str, int]  # as in RewardScores
    messages: list[str]


def reward(
    *,
    batch: bool = False,
    budget: float | None = None,
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
        function.reward_options = {"batched": batch, "budget": budget, "process_reward": process}  # type: ignore[attr-defined]
        if prepare is not None:
            function.reward_prepare = prepare  # type: ignore[attr-defined]
        return function

    return mark
