"""Objectives that read more than one reward per completion: several rewards, steps, turns, demonstrations, a teacher, a learned
process reward."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from policygrad.papers.completions import (
    Completion,
    Prompts,
    all_equal,
    average,
    clipped_surrogate,
    completions,
    count,
    count_tokens,
    group_z_score,
    k3,
    relative,
    standard_deviation,
    to_go,
    tokens,
    total,
)
from policygrad.papers.reinforce import clipped_token_mean


def gdpo(prompts: Prompts, max_tokens: int) -> Tensor:
    """A_k = (r_k − mean)/(std + ε) of each reward in its group, A = Σ_k w_k A_k, Â = (A − mean A)/(std A + ε) over the batch.

    Liu et al. 2026.
    """
    A: dict[int, float] = {}
    for outputs in prompts:
        for o in outputs:
            A[id(o)] = 0.0
            for k, w in enumerate(o.reward_weights):
                if not math.isnan(o.rewards[k]):
                    group = [p.rewards[k] for p in outputs if not math.isnan(p.rewards[k])]
                    A[id(o)] += w * relative(o.rewards[k], group)
    everything, J = list(A.values()), total([])
    for o in completions(prompts):
        scaled = (
            (A[id(o)] - average(everything)) / (standard_deviation(everything) + 1e-4) if len(everything) > 1 else 0.0
        )
        J = J + total(clipped_surrogate(o, t, scaled) for t in range(len(o))) / len(o)
    return J / count(prompts)


def turns(o: Completion) -> list[list[int]]:
    """The tokens of each turn. A turn ends where the environment's tokens follow, or where the state changes."""
    result: list[list[int]] = []
    for t in range(len(o)):
        same = t > 0 and o.position[t] == o.position[t - 1] + 1 and o.turn_state[t] == o.turn_state[t - 1]
        if same:
            result[-1].append(t)
        else:
            result.append([t])
    return result


def turn_rewards(o: Completion) -> list[float]:
    """r_n: a turn's token rewards; the last turn's with the completion's reward."""
    r = [math.fsum(o.token_reward[t] for t in turn) for turn in turns(o)]
    return [*r[:-1], r[-1] + o.reward]


def gigpo(prompts: Prompts, max_tokens: int) -> Tensor:
    """Â = A^E + ω A^S, of the episode among its group and of the turn among those from the same state; γ = 0.95, ω = 1, F = std.

    With −0.01 KL. Feng et al. 2025, eq. 3 and 5 to 9.
    """
    J = total([])
    for outputs in prompts:
        episodes = {id(o): o.reward + math.fsum(o.token_reward) for o in outputs}
        returns = {id(o): to_go(turn_rewards(o), 0.95) for o in outputs}
        by_state: dict[int, list[float]] = defaultdict(list)
        for o in outputs:
            for turn, value in zip(turns(o), returns[id(o)], strict=True):
                by_state[o.turn_state[turn[0]]].append(value)
        for o in outputs:
            episode = relative(episodes[id(o)], list(episodes.values()))
            for turn, value in zip(turns(o), returns[id(o)], strict=True):
                A = episode + relative(value, by_state[o.turn_state[turn[0]]])
                J = J + total(clipped_surrogate(o, t, A) - 0.01 * k3(o, t) for t in turn)
    return J / count_tokens(prompts)


def grpo_process(prompts: Prompts, max_tokens: int, outcome: bool = True) -> Tensor:
    """GRPO with Â_t = Σ_{index(j) ≥ t} (r_j − mean(R))/std(R), R the rewards of all steps of the group.

    Shao et al. 2024 (DeepSeekMath), sec. 4.1.3.

    Args:
        outcome: add the completion's reward to its last step's; without it as published.
    """
    J = total([])
    for outputs in prompts:
        R: dict[int, dict[int, float]] = {}
        for o in outputs:
            R[id(o)] = {t: o.token_reward[t] for t in range(len(o)) if o.step_end[t]}
            if outcome:
                R[id(o)][max(R[id(o)])] += o.reward
        everything = [r for by_end in R.values() for r in by_end.values()]
        for o in outputs:
            scaled = {end: relative(r, everything) if len(outputs) > 1 else 0.0 for end, r in R[id(o)].items()}
            A = to_go([scaled.get(t, 0.0) for t in range(len(o))])
            J = J + total(clipped_surrogate(o, t, A[t]) - 0.04 * k3(o, t) for t in range(len(o))) / len(o)
    return J / count(prompts)


