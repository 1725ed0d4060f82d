"""The papers' objectives, literally: loops over prompts, completions and tokens, min/clip/sg, float64, autograd.

Test-only and independent of the library: a batch is first read into lists of completions that hold their sampled
tokens alone, so nothing here knows about masks or padding. Denominators are those the specification states. Where a
paper writes `Ψ log π_θ`, `log_pi` is log π_θ plus a constant of θ, so that its value is 1 at r = 1 as the library states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Completion:
    """One completion: its sampled tokens' log-probabilities, in order, and what it was given."""

    reward: Tensor
    logp: list[Tensor]
    old: list[Tensor]
    ref: list[Tensor]
    weight: list[Tensor]
    token_reward: list[Tensor]
    value: list[Tensor]
    sampler: list[Tensor]
    step_end: list[Tensor]
    truncated: bool
    baseline: Tensor
    """The reward of the greedy completion of the prompt."""
    entropy: list[Tensor]
    anchor: list[Tensor] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    rewards: list[Tensor] = field(default_factory=list)
    reward_weights: tuple[float, ...] = ()
    demonstration: bool = False
    implicit: list[Tensor] = field(default_factory=list)
    drawn: list[Tensor] = field(default_factory=list)
    """Whether chance has chosen a token, for an objective that is stated given a draw."""

    def __len__(self) -> int:
        return len(self.logp)

    def r(self, t: int) -> Tensor:
        return torch.exp(self.logp[t] - self.old[t])

    def u(self, t: int) -> Tensor:
        return self.logp[t] - self.ref[t]


Prompts = list[list[Completion]]


def read(batch: Any, logp: Tensor) -> Prompts:
    """The batch as lists; a completion without a sampled token is nobody."""
    prompts: dict[int, list[Completion]] = defaultdict(list)

    def tokens(i: int, x: Tensor | None, default: list[Tensor]) -> list[Tensor]:
        where = torch.nonzero(batch.mask[i]).flatten().tolist()
        return default if x is None else [x[i, t] for t in where]

    for i in range(batch.mask.shape[0]):
        chosen = tokens(i, logp, [])
        if chosen:
            o = Completion(
                reward=batch.reward[i],
                logp=chosen,
                old=tokens(i, batch.logp_old, [sg(x) for x in chosen]),
                ref=tokens(i, batch.logp_ref, []),
                weight=tokens(i, batch.weight, [torch.ones((), dtype=torch.float64)] * len(chosen)),
                token_reward=tokens(i, batch.token_reward, [torch.zeros((), dtype=torch.float64)] * len(chosen)),
                value=tokens(i, batch.values, []),
                sampler=tokens(i, batch.logp_sampler, []),
                step_end=tokens(i, batch.step_end, []),
                truncated=bool(batch.truncated[i]) if batch.truncated is not None else False,
                baseline=torch.tensor(torch.nan) if batch.baseline is None else batch.baseline[i],
                entropy=tokens(i, batch.entropy, []),
                anchor=tokens(i, batch.turn_state, []),
                position=torch.nonzero(batch.mask[i]).flatten().tolist(),
                rewards=list(batch.rewards[i]) if batch.rewards is not None else [],
                reward_weights=batch.reward_weights,
                demonstration=bool(batch.demonstration[i]) if batch.demonstration is not None else False,
                implicit=tokens(i, batch.implicit_reward, []),
                drawn=tokens(i, batch.selected, []),
            )
            prompts[int(batch.group[i])].append(o)
    return list(prompts.values())


def sg(x: Tensor) -> Tensor:
    return x.detach()


def clip(r: Tensor, low: float, high: float) -> Tensor:
    return r.clamp(low, high)


def log_pi(o: Completion, t: int) -> Tensor:
    """log π_θ up to a constant of θ: 1 where π_θ = π_old."""
    return o.logp[t] - sg(o.old[t]) + 1


def count(prompts: Prompts) -> int:
    """B."""
    return sum(len(outputs) for outputs in prompts)


def count_tokens(prompts: Prompts) -> int:
    return sum(len(o) for outputs in prompts for o in outputs)


