"""The papers' objectives that need a critic, literally: advantages as the defining double sums over sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from doubles.transcriptions.objectives import Completion, Prompts, clip, count_tokens, log_pi, sg, zero


def rewards(o: Completion, beta: float = 0.0) -> list[Tensor]:
    """r_t: token rewards and −β·k1, the terminal reward on the last sampled token."""
    last = len(o) - 1
    kl = [beta * sg(o.old[t] - o.ref[t]) if beta else torch.zeros((), dtype=torch.float64) for t in range(len(o))]
    return [o.token_reward[t] - kl[t] + (o.reward if t == last else 0) for t in range(len(o))]


def delta(o: Completion, r: list[Tensor], t: int, gamma: float, end: Tensor | float = 0) -> Tensor:
    """δ_t = r_t + γV_{t+1} − V_t, the value after the end 0, or `end` where the answer was cut off."""
    after = o.value[t + 1] if t + 1 < len(o) else end
    return r[t] + gamma * after - o.value[t]


def gae(o: Completion, r: list[Tensor], gamma: float, lam: float, end: Tensor | float = 0) -> list[Tensor]:
    """Σ_l (γλ)^l δ_{t+l}."""
    n = len(o)
    return [
        sum(((gamma * lam) ** k * delta(o, r, t + k, gamma, end) for k in range(n - t)), o.reward * 0) for t in range(n)
    ]


def n_step(o: Completion, r: list[Tensor], gamma: float, n: int, end: Tensor | float = 0) -> list[Tensor]:
    """Σ_{k<n} γ^k r_{t+k} + γ^n V_{t+n} − V_t; past the end there are no rewards, and the value is 0, or `end` right after it."""
    size = len(o)
    out = []
    for t in range(size):
        taken = min(n, size - t)
        value = gamma**n * o.value[t + n] if t + n < size else gamma**taken * end
        out.append(sum(gamma**k * r[t + k] for k in range(taken)) + value - o.value[t])
    return out


def a2c(prompts: Prompts, width: int) -> Tensor:
    """A3C, sec. 4, with the five-step advantage; entropy bonus from the samples, −η log π·r under stop-gradient."""
    J = zero(prompts)
    for o in (o for outputs in prompts for o in outputs):
        A = n_step(o, rewards(o), 1.0, 5)
        for t in range(len(o)):
            bonus = -0.01 * sg(o.r(t) * o.logp[t])
            J = J + A[t] * (o.logp[t] - sg(o.logp[t]) + 1) + bonus * (o.logp[t] - sg(o.logp[t]) + 1)
    return J / max(1, count_tokens(prompts))


def trpo(prompts: Prompts, width: int) -> Tensor:
    """TRPO eq. 14, E[r·Â], with GAE(1, 0.95) as it is; `natural` climbs the same surrogate."""
    J = zero(prompts)
    for o in (o for outputs in prompts for o in outputs):
        A = gae(o, rewards(o), 1.0, 0.95)
        for t in range(len(o)):
            J = J + o.r(t) * A[t]
    return J / max(1, count_tokens(prompts))


def _ppo_advantages(prompts: Prompts, beta: float) -> dict[int, list[Tensor]]:
    """GAE(1, 0.95), whitened over the rollout's sampled tokens."""
    A = {id(o): gae(o, rewards(o, beta), 1.0, 0.95) for outputs in prompts for o in outputs}
    every = [x for row in A.values() for x in row]
    mean = sum(every, torch.zeros((), dtype=torch.float64)) / max(1, len(every))
    squares = sum(((x - mean) ** 2 for x in every), torch.zeros((), dtype=torch.float64))
    variance = squares / max(1, len(every) - 1)
    return {key: [(x - mean) / torch.sqrt(variance + 1e-8) for x in row] for key, row in A.items()}


def ppo(prompts: Prompts, width: int) -> Tensor:
    """PPO eq. 7 on RLHF's reward."""
    A = _ppo_advantages(prompts, 0.05)
    J = zero(prompts)
    for o in (o for outputs in prompts for o in outputs):
        for t in range(len(o)):
            a = A[id(o)][t]
            J = J + torch.minimum(o.r(t) * a, clip(o.r(t), 0.8, 1.2) * a)
    return J / max(1, count_tokens(prompts))


def ppo_penalty(prompts: Prompts, width: int) -> Tensor:
    """PPO eq. 8 with β = 1: KL(π_old‖π_θ) at the sampled tokens as r − 1 − log r."""
    A = _ppo_advantages(prompts, 0.0)
    J = zero(prompts)
    for o in (o for outputs in prompts for o in outputs):
        for t in range(len(o)):
            J = J + o.r(t) * A[id(o)][t] - (o.r(t) - 1 - (o.logp[t] - o.old[t]))
    return J / max(1, count_tokens(prompts))


def vapo(prompts: Prompts, width: int) -> Tensor:
    """VAPO: λ = 1 − 1/(αl), clip-higher, the token mean; plus 0.1·NLL on the tokens of correct completions."""
    J, L, right = zero(prompts), zero(prompts), 0
    for o in (o for outputs in prompts for o in outputs):
        A = gae(o, rewards(o), 1.0, max(0.0, 1 - 1 / (0.05 * len(o))))
        for t in range(len(o)):
            J = J + torch.minimum(o.r(t) * A[t], clip(o.r(t), 0.8, 1.28) * A[t])
            if o.reward >= 1:
                L, right = L + o.logp[t], right + 1
    return J / max(1, count_tokens(prompts)) + 0.1 * L / max(1, right)


def corrected(prompts: Prompts, width: int) -> Tensor:
    """PPO's importance surrogate with TIS: min(π_old/μ, 2)·r·Â, Â the Monte-Carlo return less the value."""
    J = zero(prompts)
    for o in (o for outputs in prompts for o in outputs):
        A = n_step(o, rewards(o), 1.0, len(o))
        for t in range(len(o)):
            rho = torch.exp(sg(o.old[t] - o.sampler[t])).clamp(max=2.0)
            J = J + rho * o.r(t) * A[t]
    return J / max(1, count_tokens(prompts))


CRITIC = {f.__name__: f for f in (a2c, trpo, ppo, ppo_penalty, vapo)} | {"natural": trpo}
__all__ = ["CRITIC", "corrected", "gae", "log_pi", "n_step", "rewards"]
