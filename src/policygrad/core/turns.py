"""LEVER 1 along the turns of an episode: the rewards to go per turn, and what a turn was worth against its siblings'.

A turn is a run of sampled tokens with one `Batch.turn_state`. Its reward r_n is the sum of its token rewards, the last one's with the
completion's `reward`. All tokens of a turn share its credit: log π(turn) is the sum of theirs.
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
from policygrad.core.batch import Batch, require_field
from policygrad.core.gae import GAE, CompactTokens, LengthAdaptiveGAE, NStep
from policygrad.core.masked import Groups, check_unit_interval
from policygrad.errors import ConfigError


def turn_starts(batch: Batch, part: object) -> Tensor:
    """[B, T] bool; the first token of each turn. Raises ConfigError for a batch without anchors."""
    mask, anchor = batch.mask, masked.apply_mask(require_field(batch.turn_state, part, "turn_state"), batch.mask)
    before, changed = pad(mask, (1, 0))[:, :-1], anchor != pad(anchor, (1, 0))[:, :-1]
    return mask & (~before | changed)


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns of a batch: N = the most that an episode has, at least 1."""

    first: Tensor
    """[B, T] bool; each turn's first token."""
    index: Tensor
    """[B, T] int64; which of its episode's turns a sampled token belongs to, from 0."""
    exists: Tensor
    """[B, N] bool; turns that the episode has."""

    @classmethod
    def of(cls, batch: Batch, part: object) -> Turns:
        first = turn_starts(batch, part)
        number = first.sum(1)
        most = max(1, int(number.max())) if len(number) else 1
        exists = torch.arange(most, device=number.device) < number[:, None]
        return cls(first, (first.cumsum(1) - 1).clamp(min=0), exists)

    @property
    def last(self) -> Tensor:
        """[B, N] bool; each episode's last turn."""
        return self.exists & ~pad(self.exists, (0, 1))[:, 1:]

    def at_turn_starts(self, x: Tensor) -> Tensor:
        """[B, T] -> [B, N]: x at each turn's first token; 0 where there is no turn."""
        return x.new_zeros(self.exists.shape).scatter_add(1, self.index, masked.apply_mask(x, self.first))

    def rewards(self, batch: Batch, part: object) -> Tensor:
        """[B, N] r_n. Raises ConfigError for a batch without token rewards."""
        dense = masked.apply_mask(require_field(batch.token_reward, part, "token_reward"), batch.mask)
        within = dense.new_zeros(self.exists.shape).scatter_add(1, self.index, dense)
        return within + masked.apply_mask(batch.reward[:, None].expand(within.shape), self.last)

    def returns(self, batch: Batch, part: object, gamma: float) -> Tensor:
        """[B, N] R_n = Σ_{m ≥ n} γ^(m−n) r_m."""
        return masked.reverse_recursion(self.rewards(batch, part), self.exists, gamma)

    def broadcast_to_tokens(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, N] -> [B, T]: each turn's x at its tokens."""
        return masked.apply_mask(x.gather(1, self.index), mask)


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
    needs: ClassVar[frozenset[str]] = frozenset({"turn_state", "token_reward"})
    starts_chain: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_unit_interval(self, gamma=self.gamma)

    @property
    def formula(self) -> str:
        discount = "" if self.gamma == 1 else f"{self.gamma:g}^(m−n) "
        return f"R_n = Σ_{{m≥n}} {discount}r_m,  n the turn"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        turns = Turns.of(batch, self)
        return turns.broadcast_to_tokens(turns.returns(batch, self, self.gamma), batch.mask)


