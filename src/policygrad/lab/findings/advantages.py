"""Lever 1: what baselines do to the mean and the variance of the gradient. All exact."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor

from policygrad.algorithms import REINFORCE
from policygrad.core.advantages import GroupMean, GroupStd, LeaveOneOut, OptimalBaseline, RunningMean
from policygrad.core.aggregation import FixedLength, SequenceMean, SequenceSum, TokenMean
from policygrad.core.algorithm import Algorithm
from policygrad.core.auxiliary import Critic
from policygrad.core.base import Advantage, Aggregation
from policygrad.core.gae import NStep
from policygrad.core.gates import Importance
from policygrad.core.ratios import SequenceProduct
from policygrad.core.shaping import KLInReward
from policygrad.core.terms import KLForm, KLToReference
from policygrad.lab.estimators import enumerate_steps, estimate_gradients
from policygrad.lab.measurement import Figures, Finding, choose_text, format_percent, measure_algorithm
from policygrad.lab.policies import sample_normal
from policygrad.lab.sequences import derivative, perturb_policy
from policygrad.lab.setting import LabSetting
from policygrad.lab.worlds import directional_growth, one_prompt, two_answers

MONTE_CARLO = Algorithm("monte_carlo", advantage=(NStep(0),), critic=Critic())
"""Ψ_t = R − V_t, the sequence sum: a baseline for each state, given as `Setting.values`."""
EXACT = 1e-10


def with_advantage(*psi: Advantage) -> Algorithm:
    """REINFORCE with this chain, and the unbiased sequence sum."""
    return replace(REINFORCE, advantage=psi)


def exact_figures(algorithm: Algorithm, setting: LabSetting, size: int) -> Figures:
    """Exact figures with groups of G."""
    return measure_algorithm(algorithm, setting, enumerate_steps(setting, size)).figures


def leave_one_out(seed: int = 0) -> Finding:
    """E g = ∇J for every G. Source: Ahmadian et al. 2024 (RLOO)."""
    setting, sizes = one_prompt(seed=seed), (2, 3, 4)
    bias = [exact_figures(with_advantage(LeaveOneOut()), setting, size).bias for size in sizes]
    holds = max(bias) < EXACT
    return Finding(
        "leave_one_out",
        "The leave-one-out baseline is unbiased.",
        holds,
        f"Over all groups of 2, 3 and 4 the expected gradient {choose_text(holds, 'is the true one', 'is not the true one')}: "
        f"the largest relative difference is {max(bias):.1e}.",
        {"bias": max(bias)},
    )


def group_mean(seed: int = 0) -> Finding:
    """E g = (G−1)/G·∇J."""
    setting, sizes = one_prompt(seed=seed), (2, 3, 4)
    found = [exact_figures(with_advantage(GroupMean()), setting, size) for size in sizes]
    shrunk = [(size - 1) / size for size in sizes]
    off = max(abs(f.scale - s) + abs(1 - f.cosine) for f, s in zip(found, shrunk, strict=True))
    holds = off < EXACT
    return Finding(
        "group_mean",
        "The group mean shrinks the gradient by (G−1)/G and leaves its direction.",
        holds,
        f"The expected gradient is {', '.join(f'{f.scale:.4f}' for f in found)} of the true one at G = 2, 3, 4: "
        f"{choose_text(holds, '(G−1)/G', 'not (G−1)/G')} to {off:.0e}.",
        {f"scale_{size}": f.scale for size, f in zip(sizes, found, strict=True)},
        curves={
            "group_size": tuple(map(float, sizes)),
            "scale": tuple(f.scale for f in found),
            "leave_one_out": tuple(exact_figures(with_advantage(LeaveOneOut()), setting, size).scale for size in sizes),
        },
    )


def z_score(seed: int = 0) -> Finding:
    """The weight that dividing by the group's std gives a prompt of difficulty p: E g = weight(p)·∇p."""
    grid = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)
    chain = with_advantage(GroupMean(), GroupStd())
    curves = {f"G{size}": tuple(exact_figures(chain, two_answers(p), size).scale for p in grid) for size in (4, 8, 32)}
    plain = tuple(exact_figures(with_advantage(GroupMean()), two_answers(p), 8).scale for p in grid)
    ratio = {size: curves[f"G{size}"][0] / curves[f"G{size}"][5] for size in (4, 8, 32)}
    even = max(abs(c[i] - c[-1 - i]) for c in curves.values() for i in range(len(grid))) < EXACT  # p and 1 − p alike
    holds = even and 1 < ratio[4] < ratio[8] < ratio[32]
    return Finding(
        "z_score",
        "Dividing by the group's standard deviation over-weights very easy and very hard prompts.",
        holds,
        f"A prompt solved 2 % (or 98 %) of the time weighs {ratio[4]:.2f}, {ratio[8]:.2f} and {ratio[32]:.2f} times one solved "
        f"50 % of the time, at G = 4, 8 and 32; {choose_text(holds, 'the more so the larger the group', 'not so in larger groups')}. "
        f"Under the group mean all weigh alike ({min(plain):.3f} to {max(plain):.3f} at G = 8).",
        {f"ratio_{size}": r for size, r in ratio.items()},
        curves={"p": grid, **curves, "group_mean_G8": plain},
    )


