"""Rewards over a running scale, the best of a group, groups by their mean reward, and a teacher beside the reward. All exact."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from policygrad.core.adjustments import TeacherBonus
from policygrad.core.advantages import GroupStd, LeaveOneOut, MarginalMax
from policygrad.core.algorithm import Algorithm
from policygrad.core.base import Advantage, Filter, Ratio
from policygrad.core.filters import DropZeroVariance, RewardRange
from policygrad.core.gates import Importance
from policygrad.core.ratios import SequenceProduct, Token
from policygrad.core.shaping import RunningScale
from policygrad.lab.estimators import enumerate_steps, estimate_gradients
from policygrad.lab.findings.advantages import EXACT, with_advantage
from policygrad.lab.findings.choices import find_best_policy
from policygrad.lab.findings.ratios import move_off_policy
from policygrad.lab.measurement import Figures, MeasuredClaim, compute_figures, format_percent, join_numbers
from policygrad.lab.sequences import derivative, perturb_policy, sample_normal
from policygrad.lab.setting import LabSetting
from policygrad.lab.worlds import make_table_settings, one_prompt

AWAY = 0.1  # nats per completion between π_old and π_θ, off-policy


def _corrected(*advantage: Advantage, ratio: Ratio = Token(), **parts: object) -> Algorithm:  # noqa: B008  frozen
    """Return an algorithm with this chain and r as its weight, which is 1 on-policy."""
    return with_advantage(*advantage, ratio=ratio, gate=Importance(), **parts)


def _measure(algorithm: Algorithm, setting: LabSetting, truth: Tensor, size: int) -> Figures:
    """Measure against a given gradient."""
    steps = estimate_gradients(algorithm, setting, enumerate_steps(setting, size))
    return compute_figures(steps.gradient, steps.weight, truth)


@dataclass(frozen=True, eq=False)
class _LaterSetting(LabSetting):
    """A setting in which a running scale has seen so many scores, of the sampling policy's mean and variance."""

    seen: int = 0

    def prepare(self, algorithm: Algorithm) -> Algorithm:
        ready, world, theta = super().prepare(algorithm), self.world, self.sampling_theta
        mean = float(world.objective(theta))
        variance = float(world.objective(theta, (world.reward - mean) ** 2))
        state = {"count": self.seen, "mean": mean if self.seen else 0.0, "square": self.seen * variance}
        shaping = tuple(part.with_state(state) if isinstance(part, RunningScale) else part for part in ready.shaping)
        return replace(ready, shaping=shaping)


def running_scale(seed: int = 0) -> MeasuredClaim:
    """Rewards over the standard deviation of all scores so far: three prompts of unequal difficulty, groups of 4.

    Source of the claim: TRL 0.11, PPOTrainer's use_score_scaling.
    """
    seen, size = (0, 16, 1024), 4
    plain = _corrected(LeaveOneOut())
    scaled = replace(plain, shaping=(RunningScale(),))
    figures: dict[str, list[Figures]] = {}
    for name, setting in zip(("on", "off"), make_table_settings(AWAY, seed), strict=True):
        truth = setting.world.gradient(setting.theta)
        later = (_LaterSetting(**vars(setting), seen=n) for n in seen)
        figures[name] = [_measure(plain, setting, truth, size), *(_measure(scaled, x, truth, size) for x in later)]
    turned = [abs(f[-1].cosine - f[0].cosine) for f in figures.values()]
    holds = max(turned) < 1e-4

    def numbers(name: str, field: str, spec: str) -> str:
        return join_numbers((getattr(f, field) for f in figures[name][1:]), spec, " / ")

    return MeasuredClaim(
        "running_scale",
        "Rewards over their running standard deviation change the length of the gradient, not its direction.",
        holds,
        f"After {join_numbers(seen, 'd', ' / ')} scores the cosine with ∇J is {numbers('on', 'cosine', '.5f')} on-policy, "
        f"{figures['on'][0].cosine:.5f} without the scale, and {numbers('off', 'cosine', '.3f')} {AWAY:g} nats off-policy, "
        f"{figures['off'][0].cosine:.3f} without; the signal-to-noise ratio is {numbers('on', 'snr', '.3f')}, "
        f"{figures['on'][0].snr:.3f} without, and {numbers('off', 'snr', '.3f')}, {figures['off'][0].snr:.3f} without. Before "
        "there are many scores, a rollout's own decide its scale, as in a z-score.",
        {
            f"cosine_{name}_{n}": f.cosine
            for name, v in figures.items()
            for n, f in zip(("without", *seen), v, strict=True)
        },
    )


