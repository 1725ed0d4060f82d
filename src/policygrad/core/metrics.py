"""Metrics that carry their own reduction, so that micro-batches, minibatches and ranks merge without a mean of means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Number = float | Tensor


@dataclass(frozen=True)
class Mean:
    """Σ x / Σ count."""

    total: Number
    count: Number = 1.0

    def __or__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

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
    """max x."""

    largest: Number

    def __or__(self, other: Max) -> Max:
        return Max(max(float(self.largest), float(other.largest)))

    @property
    def value(self) -> float:
        return float(self.largest)


@dataclass(frozen=True)
class Min:
    """min x."""

    smallest: Number

    def __or__(self, other: Min) -> Min:
        return Min(min(float(self.smallest), float(other.smallest)))

    @property
    def value(self) -> float:
        return float(self.smallest)


Metric = Mean | Sum | Max | Min
Metrics = dict[str, Metric]


def merge(*parts: Mapping[str, Metric]) -> Metrics:
    """One metric per name, each by its own reduction.

    Raises:
        TypeError: one name with two reductions.
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


def mean_of(x: Tensor, where: Tensor, count: Tensor | None = None) -> Mean:
    """Mean of x [B, T] over the True positions, a row counting `count` [B] times (merged duplicates)."""
    weight = where.to(torch.float64)
    if count is not None:
        weight = weight * count[:, None]
    return Mean((torch.where(where, x, 0).to(torch.float64) * weight).sum(), weight.sum())
