"""TRPO's vine: several next tokens are tried in one state and compared by their outcomes; the surrogate needs no baseline.

A group is a state, and its tokens are the actions tried there; r, Ψ and ŵ below refer to them. The surrogate of a state is a
quotient, so all its tokens must be in one micro-batch (`Gate.requires_full_groups`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.advantages import reward_to_go
from policygrad.core.aggregation import SequenceMean
from policygrad.core.base import Advantage, Gate, Term
from policygrad.core.batch import Batch, Forward
from policygrad.core.chains import Stage
from policygrad.core.masked import Groups
from policygrad.core.ratios import bounded_exp
from policygrad.core.settings import setting
from policygrad.core.terms import log_ratio

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm

# Batch fields of full completions, which a vine's rows are not.
_COMPLETION_LEVEL = frozenset(
    [
        "values",
        "bootstrap",
        "baseline",
        "step_end",
        "token_reward",
        "implicit_reward",
        "turn_state",
        "rewards",
        "demonstration",
        "observation",
    ]
)


@dataclass(frozen=True)
class Vine(Advantage):
    """Ψ_k = Q̂(s, a_k) − Σ_j ŵ_j Q̂(s, a_j) over the tokens tried in one state.

    A rollout chooses `states` prefixes among all sampled tokens of a prompt's completions (the rollout set) and tries up to
    `actions` tokens a_k in each. A row of the batch is then one such token, a group is one state, and the row's reward is Q̂: the
    mean reward of `samples` completions of prefix and token. All tokens of a state are completed with the same random numbers.

    distinct: K different tokens, the first that the policy samples, with ŵ_k ∝ π_old(a_k), so that L_n = Σ_k π_θ(a_k)Q̂_k /
    Σ_k π_θ(a_k): the self-normalised surrogate with q uniform over them (eq. 66), or Σ_a π_θ(a)Q̂(s, a) itself (eq. 15) if they are
    all tokens. Otherwise K independent samples, with ŵ_k by the count of a_k (eq. 16, q = π_old).

    Source: Schulman et al. 2015 (TRPO), sec. 5.2 and app. H and I.
    """

    states: int = setting(4, "at least 1", "per prompt")
    actions: int = setting(4, "at least 2", "per state, to be compared")
    samples: int = setting(1, "at least 1", "completion per action")
    distinct: bool = True
    starts_chain: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "centred"
    replaces_rows: ClassVar[bool] = True
    providers: ClassVar[tuple[str, ...]] = ("policygrad.rollout.vine:VineRows",)

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        for field in ("filters", "shaping"):
            for part in getattr(algorithm, field):
                yield f"Vine trains on single tokens, and {type(part).__name__} reads full completions: set {field}=()"
        for field in sorted(algorithm.all_needs & _COMPLETION_LEVEL):
            yield f"a part reads Batch.{field} of full completions, and Vine trains on single tokens within completions: remove it"
        for name, empty in (("templates", "()"), ("tokenizer", "None")):
            if getattr(algorithm.reference, name, None):
                yield f"Vine trains on single tokens, and Reference.{name} is for full completions: set {name}={empty}"

    def find_sampling_conflicts(self, samples_per_prompt: int, temperature: float) -> Iterator[str]:
        if temperature == 0:
            yield (
                "Vine compares several tokens of one state, and at temperature 0 only one is ever sampled: set "
                "sampling.temperature above 0"
            )

    @property
    def formula(self) -> str:
        which = "distinct tokens" if self.distinct else "samples"
        return (
            f"Q̂(s, a_k) − Σ_j ŵ_j Q̂(s, a_j),  {self.actions} {which} in each of {self.states} states per prompt, "
            f"Q̂ from {self.samples} completion{'s' * (self.samples > 1)}"
        )

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        q = masked.apply_mask(reward_to_go(batch), batch.mask)
        state = _StateGroups.of(batch, q.dtype)
        return masked.apply_mask(q - state.mean(q), batch.mask & ~state.equal(q))


@dataclass(frozen=True)
class SelfNormalised(Gate):
    """w = r/m, m = Σ_j ŵ_j r_j over the group's tokens: the surrogate of a state is Σ_k ŵ_k r_k Ψ_k / Σ_k ŵ_k r_k.

    ŵ is `Batch.weight`, normalised over the group. Use it with `SelfNormalisation`, the derivative of the normaliser m. Adding a
    constant to Ψ does not change the gradient. Source: Schulman et al. 2015 (TRPO), eq. 16 and 66.
    """

    requires_token_ratio: ClassVar[bool] = True
    requires_full_groups: ClassVar[bool] = True

    formula = "r/m,  m = Σ_j ŵ_j r_j over the group's tokens"

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if not any(isinstance(term, SelfNormalisation) for term in algorithm.terms):
            yield "SelfNormalised divides by a sum over the group, and no term has its derivative: set terms=(SelfNormalisation(),)"
        if algorithm.corrections:
            yield (
                f"{type(algorithm.corrections[0]).__name__} would weight the tokens of a group only in SelfNormalised's numerator: "
                "set corrections=(); old_policy='sampler' accounts for the sampler, also with stale weights"
            )
        if isinstance(algorithm.aggregation, SequenceMean):
            yield "SelfNormalised weights a group's tokens itself, and SequenceMean by length: set aggregation=GroupTokenMean()"

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return _StateGroups.of(batch, ratio.dtype).normalised(ratio)

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return self.weight(ratio, psi, batch) * psi


@dataclass(frozen=True)
class SelfNormalisation(Term):
    """k = −(r/m)·L, L = Σ_j ŵ_j (r_j/m) Ψ_j over the group's tokens: the derivative of `SelfNormalised`'s normaliser m.

    With it, c·(wΨ + k) is the derivative of Σ ŵrΨ/Σ ŵr, also off-policy. At π_θ = π_old, L is Σ ŵΨ, which is 0 for `Vine`. Its
    share of the objective's value is 0. Source: Schulman et al. 2015 (TRPO), eq. 65.
    """

    formula = "−(r/m)·L,  L = Σ_j ŵ_j (r_j/m) Ψ_j over the group's tokens"

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if not isinstance(algorithm.gate, SelfNormalised):
            yield "SelfNormalisation is the derivative of SelfNormalised's normaliser, which is missing: set gate=SelfNormalised()"

    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        state = _StateGroups.of(batch, psi.dtype)
        share = state.normalised(bounded_exp(log_ratio(out.logp, batch.logp_old, batch.mask)))
        return -share * state.mean(share * masked.apply_mask(psi, batch.mask))

    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        return torch.zeros_like(psi)


@dataclass(frozen=True, eq=False)
class _StateGroups:
    """Means over a group's tokens with normalised weights ŵ; a group without weight has mean 0."""

    groups: Groups
    mask: Tensor
    weight: Tensor  # ŵ [B, T]; sums to 1 over the group's tokens

    @classmethod
    def of(cls, batch: Batch, dtype: torch.dtype) -> _StateGroups:
        mask, groups = batch.mask, Groups(batch.group, batch.mask.any(1))
        weight = mask.to(dtype) if batch.weight is None else masked.apply_mask(batch.weight.to(dtype), mask)
        total = groups.sum(weight.sum(1))[:, None]
        return cls(groups, mask, torch.where(total > 0, weight / total, 0))

    def mean(self, x: Tensor) -> Tensor:
        """Compute Σ ŵx over the group, [B, 1]."""
        return self.groups.sum((self.weight * x).sum(1))[:, None]

    def normalised(self, ratio: Tensor) -> Tensor:
        """Compute r/m [B, T], after dividing both by the group's largest r, so that neither overflows nor vanishes."""
        r = masked.apply_mask(ratio, self.mask)
        largest = self._largest(r)
        r = torch.where(largest > 0, r / largest, 0)
        m = self.mean(r)
        return torch.where(m > 0, r / m, 0)

    def equal(self, x: Tensor) -> Tensor:
        """Check that x is constant over the group's tokens, [B, 1] bool."""
        return self._largest(x) <= -self._largest(-x)

    def _largest(self, x: Tensor) -> Tensor:
        if not x.shape[1]:
            return x.new_zeros(len(x), 1)
        return self.groups.max(torch.where(self.mask, x, -torch.inf).amax(1))[:, None]