def marginal_max(seed: int = 0) -> MeasuredClaim:
    """max_g R − max_{j≠i} R_j as Ψ, against the gradient of E[max of G rewards]; rewards are normal numbers.

    Source of the claim: Tang et al. 2025, arXiv:2503.19595.
    """
    sizes, setting = (2, 3, 4), one_prompt(2, seed=seed)
    rewards = sample_normal(setting.world.reward.shape, 1.0, seed + 3)
    on = replace(setting, world=replace(setting.world, reward=rewards))
    off = move_off_policy(on, AWAY, seed)
    per_token, sequence = _corrected(MarginalMax()), _corrected(MarginalMax(), ratio=SequenceProduct())
    chains = {
        ("own", "on"): per_token,
        ("divided", "on"): _corrected(MarginalMax(), GroupStd(eps=1e-6)),
        ("leave-one-out", "on"): _corrected(LeaveOneOut()),
        ("own", "off"): per_token,
        ("product", "off"): sequence,
    }
    figures: dict[tuple[str, str], list[Figures]] = {key: [] for key in chains}
    bare = []
    for size in sizes:
        for (name, policy), chain in chains.items():
            at = on if policy == "on" else off
            truth = derivative(partial(expect_best, at, size), at.theta)
            figures[name, policy].append(_measure(chain, at, truth, size))
        bare.append(_measure_bare_maximum(on, size))
    bias = max(abs(f.scale * g - 1) + 1 - f.cosine for f, g in zip(figures["own", "on"], sizes, strict=True))
    variance = [f.variance * g**2 for f, g in zip(figures["own", "on"], sizes, strict=True)]
    holds = bias < EXACT
    is_less = all(mine < other for mine, other in zip(variance, bare, strict=True))

    def cosines(name: str, policy: str) -> str:
        return join_numbers((f.cosine for f in figures[name, policy]), ".3f", " / ")

    return MeasuredClaim(
        "marginal_max",
        "What an answer adds to the best of its group gives the gradient of the best's expected reward.",
        holds,
        f"With G = {join_numbers(sizes, 'd', ' / ')} its expected gradient, times G, is that of E[max R] to {bias:.0e}; the "
        f"variance is {join_numbers(variance, '.1f', ' / ')} of its square, {'' if is_less else 'not always '}less than "
        f"{join_numbers(bare, '.1f', ' / ')} with the maximum itself for every answer. Divided by the group's standard deviation, "
        f"as in verl, the cosine is {cosines('divided', 'on')}; that of leave-one-out, which is after the mean, "
        f"{cosines('leave-one-out', 'on')}. {AWAY:g} nats off-policy it is {cosines('own', 'off')} with r per token and "
        f"{cosines('product', 'off')} with its product over the answer: what the others would have got is not corrected.",
        {
            f"cosine_{name}_{policy}_{g}": f.cosine
            for (name, policy), v in figures.items()
            for g, f in zip(sizes, v, strict=True)
        }
        | {"bias": bias},
        curves={
            "group_size": tuple(map(float, sizes)),
            **{f"cosine_{name}": tuple(f.cosine for f in v) for (name, policy), v in figures.items() if policy == "on"},
            "variance_own": tuple(variance),
            "variance_bare": tuple(bare),
        },
    )


def expect_best(setting: LabSetting, size: int, theta: Tensor) -> Tensor:
    """Return E[max R] of `size` completions of one prompt, with graph."""
    reward, order = setting.world.reward.flatten().sort()
    upto = setting.world.logp(theta).exp().flatten()[order].cumsum(0)
    return (reward * torch.diff(upto**size, prepend=torch.zeros(1, dtype=torch.float64))).sum()


def _measure_bare_maximum(setting: LabSetting, size: int) -> float:
    """Return the variance of max R·Σ_i ∇log π(o_i), relative to the square of its mean, which is ∇E[max R]."""
    steps, truth = enumerate_steps(setting, size), derivative(partial(expect_best, setting, size), setting.theta)
    best = setting.world.reward.flatten()[steps.rows].amax(1)
    gradient = best[:, None] * setting.world.scores(setting.theta)[steps.rows].sum(1)
    return compute_figures(gradient, steps.weight, truth).variance


RANGES: dict[str, tuple[Filter, ...]] = {
    "all": (),
    "unequal": (DropZeroVariance(),),
    "middle": (RewardRange(low=0.3, high=0.7),),
}


