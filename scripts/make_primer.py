"""Draws the primer's figures, docs/primer/*.svg, from the lab's experiments: python scripts/make_primer.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pages.figures import chart
from policygrad.lab.plots import choose_plot
from policygrad.lab.report import select_experiments

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "primer"
FIGURES = (
    "optimal_baseline",
    "gae_curve",
    "product_ratio",
    "bound_over_step",
    "gates",
    "entropy_collapse",
    "k1_in_loss",
    "reward_hacking",
    "z_score",
    "length_drift",
)
"""Experiments, in the order of the page."""


def figures() -> Iterator[tuple[str, str]]:
    """(name, SVG)."""
    for finding in (experiment(0) for experiment in select_experiments(FIGURES)):
        plot = choose_plot(finding)
        assert plot is not None, f"{finding.name} has no curves"
        yield finding.name, chart(finding.claim, plot.to_data(finding))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in figures():
        (FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")
        print(FOLDER / f"{name}.svg", flush=True)
