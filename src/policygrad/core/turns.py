"""LEVER 1 along the turns of an episode: what a turn was worth against others that began in the same state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.advantages import totals
from policygrad.core.batch import Batch, required
from policygrad.core.protocols import Advantage
from policygrad.core.ragged import Groups
from policygrad.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns of a batch: N = the most that an episode has."""

    index: Tensor
    """[B, T] int64; which of its episode's turns a sampled token belongs to."""
    state: Tensor
    """[B, N] int64; the anchor of each turn."""
    returns: Tensor
    """[B, N] R_n = Σ_{m ≥ n} γ^(m−n) r_m."""
    there: Tensor
    """[B, N] bool; turns that the episode has."""

    @classmethod
    def of(cls, batch: Batch, part: object, gamma: float) -> Turns:
        """A turn is a run of sampled tokens with one anchor. r is the sum of its token rewards, the last one's with `reward`."""
        mask, anchor = batch.mask, ragged.masked(required(batch.anchor, part, "anchor"), batch.mask)
        dense = ragged.masked(required(batch.token_reward, part, "token_reward"), mask)
        before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
        changed = anchor != torch.nn.functional.pad(anchor, (1, 0))[:, :-1]
        first = mask & (~before | changed)
        number = first.sum(1)
        most = int(number.max()) if len(number) else 0
        index = (first.cumsum(1) - 1).clamp(min=0)
        there = torch.arange(most, device=mask.device) < number[:, None]
        last = there & (torch.arange(most, device=mask.device) == number[:, None] - 1)
        state = (
            anchor.new_zeros(len(mask), most).scatter_add(1, index, ragged.masked(anchor, first))
            if most
            else anchor[:, :0]
        )
        reward = dense.new_zeros(len(mask), most).scatter_add(1, index, dense) if most else dense[:, :0]
        reward = reward + ragged.masked(batch.reward[:, None].expand(last.shape), last)
        returns = torch.zeros_like(reward)
        ahead = torch.zeros_like(batch.reward)
        for n in reversed(range(most)):
            returns[:, n] = ahead = reward[:, n] + gamma * ahead
        return cls(index, state, returns, there)


@dataclass(frozen=True)
class GroupInGroup(Advantage):
    """Ψ = (R_i − mean_g R)/F + ω·(R_{i,n} − mean_s R_n)/F_s at every token of turn n, over the group's turns from the same state s.

    R_{i,n} = Σ_{m ≥ n} γ^(m−n) r_{i,m} is the turn's discounted return, F the group's std plus eps (`std`), or 1. Where all
    returns are equal, or a turn is the only one from its state, its part is 0 exactly, so that episodes of one turn each have
    1 + ω times the group's z-score. A turn is a run of sampled tokens with one `Batch.anchor`.
    Source: Feng et al. 2025 (GiGPO), arXiv:2505.10978, eq. 3 and 5 to 8.

    Raises:
        ConfigError: a batch without anchors or token rewards.
    """

    omega: float = 1.0
    gamma: float = 0.95
    """Per turn."""
    std: bool = True
    """False = F = 1, the paper's other variant."""
    eps: float = 1e-4
    ddof: int = 1
    needs: ClassVar[frozenset[str]] = frozenset({"anchor", "token_reward"})
    starts: ClassVar[bool] = True
    group_statistic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("omega", "eps"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"GroupInGroup.{name} must be at least 0, not {getattr(self, name)}")
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"GroupInGroup.gamma must be in [0, 1], not {self.gamma}")
        if self.ddof not in (0, 1):
            raise ConfigError(f"GroupInGroup.ddof must be 0 or 1, not {self.ddof}")

    @property
    def formula(self) -> str:
        over, here = ("/std_g", "/std_s") if self.std else ("", "")
        return (
            f"(R_i − mean_g){over} + {self.omega:g}·(R_n − mean_s){here},  R_n = Σ_{{m≥n}} {self.gamma:g}^(m−n) r_m, "
            "s the turn's state"
        )

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        turns, counts = Turns.of(batch, self, self.gamma), batch.counted
        episode = ragged.masked(self._relative(totals(batch), Groups(batch.group, counts)), counts)
        there = turns.there & counts[:, None]
        row, _ = there.nonzero(as_tuple=True)
        key = torch.stack([batch.group[row].long(), turns.state[there]], 1)
        same = torch.unique(key, dim=0, return_inverse=True)[1] if len(key) else row
        r = turns.returns[there]
        relative = self._relative(r, Groups(same, torch.ones_like(same, dtype=torch.bool)))
        step = torch.zeros_like(turns.returns).masked_scatter(there, relative)
        by_token = step.gather(1, turns.index) if step.shape[1] else psi.new_zeros(psi.shape)
        return ragged.masked(episode[:, None] + self.omega * by_token, batch.mask)

    def _relative(self, r: Tensor, groups: Groups) -> Tensor:
        """(r − mean)/F, 0 exactly where r does not differ."""
        centred = ragged.masked(r, groups.keep) - groups.mean(r)
        scaled = centred / (groups.std(r, self.ddof) + self.eps) if self.std else centred
        return ragged.masked(scaled, ~groups.no_spread(r))
