"""The papers' objectives that read more of a rollout than rewards: several rewards, turns, demonstrations. Literally."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import policygrad as pg
from doubles.transcriptions.objectives import (
    Completion,
    Prompts,
    clip,
    count,
    count_tokens,
    mean,
    sg,
    std,
    zero,
    zscore,
)


def relative(x: Tensor, xs: list[Tensor]) -> Tensor:
    """(x − mean)/(std + ε); 0 where there is nothing to compare, or all are equal."""
    if len(xs) < 2 or max(xs) == min(xs):
        return torch.zeros((), dtype=torch.float64)
    return (x - mean(xs)) / (std(xs) + 1e-4)


def ppo_clip(o: Completion, t: int, A: Tensor) -> Tensor:
    return torch.minimum(o.r(t) * A, clip(o.r(t), 0.8, 1.2) * A)


def gdpo(prompts: Prompts, width: int) -> Tensor:
    """GDPO: A_k = (r_k − mean)/(std + ε) for each reward in its group, Σ_k w_k A_k = A, Â = (A − mean A)/(std A + ε)."""
    A: dict[int, Tensor] = {}
    for outputs in prompts:
        for o in outputs:
            A[id(o)] = torch.zeros((), dtype=torch.float64)
            for k, w in enumerate(o.reward_weights):
                if not o.rewards[k].isnan():
                    known = [p.rewards[k] for p in outputs if not p.rewards[k].isnan()]
                    A[id(o)] = A[id(o)] + w * relative(o.rewards[k], known)
    every = list(A.values())
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            hat = (A[id(o)] - mean(every)) / (std(every) + 1e-4) if len(every) > 1 else A[id(o)] * 0
            J = J + sum(ppo_clip(o, t, hat) for t in range(len(o))) / len(o)
    return J / max(1, count(prompts))


def turns_of(o: Completion) -> list[list[int]]:
    """The tokens of each turn: a turn ends where the environment speaks, or the state is another."""
    turns: list[list[int]] = []
    for t in range(len(o)):
        goes_on = t > 0 and o.position[t] == o.position[t - 1] + 1 and bool(o.anchor[t] == o.anchor[t - 1])
        if goes_on:
            turns[-1].append(t)
        else:
            turns.append([t])
    return turns


def gigpo(prompts: Prompts, width: int) -> Tensor:
    """GiGPO eq. 3 and 5 to 9: A = A^E + ω A^S with ω = 1, γ = 0.95, F = std; −0.01 KL (k3)."""
    J = zero(prompts)
    for outputs in prompts:
        R = {id(o): o.reward + sum(o.token_reward) for o in outputs}
        returns: dict[tuple[int, int], Tensor] = {}
        groups: dict[int, list[Tensor]] = defaultdict(list)
        for o in outputs:
            turns = turns_of(o)
            r = [sum((o.token_reward[t] for t in turn), o.reward * 0) for turn in turns]
            r[-1] = r[-1] + o.reward
            for n, turn in enumerate(turns):
                returns[id(o), n] = sum((0.95 ** (m - n) * r[m] for m in range(n, len(turns))), o.reward * 0)
                groups[int(o.anchor[turn[0]])].append(returns[id(o), n])
        for o in outputs:
            episode = relative(R[id(o)], list(R.values()))
            for n, turn in enumerate(turns_of(o)):
                A = episode + relative(returns[id(o), n], groups[int(o.anchor[turn[0]])])
                for t in turn:
                    J = J + ppo_clip(o, t, A) - 0.01 * (torch.exp(-o.u(t)) + o.u(t) - 1)
    return J / max(1, count_tokens(prompts))


def luffy(prompts: Prompts, width: int) -> Tensor:
    """LUFFY: 1/Z (Σ_shown f(π_θ/π_φ) Â + Σ_sampled CLIP(r, Â)), f(x) = x/(x + 0.1), Â over both, Z all tokens."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            A = zscore(o, outputs)
            for t in range(len(o)):
                if o.demonstration:
                    x = torch.exp(o.logp[t]) / torch.exp(o.sampler[t])
                    J = J + x / (x + 0.1) * A
                else:
                    J = J + ppo_clip(o, t, A)
    return J / max(1, count_tokens(prompts))


def chord(prompts: Prompts, width: int, mu: float = 0.1, phi: bool = True) -> Tensor:
    """(1 − μ) × GRPO over what was sampled + μ × the token mean of sg[p(1 − p)] log p, or log p, over what was shown."""
    sampled = [[o for o in outputs if not o.demonstration] for outputs in prompts]
    shown = [[o for o in outputs if o.demonstration] for outputs in prompts]
    J, S = zero(prompts), zero(prompts)
    for outputs in sampled:
        for o in outputs:
            J = J + sum(ppo_clip(o, t, zscore(o, outputs)) for t in range(len(o)))
    for outputs in shown:
        for o in outputs:
            for t in range(len(o)):
                p = sg(torch.exp(o.logp[t]))
                S = S + (p * (1 - p) if phi else 1) * o.logp[t]
    return (1 - mu) * J / max(1, count_tokens(sampled)) + mu * S / max(1, count_tokens(shown))


DATA = {"gdpo": gdpo, "gigpo": gigpo, "luffy": luffy, "chord": chord}
DATA_PARTS: dict[str, tuple[pg.Algorithm, Callable[[Prompts, int], Tensor]]] = {
    "CHORD-μ, at first": (
        replace(pg.CHORD, terms=(pg.DemonstrationNLL(0.9, token_weighting=False, final_mu=0.05),)),
        lambda p, w: chord(p, w, 0.9, phi=False),
    )
}
FIELDS = {"gdpo": "rewards", "gigpo": "turns", "luffy": "demonstrations", "chord": "demonstrations"}
FIELDS |= dict.fromkeys(DATA_PARTS, "demonstrations")
"""What a random batch needs for each."""
