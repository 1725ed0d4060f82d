"""Advantages from a critic of given error, credit along turns, and Adam. Exact for each critic; means over critics are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from policygrad.core.advantages import GroupMean, GroupStd, LeaveOneOut
from policygrad.core.algorithm import Algorithm
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
)
from policygrad.lab.episodes import Walk
from policygrad.lab.estimators import enumerate_steps, estimate_gradients
from policygrad.lab.findings.advantages import exact_figures, with_advantage
from policygrad.lab.measurement import (
    MeasuredClaim,
    compute_figures,
    format_small,
    join_numbers,
)
from policygrad.lab.setting import LabSetting
from policygrad.lab.worlds import one_prompt, two_answers, walk_setting

LAMBDAS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
ERRORS = (0.0, 0.1, 0.3)  # standard deviation of the critic's error at a state; rewards are 0 and 1
CRITICS = 4
NSTEP: dict[str, Advantage] = {"TD": NStep(1), "2-step": NStep(2), "3-step": NStep(3), "Monte Carlo": NStep(0)}
KINDS = ("bias", "variance", "mse")


def gae_curve(seed: int = 0) -> MeasuredClaim:
    """Bias, variance and error of GAE(1, λ) over λ, with n-step advantages beside it. Source: Schulman et al. 2016."""
    links: dict[str, Advantage] = {f"λ={lam:g}": GAE(1.0, lam) for lam in LAMBDAS} | NSTEP
    setting = one_prompt(length=4, seed=seed)
    figures = {
        (name, error): _measure_critics(link, setting, error, CRITICS if error else 1, seed)
        for error in ERRORS
        for name, link in links.items()
    }
    mean = {key: table.mean(0).tolist() for key, table in figures.items()}
    best = {error: min(LAMBDAS, key=lambda lam: mean[f"λ={lam:g}", error][2]) for error in ERRORS}
    large = ERRORS[-1]
    bias, spread = ([mean[f"λ={lam:g}", large][i] for lam in LAMBDAS] for i in (0, 1))
    gap = figures["λ=1", large][:, 2] - figures[f"λ={best[large]:g}", large][:, 2]
    difference = max(
        float((figures[a, error] - figures[b, error]).abs().max())
        for error in ERRORS
        for a, b in (("TD", "λ=0"), ("Monte Carlo", "λ=1"))
    )
    standard_error = float(gap.std() / math.sqrt(CRITICS))
    unbiased = max(bias[-1], *(mean[f"λ={lam:g}", 0.0][0] for lam in LAMBDAS)) < 1e-9  # λ = 1, or an exact critic
    trades = all(a >= b for a, b in pairwise(bias)) and spread[-1] > spread[0]
    mse = {name: f"{mean[name, large][2]:.2f}" for name in NSTEP}
    return MeasuredClaim(
        "gae_curve",
        "GAE's λ trades bias for variance: low λ trusts the critic, λ = 1 is unbiased whatever it says.",
        unbiased and trades and difference < 1e-9,
        f"With a critic that errs by {large:g} the bias falls from {bias[0]:.2f} of ‖∇J‖ at λ = 0 to {bias[-1]:.0e} at "
        f"λ = 1 and the variance {'rises' if spread[-1] > spread[0] else 'falls'} from {spread[0]:.1f} to {spread[-1]:.1f} "
        f"of ‖∇J‖². The mean squared error of one completion's gradient is least at λ = {join_numbers(best.values(), 'g')} for "
        f"critics that err by {join_numbers(ERRORS, 'g')}. At the largest error the best λ saves {float(gap.mean()):.2f} ± "
        f"{standard_error:.2f} against λ = 1 (over {CRITICS} critics); TD has {mse['TD']}, two steps {mse['2-step']}, three "
        f"{mse['3-step']} and Monte Carlo {mse['Monte Carlo']}. TD is λ = 0 and Monte Carlo λ = 1 to {format_small(difference)}.",
        {f"best_lambda_{e:g}": best[e] for e in ERRORS}
        | {"gap": float(gap.mean())}
        | {f"{kind} {n} {e:g}": mean[n, e][i] for i, kind in enumerate(KINDS) for n in NSTEP for e in ERRORS},
        error=standard_error,
        curves={
            "lambda": LAMBDAS,
            **{
                f"{kind}_{error:g}": tuple(mean[f"λ={lam:g}", error][i] for lam in LAMBDAS)
                for i, kind in enumerate(KINDS)
                for error in ERRORS
            },
            **{  # constant: n-step advantages do not depend on λ
                f"{kind}_{n}": (mean[n, large][i],) * len(LAMBDAS)
                for i, kind in enumerate(KINDS)
                for n in ("2-step", "3-step")
            },
        },
    )


def _measure_critics(link: Advantage, setting: LabSetting, error: float, critics: int, seed: int) -> Tensor:
    """[critics, KINDS] of one completion's gradient, with critics that err by `error`."""
    erring = [replace(setting, critic_error=error, seed=seed * 100 + critic) for critic in range(critics)]
    each = [exact_figures(with_advantage(link), critic, 1) for critic in erring]
    return torch.tensor([[getattr(f, kind) for kind in KINDS] for f in each], dtype=torch.float64)


