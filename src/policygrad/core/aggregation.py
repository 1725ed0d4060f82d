"""Aggregations: the coefficients c [B, T] that average tokens over a full update (never over a micro-batch or a rank).

B counts completions with at least one sampled token; |o_i| counts sampled tokens. All coefficients are 0 off the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import Aggregation
from policygrad.core.masked import Groups
from policygrad.core.settings import setting


def _to_tokens(per_completion: Tensor, mask: Tensor) -> Tensor:
    return masked.apply_mask(per_completion[:, None].expand(mask.shape), mask)


def _count_completions(mask: Tensor) -> Tensor:
    return mask.any(1).sum().clamp(min=1)


@dataclass(frozen=True)
class SequenceSum(Aggregation):
    """c = 1/B: a completion is one action, so the gradient is unbiased. Source: Ahmadian et al. 2024 (RLOO).

    group_power p divides a group's sum by G^p instead of G: at ½ a group's weight grows with √G.
    """

    group_power: float = 1.0

    @property
    def formula(self) -> str:
        return "1/B" if self.group_power == 1 else f"G^{1 - self.group_power:g}/B"

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        size = Groups(group, mask.any(1)).size.clamp(min=1).to(torch.float64)
        return _to_tokens(size ** (1 - self.group_power) / _count_completions(mask), mask)


@dataclass(frozen=True)
class SequenceMean(Aggregation):
    """c = 1/(B·|o_i|): equal weight per completion, so tokens of long completions count less.

    Source: Shao et al. 2024 (GRPO), eq. 3.
    """

    formula = "1/(B·|o_i|)"

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        return _to_tokens(1 / (_count_completions(mask) * mask.sum(1).clamp(min=1)).to(torch.float64), mask)


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """c = 1/Σ_j|o_j| over the step: equal weight per token.

    Source: Schulman et al. 2017; Yu et al. 2025 (DAPO), eq. 12.
    """

    formula = "1/Σ_j|o_j|"

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        return mask.to(torch.float64) / mask.sum().clamp(min=1)


@dataclass(frozen=True)
class TokenSum(Aggregation):
    """c = 1: the sum over all tokens, without a mean. The gradient grows with the batch, and the learning rate must shrink with it.

    Source: Tinker's losses (importance_sampling, ppo, cross_entropy), which are sums over the tokens of a request.
    """

    formula = "1"

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        return mask.to(torch.float64)


@dataclass(frozen=True)
class GroupTokenMean(Aggregation):
    """c = 1/(#groups·Σ_{j∈g}|o_j|): equal weight per prompt.

    Source: Yu et al. 2025 (DAPO), eq. 8, taken literally.
    """

    formula = "1/(#groups·Σ_{j∈g}|o_j|)"

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        has_tokens = mask.any(1)
        tokens = Groups(group, has_tokens).sum(mask.sum(1)).clamp(min=1)
        return _to_tokens(1 / (max(1, len(torch.unique(group[has_tokens]))) * tokens).to(torch.float64), mask)


@dataclass(frozen=True)
class FixedLength(Aggregation):
    """c = 1/(B·L), L the generation budget in tokens: independent of the completions' lengths.

    Source: Liu et al. 2025 (Dr. GRPO), sec. 3.2.

    length None means the batch's width T; a trainer sets it to its generation budget (`Algorithm.with_max_tokens`).
    """

    length: int | None = setting(None, "at least 1", "token")

    @property
    def formula(self) -> str:
        return f"1/(B·{self.length or 'L'})"

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        length = max(1, mask.shape[1]) if self.length is None else self.length
        return mask.to(torch.float64) / (_count_completions(mask) * length)
