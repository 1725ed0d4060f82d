"""Literal objectives of parts and settings that no named algorithm uses, each with the algorithm it is compared with; and what a
random batch must hold for each entry of the table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import policygrad as pg
from doubles.part_variants import CORRECTIONS, RECIPES, SIGNALS
from policygrad.core.advantages import FrozenRunningMean
from policygrad.papers.completions import (
    Completion,
    Prompts,
    average,
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
    to_go,
    tokens,
    total,
    unit_log_pi,
    without_constant_groups,
)
from policygrad.papers.critics import n_step, over_q, rewards, trpo_vine
from policygrad.papers.grpo import cispo, dr_grpo, magistral, mean_over_completions, passk
from policygrad.papers.objectives import PAPER_OBJECTIVES, Objective
from policygrad.papers.reinforce import clipped_token_mean, otb, reinforce, rloo, spiral
from policygrad.papers.signals import (
    chord,
    distill,
    grpo_process,
    jensen_shannon,
    prime,
    read_by_reference,
    sdpo,
    turn_rewards,
    turns,
)
from policygrad.papers.trust_regions import clip_cov, dppo, high_entropy, kl_cov, m2po

Variant = tuple[pg.Algorithm, Objective]

# Which completions take part: the papers' filters, on all completions of a rollout.


def without_truncated(prompts: Prompts) -> Prompts:
    kept = [[o for o in outputs if not o.truncated] for outputs in prompts]
    return [outputs for outputs in kept if outputs]


def dapo_filter(prompts: Prompts) -> Prompts:
    return without_truncated(without_constant_groups(prompts))


PAPER_FILTERS = dict.fromkeys(("dapo", "prorl", "high_entropy"), dapo_filter) | dict.fromkeys(
    (
        "fipo",
        "ce_gppo",
        "aspo",
        "magistral",
        "cispo",
        "clip_cov",
        "kl_cov",
        "scale_rl",
        "prime",
        "prime_rl",
        "skywork_or1",
    ),
    without_constant_groups,
)


def filtered(take_part: Callable[[Prompts], Prompts], objective: Objective) -> Objective:
    return lambda prompts, max_tokens: objective(take_part(prompts), max_tokens)


def among_peers(prompts: Prompts) -> Prompts:
    """Split each prompt's completions into those that can be compared."""
    return [[o for o in outputs if o.peers == n] for outputs in prompts for n in sorted({o.peers for o in outputs})]