def optimal_baseline(seed: int = 0) -> Finding:
    """b* = E[R‖s‖²]/E‖s‖² against other constants, and its estimates from siblings. Source: Greensmith et al. 2004."""
    setting = one_prompt(seed=seed)
    world, theta = setting.world, setting.theta
    p, norm, reward = world.logp(theta).exp().flatten(), world.scores(theta).square().sum(1), world.reward.flatten()
    best = float((p * norm * reward).sum() / (p * norm).sum())
    length = world.tree.lengths
    constants = {
        "zero": 0.0,
        "mean": float(p @ reward),
        "length_proxy": float((p * length * reward).sum() / (p * length).sum()),
        "best": best,
    }
    grid = [best + offset for offset in (-0.5, -0.2, -0.05, 0.05, 0.2, 0.5)]
    variance = {name: _constant(setting, b) for name, b in constants.items()}
    holds = variance["best"] <= min([*variance.values(), *(_constant(setting, b) for b in grid)])
    size = 4
    links: dict[str, Advantage] = {
        "siblings": LeaveOneOut(),
        "siblings_norms": OptimalBaseline(),
        "siblings_lengths": OptimalBaseline("length"),
    }
    estimated = {name: exact_figures(with_advantage(link), setting, size).variance for name, link in links.items()}
    gain = 1 - estimated["siblings_norms"] / estimated["siblings"]
    return Finding(
        "optimal_baseline",
        "b* = E[R‖s‖²]/E‖s‖² has the least variance of all baselines that are constant over a completion.",
        holds,
        f"b* = {best:.3f} {choose_text(holds, 'has', 'has not')} the least variance: {variance['best']:.2f} of ‖∇J‖², against "
        f"{variance['mean']:.2f} with the mean reward and {variance['zero']:.2f} with none. Estimated from the other 3 of 4 "
        f"siblings it has {format_percent(abs(gain))} {choose_text(gain > 0, 'less', 'more')} variance than their plain mean "
        f"({estimated['siblings_norms']:.2f} against {estimated['siblings']:.2f}).",
        {"b_star": best, **variance, **estimated},
        curves={
            "b": tuple(sorted([*grid, best])),
            "variance": tuple(_constant(setting, b) for b in sorted([*grid, best])),
        },
    )


def _constant(setting: LabSetting, b: float) -> float:
    states = len(setting.world.tree.prefixes) * setting.world.prompts
    return _with_baseline(setting, torch.full((states,), b, dtype=torch.float64))


def _with_baseline(setting: LabSetting, values: Tensor) -> float:
    return exact_figures(MONTE_CARLO, replace(setting, values=values), 1).variance


