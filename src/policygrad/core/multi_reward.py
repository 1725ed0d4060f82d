"""LEVER 1 with several rewards: each compared within its group before they are added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.batch import Batch, required
from policygrad.core.protocols import Advantage
from policygrad.core.ragged import Groups
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class RewardZScores(Advantage):
    """Ψ_i = Σ_k w_k (r_{k,i} − mean_g r_k)/(std_g r_k + eps) over the reward functions k, w_k their weights.

    Two answers with the same sum of rewards, one right and long, the other wrong and short, are no longer the same. A reward
    that is equal all over its group adds 0 exactly; one that a completion has no number for (NaN) leaves that completion out
    of its statistics and adds 0 to it. `BatchStd` behind it is the paper's normalisation over the batch, whose mean is 0
    already. Source: Liu et al. 2026 (GDPO), arXiv:2601.05242.

    Raises:
        ConfigError: a batch without rewards per function, or with token rewards, which would be left out.
    """

    eps: float = 1e-4
    ddof: int = 1
    needs: ClassVar[frozenset[str]] = frozenset({"rewards"})
    starts: ClassVar[bool] = True
    group_statistic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.eps >= 0:
            raise ConfigError(f"RewardZScores.eps must be at least 0, not {self.eps}")
        if self.ddof not in (0, 1):
            raise ConfigError(f"RewardZScores.ddof must be 0 or 1, not {self.ddof}")

    @property
    def formula(self) -> str:
        return f"Σ_k w_k (r_k − mean_g r_k)/(std_g r_k + {self.eps:g})"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        rewards = required(batch.rewards, self, "rewards")
        if batch.token_reward is not None:
            raise ConfigError(
                "RewardZScores reads one number per completion and reward function, and Batch.token_reward would be left out: "
                "drop the process rewards, or take grpo_process"
            )
        weights = batch.reward_weights or (1.0,) * rewards.shape[1]
        total = torch.zeros_like(batch.reward)
        for k, weight in enumerate(weights):
            total = total + weight * self._zscore(rewards[:, k], batch).to(total.dtype)
        return ragged.masked(total[:, None].expand(batch.mask.shape), batch.mask)

    def _zscore(self, r: Tensor, batch: Batch) -> Tensor:
        known = batch.counted & ~r.isnan()
        groups = Groups(batch.group, known)
        scaled = (r - groups.mean(r)) / (groups.std(r, self.ddof) + self.eps)
        return ragged.masked(scaled, known & ~groups.no_spread(r))
