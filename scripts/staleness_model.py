"""Speeds of a sampler and a learner from measured seconds, and the staleness that suffices for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random

import numpy as np

from policygrad.planning.pipeline import LearnerSpeed, Lengths, SamplerSpeed, simulate


def resample_lengths(lengths: Lengths, steps: int, size: int, seed: int = 0) -> list[list[int]]:
    """Sample `steps` rollouts of `size` completions from measured lengths, with replacement, for a run of another size.

    Lengths of one prompt are taken to be no more alike than others.
    """
    random = Random(seed)
    return [random.choices(lengths, k=size) for _ in range(steps)]


def find_best_staleness(
    rollouts: Sequence[Lengths],
    sampler: SamplerSpeed,
    learner: LearnerSpeed,
    *,
    in_flight: bool = False,
    max_staleness: int = 16,
    tolerance: float = 0.01,
) -> int:
    """Return the smallest staleness whose steps are as fast as the fastest up to `max_staleness`, within a relative tolerance."""
    speeds = [
        simulate(rollouts, sampler, learner, k, in_flight=in_flight).step_seconds for k in range(max_staleness + 1)
    ]
    return smallest_sufficient(speeds, tolerance)


def smallest_sufficient(steps: Sequence[float], tolerance: float = 0.01) -> int:
    """Return the first index of `steps` (seconds per step at staleness 0, 1, 2, …) within `tolerance` of the fastest."""
    best = min(steps)
    return next(k for k, seconds in enumerate(steps) if seconds <= best * (1 + tolerance))


# Speeds from measured seconds, by least squares with coefficients of at least 0.
#
# A rollout takes `startup` + rounds · `fixed` + tokens · `per_completion`: tokens are those of all completions, rounds those that
# `max_concurrency` completions at a time need. An update takes `fixed` + tokens · `per_token`. Both are linear in the unknowns.

Columns = Sequence[Sequence[float]]
MIN_IMPROVEMENT = 1e-9
"""Relative decrease of the squared error that justifies a further column; columns of unit length whose smallest singular value is
below its root count as linearly dependent."""


def fit_sampler_speed(rollouts: Sequence[Lengths], seconds: Sequence[float], max_concurrency: int) -> SamplerSpeed:
    """Fit the speed of a sampler that took these seconds for these rollouts."""
    tokens = [float(sum(lengths)) for lengths in rollouts]
    rounds = [SamplerSpeed(1.0, 0.0, max_concurrency)(lengths) for lengths in rollouts]
    per_completion, fixed, startup = fit_nonnegative([tokens, rounds, [1.0] * len(seconds)], seconds)
    return SamplerSpeed(fixed, per_completion, max_concurrency, startup)


def fit_learner_speed(rollouts: Sequence[Lengths], seconds: Sequence[float], publish: float) -> LearnerSpeed:
    """Fit the speed of a learner that took these seconds for the updates of these rollouts. publish: seconds."""
    tokens = [float(sum(lengths)) for lengths in rollouts]
    per_token, fixed = fit_nonnegative([tokens, [1.0] * len(seconds)], seconds)
    return LearnerSpeed(fixed, per_token, publish)


def fit_nonnegative(columns: Columns, target: Sequence[float]) -> list[float]:
    """Return the x ≥ 0 that minimises Σ_i (target_i − Σ_j columns_j,i · x_j)². Raises ValueError if there is nothing to fit.

    All subsets of the columns are tried, so there should be few. Of linearly dependent columns the first ones are used."""
    if not target or not columns:
        raise ValueError("a speed is fitted to at least one measurement")
    table, goal = np.asarray(columns, dtype=float).T, np.asarray(target, dtype=float)
    norms = np.linalg.norm(table, axis=0)
    best, result = float(goal @ goal), [0.0] * len(columns)
    min_decrease = best * MIN_IMPROVEMENT
    for count in range(1, len(columns) + 1):
        for subset in map(list, combinations(np.flatnonzero(norms).tolist(), count)):
            x, _, rank, _ = np.linalg.lstsq(table[:, subset] / norms[subset], goal, rcond=MIN_IMPROVEMENT**0.5)
            if rank < count or x.min() < 0:
                continue
            x = x / norms[subset]
            residual = goal - table[:, subset] @ x
            if (error := float(residual @ residual)) < best - min_decrease:
                best, result = error, [0.0] * len(columns)
                for j, value in zip(subset, x.tolist(), strict=True):
                    result[j] = value
    return result
