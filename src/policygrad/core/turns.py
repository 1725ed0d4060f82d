"""Advantages along the turns of an episode: rewards to go per turn, comparison with siblings' turns, and GAE over turns.

A turn is a run of sampled tokens with one `Batch.turn_state`. Its reward r_n is the sum of its token rewards; the last turn's
includes the completion's `reward`. All tokens of a turn share its credit, since log π(turn) is the sum of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from policygrad.core import masked
from policygrad.core.advantages import total_rewards
from policygrad.core.base import Advantage
from policygrad.core.batch import Batch
from policygrad.core.chains import TO_GO, Stage
from policygrad.core.gae import GAE, CompactTokens, LengthAdaptiveGAE, NStep, ValueAdvantage
from policygrad.core.masked import Groups
from policygrad.core.settings import ABOVE_0, SET, acts_with, setting


def turn_starts(batch: Batch, part: object) -> Tensor:
    """Mark the first token of each turn, [B, T] bool. Raises ConfigError for a batch without turn states."""
    mask, state = batch.mask, masked.apply_mask(batch.require("turn_state", part), batch.mask)
    before, changed = pad(mask, (1, 0))[:, :-1], state != pad(state, (1, 0))[:, :-1]
    return mask & (~before | changed)


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns of a batch; N is the largest number of turns of an episode, at least 1."""

    first: Tensor  # [B, T] bool; first token of each turn
    index: Tensor  # [B, T] int64; index of a sampled token's turn within its episode
    exists: Tensor  # [B, N] bool; turns that exist

    @classmethod
    def of(cls, batch: Batch, part: object) -> Turns:
        first = turn_starts(batch, part)
        number = first.sum(1)
        most = max(1, int(number.max())) if len(number) else 1
        exists = torch.arange(most, device=number.device) < number[:, None]
        return cls(first, (first.cumsum(1) - 1).clamp(min=0), exists)

    @property
    def last(self) -> Tensor:
        """Each episode's last turn, [B, N] bool."""
        return self.exists & ~pad(self.exists, (0, 1))[:, 1:]

    def at_turn_starts(self, x: Tensor) -> Tensor:
        """Read x at each turn's first token, [B, T] -> [B, N]; 0 where there is no turn."""
        return x.new_zeros(self.exists.shape).scatter_add(1, self.index, masked.apply_mask(x, self.first))

    def rewards(self, batch: Batch, part: object) -> Tensor:
        """Compute r_n [B, N]. Raises ConfigError for a batch without token rewards."""
        dense = masked.apply_mask(batch.require("token_reward", part), batch.mask)
        within = dense.new_zeros(self.exists.shape).scatter_add(1, self.index, dense)
        return within + masked.apply_mask(batch.reward[:, None].expand(within.shape), self.last)

    def returns(self, batch: Batch, part: object, gamma: float) -> Tensor:
        """Compute R_n = Σ_{m ≥ n} γ^(m−n) r_m, [B, N]."""
        return masked.reverse_recursion(self.rewards(batch, part), self.exists, gamma)

    def broadcast_to_tokens(self, x: Tensor, mask: Tensor) -> Tensor:
        """Give each token its turn's x, [B, N] -> [B, T]."""
        return masked.apply_mask(x.gather(1, self.index), mask)


@dataclass(frozen=True)
class TurnReturn(Advantage):
    """Ψ = R_n = Σ_{m ≥ n} γ^{m−n} r_m at every token of turn n: the rewards of this and later turns.

    Earlier rewards do not depend on the turn, so leaving them out keeps the expectation (γ = 1) and lowers the variance, unless
    they served as a baseline. γ < 1 discounts once per turn, whatever its length; followed by `TurnDiscount(γ)`, the gradient is
    that of E[Σ_n γ^n r_n].
    Source: Sutton et al. 2000, theorem 1, with turns for actions; R_n as in Feng et al. 2025 (GiGPO).
    """

    gamma: float = setting(1.0, "in [0, 1]")
    """Per turn."""
    needs: ClassVar[frozenset[str]] = frozenset({"turn_state", "token_reward"})
    starts_chain: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "turns"

    @property
    def formula(self) -> str:
        discount = "" if self.gamma == 1 else f"{self.gamma:g}^(m−n) "
        return f"R_n = Σ_{{m≥n}} {discount}r_m,  n the turn"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        turns = Turns.of(batch, self)
        return turns.broadcast_to_tokens(turns.returns(batch, self, self.gamma), batch.mask)


