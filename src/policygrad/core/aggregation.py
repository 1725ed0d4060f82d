"""How tokens are averaged: the coefficients c [B, T] over one whole update, never a micro-batch or a rank.

B counts completions with at least one sampled token; |o_i| counts sampled tokens. All are zero off the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import Aggregation
from policygrad.core.masked import Groups
from policygrad.errors import ConfigError


def _spread(per_completion: Tensor, mask: Tensor) -> Tensor:
    return masked.apply_mask(per_completion[:, None].expand(mask.shape), mask)


def _completions(mask: Tensor) -> Tensor:
    return mask.any(1).sum().clamp(min=1)


@dataclass(frozen=True)
class SequenceSum(Aggregation):
    """c = 1/B: a completion is one action; the unbiased one. Source: Ahmadian et al. 2024 (RLOO).

    group_power p divides each group by G^p instead of G: ½ gives every group a weight that grows with √G.
    """

    group_power: float = 1.0

    @property
    def formula(self) -> str:
        return "1/B" if self.group_power == 1 else f"G^{1 - self.group_power:g}/B"

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        size = Groups(group, mask.any(1)).size.clamp(min=1).to(torch.float64)
        return _spread(size ** (1 - self.group_power) / _completions(mask), mask)


@dataclass(frozen=True)
class SequenceMean(Aggregation):
    """c = 1/(B·|o_i|): every completion counts alike, so a token of a long one counts less.

    Source: Shao et al. 2024 (GRPO), eq. 3.
    """

    @property
    def formula(self) -> str:
        return "1/(B·|o_i|)"

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        return _spread(1 / (_completions(mask) * mask.sum(1).clamp(min=1)).to(torch.float64), mask)


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """c = 1/Σ_j|o_j| over the step: every token counts alike.

    Source: Schulman et al. 2017; Yu et al. 2025 (DAPO), eq. 12.
    """

    @property
    def formula(self) -> str:
        return "1/Σ_j|o_j|"

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        return mask.to(torch.float64) / mask.sum().clamp(min=1)


@dataclass(frozen=True)
class GroupTokenMean(Aggregation):
    """c = 1/(#groups·Σ_{j∈g}|o_j|): every prompt counts alike.

    Source: Yu et al. 2025 (DAPO), eq. 8, taken literally.
    """

    @property
    def formula(self) -> str:
        return "1/(#groups·Σ_{j∈g}|o_j|)"

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        groups = Groups(group, mask.any(1))
        tokens = groups.sum(mask.sum(1)).clamp(min=1)
        return _spread(1 / (max(1, groups.num_nonempty) * tokens).to(torch.float64), mask)


@dataclass(frozen=True)
class FixedLength(Aggregation):
    """c = 1/(B·L) with L the generation budget in tokens: no length in the denominator.

    Source: Liu et al. 2025 (Dr. GRPO), sec. 3.2.

    length None: the batch's width T; a trainer sets its generation budget (`Algorithm.with_max_tokens`).
    """

    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise ConfigError(f"FixedLength.length must be at least 1 token, not {self.length}")

    @property
    def formula(self) -> str:
        return f"1/(B·{self.length or 'L'})"

    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        length = max(1, mask.shape[1]) if self.length is None else self.length
        return mask.to(torch.float64) / (_completions(mask) * length)
