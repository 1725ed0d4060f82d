"""How fast a sampler and a learner are, from seconds that were measured: least squares whose coefficients are no less than 0.

A rollout's seconds are `start` + rounds · `fixed` + tokens · `each`: of tokens there are as many as completions have together, of
rounds as many as `slots` at a time take; an update's are `fixed` + tokens · `each`. All of it is linear in what is sought.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from policygrad.planning.pipeline import LearnerSpeed, Lengths, SamplerSpeed

Columns = Sequence[Sequence[float]]
FLAT = 1e-9
"""A share of the squares; columns of length 1 whose smallest singular value is below its root hang on each other."""


def sampler_speed(rollouts: Sequence[Lengths], seconds: Sequence[float], slots: int) -> SamplerSpeed:
    """Of one that draws `slots` completions at a time, and took so many seconds for each of these rollouts."""
    tokens = [float(sum(lengths)) for lengths in rollouts]
    rounds = [SamplerSpeed(1.0, 0.0, slots)(lengths) for lengths in rollouts]
    each, fixed, start = least_squares([tokens, rounds, [1.0] * len(seconds)], seconds)
    return SamplerSpeed(fixed, each, slots, start)


def learner_speed(rollouts: Sequence[Lengths], seconds: Sequence[float], publish: float) -> LearnerSpeed:
    """Of one that took so many seconds for the updates of each of these rollouts. publish: seconds."""
    tokens = [float(sum(lengths)) for lengths in rollouts]
    each, fixed = least_squares([tokens, [1.0] * len(seconds)], seconds)
    return LearnerSpeed(fixed, each, publish)


def least_squares(columns: Columns, target: Sequence[float]) -> list[float]:
    """x ≥ 0 that minimises Σ_i (target_i − Σ_j columns_j,i · x_j)². Where columns hang on each other the first of them stand for
    the rest. All sets of columns are tried, so that there should be few.

    Raises:
        ValueError: nothing to fit to.
    """
    if not target or not columns:
        raise ValueError("a speed is fitted to at least one measurement")
    table, goal = np.asarray(columns, dtype=float).T, np.asarray(target, dtype=float)
    norms = np.linalg.norm(table, axis=0)
    best, found = float(goal @ goal), [0.0] * len(columns)
    enough = best * FLAT
    for count in range(1, len(columns) + 1):
        for chosen in map(list, combinations(np.flatnonzero(norms).tolist(), count)):
            some, _, rank, _ = np.linalg.lstsq(table[:, chosen] / norms[chosen], goal, rcond=FLAT**0.5)
            if rank < count or some.min() < 0:
                continue
            some = some / norms[chosen]
            left = goal - table[:, chosen] @ some
            if (error := float(left @ left)) < best - enough:
                best, found = error, [0.0] * len(columns)
                for j, x in zip(chosen, some.tolist(), strict=True):
                    found[j] = x
    return found
