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
from policygrad.core.staleness import behaviour, staleness
from policygrad.learners.base import Learner
from policygrad.rollout.async_producer import Ahead, Collect, Producer
from policygrad.rollout.rollouter import Rollout, Rollouter
from policygrad.rollout.trajectory import Group
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
    carried: tuple[Group, ...] = ()
    """Sampled, judged and not trained on yet: the next rollout begins with them."""
    ahead: tuple[Rollout, ...] = ()
    """Of the next steps, drawn already (`Run.staleness`); `position` and `carried` are those after them."""

    def over(self, run: Run) -> bool:
        """Whether the run is at its end: the last step done, or the token budget used up."""
        return self.step >= run.steps or (run.tokens is not None and self.tokens >= run.tokens)


@dataclass(frozen=True, eq=False)
class Done:
    """One step, for whoever watches."""

    step: int
    algorithm: Algorithm
    """As it was in this step."""
    rollout: Rollout
    batch: Batch
    psi: Tensor
    metrics: Metrics


class Watcher(Protocol):
    """Follows a run step by step."""

    def record(self, done: Done) -> Metrics:
        """A step is done; returns what was measured on held-out problems now, if anything, for the algorithm's parts to see."""
        ...

    def keep_going(self, progress: Progress) -> bool:
        """What outlives the step, to be saved from time to time; whether to go on."""
        ...


def loop(
    run: Run,
    rollouter: Rollouter,
    learner: Learner,
    progress: Progress,
    watcher: Watcher,
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
            after = one_step(run, rollouter, learner, progress, watcher, producer, breakable)
            progress, gone = settle(progress, after)
            if gone:
                producer.end(rollouter.cancel)
                producer = _producer(run, progress)
            going = watcher.keep_going(progress)
    finally:
        producer.end(rollouter.cancel)
    return progress


def one_step(
    run: Run,
    rollouter: Rollouter,
    learner: Learner,
    progress: Progress,
    watcher: Watcher,
    producer: Producer,
    breakable: Callable[[], AbstractContextManager[object]],
) -> Progress:
    """A rollout, what it is worth, the updates, the weights. Where the sampler takes weights while it draws, it draws on when the
    step is over; else the next rollout is whole before the weights change."""
    step, algorithm = progress.step + 1, run.algorithm.at(progress.state)
    began, busy = time.perf_counter(), producer.busy
    collect = _collecting(run, rollouter, learner, algorithm)
    with breakable():
        rollout = producer.take(1 if rollouter.in_flight else max(1, run.ahead(step)), collect)
    sampled = time.perf_counter()
    with producer.beside(run.ahead(step + 1), collect):
        algorithm, batch = behaviour(algorithm, rollout.batch, learner.version)
        age = staleness(batch, learner.version)
        batch = learner.evaluate(batch, algorithm.needs)
        shaped = algorithm.shaped(batch)
        psi, batch = algorithm.advantages(batch, shaped), algorithm.with_targets(batch, shaped)
        measured = learner.update(batch, psi, algorithm)
        updated = time.perf_counter()
        if not rollouter.in_flight:
            producer.settle()
        waited = time.perf_counter()
        published = rollouter.update(learner.publish())
    ended = time.perf_counter()
    clock: Metrics = {
        "time/rollout": Sum(sampled - began + waited - updated),  # what the step has waited for
        "time/update": Sum(updated - sampled + ended - waited),
    }
    if run.staleness:
        clock["time/sampler_idle"] = Sum(max(0.0, ended - began - (producer.busy - busy)))
    metrics = merge(rollout.metrics, age, algorithm.report(batch), measured, published, clock)
    found = watcher.record(Done(step, algorithm, rollout, batch, psi, metrics))
    finished = producer.finished
    return Progress(
        state=run.algorithm.update(progress.state, batch, measured | found, shaped),
        step=step,
        position=finished.position,
        tokens=progress.tokens + rollout.sampled,
        seconds=progress.seconds + ended - began,
        carried=finished.carried,
        ahead=finished.rollouts,
    )


def _producer(run: Run, progress: Progress) -> Producer:
    """From where the rollouts that wait end, to the run's last step."""
    tokens = progress.tokens + sum(rollout.sampled for rollout in progress.ahead)
    waiting = Ahead(progress.step + 1, progress.ahead, progress.position, progress.carried, tokens)
    return Producer(waiting, lambda ahead: Progress({}, ahead.next[0] - 1, tokens=ahead.tokens).over(run))


def _collecting(run: Run, rollouter: Rollouter, learner: Learner, algorithm: Algorithm) -> Collect:
    """What collects the rollout of a step."""

    def collect(step: int, position: int, carried: Sequence[Group]) -> Rollout:
        with rollouter.turn:
            return rollouter.collect(
                algorithm,
                run.sampling,
                prompts=run.prompts_per_step,
                samples=run.group_size,
                step=step,
                position=position,
                carried=carried,
                evaluate=learner.evaluate,
            )

    return collect
