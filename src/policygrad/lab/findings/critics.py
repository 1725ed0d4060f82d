"""Advantages from a critic of given error: bias against variance. Exact for each critic; the mean over critics has an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from policygrad.algorithms import REINFORCE
from policygrad.core.advantages import GroupMean, GroupStd, LeaveOneOut
from policygrad.core.algorithm import Algorithm
from policygrad.core.auxiliary import Critic
from policygrad.core.base import Advantage
from policygrad.core.gae import GAE, NStep
from policygrad.core.turns import (
    BiLevelGAE,
    GroupInGroup,
    MultiTurnGAE,
    TurnDiscount,
    TurnGAE,
    TurnLeaveOneOut,
    TurnReturn,
    turn_discount,
)
from policygrad.lab.episodes import Walk
from policygrad.lab.estimators import Estimates, WeightedSteps, enumerate_steps, estimate_gradients
from policygrad.lab.findings.advantages import with_advantage
from policygrad.lab.measurement import (
    Figures,
    Finding,
    Measurement,
    choose_text,
    compute_figures,
    format_small,
    measure_algorithm,
)
from policygrad.lab.setting import LabSetting
from policygrad.lab.worlds import one_prompt, two_answers, walk_setting

LAMBDAS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
ERRORS = (0.0, 0.1, 0.3)
"""Standard deviation of the critic's error at a state; rewards are 0 and 1."""
CRITICS = 4
NAMED: dict[str, Advantage] = {"TD": NStep(1), "2-step": NStep(2), "3-step": NStep(3), "Monte Carlo": NStep(0)}
STEPS = ("2-step", "3-step")
"""Those that are no end of the curve over λ."""


def gae_curve(seed: int = 0) -> Finding:
    """Bias, variance and error of GAE(1, λ) over λ, with n-step advantages beside it. Source: Schulman et al. 2016."""
    found = _measured(seed)
    mean = {key: table.mean(0).tolist() for key, table in found.items()}
    best = {error: min(LAMBDAS, key=lambda lam: mean[f"λ={lam:g}", error][2]) for error in ERRORS}
    biased, spread = ([mean[f"λ={lam:g}", ERRORS[2]][i] for lam in LAMBDAS] for i in (0, 1))
    gap = found["λ=1", ERRORS[2]][:, 2] - found[f"λ={best[ERRORS[2]]:g}", ERRORS[2]][:, 2]
    same = max(
        float((found[a, e] - found[b, e]).abs().max())
        for e in ERRORS
        for a, b in (("TD", "λ=0"), ("Monte Carlo", "λ=1"))
    )
    error = float(gap.std() / math.sqrt(CRITICS))
    unbiased = max(biased[-1], *(mean[f"λ={lam:g}", 0.0][0] for lam in LAMBDAS)) < 1e-9  # λ = 1, or an exact critic
    holds = unbiased and _falls(biased) and not _falls(spread) and spread[-1] > spread[0] and same < 1e-9
    return Finding(
        "gae_curve",
        "GAE's λ trades bias for variance: low λ trusts the critic, λ = 1 is unbiased whatever it says.",
        holds,
        f"With a critic that errs by {ERRORS[2]:g} the bias falls from {biased[0]:.2f} of ‖∇J‖ at λ = 0 to {biased[-1]:.0e} at "
        f"λ = 1 and the variance {choose_text(spread[-1] > spread[0], 'rises', 'falls')} from {spread[0]:.1f} to {spread[-1]:.1f} "
        f"of ‖∇J‖². The mean squared error of one completion's gradient is least at λ = "
        f"{', '.join(f'{best[e]:g}' for e in ERRORS)} for critics that err by {', '.join(f'{e:g}' for e in ERRORS)}. "
        f"At the largest error the best λ saves {float(gap.mean()):.2f} ± {error:.2f} against λ = 1 (over {CRITICS} critics); "
        f"TD has {_mse(mean, 'TD')}, two steps {_mse(mean, '2-step')}, three {_mse(mean, '3-step')} and Monte Carlo "
        f"{_mse(mean, 'Monte Carlo')}. TD is λ = 0 and Monte Carlo λ = 1 to {format_small(same)}.",
        {f"best_lambda_{e:g}": best[e] for e in ERRORS}
        | {"gap": float(gap.mean())}
        | {
            f"{w} {n} {e:g}": mean[n, e][i]
            for i, w in enumerate(("bias", "variance", "mse"))
            for n in NAMED
            for e in ERRORS
        },
        error=error,
        curves={
            "lambda": LAMBDAS,
            **{
                f"{what}_{error:g}": tuple(mean[f"λ={lam:g}", error][i] for lam in LAMBDAS)
                for i, what in enumerate(("bias", "variance", "mse"))
                for error in ERRORS
            },
            **{  # flat: an n-step advantage knows no λ
                f"{what}_{n}": (mean[n, ERRORS[-1]][i],) * len(LAMBDAS)
                for i, what in enumerate(("bias", "variance", "mse"))
                for n in STEPS
            },
        },
    )