def running_mean_of_all(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/(B·L) Σ min(r Â, clip(r) Â), Â = R − b, then b ← 0.5 b + 0.5 R, from 0.25 and in the order of the batch."""
    b, J = 0.25, total([])
    for o in sorted(completions(prompts), key=lambda o: o.row):
        J = J + total(clipped_surrogate(o, t, o.reward - b) for t in range(len(o)))
        b = 0.5 * b + 0.5 * o.reward
    return J / (count(prompts) * max_tokens)


def running_mean_of_roles(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/B Σ_i (R_i − b_role) log π(o_i), b 0.25 for proposers and 0 for solvers."""
    J = total([])
    for o in completions(prompts):
        A = o.reward - (0.25 if o.role == "proposer" else 0.0)
        J = J + total(A * unit_log_pi(o, t) for t in range(len(o)))
    return J / count(prompts)


ROWS: dict[str, Variant] = {
    name: (pg.ALGORITHMS[name], filtered(PAPER_FILTERS.get(name, list), objective))
    for name, objective in PAPER_OBJECTIVES.items()
} | {  # stated for what is kept, which chance has a part in: core/test_downsampling.py
    name: (replace(pg.ALGORITHMS[name], filters=()), PAPER_OBJECTIVES[name]) for name in ("gfpo", "pf_ppo")
}

# Ratios, gates, terms, aggregations, filters and baselines.


def dual_clip(prompts: Prompts, max_tokens: int) -> Tensor:
    def token(o: Completion, t: int, A: float) -> Tensor:
        surrogate = clipped_surrogate(o, t, A)
        return surrogate if A >= 0 else surrogate.clamp(min=3 * A)

    return mean_over_completions(prompts, token)


def sequence_product(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/B Σ_i (π_θ(o_i)/π_old(o_i)) Â_i."""
    ratios = [
        torch.exp(total(o.logp[t] - o.old[t] for t in range(len(o)))) * group_z_score(o, outputs)
        for outputs in prompts
        for o in outputs
    ]
    return total(ratios) / count(prompts)


def gspo_token(prompts: Prompts, max_tokens: int) -> Tensor:
    """GSPO eq. 13 with s_{i,t} of eq. 14 and Â_{i,t} = the z-score plus the token rewards to come."""
    J = total([])
    for outputs in prompts:
        group = [o.reward + math.fsum(o.token_reward) for o in outputs]
        for o in outputs if len(outputs) > 1 else []:
            s = torch.exp(total(o.logp[t] - o.old[t] for t in range(len(o))) / len(o)).detach()
            later, inner = to_go(o.token_reward), total([])
            for t in range(len(o)):
                A = (o.reward + later[t] - average(group)) / (standard_deviation(group) + 1e-4)
                s_t = s * torch.exp(o.logp[t] - o.logp[t].detach())
                inner = inner + torch.minimum(s_t * A, clip(s_t, 1 - 3e-4, 1 + 4e-4) * A)
            J = J + inner / len(o)
    return J / count(prompts)


def kl_in_loss(form: str) -> Objective:
    """The clipped objective's sequence mean, minus β times the estimator's token mean."""

    def estimator(o: Completion, t: int) -> Tensor:
        u, r = o.u(t), o.r(t)
        k3 = torch.exp(-u) + u - 1
        return {"k2": u**2 / 2, "k3": k3, "r*k1": r * u, "r*k3": r * k3}[form]

    def objective(prompts: Prompts, max_tokens: int) -> Tensor:
        kl = total(0.3 * estimator(o, t) for o, t in tokens(prompts)) / count_tokens(prompts)
        return mean_over_completions(prompts) - kl

    return objective


def entropy(prompts: Prompts, max_tokens: int) -> Tensor:
    """−η sg[r log π] log π: its gradient is the score-function gradient of the states' entropy."""

    def token(o: Completion, t: int, A: float) -> Tensor:
        return clipped_surrogate(o, t, A) - 0.02 * (o.r(t) * o.logp[t]).detach() * unit_log_pi(o, t)

    return mean_over_completions(prompts, token)


def optimal_length(prompts: Prompts, max_tokens: int) -> Tensor:
    """1/B Σ_i (R_i − b_i) log π(o_i), b_i = Σ_{j≠i} |o_j| R_j / Σ_{j≠i} |o_j|."""
    J = total([])
    for outputs in prompts:
        for o in outputs:
            others = [p for p in outputs if p is not o]
            if others:
                b = sum(len(p) * p.reward for p in others) / sum(len(p) for p in others)
                J = J + total((o.reward - b) * unit_log_pi(o, t) for t in range(len(o)))
    return J / count(prompts)


def echo_over_tokens(prompts: Prompts, max_tokens: int) -> Tensor:
    """Beside the term of successes, which has the sampled tokens of its own denominator."""
    observed = [x for o in completions(prompts) for x in o.observed]
    right = [[o for o in outputs if o.reward >= 1] for outputs in prompts]
    successes = 0.1 * total(o.logp[t] for o, t in tokens(right)) / count_tokens(right)
    return mean_over_completions(prompts) + successes + 0.7 * total(observed) / max(1, len(observed))


def rloo_to_go(prompts: Prompts, max_tokens: int) -> Tensor:
    """RLOO with the KL of a token's own future in its reward, against the siblings' full ones."""
    J = total([])
    for outputs in prompts:
        later = {
            id(o): [o.reward - 0.7 * x for x in to_go([a - b for a, b in zip(o.old, o.ref, strict=True)])]
            for o in outputs
        }
        for o in outputs:
            others = [later[id(p)][0] for p in outputs if p is not o]
            if others:
                J = J + total((later[id(o)][t] - average(others)) * unit_log_pi(o, t) for t in range(len(o)))
    return J / count(prompts)


def root_group(prompts: Prompts, max_tokens: int) -> Tensor:
    """Each group's Σ (R_i − b) log π(o_i) over √G, and the groups weighed by their share G/B: Σ_g (G/B)(1/√G) Σ_i."""
    J = total([])
    for outputs in prompts:
        G, B = len(outputs), count(prompts)
        J = J + total((G / B) / G**0.5 * (o.reward - 0.25) * unit_log_pi(o, t) for o in outputs for t in range(len(o)))
    return J


def reweighted(prompts: Prompts, max_tokens: int) -> Tensor:
    """The unfiltered step's denominators, times 1/(1 − f) with f the dropped fraction of completions."""
    kept = without_constant_groups(prompts)
    if not kept:
        return total([])
    f = 1 - count(kept) / count(prompts)
    return mean_over_completions(kept) * count(kept) / count(prompts) / (1 - f)


def overlong_mask_with_statistics(prompts: Prompts, max_tokens: int) -> Tensor:
    """The truncated ones' rewards stay in the group's mean and std; their tokens are gone."""
    J = total([])
    for outputs in prompts:
        for o in outputs:
            if not o.truncated:
                J = J + total(clipped_surrogate(o, t, group_z_score(o, outputs)) for t in range(len(o))) / len(o)
    return J / count(without_truncated(prompts))


def soft_overlong(prompts: Prompts, max_tokens: int) -> Tensor:
    return mean_over_completions(
        [[replace(o, reward=penalized(o, max_tokens)) for o in outputs] for outputs in prompts]
    )


def batch_mean(prompts: Prompts, max_tokens: int) -> Tensor:
    return reinforce(prompts, max_tokens, baseline=average([o.reward for o in completions(prompts)]))


def best_of_group(prompts: Prompts, max_tokens: int) -> Tensor:
    """RAFT: 1/Σ|o| Σ log π of each prompt's best."""
    best = [[o for o in outputs if all(o.reward >= p.reward for p in outputs)] for outputs in prompts]
    return total(log_pi(o, t) for o, t in tokens(best)) / count_tokens(prompts)


def truncated_is(prompts: Prompts, max_tokens: int) -> Tensor:
    """PPO's importance surrogate with TIS: min(π_old/μ, 2)·r·Â, Â the Monte-Carlo return less the value."""
    J = total([])
    for o in completions(prompts):
        A = n_step(o, rewards(o), 1.0, len(o))
        J = J + total(min(math.exp(o.old[t] - o.sampler[t]), 2.0) * o.r(t) * A[t] for t in range(len(o)))
    return J / count_tokens(prompts)


def vine_without_baseline(prompts: Prompts, max_tokens: int) -> Tensor:
    """TRPO's vine as it is printed, for Ψ that is the reward."""
    J = total([])
    for outputs in prompts:
        actions = [(o, t) for o in outputs for t in range(len(o))]
        share = sum(o.weight[t] for o, t in actions) / len(actions)
        quotient = total(over_q(o, t) * o.reward for o, t in actions) / total(over_q(o, t) for o, t in actions)
        J = J + share * quotient / len(prompts)
    return J


GRPO = replace(pg.GRPO, terms=())
KL = {f: pg.KLToReference(0.3, f, aggregation=pg.TokenMean()) for f in ("k2", "k3", "r*k1", "r*k3")}  # type: ignore[arg-type]


def capped_sequence_kl(prompts: Prompts, max_tokens: int) -> Tensor:
    """−1/Σ|o| Σ of r·u, continued by 1.3·(u + 1)²/2 where r is above 1.3; its derivative is min(r, 1.3)(u + 1)."""
    J, read = total([]), read_by_reference(prompts)
    for o, t in tokens(read):
        u, r = o.u(t), o.r(t)
        if float(r.detach()) <= 1.3:
            J = J - r * u
        else:
            at_cap = o.old[t] + math.log(1.3) - o.ref[t]
            J = J - 1.3 * (at_cap + ((u + 1) ** 2 - (at_cap + 1) ** 2) / 2)
    return J / count_tokens(read)


def divergence_mean(prompts: Prompts, beta: float, alpha: float) -> Tensor:
    read = read_by_reference(prompts)
    return -beta * total(jensen_shannon(o, t, alpha) for o, t in tokens(read)) / count_tokens(read)


def grpo_with_some_taught(prompts: Prompts, max_tokens: int) -> Tensor:
    """GRPO over all completions, minus the sequence mean of 0.3·r·k3 over those that the teacher has read."""
    read = read_by_reference(prompts)
    kl = total(total(o.r(t) * k3(o, t) for t in range(len(o))) / len(o) for o in completions(read)) / count(read)
    return mean_over_completions(prompts) - 0.3 * kl


def taught_log_ratio(prompts: Prompts) -> Tensor:
    """1/Σ|o| Σ r (log π_teacher − log π_old), 0 where the teacher has read nothing; the denominator counts all."""
    read = read_by_reference(prompts)
    return total(o.r(t) * (o.ref[t] - o.old[t]) for o, t in tokens(read)) / count_tokens(prompts)


PARTS: dict[str, Variant] = {
    "importance": (
        replace(GRPO, gate=pg.Importance()),
        lambda p, w: mean_over_completions(p, lambda o, t, A: o.r(t) * A),
    ),
    "dual clip": (replace(GRPO, gate=pg.Clip(0.2, 0.2, 3.0)), dual_clip),
    "weight cap, low": (
        replace(pg.CISPO, gate=pg.ClippedImportance(0.9, 1.1)),
        filtered(without_constant_groups, lambda p, w: cispo(p, w, 0.9, 1.1)),
    ),
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
        filtered(without_constant_groups, magistral),
    ),
    "group power": (
        replace(
            pg.REINFORCE, advantage=(FrozenRunningMean(baseline=0.25),), aggregation=pg.SequenceSum(group_power=0.5)
        ),
        root_group,
    ),
    "reweight": (replace(GRPO, filters=(pg.DropZeroVariance("reweight"),)), reweighted),
    "overlong mask": (
        replace(GRPO, filters=(pg.MaskTruncated(),)),
        filtered(without_truncated, lambda p, w: mean_over_completions(p)),
    ),
    "overlong mask, statistics": (
        replace(GRPO, filters=(pg.MaskTruncated(keep_in_statistics=True),)),
        overlong_mask_with_statistics,
    ),
    "soft overlong": (replace(GRPO, shaping=(pg.SoftOverlong(),)), soft_overlong),
    "weight": (GRPO, lambda p, w: mean_over_completions(p, lambda o, t, A: o.weight[t] * clipped_surrogate(o, t, A))),
    "running mean": (
        replace(pg.REINFORCE, advantage=(FrozenRunningMean(baseline=0.4),)),
        lambda p, w: reinforce(p, w, 0.4),
    ),
    **{
        f"SPIRAL, {len(means)} known means": (
            replace(
                pg.SPIRAL, advantage=(FrozenRunningMean(0.7, "role", "sample", means=tuple(sorted(means.items()))),)
            ),
            lambda p, w, means=means: spiral(p, w, means, 0.7),
        )
        for means in ({}, {"solver": -0.5}, {"proposer": 0.3, "solver": 0.8})
    },
    "one running mean, completion by completion": (
        replace(pg.SPIRAL, advantage=(FrozenRunningMean(0.5, "all", "sample", 0.25),)),
        running_mean_of_all,
    ),
    "a running mean per role, rollout by rollout": (
        replace(pg.REINFORCE, advantage=(FrozenRunningMean(0.5, "role", means=(("proposer", 0.25),)),)),
        running_mean_of_roles,
    ),
    "dr_grpo among peers": (
        replace(pg.DR_GRPO, advantage=(pg.GroupMean(within="peers"),)),
        lambda p, w: dr_grpo(among_peers(p), w),
    ),
    "grpo among peers": (
        replace(GRPO, advantage=(pg.GroupMean(within="peers"), pg.GroupStd(within="peers"))),
        lambda p, w: mean_over_completions(among_peers(p)),
    ),
    "rloo among peers": (
        replace(pg.RLOO, advantage=(pg.LeaveOneOut(within="peers"),)),
        lambda p, w: rloo(among_peers(p), w),
    ),
    "batch mean": (replace(pg.REINFORCE, advantage=(pg.BatchMean(),)), batch_mean),
    "optimal baseline, length": (replace(pg.REINFORCE, advantage=(pg.OptimalBaseline("length"),)), optimal_length),
    "echo, over all tokens": (
        replace(pg.ECHO, terms=(pg.ObservationNLL(0.7, pg.TokenMean()), pg.PositiveNLL(0.1))),
        echo_over_tokens,
    ),
    "otb, leaving one out": (
        replace(pg.OTB, advantage=(pg.OptimalBaseline("logits"),)),
        lambda p, w: otb(p, w, leave_one_out=True),
    ),
    "token rewards": (pg.REINFORCE, reinforce),
    "KL in reward, large": (
        replace(pg.RLOO, shaping=(pg.KLInReward(0.7, level="sequence"),)),
        lambda p, w: rloo(p, w, 0.7),
    ),
    "KL in reward, to go": (replace(pg.RLOO, shaping=(pg.KLInReward(0.7),)), rloo_to_go),
    "truncated IS": (
        replace(pg.PPO_PENALTY, advantage=(pg.NStep(0),), terms=(), corrections=(pg.TruncatedIS(2.0),)),
        truncated_is,
    ),
    "the best of the group": (replace(pg.RAFT, advantage=(pg.RejectionSampling("best"),)), best_of_group),
    "pass@3": (replace(pg.PASSK, advantage=(pg.PassAtK(3),)), lambda p, w: passk(p, w, 3)),
    "pass@2, unscaled": (
        replace(pg.PASSK, advantage=(pg.PassAtK(2, normalise=False),)),
        lambda p, w: passk(p, w, 2, normalise=False),
    ),
    "process rewards alone": (
        replace(pg.GRPO_PROCESS, advantage=(pg.ProcessReward(outcome=False),)),
        lambda p, w: grpo_process(p, w, outcome=False),
    ),
    "CHORD-μ, at first": (
        replace(pg.CHORD, terms=(pg.DemonstrationNLL(0.9, token_weighting=False, final_mu=0.05),)),
        lambda p, w: chord(p, w, 0.9, phi=False),
    ),
    "distill, discounted": (
        replace(pg.DISTILL, advantage=(pg.TeacherLogRatio(0.7, 0.9),)),
        lambda p, w: distill(p, w, 0.9, 0.7),
    ),
    "distill, whole completions": (
        replace(pg.DISTILL, advantage=(pg.TeacherLogRatio(discount=1.0),)),
        lambda p, w: distill(p, w, 1.0),
    ),
    "sdpo, a cap that most reach": (
        replace(pg.SDPO, terms=(pg.KLToReference(1.0, "r*k3", cap=1.0),)),
        lambda p, w: sdpo(p, w, 1.0),
    ),
    "r(u + 1) with a cap": (
        replace(pg.SDPO, terms=(pg.KLToReference(1.0, "r*k1", cap=1.3),)),
        capped_sequence_kl,
    ),
    "forward KL over the vocabulary": (
        replace(pg.OPSD, terms=(pg.ExactKLToReference(0.7, 0.0),)),
        lambda p, w: divergence_mean(p, 0.7, 0.0),
    ),
    "a divergence nearer to the teacher": (
        replace(pg.OPSD, terms=(pg.ExactKLToReference(0.7, 0.8),)),
        lambda p, w: divergence_mean(p, 0.7, 0.8),
    ),
    "grpo beside a teacher of some": (
        replace(pg.GRPO, terms=(pg.KLToReference(0.3, "r*k3"),)),
        grpo_with_some_taught,
    ),
    "sampled log-ratio of some": (
        replace(pg.DISTILL, reference=pg.SDPO.reference),
        lambda p, w: taught_log_ratio(p),
    ),
    "prime, discounted": (
        replace(pg.PRIME, advantage=(pg.LeaveOneOut(), pg.ImplicitProcess(0.6))),
        filtered(without_constant_groups, lambda p, w: prime(p, w, 0.6)),
    ),
    "vine, weighted": (pg.TRPO_VINE, trpo_vine),
    "vine, first order": (replace(pg.TRPO_VINE, update_rule=pg.GradientSteps(epochs=2)), trpo_vine),
}

# Trust regions, with fractions and bands that select something among a batch's dozen tokens.


def binary_kl(q: float, p: float) -> float:
    """NaN, and so above no bound, where a random batch's log π_old is no logarithm of a probability."""
    return math.nan if q > 1 else q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))


