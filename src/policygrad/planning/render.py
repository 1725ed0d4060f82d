"""A capacity plan as tables and sentences, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from policygrad.pages.render import render_page
from policygrad.planning.cost_model import DRIVER_BYTES, USABLE_FRACTION, OptimizerState, reads_segments, usable_bytes
from policygrad.planning.fit import Fit
from policygrad.planning.hardware import Efficiency
from policygrad.planning.planner import CapacityPlan, Suggestion
from policygrad.planning.shapes import ModelShape

GIB = 2**30
PHASE_NAMES = {
    "generation": "sampling completions",
    "scoring": "scoring them: log π_old, log π_ref, values",
    "learning": "forward and backward",
    "optimizer": "optimizer steps",
    "publishing": "publishing the weights",
}


@dataclass(frozen=True)
class PlanTable:
    """Rows of text under a heading; the first column holds names, the others figures."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class PlanReport:
    """A plan, the same work on other numbers of devices, and what to change if it does not fit."""

    plan: CapacityPlan
    alternatives: Sequence[CapacityPlan]
    changes: Sequence[Suggestion]
    steps: int  # steps for which hours and costs are reported
    price: float | None  # of one device hour

    def to_dict(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        request, cost = self.plan.request, (self.steps, self.price)
        return {
            "model": describe_shape(request.shape),
            "device": asdict(request.device),
            "algorithm": asdict(request.algorithm),
            "workload": asdict(request.workload) | {"sampled_tokens": request.workload.sampled_tokens},
            "efficiency": asdict(request.efficiency),
            "plan": self.plan.to_dict(*cost),
            "gpus": [other.to_dict(*cost) for other in self.alternatives],
            "changes": [
                {"option": change.option, "description": change.description, **change.plan.to_dict(*cost)}
                for change in self.changes
            ],
        }


def describe_shape(shape: ModelShape) -> dict[str, Any]:
    """Return a model's figures for JSON."""
    return shape.to_dict() | {"parameters": shape.parameters, "active_parameters": shape.active_parameters}


def plan_title(plan: CapacityPlan) -> str:
    request = plan.request
    return f"{request.shape.name} with {request.algorithm.name} on {plan.layout.gpus} × {request.device.name}"


def plan_summary(plan: CapacityPlan, steps: int, price: float | None) -> str:
    """Summarise a plan in a few sentences."""
    layout = plan.layout
    if layout.is_disaggregated:
        how = f"{layout.samplers} devices sample, {layout.learning_devices} learn, at most {layout.max_staleness} ahead"
    else:
        how = f"{'all devices sample and learn' if layout.gpus > 1 else 'one device samples and learns'}, in turns"
    hours = plan.device_hours(steps)
    cost = "" if price is None else f", {hours * price:,.0f} at {price:g} per hour"
    return (
        f"{'It fits' if plan.fits else 'It does not fit'}: {format_gib(plan.peak_bytes)} of {format_gib(plan.usable_bytes)} usable "
        f"GiB. A step takes {format_seconds(plan.step_seconds)} ({how}): {plan.tokens_per_second:,.0f} sampled tokens per second, "
        f"{plan.mfu:.0%} of the peak rate. {steps:,} steps take {hours:,.0f} device hours{cost}."
    )


def plan_tables(report: PlanReport) -> list[PlanTable]:
    """Return a plan's tables: memory, step, changes that make it fit, other numbers of devices."""
    plan, steps, price = report.plan, report.steps, report.price
    # memory
    devices = {"learner" if plan.sampler else "device": plan.learner}
    if plan.sampler:
        devices["sampler"] = plan.sampler
    rows = list[tuple[str, ...]]()
    for suffix, phase in (("", "static"), (", while learning", "training"), (", while sampling", "sampling")):
        parts = [getattr(memory, phase) for memory in devices.values()]
        for name in dict.fromkeys(name for part in parts for name in part):
            rows.append((name + suffix, *(format_gib(part[name]) if name in part else "–" for part in parts)))
    rows.append(("peak", *(format_gib(memory.peak_bytes) for memory in devices.values())))
    rows.append(("usable", *(format_gib(plan.usable_bytes) for _ in devices)))
    memory_table = PlanTable("Memory of one device, GiB", ("", *devices), tuple(rows))
    # seconds
    rows = [(text, format_seconds(getattr(plan.step_times, name))) for name, text in PHASE_NAMES.items()]
    for name, fraction in (plan.idle_fractions or {}).items():
        rows.append((f"{name}s wait", f"{fraction:.0%}"))
    rows.append(("a step", format_seconds(plan.step_seconds)))
    work, samplers = plan.request.workload, plan.layout.num_samplers
    note = (
        f"{work.prompts} × {work.samples_per_prompt} completions of {work.sampled_tokens / work.num_completions:,.0f} tokens on "
        f"average and {work.max_completion_tokens:,} at most, after prompts of {work.prompt_tokens}; {samplers} sampler"
        f"{'s' * (samplers > 1)} with {plan.concurrent_rows} concurrent completions each"
    )
    tables = [memory_table, PlanTable("A step", ("", "seconds"), tuple(rows), note)]
    # what to change
    if report.changes:
        rows = [
            (
                change.option,
                change.description,
                format_gib(change.plan.peak_bytes),
                "yes" if change.plan.fits else "no",
                format_seconds(change.plan.step_seconds),
            )
            for change in report.changes
        ]
        if any(change.plan.fits for change in report.changes):
            note = f"Each row includes the changes above it; {format_gib(plan.usable_bytes)} GiB are usable."
        else:
            note = "None of these is enough: use a smaller model or --context."
        tables.append(PlanTable("What to change", ("option", "", "GiB", "fits", "a step"), tuple(rows), note))
    # other numbers of devices
    split = any(plan.layout.is_disaggregated for plan in report.alternatives)
    head = ["devices", "fits", "GiB", "a step", "tokens/s", f"hours, {steps:,} steps"]
    head += ["samplers", "learners wait"] * split + ["cost"] * (price is not None)
    rows = []
    for other in report.alternatives:
        row = [str(other.layout.gpus), "yes" if other.fits else "no", format_gib(other.peak_bytes)]
        row += [
            format_seconds(other.step_seconds),
            f"{other.tokens_per_second:,.0f}",
            f"{other.device_hours(steps):,.0f}",
        ]
        if split:
            idle = other.idle_fractions
            row += [str(other.layout.samplers), f"{idle['learner']:.0%}" if idle else "–"]
        if price is not None:
            row.append(f"{other.device_hours(steps) * price:,.0f}")
        rows.append(tuple(row))
    return [*tables, PlanTable("Other numbers of devices", tuple(head), tuple(rows))]


def fit_title(plan: CapacityPlan) -> str:
    return f"What fits: {plan_title(plan)}"


def fit_summary(plan: CapacityPlan, chosen: Fit | None, context: int) -> str:
    """Say what fits, and with which changes."""
    if chosen is None:
        return (
            f"Nothing fits: {plan.request.shape.name} needs more than the {format_gib(plan.usable_bytes)} GiB that a "
            f"{plan.request.device.name} can hold, whatever is saved. Use more devices, larger ones, or a smaller model."
        )
    how = f" with {chosen.option}" if chosen.option else " as it is"
    short = "" if chosen.context >= context else f", less than the {context:,} of --context"
    return (
        f"Texts of at most {chosen.context:,} tokens{short}, and {chosen.group} completions of a prompt at once, fit{how}: "
        f"{format_gib(chosen.plan.peak_bytes)} of {format_gib(plan.usable_bytes)} usable GiB. A step takes "
        f"{format_seconds(chosen.plan.step_seconds)}."
    )


def fit_table(fits: Sequence[Fit], context: int) -> PlanTable:
    """Return a table of what fits with more and more savings."""
    rows = [
        (
            fit.option or "as it is",
            f"{fit.context:,}",
            str(fit.group),
            str(fit.group_at_context or "–"),
            format_gib(fit.plan.peak_bytes),
            format_seconds(fit.plan.step_seconds),
        )
        for fit in fits
    ]
    head = ("options", "longest text", "group", f"group of {context:,} tokens", "GiB", "a step")
    note = "A group is the completions of one prompt, all sampled at once. A step is of the longest text and its largest group."
    return PlanTable("What fits", head, tuple(rows), note if rows else "")


def list_assumptions(plan: CapacityPlan) -> list[str]:
    """Return the assumptions behind a plan's figures."""
    request, layout, efficiency = plan.request, plan.layout, plan.request.efficiency
    device, shape = request.device, request.shape
    reached, overhead = efficiency.sampling, efficiency.layer_overhead
    if not layout.keeps_full_policy:
        reached, overhead = efficiency.engine_sampling, efficiency.engine_overhead
    assumptions = [
        f"{shape.name}: {shape.describe()} ({shape.source or 'given'}).",
        f"{device.name}: {format_gib(device.memory)} GiB, {device.bandwidth / 1e12:.3g} TB/s, "
        f"{device.rate(layout.bytes_per_number) / 1e12:.4g} Tflop/s in {layout.dtype} ({device.source}).",
        f"Efficiency, {'measured' if efficiency != Efficiency() else 'from published runs or assumed'}: "
        f"{efficiency.training * device.utilisation:.0%} training, {efficiency.scoring * device.utilisation:.0%} scoring, "
        f"{reached:.0%} sampling; {overhead * 1e6:.0f} µs overhead per layer and sampled token.",
        "Completion lengths follow a policy that ends with equal probability at every token, cut off at the maximum; rollouts are "
        "equal.",
        "Rewards, evaluations and checkpoints take no time; nothing fails.",
        f"{1 - USABLE_FRACTION:.0%} of a device's memory and {DRIVER_BYTES / GIB:.0f} GiB per GPU for its driver are not usable.",
    ]
    if layout.only_adapters:
        bits = " on weights in four bits" if layout.base_bits else ""
        count = shape.count_adapters(layout.adapter_rank)
        assumptions.append(f"Adapters{bits} alone are trained: {count:,} parameters, of rank {layout.adapter_rank}.")
    elif layout.optimizer != OptimizerState():
        state = layout.optimizer
        masters = "" if state.masters == "fp32" else ", bf16 weights without masters"
        away = {"none": "", "sampling": ", in the host's memory while sampling", "always": ", in the host's memory"}
        assumptions.append(
            f"Optimizer {state.name}: {state.moment_bytes:.3g} bytes of moments per parameter{away[state.offload]}{masters}."
        )
    longest = request.workload.max_tokens
    if longest > layout.micro_tokens and reads_segments(shape, layout):
        assumptions.append(
            f"Texts longer than {layout.micro_tokens:,} tokens are read in segments (--learner.micro-tokens), which no GPU has "
            "done yet."
        )
    if layout.context_parallel > 1:
        assumptions.append(
            f"{layout.context_parallel} learners share each text; a layer's keys and values are gathered whole."
        )
    if shape.has_states:
        assumptions.append("Recurrent layers run transformers' own code, which saves more than kernels made for them.")
    if layout.learning_devices > 1 and layout.keeps_full_policy:
        assumptions.append(
            "Each learner keeps the full policy too, for sampling; with --sampler.engine vllm it does not."
        )
    if not layout.keeps_full_policy and not layout.is_disaggregated:
        sleep, option = ("releases", "--sampler.colocate of train") if layout.engine_sleeps else ("keeps", "--beside")
        assumptions.append(
            f"The engine samples on the learners' devices, {sleep} its memory while they learn ({option}), and "
            "receives weights over their links. This library's engines read them from files then, which takes longer: give them "
            "devices of their own with --samplers or --max-staleness, and NCCL sends them (--sampler.weight-transport nccl)."
        )
    if layout.is_disaggregated:
        way = {"folder": "through a folder, written and read", "nccl": "by NCCL, to each sampler by itself"}[
            layout.weight_transport
        ]
        assumptions.append(f"Weights reach samplers {way} (--sampler.weight-transport).")
    if not layout.keeps_full_policy:
        assumptions.append("The engine's key-value cache is paged, for completions of average length.")
    return assumptions + [f"Not counted: {text}." for text in request.algorithm.uncounted]


def format_gib(size: float) -> str:
    """Format bytes as GiB, without the unit."""
    value = size / GIB
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def format_seconds(seconds: float) -> str:
    """Format seconds as 58 s, 0.25 s, 3.2 min or 1.5 h."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def render_plan_page(report: PlanReport) -> str:
    """Render a plan as one self-contained HTML page, with plots over the number of devices."""
    web = files("policygrad.planning") / "web"
    return render_page(
        web / "plan.html",
        plot_data(report.alternatives, report.steps),
        scripts=(web / "plan.js",),
        title=plan_title(report.plan),
        summary=plan_summary(report.plan, report.steps, report.price),
        tables=plan_tables(report),
        assumptions=list_assumptions(report.plan),
        steps=report.steps,
    )


def plot_data(plans: Sequence[CapacityPlan], steps: int) -> dict[str, Any]:
    """Return the page's plots as `plots.js` expects them."""
    x = {"label": "devices", "values": [plan.layout.gpus for plan in plans], "log": True}

    def build_plot(panels: Mapping[str, Mapping[str, list[float]]]) -> dict[str, Any]:
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

    phases = {name: [getattr(plan.step_times, name) for plan in plans] for name in PHASE_NAMES}
    seconds = {name: values for name, values in phases.items() if any(values)}
    return {
        "plots": {
            "seconds": build_plot({"seconds": {"a step": [plan.step_seconds for plan in plans], **seconds}}),
            "overview": build_plot(
                {
                    "sampled tokens per second": {"plan": [plan.tokens_per_second for plan in plans]},
                    f"device hours, {steps:,} steps": {"plan": [plan.device_hours(steps) for plan in plans]},
                    "GiB per device": {
                        "plan": [plan.peak_bytes / GIB for plan in plans],
                        "usable": [usable_bytes(plan.request.device) / GIB for plan in plans],
                    },
                }
            ),
        }
    }
