"""Rules that adapt a coefficient β so that a KL stays near its target: pure functions, and the state they move.

A KL and its target are nats a sampled token, the mean over the rollout. β itself is the state: a part returns itself
with the next β from `observe`, and a checkpoint holds it like every field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from policygrad.core.metrics import Mean, Metric, Metrics
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm
    from policygrad.core.types import Batch

Rule = Literal["proportional", "doubling"]
BAND = 1.5
"""A KL is inside its band between target/1.5 and 1.5·target."""
SMALLEST, LARGEST = 1e-6, 1e4
"""Where an adapted β stops, so that it can come back."""


class Adapted(Protocol):
    """What a part with an adaptive β has."""

    @property
    def beta(self) -> float: ...

    @property
    def target(self) -> float | None: ...

    @property
    def rule(self) -> Rule | None: ...


def proportional(beta: float, kl: float, target: float) -> float:
    """β(1 + 0.1·clip(KL/target − 1, ±0.2)): at most 2 % a rollout. Source: Ziegler et al. 2019, sec. 2.2."""
    return beta * (1 + 0.1 * min(max(kl / target - 1, -0.2), 0.2))


def doubling(beta: float, kl: float, target: float) -> float:
    """2β above 1.5·target, β/2 below target/1.5, β inside the band. Source: Schulman et al. 2017 (PPO), sec. 4."""
    return beta if inside(kl, target) else 2 * beta if kl > target else beta / 2


def inside(kl: float, target: float) -> bool:
    """target/1.5 ≤ KL ≤ 1.5·target."""
    return target / BAND <= kl <= BAND * target


_RULES = {"proportional": proportional, "doubling": doubling}


def adapted(part: Any, kl: float, default: Rule) -> Any:
    """The part with the next β by its rule, `default` where it names none; the part itself without a target."""
    if part.target is None:
        return part
    beta = _RULES[part.rule or default](part.beta, kl, part.target)
    return replace(part, beta=min(max(beta, SMALLEST), LARGEST))


def check(part: Adapted) -> None:
    """Raises ConfigError for a β, a target or a rule that means nothing."""
    name = type(part).__name__
    if not part.beta >= 0:
        raise ConfigError(f"{name}.beta must be at least 0, not {part.beta}")
    if part.rule is not None and part.rule not in get_args(Rule):
        raise ConfigError(f"{name}.rule must be one of {', '.join(get_args(Rule))}, not {part.rule!r}")
    if part.target is None:
        if part.rule is not None:
            raise ConfigError(
                f"{name}.rule adapts beta to a target, and there is none: set target (nats a token), or leave rule open"
            )
    elif not part.target > 0:
        raise ConfigError(f"{name}.target must be greater than 0 nats a token, or none, not {part.target}")
    elif part.beta == 0:
        raise ConfigError(
            f"{name}.beta is 0 and would stay so: both rules multiply it. Start from a small beta, or drop target"
        )


def told(part: Adapted) -> str:
    """What `formula` adds about β."""
    return "" if part.target is None else f",  β adapted to a KL of {part.target:g}"


def metric_name(part: object) -> str:
    """`beta/kl_to_old`, the metric that holds an adaptive β."""
    return "beta/" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(part).__name__).lower()


def betas(algorithm: Algorithm) -> Metrics:
    """Every β that adapts to a target, as it stands."""
    moving = (
        part for _, part in algorithm.parts() if getattr(part, "target", None) is not None and hasattr(part, "rule")
    )
    return {metric_name(part): Mean(part.beta) for part in moving}


def re_adapted(algorithm: Algorithm, batch: Batch, metrics: Mapping[str, Metric]) -> Algorithm | None:
    """The algorithm with the β of its penalties on KL(π_old‖π_θ) adapted to the KL measured (`kl_old/last`), to go on with
    the same rollout; None once each is inside its band."""
    kl = metrics["kl_old/last"].value
    penalties = [t for t in algorithm.terms if getattr(t, "constrains", None) == "kl_old" and t.target is not None]  # type: ignore[attr-defined]
    if all(inside(kl, term.target) for term in penalties):  # type: ignore[attr-defined]
        return None
    terms = (t.observe(batch, metrics) if t in penalties else t for t in algorithm.terms)  # type: ignore[attr-defined]
    return replace(algorithm, terms=tuple(terms))
