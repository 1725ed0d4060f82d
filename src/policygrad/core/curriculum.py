"""Which prompts are sampled at all: what has been solved need not come again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from policygrad.core.batch import Batch, required
from policygrad.core.metrics import Max, Metric, Metrics
from policygrad.core.protocols import Filter, State
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class NoPositiveResampling(Filter):
    """A prompt whose completions reach a mean reward of `threshold` is not sampled again, in this epoch or a later one.

    Its memory is {"solved": the numbers of those prompts} (`Batch.example`). It takes nothing out of a batch: a rollout passes
    its prompts over before anything is drawn. Source: Khatri et al. 2025 (ScaleRL), arXiv:2510.13786.
    """

    threshold: float = 0.9
    needs: ClassVar[frozenset[str]] = frozenset({"example"})

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
        example = required(batch.example, self, "example")
        own = torch.ones_like(batch.reward, dtype=torch.bool) if batch.demonstration is None else ~batch.demonstration
        numbers, index = torch.unique(example[own], return_inverse=True)
        count = torch.bincount(index, minlength=len(numbers))
        rate = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, index, batch.reward[own].double()) / count
        return {"solved": sorted({*state["solved"], *numbers[rate >= self.threshold].tolist()})}

    def at(self, state: State) -> Resting:
        return Resting(self.threshold, frozenset(state["solved"]))

    def __call__(self, batch: Batch) -> Batch:
        return batch


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