PLAIN = replace(pg.KL_COV, terms=(), filters=(), update_rule=pg.GradientSteps())  # r Â, the token mean
TRUST_REGIONS: dict[str, Variant] = {
    "binary KL": (replace(pg.DPPO, gate=pg.DivergenceClip("kl", 0.05)), lambda p, w: dppo(p, w, binary_kl, 0.05)),
    "total variation, a low cap": (
        replace(pg.DPPO, gate=pg.DivergenceClip("tv", 0.9, c=1.1)),
        lambda p, w: dppo(p, w, bound=0.9, c=1.1),
    ),
    "second moment, half of them": (replace(PLAIN, gate=pg.SecondMomentFilter(0.5)), lambda p, w: m2po(p, w, 0.5)),
    "covariance, a wide band": (
        replace(PLAIN, gate=pg.ClipCov(0.2, 0.2, fraction=0.3, cov_low=-0.2, cov_high=2.0)),
        lambda p, w: clip_cov(p, w, 0.2, 0.3, (-0.2, 2.0)),
    ),
    **{
        f"covariance, held by {form}": (
            replace(PLAIN, terms=(pg.KLCov(1.0, 0.4, form),)),
            lambda p, w, form=form: kl_cov(p, w, 0.4, form),
        )
        for form in ("abs", "k3")
    },
    "high entropy, half of them": (
        replace(pg.HIGH_ENTROPY, corrections=(pg.HighEntropy(0.5),)),
        filtered(dapo_filter, lambda p, w: high_entropy(p, w, 0.5)),
    ),
    "high entropy, of π_old": (
        replace(pg.HIGH_ENTROPY, corrections=(pg.HighEntropy(0.5, "old"),)),
        filtered(dapo_filter, lambda p, w: high_entropy(p, w, 0.5)),
    ),
}

