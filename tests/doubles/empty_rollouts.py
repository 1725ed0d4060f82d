"""Rollouts without anything in them but where the next one begins."""

from __future__ import annotations

from typing import Any

from policygrad.rollout.rollouter import Rollout


def empty(position: int = 0, surplus: tuple[Any, ...] = ()) -> Rollout:
    """Of which nothing else may be asked."""
    rollout: Rollout = object.__new__(Rollout)
    for name, value in {"position": position, "surplus": surplus}.items():
        object.__setattr__(rollout, name, value)
    return rollout
