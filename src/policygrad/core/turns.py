"""LEVER 1 along the turns of an episode: the rewards to go per turn, and what a turn was worth against its siblings'.

A turn is a run of sampled tokens with one `Batch.anchor`. Its reward r_n is the sum of its token rewards, the last one's with the
completion's `reward`. All tokens of a turn share its credit: log π(turn) is the sum of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from policygrad.core import ragged
from policygrad.core.advantages import totals
from policygrad.core.batch import Batch, required
from policygrad.core.protocols import Advantage
from policygrad.core.ragged import Groups
from policygrad.core.ranges import unit
from policygrad.errors import ConfigError


def turn_starts(batch: Batch, part: object) -> Tensor:
    """[B, T] bool; the first token of each turn. Raises ConfigError for a batch without anchors."""
    mask, anchor = batch.mask, ragged.masked(required(batch.anchor, part, "anchor"), batch.mask)
    before, changed = pad(mask, (1, 0))[:, :-1], anchor != pad(anchor, (1, 0))[:, :-1]
    return mask & (~before | changed)


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns of a batch: N = the most that an episode has, at least 1."""

    first: Tensor
    """[B, T] bool; each turn's first token."""
    index: Tensor
    """[B, T] int64; which of its episode's turns a sampled token belongs to, from 0."""
    there: Tensor
    """[B, N] bool; turns that the episode has."""

    @classmethod
    def of(cls, batch: Batch, part: object) -> Turns:
        first = turn_starts(batch, part)
        number = first.sum(1)
        most = max(1, int(number.max())) if len(number) else 1
        there = torch.arange(most, device=number.device) < number[:, None]
        return cls(first, (first.cumsum(1) - 1).clamp(min=0), there)

    @property
    def last(self) -> Tensor:
        """[B, N] bool; each episode's last turn."""
        return self.there & ~pad(self.there, (0, 1))[:, 1:]

    def starting(self, x: Tensor) -> Tensor:
        """[B, T] -> [B, N]: x at each turn's first token; 0 where there is no turn."""
        return x.new_zeros(self.there.shape).scatter_add(1, self.index, ragged.masked(x, self.first))

    def rewards(self, batch: Batch, part: object) -> Tensor:
        """[B, N] r_n. Raises ConfigError for a batch without token rewards."""
        dense = ragged.masked(required(batch.token_reward, part, "token_reward"), batch.mask)
        within = dense.new_zeros(self.there.shape).scatter_add(1, self.index, dense)
        return within + ragged.masked(batch.reward[:, None].expand(within.shape), self.last)

    def returns(self, batch: Batch, part: object, gamma: float) -> Tensor:
        """[B, N] R_n = Σ_{m ≥ n} γ^(m−n) r_m."""
        return ragged.recursion(self.rewards(batch, part), self.there, gamma)

    def spread(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, N] -> [B, T]: each turn's x at its tokens."""
        return ragged.masked(x.gather(1, self.index), mask)


@dataclass(frozen=True)
class TurnReturn(Advantage):
    """Ψ = R_n = Σ_{m ≥ n} γ^{m−n} r_m at every token of turn n: what the turn and those after it earned, and nothing before it.

    A turn is not answerable for rewards that were there before it: leaving them out changes no expectation (γ = 1), and lowers
    the variance unless what was lost before stood in for a baseline. γ < 1 discounts once per turn, however many tokens it has,
    and prefers what comes soon; with `TurnDiscount(γ)` behind it, the gradient is that of E[Σ_n γ^n r_n].
    Source: Sutton et al. 2000, theorem 1, with turns for actions; R_n as in Feng et al. 2025 (GiGPO).

    Raises:
        ConfigError: a batch without anchors or token rewards.
    """

    gamma: float = 1.0
    """Per turn."""
    needs: ClassVar[frozenset[str]] = frozenset({"anchor", "token_reward"})
    starts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        unit(self, gamma=self.gamma)

    @property
    def formula(self) -> str:
        discount = "" if self.gamma == 1 else f"{self.gamma:g}^(m−n) "
        return f"R_n = Σ_{{m≥n}} {discount}r_m,  n the turn"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        turns = Turns.of(batch, self)
        return turns.spread(turns.returns(batch, self, self.gamma), batch.mask)


