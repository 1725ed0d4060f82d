"""GRPO and the rows that compare the completions of one prompt as it does.

Objectives with dynamic sampling or an overlong mask are sums over the completions that these leave. A token's `weight` is then not
1 where a dropped prompt could not be replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from policygrad.papers.completions import (
    Completion,
    Prompts,
    all_equal,
    average,
    centered,
    clip,
    clipped_surrogate,
    completions,
    count,
    count_tokens,
    group_z_score,
    k3,
    log_pi,
    penalized,
    standard_deviation,
    tokens,
    total,
    unit_log_pi,
)


def grpo(prompts: Prompts, max_tokens: int, beta: float = 0.04) -> Tensor:
    """1/B Σ_i 1/|o_i| Σ_t [min(r Â, clip(r) Â) − β KL]. Shao et al. 2024 (DeepSeekMath), eq. 3, KL as in eq. 4."""

    def token(o: Completion, t: int, A: float) -> Tensor:
        return clipped_surrogate(o, t, A) - beta * k3(o, t)

    return mean_over_completions(prompts, token)


def mean_over_completions(
    prompts: Prompts, token: Callable[[Completion, int, float], Tensor] = clipped_surrogate
) -> Tensor:
    """1/B Σ_i 1/|o_i| Σ_t token(o_i, t, Â_i), Â the z-score of the prompt's rewards."""
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = group_z_score(o, outputs)
            J = J + total(token(o, t, A) for t in range(len(o))) / len(o)
    return J / count(prompts)


def dr_grpo(prompts: Prompts, max_tokens: int) -> Tensor:
    """The same without the std, and divided by the generation budget for the length. Liu et al. 2025, sec. 3.2."""
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = centered(o, outputs)
            J = J + total(clipped_surrogate(o, t, A) for t in range(len(o)))
    return J / (count(prompts) * max_tokens)


def deepseek_v32(prompts: Prompts, max_tokens: int, beta: float = 0.001, delta: float = 0.5) -> Tensor:
    """1/B Σ_i 1/|o_i| Σ_t [M min(r Â, clip(r) Â) − β r k3], Â = R − mean_g, M = 0 where Â < 0 and 1/|o| Σ log μ/π_θ > δ, else 1.

    DeepSeek-AI 2025 (DeepSeek-V3.2), eq. 5 to 9.
    """
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = centered(o, outputs)
            divergence = average([mu - float(logp.detach()) for mu, logp in zip(o.sampler, o.logp, strict=True)])
            M = 0.0 if A < 0 and divergence > delta else 1.0
            J = J + total(M * clipped_surrogate(o, t, A) - beta * o.r(t) * k3(o, t) for t in range(len(o))) / len(o)
    return J / count(prompts)


