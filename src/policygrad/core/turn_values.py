"""LEVER 1 with a critic, along the turns of an episode: GAE over turns, over tokens with a reward for each turn, over both.

A turn's reward stands at its last token, and γ per turn discounts there alone, so that a long turn costs nothing. What γ < 1 per
turn makes of V is the critic's to learn: `Critic.turn_gamma` must be the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from policygrad.core import ragged
from policygrad.core.batch import Batch, required
from policygrad.core.protocols import Advantage
from policygrad.core.ranges import unit
from policygrad.core.turns import Turns, turn_starts
from policygrad.core.values import GAE, LengthAdaptiveGAE, NStep, Packed

NEEDS = frozenset({"values", "anchor", "token_reward"})


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
    starts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        unit(self, gamma=self.gamma, lam=self.lam)

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
        value = turns.starting(required(batch.values, self, "values")).to(reward.dtype)
        after = torch.where(turns.last, end[:, None].to(reward.dtype), pad(value, (0, 1))[:, 1:])
        delta = ragged.masked(reward + self.gamma * after - value, turns.there)
        return turns.spread(ragged.recursion(delta, turns.there, self.gamma * self.lam), batch.mask)


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
    starts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        unit(self, gamma=self.gamma, lam=self.lam, turn_gamma=self.turn_gamma)

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
        delta = ragged.masked(p.reward + gamma * p.after - p.value, p.mask)
        return p.back(ragged.recursion(delta, p.mask, gamma * self.lam))


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
    starts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        unit(self, gamma=self.gamma, lam=self.lam, turn_gamma=self.turn_gamma, turn_lam=self.turn_lam)

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
        nothing = torch.zeros_like(turns.there, dtype=p.value.dtype)
        reward, value = (nothing.scatter_add(1, index, ragged.masked(x, ends)) for x in (p.reward, p.value))
        after = torch.where(turns.last, end[:, None].to(value.dtype), pad(value, (0, 1))[:, 1:])
        delta = ragged.masked(reward + self.turn_gamma * after - value, turns.there)
        by_turn = ragged.recursion(delta, turns.there, self.turn_gamma * self.turn_lam)
        within = p.reward + self.gamma * p.after - p.value
        x = torch.where(ends, by_turn.gather(1, index), within)
        return p.back(ragged.recursion(x, p.mask, torch.full_like(x, self.gamma * self.lam).masked_fill(ends, 0.0)))


def per_turn(link: Advantage) -> float | None:
    """The γ per turn of an advantage from values; None = it is from none, or another's."""
    if isinstance(link, TurnGAE):
        return link.gamma
    if isinstance(link, MultiTurnGAE | BiLevelGAE):
        return link.turn_gamma
    return 1.0 if isinstance(link, GAE | NStep | LengthAdaptiveGAE) else None


def _needs(bootstrap: bool) -> frozenset[str]:
    return NEEDS | {"bootstrap"} if bootstrap else NEEDS


def _end(batch: Batch, part: object, bootstrap: bool) -> Tensor:
    """[B] the value after the last token: 0, or the critic's where an episode was cut off."""
    if bootstrap:
        return required(batch.bootstrap, part, "bootstrap")
    return torch.zeros_like(batch.reward) if batch.bootstrap is None else batch.bootstrap


def _by_turn(batch: Batch, part: object, bootstrap: bool) -> tuple[Packed, Tensor]:
    """The sampled tokens side by side, and which of them are a turn's last [B, N]."""
    p = Packed.of(batch, part, bootstrap)
    first = turn_starts(batch, part).gather(1, p.order)
    goes_on = pad(p.mask & ~first, (0, 1))[:, 1:]  # the next token is of the same turn
    return p, p.mask & ~goes_on
