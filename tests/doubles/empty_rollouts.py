"""Rollouts without anything in them but where the next one begins."""

from __future__ import annotations

from typing import Any

from policygrad.core.metrics import Sum
from policygrad.rollout.rollouter import Rollout


def empty(position: int = 0, surplus: tuple[Any, ...] = (), tokens: int = 0) -> Rollout:
    """Of which nothing else may be asked. tokens: said to have been sampled."""
    rollout: Rollout = object.__new__(Rollout)
    metrics = {"tokens/sampled": Sum(float(tokens))}
    for name, value in {"position": position, "surplus": surplus, "metrics": metrics}.items():
        object.__setattr__(rollout, name, value)
    return rollout
