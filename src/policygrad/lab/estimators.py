"""An algorithm's gradient at every step, computed by the library's own functions.

Parts that see a complete step (filters, advantages, aggregation) are in `StepDecisions`. Parts that act on each completion (ratio,
gate, terms) are evaluated for all steps at once, through `surrogate`: its derivative in log π is the coefficient of ∇log π.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import PER_COMPLETION, PER_TOKEN, Batch, Coefficients, Forward
from policygrad.core.objective import surrogate, with_selected_tokens
from policygrad.errors import ConfigError
from policygrad.lab.sequences import jacobian
from policygrad.lab.setting import LabSetting

MAX_ENUMERATED_STEPS = 20_000  # up to this number of multisets the expectation is exact
SAMPLED_STEPS = 4096
MAX_SAMPLED_COMPLETIONS = 1_000_000  # maximum completions of all sampled steps together


@dataclass(frozen=True, eq=False)
class WeightedSteps:
    """M steps of B completions each."""

    rows: Tensor  # [M, B] int64 row numbers in `LabSetting.enumerate_batch`
    weight: Tensor  # [M] probabilities; 1/M for sampled steps
    exact: bool  # True when these are all possible steps
    group: Tensor  # [B] int64; the group of each completion within its step
    statistics_only: Tensor | None = None
    """[B] bool; marks completions that are used in statistics but not trained on."""


def enumerate_steps(setting: LabSetting, size: int, statistics_only: int = 0) -> WeightedSteps:
    """Enumerate all steps of one group: every multiset of G completions of every prompt, with its multinomial probability.

    statistics_only: number of further completions that are used in statistics only.
    """
    world = setting.world
    number = count_steps(setting, size, statistics_only)
    if number > MAX_ENUMERATED_STEPS:
        raise ConfigError(
            f"{world.prompts} prompts of {world.tree.size} completions make {number} steps with {size + statistics_only} "
            f"completions each, and at most {MAX_ENUMERATED_STEPS} are enumerated: use a smaller group or world, or sample_steps"
        )
    log_p = world.logp(setting.sampling_theta).detach()
    tuples, probability = _enumerate_multisets(log_p, size)
    if statistics_only:
        more, more_probability = _enumerate_multisets(log_p, statistics_only)
        left, right = torch.cartesian_prod(torch.arange(len(tuples)), torch.arange(len(more))).unbind(1)
        tuples = torch.cat([tuples[left], more[right]], 1)
        probability = probability[:, left] * more_probability[:, right]
    offset = torch.arange(world.prompts)[:, None, None] * world.tree.size
    rows = (tuples + offset).flatten(0, 1)
    untrained = torch.arange(size + statistics_only) >= size if statistics_only else None
    group = torch.zeros(size + statistics_only).long()
    return WeightedSteps(rows, probability.flatten() / world.prompts, True, group, untrained)


def count_steps(setting: LabSetting, size: int, statistics_only: int = 0) -> int:
    """Count the steps of `enumerate_steps`."""
    if size < 1:
        raise ConfigError(f"a group has at least 1 completion, not {size}")
    n = setting.world.tree.size
    return setting.world.prompts * math.comb(n + size - 1, size) * math.comb(n + statistics_only - 1, statistics_only)


def _enumerate_multisets(log_p: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the multisets [K, G] of G samples from each row of log_p [X, N], and their probabilities [X, K]."""
    tuples = torch.tensor(list(itertools.combinations_with_replacement(range(log_p.shape[1]), size)))
    repeats, run = (torch.ones(len(tuples)).double() for _ in range(2))
    for j in range(1, size):  # the product over a run of k equal samples is k!
        run = torch.where(tuples[:, j] == tuples[:, j - 1], run + 1, 1)
        repeats = repeats * run
    return tuples, (float(math.factorial(size)) / repeats) * log_p[:, tuples].sum(-1).exp()


