"""A plan: what a run of some work takes on some devices, in memory, seconds and money; and how devices are best divided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from policygrad.errors import ConfigError
from policygrad.planning import cost_model
from policygrad.planning.cost_model import (
    AlgorithmCost,
    MemoryBreakdown,
    ParallelLayout,
    StepTimes,
    TimeModel,
    Workload,
)
from policygrad.planning.hardware import DEVICES, Device, Efficiency
from policygrad.planning.model_shapes import ModelShape
from policygrad.planning.pipeline import LearnerSpeed, SamplerSpeed, Timeline, simulate

SIMULATED_STEPS = 64
"""That are simulated, of samplers and learners apart."""
MAX_SPLITS = 16
"""Divisions of the devices that are tried, at most."""


@dataclass(frozen=True)
class PlanRequest:
    """What is planned for."""

    shape: ModelShape
    device: Device
    workload: Workload
    algorithm: AlgorithmCost
    efficiency: Efficiency


@dataclass(frozen=True)
class CapacityPlan:
    """The answer for one layout."""

    request: PlanRequest
    layout: ParallelLayout

    @cached_property
    def step_times(self) -> StepTimes:
        """Seconds of a step's phases."""
        q = self.request
        return TimeModel(q.shape, q.device, q.efficiency, self.layout).step_times(q.workload, q.algorithm)

    @cached_property
    def learner(self) -> MemoryBreakdown:
        """Of a device that learns."""
        q = self.request
        return cost_model.learner_memory(q.shape, q.workload, q.algorithm, self.layout, q.device)

    @cached_property
    def sampler(self) -> MemoryBreakdown | None:
        """Of a device that only draws; None where there is none."""
        q = self.request
        return (
            cost_model.sampler_memory(q.shape, q.workload, self.layout, q.device)
            if self.layout.is_disaggregated
            else None
        )

    @cached_property
    def timeline(self) -> Timeline | None:
        """Of samplers and learners apart, by the simulator of `pipeline`; all rollouts alike."""
        if not self.layout.is_disaggregated:
            return None
        found = self.step_times
        drawing, learning = SamplerSpeed(found.generation, 0.0, 1), LearnerSpeed(found.update, 0.0, found.publishing)
        return simulate([(1,)] * SIMULATED_STEPS, drawing, learning, self.layout.max_staleness)

    @property
    def step_seconds(self) -> float:
        """Seconds."""
        return self.step_times.total if self.timeline is None else self.timeline.step_seconds

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device."""
        return cost_model.usable_bytes(self.request.device)

    @property
    def peak_bytes(self) -> float:
        """Bytes of the device that has most."""
        return max(self.learner.peak_bytes, self.sampler.peak_bytes if self.sampler else 0.0)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes

    @property
    def concurrent_rows(self) -> int:
        """Completions that one sampler draws at once."""
        q = self.request
        return cost_model.max_concurrent_rows(q.shape, q.workload, self.layout, q.device)

    @property
    def tokens_per_second(self) -> float:
        """Sampled ones, of all devices."""
        return self.request.workload.sampled_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Share of the peak rate at which a step's operations are needed, without any that are done twice."""
        q = self.request
        tokens, clock = (
            q.workload.count_tokens(self.layout.shares_prompts),
            TimeModel(q.shape, q.device, q.efficiency, self.layout),
        )
        learned = q.algorithm.trained_models * q.algorithm.epochs * clock.operations(tokens, 3, 3)
        passes = q.algorithm.scoring_passes_at(self.layout.max_staleness) + 1  # and what is drawn
        total = learned + passes * clock.operations(tokens, 1, 1)
        return total / self.step_seconds / self.layout.gpus / q.device.rate(self.layout.bytes_per_number)

    def device_hours(self, steps: int) -> float:
        """Of all devices together."""
        return self.layout.gpus * self.step_seconds * steps / 3600

    def to_dict(self, steps: int, price: float | None = None) -> dict[str, Any]:
        """For JSON: seconds, bytes, device hours of so many steps, and what they cost."""
        line = self.timeline
        return {
            "gpus": self.layout.gpus,
            "layout": asdict(self.layout),
            "fits": self.fits,
            "memory": {
                "usable": self.usable_bytes,
                "peak": self.peak_bytes,
                "learner": _bytes(self.learner),
                "sampler": None if self.sampler is None else _bytes(self.sampler),
            },
            "seconds": {"step": self.step_seconds, **asdict(self.step_times)},
            "idle": None if line is None else {"learner": line.learner_idle, "sampler": line.sampler_idle},
            "rows": self.concurrent_rows,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "steps": steps,
            "gpu_hours": self.device_hours(steps),
            "cost": None if price is None else self.device_hours(steps) * price,
        }


