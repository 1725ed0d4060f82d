"""Metrics that carry their own reduction, so that merging micro-batches, minibatches and ranks never averages averages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policygrad.core.precision import widen

Number = float | Tensor


@dataclass(frozen=True)
class Mean:
    """Σ x / Σ count."""

    total: Number
    count: Number = 1.0

    def __or__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def is_measured(self) -> bool:
        """False for a mean over nothing, which is no number; `value` is then 0."""
        return float(self.count) != 0

    @property
    def value(self) -> float:
        return float(self.total) / float(self.count) if float(self.count) else 0.0


@dataclass(frozen=True)
class Sum:
    """Σ x."""

    total: Number

    def __or__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    @property
    def value(self) -> float:
        return float(self.total)


@dataclass(frozen=True)
class Max:
    """Maximum of x; NaN if any x is NaN."""

    largest: Number

    def __or__(self, other: Max) -> Max:
        both = (float(self.largest), float(other.largest))
        return Max(math.nan if any(map(math.isnan, both)) else max(both))

    @property
    def value(self) -> float:
        return float(self.largest)


@dataclass(frozen=True)
class Min:
    """Minimum of x; NaN if any x is NaN."""

    smallest: Number

    def __or__(self, other: Min) -> Min:
        return Min(-(Max(-float(self.smallest)) | Max(-float(other.smallest))).value)

    @property
    def value(self) -> float:
        return float(self.smallest)


@dataclass(frozen=True)
class EffectiveSize:
    """(Σρ)² / (n Σρ²): the effective sample size of n weights ρ as a fraction of n, 1 when all are equal.

    Source: Kong 1992, a note on importance sampling using standardized weights.
    """

    total: Number
    sum_of_squares: Number
    count: Number

    def __or__(self, other: EffectiveSize) -> EffectiveSize:
        return EffectiveSize(
            self.total + other.total, self.sum_of_squares + other.sum_of_squares, self.count + other.count
        )

    @property
    def is_measured(self) -> bool:
        """False for no weights; `value` is then 1."""
        return float(self.count) != 0

    @property
    def value(self) -> float:
        bound = float(self.count) * float(self.sum_of_squares)
        return float(self.total) ** 2 / bound if bound else 1.0


Metric = Mean | Sum | Max | Min | EffectiveSize
Metrics = dict[str, Metric]


def merge(*parts: Mapping[str, Metric]) -> Metrics:
    """Merge metrics by name, each by its own reduction.

    Raises:
        TypeError: a name occurs with two different reductions.
    """
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            if name not in merged:
                merged[name] = metric
            elif type(merged[name]) is not type(metric):
                raise TypeError(f"metric {name!r} is a {type(merged[name]).__name__} and a {type(metric).__name__}")
            else:
                merged[name] = merged[name] | metric  # type: ignore[operator]  # same class, checked above
    return merged


def drop_unmeasured(metrics: Mapping[str, Metric]) -> Metrics:
    """Return the metrics that measured something: a mean over nothing is left out rather than reported as 0."""
    return {
        name: metric
        for name, metric in metrics.items()
        if not isinstance(metric, Mean | EffectiveSize) or metric.is_measured
    }


def list_means(values: Mapping[str, Sequence[float]]) -> Metrics:
    """Return the mean of each list by name, without those of empty lists."""
    return {name: Mean(float(sum(x)), float(len(x))) for name, x in values.items() if x}


def masked_mean(x: Tensor, where: Tensor) -> Mean:
    """Mean of x [B, T] over the True positions."""
    return Mean(widen(torch.where(where, x, 0)).sum(), widen(where).sum())


def effective_size(rho: Tensor, where: Tensor) -> EffectiveSize:
    """Effective sample size of the weights rho [B, T] at the True positions."""
    rho = widen(torch.where(where, rho, 0))
    return EffectiveSize(rho.sum(), rho.square().sum(), widen(where).sum())
