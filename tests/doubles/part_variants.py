"""Literal objectives of parts that come from other libraries: masks and weights for the sampler, advantages, averages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import policygrad as pg
from policygrad.core.shaping import FrozenRunningScale
from policygrad.papers.completions import (
    Completion,
    Prompts,
    clipped_surrogate,
    completions,
    count,
    count_tokens,
    group_z_score,
    total,
)
from policygrad.papers.objectives import Objective
from policygrad.papers.signals import read_by_reference

Variant = tuple[pg.Algorithm, Objective]
Keeps = Callable[[list[float]], list[bool]]
"""From log(π/μ) at each token of a completion to whether the token is kept."""

# Rejection by the distance from the sampler, and weights for it.

PPO = replace(pg.GRPO, terms=(), aggregation=pg.TokenMean())


def of_completions(statistic: Callable[[list[float]], float], low: float, high: float) -> Keeps:
    return lambda u: [low <= statistic(u) <= high] * len(u)


def of_tokens(statistic: Callable[[float], float], low: float, high: float) -> Keeps:
    return lambda u: [low <= statistic(x) <= high for x in u]


def k2(x: float) -> float:
    return x**2 / 2


def k3(x: float) -> float:
    return math.exp(x) - 1 - x


def mean_of(xs: list[float]) -> float:
    return sum(xs) / len(xs)


def old_gap(o: Completion) -> list[float]:
    return [a - b for a, b in zip(o.old, o.sampler, strict=True)]


def rejected(
    keeps: Keeps, shrink: bool = False, weight: Callable[[list[float]], list[float]] = lambda u: [1.0] * len(u)
) -> Objective:
    """1/Σ|o| Σ kept·weight·min(r Â, clip(r) Â); with `shrink` the denominator counts what is kept."""

    def objective(prompts: Prompts, max_tokens: int) -> Tensor:
        J, number = total([]), 0
        for outputs in prompts:
            for o in outputs:
                kept, weights = keeps(old_gap(o)), weight(old_gap(o))
                number += sum(kept)
                A = group_z_score(o, outputs) if len(outputs) > 1 else 0.0
                J = J + total(weights[t] * clipped_surrogate(o, t, A) for t in range(len(o)) if kept[t])
        return J / max(1, number if shrink else count_tokens(prompts))

    return objective


def tv_window(prompts: Prompts, max_tokens: int) -> Tensor:
    """prime-rl's ipo: 1/Σ|o| Σ [|π_θ − μ| ≤ 0.1] r Â − kl_tau (log r)², kl_tau 1e-3. r = π_θ/π_old, which in a run is π_θ/μ."""
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = o.reward - mean_of([p.reward for p in outputs]) if len(outputs) > 1 else 0.0
            for t in range(len(o)):
                is_near = abs(math.exp(float(o.logp[t].detach())) - math.exp(o.sampler[t])) <= 0.1
                J = J + is_near * o.r(t) * A - 1e-3 * (o.logp[t] - o.old[t]) ** 2
    return J / count_tokens(prompts)


def calibrated(prompts: Prompts, max_tokens: int) -> Tensor:
    """SkyRL's rollout_is (GLM-5): 1/Σ|o| Σ r Â where 0.7 ≤ π_θ/μ ≤ 1.6; in a run r is that too."""
    J = total([])
    for outputs in prompts:
        for o in outputs:
            A = group_z_score(o, outputs) if len(outputs) > 1 else 0.0
            for t in range(len(o)):
                is_near = 0.7 <= math.exp(float(o.logp[t].detach()) - o.sampler[t]) <= 1.6
                J = J + is_near * o.r(t) * A
    return J / count_tokens(prompts)


