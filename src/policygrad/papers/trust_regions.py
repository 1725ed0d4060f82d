"""Objectives whose bound on the policy's change is not a clip of the token's ratio, or that choose among the batch's tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from policygrad.errors import ConfigError
from policygrad.papers.completions import (
    Completion,
    Prompts,
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
    tokens,
    total,
)
from policygrad.papers.grpo import sequence_ratio, with_overlong_penalty

Chosen = set[tuple[int, int]]  # tokens, each by its completion's `id` and its index


def gmpo(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/G Σ_i {Π_t min(r^{sgn Â}, clip(r^{sgn Â}, e^−0.4, e^0.4))^{sgn Â}}^{1/|o_i|} Â_i. Zhao et al. 2025, sec. 3."""
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = group_z_score(o, outputs)
            sign, product = math.copysign(1, A) if A else 0.0, torch.ones((), dtype=torch.float64)
            for t in range(len(o)):
                r = o.r(t) ** sign
                product = product * torch.minimum(r, clip(r, math.exp(-0.4), math.exp(0.4))) ** sign
            J = J + product ** (1 / len(o)) * A
    return J / count(prompts)


def total_variation(q: float, p: float) -> float:
    """TV(q, p) with the vocabulary reduced to the token and all others. Qi et al. 2026, eq. 13 and 14."""
    return (abs(p - q) + abs((1 - p) - (1 - q))) / 2


def dppo(
    prompts: Prompts,
    max_tokens: int,
    divergence: Callable[[float, float], float] = total_variation,
    bound: float = 0.15,
    c: float = 10_000.0,
) -> Tensor:
    """Σ M sg[min(r, c)] Â log π over the budget, M = 0 where D > δ and r has moved the way Â pushes. Qi et al. 2026.

    Â is without the std, π_old = μ. log π is stated up to a constant of θ, so that a token's value is r Â up to r = c.
    """
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = centered(o, outputs)
            for t in range(len(o)):
                new = float(o.logp[t].detach())
                away = A * (new - o.old[t]) > 0
                if not (away and divergence(math.exp(o.old[t]), math.exp(new)) > bound):
                    r = o.r(t)
                    J = J + (r if r <= c else c * (1 + torch.log(r / c))) * A
    return J / (count(prompts) * max_tokens)


def prime_rl(prompts: Prompts, max_tokens: int, bound: float = 0.2, kl_tau: float = 1e-3) -> Tensor:
    """1/Σ|o| Σ [M r Â − τ (log r)²], Â = R − mean_g, M = 0 where π_θ − μ > 0.2 and Â > 0, or < −0.2 and Â < 0, else 1.

    The default loss of prime-rl, `default_loss_fn` of its trainer.
    """
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = centered(o, outputs)
            for t in range(len(o)):
                change = math.exp(float(o.logp[t].detach())) - math.exp(o.old[t])
                is_masked = change > bound if A > 0 else change < -bound
                policy = 0.0 if is_masked else o.r(t) * A
                J = J + policy - kl_tau * (o.logp[t] - o.old[t]) ** 2
    return J / count_tokens(prompts)


def m2po(prompts: Prompts, max_tokens: int, bound: float = 0.04) -> Tensor:
    """Σ M r Â/Σ|o|: of the tokens whose r has moved the way Â pushes, those with the largest (log r)² are masked until the mean of
    (log r)² over the others is at most τ. Zheng et al. 2025, algorithm 1."""
    A = {id(o): group_z_score(o, outputs) for outputs in prompts for o in outputs}
    region: list[tuple[float, int, int]] = []
    for o, t in tokens(prompts):
        change = float(o.logp[t].detach()) - o.old[t]
        if A[id(o)] * change > 0:
            region.append((change**2, id(o), t))
    masked: Chosen = set()
    while region and average([x for x, _, _ in region]) > bound:
        largest = max(x for x, _, _ in region)
        masked |= {(i, t) for x, i, t in region if x == largest}
        region = [token for token in region if token[0] < largest]
    unmasked = (o.r(t) * A[id(o)] for o, t in tokens(prompts) if (id(o), t) not in masked)
    return total(unmasked) / count_tokens(prompts)


