"""Advantages from a critic of given error: bias against variance. Exact for each critic; the mean over critics has an error."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import torch

from policygrad.core.algorithm import Algorithm
from policygrad.core.critic import Critic
from policygrad.core.protocols import Advantage
from policygrad.core.values import GAE, NStep
from policygrad.lab.finding import Finding, tiny, verdict
from policygrad.lab.groups import all_steps
from policygrad.lab.measurement import measure
from policygrad.lab.worlds import one_prompt

LAMBDAS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
ERRORS = (0.0, 0.1, 0.3)
"""Standard deviation of the critic's error at a state; rewards are 0 and 1."""
CRITICS = 4
NAMED: dict[str, Advantage] = {"TD": NStep(1), "2-step": NStep(2), "3-step": NStep(3), "Monte Carlo": NStep(0)}
STEPS = ("2-step", "3-step")
"""Those that are no end of the curve over λ."""


def gae_curve(seed: int = 0) -> Finding:
    """Bias, variance and error of GAE(1, λ) over λ, with n-step advantages beside it. Source: Schulman et al. 2016."""
    found = _measured(seed)
    mean = {key: table.mean(0).tolist() for key, table in found.items()}
    best = {error: min(LAMBDAS, key=lambda lam: mean[f"λ={lam:g}", error][2]) for error in ERRORS}
    biased, spread = ([mean[f"λ={lam:g}", ERRORS[2]][i] for lam in LAMBDAS] for i in (0, 1))
    gap = found["λ=1", ERRORS[2]][:, 2] - found[f"λ={best[ERRORS[2]]:g}", ERRORS[2]][:, 2]
    same = max(
        float((found[a, e] - found[b, e]).abs().max())
        for e in ERRORS
        for a, b in (("TD", "λ=0"), ("Monte Carlo", "λ=1"))
    )
    error = float(gap.std() / math.sqrt(CRITICS))
    unbiased = max(biased[-1], *(mean[f"λ={lam:g}", 0.0][0] for lam in LAMBDAS)) < 1e-9  # λ = 1, or an exact critic
    holds = unbiased and _falls(biased) and not _falls(spread) and spread[-1] > spread[0] and same < 1e-9
    return Finding(
        "gae_curve",
        "GAE's λ trades bias for variance: low λ trusts the critic, λ = 1 is unbiased whatever it says.",
        holds,
        f"With a critic that errs by {ERRORS[2]:g} the bias falls from {biased[0]:.2f} of ‖∇J‖ at λ = 0 to {biased[-1]:.0e} at "
        f"λ = 1 and the variance {verdict(spread[-1] > spread[0], 'rises', 'falls')} from {spread[0]:.1f} to {spread[-1]:.1f} "
        f"of ‖∇J‖². The mean squared error of one completion's gradient is least at λ = "
        f"{', '.join(f'{best[e]:g}' for e in ERRORS)} for critics that err by {', '.join(f'{e:g}' for e in ERRORS)}. "
        f"At the largest error the best λ saves {float(gap.mean()):.2f} ± {error:.2f} against λ = 1 (over {CRITICS} critics); "
        f"TD has {_mse(mean, 'TD')}, two steps {_mse(mean, '2-step')}, three {_mse(mean, '3-step')} and Monte Carlo "
        f"{_mse(mean, 'Monte Carlo')}. TD is λ = 0 and Monte Carlo λ = 1 to {tiny(same)}.",
        {f"best_lambda_{e:g}": best[e] for e in ERRORS}
        | {"gap": float(gap.mean())}
        | {
            f"{w} {n} {e:g}": mean[n, e][i]
            for i, w in enumerate(("bias", "variance", "mse"))
            for n in NAMED
            for e in ERRORS
        },
        error=error,
        curves={
            "lambda": LAMBDAS,
            **{
                f"{what}_{error:g}": tuple(mean[f"λ={lam:g}", error][i] for lam in LAMBDAS)
                for i, what in enumerate(("bias", "variance", "mse"))
                for error in ERRORS
            },
            **{  # flat: an n-step advantage knows no λ
                f"{what}_{n}": (mean[n, ERRORS[-1]][i],) * len(LAMBDAS)
                for i, what in enumerate(("bias", "variance", "mse"))
                for n in STEPS
            },
        },
    )


def _measured(seed: int) -> dict[tuple[str, float], torch.Tensor]:
    """[bias, variance, mse] by link and critic's error, one row per critic."""
    links: dict[str, Advantage] = {f"λ={lam:g}": GAE(1.0, lam) for lam in LAMBDAS}
    links |= NAMED
    setting = one_prompt(length=4, seed=seed)
    steps = all_steps(setting, 1)
    found: dict[tuple[str, float], torch.Tensor] = {}
    for error in ERRORS:
        for name, link in links.items():
            algorithm = Algorithm(psi=(link,), critic=Critic())
            rows = []
            for critic in range(CRITICS if error else 1):
                f = measure(algorithm, replace(setting, critic_error=error, seed=seed * 100 + critic), steps).figures
                rows.append((f.bias, f.variance, f.mse))
            found[name, error] = torch.tensor(rows, dtype=torch.float64)
    return found


def _mse(mean: dict[tuple[str, float], list[float]], name: str) -> str:
    return f"{mean[name, ERRORS[-1]][2]:.2f}"


def _falls(values: list[float]) -> bool:
    return all(a >= b for a, b in pairwise(values))
