"""Who runs the episodes of a kind of environment, and what a run must know of that kind before it begins one.

Most kinds are functions of an example, whose episodes take turns with the policy (`rollout/episodes.py`). A kind whose episodes run
otherwise, such as games of several players or programs that send requests, has a method `runner`: nothing else needs to know it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, runtime_checkable

from policygrad.models.tokenizer import Tokenizer
from policygrad.rollout.environment import DEFAULT_TIMEOUT, Environment
from policygrad.rollout.environment_calls import EnvironmentCalls
from policygrad.rollout.episodes import run_episodes
from policygrad.rollout.trajectory import EpisodeGroup, EpisodeSpec
from policygrad.samplers.base import Sampler, SamplingParams
from policygrad.utils.progress import ProgressCallback, ignore_progress


@dataclass(frozen=True, eq=False)
class EpisodeContext:
    """What a runner samples with, and its limits."""

    sampler: Sampler
    tokenizer: Tokenizer
    timeout: float = DEFAULT_TIMEOUT
    """Seconds allowed for one call of an environment."""
    progress: ProgressCallback = ignore_progress
    """Receives what is being waited for."""
    tolerate_timeouts: bool = False
    """Continue even if a method of the environment times out in every call."""

    def make_calls(self) -> EnvironmentCalls:
        """Return what environments are called through, for one rollout."""
        return EnvironmentCalls(self.timeout, self.progress, tolerate_timeouts=self.tolerate_timeouts)


EpisodeRunner = Callable[[Sequence[EpisodeSpec], int, SamplingParams], Coroutine[Any, Any, list[EpisodeGroup]]]
"""Runs a number of episodes for each spec; returns one group per spec, in their order, without scores of reward functions."""


@runtime_checkable
class RunsEpisodes(Protocol):
    """A kind of environment with a runner of its own."""

    def runner(self, context: EpisodeContext) -> EpisodeRunner:
        """Return what runs its episodes."""


@runtime_checkable
class UsesModels(Protocol):
    """A kind of environment in which other models than the policy take part."""

    def with_models(self, load: Callable[[str], EpisodeContext]) -> Self:
        """Return it with its models loaded: by name, each with its tokenizer."""


@runtime_checkable
class TakesVariables(Protocol):
    """A kind of environment whose episodes are processes of their own, which get the environment variables that are named."""

    def with_variables(self, names: Sequence[str]) -> Self:
        """Return it with further names of variables that are passed on."""


EnvironmentKind = Callable[..., Environment] | RunsEpisodes
"""What a run is given as its environment: an `EnvironmentFactory`, or a kind with a runner of its own."""


def make_runner(kind: EnvironmentKind, context: EpisodeContext) -> EpisodeRunner:
    """Return what runs the episodes of a kind of environment."""
    if isinstance(kind, RunsEpisodes):
        return kind.runner(context)
    return partial(
        run_episodes, sampler=context.sampler, encoder=context.tokenizer, environment=kind, calls=context.make_calls()
    )