def _measured(seed: int) -> dict[tuple[str, float], torch.Tensor]:
    """[bias, variance, mse] by link and critic's error, one row per critic."""
    links: dict[str, Advantage] = {f"λ={lam:g}": GAE(1.0, lam) for lam in LAMBDAS}
    links |= NAMED
    setting = one_prompt(length=4, seed=seed)
    steps = enumerate_steps(setting, 1)
    found: dict[tuple[str, float], torch.Tensor] = {}
    for error in ERRORS:
        for name, link in links.items():
            algorithm = Algorithm(advantage=(link,), critic=Critic())
            rows = []
            for critic in range(CRITICS if error else 1):
                f = measure_algorithm(
                    algorithm, replace(setting, critic_error=error, seed=seed * 100 + critic), steps
                ).figures
                rows.append((f.bias, f.variance, f.mse))
            found[name, error] = torch.tensor(rows, dtype=torch.float64)
    return found


def _mse(mean: dict[tuple[str, float], list[float]], name: str) -> str:
    return f"{mean[name, ERRORS[-1]][2]:.2f}"


def _falls(values: list[float]) -> bool:
    return all(a >= b for a, b in pairwise(values))


# Credit along the turns of a conversation: what each way of giving it costs in bias and variance. Exact for each critic.

GROUP = 2
"""Episodes of a step."""
GAMMA = 0.7
ERROR = 0.3
"""Of the critic, beside an outcome of 0 or 1."""
TURN_CRITICS = 2
TURN_LAMBDAS = (0.0, 0.5, 0.9, 1.0)
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


def turn_algorithm(name: str, psi: tuple[Advantage, ...]) -> Algorithm:
    """REINFORCE with this chain, and the unbiased sequence sum; with a critic where it reads values."""
    gamma = next((g for link in psi if (g := turn_discount(link)) is not None), None)
    return replace(REINFORCE, name=name, advantage=psi, critic=None if gamma is None else Critic(turn_gamma=gamma))


def measure_chain(name: str, psi: tuple[Advantage, ...], setting: LabSetting, steps: WeightedSteps) -> Measurement:
    """One chain in one setting, exact."""
    return measure_algorithm(turn_algorithm(name, psi), setting, steps)


def compare_discounted(
    psi: tuple[Advantage, ...], setting: LabSetting, steps: WeightedSteps, gamma: float, seed: int
) -> Figures:
    """The same against the gradient of E[Σ_n γ^n r_n]."""
    found = estimate_gradients(turn_algorithm("", psi), setting, steps)
    return compute_figures(
        found.gradient, found.weight, walk_setting(gamma=gamma, seed=seed).true_gradient(Algorithm())
    )


def turn_credit(seed: int = 0) -> Finding:
    """Outcome to all turns, the reward to go, siblings' turns, a discount per turn, and GAE over turns; γ = 1 but where said."""
    setting, costly = walk_setting(seed=seed), walk_setting(seed=seed, game=Walk(progress_reward=0.0))
    steps = enumerate_steps(setting, GROUP)
    exact = {name: measure_chain(name, psi, setting, steps).figures for name, psi in UNBIASED.items()}
    lost = {name: measure_chain(name, psi, costly, steps).figures for name, psi in UNBIASED.items()}
    alone, siblings, go, _, own = exact.values()
    states = measure_chain("", (GroupInGroup(gamma=1.0, std=False),), setting, steps).figures
    later = (TurnReturn(GAMMA),)
    against = [
        compare_discounted(psi, setting, steps, GAMMA, seed).bias for psi in (later, (*later, TurnDiscount(GAMMA)))
    ]
    away = measure_chain("", later, setting, steps).figures.bias
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
        f"{format_small(against[1])}. GAE over turns with a critic that errs by {ERROR:g} has a bias of {low:.2f} at λ = 0 and "
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


def _over_lambda(setting: LabSetting, seed: int) -> tuple[dict[str, tuple[float, ...]], dict[str, float]]:
    """(bias and variance over λ with an erring critic, the mean over a few; the largest bias with an exact one), G = 1."""
    steps = enumerate_steps(setting, 1)
    erring = [replace(setting, critic_error=ERROR, seed=seed * 100 + k) for k in range(TURN_CRITICS)]
    curves: dict[str, tuple[float, ...]] = {"lambda": TURN_LAMBDAS}
    sure = dict.fromkeys(FAMILIES, 0.0)
    for level, made in FAMILIES.items():
        rows = []
        for lam in TURN_LAMBDAS:
            sure[level] = max(sure[level], measure_chain("", (made(lam),), setting, steps).figures.bias)
            each = [measure_chain("", (made(lam),), one, steps).figures for one in erring]
            rows.append(torch.tensor([(f.bias, f.variance) for f in each], dtype=torch.float64).mean(0).tolist())
        for i, what in enumerate(("bias", "variance")):
            curves[f"{what}_{level}"] = tuple(row[i] for row in rows)
    return curves, sure


