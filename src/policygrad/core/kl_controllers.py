"""Rules that adapt a coefficient β so that a KL stays near its target: pure functions, and the state they move.

A KL and its target are nats a sampled token, the mean over the rollout. A part's `beta` is where its β begins; the β of the
moment is its memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from policygrad.core.base import Part, State
from policygrad.core.batch import Batch
from policygrad.core.metrics import Mean, Metric, Metrics
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm

Rule = Literal["proportional", "doubling"]
BAND = 1.5
"""A KL is inside its band between target/1.5 and 1.5·target."""
MIN_BETA, MAX_BETA = 1e-6, 1e4
"""Where an adapted β stops, so that it can come back."""


class AdaptiveBeta(Part):
    """A part whose β may adapt to a KL target: fields beta, target and rule, and an `update` that knows which KL."""

    beta: float
    target: float | None
    rule: Rule | None

    def init_state(self) -> State | None:
        return None if self.target is None else {"beta": self.beta}

    def with_state(self, state: State) -> Self:
        changed: Any = replace(self, beta=state["beta"])  # type: ignore[type-var]  # the parts are dataclasses
        return changed  # type: ignore[no-any-return]


def adapt_proportionally(beta: float, kl: float, target: float) -> float:
    """β(1 + 0.1·clip(KL/target − 1, ±0.2)): at most 2 % a rollout. Source: Ziegler et al. 2019, sec. 2.2."""
    return beta * (1 + 0.1 * min(max(kl / target - 1, -0.2), 0.2))


def adapt_by_doubling(beta: float, kl: float, target: float) -> float:
    """2β above 1.5·target, β/2 below target/1.5, β inside the band. Source: Schulman et al. 2017 (PPO), sec. 4."""
    return beta if within_band(kl, target) else 2 * beta if kl > target else beta / 2


def within_band(kl: float, target: float) -> bool:
    """target/1.5 ≤ KL ≤ 1.5·target."""
    return target / BAND <= kl <= BAND * target


_RULES = {"proportional": adapt_proportionally, "doubling": adapt_by_doubling}


def adapt_beta(part: AdaptiveBeta, beta: float, kl: float, default: Rule) -> State:
    """The memory with the next β by the part's rule, `default` where it names none; the same β without a target."""
    if part.target is None:
        return {"beta": beta}
    return {"beta": min(max(_RULES[part.rule or default](beta, kl, part.target), MIN_BETA), MAX_BETA)}


def check_beta(part: AdaptiveBeta) -> None:
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


def describe_target(part: AdaptiveBeta) -> str:
    """What `formula` adds about β."""
    return "" if part.target is None else f",  β adapted to a KL of {part.target:g}"


def beta_metric_name(part: object) -> str:
    """`beta/kl_to_old`, the metric that holds an adaptive β."""
    return "beta/" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(part).__name__).lower()


def beta_metrics(parts: Iterable[Part]) -> Metrics:
    """Every β that adapts to a target, as it stands."""
    moving = (part for part in parts if isinstance(part, AdaptiveBeta) and part.target is not None)
    return {beta_metric_name(part): Mean(part.beta) for part in moving}


def find_kl_penalties(algorithm: Algorithm) -> list[AdaptiveBeta]:
    """The terms that hold KL(π_old‖π_θ) near a target."""
    constraining = (term for term in algorithm.terms if term.constrained_kl == "kl_old")
    return [term for term in constraining if isinstance(term, AdaptiveBeta) and term.target is not None]


def adapt_penalties(algorithm: Algorithm, batch: Batch, metrics: Mapping[str, Metric]) -> Algorithm | None:
    """The algorithm with the β of its penalties on KL(π_old‖π_θ) adapted to the KL measured (`kl_old/last`), to go on with
    the same rollout; None once each is inside its band."""
    kl, moving = metrics["kl_old/last"].value, find_kl_penalties(algorithm)
    if all(within_band(kl, term.target) for term in moving if term.target is not None):
        return None
    next_ = {id(term): term.with_state(term.update_state({"beta": term.beta}, batch, metrics)) for term in moving}
    terms: Any = tuple(next_.get(id(term), term) for term in algorithm.terms)
    return replace(algorithm, terms=terms)
