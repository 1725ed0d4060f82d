"""Which prompts are sampled at all: what has been solved need not come again, what is too hard can wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from policygrad.core.batch import Batch, required
from policygrad.core.metrics import Max, Mean, Metric, Metrics
from policygrad.core.protocols import Filter, State
from policygrad.errors import ConfigError


class Curriculum(Filter):
    """A filter that takes nothing out of a batch: a rollout passes its prompts over before anything is drawn."""

    needs: ClassVar[frozenset[str]] = frozenset({"example"})

    def __call__(self, batch: Batch) -> Batch:
        return batch


@dataclass(frozen=True)
class NoPositiveResampling(Curriculum):
    """A prompt whose completions reach a mean reward of `threshold` is not sampled again, in this epoch or a later one.

    Its memory is {"solved": the numbers of those prompts} (`Batch.example`). It takes nothing out of a batch: a rollout passes
    its prompts over before anything is drawn. Source: Khatri et al. 2025 (ScaleRL), arXiv:2510.13786.
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ConfigError(
                f"NoPositiveResampling.threshold is a mean reward and must be above 0, not {self.threshold}: prompts that are "
                "never solved would rest too"
            )

    @property
    def formula(self) -> str:
        return f"prompts with mean_g R ≥ {self.threshold:g} do not come again"

    def init(self) -> State:
        return {"solved": []}

    def update(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """By the rewards of all that the policy sampled for a prompt, filtered or not; one that failed counts as 0."""
        solved = (number for number, rate in _rates(batch, self).items() if rate >= self.threshold)
        return {"solved": sorted({*state["solved"], *solved})}

    def at(self, state: State) -> Resting:
        return Resting(self.threshold, frozenset(state["solved"]))


@dataclass(frozen=True)
class Resting(NoPositiveResampling):
    """The same at one rollout: the prompts that rest."""

    solved: frozenset[int] = frozenset()

    @property
    def resting(self) -> frozenset[int]:  # type: ignore[override]
        return self.solved

    def report(self, batch: Batch) -> Metrics:
        """prompts/resting: how many."""
        return {"prompts/resting": Max(float(len(self.solved)))}


@dataclass(frozen=True)
class PassRateBand(Curriculum):
    """A prompt whose completions' mean reward is not between `low` and `high` rests for `rest` rollouts, and each time in a row
    that it is found outside twice as long, `longest` at most: what is solved and what is too hard comes again, seldom.

    Its memory is {"rollouts": how many there were, "outside": {number of a prompt: [the rollout with which it may come again, how
    often in a row it was outside]}}. Source: Bae et al. 2025 (arXiv:2504.03380), who train on prompts between two pass rates; how
    long the others rest is ours.

    Raises:
        ConfigError: a band without an inside, or a rest that is none.
    """

    low: float = 0.0
    high: float = 1.0
    rest: int = 4
    longest: int = 256

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ConfigError(f"PassRateBand.low must be below PassRateBand.high, not {self.low} and {self.high}")
        if not 1 <= self.rest <= self.longest:
            raise ConfigError(
                f"PassRateBand.rest is a number of rollouts from 1 to longest, not {self.rest} with longest {self.longest}"
            )

    @property
    def formula(self) -> str:
        return (
            f"prompts without {self.low:g} < mean_g R < {self.high:g} rest for {self.rest}, {2 * self.rest}, … rollouts"
        )

    def init(self) -> State:
        return {"rollouts": 0, "outside": {}}

    def update(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """By the rewards of all that the policy sampled for a prompt, filtered or not; one that failed counts as 0."""
        now, outside = state["rollouts"] + 1, dict(state["outside"])
        for number, rate in _rates(batch, self).items():
            _, times = outside.pop(str(number), (0, 0))
            if not self.low < rate < self.high:
                outside[str(number)] = [now + min(self.rest * 2**times, self.longest), times + 1]
        return {"rollouts": now, "outside": outside}

    def at(self, state: State) -> Waiting:
        now = state["rollouts"]
        waiting = frozenset(int(number) for number, (until, _) in state["outside"].items() if until > now)
        return Waiting(self.low, self.high, self.rest, self.longest, waiting)


@dataclass(frozen=True)
class Waiting(PassRateBand):
    """The same at one rollout: the prompts that rest."""

    outside: frozenset[int] = frozenset()

    @property
    def resting(self) -> frozenset[int]:  # type: ignore[override]
        return self.outside

    def report(self, batch: Batch) -> Metrics:
        """prompts/resting: how many."""
        return {"prompts/resting": Max(float(len(self.outside)))}


@dataclass(frozen=True)
class MovingLevel(Curriculum):
    """The difficulty of a task that has levels, moved by how well its prompts are solved: a level up when the mean reward of the
    last `rollouts` rollouts at a level is at least `up`, a level down when it is at most `down`.

    Its memory is {"level": the level, "rates": the mean rewards of rollouts at it so far}. Rollouts that were sampled before
    the level moved (`Run.staleness`) do not count. For tasks `curriculum:…`, whose levels are reasoning-gym's own
    (Stojanovski et al. 2025, arXiv:2505.24760); when to move is ours.

    Raises:
        ConfigError: bounds without a middle, no rollouts, a level below the first.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"level", "levels"})
    up: float = 0.7
    down: float = 0.1
    rollouts: int = 2
    start: int = 0

    def __post_init__(self) -> None:
        if not self.down < self.up:
            raise ConfigError(f"MovingLevel.down must be below MovingLevel.up, not {self.down} and {self.up}")
        if self.rollouts < 1 or self.start < 0:
            raise ConfigError(
                f"MovingLevel.rollouts is a number of rollouts, at least 1, and start a level from 0 on, not {self.rollouts} and "
                f"{self.start}"
            )

    @property
    def formula(self) -> str:
        return f"a level up at mean R ≥ {self.up:g} over {self.rollouts} rollouts, down at ≤ {self.down:g}"

    def init(self) -> State:
        return {"level": self.start, "rates": []}

    def update(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """By the rewards of all that the policy sampled at the level, filtered or not; one that failed counts as 0."""
        level, last = required(batch.level, self, "level"), int(required(batch.levels, self, "levels").max()) - 1
        now = min(state["level"], last)
        there = (level == now) if batch.demonstration is None else (level == now) & ~batch.demonstration
        if not there.any():
            return {"level": now, "rates": list(state["rates"])}
        rates = [*state["rates"], float(batch.reward[there].double().mean())][-self.rollouts :]
        if len(rates) < self.rollouts:
            return {"level": now, "rates": rates}
        mean = sum(rates) / len(rates)
        moved = now + 1 if mean >= self.up else now - 1 if mean <= self.down else now
        moved = min(max(moved, 0), last)
        return {"level": moved, "rates": rates if moved == now else []}

    def at(self, state: State) -> AtLevel:
        return AtLevel(self.up, self.down, self.rollouts, self.start, state["level"])


@dataclass(frozen=True)
class AtLevel(MovingLevel):
    """The same at one rollout: the level."""

    now: int = 0

    @property
    def level(self) -> int:  # type: ignore[override]
        return self.now

    def report(self, batch: Batch) -> Metrics:
        """prompts/level: the prompts', a mean."""
        level = required(batch.level, self, "level").double()
        return {"prompts/level": Mean(float(level.sum()), float(len(level)))}


def _rates(batch: Batch, part: Curriculum) -> dict[int, float]:
    """The mean reward of what the policy sampled, by the prompt's number."""
    example = required(batch.example, part, "example")
    own = torch.ones_like(batch.reward, dtype=torch.bool) if batch.demonstration is None else ~batch.demonstration
    numbers, index = torch.unique(example[own], return_inverse=True)
    count = torch.bincount(index, minlength=len(numbers))
    rate = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, index, batch.reward[own].double()) / count
    return dict(zip(numbers.tolist(), rate.tolist(), strict=True))
