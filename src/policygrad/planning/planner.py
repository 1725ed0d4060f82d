"""Capacity plans: memory, seconds and cost of a workload on a number of devices, the best split of devices, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

from policygrad.errors import ConfigError
from policygrad.planning import cost_model
from policygrad.planning.cost_model import (
    AlgorithmCost,
    MemoryBreakdown,
    ParallelLayout,
    Workload,
)
from policygrad.planning.hardware import DEVICES, Device, Efficiency
from policygrad.planning.shapes import ModelShape
from policygrad.planning.time_model import StepTimes, TimeModel

MAX_SPLITS = 16  # maximum number of device splits to try


@dataclass(frozen=True)
class PlanRequest:
    """Model, device, work and efficiency to plan for."""

    shape: ModelShape
    device: Device
    workload: Workload
    algorithm: AlgorithmCost
    efficiency: Efficiency


@dataclass(frozen=True)
class CapacityPlan:
    """Memory, time and throughput of a request with one layout."""

    request: PlanRequest
    layout: ParallelLayout

    @cached_property
    def time_model(self) -> TimeModel:
        request = self.request
        return TimeModel(request.shape, request.device, request.efficiency, self.layout)

    @cached_property
    def step_times(self) -> StepTimes:
        return self.time_model.step_times(self.request.workload, self.request.algorithm)

    @cached_property
    def learner(self) -> MemoryBreakdown:
        """Memory of a device that learns."""
        q = self.request
        return cost_model.learner_memory(q.shape, q.workload, q.algorithm, self.layout, q.device)

    @cached_property
    def sampler(self) -> MemoryBreakdown | None:
        """Memory of a device that only samples; None if there is none."""
        q = self.request
        if not self.layout.is_disaggregated:
            return None
        return cost_model.sampler_memory(q.shape, q.workload, self.layout, q.device)

    @property
    def step_seconds(self) -> float:
        """Seconds from one step's end to the next. Samplers that may run ahead work during an update, not while weights
        are published."""
        times = self.step_times
        if self.layout.is_disaggregated and self.layout.max_staleness:
            return max(times.generation, times.update) + times.publishing
        return times.total

    @property
    def idle_fractions(self) -> dict[str, float] | None:
        """Fractions of a step in which learners and samplers wait; None if devices alternate."""
        if not self.layout.is_disaggregated:
            return None
        times = self.step_times
        busy = {"learner": times.update + times.publishing, "sampler": times.generation}
        return {name: 1 - seconds / self.step_seconds for name, seconds in busy.items()}

    @property
    def usable_bytes(self) -> float:
        """Usable memory of one device."""
        return cost_model.usable_bytes(self.request.device)

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest device."""
        return max(self.learner.peak_bytes, self.sampler.peak_bytes if self.sampler else 0.0)

    @property
    def engine_bytes(self) -> float:
        """Memory of an engine on the fullest device."""
        q, layout = self.request, self.layout
        rows = cost_model.max_concurrent_rows(q.shape, q.workload, layout, q.device)
        weights = q.shape.parameters * layout.bytes_per_number / layout.tensor_parallel
        return weights + sum(cost_model.sampling_bytes(q.shape, q.workload, layout, rows).values())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes

    @property
    def concurrent_rows(self) -> int:
        """Completions that one sampler generates at once."""
        q = self.request
        return cost_model.max_concurrent_rows(q.shape, q.workload, self.layout, q.device)

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second, of all devices."""
        return self.request.workload.sampled_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: fraction of the peak rate that the step's operations need, without recomputation."""
        algorithm, windows = self.request.algorithm, self.request.shape.windows
        tokens = self.request.workload.count_tokens(self.layout.shares_prompts, windows)
        products = 2 if self.layout.only_adapters else 3
        training: float = algorithm.trained_models * algorithm.epochs
        training *= self.time_model.operations(tokens, 3, products, products)
        forward_passes = algorithm.scoring_passes_at(self.layout.max_staleness) + 1  # and sampling
        total = training + forward_passes * self.time_model.operations(tokens, 1, 1)
        return total / self.step_seconds / self.layout.gpus / self.request.device.rate(self.layout.bytes_per_number)

    def device_hours(self, steps: int) -> float:
        """Return the hours of all devices together."""
        return self.layout.gpus * self.step_seconds * steps / 3600

    def to_dict(self, steps: int, price: float | None = None) -> dict[str, Any]:
        """Return seconds, bytes, device hours of `steps` steps and their cost, for JSON."""
        return {
            "gpus": self.layout.gpus,
            "layout": asdict(self.layout),
            "fits": self.fits,
            "memory": {
                "usable": self.usable_bytes,
                "peak": self.peak_bytes,
                "learner": {"peak": self.learner.peak_bytes, **asdict(self.learner)},
                "sampler": self.sampler and {"peak": self.sampler.peak_bytes, **asdict(self.sampler)},
            },
            "seconds": {"step": self.step_seconds, **asdict(self.step_times)},
            "idle": self.idle_fractions,
            "rows": self.concurrent_rows,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "steps": steps,
            "gpu_hours": self.device_hours(steps),
            "cost": None if price is None else self.device_hours(steps) * price,
        }


