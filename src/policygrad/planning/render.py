"""A plan in words and tables, for the terminal and the page alike: what it counts, and what it assumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from policygrad.pages.render import render_page
from policygrad.planning.cost_model import DRIVER_BYTES, USABLE_FRACTION, MemoryBreakdown, usable_bytes
from policygrad.planning.hardware import Efficiency
from policygrad.planning.planner import CapacityPlan, Suggestion

GIB = 2**30
PHASE_NAMES = {
    "generation": "drawing completions",
    "scoring": "reading them: log π_old, log π_ref, values",
    "learning": "forward and backward",
    "optimiser": "the optimiser's steps",
    "publishing": "publishing the weights",
}


@dataclass(frozen=True)
class PlanTable:
    """Rows of texts under a heading; the first column names, the others are figures."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def plan_title(plan: CapacityPlan) -> str:
    q, layout = plan.request, plan.layout
    return f"{q.shape.name} with {q.algorithm.name} on {layout.gpus} × {q.device.name}"


def plan_summary(plan: CapacityPlan, steps: int, price: float | None) -> str:
    """What it comes to, in a sentence."""
    layout, told = plan.layout, f"A step takes {format_seconds(plan.step_seconds)}"
    how = (
        f"{layout.samplers} devices draw, {layout.learning_devices} learn, at most {layout.max_staleness} ahead"
        if layout.is_disaggregated
        else "all devices draw and learn, in turns"
        if layout.gpus > 1
        else "one device draws and learns, in turns"
    )
    cost = "" if price is None else f", {plan.device_hours(steps) * price:,.0f} at {price:g} an hour"
    holds = "It fits" if plan.fits else "It does not fit"
    return (
        f"{holds}: {format_gib(plan.peak_bytes)} of {format_gib(plan.usable_bytes)} GiB that can be used. {told} ({how}): {plan.tokens_per_second:,.0f} "
        f"sampled tokens a second, {plan.mfu:.0%} of the peak rate. {steps:,} steps are {plan.device_hours(steps):,.0f} device hours"
        f"{cost}."
    )


def plan_tables(
    plan: CapacityPlan, others: Sequence[CapacityPlan], ways: Sequence[Suggestion], steps: int, price: float | None
) -> list[PlanTable]:
    """All of them, in the order in which they are read."""
    found = [_memory(plan), _step(plan)]
    if ways:
        found.append(_ways(plan, ways))
    return [*found, _numbers(others, steps, price)]


def _memory(plan: CapacityPlan) -> PlanTable:
    kinds: list[tuple[str, MemoryBreakdown]] = [("learner" if plan.sampler else "device", plan.learner)]
    kinds += [("sampler", plan.sampler)] if plan.sampler else []
    names = dict.fromkeys(
        (when, name)
        for _, of in kinds
        for when, parts in (("", of.static), ("while learning", of.training), ("while drawing", of.sampling))
        for name in parts
    )
    rows = [(f"{name}, {when}" if when else name, *(_size(of, when, name) for _, of in kinds)) for when, name in names]
    rows.append(("at most", *(format_gib(of.peak_bytes) for _, of in kinds)))
    rows.append(("that can be used", *(format_gib(plan.usable_bytes) for _ in kinds)))
    return PlanTable("Memory of one device, GiB", ("", *(name for name, _ in kinds)), tuple(rows))


def _size(of: MemoryBreakdown, when: str, name: str) -> str:
    parts = {"": of.static, "while learning": of.training, "while drawing": of.sampling}[when]
    return format_gib(parts[name]) if name in parts else "–"


def _step(plan: CapacityPlan) -> PlanTable:
    phases = plan.step_times
    rows = [(text, format_seconds(getattr(phases, name))) for name, text in PHASE_NAMES.items()]
    line = plan.timeline
    if line is not None:
        rows.append(("learners wait", f"{line.learner_idle:.0%}"))
        rows.append(("samplers wait", f"{line.sampler_idle:.0%}"))
    rows.append(("a step", format_seconds(plan.step_seconds)))
    q = plan.request
    note = (
        f"{q.workload.prompts} × {q.workload.samples_per_prompt} completions of {q.workload.sampled_tokens / q.workload.num_completions:,.0f} tokens in the mean and "
        f"{q.workload.max_completion_tokens:,} at most, after prompts of {q.workload.prompt_tokens}; {plan.layout.num_samplers} sampler"
        f"{'s' * (plan.layout.num_samplers > 1)}, {plan.concurrent_rows} completions at once in each"
    )
    return PlanTable("A step", ("", "seconds"), tuple(rows), note)


def _ways(plan: CapacityPlan, ways: Sequence[Suggestion]) -> PlanTable:
    rows = tuple(
        (
            way.option,
            way.description,
            format_gib(way.plan.peak_bytes),
            "yes" if way.plan.fits else "no",
            format_seconds(way.plan.step_seconds),
        )
        for way in ways
    )
    none = "" if any(way.plan.fits for way in ways) else "Nothing of this is enough: take a smaller model or --context."
    return PlanTable(
        "What to change",
        ("option", "", "GiB", "fits", "a step"),
        rows,
        none or f"One after another, each with those before it; {format_gib(plan.usable_bytes)} GiB can be used.",
    )


