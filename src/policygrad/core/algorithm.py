"""What an algorithm is: data. One value per part of the equation, checked when it is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from policygrad.core import ragged
from policygrad.core.advantages import reward_to_go
from policygrad.core.aggregates import SequenceSum
from policygrad.core.checks import check, check_rewards
from policygrad.core.critic import Critic
from policygrad.core.gates import OnPolicy
from policygrad.core.metrics import Metric, Metrics, merge
from policygrad.core.objective import Coefficients
from policygrad.core.reference import Reference
from policygrad.core.steps import FirstOrder, Step
from policygrad.core.types import Advantage, Aggregation, Batch, BatchTransform, Correction, Gate, Ratio, Term
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class Algorithm:
    """A policy-gradient method as a composition of parts; `dataclasses.replace` makes the next one.

    Raises:
        ConfigError: parts that contradict each other, with the reason and the way out.
    """

    name: str = "custom"
    """What it is called in logs."""
    psi: tuple[Advantage, ...] = ()
    """Lever 1: the chain from the reward to Ψ; empty = the reward itself."""
    ratio: Ratio | None = None
    """Lever 2: the importance ratio; None = on-policy, r = 1."""
    gate: Gate = OnPolicy()
    """Lever 2: what the ratio lets through."""
    aggregate: Aggregation = SequenceSum()
    """How tokens are averaged over the optimiser step."""
    terms: tuple[Term, ...] = ()
    """Additive score and loss terms: KL, entropy."""
    shaping: tuple[BatchTransform, ...] = ()
    """From the task's score to the reward: KL in the reward, overlong penalty."""
    filters: tuple[BatchTransform, ...] = ()
    """Which completions take part: dynamic sampling, overlong mask."""
    corrections: tuple[Correction, ...] = ()
    """Factors on w for a sampler that is not π_old."""
    step: Step = field(default_factory=FirstOrder)
    """How the parameters move."""
    critic: Critic | None = None
    """V, for the advantages that need values."""
    reference: Reference | None = field(default_factory=Reference)
    """π_ref, for the parts that need it."""
    samples_per_prompt: int = 8
    """G, the default group size."""

    def __post_init__(self) -> None:
        check(self)

    def parts(self) -> Iterator[tuple[str, Any]]:
        """(field, part) for every part, in the order of the data's way."""
        for name in (
            "filters",
            "shaping",
            "psi",
            "ratio",
            "gate",
            "corrections",
            "aggregate",
            "terms",
            "step",
            "critic",
            "reference",
        ):
            value = getattr(self, name)
            for part in value if isinstance(value, tuple) else (value,):
                if part is not None:
                    yield name, part

    @property
    def declared(self) -> frozenset[str]:
        """The Batch fields that the parts say they read."""
        return frozenset[str]().union(*(getattr(part, "needs", frozenset()) for _, part in self.parts()))

    @property
    def needs(self) -> frozenset[str]:
        """The Batch fields a learner must fill: what the parts declare, and logp_old when a rollout feeds several steps."""
        return self.declared | ({"logp_old"} if self.step.updates > 1 else frozenset())

    @property
    def forward_needs(self) -> frozenset[str]:
        """The Forward fields beyond logp that loss terms read: entropy, kl_old."""
        return frozenset[str]().union(*(getattr(term, "forward_needs", frozenset()) for term in self.terms))

    def check_sampling(self, samples_per_prompt: int, temperature: float) -> None:
        """Refuses group statistics without a group.

        Raises:
            ConfigError: one sample per prompt, or temperature 0 (equal samples), where a part compares a prompt's samples.
        """
        for _, part in self.parts():
            if getattr(part, "group_statistic", False):
                if samples_per_prompt < 2:
                    raise ConfigError(
                        f"{type(part).__name__} compares the samples of one prompt, and there is one per prompt: set "
                        "samples_per_prompt to 2 or more, or use RunningMean() (algorithm reinforce)"
                    )
                if temperature == 0:
                    raise ConfigError(
                        f"{type(part).__name__} compares the samples of one prompt, and at temperature 0 they are all equal: "
                        "set sampling.temperature above 0"
                    )

    def filtered(self, batch: Batch) -> Batch:
        """The batch after the filters, which look at the task's score."""
        for transform in self.filters:
            batch = transform(batch)
        return batch

    def shaped(self, batch: Batch) -> Batch:
        """The batch after reward shaping."""
        for transform in self.shaping:
            batch = transform(batch)
        return batch

    def advantages(self, batch: Batch) -> Tensor:
        """Ψ [B, T]: reward shaping and the chain of lever 1; 0 off the mask. Computed once per rollout, before splitting.

        Raises:
            ConfigError: a reward that is NaN or infinite, of a completion that counts: it would be its whole group's.
        """
        check_rewards(batch)
        batch = self.shaped(batch)
        psi = reward_to_go(batch)
        for link in self.psi:
            psi = link(psi, batch)
        return ragged.masked(psi, batch.mask)

    def with_targets(self, batch: Batch) -> Batch:
        """The batch with the critic's targets, from the rewards after shaping; computed once per rollout, like Ψ."""
        return batch if self.critic is None else replace(batch, returns=self.critic.targets(self.shaped(batch)))

    def corrected(self, weight: Tensor, batch: Batch) -> Tensor:
        """w times the corrections for μ ≠ π_old [B, T]."""
        for correction in self.corrections:
            weight = weight * correction(batch)
        return weight

    def coefficients(self, batch: Batch) -> Tensor:
        """c [B, T] of the policy term over one whole optimiser step, `batch.weight` included; 0 off the mask."""
        return self._coefficients(batch, self.aggregate)

    def all_coefficients(self, batch: Batch) -> Coefficients:
        """(c, c^1, c^2, …): the policy's coefficients and those of each term."""
        policy = self.coefficients(batch)
        return (
            policy,
            *(self._term_coefficients(batch, t, policy) for t in self.terms),
        )

    def _term_coefficients(self, batch: Batch, term: Term, policy: Tensor) -> Tensor:
        where = getattr(term, "where", None)
        if where is None and term.aggregate is None:
            return policy
        mask = batch.mask if where is None else batch.mask & where(batch)
        return self._coefficients(batch, term.aggregate or self.aggregate, mask)

    @staticmethod
    def _coefficients(batch: Batch, aggregate: Aggregation, mask: Tensor | None = None) -> Tensor:
        c = aggregate(batch.mask if mask is None else mask, batch.group).to(batch.reward.dtype)
        return c if batch.weight is None else c * ragged.masked(batch.weight, batch.mask)

    def observe(self, batch: Batch, metrics: Mapping[str, Metric] | None = None) -> Algorithm:
        """The algorithm for the next step: parts with state (a running mean, an adaptive β) have seen this batch and what
        its updates measured. Data in, data out."""
        shaped, seen = self.shaped(batch), metrics or {}
        return self._map(lambda part: part.observe(shaped, seen) if hasattr(part, "observe") else part)

    def report(self, batch: Batch) -> Metrics:
        """What the parts have to say about a rollout (the range of a λ that follows the lengths)."""
        return merge(*(part.report(batch) for _, part in self.parts() if hasattr(part, "report")))

    def with_budget(self, max_tokens: int) -> Algorithm:
        """The same with every open `length` set to the generation budget (fixed length, soft overlong penalty)."""

        def fill(part: Any) -> Any:
            if getattr(part, "aggregate", None) is not None:
                part = replace(part, aggregate=fill(part.aggregate))
            return part if getattr(part, "length", max_tokens) is not None else replace(part, length=max_tokens)

        return self._map(fill)

    def _map(self, change: Any) -> Algorithm:
        changed: dict[str, Any] = {}
        for name, _ in self.parts():
            value = getattr(self, name)
            changed[name] = tuple(map(change, value)) if isinstance(value, tuple) else change(value)
        return replace(self, **changed)

    def equation(self) -> Mapping[str, str]:
        """The equation's symbols with what this algorithm puts in: for `show` and `--dry-run`."""
        chain = "R"
        for link in self.psi:
            formula = _formula(link)
            chain = f"({chain}){formula}" if formula.startswith("/") else chain * formula.startswith(";") + formula
        lines = {"Ψ": chain, "w": _formula(self.gate), "c": _formula(self.aggregate)}
        if self.ratio is not None:
            lines["r"] = _formula(self.ratio)
        if self.critic is not None:
            lines["V"] = _formula(self.critic)
        for name, label in (("corrections", "ρ"), ("terms", "k"), ("shaping", "reward"), ("filters", "filter")):
            for part in getattr(self, name):
                lines[label] = f"{lines[label]};  {_formula(part)}" if label in lines else _formula(part)
        lines["step"] = _formula(self.step)
        return lines


def _formula(part: Any) -> str:
    return str(getattr(part, "formula", type(part).__name__))
