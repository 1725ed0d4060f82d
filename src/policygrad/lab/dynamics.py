"""How training fails: short runs in which θ moves by the exact expectation of the algorithm's updates over all groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from policygrad.algorithms import DR_GRPO, GRPO
from policygrad.core.advantages import LeaveOneOut
from policygrad.core.aggregation import FixedLength, SequenceMean
from policygrad.core.algorithm import Algorithm
from policygrad.core.base import Aggregation, Term
from policygrad.core.batch import Batch, Forward
from policygrad.core.gates import Clip
from policygrad.core.objective import surrogate
from policygrad.core.shaping import KLInReward
from policygrad.core.terms import KLToReference
from policygrad.core.updates import GradientSteps
from policygrad.errors import ConfigError
from policygrad.lab.estimators import compute_decisions, enumerate_steps, select_forward, select_step_tokens
from policygrad.lab.findings.advantages import with_advantage
from policygrad.lab.measurement import MeasuredClaim
from policygrad.lab.policies import TabularPolicy
from policygrad.lab.sequences import PrefixTree, World, sample_normal
from policygrad.lab.setting import LabSetting
from policygrad.lab.worlds import one_prompt

TrackedQuantities = Mapping[str, Callable[[Tensor], Tensor]]  # quantities of θ by name


def train_in_expectation(
    algorithm: Algorithm,
    setting: LabSetting,
    size: int,
    lr: float,
    rollouts: int,
    track: TrackedQuantities,
) -> dict[str, tuple[float, ...]]:
    """Take `rollouts` expected steps of plain gradient ascent from `setting.theta`.

    In each, all groups of G completions are formed, with their probability under the θ that starts the rollout; the algorithm
    makes K = `algorithm.update_rule.updates` updates on each group separately, as in training; θ moves by their mean.

    Returns:
        The tracked quantities of θ before the first rollout and after each.

    Raises:
        ConfigError: More than one prompt, a policy that is not a table, or an update rule other than gradient steps.
    """
    thetas = [setting.theta]
    for _ in range(rollouts):
        thetas.append(thetas[-1] + expected_update(algorithm, replace(setting, theta=thetas[-1]), size, lr))
    return {name: tuple(float(f(theta)) for theta in thetas) for name, f in track.items()}


def expected_update(algorithm: Algorithm, setting: LabSetting, size: int, lr: float) -> Tensor:
    """[P] E[Δθ] of a rollout of one prompt, sampled at θ."""
    if setting.world.prompts != 1 or not isinstance(setting.world.policy, TabularPolicy):
        raise ConfigError("an expected rollout needs a setting with one prompt and a TabularPolicy")
    if not algorithm.update_rule.uses_lr:
        raise ConfigError(f"{type(algorithm.update_rule).__name__} has no learning rate: use GradientSteps")
    setting = replace(setting, old=setting.theta)
    algorithm, steps, world = setting.prepare(algorithm), enumerate_steps(setting, size), setting.world
    decisions, groups = compute_decisions(algorithm, setting, steps), torch.arange(len(steps.rows))
    mask, psi, coef = decisions.at(groups)
    batch = setting.enumerate_batch(algorithm).select(steps.rows.flatten())
    batch = replace(batch, mask=mask, group=groups.repeat_interleave(size))
    # Each of the M groups moves a separate θ: as M prompts with separate parameters.
    number = len(groups)
    copies = replace(
        setting,
        world=World(world.tree, world.reward.expand(number, -1), TabularPolicy(world.tree, number)),
        old=setting.theta.repeat(number),
        reference=None if setting.reference is None else setting.reference.repeat(number),
    )
    rows = (steps.rows + groups[:, None] * world.tree.size).flatten()
    thetas = setting.theta.repeat(number)
    for _ in range(algorithm.update_rule.updates):
        leaf = thetas.clone().requires_grad_()
        out = select_forward(replace(copies, theta=leaf).forward(algorithm), rows)
        loss = surrogate(out, select_step_tokens(out, batch, psi, algorithm, size), psi, algorithm, coef)
        thetas = thetas - lr * torch.autograd.grad(loss, leaf)[0]
    return decisions.weight @ (thetas.reshape(number, -1) - setting.theta)


def interpolate(run: Mapping[str, Sequence[float]], name: str, level: float, over: str) -> float:
    """Return `name` where `over` first reaches `level`, interpolated between rollouts; its last value if it never does."""
    for (x0, y0), (x1, y1) in pairwise(zip(run[over], run[name], strict=True)):
        if x1 >= level:
            return y0 + (y1 - y0) * (level - x0) / (x1 - x0)
    return run[name][-1]


JITTER = 0.05  # standard deviation of the seed's noise on the initial logits, for worlds that are not random themselves


def _make_setting(tree: PrefixTree, reward: Tensor, probability: list[list[float]], seed: int) -> LabSetting:
    """Return one prompt and a table with these token probabilities at each prefix, with the seed's noise."""
    theta = torch.tensor(probability, dtype=torch.float64).log().flatten()
    return LabSetting(World(tree, reward[None], TabularPolicy(tree)), theta + sample_normal(len(theta), JITTER, seed))


