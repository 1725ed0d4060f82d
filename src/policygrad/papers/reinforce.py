"""REINFORCE and its baselines, and maximum likelihood of accepted completions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate

from torch import Tensor, exp

from policygrad.papers.completions import (
    Completion,
    Prompts,
    all_equal,
    average,
    centered,
    clipped_surrogate,
    completions,
    count,
    count_tokens,
    log_pi,
    standard_deviation,
    to_go,
    tokens,
    total,
    unit_log_pi,
    without_constant_groups,
)


def reinforce(prompts: Prompts, max_tokens: int, baseline: float = 0.0) -> Tensor:
    """1/B Σ_i Σ_t (R_i − b) log π(o_t), R_i with the token rewards from t on. Williams 1992.

    Args:
        baseline: b, the running mean of earlier rewards.
    """

    def of_completion(o: Completion) -> Tensor:
        later = to_go(o.token_reward)
        return total((o.reward + later[t] - baseline) * unit_log_pi(o, t) for t in range(len(o)))

    return total(map(of_completion, completions(prompts))) / count(prompts)


def spiral(prompts: Prompts, max_tokens: int, means: Mapping[str, float] | None = None, decay: float = 0.95) -> Tensor:
    """1/(B·L) Σ_i Σ_t min(r Â, clip(r) Â), Â = R − b_role, and then b_role ← α b_role + (1 − α) R, one completion after the other.

    Liu et al. 2025 (SPIRAL), eq. 2 and 3, with the authors' code's order, PPO clip and constant denominator L.

    Args:
        means: b of each role before the rollout; 0 for a role without one.
    """
    b, J = dict(means or {}), total([])
    for o in sorted(completions(prompts), key=lambda o: o.row):
        A = o.reward - b.get(o.role, 0.0)
        b[o.role] = decay * b.get(o.role, 0.0) + (1 - decay) * o.reward
        J = J + total(clipped_surrogate(o, t, A) for t in range(len(o)))
    return J / (count(prompts) * max_tokens)


def rloo(prompts: Prompts, max_tokens: int, beta: float = 0.05) -> Tensor:
    """1/B Σ_i (R_i − mean_{j≠i} R_j) log π(o_i), R = score − β log(π_old(o)/π_ref(o)). Ahmadian et al. 2024, sec. 2."""
    J = total([])
    for outputs in prompts:
        R = [o.reward - beta * (math.fsum(o.old) - math.fsum(o.ref)) for o in outputs]
        for i, o in enumerate(outputs):
            other_rewards = R[:i] + R[i + 1 :]
            if other_rewards:
                J = J + (R[i] - average(other_rewards)) * total(unit_log_pi(o, t) for t in range(len(o)))
    return J / count(prompts)


def online_dpo(prompts: Prompts, max_tokens: int, beta: float = 0.1) -> Tensor:
    """Over the pairs of a prompt, the mean of β σ(−β(h⁺ − h⁻)) (log π(o⁺) − log π(o⁻)), h = log π_old/π_ref. Guo et al. 2024.

    Prompts count by their number of completions. It has the gradient of log σ(β(h⁺ − h⁻)), DPO's loss, at π_θ = π_old.
    """
    J = total([])
    for outputs in prompts:
        h = {id(o): math.fsum(o.old) - math.fsum(o.ref) for o in outputs}
        for right in outputs:
            for wrong in outputs:
                if right.reward > wrong.reward:
                    pull = beta / (1 + math.exp(beta * (h[id(right)] - h[id(wrong)])))
                    change = total(unit_log_pi(right, t) for t in range(len(right)))
                    change = change - total(unit_log_pi(wrong, t) for t in range(len(wrong)))
                    J = J + len(outputs) * pull * change / math.comb(len(outputs), 2)
    return J / count(prompts)


def opo(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/B Σ_i (R_i − b) log π(o_i), b = Σ_j |o_j| R_j / Σ_j |o_j| over the prompt's completions. Hao et al. 2025."""
    J = total([])
    for outputs in prompts:
        if all_equal([o.reward for o in outputs]):
            continue
        b = math.fsum(len(o) * o.reward for o in outputs) / sum(map(len, outputs))
        J = J + total((o.reward - b) * unit_log_pi(o, t) for o in outputs for t in range(len(o)))
    return J / count(prompts)


def otb(prompts: Prompts, max_tokens: int, leave_one_out: bool = False) -> Tensor:
    """PPO's clipped token mean of A_t = G_t − Σ_j G_t^j W_t^j / Σ_j W_t^j, W_t = Σ_{s≤t} (1 − 2π_s + Σ_a π_a²). Li et al. 2026.

    The sums are over the prompt's completions with a t-th sampled token; G_t is the reward and the token rewards from t on.

    Args:
        leave_one_out: the sums exclude the completion itself; where no other is as long, its baseline is the others' mean reward.
    """
    A = {}
    for outputs in prompts:
        G = {id(o): [o.reward + x for x in to_go(o.token_reward)] for o in outputs}
        W = {
            id(o): list(accumulate(1 - 2 * math.exp(o.old[s]) + o.sum_pi_squared[s] for s in range(len(o))))
            for o in outputs
        }
        for o in outputs:
            A[id(o)] = [0.0] * len(o)
            siblings = [p for p in outputs if p is not o]
            for t in range(len(o)) if siblings else []:
                over = [id(p) for p in (siblings if leave_one_out else outputs) if len(p) > t]
                mean = average([p.reward + math.fsum(p.token_reward) for p in siblings])
                B = math.fsum(G[p][t] * W[p][t] for p in over) / math.fsum(W[p][t] for p in over) if over else mean
                A[id(o)][t] = G[id(o)][t] - B
    return clipped_token_mean(prompts, A)


