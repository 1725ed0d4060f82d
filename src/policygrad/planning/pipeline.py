"""A simulation of asynchronous training: how long sampler and learner wait for each other, and which `--max-staleness` suffices.

Rollouts of given lengths meet a sampler and a learner of given speeds, with the order of events of `training.loop`. Not modelled:
lengths that change as the policy learns, rewards that take longer than sampling, failing servers.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Lengths = Sequence[int]  # tokens of each completion of one rollout, in the order of the requests


@dataclass(frozen=True)
class SamplerSpeed:
    """Seconds of a sampler: one token for each of n completions takes `fixed` + n · `per_completion`.

    The weights are read once per token, and every completion's cache once. At most `max_concurrency` completions are generated at
    a time; when one ends, the next starts.
    """

    fixed: float
    per_completion: float
    max_concurrency: int
    startup: float = 0.0  # seconds of a rollout before its first token

    def __call__(self, lengths: Lengths) -> float:
        """Return the seconds of one rollout."""
        waiting = [n for n in reversed(lengths) if n > 0]
        running = list[int]()  # the token count at which each will end
        position, seconds = 0, self.startup
        while waiting or running:
            while waiting and len(running) < self.max_concurrency:
                heapq.heappush(running, position + waiting.pop())
            tokens = running[0] - position
            seconds += tokens * (self.fixed + len(running) * self.per_completion)
            position = running[0]
            while running and running[0] == position:
                heapq.heappop(running)
        return seconds


@dataclass(frozen=True)
class LearnerSpeed:
    """Seconds of a learner: an update on t tokens takes `fixed` + t · `per_token`, then publishing `publish`, without sampling."""

    fixed: float
    per_token: float
    publish: float

    def __call__(self, lengths: Lengths) -> float:
        """Return the seconds of one rollout's updates."""
        return self.fixed + self.per_token * sum(lengths)


@dataclass(frozen=True)
class Timeline:
    """Times of each step, in seconds since the start."""

    rollout_ready: tuple[float, ...]  # when the step had its rollout
    step_ends: tuple[float, ...]  # when the step's weights were published
    learner_waits: tuple[float, ...]  # seconds that the learner waited in the step
    sampling_seconds: tuple[float, ...]
    """Seconds in the step with a rollout in progress, including one that pauses for new weights."""
    max_staleness: int = 0  # steps by which the sampler may be ahead

    @property
    def steady_state(self) -> slice:
        """Steps that represent a long run: without the first, which overlaps nothing, and the last, during which nothing remains
        to be sampled. All steps of a run that has no others."""
        last = len(self.step_ends) - self.max_staleness
        return slice(1, last) if last > 1 else slice(0, len(self.step_ends))

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a `steady_state` step."""
        return self._duration(self.steady_state) / len(self.step_ends[self.steady_state])

    @property
    def learner_idle(self) -> float:
        """Fraction of the `steady_state` time in which the learner waits."""
        return self.idle_fractions()[0]

    @property
    def sampler_idle(self) -> float:
        """Fraction of the `steady_state` time in which the sampler waits."""
        return self.idle_fractions()[1]

    def idle_fractions(self, steps: slice | None = None) -> tuple[float, float]:
        """Return the fractions of these steps' time, by default the `steady_state` ones, in which (learner, sampler) wait."""
        steps = self.steady_state if steps is None else steps
        seconds = self._duration(steps)
        if seconds <= 0:
            return 0.0, 0.0
        return sum(self.learner_waits[steps]) / seconds, max(0.0, 1 - sum(self.sampling_seconds[steps]) / seconds)

    def _duration(self, steps: slice) -> float:
        times = (0.0, *self.step_ends)
        first, last, _ = steps.indices(len(self.step_ends))
        return times[last] - times[first]


def simulate(
    rollouts: Sequence[Lengths],
    sampler: SamplerSpeed,
    learner: LearnerSpeed,
    staleness: int,
    *,
    in_flight: bool = False,
) -> Timeline:
    """Simulate a run with one step per rollout.

    Args:
        in_flight: The sampler accepts new weights in the middle of a rollout, so that sampling continues across steps; otherwise
            the rollout that overlaps an update is finished before the weights change.

    Raises:
        ValueError: There are no rollouts, or the staleness is negative.
    """
    if not rollouts or staleness < 0:
        raise ValueError(f"needs a rollout and a staleness of at least 0, not {len(rollouts)} and {staleness}")
    sampling, updates = [sampler(r) for r in rollouts], [learner(r) for r in rollouts]
    run = _simulate_in_flight if in_flight and staleness else _simulate_lockstep
    return run(sampling, updates, learner.publish, staleness)


def _simulate_lockstep(rollouts: Sequence[float], updates: Sequence[float], publish: float, staleness: int) -> Timeline:
    """Simulate a run whose step ends when both learner and sampler have finished their part."""
    steps, done, now = len(rollouts), 0, 0.0
    ready, ends, waits, sampling = list[float](), list[float](), list[float](), list[float]()
    for step in range(steps):
        target = step + max(1, min(staleness, steps - step))
        first, done = sum(rollouts[done:target]), max(done, target)
        target = step + 1 + min(staleness, steps - step - 1)
        overlapping, done = sum(rollouts[done:target]), max(done, target)
        ready.append(now + first)
        waits.append(first + max(0.0, overlapping - updates[step]))
        sampling.append(first + overlapping)
        now = ready[-1] + max(updates[step], overlapping) + publish
        ends.append(now)
    return Timeline(tuple(ready), tuple(ends), tuple(waits), tuple(sampling), staleness)


def _simulate_in_flight(
    rollouts: Sequence[float], updates: Sequence[float], publish: float, staleness: int
) -> Timeline:
    """Simulate a sampler that continues across steps and pauses while weights are published.

    A rollout starts when the one before is complete and the one `staleness` before it was taken by the learner.
    """
    now, complete = 0.0, 0.0
    ready, ends, waits = list[float](), list[float](), list[float]()
    pauses, spans = list[tuple[float, float]](), list[tuple[float, float]]()
    for step, (seconds, update) in enumerate(zip(rollouts, updates, strict=True)):
        start = max(complete, ready[max(0, step - staleness)] if step else 0.0)
        complete, remaining = start, seconds  # sampling stops during the pauses
        for pause_start, pause_end in pauses:
            if pause_end <= complete:
                continue
            if complete + remaining <= pause_start:
                break
            remaining -= max(0.0, pause_start - complete)
            complete = pause_end
        complete += remaining
        spans.append((start, complete))
        ready.append(max(now, complete))
        waits.append(ready[-1] - now)
        learned = ready[-1] + update
        now = learned + publish
        pauses.append((learned, now))
        ends.append(now)
    sampling = tuple(
        sum(max(0.0, min(end, step_end) - max(start, step_start)) for start, end in spans)
        for step_start, step_end in pairwise([0.0, *ends])
    )
    return Timeline(tuple(ready), tuple(ends), tuple(waits), sampling, staleness)