def state_baseline(seed: int = 0) -> Finding:
    """b*(s) = E[‖s‖²G]/E‖s‖² = V + Cov(‖s‖², G)/E‖s‖², for a table of logits, whose scores at two states are orthogonal."""
    setting = one_prompt(seed=seed)
    world, theta = setting.world, setting.theta
    to_go = world.reward.flatten()[:, None].expand(world.mask.shape)
    square = world.cell_scores(theta).square().sum(1)[world.cell]
    value, norm = world.values(theta, to_go), world.values(theta, square)
    best = world.values(theta, square * to_go) / norm
    covariance = world.values(theta, square * to_go) - norm * value
    variance = {
        "none": _with_baseline(setting, torch.zeros_like(value)),
        "constant": _constant(setting, float(world.objective(theta))),
        "value": _with_baseline(setting, value),
        "best": _with_baseline(setting, best),
    }
    biased = estimate_gradients(
        MONTE_CARLO, replace(setting, values=best), enumerate_steps(setting, 1)
    ).mean - world.gradient(theta)
    same = float((best - value - covariance / norm).abs().max())
    around = [_with_baseline(setting, best + sample_normal(len(best), 0.05, k)) for k in range(4)]
    holds = variance["best"] <= min(*variance.values(), *around) and float(biased.abs().max()) < EXACT and same < EXACT
    return Finding(
        "state_baseline",
        "Of baselines b(s), V + Cov(‖s‖², Q)/E‖s‖² has the least variance, less than V.",
        holds,
        f"In units of ‖∇J‖² the variance is {variance['none']:.2f} without a baseline, {variance['constant']:.2f} with J, "
        f"{variance['value']:.3f} with V(s) and {variance['best']:.3f} with b*(s), "
        f"{format_percent(1 - variance['best'] / variance['value'])} below V's; all four are unbiased.",
        variance,
    )


# Larger groups, statistics over more completions than are trained on. All exact.


def group_size(seed: int = 0) -> Finding:
    """The standard deviation of the group's gradient over G, and `group_power` ½, which divides by √G."""
    setting, sizes = one_prompt(length=2, seed=seed), (2, 3, 4, 6, 8)
    deviation = [math.sqrt(exact_figures(with_advantage(LeaveOneOut()), setting, size).variance) for size in sizes]
    rooted = replace(with_advantage(LeaveOneOut()), aggregation=SequenceSum(group_power=0.5))
    found = [exact_figures(rooted, setting, size) for size in sizes]
    slope = math.log(deviation[-1] / deviation[0]) / math.log(sizes[-1] / sizes[0])
    late = math.log(deviation[-1] / deviation[-3]) / math.log(sizes[-1] / sizes[-3])
    growth = math.log(found[-1].scale / found[0].scale) / math.log(sizes[-1] / sizes[0])
    holds = slope <= -0.5 + 1e-9
    return Finding(
        "group_size",
        "The noise of a group's gradient falls with √G, or faster.",
        holds,
        f"Under leave-one-out its standard deviation falls as G^{slope:.2f} from G = 2 to 8, and as G^{late:.2f} from 4 on: "
        f"{choose_text(slope < -0.5, 'faster than G^-0.50, since the baseline improves too', 'as G^-0.50')}. Dividing by √G "
        f"instead of G lets the expected gradient grow as G^{growth:.2f} and its direction stay (cosine {found[-1].cosine:.3f}).",
        {"slope": slope, "slope_from_4": late, "growth_power_half": growth},
        curves={
            "group_size": tuple(map(float, sizes)),
            "deviation": tuple(deviation),
            "deviation_power_half": tuple(math.sqrt(f.variance) for f in found),
            "scale_power_half": tuple(f.scale for f in found),
        },
    )


def more_statistics(seed: int = 0) -> Finding:
    """G = 2 completions carry the gradient, N ≥ 2 the leave-one-out mean."""
    setting, size, more = one_prompt(length=2, seed=seed), 2, (0, 1, 2, 4)
    found = [
        measure_algorithm(with_advantage(LeaveOneOut()), setting, enumerate_steps(setting, size, silent)).figures
        for silent in more
    ]
    floor = exact_figures(with_advantage(RunningMean()), setting, size).variance
    whole = exact_figures(with_advantage(LeaveOneOut()), setting, size + more[-1]).variance
    falling = all(a.variance > b.variance for a, b in pairwise(found))
    holds = falling and max(f.bias for f in found) < EXACT
    saved = 1 - found[-1].variance / found[0].variance
    possible = 1 - floor / found[0].variance
    return Finding(
        "more_statistics",
        "Statistics over N ≥ G completions cut the variance of a gradient that uses G.",
        holds,
        f"With G = 2, a mean over N = 2, 3, 4 and 6 gives a variance of {', '.join(f'{f.variance:.2f}' for f in found)} of "
        f"‖∇J‖², unbiased throughout: {format_percent(saved)} less at N = 6, of {format_percent(possible)} that the exact J as baseline "
        f"would save. A gradient of all 6 has {whole:.2f}: {choose_text(whole < found[-1].variance, 'training on them', 'counting')} "
        f"is worth more than {choose_text(whole < found[-1].variance, 'counting', 'training on')} them.",
        {"saved": saved, "possible": possible, "variance_all": whole},
        curves={"N": tuple(float(size + m) for m in more), "variance": tuple(f.variance for f in found)},
    )