def weighted(weight: Callable[[list[float]], list[float]], by: str = "") -> Objective:
    """1/Σ|o| Σ weight·min(r Â, clip(r) Â), the weights divided by their mean over tokens or completions."""

    def objective(prompts: Prompts, max_tokens: int) -> Tensor:
        weights = {id(o): weight(old_gap(o)) for o in completions(prompts)}
        number, mean = count_tokens(prompts), 1.0
        if by == "tokens":
            mean = sum(map(sum, weights.values())) / number
        elif by == "completions":
            mean = mean_of([w[0] for w in weights.values()]) if weights else 1.0
        J = total([])
        for outputs in prompts:
            for o in outputs:
                A = group_z_score(o, outputs) if len(outputs) > 1 else 0.0
                J = J + total(weights[id(o)][t] / mean * clipped_surrogate(o, t, A) for t in range(len(o)))
        return J / number

    return objective


def with_mask(*corrections: pg.parts.MismatchMask | pg.TruncatedIS) -> pg.Algorithm:
    return replace(PPO, corrections=corrections)


Mask = pg.parts.MismatchMask
CORRECTIONS: dict[str, Variant] = {
    "geometric mask": (
        with_mask(Mask("ratio", "mean", 1.5)),
        rejected(of_completions(lambda u: math.exp(mean_of(u)), 1 / 1.5, 1.5)),
    ),
    "geometric mask, not counted": (
        with_mask(Mask("ratio", "mean", 1.5, 0.6, denominators="kept")),
        rejected(of_completions(lambda u: math.exp(mean_of(u)), 0.6, 1.5), shrink=True),
    ),
    "product mask": (
        with_mask(Mask("ratio", "sum", 2.0, 0.5)),
        rejected(of_completions(lambda u: math.exp(sum(u)), 0.5, 2.0)),
    ),
    "mask of completions with an outlier": (
        with_mask(Mask("ratio", "any", 2.0, 0.0)),
        rejected(of_completions(lambda u: math.exp(max(u)), 0.0, 2.0)),
    ),
    "mask of tokens, not counted": (
        with_mask(Mask("ratio", "token", 1.3, 0.7, denominators="kept")),
        rejected(of_tokens(math.exp, 0.7, 1.3), shrink=True),
    ),
    "k2 of tokens": (with_mask(Mask("k2", "token", 0.1)), rejected(of_tokens(k2, 0, 0.1))),
    "k2's maximum": (
        with_mask(Mask("k2", "any", 6.0)),
        rejected(of_completions(lambda u: max(map(k2, u)), 0, 6.0)),
    ),
    "k3's mean, not counted": (
        with_mask(Mask("k3", "mean", 2.0, denominators="kept")),
        rejected(of_completions(lambda u: mean_of([*map(k3, u)]), 0, 2.0), shrink=True),
    ),
    "k3's sum": (
        with_mask(Mask("k3", "sum", 6.0)),
        rejected(of_completions(lambda u: sum(map(k3, u)), 0, 6.0)),
    ),
    "seq-mask-tis": (
        with_mask(Mask("ratio", "mean", 1.5, 0.8), pg.TruncatedIS(math.inf)),
        rejected(of_completions(lambda u: math.exp(mean_of(u)), 0.8, 1.5), weight=lambda u: [*map(math.exp, u)]),
    ),
    "a window of total variation": (
        replace(
            pg.PRIME_RL,
            gate=pg.Importance(),
            filters=(),
            corrections=(Mask("tv", "token", 0.1, of="current"),),
        ),
        tv_window,
    ),
    "a window of the ratio to the sampler": (
        replace(
            PPO,
            gate=pg.Importance(),
            old_policy="sampler",
            corrections=(Mask("ratio", "token", 1.6, 0.7, of="current"),),
        ),
        calibrated,
    ),
    "truncated IS with a lower bound": (
        with_mask(pg.TruncatedIS(1.3, low=0.7)),
        weighted(lambda u: [min(max(math.exp(x), 0.7), 1.3) for x in u]),
    ),
    "truncated IS of mean 1 over tokens": (
        with_mask(pg.TruncatedIS(1.3, normalise=True)),
        weighted(lambda u: [min(math.exp(x), 1.3) for x in u], "tokens"),
    ),
    "truncated IS of mean 1 over completions": (
        with_mask(pg.TruncatedIS(1.3, "sequence", normalise=True)),
        weighted(lambda u: [min(math.exp(sum(u)), 1.3)] * len(u), "completions"),
    ),
}


