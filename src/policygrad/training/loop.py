"""The training loop: prompts → environment ⇄ sampler → rewards → advantages Ψ → objective → update → weights → sampler …"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.base import State
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum, drop_unmeasured, merge
from policygrad.core.staleness import resolve_old_policy, staleness_metrics
from policygrad.learners.base import Learner
from policygrad.rollout.async_producer import RolloutProducer, RolloutQueue
from policygrad.rollout.rollouter import Rollout, Rollouter
from policygrad.rollout.trajectory import EpisodeGroup, RolloutConfig
from policygrad.samplers.config import LOCAL
from policygrad.training.config.run import Run
from policygrad.training.interrupts import StopRequested
from policygrad.utils.spans import span


@dataclass(frozen=True)
class Progress:
    """The state of a run between two steps, apart from the weights. A checkpoint holds it."""

    state: State  # state of the algorithm's parts, such as a running mean or an adaptive β
    step: int = 0  # completed steps
    position: int = 0  # index of the task's next example
    tokens: int = 0  # tokens sampled so far, including those of dropped completions
    seconds: float = 0.0  # time spent in rollouts and updates
    leftover_groups: tuple[EpisodeGroup, ...] = ()
    """Sampled and scored groups that wait for the next rollout: those that no step has trained on, or a replay buffer's."""
    queued_rollouts: tuple[Rollout, ...] = ()
    """Rollouts sampled ahead for the next steps (`Run.max_staleness`); `position` and `leftover_groups` are those after them."""


@dataclass(frozen=True, eq=False)
class StepResult:
    """One finished step."""

    step: int
    algorithm: Algorithm  # the algorithm as it was in this step
    rollout: Rollout
    batch: Batch
    psi: Tensor
    metrics: Metrics


@dataclass(frozen=True)
class StepOutcome:
    """The answer of `StepCallbacks.on_step`."""

    metrics: Metrics = field(default_factory=dict)
    """Evaluation metrics of this step, which the algorithm's parts may use."""
    undone: bool = False  # whether the step's updates were taken back
    restored_state: State | None = None
    """State of the algorithm's parts in the checkpoint that was restored; None = none was."""


class StepCallbacks(Protocol):
    """Follows a run step by step."""

    def on_step(self, result: StepResult) -> StepOutcome:
        """Log and evaluate a finished step, and undo its updates if they diverged."""

    def should_continue(self, progress: Progress) -> bool:
        """Save the progress when a checkpoint is due; return whether to take another step."""