def sample_steps(
    setting: LabSetting, size: int, steps: int = SAMPLED_STEPS, prompts: int = 1, seed: int = 0
) -> WeightedSteps:
    """Sample M steps of `prompts` groups of G completions independently; prompts are sampled with replacement."""
    if (number := steps * prompts * size) > MAX_SAMPLED_COMPLETIONS:
        raise ConfigError(
            f"{steps} sampled steps of {prompts * size} completions are {number}, and at most {MAX_SAMPLED_COMPLETIONS} are "
            f"sampled: use a group of at most {MAX_SAMPLED_COMPLETIONS // (steps * prompts)}, or fewer steps"
        )
    world, generator = setting.world, torch.Generator().manual_seed(seed)
    prompt = torch.randint(world.prompts, (steps * prompts,), generator=generator)
    probability = world.logp(setting.sampling_theta).detach().exp()[prompt]
    sampled = torch.multinomial(probability, size, replacement=True, generator=generator)
    rows = (sampled + prompt[:, None] * world.tree.size).reshape(steps, prompts * size)
    weight = torch.full((steps,), 1 / steps, dtype=torch.float64)
    return WeightedSteps(rows, weight, False, torch.arange(prompts).repeat_interleave(size))


def make_steps(setting: LabSetting, size: int, seed: int = 0) -> WeightedSteps:
    """Enumerate the steps if their number allows, else sample some."""
    exact = count_steps(setting, size) <= MAX_ENUMERATED_STEPS
    return enumerate_steps(setting, size) if exact else sample_steps(setting, size, seed=seed)


# Filters, advantages and coefficients are computed once per distinct step: completions that these parts cannot distinguish are
# treated as one. If a step's advantages do not depend on the other groups in the same call, as is usual, all distinct steps go into
# one call; this is checked on a sample of steps, each computed separately. Otherwise (whitening, the batch's std, a token mean)
# they are computed step by step.

CHECKED_STEPS = 32  # steps in this sample
STEPWISE_FIELDS = ("filters", "shaping", "advantage", "aggregation")
"""The fields of an algorithm whose parts see a complete step."""


@dataclass(frozen=True, eq=False)
class StepDecisions:
    """Ψ, the filters' masks and the aggregation's coefficients of each of U distinct steps."""

    weight: Tensor  # [M] probabilities; 0 for steps that a filter samples again
    mask: Tensor  # [U, B, L] after the filters
    psi: Tensor  # [U, B, L]
    coef: Coefficients  # [U, B, L] each
    index: Tensor  # [M] the distinct step of each step
    place: Tensor  # [M, B] the position of each completion in the distinct step

    def at(self, part: Tensor) -> tuple[Tensor, Tensor, Coefficients]:
        """Return (mask, Ψ, coefficients) of some steps, [m·B, L] each."""
        index, place = self.index[part][:, None], self.place[part]
        mask, psi, *coef = (x[index, place].flatten(0, 1) for x in (self.mask, self.psi, *self.coef))
        return mask, psi, tuple(coef)


