"""An algorithm's gradient at every step, by the library's own functions, and what is true of its distribution.

What acts on whole steps is in `levers`. What acts completion by completion (ratio, gate, terms) is asked of all steps at
once, through `surrogate`: its derivative in log π is the coefficient of ∇log π.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import PER_COMPLETION, PER_TOKEN, Batch, Coefficients, Forward
from policygrad.core.objective import surrogate, with_selected_tokens
from policygrad.errors import ConfigError
from policygrad.lab.sequences import jacobian
from policygrad.lab.setting import LabSetting

# Optimiser steps side by side: every multiset of G completions with its probability, or a sample of steps.

MAX_ENUMERATED_STEPS = 20_000
"""Up to so many multisets the expectation is exact."""
SAMPLED_STEPS = 4096
MAX_SAMPLED_COMPLETIONS = 1_000_000
"""In all sampled steps together."""


@dataclass(frozen=True, eq=False)
class WeightedSteps:
    """M steps of B completions each."""

    rows: Tensor
    """[M, B] int64 into a setting's book."""
    weight: Tensor
    """[M] probabilities; 1/M where the steps were sampled."""
    exact: bool
    """Whether these are all the steps there are."""
    group: Tensor
    """[B] int64; which group of its step a completion belongs to."""
    statistics_only: Tensor | None = None
    """[B] bool; completions that count in the statistics alone."""


def count_multisets(n: int, size: int) -> int:
    """How many multisets of `size` out of n."""
    return math.comb(n + size - 1, size)


def enumerate_steps(setting: LabSetting, size: int, statistics_only: int = 0) -> WeightedSteps:
    """One group of one prompt is a step: every multiset of G completions of every prompt, with its multinomial probability.

    silent: of N = G + silent completions, so many count in the statistics alone (multisets of both kinds, side by side).

    Raises:
        ConfigError: a group of none; more than `MAX_ENUMERATED_STEPS` steps.
    """
    world = setting.world
    number = count_steps(setting, size, statistics_only)
    if number > MAX_ENUMERATED_STEPS:
        raise ConfigError(
            f"{world.prompts} prompts of {world.tree.size} completions make {number} steps with {size + statistics_only} completions "
            f"each, and at most {MAX_ENUMERATED_STEPS} are enumerated: take a smaller group or world, or sample_steps"
        )
    log_p = world.logp(setting.sampling_theta).detach()
    tuples, chances = _multisets(log_p, size)
    if statistics_only:
        more, theirs = _multisets(log_p, statistics_only)
        left, right = torch.cartesian_prod(torch.arange(len(tuples)), torch.arange(len(more))).unbind(1)
        tuples, chances = torch.cat([tuples[left], more[right]], 1), chances[:, left] * theirs[:, right]
    offset = torch.arange(world.prompts)[:, None, None] * world.tree.size
    rows = (tuples + offset).flatten(0, 1)
    quiet = torch.arange(size + statistics_only) >= size if statistics_only else None
    return WeightedSteps(
        rows, chances.flatten() / world.prompts, True, torch.zeros(size + statistics_only).long(), quiet
    )


def count_steps(setting: LabSetting, size: int, statistics_only: int = 0) -> int:
    """How many steps `enumerate_steps` would make."""
    if size < 1:
        raise ConfigError(f"a group has at least 1 completion, not {size}")
    n = setting.world.tree.size
    return (
        setting.world.prompts
        * count_multisets(n, size)
        * (count_multisets(n, statistics_only) if statistics_only else 1)
    )


