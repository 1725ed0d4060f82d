"""A plan: what a run of some work takes on some devices, in memory, seconds and money; and how devices are best divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from policygrad.errors import ConfigError
from policygrad.planning import memory
from policygrad.planning.devices import Device
from policygrad.planning.layout import Layout
from policygrad.planning.memory import Memory
from policygrad.planning.pipeline import LearnerSpeed, SamplerSpeed, Timeline, simulate
from policygrad.planning.reached import Reached
from policygrad.planning.seconds import Clock, Phases
from policygrad.planning.shapes import Shape
from policygrad.planning.work import Asks, Work

STEPS = 64
"""That are simulated, of samplers and learners apart."""
SPLITS = 16
"""Divisions of the devices that are tried, at most."""


@dataclass(frozen=True)
class Question:
    """What is planned for."""

    shape: Shape
    device: Device
    work: Work
    asks: Asks
    reached: Reached


@dataclass(frozen=True)
class Plan:
    """The answer for one layout."""

    question: Question
    layout: Layout

    @cached_property
    def phases(self) -> Phases:
        """Seconds of a step's phases."""
        q = self.question
        return Clock(q.shape, q.device, q.reached, self.layout).phases(q.work, q.asks)

    @cached_property
    def learner(self) -> Memory:
        """Of a device that learns."""
        q = self.question
        return memory.learner(q.shape, q.work, q.asks, self.layout, q.device)

    @cached_property
    def sampler(self) -> Memory | None:
        """Of a device that only draws; None where there is none."""
        q = self.question
        return memory.sampler(q.shape, q.work, self.layout, q.device) if self.layout.apart else None

    @cached_property
    def timeline(self) -> Timeline | None:
        """Of samplers and learners apart, by the simulator of `pipeline`; all rollouts alike."""
        if not self.layout.apart:
            return None
        found = self.phases
        drawing, learning = SamplerSpeed(found.generation, 0.0, 1), LearnerSpeed(found.update, 0.0, found.publishing)
        return simulate([(1,)] * STEPS, drawing, learning, self.layout.staleness)

    @property
    def step(self) -> float:
        """Seconds."""
        return self.phases.whole if self.timeline is None else self.timeline.step

    @property
    def usable(self) -> float:
        """Bytes of a device."""
        return memory.usable(self.question.device)

    @property
    def peak(self) -> float:
        """Bytes of the device that has most."""
        return max(self.learner.peak, self.sampler.peak if self.sampler else 0.0)

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable

    @property
    def rows(self) -> int:
        """Completions that one sampler draws at once."""
        q = self.question
        return memory.slots(q.shape, q.work, self.layout, q.device)

    @property
    def tokens_per_second(self) -> float:
        """Sampled ones, of all devices."""
        return self.question.work.sampled / self.step

    @property
    def mfu(self) -> float:
        """Share of the peak rate at which a step's operations are needed, without any that are done twice."""
        q = self.question
        tokens, clock = q.work.tokens(self.layout.shared), Clock(q.shape, q.device, q.reached, self.layout)
        learned = q.asks.trained * q.asks.epochs * clock.operations(tokens, 3, 3)
        passes = q.asks.readings(self.layout.staleness) + 1  # and what is drawn
        total = learned + passes * clock.operations(tokens, 1, 1)
        return total / self.step / self.layout.gpus / q.device.rate(self.layout.weight)

    def hours(self, steps: int) -> float:
        """Of all devices together."""
        return self.layout.gpus * self.step * steps / 3600

    def as_dict(self, steps: int, price: float | None = None) -> dict[str, Any]:
        """For JSON: seconds, bytes, device hours of so many steps, and what they cost."""
        line = self.timeline
        return {
            "gpus": self.layout.gpus,
            "layout": asdict(self.layout),
            "fits": self.fits,
            "memory": {
                "usable": self.usable,
                "peak": self.peak,
                "learner": _bytes(self.learner),
                "sampler": None if self.sampler is None else _bytes(self.sampler),
            },
            "seconds": {"step": self.step, **asdict(self.phases)},
            "idle": None if line is None else {"learner": line.learner_idle, "sampler": line.sampler_idle},
            "rows": self.rows,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "steps": steps,
            "gpu_hours": self.hours(steps),
            "cost": None if price is None else self.hours(steps) * price,
        }


def _bytes(of: Memory) -> dict[str, Any]:
    parts: dict[str, Mapping[str, float]] = {"always": of.always, "learning": of.learning, "drawing": of.drawing}
    return {"peak": of.peak, **{name: dict(part) for name, part in parts.items()}}


def splits(gpus: int, tensor: int) -> list[int]:
    """Numbers of devices that only draw which are worth trying: whole samplers, at least one learner left."""
    every = list(range(tensor, gpus, tensor))
    if len(every) <= SPLITS:
        return every
    wanted = {round(len(every) * (i + 0.5) / SPLITS) for i in range(SPLITS)}
    return [every[min(i, len(every) - 1)] for i in sorted(wanted)]


def best(question: Question, layout: Layout) -> Plan:
    """The division into samplers and learners with the shortest step, among those that fit where any do; layout.samplers is left
    out of account.

    Raises:
        ConfigError: fewer devices than one sampler and one learner take.
    """
    tried = [Plan(question, replace(layout, samplers=n)) for n in splits(layout.gpus, layout.tensor)]
    if not tried:
        raise ConfigError(
            f"samplers apart from learners take at least {layout.tensor + 1} devices, not {layout.gpus}: give more --gpus, or "
            "leave --staleness and --samplers out"
        )
    return min(tried, key=lambda plan: (not plan.fits, plan.step if plan.fits else plan.peak))


def curve(question: Question, layout: Layout, counts: Sequence[int]) -> list[Plan]:
    """The same work on other numbers of devices: in turns, or samplers apart, as many of them as is best."""
    found = list[Plan]()
    for gpus in counts:
        if layout.apart and gpus > layout.tensor:
            found.append(best(question, replace(layout, gpus=gpus, samplers=layout.tensor)))
        elif not layout.apart and gpus % layout.tensor == 0:
            found.append(Plan(question, replace(layout, gpus=gpus)))
    return found


def counts(gpus: int) -> list[int]:
    """Powers of two up to four times as many, and what was asked for."""
    return sorted({gpus, *(2**i for i in range((4 * gpus).bit_length()) if 2**i <= 4 * gpus)})