def reward_range(seed: int = 0) -> MeasuredClaim:
    """Groups of 4 by their mean reward: all, those of unequal rewards, and those with half of the answers right.

    Source of the claim: OpenRLHF's dynamic filtering, with a range.
    """
    figures: dict[str, dict[str, Figures]] = {"on": {}, "off": {}}
    shares: dict[str, float] = {}
    for policy, setting in zip(figures, make_table_settings(AWAY, seed), strict=True):
        steps, truth = enumerate_steps(setting, 4), setting.world.gradient(setting.theta)
        for name, filters in RANGES.items():
            result = estimate_gradients(_corrected(LeaveOneOut(), filters=filters), setting, steps)
            figures[policy][name] = compute_figures(result.gradient, result.weight, truth)
            shares[name] = float(steps.weight[result.weight > 0].sum())
    worth = {(p, name): f.snr * shares[name] for p, by_name in figures.items() for name, f in by_name.items()}
    holds = all(worth[p, "middle"] > max(worth[p, "unequal"], worth[p, "all"]) for p in figures)
    is_worth = all(worth[p, "unequal"] > worth[p, "all"] for p in figures)

    def row(policy: str, field: str) -> str:
        return join_numbers((getattr(f, field) for f in figures[policy].values()), ".3f", " / ")

    def worths(policy: str) -> str:
        return join_numbers((worth[policy, name] for name in RANGES), ".3f", " / ")

    return MeasuredClaim(
        "reward_range",
        "Groups that are neither nearly solved nor nearly unsolved teach more for the same number of samples.",
        holds,
        "All groups, those of unequal rewards and those with half of the answers right "
        f"({' / '.join(map(format_percent, shares.values()))} of what is sampled) give one group's gradient a signal-to-noise "
        f"ratio of {row('on', 'snr')} on-policy and {row('off', 'snr')} {AWAY:g} nats off-policy. For each sampled group that is "
        f"{worths('on')} and {worths('off')}: {'so it is' if holds else 'what the middle gains does not pay for its samples'}; "
        f"leaving out groups of equal rewards {'does' if is_worth else 'does not'}. The cosine with ∇J is {row('on', 'cosine')} "
        f"and {row('off', 'cosine')}: prompts count unequally.",
        {f"worth_{name}_{policy}": x for (policy, name), x in worth.items()}
        | {f"kept_{name}": share for name, share in shares.items()},
    )


def teacher_bonus(seed: int = 0) -> MeasuredClaim:
    """Leave-one-out with two samples and c·log(π_T/π_old), from a teacher that the reward has taught, and one beside it.

    The first is ∝ π_θ·exp(R/0.5), the second as far from π_θ in a random direction.
    """
    base, coefficients, size = one_prompt(3, seed=seed), (0.0, 0.1, 0.2, 0.5, 1.0), 2
    world = base.world
    taught = find_best_policy(base, 0.5)
    far = float(world.kl(base.theta, taught))
    teachers = {"taught": taught, "other": perturb_policy(world, base.theta, far, seed=seed + 2)}
    figures: dict[tuple[str, str], list[Figures]] = {}
    for name, teacher in teachers.items():
        on = replace(base, reference=teacher)
        for policy, setting in (("on", on), ("off", move_off_policy(on, AWAY, seed))):
            truth = world.gradient(setting.theta)
            figures[name, policy] = [
                _measure(_corrected(LeaveOneOut(), TeacherBonus(c)), setting, truth, size) for c in coefficients
            ]
    on = replace(base, reference=taught)
    less_kl = derivative(lambda x: world.objective(x) - world.kl(x, taught), base.theta)
    forms = {
        "to go": TeacherBonus(1.0, discount=1.0),
        "token": TeacherBonus(1.0),
        "clipped": TeacherBonus(1.0, clip=0.5),
    }
    bias = {name: _measure(_corrected(LeaveOneOut(), part), on, less_kl, size).bias for name, part in forms.items()}
    along = {key: [f.snr * f.cosine**2 for f in v] for key, v in figures.items()}
    holds = all(value > along["taught", p][0] for p in ("on", "off") for value in along["taught", p][1:])
    earns = {name: float(world.objective(theta)) for name, theta in (("policy", base.theta), *teachers.items())}

    def row(name: str, policy: str) -> str:
        return join_numbers((f.cosine for f in figures[name, policy]), ".2f", " / ")

    def worth(name: str, policy: str) -> str:
        return join_numbers(along[name, policy], ".2f", " / ")

    return MeasuredClaim(
        "teacher_bonus",
        "The log-ratio of a teacher that the reward has taught makes a gradient surer beside that reward.",
        holds,
        f"c = {join_numbers(coefficients, 'g', ' / ')} times the log-ratio of a teacher {far:.2f} nats away, whose reward is "
        f"{earns['taught']:.2f} instead of {earns['policy']:.2f}, gives a signal-to-noise ratio along ∇J of "
        f"{worth('taught', 'on')} on-policy and {worth('taught', 'off')} {AWAY:g} nats off-policy, at a cosine of "
        f"{row('taught', 'on')} and {row('taught', 'off')}. A teacher as far away in a random direction, with a reward of "
        f"{earns['other']:.2f}: {worth('other', 'on')} and {worth('other', 'off')}, at a cosine of {row('other', 'on')} and "
        f"{row('other', 'off')}, since the gradient turns to the teacher. Summed to go, the log-ratio is −∇KL(π‖π_T) (bias "
        f"{bias['to go']:.0e}); of each token alone it is {bias['token']:.2f} of ‖∇(J − KL)‖ away, clipped at 0.5 nats "
        f"{bias['clipped']:.2f}.",
        {
            f"{what} {name} {policy} {c:g}": x
            for (name, policy), v in figures.items()
            for i, c in enumerate(coefficients)
            for what, x in (("cosine", v[i].cosine), ("along", along[name, policy][i]))
        }
        | {f"bias_{name}": x for name, x in bias.items()},
        curves={
            "coefficient": coefficients,
            **{f"along_{name}": tuple(along[name, "on"]) for name in teachers},
            **{f"cosine_{name}": tuple(f.cosine for f in figures[name, "on"]) for name in teachers},
        },
    )
