"""Advantages along the steps of a completion: rewards at step ends, sampled values of steps, rewards of tokens.

A step is a run of sampled tokens that ends where `Batch.step_end` is True; tokens after the last end form a step too. Parts that
read steps start a chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import Advantage
from policygrad.core.batch import Batch
from policygrad.core.chains import Stage
from policygrad.core.gae import CompactTokens
from policygrad.core.masked import Groups
from policygrad.core.settings import setting
from policygrad.core.shaping import KLInReward
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


@dataclass(frozen=True)
class ProcessReward(Advantage):
    """Ψ_t = Σ r̃ over the step ends from t on, r̃ = (r − mean_g)/(std_g + eps) over all steps of the group's completions.

    r is the token reward at a step's end, plus the completion's reward at the last one (`outcome`). Ψ is exactly 0 for a group
    whose steps all have the same reward, or that has one completion.
    Source: Shao et al. 2024 (DeepSeekMath), sec. 4.1.3.

    Raises:
        ConfigError: a batch without steps or their rewards; a counted completion without a step end; a reward between two step
            ends, which no step would include.
    """

    eps: float = setting(1e-4, "at least 0")
    ddof: int = setting(1, "0 or 1")
    outcome: bool = True
    """Add the completion's reward to the last step's.
    False: process supervision alone, as published; the outcome does not enter Ψ."""
    needs: ClassVar[frozenset[str]] = frozenset({"step_end", "token_reward"})
    starts_chain: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "tokens"
    uses_group_statistics: ClassVar[bool] = True

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if not self.outcome:  # nothing may read what does not enter Ψ
            readers = [(part, "filters by") for part in algorithm.filters if part.chooses_by_reward]
            for reader, does in [*readers, *((part, "shapes") for part in algorithm.shaping)]:
                yield (
                    f"{type(reader).__name__} {does} the outcome's reward, which ProcessReward(outcome=False) does not use: remove "
                    "it, or set outcome=True"
                )
        if any(isinstance(part, KLInReward) for part in algorithm.shaping):
            yield "ProcessReward reads rewards at step ends, and KLInReward puts one at every token: use KLToReference() in terms"

    @property
    def formula(self) -> str:
        alone = "" if self.outcome else ", without the outcome's reward"
        return f"Σ_{{step ends ≥ t}} (r − mean_g)/(std_g + {self.eps:g}),  over the group's steps{alone}"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        # Step ends of counted completions and their rewards, both [B, T].
        counts = (batch.counted & batch.mask.any(1))[:, None]
        end = batch.require("step_end", self) & batch.mask & counts
        reward = masked.apply_mask(batch.require("token_reward", self), batch.mask & counts)
        for row in (counts.squeeze(1) & ~end.any(1)).nonzero().flatten().tolist():
            raise ConfigError(
                f"ProcessReward: completion {row} has no True in Batch.step_end: mark the end of its last step"
            )
        for row in ((reward != 0) & ~end).any(1).nonzero().flatten().tolist():
            raise ConfigError(
                f"ProcessReward: completion {row} has a reward in Batch.token_reward where no step ends: move it to a "
                "True of Batch.step_end"
            )
        if self.outcome:
            last = end & (end.cumsum(1) == end.sum(1, keepdim=True))
            reward = reward + masked.apply_mask(batch.reward[:, None].expand(end.shape), last)
        completion, _ = end.nonzero(as_tuple=True)
        r = reward[end]
        steps = Groups(batch.group[completion], torch.ones_like(completion, dtype=torch.bool))
        scaled = (r - steps.mean(r)) / (steps.std(r, self.ddof) + self.eps)
        siblings = Groups(batch.group, end.any(1)).size[completion] - 1
        scaled = torch.where(steps.is_constant(r) | (siblings == 0), torch.zeros_like(r), scaled)
        normalised = torch.zeros_like(reward).masked_scatter(end, scaled)
        return masked.apply_mask(masked.reverse_cumsum(normalised), batch.mask)


@dataclass(frozen=True)
class PrefixValue(Advantage):
    """Ψ_t = Σ rewards within t's step + V(start of the next step) − V(start of this step); V after the end is 0.

    `Batch.values` holds V(start of the step) at each token of the step. A rollout estimates it as the mean reward of `samples` (K)
    fresh completions of the text so far. Source: Kazemnejad et al. 2024 (VinePPO), sec. 4.

    """

    samples: int = setting(9, "at least 1", "completion per step")
    needs: ClassVar[frozenset[str]] = frozenset({"step_end"})
    starts_chain: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "tokens"
    samples_values: ClassVar[bool] = True
    providers: ClassVar[tuple[str, ...]] = ("policygrad.rollout.prefix_values:PrefixValues",)

    @property
    def formula(self) -> str:
        return f"Σ_{{step}} r + V(next step) − V(this step),  V from {self.samples} completions of the prefix"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        p = CompactTokens.of(batch, self)
        end = (batch.require("step_end", self) & batch.mask).gather(1, p.order)
        step = end.cumsum(1) - end.long()  # number of steps that ended before this token
        delta = p.delta(1.0)  # within a step the values cancel
        total = torch.zeros_like(delta).scatter_add(1, step, delta)
        return p.scatter_back(total.gather(1, step))


@dataclass(frozen=True)
class ImplicitProcess(Advantage):
    """Ψ ← Ψ + Σ_{s≥t} γ^{s−t}·(r_φ(o_s) − 1/(G−1) Σ_{j≠i} r̄_φ(o_j)), r̄_φ(o) the mean of r_φ over a completion's tokens.

    After `LeaveOneOut` it is PRIME's advantage: a leave-one-out return of outcomes plus one of process rewards. The baseline is
    subtracted at every token and summed to the end, so with γ = 1 long completions lose where their siblings' tokens have a
    positive mean reward. Source: Cui et al. 2025 (PRIME), eq. 5 and sec. 3.2.
    """

    gamma: float = setting(1.0, "in [0, 1]")
    needs: ClassVar[frozenset[str]] = frozenset({"implicit_reward"})
    uses_group_statistics: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "tokens"

    @property
    def formula(self) -> str:
        discount = "" if self.gamma == 1 else f"{self.gamma:g}^{{s−t}}·"
        return f"+ Σ_{{s≥t}} {discount}(r_φ(o_s) − mean_{{j≠i}} r̄_φ(o_j))"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        process = masked.apply_mask(batch.require("implicit_reward", self), batch.mask).to(psi.dtype)
        groups = Groups(batch.group, counts := batch.counted & batch.mask.any(1))
        num_siblings = groups.size - counts.long()
        baseline = groups.sum_excluding_self(process.sum(1) / batch.lengths.clamp(min=1)) / num_siblings.clamp(min=1)
        centred = masked.apply_mask(process - baseline[:, None], batch.mask & (num_siblings > 0)[:, None])
        return psi + masked.discounted_reverse_cumsum(centred, batch.mask, self.gamma)
