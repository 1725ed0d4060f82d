"""What fills the fields of a batch that an algorithm's parts need beyond its episodes: one provider for each kind of field.

A field that any part may need has its provider in `FIELDS`; a part that alone knows how its fields are filled names the provider
itself (`Part.providers`). A run may give others, such as values estimated before. Nothing is imported before it is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from policygrad.core.algorithm import Algorithm
from policygrad.core.base import Part
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics
from policygrad.errors import ConfigError
from policygrad.models.tokenizer import Tokenizer
from policygrad.rollout.scoring import ScoreGroups, ScoringResult
from policygrad.rollout.trajectory import EpisodeGroup, EpisodeSpec
from policygrad.samplers.base import SamplingParams
from policygrad.utils.progress import ProgressCallback
from policygrad.utils.user_code import load_object

FIELDS: dict[str, tuple[str, ...]] = {
    "observation": ("policygrad.rollout.observations:Observations",),
    "demonstration": ("policygrad.rollout.demonstrations:Demonstrations",),
    "step_end": ("policygrad.rollout.step_marks:StepEnds", "policygrad.rollout.step_marks:StepScores"),
    "turn_state": ("policygrad.rollout.turn_states:TurnStates",),
    "baseline": ("policygrad.rollout.greedy_baseline:GreedyBaselines",),
}
"""Field -> its providers, as module:class."""


class Stage(IntEnum):
    """When a provider acts. The filters stand between `MARKS` and `SCORES`."""

    EPISODES = 0
    """Further rows, as if they were episodes."""
    MARKS = 1
    """What filters may read: not yet the rewards of steps and turns."""
    SCORES = 2
    """Rewards of steps and turns in place of complete episodes'."""
    SAMPLES = 3
    """Further samples for the rows."""
    ROWS = 4
    """Other rows in place of these."""
    READINGS = 5
    """What other models read of the rows that are trained on. From here on another thread may sample."""
    TEACHING = 6
    """What teachers say of them."""


PlayEpisodes = Callable[[list[EpisodeSpec], int], list[EpisodeGroup]]
"""Plays the episodes of these specs, a number of samples for each, and returns them without scores."""


@dataclass(frozen=True, eq=False)
class ProviderContext:
    """What a provider works with."""

    needs: frozenset[str]
    """All fields that the algorithm's parts need."""
    step: int
    sampling: SamplingParams
    tokenizer: Tokenizer
    play_with: Callable[[list[EpisodeSpec], int, SamplingParams], list[EpisodeGroup]]
    """Plays episodes with another sampling than the step's."""
    score: ScoreGroups

    def play(self, specs: list[EpisodeSpec], samples_per_prompt: int) -> list[EpisodeGroup]:
        """Play episodes with the step's sampling."""
        return self.play_with(specs, samples_per_prompt, self.sampling)


@dataclass(frozen=True, eq=False)
class Collected:
    """A step so far: the batch, the episodes of its rows, and what scoring has said."""

    batch: Batch
    groups: list[EpisodeGroup]
    scoring: ScoringResult = field(default_factory=ScoringResult)

    def with_result(self, batch: Batch, result: ScoringResult, groups: Sequence[EpisodeGroup] | None = None) -> Self:
        """Return it with another batch, and what was said meanwhile. groups: None = the same."""
        return replace(
            self,
            batch=batch,
            groups=self.groups if groups is None else list(groups),
            scoring=self.scoring | result,
        )


class FieldProvider(ABC):
    """Fills fields of a batch."""

    fields: ClassVar[frozenset[str]] = frozenset()
    """Those that no provider in `FIELDS` has to fill then."""
    stage: ClassVar[Stage] = Stage.SAMPLES
    single_answers: ClassVar[tuple[str, str] | None] = None
    """Why it needs episodes of one completion each, and what to use instead; None = any episodes will do."""

    @classmethod
    def for_part(cls, part: Part) -> FieldProvider:
        """Return the provider of a part that names this class."""
        return cls(part)  # type: ignore[call-arg]  # a dataclass of the part

    def check(self, *, is_single_answer: bool) -> None:
        """Raise ConfigError if the run's episodes are not of the kind that it needs."""
        if self.single_answers is not None and not is_single_answer:
            reason, alternative = self.single_answers
            raise ConfigError(
                f"{reason}, which an environment's episodes do not allow: use a task of prompts and answers, or {alternative}"
            )

    def prepare_tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer for the step's episodes."""
        return tokenizer

    def time_before(self, step: int) -> Metrics:
        """Return the seconds that it took for a step before the step's rollout, under the name that the log has for them."""
        return {}

    @abstractmethod
    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        """Fill the fields."""


@dataclass(frozen=True)
class RunPlan:
    """What is known of a run before it begins."""

    algorithm: Algorithm
    steps: int
    prompts_per_step: int
    sampling: SamplingParams
    num_rows: int
    """Rows of the task's data; 0 for a task without end."""
    tokens: int | None
    """The run's token budget."""


@runtime_checkable
class PreparesRun(Protocol):
    """A class of providers that are made once, before the first update, from what the initial policy samples."""

    def describe_run(self, part: Any, plan: RunPlan) -> str:
        """Return what is made, for the run's description. Raises ConfigError if it does not fit the run."""

    def prepare_run(
        self,
        part: Any,
        plan: RunPlan,
        rollouter: Any,
        folder: Path,
        *,
        is_initial: bool,
        progress: ProgressCallback,
    ) -> tuple[Any, tuple[str, ...]]:
        """Make it, or read what the run's folder has of it.

        Args:
            rollouter: A `policygrad.rollout.rollouter.Rollouter`.
            is_initial: True if the current policy is the initial one.

        Returns:
            The rollouter with its provider, and messages of failed rewards.
        """


def find_preparations(algorithm: Algorithm) -> list[tuple[Part, PreparesRun]]:
    """Return the parts whose providers are made before the first update, with what makes them."""
    named = ((part, load_provider(part, name)) for part in algorithm.parts() for name in part.providers)
    return [(part, kind) for part, kind in named if isinstance(kind, PreparesRun)]


def load_provider(part: Part, named: str | type) -> Any:
    """Return the class of a part's provider, which is given or named."""
    return load_object(named, f"providers of {type(part).__name__}") if isinstance(named, str) else named


def choose_providers(algorithm: Algorithm, needs: Iterable[str], given: Sequence[FieldProvider]) -> list[FieldProvider]:
    """Return the providers that a step needs, in the order in which they act.

    Args:
        needs: Fields that are needed, by the parts or otherwise.
        given: Those of the run, which stand for parts' providers of the same class.
    """
    chosen = list(given)
    for part in algorithm.parts():
        for named in part.providers:
            kind = load_provider(part, named)
            if not any(isinstance(provider, kind) for provider in given):
                chosen.append(kind.for_part(part))
    filled = frozenset[str]().union(*(provider.fields for provider in chosen))
    for name, providers in FIELDS.items():
        if name in needs and name not in filled:
            chosen += [load_object(provider, name)() for provider in providers]
    return sorted(chosen, key=lambda provider: provider.stage)


def run_providers(
    providers: Sequence[FieldProvider], collected: Collected, context: ProviderContext, first: Stage, last: Stage
) -> Collected:
    """Let the providers of the stages from `first` to `last` act."""
    for provider in providers:
        if first <= provider.stage <= last:
            collected = provider.provide(collected, context)
    return collected