@dataclass(frozen=True)
class TurnLeaveOneOut(Advantage):
    """Ψ ← Ψ − 1/|S| Σ_{j ∈ S} Ψ_{j,n} at turn n, S the siblings that have a turn n, Ψ_{j,n} their Ψ at its first token.

    The baseline does not depend on episode i, so it is unbiased. After `TurnReturn` it compares rewards to go from the same turn,
    whereas `LeaveOneOut` compares with full episodes. A turn that no sibling has is compared with 0. Source: Ahmadian et al. 2024
    (RLOO), turn by turn.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"turn_state"})
    takes: ClassVar[frozenset[Stage]] = TO_GO | {"tokens"}
    gives: ClassVar[Stage | None] = "tokens"
    uses_group_statistics: ClassVar[bool] = True

    formula = "− mean_{j≠i} Ψ_{j,n},  over the siblings that have a turn n"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        turns, counts = Turns.of(batch, self), batch.counted
        exists = turns.exists & counts[:, None]
        row, n = exists.nonzero(as_tuple=True)
        x = turns.at_turn_starts(psi)[exists]
        groups = _group_turns(batch.group[row], n)
        num_siblings = groups.size - 1
        mean = torch.where(
            groups.is_constant(x) & (num_siblings > 0), x, groups.sum_excluding_self(x) / num_siblings.clamp(min=1)
        )
        baseline = torch.zeros_like(turns.exists, dtype=psi.dtype).masked_scatter(exists, mean)
        return masked.apply_mask(psi - turns.broadcast_to_tokens(baseline, batch.mask), batch.mask & counts[:, None])


@dataclass(frozen=True)
class TurnDiscount(Advantage):
    """Ψ ← γ^n Ψ at turn n, counted from 0, which makes discounted returns per turn the gradient of E[Σ_n γ^n r_n].

    Most implementations omit this factor; the result is then not the gradient of any objective.
    Source: Sutton & Barto 2018, sec. 13.3; Thomas 2014.
    """

    gamma: float = setting(0.99, "in [0, 1]")
    """Per turn."""
    needs: ClassVar[frozenset[str]] = frozenset({"turn_state"})
    gives: ClassVar[Stage | None] = "tokens"

    @property
    def formula(self) -> str:
        return f";  × {self.gamma:g}^n at turn n"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        index = Turns.of(batch, self).index
        return masked.apply_mask(psi * self.gamma ** index.to(psi.dtype), batch.mask)


def _group_turns(group: Tensor, key: Tensor) -> Groups:
    """Group turns [K] by completion group and key."""
    pairs = torch.stack([group.long(), key], 1)
    same = torch.unique(pairs, dim=0, return_inverse=True)[1] if len(pairs) else key
    return Groups(same, torch.ones_like(same, dtype=torch.bool))


@dataclass(frozen=True)
class GroupInGroup(Advantage):
    """Ψ = (R_i − mean_g R)/F + ω·(R_{i,n} − mean_s R_n)/F_s at every token of turn n, over the group's turns from the same state s.

    R_{i,n} = Σ_{m ≥ n} γ^(m−n) r_{i,m} is the turn's discounted return, F the group's std plus eps (`std`), or 1. The part of
    a turn is exactly 0 where all returns are equal or no other turn starts from its state. Single-turn episodes get 1 + ω times
    the group's z-score.
    Source: Feng et al. 2025 (GiGPO), arXiv:2505.10978, eq. 3 and 5 to 8.
    """

    omega: float = setting(1.0, "at least 0")
    gamma: float = acts_with(setting(0.95, "in [0, 1]"), omega=ABOVE_0)
    """Per turn."""
    std: bool = True
    """Divide by the std; False: F = 1, the paper's other variant."""
    eps: float = acts_with(setting(1e-4, "at least 0"), std=SET)
    ddof: int = acts_with(setting(1, "0 or 1"), std=SET)
    needs: ClassVar[frozenset[str]] = frozenset({"turn_state", "token_reward"})
    starts_chain: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "tokens"
    uses_group_statistics: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        over, over_state = ("/std_g", "/std_s") if self.std else ("", "")
        return (
            f"(R_i − mean_g){over} + {self.omega:g}·(R_n − mean_s){over_state},  R_n = Σ_{{m≥n}} {self.gamma:g}^(m−n) r_m, "
            "s the turn's state"
        )

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        turns, counts = Turns.of(batch, self), batch.counted
        episode = masked.apply_mask(self._relative(total_rewards(batch), Groups(batch.group, counts)), counts)
        returns, exists = turns.returns(batch, self, self.gamma), turns.exists & counts[:, None]
        row, _ = exists.nonzero(as_tuple=True)
        state = turns.at_turn_starts(batch.require("turn_state", self))[exists]
        relative = self._relative(returns[exists], _group_turns(batch.group[row], state))
        step = torch.zeros_like(returns).masked_scatter(exists, relative)
        by_token = turns.broadcast_to_tokens(step, batch.mask)
        return masked.apply_mask(episode[:, None] + self.omega * by_token, batch.mask)

    def _relative(self, r: Tensor, groups: Groups) -> Tensor:
        """Compute (r − mean)/F, exactly 0 where r is constant."""
        centred = masked.apply_mask(r, groups.keep) - groups.mean(r)
        scaled = centred / (groups.std(r, self.ddof) + self.eps) if self.std else centred
        return masked.apply_mask(scaled, ~groups.is_constant(r))


