"""What is weighed, masked and left out: samplers that differ, tokens beyond a clip, likeliest tokens, pairs, kept answers."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from policygrad.core.advantages import GroupMean, LeaveOneOut, PreferencePairs, RunningMean
from policygrad.core.base import Correction, Gate
from policygrad.core.batch import Batch
from policygrad.core.divergences import Divergence, Others
from policygrad.core.filters import Downsample
from policygrad.core.gates import Clip, DivergenceClip, Importance
from policygrad.core.mismatch import MismatchMask
from policygrad.core.ratios import Sequence, Token, TruncatedIS
from policygrad.core.soft_clips import FlippedImportance, GradientPreservingClip
from policygrad.lab.estimators import enumerate_steps, estimate_gradients
from policygrad.lab.findings.advantages import EXACT, exact_figures, with_advantage
from policygrad.lab.findings.ratios import move_off_policy
from policygrad.lab.measurement import Figures, MeasuredClaim, compute_figures, format_percent, join_numbers
from policygrad.lab.policies import TabularPolicy
from policygrad.lab.sequences import PrefixTree, World, derivative, perturb_policy, sample_normal
from policygrad.lab.setting import LabSetting
from policygrad.lab.worlds import one_prompt

DISTANCES = (0.02, 0.1, 0.3)  # nats per completion
CORRECTIONS: dict[str, tuple[Correction, ...]] = {
    "none": (),
    "capped": (TruncatedIS(2.0),),
    "bounded below": (TruncatedIS(2.0, low=0.5),),
    "mean 1": (TruncatedIS(2.0, "sequence", normalise=True),),
    "geometric": (MismatchMask("ratio", "mean", 1.1),),
    "product": (MismatchMask("ratio", "sum", 1.3),),
    "k2": (MismatchMask("k2", "mean", 0.01),),
    "k3": (MismatchMask("k3", "mean", 0.01),),
    "weighed": (MismatchMask("ratio", "mean", 1.1), TruncatedIS(math.inf, "sequence")),
}


def rejection(seed: int = 0) -> MeasuredClaim:
    """Groups of 2 from a sampler μ ≠ π_θ: weights and masks.

    Source of the claim: Liu et al. 2025 (When Speed Kills Stability), richardli.xyz/rl-collapse.
    """
    base = one_prompt(4, seed=seed)
    figures: dict[str, list[Figures]] = {name: [] for name in CORRECTIONS}
    rejected = []
    for kl in DISTANCES:
        setting = replace(base, sampler=perturb_policy(base.world, base.theta, kl, seed=seed + 1))
        ratio = Sequence()(
            base.world.token_logp(base.theta) - base.world.token_logp(setting.sampling_theta), base.world.mask
        )
        far = (ratio[:, 0] > 1.1) | (ratio[:, 0] < 1 / 1.1)
        rejected.append(float(base.world.logp(setting.sampling_theta).exp().flatten() @ far.double()))
        for name, parts in CORRECTIONS.items():
            algorithm = with_advantage(RunningMean(), corrections=parts)
            figures[name].append(exact_figures(algorithm, setting, 2))
    masks = ("geometric", "product", "k2", "k3")
    holds = all(m.bias < n.bias for name in masks for m, n in zip(figures[name], figures["none"], strict=True))

    def numbers(name: str, field: str) -> str:
        return join_numbers((getattr(f, field) for f in figures[name]), ".2f", " / ")

    result = "less at every distance" if holds else "not less at every distance, since what is left out is missing"
    return MeasuredClaim(
        "rejection",
        "Rejecting completions that are far from the sampler takes away its bias.",
        holds,
        f"{join_numbers(DISTANCES, 'g', ' / ')} nats per completion from the sampler, the bias is {numbers('none', 'bias')} of "
        f"‖∇J‖ without a correction, {numbers('geometric', 'bias')} with completions rejected by the geometric mean of ρ beyond "
        f"1.1 ({' / '.join(map(format_percent, rejected))} of them), which is a mean k1 beyond 0.095, "
        f"{numbers('product', 'bias')} by its product beyond 1.3, the sum of k1, {numbers('k2', 'bias')} by a mean k2 and "
        f"{numbers('k3', 'bias')} by a mean k3 above 0.01: {result}. The cosine with ∇J, which leaves the length aside, is "
        f"{numbers('none', 'cosine')} without and {numbers('geometric', 'cosine')}, {numbers('product', 'cosine')}, "
        f"{numbers('k2', 'cosine')} and {numbers('k3', 'cosine')} with them. Weights have less bias: {numbers('capped', 'bias')} "
        f"with ρ per token up to 2, {numbers('bounded below', 'bias')} with a lower bound of 0.5 too, {numbers('mean 1', 'bias')} "
        f"with ρ per completion and the mean 1. The variance is {numbers('none', 'variance')} without, "
        f"{numbers('geometric', 'variance')} by the geometric mask and {numbers('capped', 'variance')} weighed; masked and "
        f"weighed by the whole product, the bias is {numbers('weighed', 'bias')}.",
        {f"bias_{name}_{kl:g}": f.bias for name, v in figures.items() for kl, f in zip(DISTANCES, v, strict=True)},
        curves={
            "kl": DISTANCES,
            **{f"bias_{name}": tuple(f.bias for f in figures[name]) for name in ("none", "capped", *masks)},
            **{f"variance_{name}": tuple(f.variance for f in figures[name]) for name in ("none", "capped", *masks)},
        },
    )


BEYOND: dict[str, Gate] = {
    "clip": Clip(0.2, 0.2),
    "kept": GradientPreservingClip(0.2, 0.2),
    "flipped": FlippedImportance(0.2, 0.2),
    "divergence": DivergenceClip("tv", 0.15),
    "capped": DivergenceClip("tv", 0.15, c=1.2),
    "importance": Importance(),
}


def beyond_the_clip(seed: int = 0) -> MeasuredClaim:
    """Clip, CE-GPPO's and ASPO's gates and DPPO's cap off-policy; and what tokens beyond the clip do to the entropy, in 16 worlds.

    Source of the claim: Su et al. 2025 (CE-GPPO), sec. 3: unlikely tokens of good answers beyond the clip raise the entropy, those
    of bad ones lower it.
    """
    distances, worlds = (0.02, 0.1, 0.3, 1.0), 16
    figures: dict[str, list[Figures]] = {name: [] for name in BEYOND}
    for kl in distances:
        setting = move_off_policy(one_prompt(4, seed=seed), kl, seed)
        for name, gate in BEYOND.items():
            figures[name].append(exact_figures(with_advantage(RunningMean(), ratio=Token(), gate=gate), setting, 1))
    up = [0, 0]  # worlds in which tokens beyond the lower and the upper bound raise the entropy
    for w in range(worlds):
        setting = move_off_policy(one_prompt(4, seed=seed * 100 + w), 0.3, seed * 100 + w)
        for i, slope in enumerate(_entropy_slopes(setting)):
            up[i] += slope > 0
    holds = up[1] == worlds and up[0] == 0

    def cosines(name: str) -> str:
        return join_numbers((f.cosine for f in figures[name]), ".3f")

    return MeasuredClaim(
        "beyond_the_clip",
        "Beyond the clip, tokens of good answers raise the entropy and those of bad ones lower it.",
        holds,
        f"0.3 nats away in random directions, the gradient of tokens with Ψ > 0 beyond the upper bound raises the entropy in "
        f"{up[1]} of {worlds} random worlds, that of tokens with Ψ < 0 below the lower one in {up[0]}: "
        f"{'so it is' if holds else 'what is beyond the clip need not be unlikely, as it is in training'}. "
        f"{join_numbers(distances, 'g')} nats away, the cosine with ∇J is {cosines('clip')} clipped, {cosines('kept')} with "
        f"CE-GPPO's gradient beyond the clip, {cosines('flipped')} with ASPO's ratio turned over, {cosines('divergence')} with "
        f"DPPO's mask, {cosines('capped')} with r capped at 1.2 as well, and {cosines('importance')} with r alone.",
        {f"cosine_{name}_{kl:g}": f.cosine for name, v in figures.items() for kl, f in zip(distances, v, strict=True)}
        | {"raises_above": up[1] / worlds, "raises_below": up[0] / worlds},
        curves={
            "kl": distances,
            **{f"cosine_{name}": tuple(f.cosine for f in v) for name, v in figures.items()},
        },
    )


def _entropy_slopes(setting: LabSetting) -> tuple[float, float]:
    """Return ⟨∇H, g⟩ of the tokens that `Clip(0.2, 0.2)` drops (below, above), H the entropy in the states that π_old visits."""
    world, old = setting.world, setting.sampling_theta
    chance = world.token_weight(old)
    visits = torch.zeros(len(world.conditionals(old)), dtype=torch.float64).index_add_(
        0, world.state[world.mask], chance[world.mask]
    )

    def entropy(theta: Tensor) -> Tensor:
        p = world.conditionals(theta)
        return -(visits * (p.exp() * p).sum(-1)).sum()

    r = Token()(world.token_logp(setting.theta) - world.token_logp(old), world.mask)
    psi = (world.reward.flatten() - world.objective(old))[:, None].expand(r.shape)
    batch = Batch(mask=world.mask, group=torch.arange(len(r)), reward=psi[:, 0], logp_old=world.token_logp(old))
    ascent = derivative(entropy, setting.theta)
    slopes = []
    for dropped in Clip(0.2, 0.2).clipped(r, psi, batch):
        weight = chance * psi * dropped

        def gain(theta: Tensor, weight: Tensor = weight) -> Tensor:
            return (weight * world.token_logp(theta)).sum()

        slopes.append(float(derivative(gain, setting.theta) @ ascent))
    return slopes[0], slopes[1]


def likeliest_tokens(seed: int = 0) -> MeasuredClaim:
    """Distillation from the k likeliest of 8 tokens, in peaked policies: the cosine with the whole divergence's gradient."""
    tree, ks = PrefixTree(8, 2), (1, 2, 4, 7)
    policy = TabularPolicy(tree, scale=2.0)
    theta, teacher = policy.initial(seed), policy.initial(seed + 1)
    world = World(tree, torch.zeros(1, tree.size, dtype=torch.float64), policy)
    chance = world.token_weight(theta)
    reference = world.conditionals(teacher)
    visits = torch.zeros(len(reference), dtype=torch.float64).index_add_(0, world.state[world.mask], chance[world.mask])

    def gradient(divergence: Divergence) -> Tensor:
        return derivative(lambda x: visits @ divergence.compute(world.conditionals(x), reference), theta)

    kinds = {"reverse": 1.0, "js": 0.5, "forward": 0.0}
    ways: tuple[Others, ...] = ("one", "none")
    cosine: dict[str, tuple[float, ...]] = {}
    for kind, alpha in kinds.items():
        full = gradient(Divergence(alpha))
        for others in ways:
            parts = [gradient(Divergence(alpha, k, "policy", others)) for k in ks]
            cosine[f"{kind} {others}"] = tuple(float(torch.cosine_similarity(g, full, 0)) for g in parts)
    mass = (visits @ world.conditionals(theta).exp().sort(-1, descending=True).values.cumsum(-1)) / visits.sum()
    share = [float(mass[k - 1]) for k in ks]
    holds = all(cosine[f"{kind} one"][ks.index(4)] > 0.95 for kind in kinds)

    def row(name: str) -> str:
        return join_numbers(cosine[name], ".2f", " / ")

    return MeasuredClaim(
        "likeliest_tokens",
        "A few likeliest tokens, and the others as one, give nearly the whole divergence's gradient.",
        holds,
        f"The {join_numbers(ks, 'd', ', ')} likeliest of 8 tokens have {', '.join(map(format_percent, share))} of the probability. "
        f"With the others as one, the gradient's cosine with the whole divergence's is {row('reverse one')} for the reverse KL, "
        f"{row('js one')} for Jensen–Shannon and {row('forward one')} for the forward KL; with the others left out, "
        f"{row('reverse none')}, {row('js none')} and {row('forward none')}.",
        {f"{name} {k}": x for name, v in cosine.items() for k, x in zip(ks, v, strict=True)},
        curves={"k": tuple(map(float, ks)), **cosine},
    )


