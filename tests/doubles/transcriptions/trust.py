"""The objectives whose trust region is not the token's ratio, or that choose among a batch's tokens, literally."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
    overlong_penalty,
    sg,
    without_no_spread,
    without_truncated,
    zero,
    zscore,
)

Token = tuple[Completion, int]


def gmpo(prompts: Prompts, width: int) -> Tensor:
    """1/G Σ_i { Π_t min(w^sgn Â, clip(w^sgn Â, e^-0.4, e^0.4))^sgn Â }^(1/|o_i|) Â_i."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            A = zscore(o, outputs)
            s, product = float(torch.sign(A)), 1
            for t in range(len(o)):
                w = o.r(t) ** s
                product = product * torch.minimum(w, clip(w, math.exp(-0.4), math.exp(0.4))) ** s
            J = J + product ** (1 / len(o)) * A
    return J / max(1, count(prompts))


def bernoulli(q: Tensor, p: Tensor, measure: str) -> Tensor:
    """D of a draw of the token against all others."""
    if measure == "tv":
        return (abs(p - q) + abs((1 - p) - (1 - q))) / 2
    return q * torch.log(q / p) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))


def dppo(prompts: Prompts, width: int, measure: str = "tv", delta: float = 0.15) -> Tensor:
    """Σ M r Â over the budget; M = 0 where D > δ and r has gone the way Â pushes. Â without the std, π_old = μ."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            A = o.reward - mean([p.reward for p in outputs])
            for t in range(len(o)):
                D = bernoulli(sg(torch.exp(o.old[t])), sg(torch.exp(o.logp[t])), measure)
                away = bool((A > 0) & (o.r(t) > 1)) or bool((A < 0) & (o.r(t) < 1))
                J = J + (0 if away and delta < D else 1) * o.r(t) * A
    return J / (max(1, count(prompts)) * width)


def m2po(prompts: Prompts, width: int, tau: float = 0.04) -> Tensor:
    """Algorithm 1: of the trust-region tokens the one with the largest (log r)² is masked while their mean is above τ."""
    J, masked = zero(prompts), set()
    A = {id(o): zscore(o, outputs) for outputs in prompts for o in outputs}
    region: list[tuple[float, int, int]] = []
    for o in (o for outputs in prompts for o in outputs):
        for t in range(len(o)):
            change = float(sg(o.logp[t] - o.old[t]))
            if (float(A[id(o)]) > 0 and change > 0) or (float(A[id(o)]) < 0 and change < 0):
                region.append((change**2, id(o), t))
    while region and sum(x for x, _, _ in region) / len(region) > tau:
        largest = max(x for x, _, _ in region)
        masked |= {(i, t) for x, i, t in region if x == largest}
        region = [token for token in region if token[0] < largest]
    for o in (o for outputs in prompts for o in outputs):
        for t in range(len(o)):
            J = J + (0 if (id(o), t) in masked else 1) * o.r(t) * A[id(o)]
    return J / max(1, count_tokens(prompts))


def tokens(prompts: Prompts) -> Iterator[Token]:
    return ((o, t) for outputs in prompts for o in outputs for t in range(len(o)))


def covariances(prompts: Prompts, A: dict[int, Tensor]) -> dict[tuple[int, int], float]:
    """Cov(y_i) = (log π(y_i) − 1/N Σ_j log π(y_j))·(A(y_i) − 1/N Σ_j A(y_j))."""
    every = list(tokens(prompts))
    logp, advantage = mean([sg(o.logp[t]) for o, t in every]), mean([A[id(o)] for o, _ in every])
    return {(id(o), t): float((sg(o.logp[t]) - logp) * (A[id(o)] - advantage)) for o, t in every}


def clip_cov(
    prompts: Prompts,
    width: int,
    high: float = 1.0,
    share: float = 2e-4,
    band: tuple[float, float] = (1.0, 5.0),
    kept: Callable[[Prompts], Prompts] = without_no_spread,
) -> Tensor:
    """Of the tokens in the band and not clipped, ⌊share·N⌋ (at least one) are drawn at random and count 0.

    The objective is stated given the draw, and any draw will do that is one: of the band alone, and of that number. Tokens of
    equal covariance may come together (`core/ratios.py`), so that it is the number of different ones that is not exceeded.
    """
    prompts = kept(prompts)
    J, A = zero(prompts), {id(o): zscore(o, outputs) for outputs in prompts for o in outputs}
    cov, inside, drawn = covariances(prompts, A), set(), {(id(o), t) for o, t in tokens(prompts) if bool(o.drawn[t])}
    for o, t in tokens(prompts):
        a, r = A[id(o)], o.r(t)
        surrogate = torch.minimum(r * a, clip(r, 1 - high, 1 + high) * a)
        if band[0] < cov[id(o), t] < band[1] and not bool(surrogate < r * a):
            inside.add((id(o), t))
        J = J + (0 if (id(o), t) in drawn else surrogate)
    number = min(max(1, math.floor(share * count_tokens(prompts))), len(inside))
    assert drawn <= inside
    assert len({round(cov[token], 12) for token in drawn}) <= number <= len(drawn)
    return J / max(1, count_tokens(prompts))


def kl_cov(
    prompts: Prompts,
    width: int,
    share: float = 2e-3,
    form: str = "abs",
    kept: Callable[[Prompts], Prompts] = without_no_spread,
) -> Tensor:
    """r Â, and at the ⌊share·N⌋ (at least one) tokens of highest covariance r Â − KL.

    Stated given which of equal covariances they are: so many, and none is below one that is left.
    """
    prompts = kept(prompts)
    J, A = zero(prompts), {id(o): zscore(o, outputs) for outputs in prompts for o in outputs}
    cov = covariances(prompts, A)
    number = max(1, math.floor(share * count_tokens(prompts)))
    held = {(id(o), t) for o, t in tokens(prompts) if bool(o.drawn[t])}
    assert len(held) == min(number, len(cov))
    least, left = min((cov[x] for x in held), default=0.0), max((cov[x] for x in cov.keys() - held), default=-math.inf)
    assert least >= left - 1e-12
    for o, t in tokens(prompts):
        J, u = J + o.r(t) * A[id(o)], o.logp[t] - o.old[t]
        if (id(o), t) in held:
            J = J - (torch.abs(u) if form == "abs" else torch.exp(u) - 1 - u)
    return J / max(1, count_tokens(prompts))


def high_entropy(prompts: Prompts, width: int, share: float = 0.2) -> Tensor:
    """DAPO eq. 8 × 1[H_t ≥ τ], τ the entropy that the top share begins with; the denominator is that of all tokens."""
    prompts = without_truncated(without_no_spread(prompts))
    J, every = zero(prompts), sorted(float(o.entropy[t]) for o, t in tokens(prompts))
    tau = every[-1 - math.floor(share * (len(every) - 1))] if every else 0.0
    for outputs in prompts:
        punished = [replace(o, reward=o.reward + overlong_penalty(len(o), width)) for o in outputs]
        for o in punished:
            A = zscore(o, punished)
            for t in range(len(o)):
                if o.entropy[t] >= tau:
                    J = J + torch.minimum(o.r(t) * A, clip(o.r(t), 1 - 0.2, 1 + 0.28) * A)
    return J / max(1, count_tokens(prompts))


def luspo(prompts: Prompts, width: int) -> Tensor:
    """GSPO's objective with each completion's share times its length; clip 2e-3 and 2.5e-3."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            A = zscore(o, outputs)
            s = torch.exp(sum(o.logp[t] - o.old[t] for t in range(len(o))) / len(o))
            J = J + torch.minimum(s * A, clip(s, 1 - 2e-3, 1 + 2.5e-3) * A) * len(o)
    return J / max(1, count(prompts))


