"""LEVER 2, second half, for samples that are another policy's: gates that do not weigh by the ratio, or on one side alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.core.protocols import Gate


@dataclass(frozen=True)
class Unweighted(Gate):
    """w = 1 whatever the ratio: the likelihood of what another policy sampled, weighed by Ψ; on-policy, REINFORCE.

    Unlike `OnPolicy` it is meant for several updates per rollout and for old samples: ∇E_{o∼μ}[Ψ log π_θ(o)] is its own
    objective's gradient, not an estimate of ∇E_{o∼π_θ}[Ψ]. Source: Arnal et al. 2025 (AsymRE), arXiv:2506.20520.
    """

    @property
    def formula(self) -> str:
        return "1, whatever r"

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return torch.ones_like(ratio)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return psi * (1 + ratio.log())


@dataclass(frozen=True)
class Taper(Gate):
    """w = 1 where Ψ ≥ 0, min(r, 1) where Ψ < 0: what is right is imitated, what is wrong fades as the policy leaves it.

    The value is Ψ(1 + log r), and Ψr where Ψ < 0 and r ≤ 1: bounded above, where unweighted failures drive log π to −∞.
    Published with the ratio of whole completions (`SequenceProduct`). Source: Le Roux et al. 2025 (TOPR), arXiv:2503.14286, eq. 8.
    """

    @property
    def formula(self) -> str:
        return "1 where Ψ≥0, min(r, 1) where Ψ<0"

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return torch.where(psi < 0, ratio.clamp(max=1), torch.ones_like(ratio))

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        tapered = (psi < 0) & (ratio <= 1)
        return torch.where(tapered, ratio, 1 + ratio.log()) * psi

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where it caps: (below, above), both [B, T] bool; a capped token keeps its gradient at the weight 1."""
        return torch.zeros_like(psi, dtype=torch.bool), (psi < 0) & (ratio > 1)