@torch.no_grad()
def compute_decisions(algorithm: Algorithm, setting: LabSetting, steps: WeightedSteps) -> StepDecisions:
    """Evaluate the step-wise parts of an algorithm that `setting` has prepared."""
    full = setting.enumerate_batch(algorithm)
    untrained = steps.statistics_only
    # Label rows [R] int64, equally if no step-wise part can distinguish them.
    parts = [part for key, part in algorithm.named_parts() if key.partition(".")[0] in STEPWISE_FIELDS]
    read = {"mask", "reward", "truncated", "values"}.union(*(part.needs for part in parts))
    tensors = [getattr(full, name) for name in (*PER_TOKEN, *PER_COMPLETION) if name in read]
    columns = [x.double().reshape(len(full.mask), -1) for x in tensors if x is not None]
    label = torch.unique(torch.cat(columns, 1), dim=0, return_inverse=True)[1]
    # Find the rows of each distinct step [U, B], the distinct step of each step [M], and its completions' positions there [M, B].
    # Sorting by this key keeps groups and untrained completions in place.
    kind = steps.group * 2 + (torch.zeros_like(steps.group) if untrained is None else untrained)
    ordered, order = (kind * (int(label.max()) + 1) + label[steps.rows]).sort(dim=1, stable=True)
    index, example = _find_distinct(ordered)
    rows, place = steps.rows.gather(1, order)[example], order.argsort(1)
    # Put all distinct steps into one batch [U·B], with separate groups.
    group = (torch.arange(len(rows))[:, None] * (int(steps.group.max()) + 1) + steps.group).flatten()
    batch = replace(full.select(rows.flatten()), group=group)
    if untrained is not None:
        untrained = untrained.repeat(len(rows))
        batch = replace(batch, mask=batch.mask & ~untrained[:, None], in_statistics=torch.ones_like(untrained))
    mask, token_weight, psi = _filter_and_score(algorithm, batch, rows)
    # Aggregate once for each pattern of masks, weights and rewards.
    reward = batch.reward.reshape(*rows.shape, 1)
    pattern, example = _find_distinct(torch.cat([mask.double(), token_weight, reward], 2).flatten(1))
    each = []
    for step in example.tolist():
        here = token_weight[step]
        filtered = replace(_select_step(batch, step, rows), mask=mask[step], weight=None if (here == 1).all() else here)
        each.append(algorithm.all_coefficients(filtered))
    coef = tuple(torch.stack(c)[pattern] for c in zip(*each, strict=True))
    weight = steps.weight
    if any(part.sampling_rounds > 1 for part in algorithm.filters):  # sampled again until something is left
        weight = weight * mask.flatten(1).any(1)[index]
        weight = weight / weight.sum()
    return StepDecisions(weight, mask, psi, coef, index, place)


