"""What is decided for a step as a whole: filters, advantages, coefficients, each asked of the library once per distinct step.

Completions that these parts cannot tell apart are one. Where a step's advantages do not depend on what other groups stand
in the same call, as most do not, all distinct steps go into one call: a sample of steps, each asked alone, must give the same
numbers. What does depend on them (whitening, the batch's std, a token mean) is asked step by step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import PER_COMPLETION, PER_TOKEN, Batch, Coefficients
from policygrad.lab.groups import WeightedSteps
from policygrad.lab.setting import Setting

ALONE = 32
"""Steps that are asked alone before the others are asked together."""
STEPWISE = ("filters", "shaping", "psi", "aggregate")
"""The fields of an algorithm whose parts see a whole step."""


@dataclass(frozen=True, eq=False)
class Levers:
    """Ψ, and what the filters and the aggregation say, once per distinct step U."""

    mask: Tensor
    """[U, B, L] after the filters."""
    psi: Tensor
    """[U, B, L]."""
    coef: Coefficients
    """[U, B, L] each."""
    index: Tensor
    """[M] which of them a step is."""
    place: Tensor
    """[M, B] where a completion of the step stands in it."""

    def at(self, part: Tensor) -> tuple[Tensor, Tensor, Coefficients]:
        """(mask, Ψ, coefficients) of some steps, [m·B, L] each."""
        index, place = self.index[part][:, None], self.place[part]
        found = [x[index, place].flatten(0, 1) for x in (self.mask, self.psi, *self.coef)]
        return found[0], found[1], tuple(found[2:])


@torch.no_grad()
def decide(algorithm: Algorithm, setting: Setting, steps: WeightedSteps) -> Levers:
    """The step-wise parts of an algorithm that `setting` has prepared."""
    book = setting.book(algorithm)
    rows, index, place = _distinct(_kinds(algorithm, book), steps)
    batch = _batch(book, rows, steps)
    together = _together(algorithm, batch, rows.shape)
    if together is None:
        found = [_alone(algorithm, batch, step, rows.shape[1]) for step in range(len(rows))]
        mask, weight, psi = (torch.stack([f[i] for f in found]) for i in range(3))
    else:
        mask, weight, psi = together
    return Levers(mask, psi, _aggregated(algorithm, batch, mask, weight), index, place)


def _distinct(kind: Tensor, steps: WeightedSteps) -> tuple[Tensor, Tensor, Tensor]:
    """(an example's rows of each distinct step [U, B], which one a step is [M], where its completions stand there [M, B])."""
    silent = torch.zeros_like(steps.group, dtype=torch.bool) if steps.silent is None else steps.silent
    key = (steps.group * 2 + silent) * (int(kind.max()) + 1) + kind[steps.rows]  # groups and silence keep their places
    ordered, order = key.sort(dim=1, stable=True)
    distinct, index = torch.unique(ordered, dim=0, return_inverse=True)
    example = torch.zeros(len(distinct), dtype=torch.int64).scatter_(0, index, torch.arange(len(index)))
    return steps.rows.gather(1, order)[example], index, order.argsort(1)


def _kinds(algorithm: Algorithm, book: Batch) -> Tensor:
    """[R] int64: rows of the book are of one kind if no part that sees a whole step can tell them apart."""
    parts = [part for name, part in algorithm.parts() if name in STEPWISE]
    read = {"mask", "reward", "truncated", "values"}.union(*(part.needs for part in parts))
    fields = [getattr(book, name) for name in (*PER_TOKEN, *PER_COMPLETION) if name in read]
    columns = [f.double().reshape(len(book.mask), -1) for f in fields if f is not None]
    kind: Tensor = torch.unique(torch.cat(columns, 1), dim=0, return_inverse=True)[1]
    return kind


def _batch(book: Batch, rows: Tensor, steps: WeightedSteps) -> Batch:
    """All distinct steps in one batch [U·B], each with groups of its own."""
    number = int(steps.group.max()) + 1
    group = (torch.arange(len(rows))[:, None] * number + steps.group).flatten()
    batch = replace(book.select(rows.flatten()), group=group)
    if steps.silent is None:
        return batch
    silent = steps.silent.repeat(len(rows))
    return replace(batch, mask=batch.mask & ~silent[:, None], in_statistics=torch.ones_like(silent))


Decided = tuple[Tensor, Tensor, Tensor]
"""(mask, weight, Ψ)."""


def _decided(algorithm: Algorithm, batch: Batch) -> Decided:
    batch = algorithm.filtered(batch)
    weight = torch.ones_like(batch.mask, dtype=torch.float64) if batch.weight is None else batch.weight
    return batch.mask, weight, algorithm.advantages(batch)


def _alone(algorithm: Algorithm, batch: Batch, step: int, size: int) -> Decided:
    """One step's, [B, L] each."""
    return _decided(algorithm, batch.select(torch.arange(step * size, (step + 1) * size)))


def _together(algorithm: Algorithm, batch: Batch, shape: torch.Size) -> Decided | None:
    """All steps', [U, B, L] each, if one call gives what a call for each would; None if it does not."""
    mask, weight, psi = (x.reshape(*shape, -1) for x in _decided(algorithm, batch))
    for step in torch.randperm(shape[0], generator=torch.Generator().manual_seed(0))[:ALONE].tolist():
        alone = _alone(algorithm, batch, step, shape[1])
        for one, all_ in zip(alone, (mask, weight, psi), strict=True):
            if not torch.allclose(one.double(), all_[step].double(), rtol=1e-11, atol=1e-13):
                return None
    return mask, weight, psi


def _aggregated(algorithm: Algorithm, batch: Batch, mask: Tensor, weight: Tensor) -> Coefficients:
    """The coefficients [U, B, L] of each step, asked once for each pattern of masks, weights and right answers."""
    steps, size, _ = mask.shape
    reward = batch.reward.reshape(steps, size, 1)
    patterns, index = torch.unique(torch.cat([mask.double(), weight, reward], 2).flatten(1), dim=0, return_inverse=True)
    example = torch.zeros(len(patterns), dtype=torch.int64).scatter_(0, index, torch.arange(len(index)))
    found = []
    for step in example.tolist():
        one = batch.select(torch.arange(step * size, (step + 1) * size))
        plain = bool((weight[step] == 1).all())
        found.append(algorithm.all_coefficients(replace(one, mask=mask[step], weight=None if plain else weight[step])))
    return tuple(torch.stack(c)[index] for c in zip(*found, strict=True))
