"""What is said of an estimator: bias, direction, variance and errors against the true gradient; by difficulty and length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.validation import check_sampling
from policygrad.errors import ConfigError
from policygrad.lab.estimators import (
    Estimates,
    StepDecisions,
    WeightedSteps,
    compute_decisions,
    estimate_gradients,
    iter_jackknife_weights,
    make_steps,
)
from policygrad.lab.setting import LabSetting


@dataclass(frozen=True)
class Figures:
    """An estimator g against the truth t = ∇J; relative to ‖t‖ (bias) and ‖t‖² (variance, errors)."""

    scale: float
    """⟨E g, t⟩/‖t‖²: how long the expected gradient is in the true direction; a learning rate absorbs it."""
    bias: float
    """‖E g − t‖/‖t‖."""
    cosine: float
    """Of E g and t."""
    variance: float
    """tr Cov g/‖t‖²."""
    mse: float
    """E‖g − t‖²/‖t‖²."""
    snr: float
    """‖E g‖²/tr Cov g, whatever the scale."""
    best_mse: float
    """min_a E‖a·g − t‖²/‖t‖²: the error at the best length; 1 = g says nothing."""


@dataclass(frozen=True)
class Measurement:
    """One algorithm in one setting."""

    name: str
    exact: bool
    """Whether the expectation is over all steps; else over a sample."""
    steps: int
    figures: Figures
    errors: Figures | None
    """Standard errors, where the steps were sampled (jackknife over 16 blocks); of a bias near 0, what would pass for it."""
    difficulty: tuple[Mapping[str, float], ...]
    """For each prompt: its expected reward p, and the scale, cosine and snr of the steps on it (empty where steps mix prompts)."""
    length: tuple[Mapping[str, float], ...]
    """For each length in tokens: the mean coefficient of ∇log π at a token of the best answers (`right`) and of the others
    (`wrong`), where there are any."""


def compute_figures(gradient: Tensor, weight: Tensor, truth: Tensor, exact: bool = True) -> Figures:
    """From gradients [M, P] with probabilities [M]; of a sample, what its size adds to squares is taken off."""
    mean = weight @ gradient
    spread = float(weight @ (gradient - mean).square().sum(1))
    kept = int((weight > 0).sum())
    variance, noise = (spread, 0.0) if exact else (spread * kept / max(1, kept - 1), spread / max(1, kept - 1))
    square, along = float(truth @ truth), float(mean @ truth)
    if square == 0:
        raise ConfigError(
            "the true gradient is 0 here, and nothing is measured relative to it: take another θ or reward"
        )
    size = max(float(mean @ mean) - noise, 0.0)
    bias = math.sqrt(max(float((mean - truth).square().sum()) - noise, 0.0) / square)
    return Figures(
        scale=along / square,
        bias=bias,
        cosine=min(max(along / math.sqrt(size * square), -1.0), 1.0) if size else 0.0,
        variance=variance / square,
        mse=bias**2 + variance / square,
        snr=size / variance if variance else math.inf,
        best_mse=1 - along**2 / (square * (size + variance)) if size + variance else 1.0,
    )


def measure_algorithm(
    algorithm: Algorithm,
    setting: LabSetting,
    steps: WeightedSteps | None = None,
    decisions: StepDecisions | None = None,
    name: str = "",
) -> Measurement:
    """The algorithm's estimator in this setting; without `steps`, one group of its own default size is a step."""
    steps = make_steps(setting, algorithm.samples_per_prompt) if steps is None else steps
    found, truth = estimate_gradients(algorithm, setting, steps, decisions), setting.true_gradient(algorithm)
    if broken := int((~found.gradient.isfinite().all(1)).sum()):
        raise ConfigError(
            f"{name or algorithm.name}: the gradient is not finite in {broken} of {len(steps.rows)} steps: one of its parts "
            "divides by 0 or overflows (a group may have no spread)"
        )
    whole = compute_figures(found.gradient, found.weight, truth, found.exact)
    return Measurement(
        name or algorithm.name,
        found.exact,
        len(steps.rows),
        whole,
        None if found.exact else _errors(found, truth),
        _by_difficulty(algorithm, setting, steps, found),
        _by_length(setting, steps, found),
    )


