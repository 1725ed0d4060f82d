"""The lab's report as data: the table of estimators and the findings."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch

from policygrad.core.algorithm import Algorithm
from policygrad.errors import ConfigError
from policygrad.lab import dynamics, theory
from policygrad.lab.findings import advantages, choices, critics, ratios, scales
from policygrad.lab.measurement import MeasuredClaim, Measurement, compare_on_off_policy
from policygrad.lab.worlds import OFF_POLICY_KL, make_table_settings

Experiment = Callable[[int], MeasuredClaim]  # seed -> MeasuredClaim


def _collect_experiments(*modules: ModuleType) -> dict[str, Experiment]:
    """Return the functions of these modules that return a MeasuredClaim, in the order of their definition."""
    functions = [f for module in modules for f in vars(module).values() if inspect.isfunction(f)]
    return {f.__name__: f for f in functions if f.__annotations__.get("return") == "MeasuredClaim"}


CLAIMS = _collect_experiments(advantages, ratios, choices, scales, critics)
THEORY = _collect_experiments(theory)
DYNAMICS = _collect_experiments(dynamics)
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

    rows: tuple[tuple[Measurement, Measurement], ...]  # (on-policy, off-policy) for each algorithm
    findings: tuple[MeasuredClaim, ...]
    group_size: int
    kl: float  # nats per completion between π_old and π_θ, off-policy
    seed: int
    world: str
    parts: tuple[str, ...] = ()  # for each measured part, a sentence about the algorithm that contains it

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values; numbers that are not finite become null."""
        data = {
            "world": self.world,
            "parts": self.parts,
            "group_size": self.group_size,
            "off_policy_kl": self.kl,
            "seed": self.seed,
            "algorithms": [{"name": a.name, "on_policy": _to_row(a), "off_policy": _to_row(b)} for a, b in self.rows],
            "findings": [asdict(measured) for measured in self.findings],
        }
        return json.loads(json.dumps(data), parse_constant=lambda _: None)  # type: ignore[no-any-return]


def build_lab_report(
    algorithms: Mapping[str, Algorithm],
    group_size: int = 4,
    kl: float = OFF_POLICY_KL,
    seed: int = 0,
    names: Sequence[str] | None = None,
    on_result: Callable[[Measurement | MeasuredClaim], None] = lambda result: None,
) -> LabReport:
    """Measure the algorithms and run the experiments (`names`; None = all, () = none).

    Args:
        on_result: Called with each algorithm's on-policy measurement and each claim, as soon as it is there.

    Raises:
        ConfigError: A group size that an algorithm or the lab refuses, a negative KL, or an unknown experiment.
    """
    experiments = select_experiments(names)  # an unknown name fails before the work
    with single_threaded():
        on, off = make_table_settings(kl, seed)
        rows, findings = list[tuple[Measurement, Measurement]](), list[MeasuredClaim]()
        for row in compare_on_off_policy(algorithms, on, off, group_size, seed):
            rows.append(row)
            on_result(row[0])
        for experiment in experiments:
            findings.append(experiment(seed))
            on_result(findings[-1])
    tree = on.world.tree
    p = ", ".join(f"{x:.2f}" for x in on.world.success(on.theta).tolist())
    world = (
        f"{on.world.prompts} prompts solved with probability {p}; {tree.size} completions each (vocabulary {tree.vocabulary}, up "
        f"to {tree.length} tokens); a critic that errs by {on.critic_error:g}"
    )
    return LabReport(tuple(rows), tuple(findings), group_size, kl, seed, world)


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