# GAE over turns, over tokens with a reward per turn, and over both. A turn's reward is at its last token, and γ per turn discounts
# only there, whatever the turn's length. `Critic.turn_gamma` must be the same γ.


class TurnValueAdvantage(ValueAdvantage):
    """Base of the advantages that also need turns and their rewards."""

    value_fields: ClassVar[frozenset[str]] = frozenset({"values", "turn_state", "token_reward"})


@dataclass(frozen=True)
class TurnGAE(TurnValueAdvantage):
    """A_n = Σ_l (γλ)^l δ_{n+l}, δ_n = r_n + γV(s_{n+1}) − V(s_n), at every token of turn n: GAE with turns for steps.

    V(s_n) is the critic's value before the turn's first token, r_n the sum of the turn's rewards. λ = 1 is the return to go minus
    V(s_n), unbiased for any critic. All tokens of a turn get the same advantage. The paper fits its critic where turns begin, ours
    is fitted at every token.
    Source: Li et al. 2025 (Turn-PPO), arXiv:2512.17008, the turn-level MDP; its best γ, λ are 0.99, 0.9.
    """

    gamma: float = setting(1.0, "in [0, 1]")
    """Per turn."""
    lam: float = setting(0.95, "in [0, 1]")
    """Per turn."""
    bootstrap: bool = False
    """Continue a truncated episode with the critic's value of its last state."""

    @property
    def formula(self) -> str:
        delta = f"δ_n = r_n + {self.gamma:g}·V(s_{{n+1}}) − V(s_n)"
        return f"Σ_l ({self.gamma:g}·{self.lam:g})^l δ_{{n+l}},  {delta},  n the turn"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        turns, end = Turns.of(batch, self), _end(batch, self, self.bootstrap)
        reward = turns.rewards(batch, self)
        value = turns.at_turn_starts(batch.require("values", self)).to(reward.dtype)
        after = torch.where(turns.last, end[:, None].to(reward.dtype), pad(value, (0, 1))[:, 1:])
        delta = masked.apply_mask(reward + self.gamma * after - value, turns.exists)
        return turns.broadcast_to_tokens(
            masked.reverse_recursion(delta, turns.exists, self.gamma * self.lam), batch.mask
        )


@dataclass(frozen=True)
class MultiTurnGAE(TurnValueAdvantage):
    """A_t = δ_t + γ_t λ A_{t+1}, δ_t = r_t + γ_t V_{t+1} − V_t: GAE over tokens, with each turn's reward at its last one.

    γ_t = γ within a turn and γ·γ_turn at its last token, a discount per turn whatever its length. γ_turn = 1 is MT-PPO; without
    rewards per turn it is `GAE`. Source: Wei et al. 2025 (MT-PPO), arXiv:2505.11821, eq. 8 and 9; step-dependent
    discounts: Sutton & Barto 2018, sec. 12.8.
    """

    gamma: float = setting(1.0, "in [0, 1]")
    """Per token."""
    lam: float = setting(0.95, "in [0, 1]")
    """Per token."""
    turn_gamma: float = setting(1.0, "in [0, 1]")
    """Per turn."""
    bootstrap: bool = False
    """Continue a truncated episode with the critic's value of its last state."""

    @property
    def formula(self) -> str:
        delta = f"δ_t = r_t + {self.gamma:g}·V_{{t+1}} − V_t"
        turn = "" if self.turn_gamma == 1 else f",  × {self.turn_gamma:g} after each turn"
        return f"Σ_l ({self.gamma:g}·{self.lam:g})^l δ_{{t+l}},  {delta},  r at turns' ends{turn}"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        p, ends = _by_turn(batch, self, self.bootstrap)
        gamma = torch.full_like(p.value, self.gamma).masked_fill(ends, self.gamma * self.turn_gamma)
        delta = masked.apply_mask(p.reward + gamma * p.next_value - p.value, p.mask)
        return p.scatter_back(masked.reverse_recursion(delta, p.mask, gamma * self.lam))


