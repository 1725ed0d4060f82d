"""THE LOOP: prompts → rollout → reward → advantage Ψ → objective → update → metrics, checkpoint → rollout …"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.metrics import Metrics, Sum, merge
from policygrad.core.types import Batch
from policygrad.learners.base import Learner
from policygrad.rollout.collect import Rollout, collect
from policygrad.rollout.source import Source
from policygrad.samplers.base import Sampler
from policygrad.training.config.run import Run


@dataclass(frozen=True)
class Progress:
    """What outlives a step, besides the weights: data in, data out, and a checkpoint holds it."""

    algorithm: Algorithm
    """With the state of its parts (a running mean)."""
    step: int = 0
    """Steps done."""
    position: int = 0
    """The task's next example."""
    tokens: int = 0
    """Sampled so far, of whatever became of them."""
    seconds: float = 0.0
    """Spent so far in rollouts and updates."""

    def over(self, run: Run) -> bool:
        """Whether the run is at its end: the last step done, or the token budget used up."""
        return self.step >= run.steps or (run.tokens is not None and self.tokens >= run.tokens)


@dataclass(frozen=True, eq=False)
class Done:
    """One step, for whoever watches."""

    step: int
    rollout: Rollout
    batch: Batch
    psi: Tensor
    metrics: Metrics


class Watcher(Protocol):
    """Follows a run step by step."""

    def record(self, done: Done) -> Metrics:
        """A step is done; returns what was measured on held-out problems now, if anything, for the algorithm's parts to see."""
        ...

    def save(self, progress: Progress) -> bool:
        """What outlives the step, to be saved from time to time; whether to go on."""
        ...


def loop(
    run: Run,
    source: Source,
    sampler: Sampler,
    learner: Learner,
    progress: Progress,
    *,
    until: int,
    watcher: Watcher,
) -> Progress:
    """Steps until step `until`, the run's end, or a `watcher` that says stop. It never asks which sampler or learner it has."""
    sampler.load(learner.publish())
    while progress.step < until and not progress.over(run):
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
        batch = learner.evaluate(rollout.batch, algorithm.needs)
        psi, batch = algorithm.advantages(batch), algorithm.with_targets(batch)
        measured = learner.update(batch, psi, algorithm)
        sampler.load(learner.publish())
        updated = time.perf_counter()
        clock = {"time/rollout": Sum(sampled - began), "time/update": Sum(updated - sampled)}
        metrics = merge(rollout.metrics, algorithm.report(batch), measured, clock)
        found = watcher.record(Done(step, rollout, batch, psi, metrics))
        progress = Progress(
            algorithm=algorithm.observe(batch, measured | found),
            step=step,
            position=rollout.position,
            tokens=progress.tokens + int(rollout.metrics["tokens/sampled"].value),
            seconds=progress.seconds + updated - began,
        )
        if not watcher.save(progress):
            break
    return progress