def vespo(prompts: Prompts, width: int) -> Tensor:
    """sg[W^k e^{λ(1 − W)}] Â log π(τ) over all tokens; log π(τ) up to a constant of θ, so that it is 1 at W = 1."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            A = zscore(o, outputs)
            log_w = sum(o.logp[t] - o.old[t] for t in range(len(o)))
            k, decay = (2.0, 3.0) if A >= 0 else (3.0, 2.0)
            W = torch.exp(sg(log_w))
            J = J + W**k * torch.exp(decay * (1 - W)) * A * (1 + log_w)
    return J / max(1, count_tokens(prompts))


def cpgd(prompts: Prompts, width: int, beta: float = 0.001, cap: float = 2.0) -> Tensor:
    """min(Â log r, Â clip(log r)), up to the constant Â, less β times a drift whose derivative is min(r − 1, cap)."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            A = zscore(o, outputs)
            for t in range(len(o)):
                u, bend = o.logp[t] - o.old[t], math.log(1 + cap)
                clipped = torch.minimum(A * u, A * clip(u, math.log(1 - 0.2), math.log(1 + 0.2)))
                drift = torch.exp(u) - 1 - u if u < bend else cap - bend + cap * (u - bend)
                J = J + clipped + A - beta * drift
    return J / max(1, count_tokens(prompts))


TRUST = {f.__name__: f for f in (gmpo, dppo, m2po, clip_cov, kl_cov, high_entropy, luspo, vespo, cpgd)}


def everyone(prompts: Prompts) -> Prompts:
    return prompts


PLAIN = replace(pg.KL_COV, terms=(), filters=(), update_rule=pg.GradientSteps())
"""r Â, the token mean: what the parts below are put into, with shares and bands that a batch of a dozen tokens has."""
TRUST_PARTS: dict[str, tuple[pg.Algorithm, Callable[[Prompts, int], Tensor]]] = {
    "binary KL": (
        replace(pg.DPPO, gate=pg.DivergenceClip("kl", 0.05)),
        lambda p, w: dppo(p, w, "kl", 0.05),
    ),
    "second moment, half of them": (replace(PLAIN, gate=pg.SecondMomentFilter(0.5)), lambda p, w: m2po(p, w, 0.5)),
    "covariance, a wide band": (
        replace(PLAIN, gate=pg.ClipCov(0.2, 0.2, fraction=0.3, cov_low=-0.2, cov_high=2.0)),
        lambda p, w: clip_cov(p, w, 0.2, 0.3, (-0.2, 2.0), everyone),
    ),
    **{
        f"covariance, held by {form}": (
            replace(PLAIN, terms=(pg.KLCov(1.0, 0.4, form),)),
            lambda p, w, form=form: kl_cov(p, w, 0.4, form, everyone),
        )
        for form in ("abs", "k3")
    },
    "high entropy, half of them": (
        replace(pg.HIGH_ENTROPY, corrections=(pg.HighEntropy(0.5),)),
        lambda p, w: high_entropy(p, w, 0.5),
    ),
    "high entropy, of π_old": (
        replace(pg.HIGH_ENTROPY, corrections=(pg.HighEntropy(0.5, "old"),)),
        lambda p, w: high_entropy(p, w, 0.5),
    ),
}
TRUST_FIELDS = dict.fromkeys(("high_entropy", "high entropy, half of them", "high entropy, of π_old"), "entropy")
