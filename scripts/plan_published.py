"""Put what `policygrad plan` says beside what others measured, and fit the plan's constants to half of it.

    python scripts/plan_published.py          each figure of docs/results/published.toml, the plan's, and the ratio
    python scripts/plan_published.py --fit    also the constants with which the fitted half agrees best

Runs of a kind are in order of their names; constants are fitted to the first, third, ... and judged on the second, fourth, ...
"""

from __future__ import annotations

import argparse
import math
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from statistics import fmean, median
from typing import Any

from policygrad.planning.cost_model import AlgorithmCost, OptimizerState, ParallelLayout, Workload
from policygrad.planning.hardware import DEVICES, Device, Efficiency
from policygrad.planning.model_shapes import KNOWN_SHAPES, read_dense_shape
from policygrad.planning.planner import CapacityPlan, PlanRequest
from policygrad.planning.shapes import ModelShape
from results import RESULTS

FILE = RESULTS / "published.toml"
GIB = 2**30
ALLOWED = {"memory": 0.25, "learning": 0.35, "scoring": 0.35, "sampling": 0.35, "publishing": 0.35, "step": 0.35}
"""What a figure may be off by, as a fraction of the measured one, by its kind."""


@dataclass(frozen=True)
class PublishedRun:
    """A run that others measured, as docs/results/published.toml has it."""

    name: str
    kind: str  # learner, publisher, sampler or step
    source: str
    model: str
    device: str
    gpus: int
    work: Mapping[str, Any]
    options: Mapping[str, Any]
    measured: Mapping[str, float]
    is_judged: bool
    note: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of a learner's step."""
        return int(self.work["texts"]) * int(self.work["tokens"])


@dataclass(frozen=True)
class Figure:
    """One figure of a run: what was measured, and what the plan says."""

    run: PublishedRun
    kind: str  # of `ALLOWED`
    measured: float  # GiB or seconds
    planned: float

    @property
    def ratio(self) -> float:
        """The plan's figure over the measured one."""
        return self.planned / self.measured

    @property
    def is_within(self) -> bool:
        return abs(self.ratio - 1) <= ALLOWED[self.kind]


def load_runs() -> list[PublishedRun]:
    """Return the runs in order of kind and name, each with its half."""
    runs = list[PublishedRun]()
    values = sorted(_read()["run"], key=lambda value: (value["kind"], value["name"]))
    places: dict[str, int] = defaultdict(int)
    for value in values:
        runs.append(PublishedRun(**value, is_judged=places[value["kind"]] % 2 == 1))
        places[value["kind"]] += 1
    return runs


def compare_runs(runs: Sequence[PublishedRun], efficiency: Efficiency | None = None) -> list[Figure]:
    """Return each figure of the runs beside the plan's, by default with the plan's own constants."""
    reached = Efficiency() if efficiency is None else efficiency
    return [
        Figure(run, kind, measured, _predict(run, kind, reached))
        for run in runs
        for kind, measured in list_measured(run)
    ]


def list_measured(run: PublishedRun) -> Iterator[tuple[str, float]]:
    """Iterate over the kinds of a run's figures, in GiB and seconds.

    Rates become seconds of a step. What a step lasts longer with weights written for an engine than without is publishing.
    """
    m = run.measured
    if "memory_gib" in m:
        yield "memory", m["memory_gib"]
    if run.kind == "learner":
        rate = m.get("tokens_per_second", m.get("tokens_per_second_per_gpu", 0) * run.gpus)
        seconds = m.get("step_seconds", run.tokens / rate if rate else 0)
        if seconds:
            yield "learning", seconds
        if "step_seconds" in m and rate:
            yield "publishing", run.tokens / rate - seconds
    elif run.kind == "publisher":
        yield "publishing", m["seconds"]
    elif run.kind == "sampler":
        rate = m.get("output_tokens_per_second")
        yield "sampling", run.work["prompts"] * run.work["completion"] / rate if rate else m["seconds"]
    else:
        for key, kind in (("learning_seconds", "learning"), ("scoring_seconds", "scoring")):
            if key in m:
                yield kind, m[key]
        for key, kind in (("sampling_seconds", "sampling"), ("publishing_seconds", "publishing"), ("seconds", "step")):
            if key in m:
                yield kind, m[key]


