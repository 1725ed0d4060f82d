"""Where parts of a run's work are done, such as in the actors of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from policygrad.learners.base import Learner
from policygrad.models.tokenizer import Tokenizer
from policygrad.rewards.base import Reward
from policygrad.rewards.config import RewardConfig
from policygrad.rollout.environment import EnvironmentFactory
from policygrad.samplers.base import Sampler
from policygrad.training.config.run import Run
from policygrad.utils.progress import ProgressCallback

if TYPE_CHECKING:
    from policygrad.learners.fsdp.processes import WorkerLauncher
    from policygrad.rewards.workers.pool import RewardScorer

SamplerFactory = Callable[[nn.Module, Tokenizer], Sampler]  # makes a sampler from the run's model and tokenizer
LearnerFactory = Callable[[nn.Module, Run], Learner]
"""Makes a learner from the run's model and configuration, as `policygrad.training.learner_setup.make_local_learner` does."""


@dataclass(frozen=True)
class Placement:
    """Where parts of the work are done, such as in the actors of a cluster. None = in this process and those it starts.

    It is not part of the run's configuration, since it does not affect the results.
    """

    sampler: SamplerFactory | None = None  # makes the sampler in place of this process; unused with an engine
    reward_pool: Callable[[Sequence[Reward], RewardConfig, ProgressCallback], RewardScorer] | None = None
    """Makes the reward workers."""
    environment: Callable[[EnvironmentFactory], EnvironmentFactory] | None = None  # wraps the environment factory
    learner_processes: WorkerLauncher | None = None  # starts the learner's processes
    cli_flags: str = ""  # the command-line options for this placement


LOCAL_PLACEMENT = Placement()