def compare_on_off_policy(
    algorithms: Mapping[str, Algorithm], on: LabSetting, off: LabSetting, size: int, seed: int = 0
) -> list[tuple[Measurement, Measurement]]:
    """Each algorithm on- and off-policy, on the same steps of G completions; both settings have one π_old."""
    steps = make_steps(on, size, seed)
    rows = []
    for name, algorithm in algorithms.items():
        check_sampling(algorithm, size, 1.0)
        levers = compute_decisions(on.prepare(algorithm), off, steps)  # off-policy, logp_old is there for every part
        rows.append(
            (
                measure_algorithm(algorithm, on, steps, levers, name),
                measure_algorithm(algorithm, off, steps, levers, name),
            )
        )
    return rows


def _errors(found: Estimates, truth: Tensor) -> Figures:
    parts = [
        compute_figures(found.gradient, weight, truth, exact=False) for weight in iter_jackknife_weights(found.weight)
    ]
    n, deviations = len(parts), {}
    for name in Figures.__dataclass_fields__:
        values = torch.tensor([getattr(part, name) for part in parts], dtype=torch.float64)
        deviations[name] = float(((n - 1) / n * (values - values.mean()).square().sum()).sqrt())
    whole = compute_figures(found.gradient, found.weight, truth, exact=False)
    floor = math.sqrt(whole.variance / int((found.weight > 0).sum()))
    if whole.bias < floor:  # near 0 the bias is cut off there: so large a one could not have been told from none
        deviations["bias"] = max(deviations["bias"], floor)
    return Figures(**deviations)


def _by_difficulty(
    algorithm: Algorithm, setting: LabSetting, steps: WeightedSteps, found: Estimates
) -> tuple[Mapping[str, float], ...]:
    if int(steps.group.max()) > 0:
        return ()
    world, rows = setting.world, []
    prompt = steps.rows[:, 0] // world.tree.size
    p = world.success(setting.sampling_theta).detach()
    for x in range(world.prompts):
        here = found.weight * (prompt == x)
        truth = setting.true_gradient_at(algorithm, x)
        if float(here.sum()) == 0 or float(truth @ truth) == 0:
            continue
        f = compute_figures(found.gradient, here / here.sum(), truth, found.exact)
        rows.append({"p": float(p[x]), "scale": f.scale, "cosine": f.cosine, "snr": f.snr})
    return tuple(rows)


def _by_length(setting: LabSetting, steps: WeightedSteps, found: Estimates) -> tuple[Mapping[str, float], ...]:
    world = setting.world
    best = (world.reward == world.reward.amax(1, keepdim=True)).flatten()[steps.rows]
    length = world.tree.lengths.repeat(world.prompts)[steps.rows]
    weight = found.weight[:, None].expand(length.shape)
    if steps.statistics_only is not None:
        weight = weight * ~steps.statistics_only
    rows = []
    for n in sorted(set(world.tree.lengths.tolist())):
        row = {"length": float(n)}
        for name, where in (("right", best), ("wrong", ~best)):
            here = weight * (where & (length == n))
            if float(here.sum()) > 0:
                row[name] = float((here * found.coefficient).sum() / here.sum())
        rows.append(row)
    return tuple(rows)


# A claim of the field, and what came of it when it was measured.


@dataclass(frozen=True)
class Finding:
    """One experiment. The sentence is made from the numbers, also where they speak against the claim."""

    name: str
    claim: str
    """As it is usually said."""
    holds: bool
    """Whether the numbers bear it out, here."""
    sentence: str
    """What was found."""
    numbers: Mapping[str, float]
    error: float | None = None
    """Standard error of the number that decides; None = exact, no sampling."""
    curves: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Columns of equal length, to plot; the first one is the x axis."""


def format_percent(x: float) -> str:
    """12 %, 0.3 %."""
    return f"{100 * x:.0f} %" if abs(x) >= 0.0995 else f"{100 * x:.2g} %"


def format_small(x: float) -> str:
    """4e-16, or 0 where it is nothing at all."""
    return f"{x:.0e}" if x else "0"


def choose_text(holds: bool, yes: str, no: str) -> str:
    """The wording for either outcome."""
    return yes if holds else no