def device_splits(gpus: int, tensor_parallel: int) -> list[int]:
    """Return numbers of sampling devices worth trying: whole samplers, with at least one learner left."""
    every = list(range(tensor_parallel, gpus, tensor_parallel))
    if len(every) <= MAX_SPLITS:
        return every
    positions = {round(len(every) * (i + 0.5) / MAX_SPLITS) for i in range(MAX_SPLITS)}
    return [every[min(i, len(every) - 1)] for i in sorted(positions)]


def find_best_split(request: PlanRequest, layout: ParallelLayout) -> CapacityPlan:
    """Return the split into samplers and learners with the shortest step, preferring splits that fit.

    Args:
        layout: Its number of samplers is ignored.

    Raises:
        ConfigError: There are fewer devices than one sampler and one learner need.
    """
    plans = [
        CapacityPlan(request, replace(layout, samplers=n)) for n in device_splits(layout.gpus, layout.tensor_parallel)
    ]
    if not plans:
        raise ConfigError(
            f"separate samplers and learners need at least {layout.tensor_parallel + 1} devices, not {layout.gpus}. Add --gpus, or "
            "omit --max-staleness and --samplers."
        )
    return min(plans, key=lambda plan: (not plan.fits, plan.step_seconds if plan.fits else plan.peak_bytes))


def plan_device_counts(request: PlanRequest, layout: ParallelLayout, counts: Sequence[int]) -> list[CapacityPlan]:
    """Plan the same work on other numbers of devices, with the best split of each if samplers are separate."""
    plans = list[CapacityPlan]()
    for gpus in counts:
        if layout.is_disaggregated and gpus > layout.tensor_parallel:
            plans.append(find_best_split(request, replace(layout, gpus=gpus, samplers=layout.tensor_parallel)))
        elif not layout.is_disaggregated and gpus % layout.tensor_parallel == 0:
            plans.append(CapacityPlan(request, replace(layout, gpus=gpus)))
    return plans


def device_counts(gpus: int) -> list[int]:
    """Return powers of two up to four times `gpus`, and `gpus` itself."""
    return sorted({gpus, *(2**i for i in range((4 * gpus).bit_length()) if 2**i <= 4 * gpus)})


# What to change if a plan does not fit: one change after another, kept if it needs less memory, until the plan fits.

MAX_DEVICES = 4096  # largest number of devices to suggest
MIN_ROWS = 16  # smallest number of concurrent completions to suggest
TENSOR_PARALLEL = (2, 4, 8)  # devices per sampler to try


@dataclass(frozen=True)
class Suggestion:
    """A change, and the plan with it and the ones before it."""

    option: str  # options of `policygrad plan`
    description: str
    plan: CapacityPlan


def suggest_changes(plan: CapacityPlan) -> list[Suggestion]:
    """Return changes that make a plan fit, cheapest first; empty if it fits already or nothing helps.

    The last one fits, unless nothing does.
    """
    longest = plan.request.workload.max_tokens
    suggestions = list[Suggestion]()
    for propose in (
        partial(
            _change,
            option="--learner.gradient-checkpointing",
            description="recompute activations in the backward pass",
            checkpointing=True,
        ),
        partial(
            _change,
            option=f"--learner.micro-tokens {longest}",
            description="one sequence per micro-batch",
            micro_tokens=min(longest, plan.layout.micro_tokens),
        ),
        _read_in_segments,
        _compute_in_bfloat16,
        _keep_less_state,
        _generate_fewer_rows,
        partial(
            _change,
            option="--sampler.engine vllm",
            description="an engine holds the policy, each learner only its shard",
            keeps_full_policy=False,
        ),
        _rearrange_samplers,
    ):
        if plan.fits:
            return suggestions
        suggestion = propose(plan)
        if suggestion is not None and suggestion.plan.peak_bytes < plan.peak_bytes:
            suggestions.append(suggestion)
            plan = suggestion.plan
    if plan.fits:
        return suggestions
    request, layout = plan.request, plan.layout
    # The smallest device that fits.
    larger = [
        d
        for d in DEVICES.values()
        if d.memory > request.device.memory and d.bf16 >= request.device.bf16 and d.per_node > 1
    ]
    for device in sorted(larger, key=lambda d: d.memory):
        changed = CapacityPlan(replace(request, device=device), layout)
        if changed.fits:
            suggestions.append(Suggestion(f"--gpus {device.name}:{layout.gpus}", "devices with more memory", changed))
            break
    # The smallest number of devices that fits, doubling it each time.
    plan_layout = find_best_split if layout.is_disaggregated else CapacityPlan
    gpus = layout.gpus * 2
    while gpus <= MAX_DEVICES:
        changed = plan_layout(request, replace(layout, gpus=gpus))
        if changed.fits:
            suggestions.append(Suggestion(f"--gpus {request.device.name}:{gpus}", "more devices", changed))
            break
        gpus *= 2
    return suggestions


