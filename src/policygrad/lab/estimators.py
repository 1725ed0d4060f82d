"""An algorithm's gradient at every step, by the library's own functions, and what is true of its distribution.

What acts on whole steps is in `levers`. What acts completion by completion (ratio, gate, terms) is asked of all steps at
once, through `surrogate`: its derivative in log π is the coefficient of ∇log π.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch, Coefficients, Forward
from policygrad.core.objective import surrogate, with_selected
from policygrad.lab.calculus import jacobian
from policygrad.lab.groups import WeightedSteps
from policygrad.lab.levers import Levers, decide
from policygrad.lab.setting import Setting

CHUNK = 100_000
"""Completions per call of `surrogate`."""
EXACT = ("entropy", "kl_old", "kl_ref")
"""What is exact over the vocabulary in a forward pass."""


@dataclass(frozen=True, eq=False)
class Estimates:
    """What an algorithm makes of M steps."""

    gradient: Tensor
    """[M, P] of the surrogate objective, the direction in which it grows."""
    weight: Tensor
    """[M] probabilities; steps that a filter samples again have none."""
    coefficient: Tensor
    """[M, B] of ∇log π at a completion's tokens, their mean; 0 where it was filtered."""
    exact: bool

    @property
    def mean(self) -> Tensor:
        """[P] E g."""
        return self.weight @ self.gradient

    @property
    def variance(self) -> float:
        """tr Cov g; of a sample, without bias."""
        spread = float(self.weight @ (self.gradient - self.mean).square().sum(1))
        kept = int((self.weight > 0).sum())
        return spread if self.exact else spread * kept / max(1, kept - 1)


def estimates(algorithm: Algorithm, setting: Setting, steps: WeightedSteps, levers: Levers | None = None) -> Estimates:
    """The algorithm's gradient at θ for every step.

    levers: those of another setting with the same π_old, reference and critic, where they are known.
    """
    algorithm = setting.prepared(algorithm)
    book = setting.book(algorithm)
    levers = decide(algorithm, setting, steps) if levers is None else levers
    cells, states = _token_scores(algorithm, setting)
    gradients, per_completion = [], []
    out = _detached(setting.forward(algorithm))
    chunk = max(1, CHUNK // steps.rows.shape[1])
    for start in range(0, len(steps.rows), chunk):
        part = torch.arange(start, min(start + chunk, len(steps.rows)))
        score, extra = _coefficients(algorithm, book, out, steps.rows[part], levers.at(part))
        gradient = _summed(score, setting.world.cell[steps.rows[part]], len(cells)) @ cells
        for name, value in extra.items():
            gradient = (
                gradient + _summed(value, setting.world.state[steps.rows[part]], len(states[name])) @ states[name]
            )
        gradients.append(gradient)
        per_completion.append(score.sum(-1) / book.lengths[steps.rows[part]])
    weight = steps.weight
    if any(part.rounds > 1 for part in algorithm.filters):  # refilled: sampled again until something is left
        weight = weight * levers.mask.flatten(1).any(1)[levers.index]
        weight = weight / weight.sum()
    return Estimates(torch.cat(gradients), weight, torch.cat(per_completion), steps.exact)


def _coefficients(
    algorithm: Algorithm, book: Batch, out: Forward, rows: Tensor, levers: tuple[Tensor, Tensor, Coefficients]
) -> tuple[Tensor, dict[str, Tensor]]:
    """([m, B, L] of ∇log π, and of each exact quantity that a loss term reads): minus the surrogate's derivatives."""
    mask, psi, coef = levers
    flat = rows.flatten()
    batch = replace(book.select(flat), mask=mask, group=torch.arange(len(rows)).repeat_interleave(rows.shape[1]))
    leaves = {
        name: value[flat].requires_grad_(name not in algorithm.select_needs - algorithm.forward_needs)
        for name, value in (("logp", out.logp), *((name, getattr(out, name)) for name in EXACT))
        if value is not None
    }
    out = Forward(**leaves)
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    loss = surrogate(out, selected(out, batch, psi, algorithm, rows.shape[1]), psi, algorithm, coef)
    found = torch.autograd.grad(loss, list(leaves.values()))
    score, *rest = ((-g).reshape(*rows.shape, -1) for g in found)
    return score, dict(zip(list(leaves)[1:], rest, strict=True))


def selected(out: Forward, batch: Batch, psi: Tensor, algorithm: Algorithm, size: int) -> Batch:
    """The batch with what a part chooses among all tokens of a step, step by step: `size` completions each."""
    if algorithm.selecting is None:
        return batch
    chosen, given = [], {f.name: getattr(out, f.name) for f in fields(out)}
    for first in range(0, len(batch.mask), size):
        rows = torch.arange(first, first + size)
        now = Forward(**{name: x.detach()[rows] for name, x in given.items() if x is not None})
        chosen.append(with_selected(now, batch.select(rows), psi[rows], algorithm).selected)
    return replace(batch, selected=torch.cat([x for x in chosen if x is not None]))


def _detached(out: Forward) -> Forward:
    exact = {name: x.detach() for name in EXACT if (x := getattr(out, name)) is not None}
    return Forward(out.logp.detach(), **exact)


def _token_scores(algorithm: Algorithm, setting: Setting) -> tuple[Tensor, dict[str, Tensor]]:
    """([cells, P] ∇log π(a|s), [states, P] the derivative of each exact quantity that a loss term reads)."""
    world = setting.world
    here = torch.zeros(int(world.state.max()) + 1, dtype=torch.int64)  # for each state, a token that is taken there
    here[world.state[world.mask]] = torch.arange(world.mask.numel()).reshape(world.mask.shape)[world.mask]

    def of(name: str) -> Callable[[Tensor], Tensor]:
        """θ -> [X·S], with π_old where it is."""
        still = replace(setting, old=setting.old_or_theta)

        def value(theta: Tensor) -> Tensor:
            found: Tensor = getattr(replace(still, theta=theta).forward(algorithm), name)
            return found.flatten()[here]

        return value

    states = {name: jacobian(of(name), setting.theta) for name in sorted(algorithm.forward_needs)}
    return world.cell_scores(setting.theta), states


def _summed(value: Tensor, index: Tensor, size: int) -> Tensor:
    """[m, B, L] added up at index [m, B, L]: [m, size]."""
    return value.new_zeros(len(value), size).scatter_add_(1, index.flatten(1), value.flatten(1))


def blocks(weight: Tensor, number: int = 16) -> Iterator[Tensor]:
    """Leave-one-block-out weights for the jackknife, each normalised."""
    which = torch.arange(len(weight)) % number
    for block in range(number):
        kept = weight * (which != block)
        yield kept / kept.sum()