def mean(xs: list[Tensor]) -> Tensor:
    return sum(xs, torch.zeros((), dtype=torch.float64)) / max(1, len(xs))


def std(xs: list[Tensor], ddof: int = 1) -> Tensor:
    return torch.sqrt(sum(((x - mean(xs)) ** 2 for x in xs), torch.zeros((), dtype=torch.float64)) / (len(xs) - ddof))


def zscore(o: Completion, outputs: list[Completion], ddof: int = 1) -> Tensor:
    """Â_i of GRPO; exactly 0 in a group whose rewards are all equal."""
    rewards = [p.reward for p in outputs]
    if max(rewards) == min(rewards):
        return torch.zeros((), dtype=torch.float64)
    return (o.reward - mean(rewards)) / (std(rewards, ddof) + 1e-4)


def zero(prompts: Prompts) -> Tensor:
    return sum(
        (x.sum() * 0 for outputs in prompts for o in outputs for x in o.logp), torch.zeros((), dtype=torch.float64)
    )


def without_no_spread(prompts: Prompts) -> Prompts:
    """DAPO's constraint: 0 < the number of right answers < G."""
    return [outputs for outputs in prompts if max(o.reward for o in outputs) > min(o.reward for o in outputs)]


def without_truncated(prompts: Prompts) -> Prompts:
    kept = [[o for o in outputs if not o.truncated] for outputs in prompts]
    return [outputs for outputs in kept if outputs]


def overlong_penalty(length: int, l_max: int) -> float:
    """R_length(y), DAPO eq. 13, in exact arithmetic."""
    l_cache = Fraction(l_max, 5)
    if length <= l_max - l_cache:
        return 0.0
    return float(((l_max - l_cache) - length) / l_cache) if length <= l_max else -1.0


def punished(o: Completion, l_max: int, scale: float = 1.0) -> Tensor:
    """R + scale·R_length; a completion that was cut off has reached the budget, whatever part of it was sampled tokens."""
    return o.reward + scale * overlong_penalty(l_max if o.truncated else len(o), l_max)


def reinforce(prompts: Prompts, width: int, baseline: float = 0.0) -> Tensor:
    """1/B Σ_i (R_i − b) log π(o_i)."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            for t in range(len(o)):
                J = J + (o.reward + sum(o.token_reward[t:]) - baseline) * (o.logp[t] - sg(o.logp[t]) + 1)
    return J / max(1, count(prompts))


def rloo(prompts: Prompts, width: int, beta: float = 0.05) -> Tensor:
    """1/B Σ_i (R_i − mean_{j≠i} R_j) log π(o_i), R(o) = score − β log(π_old(o)/π_ref(o)) of the whole completion."""
    J = zero(prompts)
    for outputs in prompts:
        R = {id(o): o.reward - beta * sum(sg(o.old[t] - o.ref[t]) for t in range(len(o))) for o in outputs}
        for o in outputs:
            others = [R[id(p)] for p in outputs if p is not o]
            if others:
                J = J + (R[id(o)] - mean(others)) * sum(o.logp[t] - sg(o.logp[t]) + 1 for t in range(len(o)))
    return J / max(1, count(prompts))


def rloo_to_go(prompts: Prompts, width: int, beta: float = 0.05) -> Tensor:
    """The same with the KL of a token's own future in its reward, against the siblings' whole ones."""
    J = zero(prompts)
    for outputs in prompts:

        def to_go(o: Completion, t: int) -> Tensor:
            return o.reward - sum(beta * sg(o.old[s] - o.ref[s]) for s in range(t, len(o)))

        for o in outputs:
            others = [to_go(p, 0) for p in outputs if p is not o]
            for t in range(len(o) if others else 0):
                J = J + (to_go(o, t) - mean(others)) * (o.logp[t] - sg(o.logp[t]) + 1)
    return J / max(1, count(prompts))


def grpo(prompts: Prompts, width: int, beta: float = 0.04) -> Tensor:
    """DeepSeekMath eq. 3, with the KL estimator of eq. 4."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            A = zscore(o, outputs)
            inner = 0
            for t in range(len(o)):
                kl = torch.exp(o.ref[t] - o.logp[t]) - (o.ref[t] - o.logp[t]) - 1
                inner = inner + torch.minimum(o.r(t) * A, clip(o.r(t), 0.8, 1.2) * A) - beta * kl
            J = J + inner / len(o)
    return J / max(1, count(prompts))


