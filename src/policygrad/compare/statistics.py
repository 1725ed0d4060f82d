"""What a few runs say: interquartile means, stratified bootstrap intervals, the probability of improvement. Pure functions.

Source: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (arXiv:2108.13264), sec. 4, and
its library rliable, whose figures these are (a test holds some of 1.2.0's). The library itself brings scipy, pandas, statsmodels
and seaborn for four formulas, and the arch that it asks for does not import beside pandas 3.
Scores are [runs, tasks], float64; one task is a table of one column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
LEVEL, NUM_RESAMPLES = 0.95, 2000


@dataclass(frozen=True)
class Estimate:
    """A figure and its bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interquartile_mean(scores: ArrayLike) -> Any:
    """Mean of the middle half over the last axis: ⌊n/4⌋ values are cut off at either end (a 25 % trimmed mean).

    Of three values or fewer it is their mean; of five, the mean of the middle three. Source: Agarwal et al. 2021, sec. 4.
    """
    ordered = np.sort(np.asarray(scores, dtype=np.float64), axis=-1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)


@lru_cache(maxsize=8)
def resample_indices(runs: int, tasks: int, reps: int = NUM_RESAMPLES, seed: int = 0) -> NDArray[np.int64]:
    """[reps, runs, tasks] run numbers: within every task its own runs are drawn anew, with replacement (stratified)."""
    return np.random.default_rng(seed).integers(0, runs, (reps, runs, tasks))


def percentile_interval(statistics: ArrayLike, level: float = LEVEL) -> tuple[Any, Any]:
    """The percentile interval over the first axis, that of the replications."""
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(np.asarray(statistics, dtype=np.float64), [tail, 100 - tail], axis=0)
    return low, high


def estimate_iqm(scores: ArrayLike, reps: int = NUM_RESAMPLES, seed: int = 0) -> Estimate:
    """The interquartile mean over all runs and tasks, and its stratified percentile interval. scores: [runs, tasks] or [runs]."""
    table = _table(scores)
    indices = resample_indices(table.shape[0], table.shape[1], reps, seed)
    replicated = interquartile_mean(table[indices, np.arange(table.shape[1])].reshape(reps, -1))
    low, high = percentile_interval(replicated)
    return Estimate(float(interquartile_mean(table.ravel())), float(low), float(high))


def bootstrap_band(curves: ArrayLike, reps: int = NUM_RESAMPLES, seed: int = 0) -> tuple[Floats, Floats, Floats]:
    """(interquartile mean, low, high), each [points], of curves [runs, points]; whole runs are drawn, intervals are pointwise."""
    table = np.asarray(curves, dtype=np.float64)
    indices = resample_indices(table.shape[0], 1, reps, seed)[:, :, 0]
    low, high = percentile_interval(interquartile_mean(np.swapaxes(table[indices], 1, 2)))
    return interquartile_mean(table.T), low, high


def probability_of_improvement(x: ArrayLike, y: ArrayLike, reps: int = NUM_RESAMPLES, seed: int = 0) -> Estimate:
    """P(X > Y): per task the share of pairs in which a run of X is above one of Y, a tie counting ½ (Mann and Whitney's U over
    n·m), then the mean over tasks. Source: Agarwal et al. 2021, sec. 4.

    x: [n, tasks] or [n]; y: [m, tasks] or [m].
    """
    a, b = _table(x), _table(y)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"scores on {a.shape[1]} tasks cannot be compared with scores on {b.shape[1]}")
    wins = np.where(a[:, None] > b[None], 1.0, np.where(a[:, None] == b[None], 0.5, 0.0))  # [n, m, tasks]
    tasks = np.arange(a.shape[1])
    first = resample_indices(a.shape[0], a.shape[1], reps, seed)
    second = resample_indices(b.shape[0], b.shape[1], reps, seed + 1)  # apart from the first
    replicated = wins[first[:, :, None], second[:, None], tasks].mean(axis=(1, 2, 3))
    low, high = percentile_interval(replicated)
    return Estimate(float(wins.mean()), float(low), float(high))


def paired_difference(x: ArrayLike, y: ArrayLike, reps: int = NUM_RESAMPLES, seed: int = 0) -> Estimate:
    """Mean of x − y over problems that both were measured on, and its percentile interval: problems are drawn, each with both of
    its values, so that how hard a problem is cancels out. Source: Efron and Tibshirani 1993, ch. 13; for the pairs, Koehn 2004
    (Statistical Significance Tests for Machine Translation Evaluation, EMNLP).

    x, y: [problems], the same ones in the same order. Of one problem the interval is the value itself.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"pairs are values of the same problems, not of {a.shape} and {b.shape}")
    difference = a - b
    low, high = percentile_interval(difference[resample_indices(len(a), 1, reps, seed)[:, :, 0]].mean(axis=1))
    return Estimate(float(difference.mean()), float(low), float(high))


def separation_by_chance(n: int, m: int) -> float:
    """How often n and m runs of one and the same thing are wholly apart, either way round: 2·n!·m!/(n+m)!.

    Where runs are wholly apart the bootstrap's interval of P(X > Y) is [1, 1], however few they are: below this it says nothing.
    """
    return min(1.0, 2 / math.comb(n + m, n))


def fewest_runs(level: float = LEVEL) -> int:
    """The fewest runs of each of two rows that can tell them apart: below, chance separates equal rows too often."""
    runs = 1
    while separation_by_chance(runs, runs) > 1 - level:
        runs += 1
    return runs


def interpolate(xs: ArrayLike, ys: ArrayLike, x: ArrayLike) -> Any:
    """A curve between its points, linearly; xs ascending."""
    points, heights = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    return np.interp(np.asarray(x, dtype=np.float64), points, heights)


def mean_height(xs: ArrayLike, ys: ArrayLike, end: float) -> float:
    """The area under a curve from its first point to `end`, over its width: the score an average moment of the run had."""
    points, heights = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    inside = points < end
    points, heights = np.append(points[inside], end), np.append(heights[inside], interpolate(points, heights, end))
    width = end - points[0]
    return float(np.trapezoid(heights, points) / width) if width > 0 else float(heights[0])


def first_crossing(xs: ArrayLike, ys: ArrayLike, level: float) -> float | None:
    """Where a curve first is at `level` or above, between its points linearly; None where it never is."""
    points, heights = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    above = np.flatnonzero(heights >= level)
    if not len(above):
        return None
    i = int(above[0])
    if i == 0:
        return float(points[0])
    share = (level - heights[i - 1]) / (heights[i] - heights[i - 1])
    return float(points[i - 1] + share * (points[i] - points[i - 1]))


def median_crossing(crossings: list[float | None]) -> float | None:
    """The median with a run that never arrives as later than any other: None where that is half of them or more."""
    ordered = sorted(np.inf if x is None else x for x in crossings)
    middle = len(ordered) // 2
    value = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return None if np.isinf(value) else float(value)


def _table(scores: ArrayLike) -> Floats:
    table = np.asarray(scores, dtype=np.float64)
    return table[:, None] if table.ndim == 1 else table