def _entropy(world: World, state: int, theta: Tensor) -> Tensor:
    """[] nats, at a prefix."""
    logp = world.conditionals(theta)[state]
    return -(logp.exp() * logp).sum()


def entropy_collapse(seed: int = 0) -> MeasuredClaim:
    """Two tokens: the first decides the reward, the second does not matter. 16 updates per rollout, three upper clips.

    Advantages apply to complete completions, so the second token is pushed too, up in right answers and down in wrong ones. Without
    a clip this evens out; with one, further increases are cut off. Source of the remedy: Yu et al. 2025 (DAPO), sec. 3.1.
    """
    tree, rollouts = PrefixTree(4, 2), 50
    right = torch.tensor([float(word[:1] == (1,)) for word in tree.completions]).double()
    setting = _make_setting(tree, right, [[0.1, 0.1, 0.5, 0.3], *[[0.5, 0.3, 0.15, 0.05]] * 3], seed)
    world = setting.world
    track: TrackedQuantities = {
        "J": world.objective,
        "decides": partial(_entropy, world, 0),
        "idle": partial(_entropy, world, 1),
    }
    step, highs = GradientSteps(epochs=16), {"0.2": 0.2, "0.28": 0.28, "none": 1e6}
    runs = {
        name: train_in_expectation(
            replace(GRPO, terms=(), gate=Clip(0.2, high), update_rule=step), setting, 2, 0.2, rollouts, track
        )
        for name, high in highs.items()
    }
    start, end = runs["0.2"]["idle"][0], {name: run["idle"][-1] for name, run in runs.items()}
    at = {name: interpolate(run, "decides", 0.9, "J") for name, run in runs.items()}
    holds = end["0.2"] < start and end["0.2"] < end["0.28"]
    remedy = (
        "clip-higher slows the collapse and does not end it" if end["0.28"] < start else "clip-higher keeps the entropy"
    )
    return MeasuredClaim(
        "entropy_collapse",
        "With several updates per rollout a clip of 0.2 on both sides drains entropy; clip-higher keeps more of it.",
        holds,
        f"At a token that the reward does not depend on, entropy goes in {rollouts} rollouts from {start:.3f} nats to "
        f"{end['0.2']:.3f} under clip 0.2/0.2, {end['0.28']:.3f} under 0.2/0.28 and {end['none']:.3f} without an upper bound: "
        f"{remedy if holds else 'not as claimed'}. At the deciding token all spend the same entropy on J: "
        f"{at['0.2']:.3f}, {at['0.28']:.3f} and {at['none']:.3f} nats where J = 0.9.",
        {"start": start} | {f"end_{name}": x for name, x in end.items()} | {f"decides_{n}": x for n, x in at.items()},
        curves={"rollout": tuple(map(float, range(rollouts + 1)))}
        | {f"idle_{name}": run["idle"] for name, run in runs.items()}
        | {f"J_{name}": run["J"] for name, run in runs.items()},
    )


def length_drift(seed: int = 0) -> MeasuredClaim:
    """Dr. GRPO with its own fixed length, and with GRPO's sequence mean. Source: Liu et al. 2025 (Dr. GRPO), sec. 3.1."""
    setting, rollouts = one_prompt(4, 0.3, seed=seed), 40
    world = setting.world
    right = (world.reward > 0.5).double()
    track = {
        "J": world.objective,
        "right": lambda theta: world.mean_length(theta, right),
        "wrong": lambda theta: world.mean_length(theta, 1 - right),
    }
    kinds: dict[str, tuple[Aggregation, float]] = {"sequence": (SequenceMean(), 3.0), "fixed": (FixedLength(), 5.0)}
    runs = {
        name: train_in_expectation(replace(DR_GRPO, aggregation=kind), setting, 2, lr, rollouts, track)
        for name, (kind, lr) in kinds.items()
    }
    low, high = runs["fixed"]["J"][0], min(run["J"][-1] for run in runs.values())
    grid = tuple(low + (high - low) * i / 16 for i in range(17))
    curves = {
        f"{what}_{name}": tuple(interpolate(run, what, j, "J") if i else run[what][0] for i, j in enumerate(grid))
        for what in ("wrong", "right")
        for name, run in runs.items()
    }
    wrong, shorter = (curves[f"{what}_sequence"][-1] - curves[f"{what}_fixed"][-1] for what in ("wrong", "right"))
    holds = wrong > 0 > shorter
    return MeasuredClaim(
        "length_drift",
        "Trained with the sequence mean, wrong answers grow longer and right ones shorter than with a fixed length.",
        holds,
        f"From J = {low:.2f} to {high:.2f} wrong answers go from {curves['wrong_fixed'][0]:.2f} to "
        f"{curves['wrong_sequence'][-1]:.2f} tokens under the sequence mean and to {curves['wrong_fixed'][-1]:.2f} under the fixed "
        f"length, {abs(wrong):.3f} {'more' if wrong > 0 else 'less'}; right ones from {curves['right_fixed'][0]:.2f} to "
        f"{curves['right_sequence'][-1]:.3f} and {curves['right_fixed'][-1]:.3f}, {abs(shorter):.3f} "
        f"{'less' if shorter < 0 else 'more'}.",
        {"wrong": wrong, "right": shorter},
        curves={"J": grid, **curves},
    )


