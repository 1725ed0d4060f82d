"""What Adam keeps of E[Δθ]ᵀ∇J ≥ 0, which every step of fixed size along an unbiased gradient has."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from policygrad.algorithms import REINFORCE
from policygrad.core.advantages import LeaveOneOut
from policygrad.lab.estimators import Estimates, estimates
from policygrad.lab.finding import Finding, verdict
from policygrad.lab.findings.baselines import centred
from policygrad.lab.groups import all_steps
from policygrad.lab.setting import Setting
from policygrad.lab.worlds import one_prompt, two_answers

CHAINS, STEPS = 512, 300


def adam(seed: int = 0) -> Finding:
    """E[Δθ]ᵀ∇J/(E‖Δθ‖·‖∇J‖) of Adam's first step (exact) and of a late one at a θ held still (sampled), in two worlds.

    In the second an answer of probability 0.1 pays 1 and the other 0.2, without a baseline: mostly small gradients in the
    wrong direction, seldom a large one in the right.
    """
    usual, skewed = one_prompt(seed=seed), two_answers(0.1, rewards=(0.2, 1.0))
    plain = replace(REINFORCE, psi=())
    worlds = {"usual": (usual, estimates(centred(LeaveOneOut()), usual, all_steps(usual, 4)))}
    worlds["skewed"] = (skewed, estimates(plain, skewed, all_steps(skewed, 1)))
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
        f"{verdict(holds, 'It holds in both', 'The guarantee is lost where a coordinate’s sign is mostly wrong')}: the first step "
        f"is the gradient's sign, and only averaging brings its size back. No theorem falls: E[Δθ]ᵀ∇J ≥ 0 is said of steps α·g "
        f"with a fixed α, and Adam's α depends on g.",
        {
            f"{what}_{name}": v[name]
            for what, v in (("gradient", gradient), ("first", first), ("late", late))
            for name in worlds
        },
        error=max(error.values()),
    )


def _unit(setting: Setting) -> Tensor:
    truth = setting.world.gradient(setting.theta)
    unit: Tensor = truth / truth.norm()
    return unit


def _chains(found: Estimates, seed: int) -> Tensor:
    """[steps, chains, P] gradients drawn independently."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(found.weight, STEPS * CHAINS, replacement=True, generator=generator)
    return found.gradient[drawn].reshape(STEPS, CHAINS, -1)


def _adam(gradients: Tensor) -> Tensor:
    """[chains, P] the last step of torch's Adam after these gradients of J, θ held still; it works coordinate by coordinate."""
    parameter = torch.zeros(gradients.shape[1:], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=1.0)
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = -gradient
        optimizer.step()
    return parameter.detach() - before