def plan_run(run: PublishedRun, efficiency: Efficiency) -> CapacityPlan:
    """Plan a run as it is described: by data parallelism with sharding, and an engine that samples."""
    work, options = run.work, run.options
    state = OptimizerState(masters=options.get("masters", "fp32"), offload=options.get("offload", "none"))
    layout: dict[str, Any] = {
        "checkpointing": options.get("gradient_checkpointing", False),
        "adapter_rank": options.get("lora_rank", 0),
        "base_bits": options.get("bits"),
        "optimizer": state,
        "keeps_full_policy": False,
        "shares_prompts": False,
        "tensor_parallel": options.get("tensor_parallel", 1),
        "samplers": options.get("samplers", 0),
        "max_staleness": options.get("max_staleness", 0),
    }
    if run.kind == "learner":
        length = work["tokens"]
        workload = Workload(work["texts"], 1, 1, length - 1, length - 1)
        cost = AlgorithmCost("grpo", recomputes_head=options.get("recomputes_head", False))
        layout["micro_tokens"] = length * work.get("micro_texts", 1)
    elif run.kind == "publisher":  # one group of processes
        workload, cost = Workload(1, 1, 1, 1, 1), AlgorithmCost()
        layout |= {"tensor_parallel": options["samplers"], "weight_transport": "nccl"}
    else:
        workload = Workload(
            work["prompts"], work.get("samples", 1), work["prompt"], work["completion"], work["longest"]
        )
        scores = 2 if run.kind == "step" else 0
        cost = AlgorithmCost("grpo", 1, scores // 2, scores, updates=options.get("updates", 1), recomputes_head=True)
        layout["decode_rows"] = 4096
    place = find_device(run.device)
    request = PlanRequest(find_shape(run.model), place, workload, cost, efficiency)
    return CapacityPlan(request, ParallelLayout(run.gpus, **layout))


def _predict(run: PublishedRun, kind: str, efficiency: Efficiency) -> float:
    plan = plan_run(run, efficiency)
    times = plan.step_times
    if kind == "memory":
        return (sum(plan.learner.static.values()) + sum(plan.learner.training.values())) / GIB
    if kind == "publishing" and run.kind == "learner":  # written to a folder, and not read
        return plan.request.shape.parameters * plan.layout.bytes_per_number / efficiency.storage
    return {
        "learning": times.learning + times.optimizer,
        "scoring": times.scoring,
        "sampling": times.generation,
        "publishing": times.publishing,
        "step": plan.step_seconds,
    }[kind]


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Miss:
    """Why figures of some runs are outside of `ALLOWED`."""

    runs: Sequence[str]  # beginnings of names
    kinds: Sequence[str]
    why: str

    def explains(self, figure: Figure) -> bool:
        return figure.kind in self.kinds and figure.run.name.startswith(tuple(self.runs))


def load_misses() -> list[Miss]:
    """Return what is known of figures that the plan misses."""
    return [Miss(**value) for value in _read()["miss"]]


def load_failures() -> dict[str, Any]:
    """Return how often a cluster failed: devices, days, interruptions, source, url."""
    return _read()["failures"]


def list_sources() -> dict[str, dict[str, str]]:
    """Return the sources by key."""
    return _read()["source"]


@cache
def find_shape(name: str) -> ModelShape:
    """Return a model's shape, of the file or of the package."""
    shapes = _read()["shape"]
    return read_dense_shape(shapes[name], name, "published.toml") if name in shapes else KNOWN_SHAPES[name]


@cache
def find_device(name: str) -> Device:
    """Return a device's figures, of the file or of the package."""
    devices = _read()["device"]
    return Device(name, **devices[name]) if name in devices else DEVICES[name]


# Fitting.


@dataclass(frozen=True)
class Fit:
    """Constants of `Efficiency` that are fitted together, to figures of one kind."""

    names: tuple[str, ...]
    kind: str  # of `ALLOWED`
    values: tuple[tuple[float, ...], ...]  # that are tried, of each
    runs: tuple[str, ...]  # the kinds of runs whose figures they are


def _grid(first: float, step: float, count: int) -> tuple[float, ...]:
    return tuple(float(f"{first + step * i:.6g}") for i in range(count))


FITS = (
    Fit(("training",), "learning", (_grid(0.3, 0.01, 61),), ("learner",)),
    # At most the 89 % of its bandwidth that an H200 copied with (docs/scaling.md).
    Fit(
        ("engine_sampling", "engine_overhead"),
        "sampling",
        (_grid(0.5, 0.05, 9), _grid(0, 5e-6, 31)),
        ("sampler", "step"),
    ),
    Fit(("storage",), "publishing", (_grid(5e8, 1e8, 36),), ("learner",)),
    Fit(("engine_load",), "publishing", (_grid(5e8, 1e8, 96),), ("step",)),
    Fit(("broadcast",), "publishing", (_grid(5e8, 1e8, 96),), ("publisher",)),
    Fit(("allreduce_network",), "step", (_grid(0, 25e-6, 21),), ("step",)),
)
UTILISED = "A100"
"""The device, besides those that `training` is fitted on, whose `utilisation` is fitted."""


def fit_constants(runs: Sequence[PublishedRun]) -> dict[str, float]:
    """Return the constants with which the plan is nearest to the fitted half, by the mean distance of logarithms.

    Utilisation is the quotient of what `training` would be on that device and on the others.
    """
    others = [run for run in runs if not run.is_judged and run.device != UTILISED]
    same = [run for run in runs if not run.is_judged and run.device == UTILISED]
    found = dict[str, float]()
    for fit in FITS:
        pool = others if fit.names == ("training",) else [*others, *same]
        found |= search(fit, pool, found)
    now = find_device(UTILISED).utilisation
    values = {found["training"] * u / now: u for u in (round(0.5 + 0.05 * i, 2) for i in range(41))}
    [training] = search(Fit(("training",), "learning", (tuple(values),), ("learner",)), same, found).values()
    return found | {"utilisation": values[training]}


def search(fit: Fit, runs: Sequence[PublishedRun], found: Mapping[str, float]) -> dict[str, float]:
    """Return the values of a fit's constants that are best for these runs, with constants that were `found` before."""
    of_kind = [run for run in runs if run.kind in fit.runs and any(kind == fit.kind for kind, _ in list_measured(run))]

    def distance(values: tuple[float, ...]) -> float:
        efficiency = replace(Efficiency(), **{**found, **dict(zip(fit.names, values, strict=True))})
        return fmean(abs(math.log(f.ratio)) for f in compare_runs(of_kind, efficiency) if f.kind == fit.kind)

    return dict(zip(fit.names, min(product(*fit.values), key=distance), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="also print the constants that fit best")
    options = parser.parse_args()
    runs = load_runs()
    figures = compare_runs(runs)
    for figure in figures:
        half = "judged" if figure.run.is_judged else "fitted"
        mark = "" if figure.is_within else "  outside"
        print(
            f"{figure.kind:<11}{half:<8}{figure.measured:>9.4g}{figure.planned:>9.4g}{figure.ratio:>7.2f}  {figure.run.name}{mark}"
        )
    for kind in ALLOWED:
        for half in (False, True):
            ratios = [figure for figure in figures if figure.kind == kind and figure.run.is_judged == half]
            if ratios:
                within = sum(figure.is_within for figure in ratios)
                middle = median(figure.ratio for figure in ratios)
                print(
                    f"{kind}, {'judged' if half else 'fitted'}: {within} of {len(ratios)} within, median {middle:.2f}"
                )
    if options.fit:
        for name, value in fit_constants(runs).items():
            now = find_device(UTILISED).utilisation if name == "utilisation" else getattr(Efficiency(), name)
            print(f"{name}: {value:g}, now {now:g}")


if __name__ == "__main__":
    main()
