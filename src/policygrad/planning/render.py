"""A plan in words and tables, for the terminal and the page alike: what it counts, and what it assumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from policygrad.pages.render import framed
from policygrad.planning.cost_model import CONTEXT, USABLE, Memory, usable
from policygrad.planning.hardware import Reached
from policygrad.planning.planner import Plan, Remedy

GIB = 2**30
PHASES = {
    "generation": "drawing completions",
    "scoring": "reading them: log π_old, log π_ref, values",
    "learning": "forward and backward",
    "optimiser": "the optimiser's steps",
    "publishing": "publishing the weights",
}


@dataclass(frozen=True)
class Table:
    """Rows of texts under a heading; the first column names, the others are figures."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def title(plan: Plan) -> str:
    q, layout = plan.question, plan.layout
    return f"{q.shape.name} with {q.asks.name} on {layout.gpus} × {q.device.name}"


def summary(plan: Plan, steps: int, price: float | None) -> str:
    """What it comes to, in a sentence."""
    layout, told = plan.layout, f"A step takes {duration(plan.step)}"
    how = (
        f"{layout.samplers} devices draw, {layout.learners} learn, at most {layout.staleness} ahead"
        if layout.apart
        else "all devices draw and learn, in turns"
        if layout.gpus > 1
        else "one device draws and learns, in turns"
    )
    cost = "" if price is None else f", {plan.hours(steps) * price:,.0f} at {price:g} an hour"
    holds = "It fits" if plan.fits else "It does not fit"
    return (
        f"{holds}: {gib(plan.peak)} of {gib(plan.usable)} GiB that can be used. {told} ({how}): {plan.tokens_per_second:,.0f} "
        f"sampled tokens a second, {plan.mfu:.0%} of the peak rate. {steps:,} steps are {plan.hours(steps):,.0f} device hours"
        f"{cost}."
    )


def tables(plan: Plan, others: Sequence[Plan], ways: Sequence[Remedy], steps: int, price: float | None) -> list[Table]:
    """All of them, in the order in which they are read."""
    found = [_memory(plan), _step(plan)]
    if ways:
        found.append(_ways(plan, ways))
    return [*found, _numbers(others, steps, price)]


def _memory(plan: Plan) -> Table:
    kinds: list[tuple[str, Memory]] = [("learner" if plan.sampler else "device", plan.learner)]
    kinds += [("sampler", plan.sampler)] if plan.sampler else []
    names = dict.fromkeys(
        (when, name)
        for _, of in kinds
        for when, parts in (("", of.always), ("while learning", of.learning), ("while drawing", of.drawing))
        for name in parts
    )
    rows = [(f"{name}, {when}" if when else name, *(_size(of, when, name) for _, of in kinds)) for when, name in names]
    rows.append(("at most", *(gib(of.peak) for _, of in kinds)))
    rows.append(("that can be used", *(gib(plan.usable) for _ in kinds)))
    return Table("Memory of one device, GiB", ("", *(name for name, _ in kinds)), tuple(rows))


def _size(of: Memory, when: str, name: str) -> str:
    parts = {"": of.always, "while learning": of.learning, "while drawing": of.drawing}[when]
    return gib(parts[name]) if name in parts else "–"


def _step(plan: Plan) -> Table:
    phases = plan.phases
    rows = [(text, duration(getattr(phases, name))) for name, text in PHASES.items()]
    line = plan.timeline
    if line is not None:
        rows.append(("learners wait", f"{line.learner_idle:.0%}"))
        rows.append(("samplers wait", f"{line.sampler_idle:.0%}"))
    rows.append(("a step", duration(plan.step)))
    q = plan.question
    note = (
        f"{q.work.prompts} × {q.work.samples} completions of {q.work.sampled / q.work.completions:,.0f} tokens in the mean and "
        f"{q.work.budget:,} at most, after prompts of {q.work.prompt}; {plan.layout.engines} sampler"
        f"{'s' * (plan.layout.engines > 1)}, {plan.rows} completions at once in each"
    )
    return Table("A step", ("", "seconds"), tuple(rows), note)


def _ways(plan: Plan, ways: Sequence[Remedy]) -> Table:
    rows = tuple(
        (way.option, way.what, gib(way.plan.peak), "yes" if way.plan.fits else "no", duration(way.plan.step))
        for way in ways
    )
    none = "" if any(way.plan.fits for way in ways) else "Nothing of this is enough: take a smaller model or --context."
    return Table(
        "What to change",
        ("option", "", "GiB", "fits", "a step"),
        rows,
        none or f"One after another, each with those before it; {gib(plan.usable)} GiB can be used.",
    )


