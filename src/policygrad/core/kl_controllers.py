"""Rules that adapt a coefficient β so that a KL stays near its target.

KLs and targets are means over the rollout, in nats per sampled token. A part's `beta` is the initial β; the current β is its state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from policygrad.core.base import Part, State
from policygrad.core.batch import Batch
from policygrad.core.metrics import Mean, Metric, Metrics
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm
from policygrad.core.settings import check_setting

Rule = Literal["proportional", "doubling"]
BAND = 1.5  # A KL is within its band between target/1.5 and 1.5·target
MIN_BETA, MAX_BETA = 1e-6, 1e4  # limits of an adapted β, from which it can still recover


class AdaptiveBeta(Part):
    """Base of parts whose β may adapt to a KL target. A subclass's `update_state` reads the KL it is adapted to."""

    beta: float
    target: float | None
    rule: Rule | None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        check_setting(self, "rule", self.rule in (None, *get_args(Rule)), f"one of {', '.join(get_args(Rule))}")
        if self.target is None and self.rule is not None:
            raise ConfigError(
                f"{name}.rule needs a target to adapt beta to: set target (nats per token), or leave rule unset"
            )
        if self.target is not None and self.beta == 0:
            raise ConfigError(
                f"{name}.beta is 0 and would stay 0, since both rules multiply it: start from a small beta, or unset target"
            )

    def describe_target(self) -> str:
        """Return the suffix of `formula` that describes an adaptive β."""
        return "" if self.target is None else f",  β adapted to a KL of {self.target:g}"

    def adapt(self, beta: float, kl: float, default: Rule) -> State:
        """Return the state with the next β, by the part's rule or else `default`; without a target β stays."""
        if self.target is None:
            return {"beta": beta}
        return {"beta": min(max(_RULES[self.rule or default](beta, kl, self.target), MIN_BETA), MAX_BETA)}

    def init_state(self) -> State | None:
        return None if self.target is None else {"beta": self.beta}

    def with_state(self, state: State) -> Self:
        changed: Any = replace(self, beta=state["beta"])  # type: ignore[type-var]  # the parts are dataclasses
        return changed  # type: ignore[no-any-return]


def adapt_proportionally(beta: float, kl: float, target: float) -> float:
    """β(1 + 0.1·clip(KL/target − 1, ±0.2)): at most 2 % per rollout. Source: Ziegler et al. 2019, sec. 2.2."""
    return beta * (1 + 0.1 * min(max(kl / target - 1, -0.2), 0.2))


def adapt_by_doubling(beta: float, kl: float, target: float) -> float:
    """2β above 1.5·target, β/2 below target/1.5, else β. Source: Schulman et al. 2017 (PPO), sec. 4."""
    return beta if within_band(kl, target) else 2 * beta if kl > target else beta / 2


def within_band(kl: float, target: float) -> bool:
    """target/1.5 ≤ KL ≤ 1.5·target."""
    return target / BAND <= kl <= BAND * target


_RULES = {"proportional": adapt_proportionally, "doubling": adapt_by_doubling}


class PenaltyOnOld(AdaptiveBeta):
    """Base of penalties on KL(π_old‖π_θ) whose β adapts to the KL after the last update (`kl_old/last`)."""

    constrained_kl: ClassVar[str | None] = "kl_old"

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """Adapt β, starting from that of the rollout's last round if the update rule reports one."""
        if "kl_old/last" not in metrics:
            return state
        used = metrics.get(f"{beta_metric_name(self)}/last")
        return self.adapt(state["beta"] if used is None else used.value, metrics["kl_old/last"].value, "doubling")


def beta_metric_name(part: object) -> str:
    """Return the metric name of a part's adaptive β, such as `beta/kl_to_old`."""
    return "beta/" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(part).__name__).lower()


def beta_metrics(parts: Iterable[Part]) -> Metrics:
    """Return the current value of every adaptive β."""
    moving = (part for part in parts if isinstance(part, AdaptiveBeta) and part.target is not None)
    return {beta_metric_name(part): Mean(part.beta) for part in moving}


def find_kl_penalties(algorithm: Algorithm) -> list[AdaptiveBeta]:
    """Return the terms that keep KL(π_old‖π_θ) near a target."""
    constraining = (term for term in algorithm.terms if term.constrained_kl == "kl_old")
    return [term for term in constraining if isinstance(term, AdaptiveBeta) and term.target is not None]


def adapt_penalties(algorithm: Algorithm, batch: Batch, metrics: Mapping[str, Metric]) -> Algorithm | None:
    """Adapt the penalties on KL(π_old‖π_θ) to the measured KL (`kl_old/last`), for another round on the same rollout.

    Returns:
        The adapted algorithm; None once the KL is within every penalty's band.
    """
    kl, moving = metrics["kl_old/last"].value, find_kl_penalties(algorithm)
    if all(within_band(kl, term.target) for term in moving if term.target is not None):
        return None
    next_ = {id(term): term.with_state(term.update_state({"beta": term.beta}, batch, metrics)) for term in moving}
    terms: Any = tuple(next_.get(id(term), term) for term in algorithm.terms)
    return replace(algorithm, terms=terms)
