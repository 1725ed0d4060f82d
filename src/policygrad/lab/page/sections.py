"""Findings by theme, as the page shows them."""

from __future__ import annotations

from collections.abc import Sequence

from policygrad.lab.finding import Finding

SECTIONS: dict[str, tuple[str, ...]] = {
    "Baselines and groups": (
        "z_score",
        "group_size",
        "more_statistics",
        "optimal_baseline",
        "group_mean",
        "leave_one_out",
        "state_baseline",
    ),
    "Ratios and gates": ("gate_weights", "gates", "ratio_over_length", "long_chains", "product_ratio", "experts"),
    "Critics": ("gae_curve",),
    "Turns": ("turn_credit",),
    "Length": ("sequence_mean", "brevity"),
    "KL and optimiser": ("kl_places", "adam"),
    "Trust regions": (
        "bound_over_step",
        "trust_region_bound",
        "monotonic_improvement",
        "conservative_mixture",
        "natural_invariance",
        "performance_difference",
        "surrogate_matches",
        "occupancy_sum",
    ),
    "How training goes wrong": ("entropy_collapse", "reward_hacking", "length_drift", "k1_in_loss"),
}
"""Those of no theme come last."""


def sections(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    """Findings by theme."""
    by_name = {f.name: f for f in findings}
    themes = {title: [by_name.pop(name) for name in names if name in by_name] for title, names in SECTIONS.items()}
    themes["Other findings"] = list(by_name.values())
    return {title: list_ for title, list_ in themes.items() if list_}
