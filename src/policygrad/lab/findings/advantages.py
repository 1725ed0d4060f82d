"""Baselines, group statistics, token averages and KL penalties: their effect on the gradient's mean and variance. All exact."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import Tensor

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
from policygrad.core.turns import token_discount, turn_discount
from policygrad.lab.estimators import enumerate_steps, estimate_gradients
from policygrad.lab.measurement import (
    Figures,
    MeasuredClaim,
    compute_figures,
    format_percent,
    join_numbers,
    measure_algorithm,
)
from policygrad.lab.sequences import derivative, perturb_policy, sample_normal
from policygrad.lab.setting import LabSetting
from policygrad.lab.worlds import one_prompt, two_answers

EXACT = 1e-10
GROUP = 4


def with_advantage(*advantage: Advantage, **parts: Any) -> Algorithm:
    """Return an on-policy algorithm with this chain and the unbiased sequence sum, and with a critic if the chain reads values.

    parts: Other fields of the algorithm.
    """
    pairs = ((turn_discount(link), token_discount(link)) for link in advantage)
    per_turn, per_token = next((pair for pair in pairs if pair[0] is not None), (None, None))
    critic = None if per_turn is None else Critic(turn_gamma=per_turn, gamma=1.0 if per_token is None else per_token)
    return Algorithm(advantage=advantage, critic=critic, **parts)


def exact_figures(algorithm: Algorithm, setting: LabSetting, size: int) -> Figures:
    """Measure an algorithm exactly with groups of `size`."""
    return measure_algorithm(algorithm, setting, enumerate_steps(setting, size)).figures


def leave_one_out(seed: int = 0) -> MeasuredClaim:
    """E g = ∇J for every G. Source: Ahmadian et al. 2024 (RLOO)."""
    setting = one_prompt(seed=seed)
    bias = max(exact_figures(with_advantage(LeaveOneOut()), setting, size).bias for size in (2, 3, 4))
    holds = bias < EXACT
    return MeasuredClaim(
        "leave_one_out",
        "The leave-one-out baseline is unbiased.",
        holds,
        f"Over all groups of 2, 3 and 4 the expected gradient {'is the true one' if holds else 'is not the true one'}: "
        f"the largest relative difference is {bias:.1e}.",
        {"bias": bias},
    )


def group_mean(seed: int = 0) -> MeasuredClaim:
    """E g = (G−1)/G·∇J."""
    setting, sizes = one_prompt(seed=seed), (2, 3, 4)
    figures = [exact_figures(with_advantage(GroupMean()), setting, size) for size in sizes]
    error = max(abs(f.scale - (g - 1) / g) + abs(1 - f.cosine) for f, g in zip(figures, sizes, strict=True))
    holds = error < EXACT
    return MeasuredClaim(
        "group_mean",
        "The group mean shrinks the gradient by (G−1)/G and leaves its direction.",
        holds,
        f"The expected gradient is {join_numbers((f.scale for f in figures), '.4f')} of the true one at G = 2, 3, 4: "
        f"{'(G−1)/G' if holds else 'not (G−1)/G'} to {error:.0e}.",
        {f"scale_{size}": f.scale for size, f in zip(sizes, figures, strict=True)},
        curves={
            "group_size": tuple(map(float, sizes)),
            "scale": tuple(f.scale for f in figures),
            "leave_one_out": tuple(exact_figures(with_advantage(LeaveOneOut()), setting, g).scale for g in sizes),
        },
    )


def z_score(seed: int = 0) -> MeasuredClaim:
    """The weight that dividing by the group's std gives a prompt of difficulty p: E g = weight(p)·∇p."""
    grid = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)
    chain = with_advantage(GroupMean(), GroupStd())
    curves = {f"G{size}": tuple(exact_figures(chain, two_answers(p), size).scale for p in grid) for size in (4, 8, 32)}
    plain = tuple(exact_figures(with_advantage(GroupMean()), two_answers(p), 8).scale for p in grid)
    ratio = {size: curves[f"G{size}"][0] / curves[f"G{size}"][5] for size in (4, 8, 32)}
    # symmetric in p and 1 − p
    even = max(abs(c[i] - c[-1 - i]) for c in curves.values() for i in range(len(grid))) < EXACT
    holds = even and 1 < ratio[4] < ratio[8] < ratio[32]
    return MeasuredClaim(
        "z_score",
        "Dividing by the group's standard deviation over-weights very easy and very hard prompts.",
        holds,
        f"A prompt solved 2 % (or 98 %) of the time weighs {ratio[4]:.2f}, {ratio[8]:.2f} and {ratio[32]:.2f} times one solved "
        f"50 % of the time, at G = 4, 8 and 32; {'more so in larger groups' if holds else 'not so in larger groups'}. "
        f"Under the group mean all have the same weight ({min(plain):.3f} to {max(plain):.3f} at G = 8).",
        {f"ratio_{size}": r for size, r in ratio.items()},
        curves={"p": grid, **curves, "group_mean_G8": plain},
    )


