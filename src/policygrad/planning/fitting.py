"""How fast a sampler and a learner are, from seconds that were measured: least squares whose coefficients are no less than 0.

A rollout's seconds are `start` + rounds · `fixed` + tokens · `each`: of tokens there are as many as completions have together, of
rounds as many as `slots` at a time take; an update's are `fixed` + tokens · `each`. All of it is linear in what is sought.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from policygrad.planning.pipeline import LearnerSpeed, Lengths, SamplerSpeed

Columns = Sequence[Sequence[float]]
FLAT = 1e-9
"""A pivot this small beside its column's square says that the columns hang on each other."""


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
    best, found = sum(y * y for y in target), [0.0] * len(columns)
    enough = best * FLAT
    for count in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), count):
            some = _solved([columns[j] for j in chosen], target)
            if some is None or min(some) < 0:
                continue
            error = _error([columns[j] for j in chosen], some, target)
            if error < best - enough:
                best, found = error, [0.0] * len(columns)
                for j, x in zip(chosen, some, strict=True):
                    found[j] = x
    return found


def _error(columns: Columns, x: Sequence[float], target: Sequence[float]) -> float:
    rows = zip(*columns, strict=True)
    left: list[float] = [
        y - sum(a * b for a, b in zip(row, x, strict=True)) for row, y in zip(rows, target, strict=True)
    ]
    return sum(a * a for a in left)


def _solved(columns: Columns, target: Sequence[float]) -> list[float] | None:
    """The normal equations' solution, by Gaussian elimination on columns of length 1; None where they hang on each other."""
    norms = [sum(a * a for a in column) ** 0.5 for column in columns]
    if not all(norms):
        return None
    unit = [[a / norm for a in column] for column, norm in zip(columns, norms, strict=True)]
    table = [[_dot(a, b) for b in unit] + [_dot(a, target)] for a in unit]
    size = len(table)
    for i in range(size):
        if table[i][i] < FLAT:
            return None
        for k in range(size):
            if k != i:
                share = table[k][i] / table[i][i]
                table[k] = [a - share * b for a, b in zip(table[k], table[i], strict=True)]
    return [table[i][size] / table[i][i] / norms[i] for i in range(size)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
