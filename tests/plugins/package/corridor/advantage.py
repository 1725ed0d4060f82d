"""An advantage with a setting, a field that its own provider fills, a conflict, a state and a metric; and an algorithm with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

import policygrad as pg
from policygrad.core.base import State
from policygrad.core.metrics import Mean, Metric, Metrics
from policygrad.rollout.providers import Collected, FieldProvider, ProviderContext
from policygrad.rollout.scoring import ScoringResult


@dataclass(frozen=True)
class LengthBaseline(pg.Advantage):
    """Ψ ← Ψ − b·|o|/limit, where b is the mean reward of all steps so far."""

    scale: float = 1.0
    past_mean: float = 0.0
    needs: ClassVar[frozenset[str]] = frozenset({"baseline"})
    providers: ClassVar[tuple[str, ...]] = ("corridor.advantage:RelativeLengths",)

    def find_conflicts(self, algorithm: pg.Algorithm) -> Iterator[str]:
        if algorithm.critic is not None:
            yield "LengthBaseline is a baseline, and so is the critic's: set critic=None"

    def init_state(self) -> State:
        return {"sum": 0.0, "count": 0}

    def update_state(self, state: State, batch: pg.Batch, metrics: Mapping[str, Metric]) -> State:
        return {"sum": state["sum"] + float(batch.reward.sum()), "count": state["count"] + len(batch.reward)}

    def with_state(self, state: State) -> LengthBaseline:
        return replace(self, past_mean=state["sum"] / max(1, state["count"]))

    def report(self, batch: pg.Batch) -> Metrics:
        assert batch.baseline is not None
        return {"corridor/relative_length": Mean(float(batch.baseline.sum()), float(len(batch.baseline)))}

    def __call__(self, psi: Tensor, batch: pg.Batch) -> Tensor:
        assert batch.baseline is not None
        return psi - self.scale * self.past_mean * batch.baseline[:, None]


@dataclass(frozen=True)
class RelativeLengths(FieldProvider):
    """Fills `baseline` with the share of the token budget that a completion has taken."""

    part: LengthBaseline
    fields: ClassVar[frozenset[str]] = frozenset({"baseline"})

    def provide(self, collected: Collected, context: ProviderContext) -> Collected:
        lengths = collected.batch.mask.sum(1) / context.sampling.max_tokens
        return collected.with_result(replace(collected.batch, baseline=lengths.to(torch.float32)), ScoringResult())


CORRIDOR_REINFORCE = replace(pg.REINFORCE, name="corridor_reinforce", advantage=(LengthBaseline(scale=0.5),))