def optimal_baseline(seed: int = 0) -> MeasuredClaim:
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
    grid = sorted(best + offset for offset in (-0.5, -0.2, -0.05, 0.0, 0.05, 0.2, 0.5))
    curve = tuple(_baseline_variance(setting, b) for b in grid)
    variance = {name: _baseline_variance(setting, b) for name, b in constants.items()}
    holds = variance["best"] <= min([*variance.values(), *curve])
    links: dict[str, Advantage] = {
        "siblings": LeaveOneOut(),
        "siblings_norms": OptimalBaseline(),
        "siblings_lengths": OptimalBaseline("length"),
    }
    estimated = {name: exact_figures(with_advantage(link), setting, GROUP).variance for name, link in links.items()}
    gain = 1 - estimated["siblings_norms"] / estimated["siblings"]
    return MeasuredClaim(
        "optimal_baseline",
        "b* = E[R‖s‖²]/E‖s‖² has the least variance of all baselines that are constant over a completion.",
        holds,
        f"b* = {best:.3f} {'has' if holds else 'does not have'} the least variance: {variance['best']:.2f} of ‖∇J‖², "
        f"against {variance['mean']:.2f} with the mean reward and {variance['zero']:.2f} with none. Estimated from the other 3 "
        f"of 4 siblings it has {format_percent(abs(gain))} {'less' if gain > 0 else 'more'} variance than their plain mean "
        f"({estimated['siblings_norms']:.2f} against {estimated['siblings']:.2f}).",
        {"b_star": best, **variance, **estimated},
        curves={"b": tuple(grid), "variance": curve},
    )


def _baseline_variance(setting: LabSetting, baseline: Tensor | float) -> float:
    """Return the variance of one completion's gradient for Ψ_t = R − b, with a baseline for each state [S] or a constant one."""
    values = torch.zeros(len(setting.world.tree.prefixes), dtype=torch.float64) + baseline
    return exact_figures(with_advantage(NStep(0)), replace(setting, values=values), 1).variance