# Credit along turns.


def turn_gae(o: Completion, gamma: float, lam: float) -> list[float]:
    """Turn-PPO: A_h = Σ_k (γλ)^k δ_{h+k}, δ_h = r_h + γ v_{h+1} − v_h, v_h before the turn's first token."""
    r, v = turn_rewards(o), [o.value[turn[0]] for turn in turns(o)]
    delta = [r[h] + (gamma * v[h + 1] if h + 1 < len(v) else 0) - v[h] for h in range(len(v))]
    return [sum((gamma * lam) ** (k - h) * delta[k] for k in range(h, len(v))) for h in range(len(v))]


def multi_turn_gae(o: Completion, gamma: float, lam: float, turn_gamma: float) -> list[float]:
    """MT-PPO eq. 8: A_t = Σ_l (Π λγ) δ_{t+l}, δ_t = r_t + γ_t V_{t+1} − V_t, γ_t = γ·γ_turn at a turn's last token."""
    r, last = rewards(o), {turn[-1] for turn in turns(o)}
    rate = [gamma * turn_gamma if t in last else gamma for t in range(len(o))]
    delta = [r[t] + (rate[t] * o.value[t + 1] if t + 1 < len(o) else 0) - o.value[t] for t in range(len(o))]
    result = []
    for t in range(len(o)):
        advantage, weight = 0.0, 1.0
        for k in range(t, len(o)):
            advantage, weight = advantage + weight * delta[k], weight * lam * rate[k]
        result.append(advantage)
    return result