@dataclass(frozen=True)
class TurnLeaveOneOut(Advantage):
    """Ψ ← Ψ − 1/|S| Σ_{j ∈ S} Ψ_{j,n} at turn n, S the siblings that have a turn n, Ψ_{j,n} theirs at its first token.

    The baseline does not see what episode i does, so it is unbiased, and it is of the same stage: after `TurnReturn` the rewards
    to go from turn n are compared with each other, where `LeaveOneOut` compares them with whole episodes. A turn that no sibling
    has is compared with 0. Source: Ahmadian et al. 2024 (RLOO), turn by turn.

    Raises:
        ConfigError: a batch without anchors.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"turn_state"})
    uses_group_statistics: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return "− mean_{j≠i} Ψ_{j,n},  over the siblings that have a turn n"

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
    """Ψ ← γ^n Ψ at turn n, the first is 0: what makes a discounted return per turn the gradient of E[Σ_n γ^n r_n].

    Without it later turns count as much as the first, as in practice they mostly do: that is no objective's gradient.
    Source: Sutton & Barto 2018, sec. 13.3; Thomas 2014.

    Raises:
        ConfigError: a batch without anchors.
    """

    gamma: float = 0.99
    """Per turn."""
    needs: ClassVar[frozenset[str]] = frozenset({"turn_state"})

    def __post_init__(self) -> None:
        check_unit_interval(self, gamma=self.gamma)

    @property
    def formula(self) -> str:
        return f";  × {self.gamma:g}^n at turn n"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        index = Turns.of(batch, self).index
        return masked.apply_mask(psi * self.gamma ** index.to(psi.dtype), batch.mask)


def _group_turns(group: Tensor, key: Tensor) -> Groups:
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
    needs: ClassVar[frozenset[str]] = frozenset({"turn_state", "token_reward"})
    starts_chain: ClassVar[bool] = True
    uses_group_statistics: ClassVar[bool] = True

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
        state = turns.at_turn_starts(require_field(batch.turn_state, self, "turn_state"))[exists]
        relative = self._relative(returns[exists], _group_turns(batch.group[row], state))
        step = torch.zeros_like(returns).masked_scatter(exists, relative)
        return masked.apply_mask(
            episode[:, None] + self.omega * turns.broadcast_to_tokens(step, batch.mask), batch.mask
        )

    def _relative(self, r: Tensor, groups: Groups) -> Tensor:
        """(r − mean)/F, 0 exactly where r does not differ."""
        centred = masked.apply_mask(r, groups.keep) - groups.mean(r)
        scaled = centred / (groups.std(r, self.ddof) + self.eps) if self.std else centred
        return masked.apply_mask(scaled, ~groups.is_constant(r))


# LEVER 1 with a critic, along the turns of an episode: GAE over turns, over tokens with a reward for each turn, over both.
#
# A turn's reward stands at its last token, and γ per turn discounts there alone, so that a long turn costs nothing. What γ < 1 per
# turn makes of V is the critic's to learn: `Critic.turn_gamma` must be the same.

TURN_VALUE_FIELDS = frozenset({"values", "turn_state", "token_reward"})


@dataclass(frozen=True)
class TurnGAE(Advantage):
    """A_n = Σ_l (γλ)^l δ_{n+l}, δ_n = r_n + γV(s_{n+1}) − V(s_n), at every token of turn n: GAE with turns for steps.

    V(s_n) is the critic's value before the turn's first token, r_n the sum of its rewards. λ = 1 is the return to go less V(s_n),
    unbiased whatever the critic says. Within a turn nothing is told apart. The paper's critic learns where turns begin, ours at
    every token.
    Source: Li et al. 2025 (Turn-PPO), arXiv:2512.17008, the turn-level MDP; its best γ, λ are 0.99, 0.9.

    Raises:
        ConfigError: a batch without values, anchors or token rewards.
    """

    gamma: float = 1.0
    """Per turn."""
    lam: float = 0.95
    """Per turn."""
    bootstrap: bool = False
    """Whether an episode that was cut off goes on in the critic's value of where it stopped."""
    starts_chain: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_unit_interval(self, gamma=self.gamma, lam=self.lam)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return _needs(self.bootstrap)

    @property
    def formula(self) -> str:
        delta = f"δ_n = r_n + {self.gamma:g}·V(s_{{n+1}}) − V(s_n)"
        return f"Σ_l ({self.gamma:g}·{self.lam:g})^l δ_{{n+l}},  {delta},  n the turn"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        turns, end = Turns.of(batch, self), _end(batch, self, self.bootstrap)
        reward = turns.rewards(batch, self)
        value = turns.at_turn_starts(require_field(batch.values, self, "values")).to(reward.dtype)
        after = torch.where(turns.last, end[:, None].to(reward.dtype), pad(value, (0, 1))[:, 1:])
        delta = masked.apply_mask(reward + self.gamma * after - value, turns.exists)
        return turns.broadcast_to_tokens(
            masked.reverse_recursion(delta, turns.exists, self.gamma * self.lam), batch.mask
        )