# Rewards, advantages, filters and averages.

PLAIN = replace(pg.GRPO, terms=())


def sequence_mean(advantage: Callable[[Completion, list[Completion]], list[float]]) -> Objective:
    """1/B Σ_i 1/|o_i| Σ_t min(r Â, clip(r) Â)."""

    def objective(prompts: Prompts, max_tokens: int) -> Tensor:
        J = total([])
        for outputs in prompts:
            for o in outputs:
                A = advantage(o, outputs)
                J = J + total(clipped_surrogate(o, t, A[t]) for t in range(len(o))) / len(o)
        return J / max(1, sum(map(len, prompts)))

    return objective


def by_reward(reward: Callable[[Completion, list[Completion]], float]) -> Objective:
    """The z-score of a reward that is shaped first."""

    def objective(prompts: Prompts, max_tokens: int) -> Tensor:
        shaped = [[replace(o, reward=reward(o, outputs)) for o in outputs] for outputs in prompts]
        return z_score(shaped, max_tokens)

    return objective


def z(o: Completion, outputs: list[Completion]) -> float:
    return group_z_score(o, outputs) if len(outputs) > 1 else 0.0


z_score = sequence_mean(lambda o, outputs: [z(o, outputs)] * len(o))


def others_of(o: Completion, outputs: list[Completion]) -> list[float]:
    return [p.reward for p in outputs if p is not o]


def leave_one_out_score(o: Completion, outputs: list[Completion]) -> list[float]:
    others = others_of(o, outputs)
    if not others or len({p.reward for p in outputs}) == 1:
        return [0.0] * len(o)
    A = o.reward - mean_of(others)
    if len(others) > 1 and len(set(others)) > 1:
        A /= statistics.stdev(others) + 1e-4
    return [A] * len(o)


def lead(o: Completion, outputs: list[Completion]) -> float:
    others = others_of(o, outputs)
    return max(o.reward, *others) - max(others) if others else 0.0


def lead_over_std(o: Completion, outputs: list[Completion]) -> list[float]:
    rewards = [p.reward for p in outputs]
    return [lead(o, outputs) / (statistics.stdev(rewards) + 1e-6) if len({*rewards}) > 1 else 0.0] * len(o)


def beside_teacher(o: Completion, outputs: list[Completion]) -> list[float]:
    """The z-score, plus 0.3 of the teacher's log-ratio, at most 0.2 nats of it."""
    gaps = [min(max(a - b, -0.2), 0.2) for a, b in zip(o.ref, o.old, strict=True)]
    return [z(o, outputs) + 0.3 * gap for gap in gaps]


def later_beside_teacher(o: Completion, outputs: list[Completion]) -> list[float]:
    """R less the mean, plus 0.5 Σ_{s≥t} 0.9^{s−t} of the teacher's log-ratio."""
    A = o.reward - mean_of([p.reward for p in outputs]) if len(outputs) > 1 else 0.0
    gaps = [a - b for a, b in zip(o.ref, o.old, strict=True)]
    return [A + 0.5 * sum(0.9 ** (s - t) * gaps[s] for s in range(t, len(o))) for t in range(len(o))]


def with_length(o: Completion, outputs: list[Completion]) -> float:
    """Kimi k1.5, sec. 2.3.3, weighed by 0.7."""
    lengths = [len(p) for p in outputs]
    if max(lengths) == min(lengths):
        return o.reward
    rate = 0.5 - (len(o) - min(lengths)) / (max(lengths) - min(lengths))
    return o.reward + 0.7 * (rate if o.reward >= 1 else min(0.0, rate))


def running_scale(prompts: Prompts, max_tokens: int) -> Tensor:
    """Three scores 0, 1, 2 before; then the rollout's, and the std over them all. Without a baseline: Ψ = R."""
    scores = [0.0, 1.0, 2.0, *(o.reward for o in completions(prompts))]
    mean, std = mean_of(scores), statistics.stdev(scores)
    return sequence_mean(lambda o, outputs: [(o.reward - mean) / (std + 1e-7)] * len(o))(prompts, max_tokens)