def bi_level_gae(o: Completion, gamma: float, lam: float, turn_gamma: float, turn_lam: float) -> list[float]:
    """VAGEN's two passes: turns by their last tokens, then each turn's tokens back from there."""
    r, A, ahead, after = rewards(o), dict[int, float](), 0.0, 0.0
    for turn in reversed(turns(o)):
        e = turn[-1]
        ahead = r[e] + turn_gamma * after - o.value[e] + turn_gamma * turn_lam * ahead
        A[e], after = ahead, o.value[e]
    for turn in turns(o):
        for t in reversed(turn[:-1]):
            A[t] = r[t] + gamma * o.value[t + 1] - o.value[t] + gamma * lam * A[t + 1]
    return [A[t] for t in range(len(o))]


def at_tokens(o: Completion, by_turn: list[float]) -> list[float]:
    """Each turn's number at each of its tokens."""
    return [A for turn, A in zip(turns(o), by_turn, strict=True) for _ in turn]


def of_turns(credit: Callable[[Completion], list[float]]) -> Objective:
    return of_tokens(lambda o: at_tokens(o, credit(o)))


def of_tokens(credit: Callable[[Completion], list[float]]) -> Objective:
    return lambda prompts, max_tokens: clipped_token_mean(prompts, {id(o): credit(o) for o in completions(prompts)})