CERTAIN = "the reward prefers for certain, where the loss takes preferences for chances of σ(R − R′)"


def preference_pairs(seed: int = 0) -> MeasuredClaim:
    """Online DPO beside leave-one-out with two samples: at π_ref, with other rewards, and at the best policy under the KL."""
    beta, setting = 0.5, one_prompt(4, seed=seed)
    pairs, plain = with_advantage(PreferencePairs(beta)), with_advantage(LeaveOneOut())
    two = [exact_figures(chain, setting, 2) for chain in (pairs, plain)]
    same = abs(two[0].scale / beta - two[1].scale) + abs(two[0].cosine - two[1].cosine)
    world = setting.world
    graded = replace(setting, world=replace(world, reward=sample_normal(world.reward.shape, 1.0, seed + 3) ** 3))
    of_order, of_size = (exact_figures(chain, graded, 2) for chain in (pairs, plain))
    best = replace(setting, theta=find_best_policy(setting, beta), reference=setting.theta)
    at_start, at_best = (
        float(estimate_gradients(pairs, x, enumerate_steps(x, 2)).mean.norm()) for x in (setting, best)
    )
    left = at_best / at_start
    holds = left < 0.05
    return MeasuredClaim(
        "preference_pairs",
        "Online DPO comes to rest at the best policy under a KL to the reference.",
        holds,
        f"At π_ref, with rewards of 0 and 1 and β = {beta:g}, its expected gradient is β times leave-one-out's "
        f"({'to rounding' if same < EXACT else f'but for {same:.1e}'}). With rewards of very unequal size the cosine with ∇J is "
        f"{of_order.cosine:.3f}, leave-one-out's {of_size.cosine:.3f}: only the order is read. At π* ∝ π_ref·exp(R/β) the gradient "
        f"is {left:.2f} times as long as at π_ref{'' if holds else ', not 0: ' + CERTAIN}.",
        {"same": same, "cosine": of_order.cosine, "cosine_leave_one_out": of_size.cosine, "left": left},
    )