def dr_grpo(prompts: Prompts, width: int) -> Tensor:
    """Dr. GRPO, sec. 3.2: no std, and the generation budget for the length."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            A = o.reward - mean([p.reward for p in outputs])
            for t in range(len(o)):
                J = J + torch.minimum(o.r(t) * A, clip(o.r(t), 0.8, 1.2) * A)
    return J / (max(1, count(prompts)) * width)


def dapo(
    prompts: Prompts, width: int, high: float = 0.28, penalty: Callable[[Completion, int], Tensor | float] | None = None
) -> Tensor:
    """DAPO eq. 8, the token mean over the whole step; dynamic sampling, overlong mask, soft overlong penalty.

    `penalty`: subtracted at every token that takes part.
    """
    prompts = without_truncated(without_no_spread(prompts))
    J = zero(prompts)
    for outputs in prompts:
        punished = [replace(o, reward=o.reward + overlong_penalty(len(o), width)) for o in outputs]
        for o in punished:
            A = zscore(o, punished)
            for t in range(len(o)):
                J = J + torch.minimum(o.r(t) * A, clip(o.r(t), 1 - 0.2, 1 + high) * A)
                J = J - (0 if penalty is None else penalty(o, t))
    return J / max(1, count_tokens(prompts))


def gspo(prompts: Prompts, width: int) -> Tensor:
    """GSPO eq. 5 with s_i of eq. 7."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            A = zscore(o, outputs)
            s = torch.exp(sum(o.logp[t] - o.old[t] for t in range(len(o))) / len(o))
            J = J + torch.minimum(s * A, clip(s, 1 - 3e-4, 1 + 4e-4) * A)
    return J / max(1, count(prompts))


def gspo_token(prompts: Prompts, width: int) -> Tensor:
    """GSPO eq. 13 with s_{i,t} of eq. 14 and Â_{i,t} = the z-score plus the token rewards to come."""
    J = zero(prompts)
    for outputs in prompts:
        totals = [replace(o, reward=o.reward + sum(o.token_reward)) for o in outputs]
        rewards = [o.reward for o in totals]
        for o in outputs:
            s = sg(torch.exp(sum(o.logp[t] - o.old[t] for t in range(len(o))) / len(o)))
            inner = 0
            for t in range(len(o) if len(outputs) > 1 else 0):
                A = (o.reward + sum(o.token_reward[t:]) - mean(rewards)) / (std(rewards) + 1e-4)
                s_t = s * torch.exp(o.logp[t] - sg(o.logp[t]))
                inner = inner + torch.minimum(s_t * A, clip(s_t, 1 - 3e-4, 1 + 4e-4) * A)
            J = J + inner / len(o)
    return J / max(1, count(prompts))


def cispo(prompts: Prompts, width: int, low: float = 0.0, high: float = 5.0) -> Tensor:
    """MiniMax-M1 eq. 4 and 5, absolute bounds, the token mean over the whole step; DAPO's dynamic sampling and length penalty."""
    prompts = [[replace(o, reward=punished(o, width)) for o in outputs] for outputs in without_no_spread(prompts)]
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            A = zscore(o, outputs)
            for t in range(len(o)):
                J = J + sg(clip(o.r(t), low, high)) * A * log_pi(o, t)
    return J / max(1, count_tokens(prompts))


def sapo(prompts: Prompts, width: int) -> Tensor:
    """SAPO eq. 5 and 6: f(r) = σ(τ(r − 1))·4/τ."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            A = zscore(o, outputs)
            tau = 1.0 if A > 0 else 1.05
            J = J + sum(torch.sigmoid(tau * (o.r(t) - 1)) * 4 / tau * A for t in range(len(o))) / len(o)
    return J / max(1, count(prompts))


NAMED = {f.__name__: f for f in (reinforce, rloo, grpo, dr_grpo, dapo, gspo, cispo, sapo)}
