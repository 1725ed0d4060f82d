"""The KL to a reference, in the reward and in the loss. All exact."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch

from policygrad.core.algorithm import Algorithm
from policygrad.core.gates import Importance
from policygrad.core.ratios import SequenceProduct
from policygrad.core.shaping import KLInReward
from policygrad.core.terms import KLForm, KLToReference
from policygrad.lab.calculus import derivative
from policygrad.lab.estimators import estimates
from policygrad.lab.finding import Finding, verdict
from policygrad.lab.findings.baselines import EXACT
from policygrad.lab.groups import all_steps
from policygrad.lab.sequences import moved
from policygrad.lab.setting import Setting
from policygrad.lab.worlds import one_prompt

KL = 0.2
"""Nats a completion from π_θ to the reference."""
AWAY = 0.05
"""And from π_old, off-policy."""


def kl_places(seed: int = 0) -> Finding:
    """E g of each form with a reward of 0, against −∇KL(π_θ‖π_ref) of whole completions."""
    base = one_prompt(length=4, seed=seed)
    world = replace(base.world, reward=torch.zeros_like(base.world.reward))
    reference = moved(world, base.theta, KL, seed=seed + 5)
    on = Setting(world, base.theta, reference=reference)
    off = replace(on, old=moved(world, base.theta, AWAY, seed=seed + 6))
    truth = derivative(lambda theta: -world.kl(theta, reference), base.theta)
    # In the reward the penalty is the one at rollout time, so off-policy it needs the product ratio, and still lags behind.
    places = {"reward": Algorithm(shaping=(KLInReward(1.0),))}
    places |= {f"loss {form}": Algorithm(terms=(KLToReference(1.0, form),)) for form in get_args(KLForm)}
    away = places | {"reward": replace(places["reward"], ratio=SequenceProduct(), gate=Importance())}
    found, spread = {}, {}
    for name, algorithm in places.items():
        for where, setting, used in (("on", on, algorithm), ("off", off, away[name])):
            result = estimates(used, setting, all_steps(setting, 1))
            found[name, where] = float(torch.cosine_similarity(result.mean, truth, dim=0))
            spread[name, where] = result.variance / float(truth @ truth)
            if (name, where) == ("reward", "on"):
                bias = float((result.mean - truth).norm() / truth.norm())
    holds = bias < EXACT and all(found[name, "on"] < 1 - 1e-6 for name in places if name != "reward")
    table = "; ".join(f"{name} {found[name, 'on']:.3f}, {found[name, 'off']:.3f}" for name in places)
    return Finding(
        "kl_places",
        "k1 in the reward is the gradient of the sequence's KL; in the loss every form leaves out the states that follow.",
        holds,
        f"On-policy the penalty in the reward {verdict(bias < EXACT, 'is', 'is not')} −∇KL(π‖π_ref) (relative difference "
        f"{bias:.0e}). Cosines with it, on-policy and {AWAY:g} nats off-policy: {table}. Its price is variance: "
        f"{spread['reward', 'on']:.1f} of ‖∇KL‖² for one completion without a baseline, against "
        f"{spread['loss k3', 'on']:.1f} for k3 in the loss.",
        {f"{name} {where}": value for (name, where), value in found.items()} | {"bias_reward": bias},
    )