def measure_turn_table(size: int = 3, seed: int = 0) -> tuple[list[Measurement], list[Measurement]]:
    """(chains without a critic, and chains with one that errs) for the lab's page on turns."""
    setting = walk_setting(seed=seed)
    erring = replace(setting, critic_error=ERROR, seed=seed)
    steps = enumerate_steps(setting, size)
    discount = {f"TurnReturn({GAMMA:g})": (TurnReturn(GAMMA),)}
    plain = [measure_chain(name, psi, setting, steps) for name, psi in (UNBIASED | discount | COMPARED).items()]
    links: list[Advantage] = [GAE()]
    links += [made(lam) for made in FAMILIES.values() for lam in (0.0, 0.9, 1.0)]
    return plain, [measure_chain(_named(link), (link,), erring, steps) for link in links]


def _named(link: Advantage) -> str:
    given = {"turn_lam": getattr(link, "turn_lam", None), "lam": getattr(link, "lam", None)}
    return f"{type(link).__name__}({', '.join(f'{k}={v:g}' for k, v in given.items() if v is not None)})"


# What Adam keeps of E[Δθ]ᵀ∇J ≥ 0, which every step of fixed size along an unbiased gradient has.

CHAINS, ADAM_STEPS = 512, 300


def adam(seed: int = 0) -> Finding:
    """E[Δθ]ᵀ∇J/(E‖Δθ‖·‖∇J‖) of Adam's first step (exact) and of a late one at a θ held still (sampled), in two worlds.

    In the second an answer of probability 0.1 pays 1 and the other 0.2, without a baseline: mostly small gradients in the
    wrong direction, seldom a large one in the right.
    """
    usual, skewed = one_prompt(seed=seed), two_answers(0.1, rewards=(0.2, 1.0))
    plain = replace(REINFORCE, advantage=())
    worlds = {"usual": (usual, estimate_gradients(with_advantage(LeaveOneOut()), usual, enumerate_steps(usual, 4)))}
    worlds["skewed"] = (skewed, estimate_gradients(plain, skewed, enumerate_steps(skewed, 1)))
    first, late, error, gradient = {}, {}, {}, {}
    for name, (setting, found) in worlds.items():
        truth = _unit(setting)
        delta = _adam(found.gradient[None])
        first[name] = float(found.weight @ (delta @ truth)) / float(found.weight @ delta.norm(dim=1))
        gradient[name] = float(found.mean @ truth) / float(found.weight @ found.gradient.norm(dim=1))
        moves = _adam(_chains(found, seed))
        along = moves @ truth / moves.norm(dim=1).mean()
        late[name], error[name] = float(along.mean()), float(along.std() / math.sqrt(CHAINS))
    holds = all(first[name] >= 0 and late[name] - 2 * error[name] >= 0 for name in worlds)
    return Finding(
        "adam",
        "Adam's per-coordinate steps keep E[Δθ]ᵀ∇J ≥ 0.",
        holds,
        f"As a share of the mean step's length, the gradient goes {gradient['usual']:.3f} along ∇J in a usual world; Adam's first "
        f"step {first['usual']:+.3f}, a late one {late['usual']:+.3f} (± {error['usual']:.3f}). With seldom, large right "
        f"gradients: {gradient['skewed']:+.3f}, {first['skewed']:+.3f} and {late['skewed']:+.3f} (± {error['skewed']:.3f}). "
        f"{choose_text(holds, 'It holds in both', 'The guarantee is lost where a coordinate’s sign is mostly wrong')}: the first step "
        f"is the gradient's sign, and only averaging brings its size back. No theorem falls: E[Δθ]ᵀ∇J ≥ 0 is said of steps α·g "
        f"with a fixed α, and Adam's α depends on g.",
        {
            f"{what}_{name}": v[name]
            for what, v in (("gradient", gradient), ("first", first), ("late", late))
            for name in worlds
        },
        error=max(error.values()),
    )


def _unit(setting: LabSetting) -> Tensor:
    truth = setting.world.gradient(setting.theta)
    unit: Tensor = truth / truth.norm()
    return unit


def _chains(found: Estimates, seed: int) -> Tensor:
    """[steps, chains, P] gradients drawn independently."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(found.weight, ADAM_STEPS * CHAINS, replacement=True, generator=generator)
    return found.gradient[drawn].reshape(ADAM_STEPS, CHAINS, -1)


def _adam(gradients: Tensor) -> Tensor:
    """[chains, P] the last step of torch's Adam after these gradients of J, θ held still; it works coordinate by coordinate."""
    parameter = torch.zeros(gradients.shape[1:], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=1.0)
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = -gradient
        optimizer.step()
    return parameter.detach() - before