def state_baseline(seed: int = 0) -> MeasuredClaim:
    """b*(s) = E[‖s‖²G]/E‖s‖² = V + Cov(‖s‖², G)/E‖s‖², for a table of logits, whose scores at two states are orthogonal."""
    setting = one_prompt(seed=seed)
    world, theta = setting.world, setting.theta
    to_go = world.reward.flatten()[:, None].expand(world.mask.shape)
    square = world.cell_scores(theta).square().sum(1)[world.cell]
    value, norm, product = world.values(theta, to_go), world.values(theta, square), world.values(theta, square * to_go)
    best = product / norm
    variance = {
        "none": _baseline_variance(setting, 0.0),
        "constant": _baseline_variance(setting, float(world.objective(theta))),
        "value": _baseline_variance(setting, value),
        "best": _baseline_variance(setting, best),
    }
    mean = estimate_gradients(with_advantage(NStep(0)), replace(setting, values=best), enumerate_steps(setting, 1)).mean
    bias = float((mean - world.gradient(theta)).abs().max())
    difference = float((best - value - (product - norm * value) / norm).abs().max())
    near = [_baseline_variance(setting, best + sample_normal(len(best), 0.05, k)) for k in range(4)]
    holds = variance["best"] <= min(*variance.values(), *near) and max(bias, difference) < EXACT
    return MeasuredClaim(
        "state_baseline",
        "Of baselines b(s), V + Cov(‖s‖², Q)/E‖s‖² has the least variance, less than V.",
        holds,
        f"In units of ‖∇J‖² the variance is {variance['none']:.2f} without a baseline, {variance['constant']:.2f} with J, "
        f"{variance['value']:.3f} with V(s) and {variance['best']:.3f} with b*(s), "
        f"{format_percent(1 - variance['best'] / variance['value'])} below V's; all four are unbiased.",
        variance,
    )


# Larger groups, and statistics over more completions than are trained on.


def group_size(seed: int = 0) -> MeasuredClaim:
    """The standard deviation of the group's gradient over G, and `group_power` ½, which divides by √G."""
    setting, sizes = one_prompt(length=2, seed=seed), (2, 3, 4, 6, 8)
    deviation = [math.sqrt(exact_figures(with_advantage(LeaveOneOut()), setting, g).variance) for g in sizes]
    rooted = with_advantage(LeaveOneOut(), aggregation=SequenceSum(group_power=0.5))
    figures = [exact_figures(rooted, setting, size) for size in sizes]

    def slope(values: list[float], first: int = 0) -> float:
        return math.log(values[-1] / values[first]) / math.log(sizes[-1] / sizes[first])

    total, late, growth = slope(deviation), slope(deviation, -3), slope([f.scale for f in figures])
    return MeasuredClaim(
        "group_size",
        "The noise of a group's gradient falls with √G, or faster.",
        total <= -0.5 + 1e-9,
        f"Under leave-one-out its standard deviation falls as G^{total:.2f} from G = 2 to 8, and as G^{late:.2f} from 4 on: "
        f"{'faster than G^-0.50, since the baseline improves too' if total < -0.5 else 'as G^-0.50'}. Dividing by √G "
        f"instead of G makes the expected gradient grow as G^{growth:.2f} in the same direction (cosine {figures[-1].cosine:.3f}).",
        {"slope": total, "slope_from_4": late, "growth_power_half": growth},
        curves={
            "group_size": tuple(map(float, sizes)),
            "deviation": tuple(deviation),
            "deviation_power_half": tuple(math.sqrt(f.variance) for f in figures),
            "scale_power_half": tuple(f.scale for f in figures),
        },
    )


def more_statistics(seed: int = 0) -> MeasuredClaim:
    """G = 2 completions carry the gradient, N ≥ 2 the leave-one-out mean."""
    setting, size, more = one_prompt(length=2, seed=seed), 2, (0, 1, 2, 4)
    loo = with_advantage(LeaveOneOut())
    figures = [measure_algorithm(loo, setting, enumerate_steps(setting, size, extra)).figures for extra in more]
    variance = [f.variance for f in figures]
    floor = exact_figures(with_advantage(RunningMean()), setting, size).variance
    all_trained = exact_figures(loo, setting, size + more[-1]).variance
    holds = all(a > b for a, b in pairwise(variance)) and max(f.bias for f in figures) < EXACT
    saved, possible = 1 - variance[-1] / variance[0], 1 - floor / variance[0]
    better, worse = ("training on", "counting") if all_trained < variance[-1] else ("counting", "training on")
    return MeasuredClaim(
        "more_statistics",
        "Statistics over N ≥ G completions cut the variance of a gradient that uses G.",
        holds,
        f"With G = 2, a mean over N = 2, 3, 4 and 6 gives a variance of {join_numbers(variance)} of ‖∇J‖², unbiased throughout: "
        f"{format_percent(saved)} less at N = 6, of {format_percent(possible)} that the exact J as baseline would save. A gradient "
        f"of all 6 has {all_trained:.2f}: {better} them is worth more than {worse} them.",
        {"saved": saved, "possible": possible, "variance_all": all_trained},
        curves={"N": tuple(float(size + extra) for extra in more), "variance": tuple(variance)},
    )


