"""Who does a run's work where that is not this process and those that it starts: the actors of a cluster, say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from policygrad.environments import EnvironmentFactory
from policygrad.models.tokenizer import Tokenizer
from policygrad.rewards import Reward
from policygrad.rewards.base import Pool
from policygrad.rewards.config import Rewarding
from policygrad.rewards.waits import Phase
from policygrad.samplers.base import Sampler

if TYPE_CHECKING:  # torch.distributed takes a while to import
    from policygrad.learners.fsdp.others import Places


@dataclass(frozen=True)
class Hosts:
    """What is None is done here. None of it is part of the run: where work is done changes nothing that comes of it."""

    sampler: Callable[[nn.Module, Tokenizer], Sampler] | None = None
    """Makes what draws completions, in the place of this process; not that of an engine."""
    pool: Callable[[Sequence[Reward], Rewarding, Phase], Pool] | None = None
    """Makes what judges."""
    environment: Callable[[EnvironmentFactory], EnvironmentFactory] | None = None
    """From what makes a run's environments to what makes them elsewhere."""
    places: Places | None = None
    """Where the processes that learn together are."""
    words: str = ""
    """The options that have a command do it there."""


HERE = Hosts()
