"""Credit along the turns of a conversation: what each way of giving it costs in bias and variance. Exact for each critic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from policygrad.algorithms import REINFORCE
from policygrad.core.advantages import GroupMean, GroupStd, LeaveOneOut
from policygrad.core.algorithm import Algorithm
from policygrad.core.critic import Critic
from policygrad.core.protocols import Advantage
from policygrad.core.turn_values import BiLevelGAE, MultiTurnGAE, TurnGAE, per_turn
from policygrad.core.turns import GroupInGroup, TurnDiscount, TurnLeaveOneOut, TurnReturn
from policygrad.core.values import GAE
from policygrad.lab.estimators import estimates
from policygrad.lab.finding import Finding, tiny, verdict
from policygrad.lab.groups import WeightedSteps, all_steps
from policygrad.lab.measurement import Figures, Measured, figures, measure
from policygrad.lab.setting import Setting
from policygrad.lab.worlds import walk

GROUP = 2
"""Episodes of a step."""
GAMMA = 0.7
ERROR = 0.3
"""Of the critic, beside an outcome of 0 or 1."""
CRITICS = 4
LAMBDAS = (0.0, 0.5, 0.9, 1.0)
EXACT = 1e-9
UNBIASED: dict[str, tuple[Advantage, ...]] = {
    "outcome to all turns": (),
    "LeaveOneOut": (LeaveOneOut(),),
    "TurnReturn": (TurnReturn(),),
    "TurnReturn, LeaveOneOut": (TurnReturn(), LeaveOneOut()),
    "TurnReturn, TurnLeaveOneOut": (TurnReturn(), TurnLeaveOneOut()),
}
"""Chains whose expectation is ∇J by a theorem."""
COMPARED: dict[str, tuple[Advantage, ...]] = {
    "GroupMean, GroupStd": (GroupMean(), GroupStd()),
    "GroupInGroup(std=False)": (GroupInGroup(gamma=1.0, std=False),),
    "GroupInGroup(gamma=1)": (GroupInGroup(gamma=1.0),),
    "GroupInGroup": (GroupInGroup(),),
}
"""Chains that compare an episode with its group."""
FAMILIES: dict[str, Callable[[float], Advantage]] = {
    "turn": lambda lam: TurnGAE(lam=lam),
    "token": lambda lam: MultiTurnGAE(lam=lam),
    "both": lambda lam: BiLevelGAE(lam=lam, turn_lam=lam),
}
"""λ -> an advantage from a critic, at the level of turns, of tokens, of both."""


def estimator(name: str, psi: tuple[Advantage, ...]) -> Algorithm:
    """REINFORCE with this chain, and the unbiased sequence sum; with a critic where it reads values."""
    gamma = next((g for link in psi if (g := per_turn(link)) is not None), None)
    return replace(REINFORCE, name=name, psi=psi, critic=None if gamma is None else Critic(turn_gamma=gamma))


def measured(name: str, psi: tuple[Advantage, ...], setting: Setting, steps: WeightedSteps) -> Measured:
    """One chain in one setting, exact."""
    return measure(estimator(name, psi), setting, steps)


def discounted(psi: tuple[Advantage, ...], setting: Setting, steps: WeightedSteps, gamma: float, seed: int) -> Figures:
    """The same against the gradient of E[Σ_n γ^n r_n]."""
    found = estimates(estimator("", psi), setting, steps)
    return figures(found.gradient, found.weight, walk(gamma=gamma, seed=seed).truth(Algorithm()))


def turn_credit(seed: int = 0) -> Finding:
    """Outcome to all turns, the reward to go, siblings' turns, a discount per turn, and GAE over turns; γ = 1 but where said."""
    setting = walk(seed=seed)
    steps = all_steps(setting, GROUP)
    exact = {name: measured(name, psi, setting, steps).figures for name, psi in (UNBIASED | COMPARED).items()}
    alone, go, own = (exact[name] for name in ("outcome to all turns", "TurnReturn", "TurnReturn, TurnLeaveOneOut"))
    bias, of_groups = max(exact[name].bias for name in UNBIASED), exact["GroupInGroup(std=False)"]
    later = (TurnReturn(GAMMA),)
    against = [discounted(psi, setting, steps, GAMMA, seed).bias for psi in (later, (*later, TurnDiscount(GAMMA)))]
    away = measured("", later, setting, steps).figures.bias
    curves, sure = _over_lambda(setting, seed)
    (low, *_, high), (least, *_, most) = curves["bias_turn"], curves["variance_turn"]
    biases = (bias, against[1], sure, *(curves[f"bias_{level}"][-1] for level in FAMILIES))
    return Finding(
        "turn_credit",
        "Rewards to go per turn cut variance against the outcome at all turns, without bias; a critic of turns trades one for "
        "the other.",
        max(biases) < EXACT and go.variance < alone.variance and low > high and least < most,
        f"In a walk of up to three turns ({setting.world.tree.size} episodes, groups of {GROUP}) the outcome at all turns has a "
        f"variance of {alone.variance:.2f} of ‖∇J‖², the reward to go {go.variance:.2f}, less its siblings' at the same turn "
        f"{own.variance:.2f}; the largest bias of the unbiased chains is {bias:.0e}. GiGPO's sum of an episode's and a state's "
        f"comparison (F = 1) has {of_groups.variance:.2f} at {of_groups.scale:.2f} times ∇J's length and a cosine of "
        f"{of_groups.cosine:.4f}. A discount of {GAMMA:g} per turn is {away:.2f} of ‖∇J‖ away from ∇J and {against[0]:.2f} from "
        f"the gradient of the discounted J, which {verdict(against[1] < EXACT, 'it is', 'it is not')} with γ^n "
        f"({tiny(against[1])}). GAE over turns with a critic that errs by {ERROR:g} has a bias of {low:.2f} at λ = 0 and "
        f"{high:.0e} at λ = 1, and a variance of {least:.2f} and {most:.2f}, one episode at a time; an exact critic leaves a bias "
        f"of at most {sure:.0e} at any λ.",
        {f"{what} {name}": getattr(f, what) for name, f in exact.items() for what in ("bias", "variance", "scale")}
        | {"discounted": away, "discounted_own": against[0], "discounted_weighed": against[1], "exact_critic": sure},
        curves=curves,
    )


