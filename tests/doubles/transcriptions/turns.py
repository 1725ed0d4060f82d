"""Credit along turns, literally: lists of turns, defining sums, one token after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

import policygrad as pg
from doubles.transcriptions.data import ppo_clip, turns_of
from doubles.transcriptions.objectives import Completion, Prompts, count_tokens, mean, zero

ByTurn = Callable[[Completion], list[Tensor]]


def rewards(o: Completion) -> list[Tensor]:
    """r_n: a turn's token rewards; the last one's with the completion's reward."""
    r = [sum((o.token_reward[t] for t in turn), o.reward * 0) for turn in turns_of(o)]
    return [*r[:-1], r[-1] + o.reward]


def returns(o: Completion, gamma: float) -> list[Tensor]:
    """R_n = Σ_{m≥n} γ^{m−n} r_m."""
    r = rewards(o)
    return [sum((gamma ** (m - n) * r[m] for m in range(n, len(r))), o.reward * 0) for n in range(len(r))]


def turn_gae(o: Completion, gamma: float, lam: float) -> list[Tensor]:
    """Turn-PPO: A_h = Σ_k (γλ)^k δ_{h+k}, δ_h = r_h + γ v_{h+1} − v_h, v_h before the turn's first token."""
    r, v = rewards(o), [o.value[turn[0]] for turn in turns_of(o)]
    delta = [r[h] + (gamma * v[h + 1] if h + 1 < len(v) else 0) - v[h] for h in range(len(v))]
    return [sum(((gamma * lam) ** (k - h) * delta[k] for k in range(h, len(v))), o.reward * 0) for h in range(len(v))]


def token_rewards(o: Completion) -> list[Tensor]:
    """MT-PPO eq. 9: what a turn earned at its last token, the outcome at the trajectory's."""
    return [*o.token_reward[:-1], o.token_reward[-1] + o.reward]


def multi_turn_gae(o: Completion, gamma: float, lam: float, turn_gamma: float) -> list[Tensor]:
    """MT-PPO eq. 8: A_t = Σ_l (Π λγ) δ_{t+l}, δ_t = r_t + γ_t V_{t+1} − V_t, γ_t = γ·γ_turn at a turn's last token."""
    r, last = token_rewards(o), {turn[-1] for turn in turns_of(o)}
    rate = [gamma * turn_gamma if t in last else gamma for t in range(len(o))]
    delta = [r[t] + (rate[t] * o.value[t + 1] if t + 1 < len(o) else 0) - o.value[t] for t in range(len(o))]
    result = []
    for t in range(len(o)):
        total, weight = o.reward * 0, 1.0
        for k in range(t, len(o)):
            total, weight = total + weight * delta[k], weight * lam * rate[k]
        result.append(total)
    return result


def bi_level_gae(o: Completion, gamma: float, lam: float, turn_gamma: float, turn_lam: float) -> list[Tensor]:
    """VAGEN's two passes: turns by their last tokens, then each turn's tokens back from there."""
    r, turns = token_rewards(o), turns_of(o)
    A, ahead, after = {}, o.reward * 0, o.reward * 0
    for turn in reversed(turns):
        e = turn[-1]
        ahead = r[e] + turn_gamma * after - o.value[e] + turn_gamma * turn_lam * ahead
        A[e], after = ahead, o.value[e]
    for turn in turns:
        for t in reversed(turn[:-1]):
            A[t] = r[t] + gamma * o.value[t + 1] - o.value[t] + gamma * lam * A[t + 1]
    return [A[t] for t in range(len(o))]


def clipped(prompts: Prompts, advantages: dict[int, list[Tensor]]) -> Tensor:
    """1/Σ|o| Σ_t min(r Â_t, clip(r, 0.8, 1.2) Â_t)."""
    J = zero(prompts)
    for o in (o for outputs in prompts for o in outputs):
        J = J + sum(ppo_clip(o, t, advantages[id(o)][t]) for t in range(len(o)))
    return J / max(1, count_tokens(prompts))


def spread(o: Completion, by_turn: list[Tensor]) -> list[Tensor]:
    """A turn's at each of its tokens."""
    return [A for turn, A in zip(turns_of(o), by_turn, strict=True) for _ in turn]


def of_turns(credit: ByTurn) -> Callable[[Prompts, int], Tensor]:
    return lambda prompts, width: clipped(
        prompts, {id(o): spread(o, credit(o)) for outputs in prompts for o in outputs}
    )


def of_tokens(credit: ByTurn) -> Callable[[Prompts, int], Tensor]:
    return lambda prompts, width: clipped(prompts, {id(o): credit(o) for outputs in prompts for o in outputs})


def siblings(prompts: Prompts, width: int) -> Tensor:
    """γ^n (R_n − mean over the siblings that have a turn n), γ = 0.9."""
    A: dict[int, list[Tensor]] = {}
    for outputs in prompts:
        R = {id(o): returns(o, 0.9) for o in outputs}
        for o in outputs:
            own = []
            for n, x in enumerate(R[id(o)]):
                others = [R[id(p)][n] for p in outputs if p is not o and len(R[id(p)]) > n]
                own.append(0.9**n * (x - mean(others)))
            A[id(o)] = spread(o, own)
    return clipped(prompts, A)


BASE = replace(pg.GIGPO, terms=())
TURN_PARTS: dict[str, tuple[pg.Algorithm, Callable[[Prompts, int], Tensor]]] = {
    "rewards to go per turn": (replace(BASE, advantage=(pg.TurnReturn(0.9),)), of_turns(lambda o: returns(o, 0.9))),
    "siblings' turns": (
        replace(BASE, advantage=(pg.TurnReturn(0.9), pg.TurnLeaveOneOut(), pg.TurnDiscount(0.9))),
        siblings,
    ),
    "Turn-PPO's GAE": (
        replace(BASE, advantage=(pg.TurnGAE(0.99, 0.9),), critic=pg.Critic(turn_gamma=0.99)),
        of_turns(lambda o: turn_gae(o, 0.99, 0.9)),
    ),
    "MT-PPO's GAE": (
        replace(BASE, advantage=(pg.MultiTurnGAE(0.98, 0.9),), critic=pg.Critic(gamma=0.98)),
        of_tokens(lambda o: multi_turn_gae(o, 0.98, 0.9, 1.0)),
    ),
    "GAE with a discount per turn": (
        replace(BASE, advantage=(pg.MultiTurnGAE(1.0, 0.9, 0.8),), critic=pg.Critic(turn_gamma=0.8)),
        of_tokens(lambda o: multi_turn_gae(o, 1.0, 0.9, 0.8)),
    ),
    "VAGEN's bi-level GAE": (
        replace(BASE, advantage=(pg.BiLevelGAE(0.98, 0.7, 0.9, 0.6),), critic=pg.Critic(gamma=0.98, turn_gamma=0.9)),
        of_tokens(lambda o: bi_level_gae(o, 0.98, 0.7, 0.9, 0.6)),
    ),
}
TURN_FIELDS = dict.fromkeys(TURN_PARTS, "turns")
"""What a random batch needs for each."""