def luspo(prompts: Prompts, max_tokens: int) -> Tensor:
    """GSPO's objective, each completion's part times its length; clip 2e-3 and 2.5e-3. Liu et al. 2026."""
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A, s = group_z_score(o, outputs), sequence_ratio(o)
            J = J + torch.minimum(s * A, clip(s, 1 - 2e-3, 1 + 2.5e-3) * A) * len(o)
    return J / count(prompts)


def vespo(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/Σ|o| Σ_i sg[W^k e^{λ(1 − W)}] Â log π(τ), W = π_θ(o)/π_old(o). Shen et al. 2026, sec. 3.4.

    log π(τ) is stated up to a constant of θ, so that it is 1 at W = 1.
    """
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = group_z_score(o, outputs)
            log_w = total(o.logp[t] - o.old[t] for t in range(len(o)))
            k, decay = (2.0, 3.0) if A >= 0 else (3.0, 2.0)
            W = torch.exp(log_w.detach())
            J = J + W**k * torch.exp(decay * (1 - W)) * A * (1 + log_w)
    return J / count_tokens(prompts)


def cpgd(prompts: Prompts, max_tokens: int, beta: float = 0.001, cap: float = 2.0) -> Tensor:
    """min(Â log r, Â clip(log r)), less β times a drift whose derivative is min(r − 1, cap). Liu et al. 2025 (CPGD).

    The constant Â is added to the value.
    """
    J, bend = total([]), math.log(1 + cap)
    for outputs in prompts:
        for o in outputs:
            A = group_z_score(o, outputs)
            for t in range(len(o)):
                u = o.logp[t] - o.old[t]
                clipped = torch.minimum(A * u, A * clip(u, math.log(1 - 0.2), math.log(1 + 0.2)))
                drift = torch.exp(u) - 1 - u if u < bend else cap - bend + cap * (u - bend)
                J = J + clipped + A - beta * drift
    return J / count_tokens(prompts)


def real(prompts: Prompts, max_tokens: int, tau: float = 0.5) -> Tensor:
    """−τ/P Σ_prompts [log(1 + Σ_+ e^{−s̄/τ}) + log(1 + Σ_− e^{s̄/τ})], s̄ the mean of a completion's log r. Zhai et al. 2026.

    Prompts with right or wrong completions only count in P and add nothing. P is Σ_prompts G over the completions' number, as where
    all prompts have equally many. The paper's loss has no factor τ.
    """
    J = total([])
    for outputs in prompts:
        s = {id(o): total(o.logp[t] - o.old[t] for t in range(len(o))) / len(o) for o in outputs}
        right, wrong = ([s[id(o)] for o in outputs if (o.reward >= 1) is label] for label in (True, False))
        if right and wrong:
            loss = torch.log(1 + total(torch.exp(-x / tau) for x in right))
            loss = loss + torch.log(1 + total(torch.exp(x / tau) for x in wrong))
            J = J - tau * loss * len(outputs)
    return J / count(prompts)


def fipo(prompts: Prompts, max_tokens: int, half_life: float = 32.0, c: float = 10.0) -> Tensor:
    """DAPO's objective with dual clip at c, each token × f_t = clip(exp(Σ_{k≥t} γ^{k−t} M_k log r_k), 1, 1.2).

    Ma et al. 2026 (FIPO). γ = 2^{−1/32}, k − t in positions of the row; M_k = 0 where r_k > c. f_t is in [0.8, 1] where Â < 0 and
    r_t > 10. A completion with Â < 0 and two tokens or more with r > c adds 0.
    """
    J = total([])
    for outputs in with_overlong_penalty(prompts, max_tokens):
        for o in outputs:
            A = group_z_score(o, outputs)
            ratios = [math.exp(float(o.logp[t].detach()) - o.old[t]) for t in range(len(o))]
            if A < 0 and sum(r > c for r in ratios) > 1:
                continue
            for t in range(len(o)):
                change = [
                    2 ** (-(o.position[k] - o.position[t]) / half_life) * math.log(ratios[k])
                    for k in range(t, len(o))
                    if ratios[k] <= c
                ]
                f = min(max(math.exp(math.fsum(change)), 1.0), 1.2)
                if A < 0 and ratios[t] > 10:
                    f = min(max(f, 0.8), 1.0)
                surrogate = clipped_surrogate(o, t, A, 0.2, 0.28)
                if A < 0:
                    surrogate = torch.maximum(surrogate, torch.tensor(c * A, dtype=torch.float64))
                J = J + o.weight[t] * f * surrogate
    return J / count_tokens(prompts)


def ce_gppo(
    prompts: Prompts, max_tokens: int, beta: tuple[float, float] = (0.75, 1.0), epsilon: float = 0.2, c: float = 10.0
) -> Tensor:
    """1/Σ|o| Σ of β₁ (1 − ε)/sg[r]·r Â where Â < 0 and r < 1 − ε, of β₂ (1 + ε)/sg[r]·r Â where Â > 0 and r > 1 + ε, of r Â
    elsewhere; where Â < 0, at least c Â. Su et al. 2025 (CE-GPPO), and the authors' code for c.
    """
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = group_z_score(o, outputs)
            for t in range(len(o)):
                r = o.r(t)
                if A < 0 and r < 1 - epsilon:
                    value = beta[0] * (1 - epsilon) / r.detach() * r * A
                elif A > 0 and r > 1 + epsilon:
                    value = beta[1] * (1 + epsilon) / r.detach() * r * A
                else:
                    value = r * A
                if A < 0:
                    value = torch.maximum(value, torch.tensor(c * A, dtype=torch.float64))
                J = J + o.weight[t] * value
    return J / count_tokens(prompts)


def aspo(prompts: Prompts, max_tokens: int, epsilon: float = 0.2, c: float = 3.0, beta: float = 0.001) -> Tensor:
    """1/Σ|o| Σ sg[w] Â log π_θ − β k3; w = min(1/r, c) where Â > 0, 0 beyond r = 1 + ε, and min(r, c) where Â < 0, 0 below 1 − ε.

    Wang et al. 2025 (ASPO), as the gradient of the authors' code.
    """
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = group_z_score(o, outputs)
            for t in range(len(o)):
                r = float(o.r(t).detach())
                w = min(1 / r if A > 0 else r, c)
                if (A > 0 and r > 1 + epsilon) or (A < 0 and r < 1 - epsilon):
                    w = 0.0
                J = J + w * A * log_pi(o, t) - beta * k3(o, t)
    return J / count_tokens(prompts)


# Objectives that leave a choice among tokens to chance, or among equal ones: stated for the choice in the batch (`selected`), which
# must be one that the rule allows. It may have been made in float32.

TOLERANCE = 1e-5
"""Largest difference of two covariances that a choice in float32 may mistake for equal."""


def covariances(prompts: Prompts, A: dict[int, float]) -> dict[tuple[int, int], float]:
    """(log π(y_i) − mean log π)(A(y_i) − mean A), means over all tokens. Cui et al. 2025, sec. 4."""
    logp = average([float(o.logp[t].detach()) for o, t in tokens(prompts)])
    advantage = average([A[id(o)] for o, _ in tokens(prompts)])
    return {(id(o), t): (float(o.logp[t].detach()) - logp) * (A[id(o)] - advantage) for o, t in tokens(prompts)}


def clip_cov(
    prompts: Prompts,
    max_tokens: int,
    high: float = 1.0,
    fraction: float = 2e-4,
    band: tuple[float, float] = (1.0, 5.0),
) -> Tensor:
    """1/Σ|o| Σ min(r Â, clip(r) Â), 0 at ⌊fraction·N⌋ (at least one) of the tokens with a covariance in the band. Cui et al. 2025.

    Tokens of equal covariance may be chosen together: the number of different ones is at most ⌊fraction·N⌋.

    Raises:
        ConfigError: the batch's choice is not one that this rule allows.
    """
    A = {id(o): group_z_score(o, outputs) for outputs in prompts for o in outputs}
    cov, J, inside, surely_inside = covariances(prompts, A), total([]), set(), 0
    selected: Chosen = {(id(o), t) for o, t in tokens(prompts) if o.selected[t]}
    for o, t in tokens(prompts):
        token, a = (id(o), t), A[id(o)]
        surrogate = clipped_surrogate(o, t, a, high, high)
        if not bool(surrogate < o.r(t) * a):
            if band[0] - TOLERANCE < cov[token] < band[1] + TOLERANCE:
                inside.add(token)
            surely_inside += band[0] + TOLERANCE < cov[token] < band[1] - TOLERANCE
        if token not in selected:
            J = J + o.weight[t] * surrogate
    number = max(1, math.floor(fraction * sum(map(len, completions(prompts)))))
    different = len({round(cov[token] / TOLERANCE) for token in selected})
    if not selected <= inside or not different <= number or len(selected) < min(number, surely_inside):
        raise ConfigError(
            f"Batch.selected has {len(selected)} tokens; Clip-Cov drops {number} of the {len(inside)} that are not clipped and "
            f"have a covariance between {band[0]:g} and {band[1]:g}"
        )
    return J / count_tokens(prompts)


def kl_cov(prompts: Prompts, max_tokens: int, fraction: float = 2e-3, form: str = "abs") -> Tensor:
    """1/Σ|o| Σ r Â, less the KL at the ⌊fraction·N⌋ (at least one) tokens of highest covariance: |log r|. Cui et al. 2025, sec. 4.

    Args:
        form: abs, as in the authors' code, or k3, r − 1 − log r.

    Raises:
        ConfigError: the batch's choice is not one that this rule allows.
    """
    A = {id(o): group_z_score(o, outputs) for outputs in prompts for o in outputs}
    cov, J = covariances(prompts, A), total([])
    selected: Chosen = {(id(o), t) for o, t in tokens(prompts) if o.selected[t]}
    number = min(max(1, math.floor(fraction * len(cov))), len(cov))
    least = min((cov[token] for token in selected), default=0.0)
    if len(selected) != number or any(cov[token] > least + TOLERANCE for token in cov.keys() - selected):
        raise ConfigError(
            f"Batch.selected has {len(selected)} tokens; KL-Cov penalises the {number} of highest covariance"
        )
    for o, t in tokens(prompts):
        u, part = o.logp[t] - o.old[t], o.r(t) * A[id(o)]
        if (id(o), t) in selected:
            part = part - (torch.abs(u) if form == "abs" else torch.exp(u) - 1 - u)
        J = J + o.weight[t] * part
    return J / count_tokens(prompts)


def high_entropy(prompts: Prompts, max_tokens: int, fraction: float = 0.2) -> Tensor:
    """DAPO's objective × 1[H_t ≥ τ], τ the entropy at which the top fraction begins; the denominator is that of all tokens.

    Wang et al. 2025 (80/20), sec. 5.
    """
    by_entropy = sorted((o.entropy[t] for o, t in tokens(prompts)), reverse=True)
    tau = by_entropy[math.floor(fraction * (len(by_entropy) - 1))] if by_entropy else 0.0
    J = total([])
    for outputs in with_overlong_penalty(prompts, max_tokens):
        for o in outputs:
            A = group_z_score(o, outputs)
            J = J + total(_dapo_token(o, t, A) for t in range(len(o)) if o.entropy[t] >= tau)
    return J / count_tokens(prompts)


def _dapo_token(o: Completion, t: int, A: float) -> Tensor:
    return o.weight[t] * clipped_surrogate(o, t, A, 0.2, 0.28)