@dataclass(frozen=True)
class BiLevelGAE(TurnValueAdvantage):
    """A_e = δ_n + γ_turn λ_turn A_{e'} at a turn's last token e, e' the next turn's, and GAE(γ, λ) from it back through the turn.

    δ_n = r_e + γ_turn V_{e'} − V_e, with V_e the value before the turn's last token; within the turn A_t = r_t + γV_{t+1} − V_t +
    γλA_{t+1}, which ends in A_e. With all four at 1 it is the return to go minus V_t, as is `MultiTurnGAE` at λ = 1. With λ_turn
    < 1 it is biased even for an exact critic if the policy chooses the length of a turn, since V_{e'} depends on that choice.
    Source: Wang et al. 2025 (VAGEN), arXiv:2510.16907, sec. 4.2, as in the authors' code: A_e replaces the last token's own
    advantage, where algorithm 2 adds it.
    """

    gamma: float = setting(1.0, "in [0, 1]")
    """Per token, within a turn."""
    lam: float = setting(0.95, "in [0, 1]")
    """Per token, within a turn."""
    turn_gamma: float = setting(1.0, "in [0, 1]")
    """Per turn."""
    turn_lam: float = setting(0.95, "in [0, 1]")
    """Per turn."""
    bootstrap: bool = False
    """Continue a truncated episode with the critic's value of its last state."""

    @property
    def formula(self) -> str:
        turn = f"Σ_l ({self.turn_gamma:g}·{self.turn_lam:g})^l δ_{{n+l}} at turn n's last token e"
        delta = f"δ_n = r_e + {self.turn_gamma:g}·V_{{e'}} − V_e"
        return f"{turn},  {delta};  GAE({self.gamma:g}, {self.lam:g}) back from it"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        p, ends = _by_turn(batch, self, self.bootstrap)
        turns, end = Turns.of(batch, self), _end(batch, self, self.bootstrap)
        index = turns.index.gather(1, p.order)
        zeros = torch.zeros_like(turns.exists, dtype=p.value.dtype)
        reward, value = (zeros.scatter_add(1, index, masked.apply_mask(x, ends)) for x in (p.reward, p.value))
        after = torch.where(turns.last, end[:, None].to(value.dtype), pad(value, (0, 1))[:, 1:])
        delta = masked.apply_mask(reward + self.turn_gamma * after - value, turns.exists)
        by_turn = masked.reverse_recursion(delta, turns.exists, self.turn_gamma * self.turn_lam)
        within = p.reward + self.gamma * p.next_value - p.value
        x = torch.where(ends, by_turn.gather(1, index), within)
        return p.scatter_back(
            masked.reverse_recursion(x, p.mask, torch.full_like(x, self.gamma * self.lam).masked_fill(ends, 0.0))
        )


def token_discount(link: Advantage) -> float | None:
    """Return the γ per token of an advantage from values; None for all others and for custom ones."""
    if isinstance(link, TurnGAE):
        return 1.0
    return link.gamma if isinstance(link, GAE | NStep | LengthAdaptiveGAE | MultiTurnGAE | BiLevelGAE) else None


def turn_discount(link: Advantage) -> float | None:
    """Return the γ per turn of an advantage from values; None for all others and for custom ones."""
    if isinstance(link, TurnGAE):
        return link.gamma
    if isinstance(link, MultiTurnGAE | BiLevelGAE):
        return link.turn_gamma
    return 1.0 if isinstance(link, GAE | NStep | LengthAdaptiveGAE) else None


def _end(batch: Batch, part: object, bootstrap: bool) -> Tensor:
    """Return the value after the last token, [B]: 0, or the critic's where an episode was truncated."""
    if bootstrap:
        return batch.require("bootstrap", part)
    return torch.zeros_like(batch.reward) if batch.bootstrap is None else batch.bootstrap


def _by_turn(batch: Batch, part: object, bootstrap: bool) -> tuple[CompactTokens, Tensor]:
    """Return the compacted tokens and the mask of turns' last tokens, [B, N]."""
    p = CompactTokens.of(batch, part, bootstrap)
    first = turn_starts(batch, part).gather(1, p.order)
    turn_continues = pad(p.mask & ~first, (0, 1))[:, 1:]  # the next token is in the same turn
    return p, p.mask & ~turn_continues
