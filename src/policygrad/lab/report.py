"""The lab's report as data: the table of estimators and the findings."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from policygrad.core.algorithm import Algorithm
from policygrad.errors import ConfigError
from policygrad.lab import dynamics, theory
from policygrad.lab.findings import advantages, critics, ratios
from policygrad.lab.measurement import Finding, Measurement, compare_on_off_policy
from policygrad.lab.worlds import OFF_POLICY_KL, make_table_settings

Experiment = Callable[[int], Finding]
"""seed -> Finding."""
CLAIMS: dict[str, Experiment] = {
    f.__name__: f
    for f in (
        advantages.leave_one_out,
        advantages.group_mean,
        advantages.z_score,
        advantages.optimal_baseline,
        advantages.state_baseline,
        advantages.group_size,
        advantages.more_statistics,
        advantages.sequence_mean,
        advantages.brevity,
        ratios.product_ratio,
        ratios.ratio_over_length,
        ratios.long_chains,
        ratios.gate_weights,
        ratios.gates,
        ratios.experts,
        critics.gae_curve,
        critics.turn_credit,
        advantages.kl_places,
        critics.adam,
    )
}
THEORY: dict[str, Experiment] = {
    f.__name__: f
    for f in (
        theory.performance_difference,
        theory.surrogate_matches,
        theory.trust_region_bound,
        ratios.bound_over_step,
        theory.conservative_mixture,
        theory.natural_invariance,
        theory.monotonic_improvement,
        theory.occupancy_sum,
    )
}
DYNAMICS: dict[str, Experiment] = {
    f.__name__: f
    for f in (
        dynamics.entropy_collapse,
        dynamics.length_drift,
        dynamics.k1_in_loss,
        dynamics.reward_hacking,
    )
}
EXPERIMENTS = CLAIMS | THEORY | DYNAMICS


def select_experiments(names: Iterable[str] | None = None) -> list[Experiment]:
    """Return the named experiments, or all.

    Raises:
        ConfigError: An unknown name, with the nearest existing one.
    """
    names = list(EXPERIMENTS if names is None else names)
    for name in names:
        if name not in EXPERIMENTS:
            near = difflib.get_close_matches(name, EXPERIMENTS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(EXPERIMENTS)}"
            raise ConfigError(f"no experiment is called {name!r}: {hint}")
    return [EXPERIMENTS[name] for name in names]


@dataclass(frozen=True)
class LabReport:
    """The results that `policygrad lab` shows."""

    rows: tuple[tuple[Measurement, Measurement], ...]
    """(on-policy, off-policy) for each algorithm."""
    findings: tuple[Finding, ...]
    group_size: int
    kl: float
    """Nats per completion between π_old and π_θ, off-policy."""
    seed: int
    world: str
    """A description of the setting."""
    parts: tuple[str, ...] = ()
    """For each measured part, a sentence about the algorithm that contains it."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values; numbers that are not finite become null."""
        rows = [{"name": on.name, "on_policy": _to_row(on), "off_policy": _to_row(off)} for on, off in self.rows]
        return {
            "world": self.world,
            "parts": list(self.parts),
            "group_size": self.group_size,
            "off_policy_kl": self.kl,
            "seed": self.seed,
            "algorithms": _replace_nonfinite(rows),
            "findings": _replace_nonfinite([asdict(finding) for finding in self.findings]),
        }


def build_lab_report(
    algorithms: Mapping[str, Algorithm],
    group_size: int = 4,
    kl: float = OFF_POLICY_KL,
    seed: int = 0,
    names: Sequence[str] | None = None,
) -> LabReport:
    """Measure the algorithms and run the experiments (`names`; None = all, () = none).

    Raises:
        ConfigError: A group size that an algorithm or the lab refuses, a negative KL, or an unknown experiment.
    """
    experiments = select_experiments(names)  # an unknown name fails before the work
    with single_threaded():
        on, off = make_table_settings(kl, seed)
        rows = tuple(compare_on_off_policy(algorithms, on, off, group_size, seed))
        findings = tuple(experiment(seed) for experiment in experiments)
    tree = on.world.tree
    p = ", ".join(f"{x:.2f}" for x in on.world.success(on.theta).tolist())
    world = (
        f"{on.world.prompts} prompts solved with probability {p}; {tree.size} completions each (vocabulary {tree.vocabulary}, up "
        f"to {tree.length} tokens); a critic that errs by {on.critic_error:g}"
    )
    return LabReport(rows, findings, group_size, kl, seed, world)


@contextmanager
def single_threaded() -> Iterator[None]:
    """Use one torch thread: the lab's tensors are so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _to_row(m: Measurement) -> dict[str, Any]:
    return {name: value for name, value in asdict(m).items() if name != "name"}


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_nonfinite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nonfinite(v) for v in value]
    return value