def sibling_turns(prompts: Prompts, max_tokens: int) -> Tensor:
    """γ^n (R_n − mean over the siblings that have a turn n), γ = 0.9."""
    A: dict[int, list[float]] = {}
    for outputs in prompts:
        R = {id(o): to_go(turn_rewards(o), 0.9) for o in outputs}
        for o in outputs:
            own = []
            for n, x in enumerate(R[id(o)]):
                others = [R[id(p)][n] for p in outputs if p is not o and len(R[id(p)]) > n]
                own.append(0.9**n * (x - average(others)))
            A[id(o)] = at_tokens(o, own)
    return clipped_token_mean(prompts, A)


BASE = replace(pg.GIGPO, terms=())
TURNS: dict[str, Variant] = {
    "rewards to go per turn": (
        replace(BASE, advantage=(pg.TurnReturn(0.9),)),
        of_turns(lambda o: to_go(turn_rewards(o), 0.9)),
    ),
    "siblings' turns": (
        replace(BASE, advantage=(pg.TurnReturn(0.9), pg.TurnLeaveOneOut(), pg.TurnDiscount(0.9))),
        sibling_turns,
    ),
    "Turn-PPO's GAE": (
        replace(BASE, advantage=(pg.TurnGAE(0.99, 0.9),), critic=pg.Critic(turn_gamma=0.99)),
        of_turns(lambda o: turn_gae(o, 0.99, 0.9)),
    ),
    "MT-PPO's GAE": (
        replace(BASE, advantage=(pg.MultiTurnGAE(0.98, 0.9),), critic=pg.Critic(gamma=0.98)),
        of_tokens(lambda o: multi_turn_gae(o, 0.98, 0.9, 1.0)),
    ),
    "GAE with a discount per turn": (
        replace(BASE, advantage=(pg.MultiTurnGAE(1.0, 0.9, 0.8),), critic=pg.Critic(turn_gamma=0.8)),
        of_tokens(lambda o: multi_turn_gae(o, 1.0, 0.9, 0.8)),
    ),
    "VAGEN's bi-level GAE": (
        replace(BASE, advantage=(pg.BiLevelGAE(0.98, 0.7, 0.9, 0.6),), critic=pg.Critic(gamma=0.98, turn_gamma=0.9)),
        of_tokens(lambda o: bi_level_gae(o, 0.98, 0.7, 0.9, 0.6)),
    ),
}

