"""A plan as one HTML file that asks the network for nothing: its tables, and plots over numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from policygrad.pages.frame import framed
from policygrad.planning.memory import usable
from policygrad.planning.plan import Plan
from policygrad.planning.remedies import Remedy
from policygrad.planning.told import GIB, PHASES, assumptions, summary, tables, title


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