# Averages over tokens and γ, and their effect on the length of answers.


def mean_length_gradient(setting: LabSetting, right: bool) -> Tensor:
    """[P] ∇E[|o|] among the right, or the wrong, completions."""
    answers = setting.world.reward == (1.0 if right else 0.0)
    return derivative(lambda theta: setting.world.mean_length(theta, answers), setting.theta)


def sequence_mean(seed: int = 0) -> MeasuredClaim:
    """The weight of a token by the length and the rightness of its completion, relative to the unbiased sequence sum."""
    setting = one_prompt(p=0.5, seed=seed)
    steps = enumerate_steps(setting, GROUP)
    kinds: dict[str, Aggregation] = {
        "sum": SequenceSum(),
        "sequence": SequenceMean(),
        "token": TokenMean(),
        "fixed": FixedLength(),
    }
    relative: dict[str, tuple[float, ...]] = {}
    by_length = {
        name: measure_algorithm(with_advantage(LeaveOneOut(), aggregation=kind), setting, steps).length
        for name, kind in kinds.items()
    }
    for name, rows in by_length.items():
        for key in ("right", "wrong"):
            pairs = zip(rows, by_length["sum"], strict=True)
            relative[f"{name}_{key}"] = tuple(row[key] / base[key] for row, base in pairs if key in row)
    lengths = tuple(map(float, sorted(set(setting.world.tree.lengths.tolist()))))
    mean = estimate_gradients(with_advantage(LeaveOneOut(), aggregation=SequenceMean()), setting, steps).mean
    truth = setting.world.gradient(setting.theta)
    # How much faster the mean length grows along E g than along ∇J, in tokens per unit of J.
    longer = [mean_length_gradient(setting, right) for right in (False, True)]
    shift_wrong, shift_right = (float(x @ mean / (truth @ mean) - x @ truth / (truth @ truth)) for x in longer)
    right, wrong = (relative[f"sequence_{key}"][-1] / relative[f"sequence_{key}"][0] for key in ("right", "wrong"))
    return MeasuredClaim(
        "sequence_mean",
        "The sequence mean favours short right and long wrong answers.",
        right < 1 and wrong < 1,
        f"Relative to the sequence sum, a token of a right answer of the longest length has {right:.2f} of the weight of a token "
        f"of the shortest, and a token of a wrong one {wrong:.2f}: short right answers are "
        f"{'favoured' if right < 1 else 'not favoured'}, long wrong ones "
        f"{'spared' if wrong < 1 else 'not spared'}. For the same initial gain in J the mean length of wrong answers "
        f"changes by {shift_wrong:+.3f} tokens per unit of J more than along ∇J, that of right ones by {shift_right:+.3f}.",
        {"right": right, "wrong": wrong, "shift_wrong": shift_wrong, "shift_right": shift_right},
        curves={"length": lengths, **{key: v for key, v in relative.items() if len(v) == len(lengths)}},
    )