def skywork_or1(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/Σ|o| Σ min(r Â, clip(r) Â) + α H, Â the z-score, stated for α = 0: the entropy bonus is off until entropy is low.

    Prompts whose rewards are all equal are dropped before. He et al. 2025 (Skywork-OR1).
    """
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = group_z_score(o, outputs)
            J = J + total(clipped_surrogate(o, t, A) for t in range(len(o)))
    return J / count_tokens(prompts)


def with_overlong_penalty(prompts: Prompts, max_tokens: int, scale: float = 1.0) -> Prompts:
    """The completions with R + scale·R_length as their reward."""
    return [[replace(o, reward=penalized(o, max_tokens, scale)) for o in outputs] for outputs in prompts]


def dapo(prompts: Prompts, max_tokens: int, high: float = 0.28) -> Tensor:
    """1/Σ|o| Σ min(r Â, clip(r, 1 − ε_low, 1 + ε_high) Â) over the step, with the soft penalty of eq. 13. Yu et al. 2025, eq. 8."""
    J = total([])
    for outputs in with_overlong_penalty(prompts, max_tokens):
        for o in outputs:
            A = group_z_score(o, outputs)
            J = J + total(o.weight[t] * clipped_surrogate(o, t, A, 0.2, high) for t in range(len(o)))
    return J / count_tokens(prompts)


def prorl(prompts: Prompts, max_tokens: int) -> Tensor:
    """DAPO with clip 0.2 and 0.4, and −1e-4·u²/2, u = log π_θ − log π_ref. Liu et al. 2025 (ProRL), sec. 2."""
    kl = total(o.weight[t] * 1e-4 * o.u(t) ** 2 / 2 for o, t in tokens(prompts)) / count_tokens(prompts)
    return dapo(prompts, max_tokens, high=0.4) - kl


def magistral(prompts: Prompts, max_tokens: int) -> Tensor:
    """The mean over prompts of each one's token mean; Â = R − mean_g, divided by the std of all Â. Mistral AI 2025, sec. 2.1.

    R with the length penalty of eq. 1, at most 0.1.
    """
    prompts = with_overlong_penalty(prompts, max_tokens, 0.1)
    A = scaled_by_batch(prompts)
    J = total([])
    for outputs in prompts:
        inner = total(
            o.weight[t] * clipped_surrogate(o, t, A[id(o)], 0.2, 0.28) for o in outputs for t in range(len(o))
        )
        J = J + inner / sum(map(len, outputs))
    return J / max(1, len(prompts))


def scaled_by_batch(prompts: Prompts) -> dict[int, float]:
    """(R − mean_g)/(std of these over the batch + ε), by completion (its `id`)."""
    A = {id(o): centered(o, outputs) for outputs in prompts for o in outputs}
    scale = standard_deviation(list(A.values())) + 1e-4 if len(A) > 1 else 1.0
    return {key: a / scale for key, a in A.items()}


def sequence_ratio(o: Completion) -> Tensor:
    """s = (π_θ(o)/π_old(o))^{1/|o|}. Zheng et al. 2025 (GSPO), eq. 7."""
    return torch.exp(total(o.logp[t] - o.old[t] for t in range(len(o))) / len(o))


def gspo(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/B Σ_i min(s_i Â_i, clip(s_i) Â_i). Zheng et al. 2025, eq. 5.

    Eq. 13 (GSPO-token) has the same value and gradient where all tokens of a completion have one advantage.
    """
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A, s = group_z_score(o, outputs), sequence_ratio(o)
            J = J + torch.minimum(s * A, clip(s, 1 - 3e-4, 1 + 4e-4) * A)
    return J / count(prompts)


def echo(prompts: Prompts, max_tokens: int, coefficient: float = 0.05) -> Tensor:
    """GRPO without the KL + λ/N Σ_i 1/|e_i| Σ log π(e_{i,t}), e_i what the environment wrote in the i-th of N completions.

    Shrivastava et al. 2026.
    """
    observing = [o for outputs in prompts for o in outputs if o.observed]
    nll = total(total(o.observed) / len(o.observed) for o in observing)
    return mean_over_completions(prompts) + coefficient * nll / max(1, len(observing))


def cispo(prompts: Prompts, max_tokens: int, low: float = 0.0, high: float = 5.0) -> Tensor:
    """1/Σ|o| Σ sg[clip(r, low, high)] Â log π, with DAPO's length penalty. MiniMax-M1 2025, eq. 4 and 5."""
    J = total([])
    for outputs in with_overlong_penalty(prompts, max_tokens):
        for o in outputs:
            A = group_z_score(o, outputs)
            J = J + total(o.weight[t] * clip(o.r(t), low, high).detach() * A * log_pi(o, t) for t in range(len(o)))
    return J / count_tokens(prompts)


def sapo(prompts: Prompts, max_tokens: int) -> Tensor:
    """f(r) Â in place of the clip, f(r) = σ(τ(r − 1))·4/τ, τ = 1 where Â > 0, else 1.05. Gao et al. 2025, eq. 5 and 6."""

    def token(o: Completion, t: int, A: float) -> Tensor:
        tau = 1.0 if A > 0 else 1.05
        return torch.sigmoid(tau * (o.r(t) - 1)) * 4 / tau * A

    return mean_over_completions(prompts, token)


def scale_rl(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/#prompts Σ_g 1/Σ|o| Σ sg[min(r, 5)] Â log π, Â = R − mean_g over the std of all of these. Khatri et al. 2025."""
    A, J = scaled_by_batch(prompts), total([])
    for outputs in prompts:
        inner = total(clip(o.r(t), 0, 5).detach() * A[id(o)] * log_pi(o, t) for o in outputs for t in range(len(o)))
        J = J + inner / sum(map(len, outputs))
    return J / max(1, len(prompts))


def token_mean(prompts: Prompts, advantages: Callable[[list[Completion]], Sequence[float]]) -> Tensor:
    """1/Σ|o| Σ min(r Â, clip(r) Â), one advantage per completion of a prompt."""
    J = total([])
    for outputs in prompts:
        for o, A in zip(outputs, advantages(outputs), strict=True):
            J = J + total(clipped_surrogate(o, t, A) for t in range(len(o)))
    return J / count_tokens(prompts)


def lite_ppo(prompts: Prompts, max_tokens: int) -> Tensor:
    """The clipped token mean of (R − mean_g)/std of all rewards of the batch. Liu et al. 2025 (Tricks or traps?)."""
    rewards = [o.reward for o in completions(prompts)]
    scale = standard_deviation(rewards) + 1e-4 if len(rewards) > 1 else 1.0
    return token_mean(prompts, lambda outputs: [centered(o, outputs) / scale for o in outputs])


def gfpo(prompts: Prompts, max_tokens: int, beta: float = 0.001, gamma: float = 0.001) -> Tensor:
    """The clipped token mean of (R − mean)/std, both of the completions in `prompts`, the kept ones, − β k3 + γ H.

    The std divides by their number; H is the score-function estimate. Shrivastava et al. 2025 (GFPO), eq. 2.
    """
    J = total([])
    for outputs in prompts:
        rewards = [o.reward for o in outputs]
        scale = standard_deviation(rewards, ddof=0) + 1e-4
        for o in outputs:
            for t in range(len(o)):
                bonus = -gamma * (o.r(t) * o.logp[t]).detach()
                J = (
                    J
                    + clipped_surrogate(o, t, centered(o, outputs) / scale)
                    - beta * k3(o, t)
                    + bonus * unit_log_pi(o, t)
                )
    return J / count_tokens(prompts)


def maxrl(prompts: Prompts, max_tokens: int) -> Tensor:
    """The clipped token mean of (R − R̄)/R̄, 0 where no sample succeeds. Tajwar et al. 2026."""

    def advantages(outputs: list[Completion]) -> list[float]:
        m = average([o.reward for o in outputs])
        return [centered(o, outputs) / m if m > 0 else 0.0 for o in outputs]

    return token_mean(prompts, advantages)


def pass_at_k(outputs: list[Completion], k: int, normalise: bool = True) -> list[float]:
    """Each k-subset is one sample of pass@k; a completion's advantage is the mean of those of its subsets. Chen et al. 2025."""
    subsets = list(combinations(range(len(outputs)), k))
    best = [max(outputs[i].reward for i in subset) for subset in subsets]
    if not subsets or all_equal(best):
        return [0.0] * len(outputs)
    scale = math.sqrt(average([(b - average(best)) ** 2 for b in best])) + 1e-6 if normalise else 1.0
    per_subset = [(b - average(best)) / scale for b in best]
    return [average([a for a, s in zip(per_subset, subsets, strict=True) if i in s]) for i in range(len(outputs))]


def passk(prompts: Prompts, max_tokens: int, k: int = 2, normalise: bool = True) -> Tensor:
    """GRPO's clipped objective of the advantages for pass@k, over all k-subsets. Chen et al. 2025 (pass@k training)."""
    J = total([])
    for outputs in prompts:
        for o, A in zip(outputs, pass_at_k(outputs, k, normalise), strict=True):
            J = J + total(clipped_surrogate(o, t, A) for t in range(len(o))) / len(o)
    return J / count(prompts)
