"""Literal transcriptions: greedy and constant baselines, maximum likelihood, pass@k, rejection sampling, off-policy REINFORCE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

import policygrad as pg
from doubles.transcriptions.objectives import (
    Completion,
    Prompts,
    clip,
    count,
    count_tokens,
    log_pi,
    mean,
    sg,
    std,
    without_no_spread,
    zero,
)

Advantages = Callable[[list[Completion]], list[Tensor]]
ZERO = torch.zeros((), dtype=torch.float64)


def every_token(prompts: Prompts, of: Callable[[list[Completion]], list[Tensor]]) -> Tensor:
    """Σ over prompts and completions of what `of` makes of a prompt's completions."""
    return sum((sum(of(outputs), ZERO) for outputs in prompts), zero(prompts))


def remax(prompts: Prompts, width: int) -> Tensor:
    """ReMax, algorithm 1: 1/N Σ_i Σ_t log π(a_t) [r(x, a_1:T) − r(x, ā_1:T)]."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            if torch.isfinite(o.baseline):
                J = J + sum((o.reward - o.baseline) * (o.logp[t] - sg(o.logp[t]) + 1) for t in range(len(o)))
    return J / max(1, count(prompts))


def whitened(advantages: dict[tuple[int, int], Tensor]) -> dict[tuple[int, int], Tensor]:
    """(A − mean)/√(var + 1e-8) over all tokens of the batch; one token alone has no variance."""
    values = list(advantages.values())
    spread = std(values) if len(values) > 1 else ZERO
    return {key: (A - mean(values)) / torch.sqrt(spread**2 + 1e-8) for key, A in advantages.items()}


def clipped_token_mean(prompts: Prompts, A: dict[tuple[int, int], Tensor], low: float, high: float) -> Tensor:
    """1/Σ|o| Σ min(r Â, clip(r) Â), Â by (completion, token)."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            for t in range(len(o)):
                a = A[id(o), t]
                J = J + torch.minimum(o.r(t) * a, clip(o.r(t), 1 - low, 1 + high) * a)
    return J / max(1, count_tokens(prompts))


def reinforce_pp(prompts: Prompts, width: int) -> Tensor:
    """A_t = r − β Σ_{s ≥ t} (log π_old − log π_ref)(s), whitened over the batch's tokens; PPO's clip; token mean."""
    A = {
        (id(o), t): o.reward - 0.01 * sum(sg(o.old[s] - o.ref[s]) for s in range(t, len(o)))
        for outputs in prompts
        for o in outputs
        for t in range(len(o))
    }
    return clipped_token_mean(prompts, whitened(A), 0.2, 0.2)


def reinforce_pp_baseline(prompts: Prompts, width: int) -> Tensor:
    """A = r − mean of the prompt's, whitened over the batch's tokens; PPO's clip; token mean; −β u²/2 in the loss."""
    A = {
        (id(o), t): o.reward - mean([p.reward for p in outputs])
        for outputs in prompts
        for o in outputs
        for t in range(len(o))
    }
    flat = {id(o) for outputs in prompts for o in outputs if len({float(p.reward) for p in outputs}) == 1}
    A = {key: ZERO if key[0] in flat else a for key, a in A.items()}
    J = clipped_token_mean(prompts, whitened(A), 0.2, 0.2)
    for outputs in prompts:
        for o in outputs:
            J = J - sum(1e-5 * o.u(t) ** 2 / 2 for t in range(len(o))) / count_tokens(prompts)
    return J


def gpg(prompts: Prompts, width: int) -> Tensor:
    """GPG: 1/Σ|o| Σ log π · α (r − mean_g), α = B/(B − M), M completions of prompts whose rewards are all equal."""
    B = count(prompts)
    M = B - count(without_no_spread(prompts))
    J = zero(prompts)
    for outputs in without_no_spread(prompts):
        for o in outputs:
            A = B / (B - M) * (o.reward - mean([p.reward for p in outputs]))
            J = J + sum(A * (o.logp[t] - sg(o.logp[t]) + 1) for t in range(len(o)))
    return J / max(1, count_tokens(prompts))


def raft(prompts: Prompts, width: int) -> Tensor:
    """Rejection sampling: 1/Σ|o| Σ log π of the right completions, whoever sampled them."""
    kept = [[o for o in outputs if o.reward >= 1] for outputs in prompts]
    J = sum((log_pi(o, t) for outputs in kept for o in outputs for t in range(len(o))), zero(prompts))
    return J / max(1, count_tokens(prompts))


def best_of_group(prompts: Prompts, width: int) -> Tensor:
    """RAFT: 1/Σ|o| Σ log π of each prompt's best."""
    kept = [[o for o in outputs if all(o.reward >= p.reward for p in outputs)] for outputs in prompts]
    J = sum((log_pi(o, t) for outputs in kept for o in outputs for t in range(len(o))), zero(prompts))
    return J / max(1, count_tokens(prompts))


def group_clip(prompts: Prompts, advantages: Advantages) -> Tensor:
    """The token mean of PPO's clip, one advantage per completion."""
    A = {
        (id(o), t): a
        for outputs in prompts
        for o, a in zip(outputs, advantages(outputs), strict=True)
        for t in range(len(o))
    }
    return clipped_token_mean(prompts, A, 0.2, 0.2)