# How tokens are averaged, γ, and what either does to the length of answers. All exact.

GROUP = 4


def mean_length_gradient(setting: LabSetting, right: bool) -> Tensor:
    """[P] ∇E[|o|] among the right, or the wrong, completions."""
    where = setting.world.reward == (1.0 if right else 0.0)
    return derivative(lambda theta: setting.world.mean_length(theta, where), setting.theta)


def sequence_mean(seed: int = 0) -> Finding:
    """The weight of a token by the length and the rightness of its completion, relative to the unbiased sequence sum."""
    setting = one_prompt(p=0.5, seed=seed)
    steps = enumerate_steps(setting, GROUP)

    def weights(aggregate: Aggregation, key: str) -> tuple[float, ...]:
        rows = measure_algorithm(replace(with_advantage(LeaveOneOut()), aggregation=aggregate), setting, steps).length
        return tuple(row[key] for row in rows if key in row)

    kinds: dict[str, Aggregation] = {
        "sum": SequenceSum(),
        "sequence": SequenceMean(),
        "token": TokenMean(),
        "fixed": FixedLength(),
    }
    relative = {
        f"{name}_{key}": tuple(w / s for w, s in zip(weights(kind, key), weights(SequenceSum(), key), strict=True))
        for name, kind in kinds.items()
        for key in ("right", "wrong")
    }
    lengths = tuple(map(float, sorted(set(setting.world.tree.lengths.tolist()))))
    shift = _shift(setting, SequenceMean())
    right, wrong = relative["sequence_right"], relative["sequence_wrong"]
    holds = right[-1] < right[0] and wrong[-1] < wrong[0]
    return Finding(
        "sequence_mean",
        "The sequence mean favours short right and long wrong answers.",
        holds,
        f"Beside the sequence sum, a token of a right answer of the longest length has {right[-1] / right[0]:.2f} of the weight "
        f"of a token of the shortest, and a token of a wrong one {wrong[-1] / wrong[0]:.2f}: short right answers are "
        f"{choose_text(right[-1] < right[0], 'favoured', 'not favoured')}, long wrong ones "
        f"{choose_text(wrong[-1] < wrong[0], 'spared', 'not spared')}. For the same first gain in J the mean length of wrong "
        f"answers moves by {shift[0]:+.3f} tokens per unit of J more than along ∇J, that of right ones by {shift[1]:+.3f}.",
        {
            "right": right[-1] / right[0],
            "wrong": wrong[-1] / wrong[0],
            "shift_wrong": shift[0],
            "shift_right": shift[1],
        },
        curves={"length": lengths, **{key: v for key, v in relative.items() if len(v) == len(lengths)}},
    )


def _shift(setting: LabSetting, aggregate: Aggregation) -> tuple[float, float]:
    """How much faster E|o| of (wrong, right) answers grows along E g than along ∇J, per unit of ‖∇J‖² gained in J."""
    algorithm = replace(with_advantage(LeaveOneOut()), aggregation=aggregate)
    mean = estimate_gradients(algorithm, setting, enumerate_steps(setting, GROUP)).mean
    unit = setting.world.gradient(setting.theta)
    wrong, right = (
        directional_growth(setting, mean_length_gradient(setting, right), mean)
        - directional_growth(setting, mean_length_gradient(setting, right), unit)
        for right in (False, True)
    )
    square = float(unit @ unit)
    return wrong / square, right / square


