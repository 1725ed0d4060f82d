"""Measuring an estimator against the true gradient: bias, direction, variance and error; by difficulty and length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace

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
    make_steps,
)
from policygrad.lab.setting import LabSetting

JACKKNIFE_BLOCKS = 16


@dataclass(frozen=True)
class Figures:
    """An estimator g against the truth t = ∇J, relative to ‖t‖ (bias) and ‖t‖² (variance, errors)."""

    scale: float
    """⟨E g, t⟩/‖t‖²: the length of the expected gradient in the true direction; a learning rate absorbs it."""
    bias: float  # ‖E g − t‖/‖t‖
    cosine: float  # cosine of E g and t
    variance: float  # tr Cov g/‖t‖²
    mse: float  # E‖g − t‖²/‖t‖²
    snr: float  # ‖E g‖²/tr Cov g, independent of the scale
    best_mse: float  # min_a E‖a·g − t‖²/‖t‖²: the error at the best length; 1 = g contains no information


@dataclass(frozen=True)
class Measurement:
    """One algorithm in one setting."""

    name: str
    exact: bool  # True when the expectation is over all steps, False for a sample
    steps: int
    figures: Figures
    errors: Figures | None
    """Standard errors of a sample (jackknife over 16 blocks); for a bias near 0, the largest that would look like 0."""
    difficulty: tuple[Mapping[str, float], ...]
    """For each prompt: its expected reward p, and the scale, cosine and snr of its steps (empty where steps mix prompts)."""
    length: tuple[Mapping[str, float], ...]
    """For each length in tokens: the mean coefficient of ∇log π at a token of the best answers (`right`) and of the other answers
    (`wrong`), if there are any."""


def compute_figures(gradient: Tensor, weight: Tensor, truth: Tensor, exact: bool = True) -> Figures:
    """Compute figures from gradients [M, P] with probabilities [M]; for a sample, squares are corrected for its size."""
    mean = weight @ gradient
    spread = float(weight @ (gradient - mean).square().sum(1))
    size = int((weight > 0).sum())
    variance, noise = (spread, 0.0) if exact else (spread * size / max(1, size - 1), spread / max(1, size - 1))
    square, along = float(truth @ truth), float(mean @ truth)
    if square == 0:
        raise ConfigError("the true gradient is 0, so nothing can be measured relative to it: use another θ or reward")
    mean_square = max(float(mean @ mean) - noise, 0.0)
    bias = math.sqrt(max(float((mean - truth).square().sum()) - noise, 0.0) / square)
    return Figures(
        scale=along / square,
        bias=bias,
        cosine=min(max(along / math.sqrt(mean_square * square), -1.0), 1.0) if mean_square else 0.0,
        variance=variance / square,
        mse=bias**2 + variance / square,
        snr=mean_square / variance if variance else math.inf,
        best_mse=1 - along**2 / (square * (mean_square + variance)) if mean_square + variance else 1.0,
    )


def measure_algorithm(
    algorithm: Algorithm,
    setting: LabSetting,
    steps: WeightedSteps | None = None,
    decisions: StepDecisions | None = None,
    name: str = "",
) -> Measurement:
    """Measure the algorithm's estimator in a setting; by default, a step is one group of the algorithm's default size."""
    steps = make_steps(setting, algorithm.samples_per_prompt) if steps is None else steps
    estimates, truth = estimate_gradients(algorithm, setting, steps, decisions), setting.true_gradient(algorithm)
    if invalid := int((~estimates.gradient.isfinite().all(1)).sum()):
        raise ConfigError(
            f"{name or algorithm.name}: the gradient is not finite in {invalid} of {len(steps.rows)} steps: one of its parts "
            "divides by 0 or overflows (a group may have no spread)"
        )
    return Measurement(
        name or algorithm.name,
        estimates.exact,
        len(steps.rows),
        compute_figures(estimates.gradient, estimates.weight, truth, estimates.exact),
        None if estimates.exact else _jackknife_errors(estimates, truth),
        _measure_by_difficulty(algorithm, setting, steps, estimates),
        _measure_by_length(setting, steps, estimates),
    )


def compare_on_off_policy(
    algorithms: Mapping[str, Algorithm], on: LabSetting, off: LabSetting, size: int, seed: int = 0
) -> Iterator[tuple[Measurement, Measurement]]:
    """Measure each algorithm on- and off-policy, on the same steps of G completions; both settings have the same π_old."""
    steps = make_steps(on, size, seed)
    for name, algorithm in algorithms.items():
        check_sampling(algorithm, size, 1.0)
        # of the off-policy setting, which has logp_old for every part
        decisions = compute_decisions(on.prepare(algorithm), off, steps)
        measured_on, measured_off = (measure_algorithm(algorithm, x, steps, decisions, name) for x in (on, off))
        yield measured_on, measured_off


def _jackknife_errors(estimates: Estimates, truth: Tensor) -> Figures:
    gradient, weights = estimates.gradient, estimates.weight
    block, parts = torch.arange(len(weights)) % JACKKNIFE_BLOCKS, []
    for excluded in range(JACKKNIFE_BLOCKS):
        rest = weights * (block != excluded)
        parts.append(astuple(compute_figures(gradient, rest / rest.sum(), truth, exact=False)))
    values = torch.tensor(parts, dtype=torch.float64)
    share = (JACKKNIFE_BLOCKS - 1) / JACKKNIFE_BLOCKS
    errors = Figures(*(share * (values - values.mean(0)).square().sum(0)).sqrt().tolist())
    full = compute_figures(gradient, weights, truth, exact=False)
    floor = math.sqrt(full.variance / int((weights > 0).sum()))
    # The bias is cut off at 0: one of this size could not be distinguished from none.
    return replace(errors, bias=max(errors.bias, floor)) if full.bias < floor else errors


def _measure_by_difficulty(
    algorithm: Algorithm, setting: LabSetting, steps: WeightedSteps, estimates: Estimates
) -> tuple[Mapping[str, float], ...]:
    if int(steps.group.max()) > 0:
        return ()
    world, rows = setting.world, []
    prompt = steps.rows[:, 0] // world.tree.size
    p = world.success(setting.sampling_theta).detach()
    for x in range(world.prompts):
        weight = estimates.weight * (prompt == x)
        truth = setting.true_gradient(algorithm, x)
        if float(weight.sum()) == 0 or float(truth @ truth) == 0:
            continue
        f = compute_figures(estimates.gradient, weight / weight.sum(), truth, estimates.exact)
        rows.append({"p": float(p[x]), "scale": f.scale, "cosine": f.cosine, "snr": f.snr})
    return tuple(rows)


def _measure_by_length(
    setting: LabSetting, steps: WeightedSteps, estimates: Estimates
) -> tuple[Mapping[str, float], ...]:
    world = setting.world
    best = (world.reward == world.reward.amax(1, keepdim=True)).flatten()[steps.rows]
    length = world.tree.lengths.repeat(world.prompts)[steps.rows]
    weight = estimates.weight[:, None].expand(length.shape)
    if steps.statistics_only is not None:
        weight = weight * ~steps.statistics_only
    rows = []
    for n in sorted(set(world.tree.lengths.tolist())):
        row = {"length": float(n)}
        for name, answers in (("right", best), ("wrong", ~best)):
            selected = weight * (answers & (length == n))
            if float(selected.sum()) > 0:
                row[name] = float((selected * estimates.coefficient).sum() / selected.sum())
        rows.append(row)
    return tuple(rows)


@dataclass(frozen=True)
class MeasuredClaim:
    """A measured claim from the literature. The sentence is made from the numbers, whether or not they support the claim."""

    name: str
    claim: str  # the claim as it is usually stated
    holds: bool  # True when the numbers support the claim in this setting
    sentence: str  # the result
    numbers: Mapping[str, float]
    error: float | None = None  # standard error of the decisive number; None = exact, without sampling
    curves: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Columns of equal length to plot; the first one is the x axis."""


def format_percent(x: float) -> str:
    """Format a share as 12 % or 0.3 %."""
    return f"{100 * x:.0f} %" if abs(x) >= 0.0995 else f"{100 * x:.2g} %"


def format_small(x: float) -> str:
    """Format a rounding error as 4e-16, or 0 if it is exactly 0."""
    return f"{x:.0e}" if x else "0"


def join_numbers(values: Iterable[float], spec: str = ".2f", separator: str = ", ") -> str:
    """Format numbers with the same format and join them."""
    return separator.join(f"{x:{spec}}" for x in values)
