"""A run's clock without the run: rollouts of given lengths, a sampler and a learner of given speeds, and how far one may be ahead
of the other. Says how long each waits for the other, and which `--max-staleness` is enough.

The order of events is that of `training.loop`. What is left out: how lengths change as the policy learns, rewards that take longer
than sampling, servers that fail.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from random import Random

Lengths = Sequence[int]
"""Tokens of each completion of one rollout, in the order in which they are asked for."""


@dataclass(frozen=True)
class SamplerSpeed:
    """One token for each of n completions takes `fixed` + n · `each` seconds, as weights are read once and every completion's keys
    once; at most `slots` are drawn at a time, and where one ends the next begins."""

    fixed: float
    per_completion: float
    max_concurrency: int
    startup: float = 0.0
    """Seconds of a rollout before its first token."""

    def __call__(self, lengths: Lengths) -> float:
        """Seconds for one rollout."""
        waiting = [n for n in reversed(lengths) if n > 0]
        going = list[int]()  # tokens drawn when each will be over
        drawn, seconds = 0, self.startup
        while waiting or going:
            while waiting and len(going) < self.max_concurrency:
                heapq.heappush(going, drawn + waiting.pop())
            tokens = going[0] - drawn
            seconds += tokens * (self.fixed + len(going) * self.per_completion)
            drawn = going[0]
            while going and going[0] == drawn:
                heapq.heappop(going)
        return seconds


@dataclass(frozen=True)
class LearnerSpeed:
    """An update of t tokens takes `fixed` + t · `each` seconds, and publishing the weights `publish`, in which nothing is drawn."""

    fixed: float
    per_token: float
    publish: float

    def __call__(self, lengths: Lengths) -> float:
        """Seconds for one rollout's updates."""
        return self.fixed + self.per_token * sum(lengths)


@dataclass(frozen=True)
class Timeline:
    """Seconds since the beginning, per step."""

    rollout_ready: tuple[float, ...]
    """When the step had its rollout."""
    step_ends: tuple[float, ...]
    """When its weights were published."""
    learner_waits: tuple[float, ...]
    """That the learner did in the step."""
    sampling_seconds: tuple[float, ...]
    """In which a rollout was in the making in the step, also one that rests while weights are taken over."""
    max_staleness: int = 0
    """Steps that the sampler may be ahead."""

    @property
    def total_seconds(self) -> float:
        return self.step_ends[-1]

    @property
    def steady_state(self) -> slice:
        """The steps that are like those of a long run: without the first, which has nothing to be beside, and without those at the
        end beside which nothing is left to draw. All steps of a run that has no others."""
        last = len(self.step_ends) - self.max_staleness
        return slice(1, last) if last > 1 else slice(0, len(self.step_ends))

    @property
    def step_seconds(self) -> float:
        """Mean seconds of the `full` steps."""
        return self._duration(self.steady_state) / len(self.step_ends[self.steady_state])

    @property
    def learner_idle(self) -> float:
        """Share of the `full` steps' time."""
        return self.idle_fractions()[0]

    @property
    def sampler_idle(self) -> float:
        """Share of the `full` steps' time."""
        return self.idle_fractions()[1]

    def idle_fractions(self, steps: slice | None = None) -> tuple[float, float]:
        """The shares of these steps' time, or the `full` ones', in which (the learner, the sampler) is idle; of no time, 0."""
        some = self.steady_state if steps is None else steps
        seconds = self._duration(some)
        if seconds <= 0:
            return 0.0, 0.0
        return sum(self.learner_waits[some]) / seconds, max(0.0, 1 - sum(self.sampling_seconds[some]) / seconds)

    def _duration(self, steps: slice) -> float:
        """Seconds of these steps together."""
        begins = (0.0, *self.step_ends)
        first, last, _ = steps.indices(len(self.step_ends))
        return begins[last] - begins[first]


def simulate(
    rollouts: Sequence[Lengths],
    sampler: SamplerSpeed,
    learner: LearnerSpeed,
    staleness: int,
    *,
    in_flight: bool = False,
) -> Timeline:
    """A run of so many steps. in_flight: the sampler takes weights over while it draws, so that it draws on from step to step;
    else the rollout beside an update is whole before the weights change.

    Raises:
        ValueError: no rollouts, or a staleness below 0.
    """
    if not rollouts or staleness < 0:
        raise ValueError(
            f"a run has at least one rollout and a staleness of at least 0, not {len(rollouts)} and {staleness}"
        )
    draws, updates = [sampler(r) for r in rollouts], [learner(r) for r in rollouts]
    return (_simulate_in_flight if in_flight and staleness else _simulate_lockstep)(
        draws, updates, learner.publish, staleness
    )


def _simulate_lockstep(draws: Sequence[float], updates: Sequence[float], publish: float, staleness: int) -> Timeline:
    """A step ends when both have done theirs."""
    steps, there, now = len(draws), 0, 0.0
    sampled, ended, waited, drawn = list[float](), list[float](), list[float](), list[float]()
    for step in range(steps):
        want = step + max(1, min(staleness, steps - step))
        first, there = sum(draws[there:want]), max(there, want)
        want = step + 1 + min(staleness, steps - step - 1)
        beside, there = sum(draws[there:want]), max(there, want)
        sampled.append(now + first)
        waited.append(first + max(0.0, beside - updates[step]))
        drawn.append(first + beside)
        now = sampled[-1] + max(updates[step], beside) + publish
        ended.append(now)
    return Timeline(tuple(sampled), tuple(ended), tuple(waited), tuple(drawn), staleness)