TABLE = ROWS | PARTS | TRUST_REGIONS | TURNS | CORRECTIONS | SIGNALS | RECIPES

FILLED_BY = {
    "weight": ("weight",),
    "token_reward": ("gspo_token, token rewards", "token rewards"),
    "steps": ("grpo_process", "vineppo", "process rewards alone"),
    "successes": ("maxrl",),
    "entropy": ("skywork_or1", "high_entropy", "high entropy, half of them", "high entropy, of π_old"),
    "rewards": ("gdpo",),
    "observations": ("echo", "echo, over all tokens"),
    "sum_pi_squared": ("otb", "otb, leaving one out"),
    "turns": ("gigpo", *TURNS),
    "demonstrations": ("luffy", "chord", "CHORD-μ, at first"),
    "roles": (
        "spiral",
        *(name for name in TABLE if name.startswith("SPIRAL") or name.endswith("among peers")),
        "a running mean per role, rollout by rollout",
    ),
    "references": (
        *(
            "sdpo",
            "sdft",
            "opsd",
            "sdpo, a cap that most reach",
            "r(u + 1) with a cap",
            "forward KL over the vocabulary",
        ),
        *("a divergence nearer to the teacher", "grpo beside a teacher of some", "sampled log-ratio of some"),
        *RECIPES,
    ),
    "weights": ("vine, weighted", "vine, first order"),
}
EXTRA_FIELDS = {name: extra for extra, names in FILLED_BY.items() for name in names}
"""What `random_batches.make` fills for an entry of the table."""
