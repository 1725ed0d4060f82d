"""LEVER 1: baselines that come from outside the group: a constant, and the reward of the greedy completion."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

from torch import Tensor

from policygrad.core import ragged
from policygrad.core.batch import Batch, required
from policygrad.core.protocols import Advantage
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class GreedyBaseline(Advantage):
    """Ψ = R_i − R(ō), ō the greedy completion of the same prompt, argmax token by token: independent of o_i, so unbiased.

    It is one more generation for each prompt, scored by the same rewards and not trained on. Where its reward failed (NaN)
    there is nothing to compare with: Ψ = 0. Source: Li et al. 2023 (ReMax), arXiv:2310.10505, algorithm 1.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"baseline"})

    @property
    def formula(self) -> str:
        return "R − R(ō),  ō the greedy completion"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        baseline = required(batch.baseline, self, "baseline").to(psi.dtype)[:, None]
        return ragged.masked(psi - baseline, batch.mask & baseline.isfinite())


@dataclass(frozen=True)
class ConstantBaseline(Advantage):
    """Ψ ← Ψ − value. On-policy any constant leaves the gradient's mean as it is; off-policy it decides how much is learnt from
    success and how much from failure, and below the mean reward of what sampled success prevails.

    After `GroupMean`, value = δV: Ψ = R_i − (mean_g + δV), Arnal et al. 2025 (AsymRE), arXiv:2506.20520. Alone, R_i − c: the
    baseline of Le Roux et al. 2025 (TOPR), arXiv:2503.14286, whose rewards of ±1 are those of 0 and 1 about ½.
    """

    value: float = 0.5

    def __post_init__(self) -> None:
        if not isfinite(self.value):
            raise ConfigError(f"ConstantBaseline.value must be a finite number, not {self.value}")

    @property
    def formula(self) -> str:
        return f"− {self.value:g}" if self.value >= 0 else f"+ {-self.value:g}"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        return ragged.masked(psi - self.value, batch.mask & batch.counted[:, None])