def brevity(seed: int = 0) -> MeasuredClaim:
    """γ < 1 on a reward at the end is γ^(tokens to go)·R: right answers are pushed the harder the shorter they are."""
    setting = one_prompt(length=4, seed=seed)
    gammas = (1.0, 0.99, 0.9, 0.7, 0.5)
    setting = replace(setting, values=torch.zeros(len(setting.world.tree.prefixes), dtype=torch.float64))
    steps, length = enumerate_steps(setting, 1), mean_length_gradient(setting, True)
    pace, cosine = [], []
    truth = setting.world.gradient(setting.theta)
    for gamma in gammas:
        mean = estimate_gradients(with_advantage(NStep(0, gamma)), setting, steps).mean
        pace.append(float(length @ mean) / float(truth @ mean))
        cosine.append(float(torch.cosine_similarity(mean, truth, dim=0)))
    holds = all(a > b for a, b in pairwise(pace))
    return MeasuredClaim(
        "brevity",
        "γ < 1 is a hidden penalty on length.",
        holds,
        f"For the same initial gain in J, right answers change their mean length by {pace[0]:+.3f} tokens per unit of J at γ = 1, "
        f"{pace[2]:+.3f} at 0.9 and {pace[4]:+.3f} at 0.5: {'the shorter the smaller γ' if holds else 'not always shorter'}. The "
        f"cosine with ∇J is {cosine[1]:.4f} at 0.99, {cosine[2]:.3f} at 0.9 and {cosine[4]:.3f} at 0.5; "
        f"{format_percent(1 - cosine[2] ** 2)} of the direction at 0.9 is not the gradient.",
        {f"pace_{g:g}": x for g, x in zip(gammas, pace, strict=True)},
        curves={"gamma": gammas, "length_change": tuple(pace), "cosine": tuple(cosine)},
    )


# The KL to a reference, in the reward and in the loss.

KL = 0.2  # nats per completion from π_θ to the reference
OFF_POLICY_KL = 0.05  # nats per completion from π_old, off-policy


def kl_places(seed: int = 0) -> MeasuredClaim:
    """E g of each form with a reward of 0, against −∇KL(π_θ‖π_ref) of whole completions."""
    base = one_prompt(length=4, seed=seed)
    world = replace(base.world, reward=torch.zeros_like(base.world.reward))
    reference = perturb_policy(world, base.theta, KL, seed=seed + 5)
    on = LabSetting(world, base.theta, reference=reference)
    off = replace(on, old=perturb_policy(world, base.theta, OFF_POLICY_KL, seed=seed + 6))
    truth = derivative(lambda theta: -world.kl(theta, reference), base.theta)
    # In the reward the penalty is that at rollout time, so off-policy it needs the product ratio, and still lags behind.
    places = {"reward": with_advantage(shaping=(KLInReward(1.0),))}
    places |= {f"loss {form}": with_advantage(terms=(KLToReference(1.0, form),)) for form in get_args(KLForm)}
    corrected = places | {"reward": replace(places["reward"], ratio=SequenceProduct(), gate=Importance())}
    figures = {}
    for name, algorithm in places.items():
        for policy, setting, used in (("on", on, algorithm), ("off", off, corrected[name])):
            result = estimate_gradients(used, setting, enumerate_steps(setting, 1))
            figures[name, policy] = compute_figures(result.gradient, result.weight, truth)
    cosine, bias = {key: f.cosine for key, f in figures.items()}, figures["reward", "on"].bias
    holds = bias < EXACT and all(cosine[name, "on"] < 1 - 1e-6 for name in places if name != "reward")
    table = "; ".join(f"{name} {cosine[name, 'on']:.3f}, {cosine[name, 'off']:.3f}" for name in places)
    return MeasuredClaim(
        "kl_places",
        "k1 in the reward is the gradient of the sequence's KL; in the loss every form leaves out the states that follow.",
        holds,
        f"On-policy the penalty in the reward {'is' if bias < EXACT else 'is not'} −∇KL(π‖π_ref) (relative difference "
        f"{bias:.0e}). Cosines with it, on-policy and {OFF_POLICY_KL:g} nats off-policy: {table}. Its price is variance: "
        f"{figures['reward', 'on'].variance:.1f} of ‖∇KL‖² for one completion without a baseline, against "
        f"{figures['loss k3', 'on'].variance:.1f} for k3 in the loss.",
        {f"{name} {policy}": value for (name, policy), value in cosine.items()} | {"bias_reward": bias},
    )