def _multisets(log_p: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(the multisets [K, G], their probabilities [X, K]) of G draws from each row of log_p [X, N]."""
    tuples = torch.tensor(list(itertools.combinations_with_replacement(range(log_p.shape[1]), size)))
    repeats, run = (torch.ones(len(tuples)).double() for _ in range(2))
    for j in range(1, size):  # the product over a run of k equal ones is k!
        run = torch.where(tuples[:, j] == tuples[:, j - 1], run + 1, 1)
        repeats = repeats * run
    return tuples, (float(math.factorial(size)) / repeats) * log_p[:, tuples].sum(-1).exp()


def sample_steps(
    setting: LabSetting, size: int, steps: int = SAMPLED_STEPS, prompts: int = 1, seed: int = 0
) -> WeightedSteps:
    """M steps of `prompts` groups of G completions, drawn independently; prompts are drawn with replacement.

    Raises:
        ConfigError: a group of none; more than `MAX_SAMPLED_COMPLETIONS` completions.
    """
    if size < 1:
        raise ConfigError(f"a group has at least 1 completion, not {size}")
    if (number := steps * prompts * size) > MAX_SAMPLED_COMPLETIONS:
        raise ConfigError(
            f"{steps} sampled steps of {prompts * size} completions are {number}, and at most {MAX_SAMPLED_COMPLETIONS} are drawn: take "
            f"a group of at most {MAX_SAMPLED_COMPLETIONS // (steps * prompts)}, or fewer steps"
        )
    world, generator = setting.world, torch.Generator().manual_seed(seed)
    prompt = torch.randint(world.prompts, (steps * prompts,), generator=generator)
    chance = world.logp(setting.sampling_theta).detach().exp()[prompt]
    drawn = torch.multinomial(chance, size, replacement=True, generator=generator)
    rows = (drawn + prompt[:, None] * world.tree.size).reshape(steps, prompts * size)
    weight = torch.full((steps,), 1 / steps, dtype=torch.float64)
    return WeightedSteps(rows, weight, False, torch.arange(prompts).repeat_interleave(size))


def make_steps(setting: LabSetting, size: int, seed: int = 0) -> WeightedSteps:
    """All of them where their number allows, else a sample."""
    exact = count_steps(setting, size) <= MAX_ENUMERATED_STEPS
    return enumerate_steps(setting, size) if exact else sample_steps(setting, size, seed=seed)


# What is decided for a step as a whole: filters, advantages, coefficients, each asked of the library once per distinct step.
#
# Completions that these parts cannot tell apart are one. Where a step's advantages do not depend on what other groups stand
# in the same call, as most do not, all distinct steps go into one call: a sample of steps, each asked alone, must give the same
# numbers. What does depend on them (whitening, the batch's std, a token mean) is asked step by step.

CHECKED_STEPS = 32
"""Steps that are asked alone before the others are asked together."""
STEPWISE_FIELDS = ("filters", "shaping", "advantage", "aggregation")
"""The fields of an algorithm whose parts see a whole step."""


@dataclass(frozen=True, eq=False)
class StepDecisions:
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
def compute_decisions(algorithm: Algorithm, setting: LabSetting, steps: WeightedSteps) -> StepDecisions:
    """The step-wise parts of an algorithm that `setting` has prepared."""
    book = setting.enumerate_batch(algorithm)
    rows, index, place = _distinct(_kinds(algorithm, book), steps)
    batch = _batch(book, rows, steps)
    together = _together(algorithm, batch, rows.shape)
    if together is None:
        found = [_alone(algorithm, batch, step, rows.shape[1]) for step in range(len(rows))]
        mask, weight, psi = (torch.stack([f[i] for f in found]) for i in range(3))
    else:
        mask, weight, psi = together
    return StepDecisions(mask, psi, _aggregated(algorithm, batch, mask, weight), index, place)


def _distinct(kind: Tensor, steps: WeightedSteps) -> tuple[Tensor, Tensor, Tensor]:
    """(an example's rows of each distinct step [U, B], which one a step is [M], where its completions stand there [M, B])."""
    silent = torch.zeros_like(steps.group, dtype=torch.bool) if steps.statistics_only is None else steps.statistics_only
    key = (steps.group * 2 + silent) * (int(kind.max()) + 1) + kind[steps.rows]  # groups and silence keep their places
    ordered, order = key.sort(dim=1, stable=True)
    distinct, index = torch.unique(ordered, dim=0, return_inverse=True)
    example = torch.zeros(len(distinct), dtype=torch.int64).scatter_(0, index, torch.arange(len(index)))
    return steps.rows.gather(1, order)[example], index, order.argsort(1)


def _kinds(algorithm: Algorithm, book: Batch) -> Tensor:
    """[R] int64: rows of the book are of one kind if no part that sees a whole step can tell them apart."""
    parts = [part for key, part in algorithm.named_parts() if key.partition(".")[0] in STEPWISE_FIELDS]
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
    if steps.statistics_only is None:
        return batch
    silent = steps.statistics_only.repeat(len(rows))
    return replace(batch, mask=batch.mask & ~silent[:, None], in_statistics=torch.ones_like(silent))


Decided = tuple[Tensor, Tensor, Tensor]
"""(mask, weight, Ψ)."""


def _decided(algorithm: Algorithm, batch: Batch) -> Decided:
    batch = algorithm.apply_filters(batch)
    weight = torch.ones_like(batch.mask, dtype=torch.float64) if batch.weight is None else batch.weight
    return batch.mask, weight, algorithm.compute_advantages(batch)


def _alone(algorithm: Algorithm, batch: Batch, step: int, size: int) -> Decided:
    """One step's, [B, L] each."""
    return _decided(algorithm, batch.select(torch.arange(step * size, (step + 1) * size)))


def _together(algorithm: Algorithm, batch: Batch, shape: torch.Size) -> Decided | None:
    """All steps', [U, B, L] each, if one call gives what a call for each would; None if it does not."""
    mask, weight, psi = (x.reshape(*shape, -1) for x in _decided(algorithm, batch))
    for step in torch.randperm(shape[0], generator=torch.Generator().manual_seed(0))[:CHECKED_STEPS].tolist():
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


def estimate_gradients(
    algorithm: Algorithm, setting: LabSetting, steps: WeightedSteps, decisions: StepDecisions | None = None
) -> Estimates:
    """The algorithm's gradient at θ for every step.

    levers: those of another setting with the same π_old, reference and critic, where they are known.
    """
    algorithm = setting.prepare(algorithm)
    book = setting.enumerate_batch(algorithm)
    decisions = compute_decisions(algorithm, setting, steps) if decisions is None else decisions
    cells, states = _token_scores(algorithm, setting)
    gradients, per_completion = [], []
    out = _detached(setting.forward(algorithm))
    chunk = max(1, CHUNK // steps.rows.shape[1])
    for start in range(0, len(steps.rows), chunk):
        part = torch.arange(start, min(start + chunk, len(steps.rows)))
        score, extra = _coefficients(algorithm, book, out, steps.rows[part], decisions.at(part))
        gradient = _summed(score, setting.world.cell[steps.rows[part]], len(cells)) @ cells
        for name, value in extra.items():
            gradient = (
                gradient + _summed(value, setting.world.state[steps.rows[part]], len(states[name])) @ states[name]
            )
        gradients.append(gradient)
        per_completion.append(score.sum(-1) / book.lengths[steps.rows[part]])
    weight = steps.weight
    if any(part.sampling_rounds > 1 for part in algorithm.filters):  # refilled: sampled again until something is left
        weight = weight * decisions.mask.flatten(1).any(1)[decisions.index]
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
        name: value[flat].requires_grad_(name not in algorithm.selection_needs - algorithm.forward_needs)
        for name, value in (("logp", out.logp), *((name, getattr(out, name)) for name in EXACT))
        if value is not None
    }
    out = Forward(**leaves)
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    loss = surrogate(out, select_step_tokens(out, batch, psi, algorithm, rows.shape[1]), psi, algorithm, coef)
    found = torch.autograd.grad(loss, list(leaves.values()))
    score, *rest = ((-g).reshape(*rows.shape, -1) for g in found)
    return score, dict(zip(list(leaves)[1:], rest, strict=True))


def select_step_tokens(out: Forward, batch: Batch, psi: Tensor, algorithm: Algorithm, size: int) -> Batch:
    """The batch with what a part chooses among all tokens of a step, step by step: `size` completions each."""
    if algorithm.token_selector is None:
        return batch
    chosen, given = [], {f.name: getattr(out, f.name) for f in fields(out)}
    for first in range(0, len(batch.mask), size):
        rows = torch.arange(first, first + size)
        now = Forward(**{name: x.detach()[rows] for name, x in given.items() if x is not None})
        chosen.append(with_selected_tokens(now, batch.select(rows), psi[rows], algorithm).selected)
    return replace(batch, selected=torch.cat([x for x in chosen if x is not None]))


def _detached(out: Forward) -> Forward:
    exact = {name: x.detach() for name in EXACT if (x := getattr(out, name)) is not None}
    return Forward(out.logp.detach(), **exact)


def _token_scores(algorithm: Algorithm, setting: LabSetting) -> tuple[Tensor, dict[str, Tensor]]:
    """([cells, P] ∇log π(a|s), [states, P] the derivative of each exact quantity that a loss term reads)."""
    world = setting.world
    here = torch.zeros(int(world.state.max()) + 1, dtype=torch.int64)  # for each state, a token that is taken there
    here[world.state[world.mask]] = torch.arange(world.mask.numel()).reshape(world.mask.shape)[world.mask]

    def of(name: str) -> Callable[[Tensor], Tensor]:
        """θ -> [X·S], with π_old where it is."""
        still = replace(setting, old=setting.old_theta)

        def value(theta: Tensor) -> Tensor:
            found: Tensor = getattr(replace(still, theta=theta).forward(algorithm), name)
            return found.flatten()[here]

        return value

    states = {name: jacobian(of(name), setting.theta) for name in sorted(algorithm.forward_needs)}
    return world.cell_scores(setting.theta), states


def _summed(value: Tensor, index: Tensor, size: int) -> Tensor:
    """[m, B, L] added up at index [m, B, L]: [m, size]."""
    return value.new_zeros(len(value), size).scatter_add_(1, index.flatten(1), value.flatten(1))


def iter_jackknife_weights(weight: Tensor, number: int = 16) -> Iterator[Tensor]:
    """Leave-one-block-out weights for the jackknife, each normalised."""
    which = torch.arange(len(weight)) % number
    for block in range(number):
        kept = weight * (which != block)
        yield kept / kept.sum()
