"""Theorems on trust regions, checked on random Markov decision processes. All exact."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from policygrad.core.trust_region import TrustRegion
from policygrad.lab import mdp as exact
from policygrad.lab.mdp import ExactProblem, TabularMDP, chain, gridworld, random_mdp, softmax, solve
from policygrad.lab.measurement import MeasuredClaim
from policygrad.lab.sequences import sample_normal

EXACT = 1e-10
PROBLEMS = 20


def _random_pairs(seed: int, scale: float = 1.0) -> list[tuple[TabularMDP, Tensor, Tensor]]:
    """Return random problems with two policies, the second `scale` away in the logits."""
    pairs = []
    for k in range(seed * PROBLEMS, (seed + 1) * PROBLEMS):
        mdp = random_mdp(4 + k % 3, 2 + k % 3, (0.5, 0.9, 0.99)[k % 3], seed=k)
        theta = sample_normal(mdp.reward.shape, 1.0, 2 * k)
        pairs.append((mdp, softmax(theta), softmax(theta + sample_normal(mdp.reward.shape, scale, 2 * k + 1))))
    return pairs


def performance_difference(seed: int = 0) -> MeasuredClaim:
    """J(π') − J(π) = Σ_s d_π'(s) Σ_a π'(a|s) A_π(s, a). Source: Kakade & Langford 2002, lemma 6.1."""
    worst, biggest = 0.0, 0.0
    for mdp, old, new in _random_pairs(seed):
        before, after = solve(mdp, old), solve(mdp, new)
        difference = float(after.objective - before.objective)
        identity = float((after.occupancy[:, None] * new * before.advantage).sum())
        worst, biggest = max(worst, abs(identity - difference)), max(biggest, abs(difference))
    holds = worst < EXACT * max(1, biggest)
    return MeasuredClaim(
        "performance_difference",
        "J(π') − J(π) is the advantage of π, summed where π' goes.",
        holds,
        f"On {PROBLEMS} random problems both sides {'agree' if holds else 'differ'}: the largest difference is "
        f"{worst:.0e}, of changes up to {biggest:.2f}.",
        {"difference": worst},
    )


def surrogate_matches(seed: int = 0) -> MeasuredClaim:
    """L_old(π) = J(π) and ∇L_old = ∇J at π = π_old. Source: Schulman et al. 2015, eq. 4."""
    value, slope, theorem = 0.0, 0.0, 0.0
    for mdp, old, _ in _random_pairs(seed):
        theta = old.log()
        truth = exact.objective_gradient(mdp, theta)
        moving = theta.clone().requires_grad_()
        level = exact.surrogate_value(mdp, old, softmax(moving))
        gradient = torch.autograd.grad(level, moving)[0]
        value = max(value, abs(float(level.detach()) - float(solve(mdp, old).objective)))
        slope = max(slope, float((gradient - truth).abs().max()))
        theorem = max(theorem, float((exact.policy_gradient_theorem(mdp, theta) - truth).abs().max()))
    holds = max(value, slope, theorem) < EXACT
    return MeasuredClaim(
        "surrogate_matches",
        "At π_old the surrogate has J's value and J's gradient.",
        holds,
        f"Value and gradient {'match' if holds else 'do not match'} to {value:.0e} and {slope:.0e}; the policy-gradient "
        f"theorem and differentiating the linear solve agree to {theorem:.0e}.",
        {"value": value, "gradient": slope, "theorem": theorem},
    )


def trust_region_bound(seed: int = 0) -> MeasuredClaim:
    """J(π) ≥ L(π) − C·max KL and ≥ L(π) − C·max TV², C = 4εγ/(1−γ)². Source: Schulman et al. 2015, theorem 1, eq. 9."""
    distances, gap = (0.01, 0.1, 1.0), {}
    violated = 0
    for scale in distances:
        slack = []
        for mdp, old, new in _random_pairs(seed, scale):
            reached = float(solve(mdp, new).objective)
            by_kl, by_tv = exact.improvement_bound(mdp, old, new)
            violated += by_tv > reached + EXACT or by_kl > by_tv + EXACT
            slack.append((reached - by_kl, reached - by_tv))
        gap[scale] = torch.tensor(slack, dtype=torch.float64).median(0).values.tolist()
    holds = violated == 0
    return MeasuredClaim(
        "trust_region_bound",
        "J(π) ≥ L(π) − 4εγ/(1−γ)²·max KL, and the form in total variation is tighter.",
        holds,
        f"{'Never' if holds else f'{violated} times'} violated on {PROBLEMS * len(distances)} pairs of policies. It is "
        f"far from tight: the median of J − bound is {_format_numbers(gap[d][0] for d in distances)} in the KL form and "
        f"{_format_numbers(gap[d][1] for d in distances)} in the other, for logits moved by {_format_numbers(distances)}.",
        {"violated": float(violated)},
        curves={
            "distance": distances,
            "slack_kl": tuple(gap[d][0] for d in distances),
            "slack_tv": tuple(gap[d][1] for d in distances),
        },
    )


def _format_numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{x:.2g}" if x < 100 else f"{x:.0f}" for x in values)


def bound_over_step(seed: int = 0) -> MeasuredClaim:
    """J(π), the surrogate L(π) and both lower bounds along the natural gradient of one random MDP, over the step's length.

    Source: Schulman et al. 2015, theorem 1 and eq. 9.
    """
    mdp = random_mdp(4, 3, 0.5, seed=seed)
    theta = sample_normal(mdp.reward.shape, 1.0, seed)
    direction, old = exact.natural_gradient(mdp, theta), softmax(theta)
    direction = direction / direction.norm()
    lengths = tuple(i / 80 for i in range(121))
    rows = []
    for length in lengths:
        new = softmax(theta + length * direction)
        level = float(exact.surrogate_value(mdp, old, new))
        rows.append((float(solve(mdp, new).objective), level, *exact.improvement_bound(mdp, old, new)))
    start = rows[0][0]
    true, surrogate, by_kl, by_tv = (tuple(row[i] - start for row in rows) for i in range(4))
    promised, reached = max(by_tv), max(true)
    safe, best = lengths[by_tv.index(promised)], lengths[true.index(reached)]
    holds = all(kl <= tv + 1e-10 and tv <= j + 1e-10 for kl, tv, j in zip(by_kl, by_tv, true, strict=True))
    return MeasuredClaim(
        "bound_over_step",
        "TRPO's bound touches J at the old policy and stays below: raising it raises J, in far shorter steps than would do.",
        holds,
        f"Along the natural gradient of a random MDP (γ = 0.5) the bound is {'never' if holds else 'somewhere'} above "
        f"J. Its maximum promises {promised:.3f} at a step of {safe:.2f} in the logits (total variation; the KL form "
        f"{max(by_kl):.3f}); J gains {true[lengths.index(safe)]:.3f} there, and {reached:.3f} at a step of {best:g}"
        f"{', the longest tried' if best == lengths[-1] else ''}.",
        {"promised": promised, "promised_kl": max(by_kl), "safe": safe, "reached": reached, "best": best},
        curves={"step": lengths, "J": true, "surrogate": surrogate, "bound_kl": by_kl, "bound_tv": by_tv},
    )


def conservative_mixture(seed: int = 0) -> MeasuredClaim:
    """π = (1−α)π_old + απ*: J ≥ L − 2εγα²/(1−γ)², ε = max_s|E_{π*}A|, and the step α* = 𝔸(1−γ)²/(4εγ) never harms.

    𝔸 = Σ_s d(s) Σ_a π*(a|s) A(s, a), d unnormalised. Source: Kakade & Langford 2002; Schulman et al. 2015, eq. 6.
    """
    violated, worse, gains = 0, 0, []
    for mdp, old, _ in _random_pairs(seed):
        before = solve(mdp, old)
        greedy = torch.nn.functional.one_hot(before.q.argmax(1), mdp.actions).double()
        mean = (greedy * before.advantage).sum(1)
        epsilon, total = float(mean.abs().max()), float(before.occupancy @ mean)
        penalty = 2 * epsilon * mdp.gamma / (1 - mdp.gamma) ** 2
        best = min(1.0, total / (2 * penalty))
        for alpha in (0.01, 0.1, 0.5, best):
            new = (1 - alpha) * old + alpha * greedy
            reached = float(solve(mdp, new).objective)
            bound = float(exact.surrogate_value(mdp, old, new)) - penalty * alpha**2
            violated += bound > reached + EXACT
        gains.append(reached - float(before.objective))
        worse += gains[-1] < -EXACT
    holds = violated == worse == 0
    return MeasuredClaim(
        "conservative_mixture",
        "A mixture with a better policy improves J by at least its bound; the step α* never decreases J.",
        holds,
        f"On {PROBLEMS} random problems with the greedy policy mixed in, the bound is "
        f"{'never violated' if violated == 0 else f'violated {violated} times'} and α* "
        f"{'always raises J' if worse == 0 else f'lowers J {worse} times'}, by {min(gains):.1e} to {max(gains):.2f}.",
        {"violated": float(violated), "worse": float(worse), "least_gain": min(gains)},
    )


def natural_invariance(seed: int = 0) -> MeasuredClaim:
    """θ = Mφ: F_φ⁻¹∇_φJ maps to F_θ⁻¹∇_θJ; the gradient in φ does not. Source: Kakade 2001; Amari 1998."""
    natural, plain = list[float](), list[float]()
    for mdp, old, _ in _random_pairs(seed):
        size = mdp.states * mdp.actions
        change = torch.eye(size).double() + sample_normal((size, size), 0.3, seed)
        features, theta = change.reshape(mdp.states, mdp.actions, size), old.log()
        phi = torch.linalg.solve(change, theta.flatten())
        for rule, cosines in ((exact.natural_gradient, natural), (exact.objective_gradient, plain)):
            direct = _policy_change(theta, rule(mdp, theta))
            mapped = _policy_change(theta, (features @ rule(mdp, phi, features)).reshape(theta.shape))
            cosines.append(float(torch.cosine_similarity(direct, mapped, dim=0)))
    holds = min(natural) > 1 - 1e-6
    return MeasuredClaim(
        "natural_invariance",
        "The natural gradient changes the policy equally in any parametrisation; the gradient does not.",
        holds,
        f"Under a random linear change of parameters the policy's change keeps a cosine of at least {min(natural):.8f} along the "
        f"natural gradient, {'the same to rounding' if holds else 'not the same'}, and of {min(plain):.3f} to "
        f"{max(plain):.3f} along the gradient.",
        {"natural": min(natural), "gradient_least": min(plain)},
    )


def _policy_change(theta: Tensor, step: Tensor) -> Tensor:
    """[S·A] the first-order change of π along a step in the logits."""
    policy = softmax(theta)
    return (policy * (step - (policy * step).sum(1, keepdim=True))).flatten()


def monotonic_improvement(seed: int = 0) -> MeasuredClaim:
    """Runs of the library's TrustRegion with exact quantities: a penalised one that the bound covers, and δ = 0.01 as used."""
    problems = {"chain": chain(), "grid": gridworld(), "random": random_mdp(seed=seed)}
    steps, falls, covered, gain = 40, 0, 0, dict[str, tuple[float, float]]()
    for name, mdp in problems.items():
        problem = ExactProblem(mdp, sample_normal(mdp.reward.shape, 0.1, seed))
        for _ in range(steps):
            TrustRegion(0.01, damping=1e-6, cg_iters=50)(problem)
        falls += sum(b < a - EXACT for a, b in pairwise(problem.history))
        gain[name] = (problem.history[0], problem.history[-1])
        # Steps that raise the bound M(π) = L(π) − C·max KL: natural gradients, halved until they do.
        theta = sample_normal(mdp.reward.shape, 0.1, seed)
        for _ in range(10):
            old = softmax(theta)
            before, step = float(solve(mdp, old).objective), exact.natural_gradient(mdp, theta)
            while exact.improvement_bound(mdp, old, softmax(theta + step))[0] <= before and float(step.norm()) > 1e-12:
                step = step / 2
            theta = theta + step
            covered += float(solve(mdp, softmax(theta)).objective) < before - 1e-14
    holds = falls == 0 and covered == 0
    ranges = ", ".join(f"{name} {a:.3f} to {b:.3f}" for name, (a, b) in gain.items())
    return MeasuredClaim(
        "monotonic_improvement",
        "Exact trust-region steps improve J step by step.",
        holds,
        f"With δ = 0.01, which no bound covers, J {'never falls' if falls == 0 else f'falls {falls} times'} in {steps} "
        f"steps each ({ranges}). Steps so short that the bound promises a gain "
        f"{'never lower J' if covered == 0 else f'lower J {covered} times'}.",
        {"falls": float(falls), "falls_bounded": float(covered)},
    )


def occupancy_sum(seed: int = 0) -> MeasuredClaim:
    """Σ_s d(s) = 1/(1−γ); over a horizon of H steps Σ_{t<H} γ^t."""
    worst = max(
        abs(float(solve(mdp, old).occupancy.sum()) * (1 - mdp.gamma) - 1) for mdp, old, _ in _random_pairs(seed)
    )
    finite = 0.0
    for steps in (1, 5, 20):
        mdp = random_mdp(seed=seed).with_horizon(steps)
        finite = max(
            finite, abs(float(solve(mdp, softmax(sample_normal(mdp.reward.shape, 1.0, seed))).occupancy.sum()) - steps)
        )
    undiscounted = replace(random_mdp(seed=seed), gamma=0.0)
    first = float(solve(undiscounted, softmax(sample_normal(undiscounted.reward.shape, 1.0, seed))).occupancy.sum())
    holds = max(worst, finite, abs(first - 1)) < 1e-9
    return MeasuredClaim(
        "occupancy_sum",
        "The unnormalised discounted occupancy sums to 1/(1−γ).",
        holds,
        f"It {'does' if holds else 'does not'}, to {worst:.0e} relative on {PROBLEMS} random problems (γ up to 0.99), "
        f"and to H over a horizon of H steps at γ = 1, to {finite:.0e}.",
        {"relative": worst, "finite": finite},
    )