def _numbers(others: Sequence[CapacityPlan], steps: int, price: float | None) -> PlanTable:
    head = ["devices", "fits", "GiB", "a step", "tokens/s", f"hours, {steps:,} steps"]
    apart = any(plan.layout.is_disaggregated for plan in others)
    head += ["samplers", "learners wait"] * apart
    head += ["cost"] * (price is not None)
    rows = []
    for plan in others:
        row = [
            str(plan.layout.gpus),
            "yes" if plan.fits else "no",
            format_gib(plan.peak_bytes),
            format_seconds(plan.step_seconds),
        ]
        row += [f"{plan.tokens_per_second:,.0f}", f"{plan.device_hours(steps):,.0f}"]
        if apart:
            row += [str(plan.layout.samplers), f"{plan.timeline.learner_idle:.0%}" if plan.timeline else "–"]
        if price is not None:
            row.append(f"{plan.device_hours(steps) * price:,.0f}")
        rows.append(tuple(row))
    return PlanTable("Other numbers of devices", tuple(head), tuple(rows))


def list_assumptions(plan: CapacityPlan) -> list[str]:
    """What every figure rests on."""
    q, reached = plan.request, plan.request.efficiency
    device, rate = q.device, q.device.rate(plan.layout.bytes_per_number)
    origin = "measured" if reached != Efficiency() else "assumed"
    found = [
        f"{q.shape.name}: {q.shape.parameters:,} parameters ({q.shape.source or 'given'}).",
        f"{device.name}: {format_gib(device.memory)} GiB, {device.bandwidth / 1e12:.3g} TB/s, {rate / 1e12:.4g} Tflop/s in "
        f"{plan.layout.dtype} ({device.source}).",
        f"Reached of that, {origin}: {reached.training:.0%} learning, {reached.scoring:.0%} reading, {reached.sampling:.0%} "
        f"drawing; {reached.layer_overhead * 1e6:.0f} µs a layer and drawn token besides.",
        "Lengths are those of a policy that ends with equal probability at every token, cut off at the budget; rollouts are alike.",
        "Rewards, evaluations and checkpoints take no time; nothing fails.",
        f"Of a device {1 - USABLE_FRACTION:.0%} cannot be used, and of a GPU {DRIVER_BYTES / GIB:.0f} GiB are its driver's.",
    ]
    if plan.layout.learning_devices > 1 and plan.layout.keeps_full_policy:
        found.append("The policy is whole in a learner beside its share, to draw with; with --engine it is not.")
    if not plan.layout.keeps_full_policy and not plan.layout.is_disaggregated:
        found.append(
            "The engine draws on the learners' devices, gives its memory back while they learn, and takes weights over their "
            "links. This library's engines do neither yet: give them devices of their own, --samplers or --max-staleness."
        )
    if not plan.layout.keeps_full_policy:
        found.append("The engine keeps keys and values in pages, of completions as long as they are on average.")
    found += [f"Not counted: {text}." for text in q.algorithm.uncounted]
    return found


def format_gib(size: float) -> str:
    """Bytes as GiB, without their unit."""
    value = size / GIB
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def format_seconds(seconds: float) -> str:
    """58 s, 0.25 s, 3.2 min, 1.5 h."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


# A plan as one HTML file that asks the network for nothing: its tables, and plots over numbers of devices.


def render_plan_page(
    plan: CapacityPlan, others: Sequence[CapacityPlan], ways: Sequence[Suggestion], steps: int, price: float | None
) -> str:
    """The page."""
    web = files("policygrad.planning") / "web"
    return render_page(
        web / "plan.html",
        plot_data(others, steps),
        scripts=(web / "plan.js",),
        title=plan_title(plan),
        summary=plan_summary(plan, steps, price),
        tables=plan_tables(plan, others, ways, steps, price),
        assumptions=list_assumptions(plan),
        steps=steps,
    )


def plot_data(others: Sequence[CapacityPlan], steps: int) -> dict[str, Any]:
    """What the script draws: plots as `plots.js` takes them."""
    x = {"label": "devices", "values": [plan.layout.gpus for plan in others], "log": True}

    def plot(panels: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
        series = list(dict.fromkeys(name for lines in panels.values() for name in lines))
        return {
            "x": x,
            "series": series,
            "panels": [
                {
                    "label": label,
                    "log": True,
                    "low": None,
                    "high": None,
                    "lines": [{"series": series.index(name), "values": values} for name, values in lines.items()],
                }
                for label, lines in panels.items()
            ],
        }

    phases = {name: [getattr(plan.step_times, name) for plan in others] for name in PHASE_NAMES}
    seconds = {name: values for name, values in phases.items() if any(values)}
    return {
        "plots": {
            "seconds": plot({"seconds": {"a step": [plan.step_seconds for plan in others], **seconds}}),
            "whole": plot(
                {
                    "sampled tokens a second": {"plan": [plan.tokens_per_second for plan in others]},
                    f"device hours, {steps:,} steps": {"plan": [plan.device_hours(steps) for plan in others]},
                    "GiB of a device": {
                        "plan": [plan.peak_bytes / GIB for plan in others],
                        "that can be used": [usable_bytes(plan.request.device) / GIB for plan in others],
                    },
                }
            ),
        }
    }