def where(keep: Callable[[list[float]], bool], objective: Objective = z_score) -> Objective:
    def of_kept(prompts: Prompts, max_tokens: int) -> Tensor:
        return objective([outputs for outputs in prompts if keep([o.reward for o in outputs])], max_tokens)

    return of_kept


def token_sum(prompts: Prompts, max_tokens: int) -> Tensor:
    """Σ_i Σ_t min(r Â, clip(r) Â)."""
    return total(clipped_surrogate(o, t, z(o, outputs)) for outputs in prompts for o in outputs for t in range(len(o)))


def total_variation(prompts: Prompts, max_tokens: int) -> Tensor:
    """The z-score's objective, minus 0.3/B Σ_i 1/|o_i| Σ_t |log π_θ − log π_ref|."""
    penalty = total(total(o.u(t).abs() for t in range(len(o))) / len(o) for o in completions(prompts))
    return z_score(prompts, max_tokens) - 0.3 * penalty / max(1, sum(map(len, prompts)))


P = pg.parts
SIGNALS: dict[str, Variant] = {
    "leave-one-out score": (
        replace(PLAIN, advantage=(pg.LeaveOneOut(), pg.GroupStd(leave_one_out=True))),
        sequence_mean(leave_one_out_score),
    ),
    "lead over the second": (
        replace(PLAIN, advantage=(P.MarginalMax(),)),
        sequence_mean(lambda o, outputs: [lead(o, outputs)] * len(o)),
    ),
    "lead over the second, per std": (
        replace(PLAIN, advantage=(P.MarginalMax(), pg.GroupStd(eps=1e-6))),
        sequence_mean(lead_over_std),
    ),
    "clipped advantages": (
        replace(PLAIN, advantage=(*PLAIN.advantage, P.ClipAdvantage(-0.4, 0.8))),
        sequence_mean(lambda o, outputs: [min(max(z(o, outputs), -0.4), 0.8)] * len(o)),
    ),
    "a teacher beside the reward": (
        replace(PLAIN, advantage=(*PLAIN.advantage, P.TeacherBonus(0.3, clip=0.2))),
        sequence_mean(beside_teacher),
    ),
    "a teacher beside the reward, to go": (
        replace(PLAIN, advantage=(pg.GroupMean(), P.TeacherBonus(0.5, 0.9))),
        sequence_mean(later_beside_teacher),
    ),
    "clipped rewards": (
        replace(PLAIN, shaping=(P.ClipReward(-0.5, 0.6),)),
        by_reward(lambda o, outputs: min(max(o.reward, -0.5), 0.6)),
    ),
    "rewards on a running scale": (
        replace(PLAIN, advantage=(), shaping=(FrozenRunningScale(count=3, mean=1.0, square=2.0),)),
        running_scale,
    ),
    "length within the group": (replace(PLAIN, shaping=(P.GroupLength(0.7),)), by_reward(with_length)),
    "a range of mean rewards": (
        replace(PLAIN, filters=(P.RewardRange("drop", low=-0.3, high=0.6),)),
        where(lambda rewards: -0.3 < mean_of(rewards) < 0.6),
    ),
    "a tolerance of rewards": (
        replace(PLAIN, filters=(pg.DropZeroVariance("drop", tolerance=1.7),)),
        where(lambda rewards: max(rewards) - min(rewards) > 1.7),
    ),
    "the sum over tokens": (replace(PLAIN, aggregation=P.TokenSum()), token_sum),
    "KL abs": (replace(PLAIN, terms=(pg.KLToReference(0.3, "abs"),)), total_variation),
}

# Self-distillation as the authors' code trains it.


