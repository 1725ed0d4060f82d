"""Every experiment of the lab by name: the field's claims, the theory of trust regions, and training runs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from policygrad.errors import ConfigError
from policygrad.lab import dynamics, theory
from policygrad.lab.finding import Finding
from policygrad.lab.findings import adam, baselines, chains, critics, groups, kl, lengths, ratios, shapes, turns

Experiment = Callable[[int], Finding]
"""seed -> Finding."""
_CLAIMS: tuple[Experiment, ...] = (
    baselines.leave_one_out,
    baselines.group_mean,
    baselines.z_score,
    baselines.optimal_baseline,
    baselines.state_baseline,
    groups.group_size,
    groups.more_statistics,
    lengths.sequence_mean,
    lengths.brevity,
    ratios.product_ratio,
    ratios.ratio_over_length,
    chains.long_chains,
    shapes.gate_weights,
    ratios.gates,
    ratios.experts,
    critics.gae_curve,
    turns.turn_credit,
    kl.kl_places,
    adam.adam,
)
_THEORY: tuple[Experiment, ...] = (
    theory.performance_difference,
    theory.surrogate_matches,
    theory.trust_region_bound,
    shapes.bound_over_step,
    theory.conservative_mixture,
    theory.natural_invariance,
    theory.monotonic_improvement,
    theory.occupancy_sum,
)
_RUNS: tuple[Experiment, ...] = (
    dynamics.entropy_collapse,
    dynamics.length_drift,
    dynamics.k1_in_loss,
    dynamics.reward_hacking,
)
CLAIMS: dict[str, Experiment] = {f.__name__: f for f in _CLAIMS}
THEORY: dict[str, Experiment] = {f.__name__: f for f in _THEORY}
DYNAMICS: dict[str, Experiment] = {f.__name__: f for f in _RUNS}
EXPERIMENTS = CLAIMS | THEORY | DYNAMICS


def run(names: Iterable[str] | None = None, seed: int = 0) -> list[Finding]:
    """The findings of the named experiments, or of all."""
    return [experiment(seed) for experiment in chosen(names)]


def chosen(names: Iterable[str] | None = None) -> list[Experiment]:
    """The named experiments, or all.

    Raises:
        ConfigError: an unknown name, with the nearest known one.
    """
    known = EXPERIMENTS
    wanted = list(known if names is None else names)
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"no experiment is called {name!r}: {hint}")
    return [known[name] for name in wanted]
