"""A plan: what a run of some work takes on some devices, in memory, seconds and money; and how devices are best divided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from policygrad.errors import ConfigError
from policygrad.planning import cost_model
from policygrad.planning.cost_model import Asks, Clock, Layout, Memory, Phases, Work
from policygrad.planning.hardware import DEVICES, Device, Reached
from policygrad.planning.model_shapes import Shape
from policygrad.planning.pipeline import LearnerSpeed, SamplerSpeed, Timeline, simulate

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
        return cost_model.learner(q.shape, q.work, q.asks, self.layout, q.device)

    @cached_property
    def sampler(self) -> Memory | None:
        """Of a device that only draws; None where there is none."""
        q = self.question
        return cost_model.sampler(q.shape, q.work, self.layout, q.device) if self.layout.apart else None

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
        return cost_model.usable(self.question.device)

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
        return cost_model.slots(q.shape, q.work, self.layout, q.device)

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


# What to change where a plan does not fit: one thing after another, each kept where it takes less memory, until it fits.

MOST = 4096
"""Devices that are looked for."""
ROWS = 16
"""Completions drawn at once, at least."""

TENSORS = (2, 4, 8)
"""Devices of one sampler that are tried."""


@dataclass(frozen=True)
class Remedy:
    """A change, and the plan with it and with those before it."""

    option: str
    """As it is written on the command line of plan."""
    what: str
    """In words."""
    plan: Plan


def remedies(plan: Plan) -> list[Remedy]:
    """In the order in which they cost least; empty where the plan fits, or nothing helps. The last fits, unless nothing does."""
    found, now = list[Remedy](), plan
    for try_ in (_checkpointed, _smaller_passes, _narrow, _fewer_rows, _engine, _apart, _spread):
        if now.fits:
            break
        for remedy in try_(now):
            if remedy.plan.peak < now.peak:
                found.append(remedy)
                now = remedy.plan
                break
    if not now.fits:
        found += [*_other_device(now), *_more(now)]
    return found


def _with(plan: Plan, option: str, what: str, layout: Layout) -> Remedy:
    return Remedy(option, what, Plan(plan.question, layout))


def _checkpointed(plan: Plan) -> Iterator[Remedy]:
    if not plan.layout.checkpointing:
        layout = replace(plan.layout, checkpointing=True)
        yield _with(plan, "--gradient-checkpointing", "activations are computed again on the way back", layout)


def _smaller_passes(plan: Plan) -> Iterator[Remedy]:
    least = plan.question.work.context
    if plan.layout.micro_tokens > least:
        layout = replace(plan.layout, micro_tokens=least)
        yield _with(plan, f"--micro-tokens {least}", "micro-batches of one text at a time", layout)


def _narrow(plan: Plan) -> Iterator[Remedy]:
    if plan.layout.dtype == "fp32":
        yield _with(plan, "--dtype bf16", "computing in bfloat16", replace(plan.layout, dtype="bf16"))


def _engine(plan: Plan) -> Iterator[Remedy]:
    if plan.layout.whole:
        layout = replace(plan.layout, whole=False)
        yield _with(plan, "--engine", "an engine has the policy, a learner only its share", layout)


def _apart(plan: Plan) -> Iterator[Remedy]:
    """The first division that fits: of the plan's own samplers, of an engine's, over more devices each."""
    layout = plan.layout
    if layout.apart:
        return
    for whole in dict.fromkeys((layout.whole, False)):
        for tensor in (layout.tensor, *(t for t in TENSORS if t > layout.tensor)):
            if layout.gpus <= tensor:
                continue
            divided = best(plan.question, replace(layout, whole=whole, tensor=tensor))
            if divided.fits:
                words = ["--engine"] * (layout.whole and not whole) + [f"--samplers {divided.layout.samplers}"]
                words += [f"--tensor-parallel {tensor}"] * (tensor > layout.tensor)
                yield Remedy(" ".join(words), "samplers on devices of their own", divided)
                return


def _fewer_rows(plan: Plan) -> Iterator[Remedy]:
    """The most that fit, in powers of two; where drawing takes more than learning."""
    rows, tried = plan.rows if _drawing_most(plan) else 0, list[Remedy]()
    while rows > ROWS:
        rows = 1 << ((rows - 1).bit_length() - 1)
        tried.append(
            _with(plan, f"--decode-rows {rows}", "fewer completions at once", replace(plan.layout, decode_rows=rows))
        )
    yield from ([remedy for remedy in tried if remedy.plan.fits] or tried[::-1])[:1]


def _spread(plan: Plan) -> Iterator[Remedy]:
    """A sampler on several devices, where one does not hold the policy."""
    layout = plan.layout
    if plan.sampler is None or plan.sampler.peak <= plan.usable:
        return
    for tensor in TENSORS:
        if tensor > layout.tensor and layout.samplers % tensor == 0:
            remedy = _with(
                plan, f"--tensor-parallel {tensor}", "each sampler on several devices", replace(layout, tensor=tensor)
            )
            if remedy.plan.sampler is not None and remedy.plan.sampler.peak <= plan.usable:
                yield remedy
                return


def _drawing_most(plan: Plan) -> bool:
    """Of a device that does both."""
    return sum(plan.learner.drawing.values()) > sum(plan.learner.learning.values())


def _other_device(plan: Plan) -> Iterator[Remedy]:
    """The smallest of those that hold it."""
    larger = [d for d in DEVICES.values() if d.memory > plan.question.device.memory and d.name != "cpu"]
    for device in sorted(larger, key=lambda d: d.memory):
        found = Plan(replace(plan.question, device=device), plan.layout)
        if found.fits:
            yield Remedy(f"--gpus {device.name}:{plan.layout.gpus}", "devices with more memory", found)
            return


def _more(plan: Plan) -> Iterator[Remedy]:
    """The fewest that hold it, twice as many each time."""
    gpus = plan.layout.gpus * 2
    while gpus <= MOST:
        layout = replace(plan.layout, gpus=gpus)
        found = best(plan.question, layout) if layout.apart else Plan(plan.question, layout)
        if found.fits:
            yield Remedy(f"--gpus {plan.question.device.name}:{gpus}", "more devices", found)
            return
        gpus *= 2
