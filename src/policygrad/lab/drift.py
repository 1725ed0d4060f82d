"""Where training goes in expectation: θ moved by the mean, over every group that could be drawn, of a rollout's updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Forward
from policygrad.core.objective import surrogate
from policygrad.errors import ConfigError
from policygrad.lab.estimators import selected
from policygrad.lab.groups import WeightedSteps, all_steps
from policygrad.lab.levers import Levers, decide
from policygrad.lab.policies import Table
from policygrad.lab.sequences import World
from policygrad.lab.setting import Setting

Watch = Mapping[str, Callable[[Tensor], Tensor]]
"""Quantities of θ by name."""


@dataclass(frozen=True)
class Path:
    """What was watched, before the first rollout and after each."""

    columns: Mapping[str, tuple[float, ...]]

    def __getitem__(self, name: str) -> tuple[float, ...]:
        return self.columns[name]

    def at(self, name: str, level: float, over: str) -> float:
        """`name` where `over` first reaches `level`, between two rollouts by a straight line; its last value if it never does."""
        x, y = self.columns[over], self.columns[name]
        for i in range(1, len(x)):
            if x[i] >= level:
                return y[i - 1] + (y[i] - y[i - 1]) * (level - x[i - 1]) / (x[i] - x[i - 1])
        return y[-1]


def train(algorithm: Algorithm, setting: Setting, size: int, lr: float, rollouts: int, watch: Watch) -> Path:
    """`rollouts` expected steps of plain gradient ascent from `setting.theta`.

    In each, every group of G completions is formed, with its probability under the θ that starts the rollout; the algorithm
    makes K = `algorithm.step.updates` updates on that group alone, as training does; θ moves by their mean.

    Raises:
        ConfigError: more than one prompt, a policy that is no table, or a step that is no plain gradient step.
    """
    theta = setting.theta
    found = {name: [float(f(theta))] for name, f in watch.items()}
    for _ in range(rollouts):
        theta = theta + expected_move(algorithm, replace(setting, theta=theta), size, lr)
        for name, f in watch.items():
            found[name].append(float(f(theta)))
    return Path({name: tuple(values) for name, values in found.items()})


def expected_move(algorithm: Algorithm, setting: Setting, size: int, lr: float) -> Tensor:
    """[P] E[Δθ] of one rollout of one prompt, sampled at θ."""
    if setting.world.prompts != 1 or not isinstance(setting.world.policy, Table):
        raise ConfigError("an expected rollout is worked out for one prompt and a Table of logits: take such a setting")
    if not algorithm.step.uses_lr:
        raise ConfigError(
            f"{type(algorithm.step).__name__} has no learning rate: take an algorithm with a FirstOrder step"
        )
    setting = replace(setting, old=setting.theta)
    algorithm, steps = setting.prepared(algorithm), all_steps(setting, size)
    levers = decide(algorithm, setting, steps)
    weight = steps.weight
    if any(part.rounds > 1 for part in algorithm.filters):  # sampled again until something is left
        weight = weight * levers.mask.flatten(1).any(1)[levers.index]
        weight = weight / weight.sum()
    theta = setting.theta
    thetas = theta.expand(len(steps.rows), -1)
    for _ in range(algorithm.step.updates):
        thetas = thetas + lr * _ascent(algorithm, setting, steps, levers, thetas)
    return weight @ (thetas - theta)


def _ascent(algorithm: Algorithm, setting: Setting, steps: WeightedSteps, levers: Levers, thetas: Tensor) -> Tensor:
    """[M, P] the surrogate's direction of growth for each group at a θ of its own [M, P]: M prompts with parameters apart."""
    world, number = setting.world, len(thetas)
    leaf = thetas.flatten().requires_grad_()
    copies = replace(
        setting,
        world=_copies(world, number),
        theta=leaf,
        old=setting.old_or_theta.repeat(number),
        reference=None if setting.reference is None else setting.reference.repeat(number),
    )
    own = steps.rows + torch.arange(number)[:, None] * world.tree.size
    out = copies.forward(algorithm)
    mask, psi, coef = levers.at(torch.arange(number))
    batch = setting.book(algorithm).select(steps.rows.flatten())
    batch = replace(batch, mask=mask, group=torch.arange(number).repeat_interleave(steps.rows.shape[1]))
    given = {f.name: getattr(out, f.name) for f in fields(out)}
    picked = Forward(**{name: value[own.flatten()] for name, value in given.items() if value is not None})
    batch = selected(picked, batch, psi, algorithm, steps.rows.shape[1])
    loss = surrogate(picked, batch, psi, algorithm, coef)
    return -torch.autograd.grad(loss, leaf)[0].reshape(number, -1)


def _copies(world: World, number: int) -> World:
    """As many prompts as there are groups, each with the one prompt's rewards."""
    return World(world.tree, world.reward.expand(number, -1), Table(world.tree, number))