def find_best_policy(setting: LabSetting, beta: float) -> Tensor:
    """Return θ of π* ∝ π_ref·e^{R/β}, for a policy with a logit for each token after each prefix: its soft values as logits."""
    world = setting.world
    soft = world.values(setting.theta, (world.reward.flatten() / beta).exp()[:, None].expand(world.mask.shape)).log()
    after = torch.zeros(int(world.cell.max()) + 1, dtype=torch.float64)
    last = torch.arange(world.tree.length) == world.tree.lengths[:, None] - 1
    value = torch.where(last, world.reward[0][:, None] / beta, soft[world.state.roll(-1, 1)])
    after[world.cell[world.mask]] = value[world.mask]
    return (world.conditionals(setting.theta).flatten() + after).detach()


STEPS = 2048
KEPT: dict[str, Downsample] = {
    "random": Downsample(4, "random", "kept"),
    "shortest": Downsample(4, "shortest", "kept"),
    "per token": Downsample(4, "reward_per_token", "kept"),
}


def kept_answers(seed: int = 0) -> MeasuredClaim:
    """GFPO: learning from 4 of 8 sampled answers, in 8 worlds with random right answers up to 5 tokens.

    Sampled, since chance decides among equals. Lengths and rewards change along the expected gradient.
    """
    worlds, shares = 8, {name: list[tuple[float, float]]() for name in KEPT}
    for w in range(worlds):
        setting = one_prompt(5, seed=seed * 100 + w)
        world, theta = setting.world, setting.theta
        length = world.tree.lengths.double()[None]
        slopes = [world.gradient(theta), world.gradient(theta, length)]
        for name, part in KEPT.items():
            step = _sampled_gradients(setting, part, 8, STEPS // 4, seed + w).mean(0)
            accuracy, shortness = (float(torch.cosine_similarity(step, slope, 0)) for slope in slopes)
            shares[name].append((accuracy, shortness))
    table = {name: torch.tensor(v, dtype=torch.float64) for name, v in shares.items()}
    mean = {name: x.mean(0).tolist() for name, x in table.items()}
    change = table["shortest"][:, 1] - table["random"][:, 1]
    error = float(change.std() / math.sqrt(worlds))
    shorter = float(change.mean()) < -2 * error
    holds = shorter and mean["shortest"][0] > 0.9 * mean["random"][0]
    return MeasuredClaim(
        "kept_answers",
        "Learning from the shortest answers shortens without costing accuracy.",
        holds,
        f"Of 8 answers, 4 at random give an expected gradient with a cosine of {mean['random'][0]:.2f} with that of the accuracy "
        f"and {mean['random'][1]:+.2f} with that of the length; the shortest 4, {mean['shortest'][0]:.2f} and "
        f"{mean['shortest'][1]:+.2f}; the 4 of the largest R/|o|, {mean['per token'][0]:.2f} and {mean['per token'][1]:+.2f} "
        f"(means of {worlds} worlds, where length says nothing about right answers). Keeping the shortest changes the latter by "
        f"{float(change.mean()):+.2f} ± {error:.2f}: "
        f"{'it shortens' if shorter else 'it need not shorten, since long answers are left alone, not made rarer'}"
        f"{'' if mean['shortest'][0] > 0.9 * mean['random'][0] else ', and what it learns is less of the accuracy'}.",
        {f"{name} {what}": x for name, v in mean.items() for what, x in zip(("accuracy", "length"), v, strict=True)},
        error=error,
    )


NOISES = (0.0, 0.5, 1.0, 2.0)
FILTERED: dict[str, Downsample] = {
    "random": Downsample(2, "random", "kept"),
    "best": Downsample(2, "best_one", "kept"),
    "extremes": Downsample(2, "max_variance", "kept"),
}


def filtered_answers(seed: int = 0) -> MeasuredClaim:
    """PF-PPO: 2 of 5 sampled answers, chosen by a reward with normal noise on it, against the true gradient."""
    setting = one_prompt(4, seed=seed)
    truth = setting.world.gradient(setting.theta)
    figures: dict[str, list[Figures]] = {name: [] for name in FILTERED}
    uniform = torch.full((STEPS,), 1 / STEPS, dtype=torch.float64)
    for noise in NOISES:
        for name, part in FILTERED.items():
            gradient = _sampled_gradients(setting, part, 5, STEPS, seed, noise)
            figures[name].append(compute_figures(gradient, uniform, truth, exact=False))

    def numbers(name: str, field: str, spec: str = ".2f") -> str:
        return join_numbers((getattr(f, field) for f in figures[name]), spec, " / ")

    holds = all(b.snr > r.snr for b, r in zip(figures["best"], figures["random"], strict=True))
    return MeasuredClaim(
        "filtered_answers",
        "Of several answers, the best and another teach more than two at random, also with a noisy reward.",
        holds,
        f"With normal noise of {join_numbers(NOISES, 'g', ' / ')} on rewards of 0 and 1, two of five answers at random give one "
        f"update's gradient a signal-to-noise ratio of {numbers('random', 'snr', '.3f')}, the best and another "
        f"{numbers('best', 'snr', '.3f')}, the best and the worst {numbers('extremes', 'snr', '.3f')}. The cosine of the expected "
        f"gradient with ∇J is {numbers('random', 'cosine')}, {numbers('best', 'cosine')} and {numbers('extremes', 'cosine')}.",
        {f"snr_{name}_{noise:g}": f.snr for name, v in figures.items() for noise, f in zip(NOISES, v, strict=True)},
        error=max(f.snr for f in figures["random"]) * math.sqrt(2 / STEPS),
        curves={"noise": NOISES, **{f"snr_{name}": tuple(f.snr for f in v) for name, v in figures.items()}},
    )


def _sampled_gradients(
    setting: LabSetting, part: Downsample, size: int, steps: int, seed: int, noise: float = 0.0
) -> Tensor:
    """Sample groups, add noise to the rewards, apply the filter and the group's mean, and return gradients [steps, P]."""
    world, theta = setting.world, setting.theta
    generator = torch.Generator().manual_seed(seed)
    rows = torch.multinomial(world.logp(theta).exp()[0], steps * size, replacement=True, generator=generator)
    given = world.reward[0, rows] + noise * torch.randn(len(rows), generator=generator, dtype=torch.float64)
    group = torch.arange(steps).repeat_interleave(size)
    batch = Batch(mask=world.mask[rows], group=group, reward=given, logp_old=world.token_logp(theta)[rows])
    algorithm = with_advantage(GroupMean(), filters=(part,))
    filtered = algorithm.apply_filters(batch)
    psi = algorithm.compute_advantages(filtered).gather(1, filtered.mask.int().argmax(1, keepdim=True))
    gradient = psi * world.scores(theta)[rows] / part.keep
    return torch.zeros(steps, gradient.shape[1], dtype=torch.float64).index_add_(0, group, gradient)
