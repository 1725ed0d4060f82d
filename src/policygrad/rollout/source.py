"""Where a rollout reads from: a task's examples, a tokenizer, a score; as narrow protocols, so that any will do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from policygrad.samplers.base import Group, Prompt

TRAIN, EVALUATE, VALUES = 0, 1, 2
"""Streams of random numbers, the second entry of a prompt's key."""


class Example(Protocol):
    """What a task yields: a prompt and the columns its reward reads."""

    @property
    def prompt(self) -> Any: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...


class Scores(Protocol):
    """What a reward pool says of a list of completions."""

    @property
    def total(self) -> Sequence[float | None]: ...
    @property
    def parts(self) -> Mapping[str, Sequence[float | None]]: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    @property
    def messages(self) -> Sequence[str]: ...


Steps = tuple[tuple[int, float], ...]
"""(end in characters of the text, score) of each step."""


class StepScores(Protocol):
    """What a reward pool says of the steps of a list of completions."""

    @property
    def steps(self) -> Sequence[Steps | None]: ...
    @property
    def parts(self) -> Mapping[str, Sequence[float]]: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    @property
    def messages(self) -> Sequence[str]: ...


class Encoder(Protocol):
    """Text to tokens and back."""

    def encode(self, prompt: Any, max_tokens: int, source: str = ...) -> Tensor: ...
    def decode(self, tokens: Any) -> str: ...


Score = Callable[[Sequence[Any], Sequence[str], Mapping[str, Sequence[Any]]], Scores]
ScoreSteps = Callable[[Sequence[Any], Sequence[str], Mapping[str, Sequence[Any]]], StepScores]


@dataclass(frozen=True, eq=False)
class Source:
    """Everything a rollout reads from, but for the weights: `examples(i)` is the task's i-th training example."""

    examples: Callable[[int], Example]
    tokenizer: Encoder
    score: Score
    seed: int
    steps: ScoreSteps | None = None
    """Where steps end and what they are worth; None = a completion is not looked at in steps."""


def make_prompt(source: Source, example: Example, max_tokens: int, stream: int, step: int, index: int) -> Prompt:
    """The example as token ids, with the key its samples draw from."""
    where = getattr(example, "source", "") or f"{'held-out' if stream == EVALUATE else 'training'} prompt {index}"
    return Prompt(source.tokenizer.encode(example.prompt, max_tokens, where), (source.seed, stream, step, index))


def score_groups(source: Source, examples: Sequence[Example], groups: Sequence[Group]) -> tuple[list[str], Scores]:
    """Texts and scores, completion by completion in the groups' order. Every column of an example reaches the reward."""
    texts = [source.tokenizer.decode(c.tokens) for g in groups for c in g.completions]
    return texts, source.score(*samples_of(examples, groups, texts))


def step_scores(
    source: Source, examples: Sequence[Example], groups: Sequence[Group], texts: Sequence[str]
) -> StepScores | None:
    """The steps of the same completions; None where the source has none."""
    return None if source.steps is None else source.steps(*samples_of(examples, groups, texts))


def samples_of(
    examples: Sequence[Example], groups: Sequence[Group], texts: Sequence[str]
) -> tuple[list[Any], Sequence[str], dict[str, list[Any]]]:
    """What a reward is given: prompts, texts and columns, one of each per completion."""
    repeated = [e for e, g in zip(examples, groups, strict=True) for _ in g.completions]
    names = dict.fromkeys(name for e in repeated for name in e.columns)
    return [e.prompt for e in repeated], texts, {name: [e.columns.get(name) for e in repeated] for name in names}