@dataclass(frozen=True)
class K1InLoss(Term):
    """k = −β, the derivative of −β·(log π_θ − log π_ref), which the library refuses: E Σ_t ∇log π = 0, so it has no effect."""

    beta: float
    aggregation: Aggregation | None = None

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return torch.full_like(batch.mask, -self.beta, dtype=torch.float64)

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        """Return the value except for β·log π_ref, which does not depend on θ."""
        return -self.beta * out.logp.detach()


def k1_in_loss(seed: int = 0) -> MeasuredClaim:
    """KL(π‖π_ref) of whole completions along runs with β = 0.3 in different places; π_ref is where they start."""
    setting, beta, rollouts = one_prompt(2, 0.3, seed=seed), 0.3, 40
    world, start = setting.world, setting.theta
    setting = replace(setting, reference=start)
    algorithms = {
        "none": with_advantage(LeaveOneOut()),
        "reward": with_advantage(LeaveOneOut(), shaping=(KLInReward(beta),)),
        "k1": with_advantage(LeaveOneOut(), terms=(K1InLoss(beta),)),
        "k2": with_advantage(LeaveOneOut(), terms=(KLToReference(beta, "k2"),)),
    }
    track = {"J": world.objective, "kl": lambda theta: world.kl(theta, start)}
    runs = {name: train_in_expectation(a, setting, 2, 1.0, rollouts, track) for name, a in algorithms.items()}
    end = {name: run["kl"][-1] for name, run in runs.items()}
    difference = max(abs(a - b) for a, b in zip(runs["k1"]["kl"], runs["none"]["kl"], strict=True))
    holds = difference < 1e-10 and max(end["k2"], end["reward"]) < end["none"]
    return MeasuredClaim(
        "k1_in_loss",
        "k1 in the loss does nothing; k2 in the loss and k1 in the reward hold the policy near the reference.",
        holds,
        f"After {rollouts} rollouts with β = {beta:g} the policy is {end['k1']:.3f} nats from the reference with k1 in the loss "
        f"and {end['none']:.3f} without any KL, the same run to {difference:.0e}; {end['k2']:.3f} with k2 in the loss and "
        f"{end['reward']:.3f} with k1 in the reward.",
        {f"kl_{name}": x for name, x in end.items()} | {"apart": difference},
        curves={
            "rollout": tuple(map(float, range(rollouts + 1))),
            **{f"kl_{name}": run["kl"] for name, run in runs.items()},
        },
    )


def reward_hacking(seed: int = 0) -> MeasuredClaim:
    """A proxy that pays 1 for the right answer and 0.8 for every token, right or wrong: training with and without a KL."""
    tree, rollouts, beta, bonus = PrefixTree(3, 3), 100, 0.4, 0.8
    true = torch.tensor([float(word == (1,)) for word in tree.completions]).double()
    proxy = true + bonus * torch.tensor([len(word) for word in tree.completions]).double()
    setting = _make_setting(tree, proxy, [[0.7, 0.18, 0.12]] * len(tree.prefixes), seed)
    setting = replace(setting, reference=setting.theta)
    world = setting.world
    track = {"proxy": world.objective, "true": lambda theta: world.objective(theta, true[None])}
    free, kl = (
        train_in_expectation(with_advantage(LeaveOneOut(), shaping=shaping), setting, 2, 0.5, rollouts, track)
        for shaping in ((), (KLInReward(beta),))
    )
    peak = max(free["true"])
    holds = free["true"][-1] < peak / 2 and free["proxy"][-1] > free["proxy"][0] and kl["true"][-1] > free["true"][-1]
    best = max(kl["true"])
    price = f"close to its best, {best:.2f}" if kl["true"][-1] > 0.8 * best else f"past its best, {best:.2f}"
    return MeasuredClaim(
        "reward_hacking",
        "Without a KL a flawed reward is hacked: the proxy rises while the true reward falls. A KL to the reference holds it.",
        holds,
        f"The proxy pays {bonus:g} a token beside 1 for the right answer. Without a KL it goes from {free['proxy'][0]:.2f} to "
        f"{free['proxy'][-1]:.2f} in {rollouts} rollouts, while the true reward climbs from {free['true'][0]:.2f} to {peak:.2f} "
        f"after {free['true'].index(peak)} and falls to {free['true'][-1]:.2f}. With β = {beta:g} in the reward it ends at "
        f"{kl['true'][-1]:.2f}, {price}, and the proxy at {kl['proxy'][-1]:.2f}.",
        {"peak": peak, "true_free": free["true"][-1], "true_kl": kl["true"][-1], "proxy_free": free["proxy"][-1]},
        curves={"rollout": tuple(map(float, range(rollouts + 1)))}
        | {f"{what}_{name}": run[what] for what in ("true", "proxy") for name, run in (("free", free), ("kl", kl))},
    )