def _over_lambda(setting: Setting, seed: int) -> tuple[dict[str, tuple[float, ...]], float]:
    """(bias and variance over λ with an erring critic, the mean over a few; the largest bias with an exact one), G = 1."""
    steps = all_steps(setting, 1)
    erring = [replace(setting, critic_error=ERROR, seed=seed * 100 + k) for k in range(CRITICS)]
    curves: dict[str, tuple[float, ...]] = {"lambda": LAMBDAS}
    sure = 0.0
    for level, made in FAMILIES.items():
        rows = []
        for lam in LAMBDAS:
            sure = max(sure, measured("", (made(lam),), setting, steps).figures.bias)
            each = [measured("", (made(lam),), one, steps).figures for one in erring]
            rows.append(torch.tensor([(f.bias, f.variance) for f in each], dtype=torch.float64).mean(0).tolist())
        for i, what in enumerate(("bias", "variance")):
            curves[f"{what}_{level}"] = tuple(row[i] for row in rows)
    return curves, sure


def table(size: int = 3, seed: int = 0) -> tuple[list[Measured], list[Measured]]:
    """(chains without a critic, and chains with one that errs) for the lab's page on turns."""
    setting = walk(seed=seed)
    erring = replace(setting, critic_error=ERROR, seed=seed)
    steps = all_steps(setting, size)
    discount = {f"TurnReturn({GAMMA:g})": (TurnReturn(GAMMA),)}
    plain = [measured(name, psi, setting, steps) for name, psi in (UNBIASED | discount | COMPARED).items()]
    links: list[Advantage] = [GAE()]
    links += [made(lam) for made in FAMILIES.values() for lam in (0.0, 0.9, 1.0)]
    return plain, [measured(_named(link), (link,), erring, steps) for link in links]


def _named(link: Advantage) -> str:
    given = {"turn_lam": getattr(link, "turn_lam", None), "lam": getattr(link, "lam", None)}
    return f"{type(link).__name__}({', '.join(f'{k}={v:g}' for k, v in given.items() if v is not None)})"