# Credit along the turns of a conversation: the bias and variance of each way to assign it.

GROUP = 2  # episodes per step
GAMMA = 0.7
ERROR = 0.3  # standard deviation of the critic's error; outcomes are 0 or 1
TURN_CRITICS = 2
TURN_LAMBDAS = (0.0, 0.5, 0.9, 1.0)
EXACT = 1e-9
# Chains whose expectation is ∇J, by a theorem.
UNBIASED: dict[str, tuple[Advantage, ...]] = {
    "outcome to all turns": (),
    "LeaveOneOut": (LeaveOneOut(),),
    "TurnReturn": (TurnReturn(),),
    "TurnReturn, LeaveOneOut": (TurnReturn(), LeaveOneOut()),
    "TurnReturn, TurnLeaveOneOut": (TurnReturn(), TurnLeaveOneOut()),
}
# Chains that compare an episode with its group.
COMPARED: dict[str, tuple[Advantage, ...]] = {
    "GroupMean, GroupStd": (GroupMean(), GroupStd()),
    "GroupInGroup(std=False)": (GroupInGroup(gamma=1.0, std=False),),
    "GroupInGroup(gamma=1)": (GroupInGroup(gamma=1.0),),
    "GroupInGroup": (GroupInGroup(),),
}
# Advantages from a critic, by λ: over turns, over tokens, over both.
FAMILIES: dict[str, Callable[[float], Advantage]] = {
    "turn": lambda lam: TurnGAE(lam=lam),
    "token": lambda lam: MultiTurnGAE(lam=lam),
    "both": lambda lam: BiLevelGAE(lam=lam, turn_lam=lam),
}


def turn_credit(seed: int = 0) -> MeasuredClaim:
    """Outcome to all turns, the reward to go, siblings' turns, a discount per turn, and GAE over turns; γ = 1 but where said."""
    setting, costly = walk_setting(seed=seed), walk_setting(seed=seed, game=Walk(progress_reward=0.0))
    exact = {name: exact_figures(with_advantage(*chain), setting, GROUP) for name, chain in UNBIASED.items()}
    cost = {name: exact_figures(with_advantage(*chain), costly, GROUP) for name, chain in UNBIASED.items()}
    outcome, siblings, to_go, _, same_turn = exact.values()
    states = exact_figures(with_advantage(GroupInGroup(gamma=1.0, std=False)), setting, GROUP)
    discounted_truth = walk_setting(gamma=GAMMA, seed=seed).true_gradient(Algorithm())
    discounted = []  # bias against the gradient of E[Σ_n γ^n r_n], without and with the weights γ^n
    for chain in ((TurnReturn(GAMMA),), (TurnReturn(GAMMA), TurnDiscount(GAMMA))):
        result = estimate_gradients(with_advantage(*chain), setting, enumerate_steps(setting, GROUP))
        discounted.append(compute_figures(result.gradient, result.weight, discounted_truth).bias)
    undiscounted = exact_figures(with_advantage(TurnReturn(GAMMA)), setting, GROUP).bias
    curves: dict[str, tuple[float, ...]] = {"lambda": TURN_LAMBDAS}
    exact_bias = {}  # the largest over λ
    for level, make in FAMILIES.items():
        exact_bias[level] = max(exact_figures(with_advantage(make(lam)), setting, 1).bias for lam in TURN_LAMBDAS)
        rows = [_measure_critics(make(lam), setting, ERROR, TURN_CRITICS, seed).mean(0) for lam in TURN_LAMBDAS]
        curves[f"bias_{level}"], curves[f"variance_{level}"], _ = (tuple(x) for x in torch.stack(rows).T.tolist())
    (low, *_, high), (least, *_, most) = curves["bias_turn"], curves["variance_turn"]
    bias = max(f.bias for f in (*exact.values(), *cost.values()))
    zero = (bias, discounted[1], exact_bias["turn"], exact_bias["token"], *(curves[f"bias_{k}"][-1] for k in FAMILIES))
    cuts_variance = to_go.variance < outcome.variance and same_turn.variance < siblings.variance

    def variances(*names: str) -> str:
        return join_numbers((cost[name].variance for name in names), ".1f", " and ")

    return MeasuredClaim(
        "turn_credit",
        "Rewards to go per turn cut variance against the outcome at all turns, without bias; a critic of turns trades one for "
        "the other.",
        max(zero) < EXACT and cuts_variance and low > high and least < most,
        f"In a walk of up to three turns ({setting.world.tree.size} episodes, groups of {GROUP}) the variance is "
        f"{outcome.variance:.1f} of ‖∇J‖² with the outcome at all turns and {to_go.variance:.1f} with the reward to go; "
        f"{siblings.variance:.1f} and {same_turn.variance:.1f} less the siblings' episodes, or their same turns. If turns only "
        f"cost something it is {variances('outcome to all turns', 'TurnReturn')}, and "
        f"{variances('LeaveOneOut', 'TurnReturn, TurnLeaveOneOut')} less siblings': earlier losses can act as a baseline. "
        f"The largest bias of all these is {bias:.0e}. GiGPO's sum of two comparisons (F = 1) has {states.variance:.1f}, at "
        f"{states.scale:.2f} times ∇J's length and a cosine of {states.cosine:.4f}. A discount of {GAMMA:g} per turn is "
        f"{undiscounted:.2f} of ‖∇J‖ away from ∇J and {discounted[0]:.2f} from the gradient of the discounted J, which it equals "
        f"with γ^n to {format_small(discounted[1])}. GAE over turns with a critic that errs by {ERROR:g} has a bias of "
        f"{low:.2f} at λ = 0 and {high:.0e} at λ = 1, and a variance of {least:.1f} and {most:.1f}, one episode at a time. An "
        f"exact critic leaves no bias over turns or tokens ({max(exact_bias['turn'], exact_bias['token']):.0e}), and up to "
        f"{exact_bias['both']:.2f} at both levels: which token is a turn's last is the policy's own choice.",
        {f"{kind} {name}": getattr(f, kind) for name, f in exact.items() for kind in ("bias", "variance")}
        | {f"lost {name}": f.variance for name, f in cost.items()}
        | {
            "discounted": undiscounted,
            "discounted_own": discounted[0],
            "discounted_weighed": discounted[1],
            "states": states.variance,
        }
        | {f"exact_{level}": x for level, x in exact_bias.items()},
        curves=curves,
    )