def _find_distinct(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of each row among the distinct rows, and for each of these the index of a row equal to it."""
    distinct, index = torch.unique(table, dim=0, return_inverse=True)
    return index, torch.zeros(len(distinct), dtype=torch.int64).scatter_(0, index, torch.arange(len(index)))


def _select_step(batch: Batch, step: int, rows: Tensor) -> Batch:
    size = rows.shape[1]
    return batch.select(torch.arange(step * size, (step + 1) * size))


def _filter_and_score(algorithm: Algorithm, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each step's mask, weight and Ψ, [U, B, L]: of all steps in one call, unless separate calls have other results."""

    def evaluate(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        batch = algorithm.apply_filters(batch)
        weight = torch.ones_like(batch.mask, dtype=torch.float64) if batch.weight is None else batch.weight
        return batch.mask, weight, algorithm.compute_advantages(batch)

    mask, weight, psi = (x.reshape(*rows.shape, -1) for x in evaluate(batch))
    for step in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:CHECKED_STEPS].tolist():
        for expected, joint in zip(evaluate(_select_step(batch, step, rows)), (mask, weight, psi), strict=True):
            if not torch.allclose(expected.double(), joint[step].double(), rtol=1e-11, atol=1e-13):
                separate = [evaluate(_select_step(batch, step, rows)) for step in range(len(rows))]
                mask, weight, psi = (torch.stack(tensors) for tensors in zip(*separate, strict=True))
                return mask, weight, psi
    return mask, weight, psi


CHUNK = 100_000  # completions per call of `surrogate`
EXACT = ("entropy", "kl_old", "kl_ref")  # quantities that are exact sums over the vocabulary


@dataclass(frozen=True, eq=False)
class Estimates:
    """An algorithm's gradients for M steps."""

    gradient: Tensor  # [M, P] of the surrogate objective, in the direction of ascent
    weight: Tensor  # [M] probabilities
    coefficient: Tensor  # [M, B] mean coefficient of ∇log π over a completion's tokens; 0 if it was filtered
    exact: bool

    @property
    def mean(self) -> Tensor:
        """[P] E g."""
        return self.weight @ self.gradient


def estimate_gradients(
    algorithm: Algorithm, setting: LabSetting, steps: WeightedSteps, decisions: StepDecisions | None = None
) -> Estimates:
    """Compute the algorithm's gradient at θ for every step.

    Args:
        decisions: Those of another setting with the same π_old, reference and critic, if already computed.
    """
    algorithm = setting.prepare(algorithm)
    full, world, size = setting.enumerate_batch(algorithm), setting.world, steps.rows.shape[1]
    decisions = compute_decisions(algorithm, setting, steps) if decisions is None else decisions
    # The derivative [states, P] of each exact quantity that a loss term reads, at a token sampled in each state.
    position = torch.zeros(int(world.state.max()) + 1, dtype=torch.int64)
    position[world.state[world.mask]] = torch.arange(world.mask.numel()).reshape(world.mask.shape)[world.mask]
    fixed_old = replace(setting, old=setting.old_theta)

    def exact_quantity(theta: Tensor, name: str) -> Tensor:
        tokens: Tensor = getattr(replace(fixed_old, theta=theta).forward(algorithm), name)
        return tokens.flatten()[position]

    states = {n: jacobian(partial(exact_quantity, name=n), setting.theta) for n in sorted(algorithm.forward_needs)}
    cells = world.cell_scores(setting.theta)
    gradients, per_completion = [], []
    forward = setting.forward(algorithm)
    outputs = {name: x.detach() for name in ("logp", *EXACT) if (x := getattr(forward, name)) is not None}
    for part in torch.split(torch.arange(len(steps.rows)), max(1, CHUNK // size)):
        rows = steps.rows[part]
        mask, psi, coef = decisions.at(part)
        batch = full.select(rows.flatten())
        batch = replace(batch, mask=mask, group=torch.arange(len(rows)).repeat_interleave(size))
        # Minus the surrogate's derivatives are the coefficients [m, B, L] of ∇log π and of the exact quantities that terms read.
        leaves = {
            name: x[rows.flatten()].requires_grad_(name not in algorithm.selection_needs - algorithm.forward_needs)
            for name, x in outputs.items()
        }
        out = Forward(**leaves)
        loss = surrogate(out, select_step_tokens(out, batch, psi, algorithm, size), psi, algorithm, coef)
        names = [name for name, leaf in leaves.items() if leaf.requires_grad]
        derivatives = torch.autograd.grad(loss, [leaves[name] for name in names])
        score, *others = ((-d).reshape(*rows.shape, -1) for d in derivatives)
        gradient = _sum_by_index(score, world.cell[rows], len(cells)) @ cells
        for name, value in zip(names[1:], others, strict=True):
            gradient = gradient + _sum_by_index(value, world.state[rows], len(states[name])) @ states[name]
        gradients.append(gradient)
        per_completion.append(score.sum(-1) / full.lengths[rows])
    return Estimates(torch.cat(gradients), decisions.weight, torch.cat(per_completion), steps.exact)


def select_forward(out: Forward, rows: Tensor) -> Forward:
    """Select completions of a forward pass."""
    tensors = {f.name: getattr(out, f.name) for f in fields(out)}
    return Forward(**{name: x[rows] for name, x in tensors.items() if x is not None})


def select_step_tokens(out: Forward, batch: Batch, psi: Tensor, algorithm: Algorithm, size: int) -> Batch:
    """Add the tokens that a part selects among those of a step, for steps of `size` completions each."""
    if algorithm.token_selector is None:
        return batch
    steps = [
        with_selected_tokens(select_forward(out, rows), batch.select(rows), psi[rows], algorithm).selected
        for rows in torch.split(torch.arange(len(batch.mask)), size)
    ]
    return replace(batch, selected=torch.cat([x for x in steps if x is not None]))


def _sum_by_index(value: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum [m, B, L] by index [m, B, L] into [m, size]."""
    return value.new_zeros(len(value), size).scatter_add_(1, index.flatten(1), value.flatten(1))