def luffy(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/Z (Σ_demonstrated f(π_θ/π_φ) Â + Σ_sampled min(r Â, clip(r) Â)), f(x) = x/(x + 0.1), Â and Z over both. Yan et al. 2025.

    π_φ is the demonstration's author; 1 where it is unknown.
    """
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = group_z_score(o, outputs)
            for t in range(len(o)):
                if o.demonstration:
                    x = torch.exp(o.logp[t] - o.sampler[t])
                    J = J + x / (x + 0.1) * A
                else:
                    J = J + clipped_surrogate(o, t, A)
    return J / count_tokens(prompts)


def chord(prompts: Prompts, max_tokens: int, mu: float = 0.1, phi: bool = True) -> Tensor:
    """(1 − μ) × GRPO over the samples + μ × the token mean of sg[p(1 − p)] log p over the demonstrations. Zhang et al. 2025.

    Args:
        phi: weight demonstrated tokens by p(1 − p); otherwise by 1.
    """
    sampled = [[o for o in outputs if not o.demonstration] for outputs in prompts]
    demonstrated = [[o for o in outputs if o.demonstration] for outputs in prompts]
    A = {id(o): [group_z_score(o, outputs)] * len(o) for outputs in sampled for o in outputs}
    S = total([])
    for o, t in tokens(demonstrated):
        p = math.exp(float(o.logp[t].detach()))
        S = S + (p * (1 - p) if phi else 1.0) * o.logp[t]
    return (1 - mu) * clipped_token_mean(sampled, A) + mu * S / count_tokens(demonstrated)


def distill(prompts: Prompts, max_tokens: int, discount: float = 0.0, coefficient: float = 1.0) -> Tensor:
    """1/Σ|o| Σ r Â, Â_t = −Σ_{s ≥ t} discount^{s−t} (log π_old − log π_teacher)_s. Lu & Thinking Machines Lab 2025.

    s are tokens, or spans of text for a teacher of another tokenizer, where t is the span of the token.
    """
    J = total([])
    for o in completions(prompts):
        ends = sorted(set(o.span))
        reverse_kl = to_go([o.old[end] - o.ref[end] for end in ends], discount)
        J = J + total(o.r(t) * (-coefficient * reverse_kl[ends.index(o.span[t])]) for t in range(len(o)))
    return J / count_tokens(prompts)


def read_by_reference(prompts: Prompts) -> Prompts:
    """The completions for which the teacher had something to read."""
    return [read for outputs in prompts if (read := [o for o in outputs if o.has_reference])]


def sdpo(prompts: Prompts, max_tokens: int, cap: float = 2.0) -> Tensor:
    """−1/Σ|o| Σ min(r, cap)·sg[u]·log π_θ, u = log π_θ − log π_teacher, over the completions with a teacher's text.
    Hübotter et al. 2026 (code), the sampled token's form.

    The value is r(e^{−u} + u − 1), an estimate of the KL with that derivative, continued by cap·u²/2 where r is above the cap.
    """
    J, read = total([]), read_by_reference(prompts)
    for o, t in tokens(read):
        u, r = o.u(t), o.r(t)
        if float(r.detach()) <= cap:
            J = J - r * (torch.exp(-u) + u - 1)
        else:
            at_cap = o.old[t] + math.log(cap) - o.ref[t]
            J = J - cap * (math.exp(-at_cap) + at_cap - 1 + (u**2 - at_cap**2) / 2)
    return J / count_tokens(read)


def jensen_shannon(o: Completion, t: int, alpha: float) -> Tensor:
    """Σ_a of α q log(q/m) + (1 − α) p log(p/m), m = α q + (1 − α) p, with p = π_θ and q = π_teacher; at α = 1 the reverse KL
    Σ p log(p/q), at α = 0 the forward KL Σ q log(q/p). Agarwal et al. 2024 (GKD), eq. 1."""
    D = total([])
    for log_p, log_q in zip(o.policy[t], o.reference[t], strict=True):
        p, q = torch.exp(log_p), math.exp(log_q)
        if alpha == 1:
            D = D + p * (log_p - log_q)
        elif alpha == 0:
            D = D + q * (log_q - log_p)
        else:
            m = alpha * q + (1 - alpha) * p
            D = D + alpha * q * (log_q - torch.log(m)) + (1 - alpha) * p * (log_p - torch.log(m))
    return D


def sdft(prompts: Prompts, max_tokens: int) -> Tensor:
    """−1/B Σ_i 1/|o_i| Σ_t KL(π_θ‖π_teacher) over the vocabulary. Shenfeld et al. 2026."""
    J, read = total([]), read_by_reference(prompts)
    for o in completions(read):
        J = J - total(jensen_shannon(o, t, 1.0) for t in range(len(o))) / len(o)
    return J / count(read)


def opsd(prompts: Prompts, max_tokens: int) -> Tensor:
    """−1/Σ|o| Σ JSD_½(π_teacher, π_θ) over the vocabulary. Zhao et al. 2026."""
    read = read_by_reference(prompts)
    return -total(jensen_shannon(o, t, 0.5) for o, t in tokens(read)) / count_tokens(read)


def prime(prompts: Prompts, max_tokens: int, gamma: float = 1.0) -> Tensor:
    """PPO's clipped token mean; Â_t is a discounted sum of implicit rewards plus the outcome, each less its mean over the siblings.

    Prompts whose rewards are all equal are dropped before. Cui et al. 2025, eq. 5 and 6.
    """
    J = total([])
    for outputs in prompts:
        for o in outputs:
            siblings = [p for p in outputs if p is not o]
            if all_equal([p.reward for p in outputs]):  # could not be replaced: weight 0
                continue
            outcome = o.reward - average([p.reward for p in siblings])
            baseline = average([average(p.implicit_reward) for p in siblings])
            process = to_go([x - baseline for x in o.implicit_reward], gamma)
            J = J + total(o.weight[t] * clipped_surrogate(o, t, process[t] + outcome) for t in range(len(o)))
    return J / count_tokens(prompts)
