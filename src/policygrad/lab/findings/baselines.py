"""Lever 1: what baselines do to the mean and the variance of the gradient. All exact."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from policygrad.algorithms import REINFORCE
from policygrad.core.advantages import GroupMean, GroupStd, LeaveOneOut, OptimalBaseline
from policygrad.core.algorithm import Algorithm
from policygrad.core.critic import Critic
from policygrad.core.protocols import Advantage
from policygrad.core.values import NStep
from policygrad.lab.estimators import estimates
from policygrad.lab.finding import Finding, percent, verdict
from policygrad.lab.groups import all_steps
from policygrad.lab.measurement import Figures, measure
from policygrad.lab.policies import normal
from policygrad.lab.setting import Setting
from policygrad.lab.worlds import one_prompt, two_answers

MONTE_CARLO = Algorithm("monte_carlo", psi=(NStep(0),), critic=Critic())
"""Ψ_t = R − V_t, the sequence sum: a baseline for each state, given as `Setting.values`."""
EXACT = 1e-10


def centred(*psi: Advantage) -> Algorithm:
    """REINFORCE with this chain, and the unbiased sequence sum."""
    return replace(REINFORCE, psi=psi)


def measured(algorithm: Algorithm, setting: Setting, size: int) -> Figures:
    """Exact figures with groups of G."""
    return measure(algorithm, setting, all_steps(setting, size)).figures


def leave_one_out(seed: int = 0) -> Finding:
    """E g = ∇J for every G. Source: Ahmadian et al. 2024 (RLOO)."""
    setting, sizes = one_prompt(seed=seed), (2, 3, 4)
    bias = [measured(centred(LeaveOneOut()), setting, size).bias for size in sizes]
    holds = max(bias) < EXACT
    return Finding(
        "leave_one_out",
        "The leave-one-out baseline is unbiased.",
        holds,
        f"Over all groups of 2, 3 and 4 the expected gradient {verdict(holds, 'is the true one', 'is not the true one')}: "
        f"the largest relative difference is {max(bias):.1e}.",
        {"bias": max(bias)},
    )


def group_mean(seed: int = 0) -> Finding:
    """E g = (G−1)/G·∇J."""
    setting, sizes = one_prompt(seed=seed), (2, 3, 4)
    found = [measured(centred(GroupMean()), setting, size) for size in sizes]
    shrunk = [(size - 1) / size for size in sizes]
    off = max(abs(f.scale - s) + abs(1 - f.cosine) for f, s in zip(found, shrunk, strict=True))
    holds = off < EXACT
    return Finding(
        "group_mean",
        "The group mean shrinks the gradient by (G−1)/G and leaves its direction.",
        holds,
        f"The expected gradient is {', '.join(f'{f.scale:.4f}' for f in found)} of the true one at G = 2, 3, 4: "
        f"{verdict(holds, '(G−1)/G', 'not (G−1)/G')} to {off:.0e}.",
        {f"scale_{size}": f.scale for size, f in zip(sizes, found, strict=True)},
        curves={
            "group_size": tuple(map(float, sizes)),
            "scale": tuple(f.scale for f in found),
            "leave_one_out": tuple(measured(centred(LeaveOneOut()), setting, size).scale for size in sizes),
        },
    )


def z_score(seed: int = 0) -> Finding:
    """The weight that dividing by the group's std gives a prompt of difficulty p: E g = weight(p)·∇p."""
    grid = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98)
    chain = centred(GroupMean(), GroupStd())
    curves = {f"G{size}": tuple(measured(chain, two_answers(p), size).scale for p in grid) for size in (4, 8, 32)}
    plain = tuple(measured(centred(GroupMean()), two_answers(p), 8).scale for p in grid)
    ratio = {size: curves[f"G{size}"][0] / curves[f"G{size}"][5] for size in (4, 8, 32)}
    even = max(abs(c[i] - c[-1 - i]) for c in curves.values() for i in range(len(grid))) < EXACT  # p and 1 − p alike
    holds = even and 1 < ratio[4] < ratio[8] < ratio[32]
    return Finding(
        "z_score",
        "Dividing by the group's standard deviation over-weights very easy and very hard prompts.",
        holds,
        f"A prompt solved 2 % (or 98 %) of the time weighs {ratio[4]:.2f}, {ratio[8]:.2f} and {ratio[32]:.2f} times one solved "
        f"50 % of the time, at G = 4, 8 and 32; {verdict(holds, 'the more so the larger the group', 'not so in larger groups')}. "
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
    estimated = {name: measured(centred(link), setting, size).variance for name, link in links.items()}
    gain = 1 - estimated["siblings_norms"] / estimated["siblings"]
    return Finding(
        "optimal_baseline",
        "b* = E[R‖s‖²]/E‖s‖² has the least variance of all baselines that are constant over a completion.",
        holds,
        f"b* = {best:.3f} {verdict(holds, 'has', 'has not')} the least variance: {variance['best']:.2f} of ‖∇J‖², against "
        f"{variance['mean']:.2f} with the mean reward and {variance['zero']:.2f} with none. Estimated from the other 3 of 4 "
        f"siblings it has {percent(abs(gain))} {verdict(gain > 0, 'less', 'more')} variance than their plain mean "
        f"({estimated['siblings_norms']:.2f} against {estimated['siblings']:.2f}).",
        {"b_star": best, **variance, **estimated},
        curves={
            "b": tuple(sorted([*grid, best])),
            "variance": tuple(_constant(setting, b) for b in sorted([*grid, best])),
        },
    )


def _constant(setting: Setting, b: float) -> float:
    states = len(setting.world.tree.prefixes) * setting.world.prompts
    return _with_baseline(setting, torch.full((states,), b, dtype=torch.float64))


def _with_baseline(setting: Setting, values: Tensor) -> float:
    return measured(MONTE_CARLO, replace(setting, values=values), 1).variance


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
    biased = estimates(MONTE_CARLO, replace(setting, values=best), all_steps(setting, 1)).mean - world.gradient(theta)
    same = float((best - value - covariance / norm).abs().max())
    around = [_with_baseline(setting, best + normal(len(best), 0.05, k)) for k in range(4)]
    holds = variance["best"] <= min(*variance.values(), *around) and float(biased.abs().max()) < EXACT and same < EXACT
    return Finding(
        "state_baseline",
        "Of baselines b(s), V + Cov(‖s‖², Q)/E‖s‖² has the least variance, less than V.",
        holds,
        f"In units of ‖∇J‖² the variance is {variance['none']:.2f} without a baseline, {variance['constant']:.2f} with J, "
        f"{variance['value']:.3f} with V(s) and {variance['best']:.3f} with b*(s), "
        f"{percent(1 - variance['best'] / variance['value'])} below V's; all four are unbiased.",
        variance,
    )
