"""Objectives whose advantages come from values: a critic's, or estimates from fresh completions; and TRPO's vine."""

from __future__ import annotations

import math

from torch import Tensor

from policygrad.papers.completions import (
    Completion,
    Prompts,
    all_equal,
    completions,
    count_tokens,
    to_go,
    tokens,
    total,
    unit_log_pi,
)
from policygrad.papers.reinforce import clipped_token_mean, whitened


def rewards(o: Completion, beta: float = 0.0) -> list[float]:
    """r_t: token rewards, −β(log π_old − log π_ref), and the terminal reward on the last token. Ouyang et al. 2022, eq. 2."""
    r = list(o.token_reward)
    if beta:
        r = [x - beta * (old - ref) for x, old, ref in zip(r, o.old, o.ref, strict=True)]
    return [*r[:-1], r[-1] + o.reward]


def gae(o: Completion, r: list[float], gamma: float, lam: float, end: float = 0.0) -> list[float]:
    """Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γV_{t+1} − V_t. Schulman et al. 2016, eq. 12 and 16.

    Args:
        end: the value after the last token, of a truncated completion.
    """
    after = [*o.value[1:], end]
    return to_go([r[t] + gamma * after[t] - o.value[t] for t in range(len(o))], gamma * lam)


def n_step(o: Completion, r: list[float], gamma: float, n: int, end: float = 0.0) -> list[float]:
    """Σ_{k<n} γ^k r_{t+k} + γ^n V_{t+n} − V_t; past the end there are no rewards, and the value is `end`.

    Mnih et al. 2016 (A3C), sec. 4.
    """
    value = [*o.value, end]
    estimates = []
    for t in range(len(o)):
        last = min(t + n, len(o))
        estimates.append(
            math.fsum(gamma ** (s - t) * r[s] for s in range(t, last)) + gamma ** (last - t) * value[last] - value[t]
        )
    return estimates


def a2c(prompts: Prompts, max_tokens: int) -> Tensor:
    """The five-step advantage times log π, and an entropy bonus of 0.01 from the samples. Mnih et al. 2016 (A3C), sec. 4."""
    J = total([])
    for o in completions(prompts):
        A = n_step(o, rewards(o), 1.0, 5)
        for t in range(len(o)):
            bonus = -0.01 * (o.r(t) * o.logp[t]).detach()
            J = J + (A[t] + bonus) * unit_log_pi(o, t)
    return J / count_tokens(prompts)


def trpo(prompts: Prompts, max_tokens: int) -> Tensor:
    """E[r Â], Â = GAE(1, 0.95): the surrogate that TRPO and the natural gradient climb. Schulman et al. 2015, eq. 14."""
    J = total([])
    for o in completions(prompts):
        A = gae(o, rewards(o), 1.0, 0.95)
        J = J + total(o.r(t) * A[t] for t in range(len(o)))
    return J / count_tokens(prompts)


def ppo(prompts: Prompts, max_tokens: int, beta: float = 0.05) -> Tensor:
    """The clipped objective of GAE(1, 0.95), whitened, with the KL in the reward. Schulman et al. 2017, eq. 7."""
    return clipped_token_mean(
        prompts, whitened({id(o): gae(o, rewards(o, beta), 1.0, 0.95) for o in completions(prompts)})
    )


def pf_ppo(prompts: Prompts, max_tokens: int) -> Tensor:
    """PPO's objective on the completions that were kept, with 0.01 of the KL. Zhang et al. 2024 (PF-PPO), sec. 4."""
    return ppo(prompts, max_tokens, 0.01)


def ppo_penalty(prompts: Prompts, max_tokens: int, beta: float = 1.0) -> Tensor:
    """E[r Â − β KL(π_old‖π_θ)], the KL at the sampled tokens as r − 1 − log r. Schulman et al. 2017, eq. 8.

    Args:
        beta: the β of this rollout, which adapts to the KL.
    """
    A = whitened({id(o): gae(o, rewards(o), 1.0, 0.95) for o in completions(prompts)})
    J = total([])
    for o, t in tokens(prompts):
        J = J + o.r(t) * A[id(o)][t] - beta * (o.r(t) - 1 - (o.logp[t] - o.old[t]))
    return J / count_tokens(prompts)


def vapo(prompts: Prompts, max_tokens: int) -> Tensor:
    """PPO with λ = 1 − 1/(αl), clip 0.2 and 0.28, and 0.1·log π on the tokens of correct completions. Yue et al. 2025."""
    A = {id(o): gae(o, rewards(o), 1.0, max(0.0, 1 - 1 / (0.05 * len(o)))) for o in completions(prompts)}
    right = [[o for o in outputs if o.reward >= 1] for outputs in prompts]
    likelihood = total(o.logp[t] for o, t in tokens(right)) / count_tokens(right)
    return clipped_token_mean(prompts, A, 0.2, 0.28) + 0.1 * likelihood


def steps(o: Completion) -> list[list[int]]:
    """The tokens of each reasoning step; what follows the last end is a step too."""
    result: list[list[int]] = [[]]
    for t in range(len(o)):
        result[-1].append(t)
        if o.step_end[t] and t + 1 < len(o):
            result.append([])
    return result


def vineppo(prompts: Prompts, max_tokens: int) -> Tensor:
    """PPO with Â of a step's tokens = its rewards + V(s_{k+1}) − V(s_k), V from fresh completions.

    Kazemnejad et al. 2024, sec. 4.
    """
    A: dict[int, list[float]] = {}
    for o in completions(prompts):
        r, parts, A[id(o)] = rewards(o, 0.05), steps(o), []
        for k, step in enumerate(parts):
            after = o.value[parts[k + 1][0]] if k + 1 < len(parts) else 0.0
            advantage = math.fsum(r[t] for t in step) + after - o.value[step[0]]
            A[id(o)] += [advantage] * len(step)
    return clipped_token_mean(prompts, A)


def over_q(o: Completion, t: int) -> Tensor:
    """π_θ/q, q = π_old/weight the distribution that the actions of a state were sampled from."""
    return o.weight[t] * o.r(t)


def trpo_vine(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/N Σ_n Σ_k (π_θ/q)(Q_k − b)/Σ_k π_θ/q, b = Σ_k wQ/Σ_k w. Schulman et al. 2015, eq. 15, 16 and 66.

    A prompt is a state, its tokens are the actions, N is the number of states; each has the mean of its weights as a factor. The
    paper has no b, which changes no gradient.
    """
    J = total([])
    for outputs in prompts:
        if all_equal([o.reward for o in outputs]):
            continue  # the quotient is a constant
        actions = [(o, t) for o in outputs for t in range(len(o))]
        weights = math.fsum(o.weight[t] for o, t in actions)
        b = math.fsum(o.weight[t] * o.reward for o, t in actions) / weights
        quotient = total(over_q(o, t) * (o.reward - b) for o, t in actions) / total(over_q(o, t) for o, t in actions)
        J = J + weights / len(actions) * quotient
    return J / max(1, len(prompts))