def remax(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/N Σ_i Σ_t log π(a_t) [r(x, a_1:T) − r(x, ā_1:T)], ā the greedy completion. Li et al. 2023, algorithm 1."""
    scored = [[o for o in outputs if math.isfinite(o.baseline)] for outputs in prompts]
    return total((o.reward - o.baseline) * unit_log_pi(o, t) for o, t in tokens(scored)) / count(prompts)


def astar_po(prompts: Prompts, max_tokens: int) -> Tensor:
    """−1/(2 β_2 B) Σ_i (β_2 log(π(o)/π_ref(o)) − (R_i − V*))², without its constants of θ. Brantley et al. 2025.

    Expanded, the square is (R − V*) log π(o) − β_2/2 (log π(o)/π_ref(o))² and what does not depend on θ.
    """
    J, beta = total([]), 1e-3
    for o in completions(prompts):
        A = o.reward - o.baseline if math.isfinite(o.baseline) else 0.0
        implicit = total(o.u(t) for t in range(len(o)))
        J = J + A * total(log_pi(o, t) for t in range(len(o))) - beta / 2 * implicit**2
    return J / count(prompts)


def whitened(advantages: dict[int, list[float]]) -> dict[int, list[float]]:
    """(A − mean)/√(var + 1e-8) over all tokens of the batch; a single token has no variance."""
    everything = [a for row in advantages.values() for a in row]
    center, spread = average(everything), standard_deviation(everything) if len(everything) > 1 else 0.0
    return {key: [(a - center) / math.sqrt(spread**2 + 1e-8) for a in row] for key, row in advantages.items()}


def clipped_token_mean(prompts: Prompts, A: dict[int, list[float]], low: float = 0.2, high: float = 0.2) -> Tensor:
    """1/Σ|o| Σ_i Σ_t min(r Â, clip(r) Â), Â by completion (its `id`) and token."""
    terms = (clipped_surrogate(o, t, A[id(o)][t], low, high) for o, t in tokens(prompts))
    return total(terms) / count_tokens(prompts)


def reinforce_pp(prompts: Prompts, max_tokens: int) -> Tensor:
    """PPO's clipped token mean of A_t = r − β Σ_{s≥t} (log π_old − log π_ref)(s), whitened over the batch. Hu et al. 2025."""
    A = {}
    for o in completions(prompts):
        kl = to_go([old - ref for old, ref in zip(o.old, o.ref, strict=True)])
        A[id(o)] = [o.reward - 0.01 * x for x in kl]
    return clipped_token_mean(prompts, whitened(A))


def reinforce_pp_baseline(prompts: Prompts, max_tokens: int) -> Tensor:
    """The same of A = r − mean of the prompt's, whitened over the batch's tokens, with −β u²/2 in the loss. Hu et al. 2025."""
    A = {id(o): [centered(o, outputs)] * len(o) for outputs in prompts for o in outputs}
    kl = total(1e-5 * o.u(t) ** 2 / 2 for o, t in tokens(prompts)) / count_tokens(prompts)
    return clipped_token_mean(prompts, whitened(A)) - kl


def gpg(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/Σ|o| Σ log π · α (r − mean_g), α = B/(B − M), M completions of prompts whose rewards are all equal. Chu et al. 2025."""
    J, remaining = total([]), without_constant_groups(prompts)
    for outputs in remaining:
        for o in outputs:
            A = count(prompts) / count(remaining) * centered(o, outputs)
            J = J + total(A * unit_log_pi(o, t) for t in range(len(o)))
    return J / count_tokens(prompts)


def raft(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/Σ|o| Σ log π of the right completions. Dong et al. 2023; Xiong et al. 2025 on right and wrong answers."""
    right = [[o for o in outputs if o.reward >= 1] for outputs in prompts]
    return total(log_pi(o, t) for o, t in tokens(right)) / count_tokens(prompts)


def raft_pp(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/Σ|o| Σ min(r, clip(r)) over the right completions. Xiong et al. 2025 (RAFT++)."""
    A = {id(o): [1.0 if o.reward >= 1 else 0.0] * len(o) for o in completions(prompts)}
    return clipped_token_mean(prompts, A)


def dro(prompts: Prompts, max_tokens: int, beta: float = 0.05) -> Tensor:
    """1/N Σ_i Σ_t [Â log π_θ − β/2 (log π_θ/π_old)²], Â = R − mean_g. Richemond et al. 2024, by tokens."""
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = centered(o, outputs)
            for t in range(len(o)):
                J = J + A * log_pi(o, t) - beta / 2 * (o.logp[t] - o.old[t]) ** 2
    return J / count(prompts)


def topr(prompts: Prompts, max_tokens: int) -> Tensor:
    """R log π(τ) where R ≥ 0, and where R < 0 the function whose derivative is [π/μ]_0^1 R ∇log π. Le Roux et al. 2025, eq. 8.

    Rewards of 0 and 1 become R = ∓½ and ±½. log π(τ) is stated up to a constant of θ, so that its value is 1 at π = μ.
    """
    J = total([])
    for o in completions(prompts):
        R = o.reward - 0.5
        log_ratio = total(o.logp[t] - o.old[t] for t in range(len(o)))
        J = J + R * (exp(log_ratio) if R < 0 and log_ratio <= 0 else 1 + log_ratio)
    return J / count(prompts)


def asymre(prompts: Prompts, max_tokens: int) -> Tensor:
    """E_{y∼μ}[log π(y) (r(y) − V)], V the prompt's mean reward + δV, δV = −0.1. Arnal et al. 2025."""
    J = total([])
    for outputs in prompts:
        V = average([o.reward for o in outputs]) - 0.1
        J = J + total((o.reward - V) * log_pi(o, t) for o in outputs for t in range(len(o)))
    return J / count(prompts)