@dataclass(frozen=True)
class TurnLeaveOneOut(Advantage):
    """Ψ ← Ψ − 1/|S| Σ_{j ∈ S} Ψ_{j,n} at turn n, S the siblings that have a turn n, Ψ_{j,n} theirs at its first token.

    The baseline does not see what episode i does, so it is unbiased, and it is of the same stage: after `TurnReturn` the rewards
    to go from turn n are compared with each other, where `LeaveOneOut` compares them with whole episodes. A turn that no sibling
    has is compared with 0. Source: Ahmadian et al. 2024 (RLOO), turn by turn.

    Raises:
        ConfigError: a batch without anchors.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"anchor"})
    group_statistic: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return "− mean_{j≠i} Ψ_{j,n},  over the siblings that have a turn n"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        turns, counts = Turns.of(batch, self), batch.counted
        there = turns.there & counts[:, None]
        row, n = there.nonzero(as_tuple=True)
        x = turns.starting(psi)[there]
        groups = _alike(batch.group[row], n)
        others = groups.size - 1
        mean = torch.where(groups.no_spread(x) & (others > 0), x, groups.others(x) / others.clamp(min=1))
        baseline = torch.zeros_like(turns.there, dtype=psi.dtype).masked_scatter(there, mean)
        return ragged.masked(psi - turns.spread(baseline, batch.mask), batch.mask & counts[:, None])


@dataclass(frozen=True)
class TurnDiscount(Advantage):
    """Ψ ← γ^n Ψ at turn n, the first is 0: what makes a discounted return per turn the gradient of E[Σ_n γ^n r_n].

    Without it later turns count as much as the first, as in practice they mostly do: that is no objective's gradient.
    Source: Sutton & Barto 2018, sec. 13.3; Thomas 2014.

    Raises:
        ConfigError: a batch without anchors.
    """

    gamma: float = 0.99
    """Per turn."""
    needs: ClassVar[frozenset[str]] = frozenset({"anchor"})

    def __post_init__(self) -> None:
        unit(self, gamma=self.gamma)

    @property
    def formula(self) -> str:
        return f";  × {self.gamma:g}^n at turn n"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        index = Turns.of(batch, self).index
        return ragged.masked(psi * self.gamma ** index.to(psi.dtype), batch.mask)


def _alike(group: Tensor, key: Tensor) -> Groups:
    """Turns [K] of one group with one key are compared."""
    pairs = torch.stack([group.long(), key], 1)
    same = torch.unique(pairs, dim=0, return_inverse=True)[1] if len(pairs) else key
    return Groups(same, torch.ones_like(same, dtype=torch.bool))


@dataclass(frozen=True)
class GroupInGroup(Advantage):
    """Ψ = (R_i − mean_g R)/F + ω·(R_{i,n} − mean_s R_n)/F_s at every token of turn n, over the group's turns from the same state s.

    R_{i,n} = Σ_{m ≥ n} γ^(m−n) r_{i,m} is the turn's discounted return, F the group's std plus eps (`std`), or 1. Where all
    returns are equal, or a turn is the only one from its state, its part is 0 exactly, so that episodes of one turn each have
    1 + ω times the group's z-score.
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
        turns, counts = Turns.of(batch, self), batch.counted
        episode = ragged.masked(self._relative(totals(batch), Groups(batch.group, counts)), counts)
        returns, there = turns.returns(batch, self, self.gamma), turns.there & counts[:, None]
        row, _ = there.nonzero(as_tuple=True)
        state = turns.starting(required(batch.anchor, self, "anchor"))[there]
        relative = self._relative(returns[there], _alike(batch.group[row], state))
        step = torch.zeros_like(returns).masked_scatter(there, relative)
        return ragged.masked(episode[:, None] + self.omega * turns.spread(step, batch.mask), batch.mask)

    def _relative(self, r: Tensor, groups: Groups) -> Tensor:
        """(r − mean)/F, 0 exactly where r does not differ."""
        centred = ragged.masked(r, groups.keep) - groups.mean(r)
        scaled = centred / (groups.std(r, self.ddof) + self.eps) if self.std else centred
        return ragged.masked(scaled, ~groups.no_spread(r))