# Whether Adam keeps E[Δθ]ᵀ∇J ≥ 0, as every step of fixed size along an unbiased gradient does.

CHAINS, ADAM_STEPS = 512, 300


def adam(seed: int = 0) -> MeasuredClaim:
    """E[Δθ]ᵀ∇J/(E‖Δθ‖·‖∇J‖) of Adam's first step (exact) and of a late one at a θ held still (sampled), in two worlds.

    In the second an answer of probability 0.1 earns 1 and the other 0.2, without a baseline: mostly small gradients in the
    wrong direction, rarely a large one in the right direction.
    """
    usual, skewed = one_prompt(seed=seed), two_answers(0.1, rewards=(0.2, 1.0))
    worlds = {
        "usual": (usual, estimate_gradients(with_advantage(LeaveOneOut()), usual, enumerate_steps(usual, 4))),
        "skewed": (skewed, estimate_gradients(with_advantage(), skewed, enumerate_steps(skewed, 1))),
    }
    first, late, error, gradient = {}, {}, {}, {}
    for name, (setting, estimates) in worlds.items():
        truth = setting.world.gradient(setting.theta)
        truth = truth / truth.norm()
        delta = _adam_step(estimates.gradient[None])
        first[name] = float(estimates.weight @ (delta @ truth)) / float(estimates.weight @ delta.norm(dim=1))
        length = float(estimates.weight @ estimates.gradient.norm(dim=1))
        gradient[name] = float(estimates.mean @ truth) / length
        generator = torch.Generator().manual_seed(seed)
        sampled = torch.multinomial(estimates.weight, ADAM_STEPS * CHAINS, replacement=True, generator=generator)
        moves = _adam_step(estimates.gradient[sampled].reshape(ADAM_STEPS, CHAINS, -1))
        along = moves @ truth / moves.norm(dim=1).mean()
        late[name], error[name] = float(along.mean()), float(along.std() / math.sqrt(CHAINS))
    holds = all(first[name] >= 0 and late[name] - 2 * error[name] >= 0 for name in worlds)
    return MeasuredClaim(
        "adam",
        "Adam's per-coordinate steps keep E[Δθ]ᵀ∇J ≥ 0.",
        holds,
        f"As a share of the mean step's length, the gradient goes {gradient['usual']:.3f} along ∇J in a usual world; Adam's first "
        f"step {first['usual']:+.3f}, a late one {late['usual']:+.3f} (± {error['usual']:.3f}). With rare, large right "
        f"gradients: {gradient['skewed']:+.3f}, {first['skewed']:+.3f} and {late['skewed']:+.3f} (± {error['skewed']:.3f}). "
        f"{'It holds in both' if holds else 'The guarantee is lost where a coordinate’s sign is mostly wrong'}: the "
        f"first step is the gradient's sign, and only averaging restores its size. This contradicts no theorem: E[Δθ]ᵀ∇J ≥ 0 "
        f"is stated for steps α·g with a fixed α, and Adam's α depends on g.",
        {
            f"{kind}_{name}": values[name]
            for kind, values in (("gradient", gradient), ("first", first), ("late", late))
            for name in worlds
        },
        error=max(error.values()),
    )


def _adam_step(gradients: Tensor) -> Tensor:
    """Return the last step [chains, P] of torch's Adam after gradients [steps, chains, P] of J, with θ held still."""
    parameter = torch.zeros(gradients.shape[1:], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=1.0)
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = -gradient
        optimizer.step()
    return parameter.detach() - before