def _bytes(of: MemoryBreakdown) -> dict[str, Any]:
    parts: dict[str, Mapping[str, float]] = {"always": of.static, "learning": of.training, "drawing": of.sampling}
    return {"peak": of.peak_bytes, **{name: dict(part) for name, part in parts.items()}}


def device_splits(gpus: int, tensor: int) -> list[int]:
    """Numbers of devices that only draw which are worth trying: whole samplers, at least one learner left."""
    every = list(range(tensor, gpus, tensor))
    if len(every) <= MAX_SPLITS:
        return every
    wanted = {round(len(every) * (i + 0.5) / MAX_SPLITS) for i in range(MAX_SPLITS)}
    return [every[min(i, len(every) - 1)] for i in sorted(wanted)]


def find_best_split(question: PlanRequest, layout: ParallelLayout) -> CapacityPlan:
    """The division into samplers and learners with the shortest step, among those that fit where any do; layout.samplers is left
    out of account.

    Raises:
        ConfigError: fewer devices than one sampler and one learner take.
    """
    tried = [
        CapacityPlan(question, replace(layout, samplers=n)) for n in device_splits(layout.gpus, layout.tensor_parallel)
    ]
    if not tried:
        raise ConfigError(
            f"samplers apart from learners take at least {layout.tensor_parallel + 1} devices, not {layout.gpus}: give more --gpus, or "
            "leave --max-staleness and --samplers out"
        )
    return min(tried, key=lambda plan: (not plan.fits, plan.step_seconds if plan.fits else plan.peak_bytes))


def plan_device_counts(question: PlanRequest, layout: ParallelLayout, counts: Sequence[int]) -> list[CapacityPlan]:
    """The same work on other numbers of devices: in turns, or samplers apart, as many of them as is best."""
    found = list[CapacityPlan]()
    for gpus in counts:
        if layout.is_disaggregated and gpus > layout.tensor_parallel:
            found.append(find_best_split(question, replace(layout, gpus=gpus, samplers=layout.tensor_parallel)))
        elif not layout.is_disaggregated and gpus % layout.tensor_parallel == 0:
            found.append(CapacityPlan(question, replace(layout, gpus=gpus)))
    return found


def device_counts(gpus: int) -> list[int]:
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
class Suggestion:
    """A change, and the plan with it and with those before it."""

    option: str
    """As it is written on the command line of plan."""
    description: str
    """In words."""
    plan: CapacityPlan


def suggest_changes(plan: CapacityPlan) -> list[Suggestion]:
    """In the order in which they cost least; empty where the plan fits, or nothing helps. The last fits, unless nothing does."""
    found, now = list[Suggestion](), plan
    for try_ in (_checkpointed, _smaller_passes, _narrow, _fewer_rows, _engine, _apart, _spread):
        if now.fits:
            break
        for remedy in try_(now):
            if remedy.plan.peak_bytes < now.peak_bytes:
                found.append(remedy)
                now = remedy.plan
                break
    if not now.fits:
        found += [*_other_device(now), *_more(now)]
    return found


def _with(plan: CapacityPlan, option: str, what: str, layout: ParallelLayout) -> Suggestion:
    return Suggestion(option, what, CapacityPlan(plan.request, layout))


def _checkpointed(plan: CapacityPlan) -> Iterator[Suggestion]:
    if not plan.layout.checkpointing:
        layout = replace(plan.layout, checkpointing=True)
        yield _with(plan, "--gradient-checkpointing", "activations are computed again on the way back", layout)