def run_loop(
    run: Run,
    rollouter: Rollouter,
    learner: Learner,
    progress: Progress,
    callbacks: StepCallbacks,
    interruptible: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Progress:
    """Take steps until `callbacks` stop the run. The rollouter starts with the learner's weights.

    Args:
        interruptible: Surrounds each rollout. A rollout changes no state, so an exception raised there discards the step.
    """
    producer, active = _make_producer(run, progress), True
    try:
        while active:
            with span("step", step=progress.step + 1):
                progress, rolled_back = run_step(run, rollouter, learner, progress, callbacks, producer, interruptible)
                if rolled_back:  # queued rollouts and those in the making come from discarded weights
                    producer.stop(rollouter.cancel)
                    producer = _make_producer(run, progress)
                active = callbacks.should_continue(progress)
    finally:
        producer.stop(rollouter.cancel)
    return progress


def run_step(
    run: Run,
    rollouter: Rollouter,
    learner: Learner,
    progress: Progress,
    callbacks: StepCallbacks,
    producer: RolloutProducer,
    interruptible: Callable[[], AbstractContextManager[object]],
) -> tuple[Progress, bool]:
    """Take one step: rollout, advantages, updates, publication of the weights.

    A sampler that accepts weights while it samples (`rollouter.in_flight`) keeps sampling after the step; for any other the
    next rollout is finished before its weights change.

    Returns:
        The new progress, and whether an earlier checkpoint was restored.
    """
    step, algorithm = progress.step + 1, run.algorithm.with_state(progress.state)
    busy = producer.busy_seconds
    config = RolloutConfig(run.sampling, run.prompts_per_step, run.effective_samples_per_prompt)
    collect = partial(rollouter.collect, algorithm, config, evaluate=learner.evaluate)
    with interruptible(), span("take rollout", step=step) as taking:
        rollout = producer.take(1 if rollouter.in_flight else max(1, run.rollouts_ahead(step)), collect)
    with interruptible(), span("lend memory") as lending:
        lent = rollouter.lend_memory()
    with producer.produce_during(run.rollouts_ahead(step + 1), collect):
        with span("learn", step=step) as learning:
            trained = train_on_rollout(rollout, algorithm, learner)
        waiting, publishing = span("wait for sampler"), span("publish", step=step)
        try:
            # A server that is silent must not delay a stop. The step is complete without it: a resumed run publishes first.
            with interruptible() if _may_skip_publication(run, progress) else nullcontext():
                with waiting:
                    if not rollouter.in_flight:
                        producer.wait_idle()
                with publishing:
                    published = rollouter.update_weights(learner.publish())
        except StopRequested:  # the checkpoint that follows ends the run
            published = {}
    # the wait for the next rollout to finish included, and in the first step what was sampled before it
    before = rollouter.time_before(step)
    rollout_seconds = taking.seconds + lending.seconds + waiting.seconds + sum(m.value for m in before.values())
    update_seconds = learning.seconds + publishing.seconds
    clock = before | {"time/rollout": Sum(rollout_seconds), "time/update": Sum(update_seconds)}
    if run.max_staleness:
        clock["time/sampler_idle"] = Sum(max(0.0, rollout_seconds + update_seconds - (producer.busy_seconds - busy)))
    sampled = drop_unmeasured(rollout.metrics)
    metrics = merge(sampled, lent, trained.metrics, trained.update_metrics, published, clock)
    result = StepResult(step, trained.algorithm, rollout, trained.batch, trained.psi, metrics)
    with span("log", step=step):
        outcome = callbacks.on_step(result)
    if outcome.restored_state is not None:
        state = outcome.restored_state
    elif outcome.undone:
        state = progress.state
    else:
        state = trained.update_state(run.algorithm, progress.state, outcome.metrics)
    queue, rolled_back = producer.queue, outcome.restored_state is not None
    after = Progress(
        state=state,
        step=step,
        position=queue.position,
        tokens=progress.tokens + rollout.num_sampled_tokens,
        seconds=progress.seconds + rollout_seconds + update_seconds,
        leftover_groups=() if rolled_back else queue.leftover_groups,
        queued_rollouts=() if rolled_back else queue.rollouts,
    )
    return after, rolled_back


def _may_skip_publication(run: Run, progress: Progress) -> bool:
    """Return whether a step can end without its weights at the sampler: they are a server's, and nothing evaluates them."""
    return run.sampler.engine != LOCAL and not progress.state


@dataclass(frozen=True, eq=False)
class TrainedRollout:
    """A rollout that the learner has made its updates on."""

    algorithm: Algorithm
    """With the corrections that stale samples need."""
    batch: Batch
    """With the fields that the learner has filled."""
    shaped: Batch
    """The batch with shaped rewards."""
    psi: Tensor
    """[B, T] advantages."""
    metrics: Metrics
    """Metrics of the batch."""
    update_metrics: Metrics

    def update_state(self, algorithm: Algorithm, state: State, evaluated: Metrics) -> State:
        """Return the state of the algorithm's parts after the step.

        Args:
            algorithm: The run's.
            state: The parts' state before the step.
            evaluated: Metrics of an evaluation after the step.
        """
        return algorithm.update_state(state, self.batch, self.update_metrics | evaluated, self.shaped)


def train_on_rollout(rollout: Rollout, algorithm: Algorithm, learner: Learner) -> TrainedRollout:
    """Compute the advantages of a rollout and update the learner's weights on it."""
    algorithm, batch = resolve_old_policy(algorithm, rollout.batch, learner.version)
    age = staleness_metrics(batch, learner.version)
    with span("evaluate batch"):
        batch = learner.evaluate(batch, algorithm.needs)
    with span("advantages"):
        shaped = algorithm.shape_rewards(batch)
        psi, batch = algorithm.compute_advantages(batch, shaped), algorithm.add_critic_targets(batch, shaped)
    with span("update"):
        update_metrics = drop_unmeasured(learner.update(batch, psi, algorithm))
    metrics = drop_unmeasured(merge(age, algorithm.report(batch)))
    return TrainedRollout(algorithm, batch, shaped, psi, metrics, update_metrics)


def _make_producer(run: Run, progress: Progress) -> RolloutProducer:
    """Produce rollouts from where the queued ones end to the run's last step."""
    tokens = progress.tokens + sum(rollout.num_sampled_tokens for rollout in progress.queued_rollouts)
    queue = RolloutQueue(
        progress.step + 1, progress.queued_rollouts, progress.position, progress.leftover_groups, tokens
    )
    return RolloutProducer(queue, lambda q: run.is_finished(q.next_request.step - 1, q.num_sampled_tokens))
