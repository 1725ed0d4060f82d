"""THE LOOP: prompts → rollout → reward → advantage Ψ → objective → update → metrics, checkpoint → rollout …"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.metrics import Metrics, Sum, merge
from policygrad.core.types import Batch
from policygrad.rollout.collect import Rollout, collect
from policygrad.rollout.source import Source
from policygrad.rollout.types import Sampler
from policygrad.training.config import Run
from policygrad.training.learner import Learner


@dataclass(frozen=True)
class Progress:
    """What outlives a step, besides the weights: data in, data out, and a checkpoint holds it."""

    algorithm: Algorithm
    """With the state of its parts (a running mean)."""
    step: int = 0
    """Steps done."""
    position: int = 0
    """The task's next example."""


@dataclass(frozen=True, eq=False)
class Done:
    """One step, for whoever watches."""

    progress: Progress
    rollout: Rollout
    batch: Batch
    psi: Tensor
    metrics: Metrics


def loop(
    run: Run,
    source: Source,
    sampler: Sampler,
    learner: Learner,
    progress: Progress,
    *,
    until: int,
    watch: Callable[[Done], bool],
) -> Progress:
    """Steps until step `until`, or until `watch` says stop by returning False. It never asks which sampler or learner it has."""
    sampler.load(learner.publish())
    while progress.step < until:
        step, algorithm, began = progress.step + 1, progress.algorithm, time.perf_counter()
        rollout = collect(
            source,
            sampler,
            algorithm,
            run.sampling,
            prompts=run.prompts_per_step,
            samples=run.group_size,
            step=step,
            position=progress.position,
        )
        sampled = time.perf_counter()
        batch = learner.score(rollout.batch, algorithm.needs)
        psi, batch = algorithm.advantages(batch), algorithm.with_targets(batch)
        measured = learner.update(batch, psi, algorithm)
        sampler.load(learner.publish())
        progress = replace(progress, algorithm=algorithm.observe(batch, measured), step=step, position=rollout.position)
        clock = {"time/rollout": Sum(sampled - began), "time/update": Sum(time.perf_counter() - sampled)}
        if not watch(Done(progress, rollout, batch, psi, merge(rollout.metrics, measured, clock))):
            break
    return progress