def _simulate_in_flight(draws: Sequence[float], updates: Sequence[float], publish: float, staleness: int) -> Timeline:
    """The sampler draws on: a rollout begins when the one before is whole and the one `staleness` before it was taken. It rests
    while weights are published."""
    now, whole = 0.0, 0.0
    sampled, ended, waited = list[float](), list[float](), list[float]()
    pauses, making = list[tuple[float, float]](), list[tuple[float, float]]()
    for step, (draw, update) in enumerate(zip(draws, updates, strict=True)):
        begun = max(whole, sampled[max(0, step - staleness)] if step else 0.0)
        whole = _finish_time(begun, draw, pauses)
        making.append((begun, whole))
        sampled.append(max(now, whole))
        waited.append(sampled[-1] - now)
        learned = sampled[-1] + update
        now = learned + publish
        pauses.append((learned, now))
        ended.append(now)
    drawn = tuple(sum(_overlap(step, some) for some in making) for step in pairwise([0.0, *ended]))
    return Timeline(tuple(sampled), tuple(ended), tuple(waited), drawn, staleness)


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Seconds that are in both spans."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _finish_time(begun: float, seconds: float, pauses: Sequence[tuple[float, float]]) -> float:
    """When so many seconds of work are done that begin then and rest in the pauses."""
    now, left = begun, seconds
    for first, last in pauses:
        if last <= now:
            continue
        if now + left <= first:
            break
        left -= max(0.0, first - now)
        now = last
    return now + left


def resample_lengths(lengths: Lengths, steps: int, size: int, seed: int = 0) -> list[list[int]]:
    """As many rollouts, of `size` completions each, whose lengths are drawn from measured ones, with replacement: what a run of
    another size, or a longer one, would have. Lengths of one prompt are taken to hang together no more than others."""
    random = Random(seed)
    return [random.choices(lengths, k=size) for _ in range(steps)]


def find_best_staleness(
    rollouts: Sequence[Lengths],
    sampler: SamplerSpeed,
    learner: LearnerSpeed,
    *,
    in_flight: bool = False,
    max_staleness: int = 16,
    tolerance: float = 0.01,
) -> int:
    """The smallest `--max-staleness`, of at most `most`, whose steps are as fast as any's, within a share."""
    speeds = [
        simulate(rollouts, sampler, learner, k, in_flight=in_flight).step_seconds for k in range(max_staleness + 1)
    ]
    return smallest_sufficient(speeds, tolerance)


def smallest_sufficient(steps: Sequence[float], tolerance: float = 0.01) -> int:
    """The first of `steps` (seconds a step with staleness 0, 1, 2, …) that is as fast as the fastest of them, within a share."""
    best = min(steps)
    return next(k for k, seconds in enumerate(steps) if seconds <= best * (1 + tolerance))


# How fast a sampler and a learner are, from seconds that were measured: least squares whose coefficients are no less than 0.
#
# A rollout's seconds are `start` + rounds · `fixed` + tokens · `each`: of tokens there are as many as completions have together, of
# rounds as many as `slots` at a time take; an update's are `fixed` + tokens · `each`. All of it is linear in what is sought.

Columns = Sequence[Sequence[float]]
FLAT = 1e-9
"""A share of the squares; columns of length 1 whose smallest singular value is below its root hang on each other."""


def fit_sampler_speed(rollouts: Sequence[Lengths], seconds: Sequence[float], max_concurrency: int) -> SamplerSpeed:
    """Of one that draws `slots` completions at a time, and took so many seconds for each of these rollouts."""
    tokens = [float(sum(lengths)) for lengths in rollouts]
    rounds = [SamplerSpeed(1.0, 0.0, max_concurrency)(lengths) for lengths in rollouts]
    each, fixed, start = fit_nonnegative([tokens, rounds, [1.0] * len(seconds)], seconds)
    return SamplerSpeed(fixed, each, max_concurrency, start)


def fit_learner_speed(rollouts: Sequence[Lengths], seconds: Sequence[float], publish: float) -> LearnerSpeed:
    """Of one that took so many seconds for the updates of each of these rollouts. publish: seconds."""
    tokens = [float(sum(lengths)) for lengths in rollouts]
    each, fixed = fit_nonnegative([tokens, [1.0] * len(seconds)], seconds)
    return LearnerSpeed(fixed, each, publish)


def fit_nonnegative(columns: Columns, target: Sequence[float]) -> list[float]:
    """x ≥ 0 that minimises Σ_i (target_i − Σ_j columns_j,i · x_j)². Where columns hang on each other the first of them stand for
    the rest. All sets of columns are tried, so that there should be few.

    Raises:
        ValueError: nothing to fit to.
    """
    if not target or not columns:
        raise ValueError("a speed is fitted to at least one measurement")
    import numpy as np  # here alone: a plan is made without it

    table, goal = np.asarray(columns, dtype=float).T, np.asarray(target, dtype=float)
    norms = np.linalg.norm(table, axis=0)
    best, found = float(goal @ goal), [0.0] * len(columns)
    enough = best * FLAT
    for count in range(1, len(columns) + 1):
        for chosen in map(list, combinations(np.flatnonzero(norms).tolist(), count)):
            some, _, rank, _ = np.linalg.lstsq(table[:, chosen] / norms[chosen], goal, rcond=FLAT**0.5)
            if rank < count or some.min() < 0:
                continue
            some = some / norms[chosen]
            left = goal - table[:, chosen] @ some
            if (error := float(left @ left)) < best - enough:
                best, found = error, [0.0] * len(columns)
                for j, x in zip(chosen, some.tolist(), strict=True):
                    found[j] = x
    return found