def likeliest_and_tail(o: Completion, t: int) -> tuple[list[Tensor], list[float]]:
    """log-probabilities of π_θ's two likeliest tokens and of all others as one, under π_θ and under π_ref."""
    own, other = o.policy[t], o.reference[t]
    top = sorted(range(len(other)), key=lambda a: float(own[a].detach()), reverse=True)[:2]
    left = torch.log(1 - torch.exp(own[top[0]]) - torch.exp(own[top[1]]))
    return [own[top[0]], own[top[1]], left], [
        other[top[0]],
        other[top[1]],
        math.log(1 - math.exp(other[top[0]]) - math.exp(other[top[1]])),
    ]


def half_jensen_shannon(own: list[Tensor], other: list[float]) -> Tensor:
    """½ KL(q‖m) + ½ KL(p‖m), m = (p + q)/2."""
    J = total([])
    for log_p, log_q in zip(own, other, strict=True):
        p, q = torch.exp(log_p), math.exp(log_q)
        log_m = torch.log((p + q) / 2)
        J = J + (q * (log_q - log_m) + p * (log_p - log_m)) / 2
    return J


def sdpo_of_the_likeliest(prompts: Prompts, max_tokens: int) -> Tensor:
    """−1/Σ|o| Σ sg[min(π_θ/π_old, 2)]·D, D of the likeliest tokens and the others as one. lasgroup/SDPO,
    verl/trainer/ppo/core_algos.py (`compute_self_distillation_loss`): full_logit_distillation, alpha 0.5, is_clip 2."""
    J, read = total([]), read_by_reference(prompts)
    for o in completions(read):
        for t in range(len(o)):
            J = J - min(2.0, math.exp(float(o.logp[t].detach()) - o.old[t])) * half_jensen_shannon(
                *likeliest_and_tail(o, t)
            )
    return J / count_tokens(read)


def sdpo_with_rich_feedback(prompts: Prompts, max_tokens: int) -> Tensor:
    """−1/Σ|o| Σ sg[min(π_θ/π_old, 2)]·min(π_old/μ, 2)·KL(π_θ‖π_ref), of the likeliest tokens and the others as one. The same code
    with alpha 1, and rollout_is: token with its threshold 2."""
    J, read = total([]), read_by_reference(prompts)
    for o in completions(read):
        for t in range(len(o)):
            ratio = min(2.0, math.exp(float(o.logp[t].detach()) - o.old[t]))
            ratio *= min(2.0, math.exp(o.old[t] - o.sampler[t]))
            pairs = zip(*likeliest_and_tail(o, t), strict=True)
            J = J - ratio * total(torch.exp(log_p) * (log_p - log_q) for log_p, log_q in pairs)
    return J / count_tokens(read)


def sdft_as_released(prompts: Prompts, max_tokens: int) -> Tensor:
    """−1/B Σ_i v_i/|o_i| Σ_t KL(π_ref‖π_θ), v_i the mean over the completion's tokens of min(π_old/μ, 2). The authors'
    distil_trainer.py (`_compute_loss`), without its tokens to skip."""
    J, read = total([]), read_by_reference(prompts)
    for o in completions(read):
        v = mean_of([min(2.0, math.exp(u)) for u in old_gap(o)])
        for t in range(len(o)):
            kl = total(
                math.exp(log_q) * (log_q - log_p) for log_p, log_q in zip(o.policy[t], o.reference[t], strict=True)
            )
            J = J - v * kl / len(o)
    return J / count(read)


MAIN_FORM = replace(pg.SDPO, terms=(pg.ExactKLToReference(alpha=0.5, top_k=2, cap=2.0),))
RECIPES: dict[str, Variant] = {
    "sdpo, its main form": (MAIN_FORM, sdpo_of_the_likeliest),
    "sdpo, with rich feedback": (
        replace(
            pg.SDPO,
            terms=(pg.ExactKLToReference(top_k=2, cap=2.0),),
            old_policy="learner",
            corrections=(pg.TruncatedIS(2.0),),
        ),
        sdpo_with_rich_feedback,
    ),
    "sdft, as released": (
        replace(pg.SDFT, terms=(pg.ExactKLToReference(alpha=0.0),), corrections=(pg.TruncatedIS(2.0, "mean"),)),
        sdft_as_released,
    ),
}
