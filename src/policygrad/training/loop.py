"""THE LOOP: prompts → environment ⇄ sampler → reward → advantage Ψ → objective → update → weights → sampler …"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.base import State
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum, merge
from policygrad.core.staleness import resolve_old_policy, staleness_metrics
from policygrad.learners.base import Learner
from policygrad.rollout.async_producer import CollectFn, RolloutProducer, RolloutQueue
from policygrad.rollout.rollouter import Rollout, Rollouter
from policygrad.rollout.trajectory import EpisodeGroup
from policygrad.training.config.run import Run


@dataclass(frozen=True)
class Progress:
    """What outlives a step, besides the weights: data in, data out, and a checkpoint holds it."""

    state: State
    """Of the algorithm's parts (a running mean, an adaptive β)."""
    step: int = 0
    """Steps done."""
    position: int = 0
    """The task's next example."""
    tokens: int = 0
    """Sampled so far for these steps, of whatever became of them."""
    seconds: float = 0.0
    """Spent so far in rollouts and updates."""
    leftover_groups: tuple[EpisodeGroup, ...] = ()
    """Sampled, judged and not trained on yet: the next rollout begins with them."""
    queued_rollouts: tuple[Rollout, ...] = ()
    """Of the next steps, drawn already (`Run.staleness`); `position` and `carried` are those after them."""

    def over(self, run: Run) -> bool:
        """Whether the run is at its end: the last step done, or the token budget used up."""
        return self.step >= run.steps or (run.tokens is not None and self.tokens >= run.tokens)


@dataclass(frozen=True, eq=False)
class StepResult:
    """One step, for whoever watches."""

    step: int
    algorithm: Algorithm
    """As it was in this step."""
    rollout: Rollout
    batch: Batch
    psi: Tensor
    metrics: Metrics


class StepCallbacks(Protocol):
    """Follows a run step by step."""

    def on_step(self, done: StepResult) -> Metrics:
        """A step is done; returns what was measured on held-out problems now, if anything, for the algorithm's parts to see."""
        ...

    def should_continue(self, progress: Progress) -> bool:
        """What outlives the step, to be saved from time to time; whether to go on."""
        ...


def run_loop(
    run: Run,
    rollouter: Rollouter,
    learner: Learner,
    progress: Progress,
    watcher: StepCallbacks,
    breakable: Callable[[], AbstractContextManager[object]] = nullcontext,
    settle: Callable[[Progress, Progress], tuple[Progress, bool]] = lambda before, after: (after, False),
) -> Progress:
    """Steps until the `watcher` says stop, from a rollouter that has the learner's weights. It never asks which sampler,
    environment or learner it has. breakable: surrounds a rollout, which changes nothing that is kept: what is raised there
    throws the step away. settle: from the progress before and after a step to the one that holds (its updates may be undone), and
    whether what has been drawn for later steps, and what is being drawn, is of weights that are gone."""
    producer, going = _producer(run, progress), True
    try:
        while going:
            after = run_step(run, rollouter, learner, progress, watcher, producer, breakable)
            progress, gone = settle(progress, after)
            if gone:
                producer.stop(rollouter.cancel)
                producer = _producer(run, progress)
            going = watcher.should_continue(progress)
    finally:
        producer.stop(rollouter.cancel)
    return progress


def run_step(
    run: Run,
    rollouter: Rollouter,
    learner: Learner,
    progress: Progress,
    watcher: StepCallbacks,
    producer: RolloutProducer,
    breakable: Callable[[], AbstractContextManager[object]],
) -> Progress:
    """A rollout, what it is worth, the updates, the weights. Where the sampler takes weights while it draws, it draws on when the
    step is over; else the next rollout is whole before the weights change."""
    step, algorithm = progress.step + 1, run.algorithm.with_state(progress.state)
    began, busy = time.perf_counter(), producer.busy_seconds
    collect = _collecting(run, rollouter, learner, algorithm)
    with breakable():
        rollout = producer.take(1 if rollouter.in_flight else max(1, run.rollouts_ahead(step)), collect)
    sampled = time.perf_counter()
    with producer.produce_during(run.rollouts_ahead(step + 1), collect):
        algorithm, batch = resolve_old_policy(algorithm, rollout.batch, learner.version)
        age = staleness_metrics(batch, learner.version)
        batch = learner.evaluate(batch, algorithm.needs)
        shaped = algorithm.shape_rewards(batch)
        psi, batch = algorithm.compute_advantages(batch, shaped), algorithm.add_critic_targets(batch, shaped)
        measured = learner.update(batch, psi, algorithm)
        updated = time.perf_counter()
        if not rollouter.in_flight:
            producer.wait_idle()
        waited = time.perf_counter()
        published = rollouter.update_weights(learner.publish())
    ended = time.perf_counter()
    clock: Metrics = {
        "time/rollout": Sum(sampled - began + waited - updated),  # what the step has waited for
        "time/update": Sum(updated - sampled + ended - waited),
    }
    if run.max_staleness:
        clock["time/sampler_idle"] = Sum(max(0.0, ended - began - (producer.busy_seconds - busy)))
    metrics = merge(rollout.metrics, age, algorithm.report(batch), measured, published, clock)
    found = watcher.on_step(StepResult(step, algorithm, rollout, batch, psi, metrics))
    finished = producer.queue
    return Progress(
        state=run.algorithm.update_state(progress.state, batch, measured | found, shaped),
        step=step,
        position=finished.position,
        tokens=progress.tokens + rollout.num_sampled_tokens,
        seconds=progress.seconds + ended - began,
        leftover_groups=finished.leftover_groups,
        queued_rollouts=finished.rollouts,
    )


def _producer(run: Run, progress: Progress) -> RolloutProducer:
    """From where the rollouts that wait end, to the run's last step."""
    tokens = progress.tokens + sum(rollout.num_sampled_tokens for rollout in progress.queued_rollouts)
    waiting = RolloutQueue(
        progress.step + 1, progress.queued_rollouts, progress.position, progress.leftover_groups, tokens
    )
    return RolloutProducer(
        waiting, lambda ahead: Progress({}, ahead.next_request[0] - 1, tokens=ahead.num_sampled_tokens).over(run)
    )


def _collecting(run: Run, rollouter: Rollouter, learner: Learner, algorithm: Algorithm) -> CollectFn:
    """What collects the rollout of a step."""

    def collect(step: int, position: int, carried: Sequence[EpisodeGroup]) -> Rollout:
        with rollouter.lock:
            return rollouter.collect(
                algorithm,
                run.sampling,
                prompts_per_step=run.prompts_per_step,
                samples_per_prompt=run.effective_samples_per_prompt,
                step=step,
                position=position,
                leftover_groups=carried,
                evaluate=learner.evaluate,
            )

    return collect