@dataclass(frozen=True)
class MultiTurnGAE(Advantage):
    """A_t = δ_t + γ_t λ A_{t+1}, δ_t = r_t + γ_t V_{t+1} − V_t: GAE over tokens, with each turn's reward at its last one.

    γ_t = γ within a turn, and γ·γ_turn at its last token: a discount per turn, whatever its length. With γ_turn = 1 it is MT-PPO's,
    and without rewards of turns it is `GAE`. Source: Wei et al. 2025 (MT-PPO), arXiv:2505.11821, eq. 8 and 9; a discount that
    depends on the step is Sutton & Barto 2018, sec. 12.8.

    Raises:
        ConfigError: a batch without values, anchors or token rewards.
    """

    gamma: float = 1.0
    """Per token."""
    lam: float = 0.95
    """Per token."""
    turn_gamma: float = 1.0
    """Per turn."""
    bootstrap: bool = False
    """Whether an episode that was cut off goes on in the critic's value of where it stopped."""
    starts_chain: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_unit_interval(self, gamma=self.gamma, lam=self.lam, turn_gamma=self.turn_gamma)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return _needs(self.bootstrap)

    @property
    def formula(self) -> str:
        delta = f"δ_t = r_t + {self.gamma:g}·V_{{t+1}} − V_t"
        turn = "" if self.turn_gamma == 1 else f",  {self.turn_gamma:g} times less of what follows a turn"
        return f"Σ_l ({self.gamma:g}·{self.lam:g})^l δ_{{t+l}},  {delta},  r at turns' ends{turn}"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        p, ends = _by_turn(batch, self, self.bootstrap)
        gamma = torch.full_like(p.value, self.gamma).masked_fill(ends, self.gamma * self.turn_gamma)
        delta = masked.apply_mask(p.reward + gamma * p.next_value - p.value, p.mask)
        return p.scatter_back(masked.reverse_recursion(delta, p.mask, gamma * self.lam))


@dataclass(frozen=True)
class BiLevelGAE(Advantage):
    """A_e = δ_n + γ_turn λ_turn A_{e'} at a turn's last token e, e' the next turn's, and GAE(γ, λ) from it back through the turn.

    δ_n = r_e + γ_turn V_{e'} − V_e, with V_e the value before the turn's last token; within the turn A_t = r_t + γV_{t+1} − V_t +
    γλA_{t+1}, which ends in A_e. With all four at 1 it is the return to go less V_t, as is `MultiTurnGAE` at λ = 1. At λ_turn < 1
    even an exact critic leaves a bias where the policy chooses how long a turn is: V_{e'} has seen that it goes on.
    Source: Wang et al. 2025 (VAGEN), arXiv:2510.16907, sec. 4.2, as in the authors' code: A_e takes the place of the last token's
    own advantage, where algorithm 2 adds it.

    Raises:
        ConfigError: a batch without values, anchors or token rewards.
    """

    gamma: float = 1.0
    """Per token, within a turn."""
    lam: float = 0.95
    """Per token, within a turn."""
    turn_gamma: float = 1.0
    """Per turn."""
    turn_lam: float = 0.95
    """Per turn."""
    bootstrap: bool = False
    """Whether an episode that was cut off goes on in the critic's value of where it stopped."""
    starts_chain: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_unit_interval(self, gamma=self.gamma, lam=self.lam, turn_gamma=self.turn_gamma, turn_lam=self.turn_lam)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return _needs(self.bootstrap)

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


def turn_discount(link: Advantage) -> float | None:
    """The γ per turn of an advantage from values; None = it is from none, or another's."""
    if isinstance(link, TurnGAE):
        return link.gamma
    if isinstance(link, MultiTurnGAE | BiLevelGAE):
        return link.turn_gamma
    return 1.0 if isinstance(link, GAE | NStep | LengthAdaptiveGAE) else None


def _needs(bootstrap: bool) -> frozenset[str]:
    return TURN_VALUE_FIELDS | {"bootstrap"} if bootstrap else TURN_VALUE_FIELDS


def _end(batch: Batch, part: object, bootstrap: bool) -> Tensor:
    """[B] the value after the last token: 0, or the critic's where an episode was cut off."""
    if bootstrap:
        return require_field(batch.bootstrap, part, "bootstrap")
    return torch.zeros_like(batch.reward) if batch.bootstrap is None else batch.bootstrap


def _by_turn(batch: Batch, part: object, bootstrap: bool) -> tuple[CompactTokens, Tensor]:
    """The sampled tokens side by side, and which of them are a turn's last [B, N]."""
    p = CompactTokens.of(batch, part, bootstrap)
    first = turn_starts(batch, part).gather(1, p.order)
    turn_continues = pad(p.mask & ~first, (0, 1))[:, 1:]  # the next token is of the same turn
    return p, p.mask & ~turn_continues