def _numbers(others: Sequence[Plan], steps: int, price: float | None) -> Table:
    head = ["devices", "fits", "GiB", "a step", "tokens/s", f"hours, {steps:,} steps"]
    apart = any(plan.layout.apart for plan in others)
    head += ["samplers", "learners wait"] * apart
    head += ["cost"] * (price is not None)
    rows = []
    for plan in others:
        row = [str(plan.layout.gpus), "yes" if plan.fits else "no", gib(plan.peak), duration(plan.step)]
        row += [f"{plan.tokens_per_second:,.0f}", f"{plan.hours(steps):,.0f}"]
        if apart:
            row += [str(plan.layout.samplers), f"{plan.timeline.learner_idle:.0%}" if plan.timeline else "–"]
        if price is not None:
            row.append(f"{plan.hours(steps) * price:,.0f}")
        rows.append(tuple(row))
    return Table("Other numbers of devices", tuple(head), tuple(rows))


def assumptions(plan: Plan) -> list[str]:
    """What every figure rests on."""
    q, reached = plan.question, plan.question.reached
    device, rate = q.device, q.device.rate(plan.layout.weight)
    origin = "measured" if reached != Reached() else "assumed"
    found = [
        f"{q.shape.name}: {q.shape.parameters:,} parameters ({q.shape.source or 'given'}).",
        f"{device.name}: {gib(device.memory)} GiB, {device.bandwidth / 1e12:.3g} TB/s, {rate / 1e12:.4g} Tflop/s in "
        f"{plan.layout.dtype} ({device.source}).",
        f"Reached of that, {origin}: {reached.learning:.0%} learning, {reached.scoring:.0%} reading, {reached.drawing:.0%} "
        f"drawing; {reached.layer * 1e6:.0f} µs a layer and drawn token besides.",
        "Lengths are those of a policy that ends with equal probability at every token, cut off at the budget; rollouts are alike.",
        "Rewards, evaluations and checkpoints take no time; nothing fails.",
        f"Of a device {1 - USABLE:.0%} cannot be used, and of a GPU {CONTEXT / GIB:.0f} GiB are its driver's.",
    ]
    if plan.layout.learners > 1 and plan.layout.whole:
        found.append("The policy is whole in a learner beside its share, to draw with; with --engine it is not.")
    if not plan.layout.whole and not plan.layout.apart:
        found.append(
            "The engine draws on the learners' devices, gives its memory back while they learn, and takes weights over their "
            "links. This library's engines do neither yet: give them devices of their own, --samplers or --staleness."
        )
    if not plan.layout.whole:
        found.append("The engine keeps keys and values in pages, of completions as long as they are on average.")
    found += [f"Not counted: {text}." for text in q.asks.uncounted]
    return found


def gib(size: float) -> str:
    """Bytes as GiB, without their unit."""
    value = size / GIB
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """58 s, 0.25 s, 3.2 min, 1.5 h."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


# A plan as one HTML file that asks the network for nothing: its tables, and plots over numbers of devices.


def page(plan: Plan, others: Sequence[Plan], ways: Sequence[Remedy], steps: int, price: float | None) -> str:
    """The page."""
    web = files("policygrad.planning") / "web"
    return framed(
        web / "plan.html",
        data(others, steps),
        scripts=(web / "plan.js",),
        title=title(plan),
        summary=summary(plan, steps, price),
        tables=tables(plan, others, ways, steps, price),
        assumptions=assumptions(plan),
        steps=steps,
    )


def data(others: Sequence[Plan], steps: int) -> dict[str, Any]:
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

    phases = {name: [getattr(plan.phases, name) for plan in others] for name in PHASES}
    seconds = {name: values for name, values in phases.items() if any(values)}
    return {
        "plots": {
            "seconds": plot({"seconds": {"a step": [plan.step for plan in others], **seconds}}),
            "whole": plot(
                {
                    "sampled tokens a second": {"plan": [plan.tokens_per_second for plan in others]},
                    f"device hours, {steps:,} steps": {"plan": [plan.hours(steps) for plan in others]},
                    "GiB of a device": {
                        "plan": [plan.peak / GIB for plan in others],
                        "that can be used": [usable(plan.question.device) / GIB for plan in others],
                    },
                }
            ),
        }
    }
