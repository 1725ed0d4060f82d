"""Credit along the turns of a conversation: what each way of giving it costs in bias and variance. Exact for each critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from policygrad.lab.episodes import Walk
from policygrad.lab.estimators import estimates
from policygrad.lab.finding import Finding, tiny
from policygrad.lab.groups import WeightedSteps, all_steps
from policygrad.lab.measurement import Figures, Measured, figures, measure
from policygrad.lab.setting import Setting
from policygrad.lab.worlds import walk

GROUP = 2
"""Episodes of a step."""
GAMMA = 0.7
ERROR = 0.3
"""Of the critic, beside an outcome of 0 or 1."""
CRITICS = 2
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
    setting, costly = walk(seed=seed), walk(seed=seed, game=Walk(progress=0.0))
    steps = all_steps(setting, GROUP)
    exact = {name: measured(name, psi, setting, steps).figures for name, psi in UNBIASED.items()}
    lost = {name: measured(name, psi, costly, steps).figures for name, psi in UNBIASED.items()}
    alone, siblings, go, _, own = exact.values()
    states = measured("", (GroupInGroup(gamma=1.0, std=False),), setting, steps).figures
    later = (TurnReturn(GAMMA),)
    against = [discounted(psi, setting, steps, GAMMA, seed).bias for psi in (later, (*later, TurnDiscount(GAMMA)))]
    away = measured("", later, setting, steps).figures.bias
    curves, sure = _over_lambda(setting, seed)
    (low, *_, high), (least, *_, most) = curves["bias_turn"], curves["variance_turn"]
    bias = max(f.bias for f in (*exact.values(), *lost.values()))
    unbiased = (
        max(bias, against[1], sure["turn"], sure["token"], *(curves[f"bias_{level}"][-1] for level in FAMILIES)) < EXACT
    )
    return Finding(
        "turn_credit",
        "Rewards to go per turn cut variance against the outcome at all turns, without bias; a critic of turns trades one for "
        "the other.",
        unbiased and go.variance < alone.variance and own.variance < siblings.variance and low > high and least < most,
        f"In a walk of up to three turns ({setting.world.tree.size} episodes, groups of {GROUP}) the variance is "
        f"{alone.variance:.1f} of ‖∇J‖² with the outcome at all turns and {go.variance:.1f} with the reward to go; "
        f"{siblings.variance:.1f} and {own.variance:.1f} less the siblings' episodes, or their same turns. Where turns only cost "
        f"something it is {_variances(lost, 'outcome to all turns', 'TurnReturn')}, and "
        f"{_variances(lost, 'LeaveOneOut', 'TurnReturn, TurnLeaveOneOut')} less siblings': what was lost before can stand in for a "
        "baseline. "
        f"The largest bias of all these is {bias:.0e}. GiGPO's sum of two comparisons (F = 1) has {states.variance:.1f}, at "
        f"{states.scale:.2f} times ∇J's length and a cosine of {states.cosine:.4f}. A discount of {GAMMA:g} per turn is {away:.2f} "
        f"of ‖∇J‖ away from ∇J and {against[0]:.2f} from the gradient of the discounted J, which it is with γ^n to "
        f"{tiny(against[1])}. GAE over turns with a critic that errs by {ERROR:g} has a bias of {low:.2f} at λ = 0 and "
        f"{high:.0e} at λ = 1, and a variance of {least:.1f} and {most:.1f}, one episode at a time. An exact critic leaves no bias "
        f"over turns or tokens ({max(sure['turn'], sure['token']):.0e}), and up to {sure['both']:.2f} at both levels: which token "
        "is a turn's last is the policy's own choice.",
        {f"{what} {name}": getattr(f, what) for name, f in exact.items() for what in ("bias", "variance")}
        | {f"lost {name}": f.variance for name, f in lost.items()}
        | {
            "discounted": away,
            "discounted_own": against[0],
            "discounted_weighed": against[1],
            "states": states.variance,
        }
        | {f"exact_{level}": x for level, x in sure.items()},
        curves=curves,
    )


def _variances(found: Mapping[str, Figures], *names: str) -> str:
    return " and ".join(f"{found[name].variance:.1f}" for name in names)


def _over_lambda(setting: Setting, seed: int) -> tuple[dict[str, tuple[float, ...]], dict[str, float]]:
    """(bias and variance over λ with an erring critic, the mean over a few; the largest bias with an exact one), G = 1."""
    steps = all_steps(setting, 1)
    erring = [replace(setting, critic_error=ERROR, seed=seed * 100 + k) for k in range(CRITICS)]
    curves: dict[str, tuple[float, ...]] = {"lambda": LAMBDAS}
    sure = dict.fromkeys(FAMILIES, 0.0)
    for level, made in FAMILIES.items():
        rows = []
        for lam in LAMBDAS:
            sure[level] = max(sure[level], measured("", (made(lam),), setting, steps).figures.bias)
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