def _change(plan: CapacityPlan, option: str, description: str, **changes: Any) -> Suggestion:
    return Suggestion(option, description, CapacityPlan(plan.request, replace(plan.layout, **changes)))


def _read_in_segments(plan: CapacityPlan) -> Suggestion | None:
    request, tokens = plan.request, cost_model.SEGMENT_TOKENS["cpu" if plan.request.device.name == "cpu" else "gpu"]
    is_read = cost_model.reads_segments(request.shape, plan.layout)
    if not is_read or tokens >= min(plan.layout.micro_tokens, request.workload.max_tokens):
        return None
    return _change(plan, f"--learner.micro-tokens {tokens}", "read longer texts in segments", micro_tokens=tokens)


def _keep_less_state(plan: CapacityPlan) -> Suggestion | None:
    """Suggest moments in 8 bits and, in bfloat16, no masters."""
    layout = plan.layout
    if layout.only_adapters or layout.optimizer.name != "adamw":
        return None
    option, state = cost_model.shrink_state(layout)
    return _change(plan, option, "moments in 8 bits", optimizer=state)


def _compute_in_bfloat16(plan: CapacityPlan) -> Suggestion | None:
    if not plan.request.device.bf16:
        return None
    return _change(plan, "--learner.dtype bf16", "compute in bfloat16", dtype="bf16")


def _generate_fewer_rows(plan: CapacityPlan) -> Suggestion | None:
    """Suggest the largest power of two that fits, if sampling needs more memory than learning."""
    if sum(plan.learner.sampling.values()) <= sum(plan.learner.training.values()):
        return None
    rows, suggestion = plan.concurrent_rows, None
    while rows > MIN_ROWS and not (suggestion and suggestion.plan.fits):
        rows = 1 << ((rows - 1).bit_length() - 1)
        suggestion = _change(plan, f"--decode-rows {rows}", "fewer concurrent completions", decode_rows=rows)
    return suggestion


def _rearrange_samplers(plan: CapacityPlan) -> Suggestion | None:
    """Suggest devices of their own for samplers; if they have them and one does not hold the policy, several per sampler."""
    layout = plan.layout
    wider = [tensor for tensor in TENSOR_PARALLEL if tensor > layout.tensor_parallel]
    if plan.sampler is not None:
        if plan.sampler.peak_bytes <= plan.usable_bytes:
            return None
        for tensor in wider:
            if layout.samplers % tensor == 0:
                changed = _change(
                    plan, f"--tensor-parallel {tensor}", "several devices per sampler", tensor_parallel=tensor
                )
                if changed.plan.sampler and changed.plan.sampler.peak_bytes <= plan.usable_bytes:
                    return changed
        return None
    # The first split that fits: with the plan's samplers, then an engine's; with more and more devices per sampler.
    for keeps_full_policy in dict.fromkeys((layout.keeps_full_policy, False)):
        for tensor in (layout.tensor_parallel, *wider):
            if layout.gpus <= tensor:
                continue
            changed_layout = replace(layout, keeps_full_policy=keeps_full_policy, tensor_parallel=tensor)
            split = find_best_split(plan.request, changed_layout)
            if split.fits:
                options = ["--sampler.engine vllm"] * (layout.keeps_full_policy and not keeps_full_policy)
                options.append(f"--samplers {split.layout.samplers}")
                options += [f"--tensor-parallel {tensor}"] * (tensor > layout.tensor_parallel)
                return Suggestion(" ".join(options), "samplers on devices of their own", split)
    return None