def _smaller_passes(plan: CapacityPlan) -> Iterator[Suggestion]:
    least = plan.request.workload.max_tokens
    if plan.layout.micro_tokens > least:
        layout = replace(plan.layout, micro_tokens=least)
        yield _with(plan, f"--micro-tokens {least}", "micro-batches of one text at a time", layout)


def _narrow(plan: CapacityPlan) -> Iterator[Suggestion]:
    if plan.layout.dtype == "fp32":
        yield _with(plan, "--dtype bf16", "computing in bfloat16", replace(plan.layout, dtype="bf16"))


def _engine(plan: CapacityPlan) -> Iterator[Suggestion]:
    if plan.layout.keeps_full_policy:
        layout = replace(plan.layout, keeps_full_policy=False)
        yield _with(plan, "--engine", "an engine has the policy, a learner only its share", layout)


def _apart(plan: CapacityPlan) -> Iterator[Suggestion]:
    """The first division that fits: of the plan's own samplers, of an engine's, over more devices each."""
    layout = plan.layout
    if layout.is_disaggregated:
        return
    for whole in dict.fromkeys((layout.keeps_full_policy, False)):
        for tensor in (layout.tensor_parallel, *(t for t in TENSORS if t > layout.tensor_parallel)):
            if layout.gpus <= tensor:
                continue
            divided = find_best_split(plan.request, replace(layout, keeps_full_policy=whole, tensor_parallel=tensor))
            if divided.fits:
                words = ["--engine"] * (layout.keeps_full_policy and not whole) + [
                    f"--samplers {divided.layout.samplers}"
                ]
                words += [f"--tensor-parallel {tensor}"] * (tensor > layout.tensor_parallel)
                yield Suggestion(" ".join(words), "samplers on devices of their own", divided)
                return


def _fewer_rows(plan: CapacityPlan) -> Iterator[Suggestion]:
    """The most that fit, in powers of two; where drawing takes more than learning."""
    rows, tried = plan.concurrent_rows if _drawing_most(plan) else 0, list[Suggestion]()
    while rows > ROWS:
        rows = 1 << ((rows - 1).bit_length() - 1)
        tried.append(
            _with(plan, f"--decode-rows {rows}", "fewer completions at once", replace(plan.layout, decode_rows=rows))
        )
    yield from ([remedy for remedy in tried if remedy.plan.fits] or tried[::-1])[:1]


def _spread(plan: CapacityPlan) -> Iterator[Suggestion]:
    """A sampler on several devices, where one does not hold the policy."""
    layout = plan.layout
    if plan.sampler is None or plan.sampler.peak_bytes <= plan.usable_bytes:
        return
    for tensor in TENSORS:
        if tensor > layout.tensor_parallel and layout.samplers % tensor == 0:
            remedy = _with(
                plan,
                f"--tensor-parallel {tensor}",
                "each sampler on several devices",
                replace(layout, tensor_parallel=tensor),
            )
            if remedy.plan.sampler is not None and remedy.plan.sampler.peak_bytes <= plan.usable_bytes:
                yield remedy
                return


def _drawing_most(plan: CapacityPlan) -> bool:
    """Of a device that does both."""
    return sum(plan.learner.sampling.values()) > sum(plan.learner.training.values())


def _other_device(plan: CapacityPlan) -> Iterator[Suggestion]:
    """The smallest of those that hold it."""
    larger = [d for d in DEVICES.values() if d.memory > plan.request.device.memory and d.name != "cpu"]
    for device in sorted(larger, key=lambda d: d.memory):
        found = CapacityPlan(replace(plan.request, device=device), plan.layout)
        if found.fits:
            yield Suggestion(f"--gpus {device.name}:{plan.layout.gpus}", "devices with more memory", found)
            return


def _more(plan: CapacityPlan) -> Iterator[Suggestion]:
    """The fewest that hold it, twice as many each time."""
    gpus = plan.layout.gpus * 2
    while gpus <= MOST:
        layout = replace(plan.layout, gpus=gpus)
        found = find_best_split(plan.request, layout) if layout.is_disaggregated else CapacityPlan(plan.request, layout)
        if found.fits:
            yield Suggestion(f"--gpus {plan.request.device.name}:{gpus}", "more devices", found)
            return
        gpus *= 2
