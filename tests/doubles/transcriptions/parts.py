"""Literal transcriptions of the parts that no named algorithm uses, each with the composition it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import policygrad as pg
from doubles.transcriptions.objectives import (
    Completion,
    Prompts,
    cispo,
    clip,
    count,
    count_tokens,
    dapo,
    grpo,
    gspo,
    gspo_token,
    mean,
    punished,
    reinforce,
    rloo,
    rloo_to_go,
    sg,
    std,
    without_no_spread,
    without_truncated,
    zero,
    zscore,
)
from policygrad.core.advantages import FrozenRunningMean

PerToken = Callable[[Completion, int, Tensor], Tensor]
Z = (pg.GroupMean(), pg.GroupStd())


def sequence_mean(prompts: Prompts, token: PerToken) -> Tensor:
    """1/B Σ_i 1/|o_i| Σ_t token(o, t, Â_i), Â the group z-score."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            A = zscore(o, outputs)
            J = J + sum(token(o, t, A) for t in range(len(o))) / len(o)
    return J / max(1, count(prompts))


def importance(prompts: Prompts, width: int) -> Tensor:
    return sequence_mean(prompts, lambda o, t, A: o.r(t) * A)


def ppo_clip(o: Completion, t: int, A: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.minimum(o.r(t) * A, clip(o.r(t), 1 - low, 1 + high) * A)


def dual_clip(prompts: Prompts, width: int) -> Tensor:
    def token(o: Completion, t: int, A: Tensor) -> Tensor:
        return ppo_clip(o, t, A) if A >= 0 else torch.maximum(ppo_clip(o, t, A), 3 * A)

    return sequence_mean(prompts, token)


def sequence_product(prompts: Prompts, width: int) -> Tensor:
    """1/B Σ_i (π_θ(o_i)/π_old(o_i)) Â_i."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            J = J + torch.exp(sum(o.logp[t] - o.old[t] for t in range(len(o)))) * zscore(o, outputs)
    return J / max(1, count(prompts))


def kl_in_loss(form: str) -> Callable[[Prompts, int], Tensor]:
    """The clip objective's sequence mean, minus β times the estimator's token mean."""

    def estimator(o: Completion, t: int) -> Tensor:
        u, r = o.u(t), o.r(t)
        k3 = torch.exp(-u) + u - 1
        return {"k2": u**2 / 2, "k3": k3, "r*k1": r * u, "r*k3": r * k3}[form]

    def objective(prompts: Prompts, width: int) -> Tensor:
        J = sequence_mean(prompts, ppo_clip)
        for outputs in prompts:
            for o in outputs:
                for t in range(len(o)):
                    J = J - 0.3 * estimator(o, t) / count_tokens(prompts)
        return J

    return objective


def entropy(prompts: Prompts, width: int) -> Tensor:
    """−η sg[r log π] log π: its gradient is the score-function gradient of the states' entropy."""

    def token(o: Completion, t: int, A: Tensor) -> Tensor:
        bonus = -0.02 * sg(o.r(t) * o.logp[t])
        return ppo_clip(o, t, A) + bonus * (o.logp[t] - sg(o.logp[t]) + 1)

    return sequence_mean(prompts, token)


def magistral(prompts: Prompts, width: int) -> Tensor:
    """Â_i = R_i − mean_g, divided by the std of all Â in the batch; per-group token mean, averaged over groups.

    R_i with the length penalty of eq. 1, at most 0.1.
    """
    prompts = [[replace(o, reward=punished(o, width, 0.1)) for o in outputs] for outputs in without_no_spread(prompts)]
    advantages = {id(o): o.reward - mean([p.reward for p in outputs]) for outputs in prompts for o in outputs}
    J = zero(prompts)
    for outputs in prompts:
        inner = 0
        for o in outputs:
            A = advantages[id(o)] / (std(list(advantages.values())) + 1e-4)
            inner = inner + sum(ppo_clip(o, t, A, 0.2, 0.28) for t in range(len(o)))
        J = J + inner / sum(len(o) for o in outputs)
    return J / max(1, len(prompts))


def opo(prompts: Prompts, width: int) -> Tensor:
    """OPO: 1/B Σ_i (R_i − b) log π(o_i), b = Σ_j |o_j| R_j / Σ_j |o_j| over the prompt's completions."""
    J = zero(prompts)
    for outputs in prompts:
        b = sum(len(o) * o.reward for o in outputs) / sum(len(o) for o in outputs)
        for o in outputs:
            A = o.reward - b if max(p.reward for p in outputs) > min(p.reward for p in outputs) else 0
            for t in range(len(o)):
                J = J + A * (o.logp[t] - sg(o.logp[t]) + 1)
    return J / max(1, count(prompts))


def optimal_length(prompts: Prompts, width: int) -> Tensor:
    """The same with the mean over the others: b_i = Σ_{j≠i} |o_j| R_j / Σ_{j≠i} |o_j|."""
    J = zero(prompts)
    for outputs in prompts:
        for o in outputs:
            others = [p for p in outputs if p is not o]
            if others:
                b = sum(len(p) * p.reward for p in others) / sum(len(p) for p in others)
                for t in range(len(o)):
                    J = J + (o.reward - b) * (o.logp[t] - sg(o.logp[t]) + 1)
    return J / max(1, count(prompts))


def root_group(prompts: Prompts, width: int) -> Tensor:
    """Each group's Σ (R_i − b) log π(o_i) over √G, and the groups weighed by their share G/B: Σ_g (G/B)(1/√G) Σ_i."""
    J = zero(prompts)
    for outputs in prompts:
        G, B = len(outputs), count(prompts)
        for o in outputs:
            for t in range(len(o)):
                J = J + (G / B) / G**0.5 * (o.reward - 0.25) * (o.logp[t] - sg(o.logp[t]) + 1)
    return J


def reweighted(prompts: Prompts, width: int) -> Tensor:
    """The unfiltered step's denominators, times 1/(1 − f) with f the dropped fraction of completions."""
    kept = without_no_spread(prompts)
    f = 1 - count(kept) / max(1, count(prompts))
    if f == 1:
        return zero(prompts)
    total = sequence_mean(kept, ppo_clip) * max(1, count(kept)) / max(1, count(prompts))
    return total / (1 - f)


def overlong_mask(prompts: Prompts, width: int) -> Tensor:
    return sequence_mean(without_truncated(prompts), ppo_clip)


def overlong_mask_with_statistics(prompts: Prompts, width: int) -> Tensor:
    """The truncated ones' rewards stay in the group's mean and std; their tokens are gone."""
    J, B = zero(prompts), count(without_truncated(prompts))
    for outputs in prompts:
        for o in outputs:
            if not o.truncated:
                J = J + sum(ppo_clip(o, t, zscore(o, outputs)) for t in range(len(o))) / len(o)
    return J / max(1, B)


def soft_overlong(prompts: Prompts, width: int) -> Tensor:
    """A truncated completion has reached the budget, whatever part of it was sampled tokens."""

    return sequence_mean([[replace(o, reward=punished(o, width)) for o in outputs] for outputs in prompts], ppo_clip)


def weighted(prompts: Prompts, width: int) -> Tensor:
    return sequence_mean(prompts, lambda o, t, A: sg(o.weight[t]) * ppo_clip(o, t, A))


def batch_mean(prompts: Prompts, width: int) -> Tensor:
    rewards = [o.reward for outputs in prompts for o in outputs]
    return reinforce(prompts, width, baseline=float(mean(rewards)))


GRPO = replace(pg.GRPO, terms=())
KL = {f: pg.KLToReference(0.3, f, aggregation=pg.TokenMean()) for f in ("k2", "k3", "r*k1", "r*k3")}  # type: ignore[arg-type]

PARTS: dict[str, tuple[pg.Algorithm, Callable[[Prompts, int], Tensor]]] = {
    "importance": (replace(GRPO, gate=pg.Importance()), importance),
    "dual clip": (replace(GRPO, gate=pg.DualClip(0.2, 0.2, 3.0)), dual_clip),
    "weight cap, low": (replace(pg.CISPO, gate=pg.ClippedImportance(0.9, 1.1)), lambda p, w: cispo(p, w, 0.9, 1.1)),
    "sequence product": (
        replace(GRPO, ratio=pg.SequenceProduct(), gate=pg.Importance(), aggregation=pg.SequenceSum()),
        sequence_product,
    ),
    "gspo_token, token rewards": (pg.GSPO, gspo_token),
    **{f"KL {form}": (replace(GRPO, terms=(term,)), kl_in_loss(form)) for form, term in KL.items()},
    "entropy": (replace(GRPO, terms=(pg.Entropy(0.02),)), entropy),
    "magistral, spelt out": (
        replace(
            GRPO,
            advantage=(pg.GroupMean(), pg.BatchStd()),
            gate=pg.Clip(0.2, 0.28),
            aggregation=pg.GroupTokenMean(),
            shaping=(pg.SoftOverlong(scale=0.1),),
            filters=(pg.DropZeroVariance(),),
        ),
        magistral,
    ),
    "group power": (
        replace(
            pg.REINFORCE, advantage=(FrozenRunningMean(baseline=0.25),), aggregation=pg.SequenceSum(group_power=0.5)
        ),
        root_group,
    ),
    "reweight": (replace(GRPO, filters=(pg.DropZeroVariance("reweight"),)), reweighted),
    "overlong mask": (replace(GRPO, filters=(pg.MaskTruncated(),)), overlong_mask),
    "overlong mask, statistics": (
        replace(GRPO, filters=(pg.MaskTruncated(keep_in_statistics=True),)),
        overlong_mask_with_statistics,
    ),
    "soft overlong": (replace(GRPO, shaping=(pg.SoftOverlong(),)), soft_overlong),
    "weight": (GRPO, weighted),
    "running mean": (
        replace(pg.REINFORCE, advantage=(FrozenRunningMean(baseline=0.4),)),
        lambda p, w: reinforce(p, w, 0.4),
    ),
    "batch mean": (replace(pg.REINFORCE, advantage=(pg.BatchMean(),)), batch_mean),
    "optimal baseline, length": (replace(pg.REINFORCE, advantage=(pg.OptimalBaseline("length"),)), optimal_length),
    "token rewards": (pg.REINFORCE, reinforce),
    "KL in reward, large": (
        replace(pg.RLOO, shaping=(pg.KLInReward(0.7, level="sequence"),)),
        lambda p, w: rloo(p, w, 0.7),
    ),
    "KL in reward, to go": (replace(pg.RLOO, shaping=(pg.KLInReward(0.7),)), lambda p, w: rloo_to_go(p, w, 0.7)),
}
EXTRA_FIELDS = {"weight": "weight", "gspo_token, token rewards": "token_reward", "token rewards": "token_reward"}


def prorl(prompts: Prompts, width: int) -> Tensor:
    """DAPO with clip 0.2 / 0.4 and −1e-4·u²/2 on the tokens that take part."""
    return dapo(prompts, width, high=0.4, penalty=lambda o, t: 1e-4 * o.u(t) ** 2 / 2)


ROWS = {"iterative_grpo": grpo, "gspo_token": gspo, "prorl": prorl, "magistral": magistral, "opo": opo}
