"""Statistics of a few runs: interquartile means, stratified bootstrap intervals, the probability of improvement.

Source: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (arXiv:2108.13264), sec. 4. The
results are those of its library rliable 1.2.0, which would need scipy, pandas, statsmodels and seaborn for four formulas.
Scores are [runs, tasks], float64; one task is a table of one column.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
LEVEL, NUM_RESAMPLES = 0.95, 2000


@dataclass(frozen=True)
class Estimate:
    """A value and its bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interquartile_mean(scores: ArrayLike) -> Any:
    """Return the mean of the middle half over the last axis: ⌊n/4⌋ values are cut off at either end (25 % trimmed mean).

    For up to three values it is their mean, for five the mean of the middle three. Source: Agarwal et al. 2021, sec. 4.
    """
    ordered = np.sort(np.asarray(scores, dtype=np.float64), axis=-1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)


@lru_cache(maxsize=8)
def resample_indices(runs: int, tasks: int, reps: int = NUM_RESAMPLES, seed: int = 0) -> NDArray[np.int64]:
    """Return [reps, runs, tasks] run indices, sampled with replacement within each task (stratified)."""
    return np.random.default_rng(seed).integers(0, runs, (reps, runs, tasks))


def percentile_interval(replicated: ArrayLike, level: float = LEVEL) -> tuple[Any, Any]:
    """Return the percentile interval over the first axis, that of the replications."""
    tail = 100 * (1 - level) / 2
    return tuple(np.percentile(np.asarray(replicated, dtype=np.float64), [tail, 100 - tail], axis=0))


def estimate_iqm(scores: ArrayLike, reps: int = NUM_RESAMPLES, seed: int = 0) -> Estimate:
    """Estimate the interquartile mean over all runs and tasks, with its stratified percentile interval.

    scores: [runs, tasks] or [runs].
    """
    table = _as_table(scores)
    indices = resample_indices(table.shape[0], table.shape[1], reps, seed)
    replicated = interquartile_mean(table[indices, np.arange(table.shape[1])].reshape(reps, -1))
    low, high = percentile_interval(replicated)
    return Estimate(float(interquartile_mean(table.ravel())), float(low), float(high))


def bootstrap_band(curves: ArrayLike, reps: int = NUM_RESAMPLES, seed: int = 0) -> tuple[Floats, Floats, Floats]:
    """Return (interquartile mean, low, high), each [points], of curves [runs, points].

    Complete runs are resampled; intervals are pointwise.
    """
    table = np.asarray(curves, dtype=np.float64)
    indices = resample_indices(table.shape[0], 1, reps, seed)[:, :, 0]
    low, high = percentile_interval(interquartile_mean(np.swapaxes(table[indices], 1, 2)))
    return interquartile_mean(table.T), low, high


def probability_of_improvement(x: ArrayLike, y: ArrayLike, reps: int = NUM_RESAMPLES, seed: int = 0) -> Estimate:
    """Estimate P(X > Y), the mean over tasks of the fraction of pairs in which a run of X is above one of Y, a tie counting ½.

    Per task it is Mann and Whitney's U over n·m. Source: Agarwal et al. 2021, sec. 4.

    x: [n, tasks] or [n]; y: [m, tasks] or [m].
    """
    a, b = _as_table(x), _as_table(y)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"scores on {a.shape[1]} tasks cannot be compared with scores on {b.shape[1]}")
    wins = np.where(a[:, None] > b[None], 1.0, np.where(a[:, None] == b[None], 0.5, 0.0))  # [n, m, tasks]
    tasks = np.arange(a.shape[1])
    first = resample_indices(a.shape[0], a.shape[1], reps, seed)
    second = resample_indices(b.shape[0], b.shape[1], reps, seed + 1)  # independent of the first
    replicated = wins[first[:, :, None], second[:, None], tasks].mean(axis=(1, 2, 3))
    low, high = percentile_interval(replicated)
    return Estimate(float(wins.mean()), float(low), float(high))


def iqm_difference(x: ArrayLike, y: ArrayLike, reps: int = NUM_RESAMPLES, seed: int = 0) -> Estimate:
    """Estimate the difference of two interquartile means, of x less y, with its stratified percentile interval.

    The runs of either are resampled, independently of the other's. x: [n, tasks] or [n]; y: [m, tasks] or [m].
    """
    tables = _as_table(x), _as_table(y)
    replicated = []
    for offset, table in enumerate(tables):
        indices = resample_indices(table.shape[0], table.shape[1], reps, seed + offset)
        replicated.append(interquartile_mean(table[indices, np.arange(table.shape[1])].reshape(reps, -1)))
    low, high = percentile_interval(replicated[0] - replicated[1])
    a, b = (interquartile_mean(table.ravel()) for table in tables)
    return Estimate(float(a - b), float(low), float(high))


def paired_difference(x: ArrayLike, y: ArrayLike, reps: int = NUM_RESAMPLES, seed: int = 0) -> Estimate:
    """Estimate the mean of x − y over problems, with its percentile interval.

    Problems are resampled with both of their values, so that their difficulty cancels out. Source: Efron and Tibshirani 1993,
    ch. 13; for the pairs, Koehn 2004 (Statistical Significance Tests for Machine Translation Evaluation, EMNLP).

    x, y: [problems], the same ones in the same order. For one problem the interval is the value itself.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"pairs are values of the same problems, not of {a.shape} and {b.shape}")
    difference = a - b
    low, high = percentile_interval(difference[resample_indices(len(a), 1, reps, seed)[:, :, 0]].mean(axis=1))
    return Estimate(float(difference.mean()), float(low), float(high))


def separation_by_chance(n: int, m: int) -> float:
    """Return the probability that n and m runs of the same distribution are completely separated: 2·n!·m!/(n+m)!.

    The bootstrap interval of P(X > Y) is then [1, 1], however few runs there are.
    """
    return min(1.0, 2 / math.comb(n + m, n))


def fewest_runs() -> int:
    """Return the fewest runs per row that can distinguish two rows: with fewer, chance separates equal rows too often."""
    return next(runs for runs in count(1) if separation_by_chance(runs, runs) <= 1 - LEVEL)


def mean_height(xs: ArrayLike, ys: ArrayLike, end: float) -> float:
    """Return the area under a curve from its first point to `end`, divided by its width: the mean score during the run."""
    points, heights = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    inside = points < end
    points, heights = np.append(points[inside], end), np.append(heights[inside], np.interp(end, points, heights))
    width = end - points[0]
    return float(np.trapezoid(heights, points) / width) if width > 0 else float(heights[0])


def first_crossing(xs: ArrayLike, ys: ArrayLike, level: float) -> float | None:
    """Return the first x at which the linearly interpolated curve reaches `level`; None if it never does."""
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
    """Return the median, with runs that never cross as the latest; None if these are half or more."""
    median = statistics.median(math.inf if x is None else x for x in crossings)
    return None if math.isinf(median) else median


def _as_table(scores: ArrayLike) -> Floats:
    table = np.asarray(scores, dtype=np.float64)
    return table[:, None] if table.ndim == 1 else table
