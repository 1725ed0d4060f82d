"""Collect a rollout of a given size in one call, and make rollouts that hold nothing but where the next one begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import policygrad as pg
from policygrad.core.metrics import Sum
from policygrad.rollout.dynamic_sampling import EvaluateFn
from policygrad.rollout.rollouter import Rollout, Rollouter
from policygrad.rollout.trajectory import EpisodeGroup, RolloutConfig, RolloutRequest


def collect_rollout(
    rollouter: Rollouter,
    algorithm: pg.Algorithm,
    sampling: pg.SamplingParams,
    *,
    prompts: int,
    samples: int,
    step: int = 1,
    position: int = 0,
    leftover_groups: Sequence[EpisodeGroup] = (),
    evaluate: EvaluateFn | None = None,
) -> Rollout:
    config, request = RolloutConfig(sampling, prompts, samples), RolloutRequest(step, position, leftover_groups)
    return rollouter.collect(algorithm, config, request, evaluate)


def empty(position: int = 0, leftover_groups: tuple[Any, ...] = (), tokens: int = 0) -> Rollout:
    """Return a rollout without a batch. tokens: the number it reports as sampled."""
    rollout: Rollout = object.__new__(Rollout)
    metrics = {"tokens/sampled": Sum(float(tokens))}
    for name, value in {"position": position, "leftover_groups": leftover_groups, "metrics": metrics}.items():
        object.__setattr__(rollout, name, value)
    return rollout