def maxrl(prompts: Prompts, width: int) -> Tensor:
    """MaxRL: (r − r̄)/r̄, and nothing where no sample succeeds."""

    def advantages(outputs: list[Completion]) -> list[Tensor]:
        m = mean([o.reward for o in outputs])
        flat = len({float(o.reward) for o in outputs}) == 1
        return [ZERO if m <= 0 or flat else (o.reward - m) / m for o in outputs]

    return group_clip(prompts, advantages)


def pass_at(k: int, normalise: bool = True) -> Advantages:
    """Each k-subset of the group is one sample of pass@k; a completion's advantage is the mean of those of its subsets."""

    def advantages(outputs: list[Completion]) -> list[Tensor]:
        subsets = list(combinations(range(len(outputs)), k))
        best = [max(outputs[i].reward for i in subset) for subset in subsets]
        if not subsets or max(best) == min(best):
            return [ZERO] * len(outputs)
        scale = std(best, ddof=0) + 1e-6 if normalise else 1
        per_subset = [(b - mean(best)) / scale for b in best]
        return [mean([a for a, s in zip(per_subset, subsets, strict=True) if i in s]) for i in range(len(outputs))]

    return advantages


def passk(prompts: Prompts, width: int, k: int = 2, normalise: bool = True) -> Tensor:
    """Pass@k training over all k-subsets, each completion's mean over its tokens as GRPO has it."""
    J = zero(prompts)
    for outputs in prompts:
        for o, A in zip(outputs, pass_at(k, normalise)(outputs), strict=True):
            J = J + sum(torch.minimum(o.r(t) * A, clip(o.r(t), 0.8, 1.2) * A) for t in range(len(o))) / len(o)
    return J / max(1, count(prompts))


def topr(prompts: Prompts, width: int) -> Tensor:
    """TOPR, eq. 8: R log π(τ) where R ≥ 0, and where R < 0 the function whose derivative is [π/μ]_0^1 R ∇log π."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            R = o.reward - 0.5
            log_ratio = sum(o.logp[t] - sg(o.old[t]) for t in range(len(o)))
            taper = R < 0 and log_ratio <= 0
            J = J + R * (torch.exp(log_ratio) if taper else 1 + log_ratio)
    return J / max(1, count(prompts))


def asymre(prompts: Prompts, width: int) -> Tensor:
    """AsymRE: E_{y∼μ}[log π(y) (r(y) − V)], V the prompt's mean reward + δV, δV = −0.1; the value is Σ_t 1 + log r_t."""
    J = zero(prompts)
    for outputs in prompts:
        V = mean([o.reward for o in outputs]) - 0.1
        for o in outputs:
            J = J + sum((o.reward - V) * log_pi(o, t) for t in range(len(o)))
    return J / max(1, count(prompts))


def scale_rl(prompts: Prompts, width: int) -> Tensor:
    """ScaleRL: 1/#prompts Σ_g 1/Σ|o| Σ sg[min(ρ, 5)] Â log π, Â = (r − mean_g)/std of the centred, flat prompts left out."""
    prompts = without_no_spread(prompts)
    centred = {id(o): o.reward - mean([p.reward for p in outputs]) for outputs in prompts for o in outputs}
    scale = std(list(centred.values())) + 1e-4 if centred else 1
    J = zero(prompts)
    for outputs in prompts:
        inner = sum(
            (sg(clip(o.r(t), 0, 5)) * centred[id(o)] / scale * log_pi(o, t) for o in outputs for t in range(len(o))),
            ZERO,
        )
        J = J + inner / sum(len(o) for o in outputs)
    return J / max(1, len(prompts))


def lite_ppo(prompts: Prompts, width: int) -> Tensor:
    """Lite PPO: (r − mean_g)/std of all rewards of the batch, PPO's clip, token mean."""
    rewards = [o.reward for outputs in prompts for o in outputs]
    scale = std(rewards) + 1e-4 if len(rewards) > 1 else torch.tensor(1e-4)

    def advantages(outputs: list[Completion]) -> list[Tensor]:
        flat = len({float(o.reward) for o in outputs}) == 1
        return [ZERO if flat else (o.reward - mean([p.reward for p in outputs])) / scale for o in outputs]

    return group_clip(prompts, advantages)


OUTCOMES = {
    f.__name__: f
    for f in (
        remax,
        reinforce_pp,
        reinforce_pp_baseline,
        gpg,
        raft,
        maxrl,
        passk,
        topr,
        asymre,
        scale_rl,
        lite_ppo,
    )
}
OUTCOME_FIELDS = {"maxrl": "successes"}
"""What `random_batches.make` is to fill for a row."""
OFF_POLICY_PARTS: dict[str, tuple[pg.Algorithm, Callable[[Prompts, int], Tensor]]] = {
    "the best of the group": (replace(pg.RAFT, advantage=(pg.RejectionSampling("best"),)), best_of_group),
    "pass@3": (replace(pg.PASSK, advantage=(pg.PassAtK(3),)), lambda p, w: passk(p, w, 3)),
    "pass@2, unscaled": (
        replace(pg.PASSK, advantage=(pg.PassAtK(2, normalise=False),)),
        lambda p, w: passk(p, w, 2, normalise=False),
    ),
}