def brevity(seed: int = 0) -> Finding:
    """γ < 1 on a reward at the end is γ^(tokens to go)·R: right answers are pushed the harder the shorter they are."""
    setting = one_prompt(length=4, seed=seed)
    gammas = (1.0, 0.99, 0.9, 0.7, 0.5)
    state = torch.zeros(len(setting.world.tree.prefixes), dtype=torch.float64)
    setting, steps = replace(setting, values=state), enumerate_steps(setting, 1)
    length = mean_length_gradient(setting, True)
    pace, cosine = [], []
    truth = setting.world.gradient(setting.theta)
    for gamma in gammas:
        mean = estimate_gradients(replace(MONTE_CARLO, advantage=(NStep(0, gamma),)), setting, steps).mean
        pace.append(directional_growth(setting, length, mean) / float(truth @ truth))
        cosine.append(float(torch.cosine_similarity(mean, truth, dim=0)))
    holds = all(a > b for a, b in pairwise(pace))
    return Finding(
        "brevity",
        "γ < 1 is a hidden penalty on length.",
        holds,
        f"For the same first gain in J, right answers change their mean length by {pace[0]:+.3f} tokens per unit of J at γ = 1, "
        f"{pace[2]:+.3f} at 0.9 and {pace[4]:+.3f} at 0.5: {choose_text(holds, 'the shorter the smaller γ', 'not always shorter')}. "
        f"The cosine with ∇J is {cosine[1]:.4f} at 0.99, {cosine[2]:.3f} at 0.9 and {cosine[4]:.3f} at 0.5; "
        f"{format_percent(1 - cosine[2] ** 2)} of the direction at 0.9 is not the gradient.",
        {f"pace_{g:g}": x for g, x in zip(gammas, pace, strict=True)},
        curves={"gamma": gammas, "length_change": tuple(pace), "cosine": tuple(cosine)},
    )


# The KL to a reference, in the reward and in the loss. All exact.

KL = 0.2
"""Nats a completion from π_θ to the reference."""
AWAY = 0.05
"""And from π_old, off-policy."""


def kl_places(seed: int = 0) -> Finding:
    """E g of each form with a reward of 0, against −∇KL(π_θ‖π_ref) of whole completions."""
    base = one_prompt(length=4, seed=seed)
    world = replace(base.world, reward=torch.zeros_like(base.world.reward))
    reference = perturb_policy(world, base.theta, KL, seed=seed + 5)
    on = LabSetting(world, base.theta, reference=reference)
    off = replace(on, old=perturb_policy(world, base.theta, AWAY, seed=seed + 6))
    truth = derivative(lambda theta: -world.kl(theta, reference), base.theta)
    # In the reward the penalty is the one at rollout time, so off-policy it needs the product ratio, and still lags behind.
    places = {"reward": Algorithm(shaping=(KLInReward(1.0),))}
    places |= {f"loss {form}": Algorithm(terms=(KLToReference(1.0, form),)) for form in get_args(KLForm)}
    away = places | {"reward": replace(places["reward"], ratio=SequenceProduct(), gate=Importance())}
    found, spread = {}, {}
    for name, algorithm in places.items():
        for where, setting, used in (("on", on, algorithm), ("off", off, away[name])):
            result = estimate_gradients(used, setting, enumerate_steps(setting, 1))
            found[name, where] = float(torch.cosine_similarity(result.mean, truth, dim=0))
            spread[name, where] = result.variance / float(truth @ truth)
            if (name, where) == ("reward", "on"):
                bias = float((result.mean - truth).norm() / truth.norm())
    holds = bias < EXACT and all(found[name, "on"] < 1 - 1e-6 for name in places if name != "reward")
    table = "; ".join(f"{name} {found[name, 'on']:.3f}, {found[name, 'off']:.3f}" for name in places)
    return Finding(
        "kl_places",
        "k1 in the reward is the gradient of the sequence's KL; in the loss every form leaves out the states that follow.",
        holds,
        f"On-policy the penalty in the reward {choose_text(bias < EXACT, 'is', 'is not')} −∇KL(π‖π_ref) (relative difference "
        f"{bias:.0e}). Cosines with it, on-policy and {AWAY:g} nats off-policy: {table}. Its price is variance: "
        f"{spread['reward', 'on']:.1f} of ‖∇KL‖² for one completion without a baseline, against "
        f"{spread['loss k3', 'on']:.1f} for k3 in the loss.",
        {f"{name} {where}": value for (name, where), value in found.items()} | {"bias_reward": bias},
    )
