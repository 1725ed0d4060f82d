"""The `Algorithm`: a policy-gradient method as data, one value per part of the equation, validated when it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.advantages import reward_to_go
from policygrad.core.aggregation import SequenceSum
from policygrad.core.auxiliary import Critic, ImplicitReward, Reference
from policygrad.core.base import (
    Advantage,
    Aggregation,
    Correction,
    Filter,
    Gate,
    LossTerm,
    Part,
    Ratio,
    Shaping,
    State,
    Term,
    UpdateRule,
)
from policygrad.core.batch import Batch, Coefficients, Forward
from policygrad.core.batch_checks import check_rewards, reject_mixed_roles, reject_unread_demonstrations
from policygrad.core.filters import apply_filter, reweight_kept
from policygrad.core.gates import OnPolicy
from policygrad.core.metrics import Metric, Metrics, merge
from policygrad.core.outputs import check_per_token, check_same_batch, explain_nonfinite, is_finite
from policygrad.core.terms import describe_policy_share, policy_share
from policygrad.core.updates import GradientSteps
from policygrad.core.validation import ROLES, validate_algorithm
from policygrad.errors import ConfigError, NumericsError


@dataclass(frozen=True)
class Algorithm:
    """A policy-gradient method as a composition of parts. Derive variants with `dataclasses.replace`.

    Raises:
        ConfigError: parts that contradict each other; the message gives the reason and a remedy.
    """

    name: str = "custom"
    """Name in logs."""
    advantage: tuple[Advantage, ...] = ()
    """Lever 1: the chain of links from the reward to Ψ; empty: Ψ is the reward itself."""
    ratio: Ratio | None = None
    """Lever 2: the importance ratio; None: on-policy, r = 1."""
    gate: Gate = OnPolicy()
    """Lever 2: the weight of a token as a function of its ratio."""
    aggregation: Aggregation = SequenceSum()
    """The averaging of tokens over the update."""
    terms: tuple[Term | LossTerm, ...] = ()
    """Additive score and loss terms: KL, entropy."""
    shaping: tuple[Shaping, ...] = ()
    """From the task's score to the reward: KL in the reward, overlong penalty."""
    filters: tuple[Filter, ...] = ()
    """Which completions take part: dynamic sampling, overlong mask."""
    corrections: tuple[Correction, ...] = ()
    """Factors on w, such as importance weights for a sampler that is not π_old."""
    update_rule: UpdateRule = field(default_factory=GradientSteps)
    """The way the parameters move."""
    critic: Critic | None = None
    """V, for advantages that need values."""
    reward_model: ImplicitReward | None = None
    """r_φ, a second trained model, for advantages from process rewards learned from outcomes."""
    reference: Reference | None = field(default_factory=Reference)
    """π_ref, for parts that need it."""
    samples_per_prompt: int = 8
    """G, the default group size."""
    old_policy: Literal["learner", "sampler"] = "learner"
    """π_old. learner: recomputed by the learner, with a correction by π_old/μ where samples are older than the weights. sampler: μ,
    as reported by the engine, so that the ratio itself accounts for stale samples."""
    head: Literal["model", "fp32"] = "model"
    """Precision of the output head's product in learner and sampler: the model's, or float32."""

    def __post_init__(self) -> None:
        validate_algorithm(self)

    def parts(self) -> Iterator[Part]:
        """Iterate over the parts in the order in which data passes through them."""
        return (part for _, part in self.named_parts())

    def named_parts(self) -> Iterator[tuple[str, Part]]:
        """Iterate over (key, part), in the same order; the key is the field, with an index for tuples (`advantage.0`)."""
        for name in ROLES:
            value = getattr(self, name)
            if isinstance(value, tuple):
                yield from ((f"{name}.{i}", part) for i, part in enumerate(value))
            elif value is not None:
                yield name, value

    @property
    def all_needs(self) -> frozenset[str]:
        """All `Batch` fields that the parts read."""
        return frozenset[str]().union(*(part.needs for part in self.parts()))

    @property
    def needs(self) -> frozenset[str]:
        """The `Batch` fields that a learner fills: logp_old too for several updates per rollout, unless the sampler reports it."""
        filled = self.all_needs - {"selected"}
        if self.old_policy == "sampler":  # one distribution for π(o) and Σ π²
            own = {"logp_learner"} if "sum_pi_squared" in filled else frozenset[str]()
            return filled - {"logp_old"} | own
        return filled | ({"logp_old"} if self.update_rule.updates > 1 else frozenset())

    @property
    def has_unit_ratios(self) -> bool:
        """True if every ratio π_θ/π_old of a run is 1: its rollouts have one gradient step, and π_old is the learner's policy."""
        return self.update_rule.has_unit_ratios and self.old_policy == "learner"

    @property
    def replaces_rows(self) -> bool:
        """True if the rows of a batch are no completions but what a provider puts in their place."""
        return any(link.replaces_rows for link in self.advantage)

    @property
    def filter_needs(self) -> frozenset[str]:
        """The `Batch` fields that must be filled before `apply_filters`."""
        return frozenset[str]().union(*(part.needs for part in self.filters))

    @property
    def forward_needs(self) -> frozenset[str]:
        """The `Forward` fields beyond logp that terms read."""
        return frozenset[str]().union(*(term.forward_needs for term in self.terms)) - {"logp"}

    @property
    def token_selector(self) -> Part | None:
        """The part that chooses among all tokens of an update (`Part.select_tokens`), if any."""
        return next((part for part in self.parts() if "selected" in part.needs), None)

    @property
    def selection_needs(self) -> frozenset[str]:
        """The `Forward` fields beyond logp that the token selection reads, without graph."""
        return frozenset() if self.token_selector is None else self.token_selector.forward_needs - {"logp"}

    @property
    def reads_reward(self) -> bool:
        """True if a part learns from rewards, so that a run needs a reward; False for a distillation."""
        if self.filters or self.critic or self.reward_model or not self.advantage:
            return True
        if self.reference is not None and self.reference.reads_reward:
            return True
        return any(link.reads_reward for link in self.advantage)

    def apply_filters(self, batch: Batch, *, refilled: bool = False) -> Batch:
        """Apply the filters, which read the task's score.

        Args:
            refilled: the rollout already replaced dropped groups. Those still dropped could not be replaced: they get weight 0, and
                the others more.

        Raises:
            ConfigError: the batch lacks a field that a filter needs.
        """
        for part in self.filters:
            if refilled and part.refills:
                dropped = part.find_dropped(batch)
                batch = reweight_kept(batch, dropped) if bool(dropped.any()) else batch
            else:
                batch = apply_filter(part, batch)
        return batch

    def shape_rewards(self, batch: Batch) -> Batch:
        """Apply reward shaping; `Batch.outcome` keeps the task's reward, which thresholds read."""
        if self.shaping and batch.outcome is None:
            batch = replace(batch, outcome=batch.outcomes)
        for part in self.shaping:
            batch = check_same_batch(part(batch), part, batch)
        return batch

    def compute_advantages(self, batch: Batch, shaped: Batch | None = None) -> Tensor:
        """Compute Ψ [B, T] by reward shaping and the chain of links; 0 off the mask. Once per rollout, before it is split.

        Args:
            shaped: the result of `shape_rewards`, here and below, if the caller has it.

        Raises:
            ConfigError: a NaN or infinite reward of a completion that counts, which would affect its whole group; a part that
                returns another shape than [B, T].
            NumericsError: a NaN or infinite Ψ, with the part that caused it.
        """
        check_rewards(batch)
        if "logp_learner" in self.needs:
            batch.require("logp_learner", self)
        reject_unread_demonstrations(self, batch)
        reject_mixed_roles(self, batch)
        psi = reward_to_go(shaped := shaped or self.shape_rewards(batch))
        for link in self.advantage:
            psi = check_per_token(link(psi, shaped), link, shaped.mask)
        psi = masked.apply_mask(policy_share(self.terms) * psi, batch.mask)
        if not is_finite(psi, batch.mask):
            raise self._nonfinite_error(batch, shaped)
        return psi

    def _nonfinite_error(self, batch: Batch, shaped: Batch) -> NumericsError:
        """Call the parts again one by one, to name the one that makes Ψ not finite."""
        before = batch
        for i, part in enumerate(self.shaping):
            after = part(before)
            if not is_finite(reward_to_go(after), batch.mask):
                return NumericsError(explain_nonfinite(part, f"shaping.{i}", before), part=type(part).__name__)
            before = after
        psi = reward_to_go(shaped)
        for i, link in enumerate(self.advantage):
            psi = link(psi, shaped)
            if not is_finite(psi, batch.mask):
                return NumericsError(explain_nonfinite(link, f"advantage.{i}", shaped), part=type(link).__name__)
        return NumericsError(
            f"the advantages of {self.name} are NaN or infinite, but no part makes them so when called again"
        )

    def add_critic_targets(self, batch: Batch, shaped: Batch | None = None) -> Batch:
        """Add the critic's targets, computed from shaped rewards; once per rollout, like Ψ."""
        if self.critic is None:
            return batch
        return replace(batch, returns=self.critic.targets(shaped or self.shape_rewards(batch)))

    @property
    def has_zero_advantage(self) -> bool:
        """True if Ψ is 0 for every batch, so that the policy learns from terms alone."""
        return any(link.starts_chain for link in self.advantage) and all(link.is_zero for link in self.advantage)

    def corrects(self, term: Term | LossTerm) -> bool:
        """Return whether corrections multiply a term: one that the policy learns from, not a penalty.

        That is what a term says of itself, what compares the policy with a teacher (another model than the initial policy, or one
        that reads more), and every term where Ψ is always 0. The tokens of demonstrations and of the environment have no sampler.
        """
        if {"demonstration", "observation"} & term.needs:
            return False
        is_taught = self.reference is not None and self.reference.is_teacher and "logp_ref" in term.needs
        return term.learns_from_samples or is_taught or self.has_zero_advantage

    def apply_corrections(self, weight: Tensor, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        """Multiply w, or a term's score or value, [B, T] by the corrections."""
        for correction in self.corrections:
            weight = weight * check_per_token(correction(out, batch, psi), correction, batch.mask)
        return weight

    def coefficients(self, batch: Batch) -> Tensor:
        """Compute c [B, T] of the policy term over one full update, including `batch.weight`; 0 off the mask."""
        tokens = self._counted_tokens(batch, _averaged_tokens(batch, self.gate))
        return self._normalise(_coefficients(batch, self.aggregation, tokens), batch)

    def all_coefficients(self, batch: Batch) -> Coefficients:
        """Compute (c, c^1, c^2, …): the coefficients of the policy term and of each other term."""
        coefficients = [policy := self.coefficients(batch)]
        is_normalised = any(part.normaliser(batch) is not None for part in self.corrections)
        for term in self.terms:
            tokens, mask, is_corrected = term.token_mask(batch), _averaged_tokens(batch, term), self.corrects(term)
            same_reads = ("demonstration" in term.needs) is ("demonstration" in self.gate.needs)
            same_tokens = tokens is None and (batch.demonstration is None or same_reads) and not term.reads_observations
            if same_tokens and term.aggregation is None and (is_corrected or not is_normalised):
                coefficients.append(policy)
            else:
                mask = mask if tokens is None else mask & tokens
                if not {"demonstration", "observation"} & term.needs:
                    mask = self._counted_tokens(batch, mask)
                c = _coefficients(batch, term.aggregation or self.aggregation, mask)
                coefficients.append(self._normalise(c, batch) if is_corrected else c)
        return tuple(coefficients)

    def _counted_tokens(self, batch: Batch, mask: Tensor) -> Tensor:
        """Return the tokens of `mask` [B, T] that no correction leaves out of the averages."""
        for part in self.corrections:
            counted = part.counted_tokens(batch)
            mask = mask if counted is None else mask & check_per_token(counted, part, batch.mask, "counted_tokens")
        return mask

    def _normalise(self, c: Tensor, batch: Batch) -> Tensor:
        """Divide coefficients of what the corrections multiply by the corrections' normalisers."""
        for part in self.corrections:
            normaliser = part.normaliser(batch)
            c = c if normaliser is None else c / normaliser
        return c

    @property
    def reads_observations(self) -> bool:
        """True if a term learns to predict the environment's tokens, so that it needs log π_θ there."""
        return any(term.reads_observations for term in self.terms)

    def read_tokens(self, batch: Batch) -> Tensor:
        """Return the tokens whose log π_θ an update needs, [B, T] bool: sampled ones, and observed ones if a term reads them."""
        return batch.mask | batch.observed_tokens if self.reads_observations else batch.mask

    def init_state(self) -> State:
        """Return the parts' states before the first rollout, by key. JSON can hold them, and a checkpoint does."""
        states = {key: part.init_state() for key, part in self.named_parts()}
        return {key: state for key, state in states.items() if state is not None}

    def update_state(
        self, state: State, batch: Batch, metrics: Mapping[str, Metric] | None = None, shaped: Batch | None = None
    ) -> State:
        """Return the state after a rollout, given its batch and the metrics of its updates."""
        shaped, parts = shaped or self.with_state(state).shape_rewards(batch), dict(self.named_parts())
        return {key: parts[key].update_state(part_state, shaped, metrics or {}) for key, part_state in state.items()}

    def with_state(self, state: State) -> Algorithm:
        """Return the algorithm for one rollout, with each part under its state (a running mean, an adaptive β).

        Settings do not change, so the result is not validated again.

        Raises:
            ConfigError: a state of other parts.
        """
        if state.keys() != (expected := self.init_state().keys()):
            raise ConfigError(
                f"the state belongs to {', '.join(state) or 'no part'}, but the stateful parts of {self.name} are "
                f"{', '.join(expected) or 'none'}: start with algorithm.init_state()"
            )
        algorithm = copy(self)
        algorithm.__dict__.update(
            self._map_parts(lambda key, part: part.with_state(state[key]) if key in state else part)
        )
        return algorithm

    def with_max_tokens(self, max_tokens: int) -> Algorithm:
        """Set every part's `length` that is None to the generation budget (fixed length, overlong penalty)."""

        def fill(key: str, part: Any) -> Any:
            if key.startswith("terms.") and part.aggregation is not None:
                part = replace(part, aggregation=fill("aggregation", part.aggregation))
            return replace(part, length=max_tokens) if part.length is None else part

        return replace(self, **self._map_parts(fill))

    def _map_parts(self, change: Callable[[str, Part], Part]) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for key, part in self.named_parts():
            name, dot, _ = key.partition(".")
            changed[name] = (*changed.get(name, ()), change(key, part)) if dot else change(key, part)
        return changed

    def report(self, batch: Batch) -> Metrics:
        """Return the parts' additional metrics of a rollout."""
        return merge(*(part.report(batch) for part in self.parts()))

    def equation(self) -> Mapping[str, str]:
        """Describe the equation: each symbol with its formula in this algorithm."""
        chain = "R"
        for link in self.advantage:
            chain = append_link(chain, link)
        lines = {"Ψ": chain + describe_policy_share(self.terms), "w": self.gate.formula, "c": self.aggregation.formula}
        if self.ratio is not None:
            lines["r"] = self.ratio.formula
        if self.old_policy == "sampler":
            lines["π_old"] = "μ, as reported by the sampler"
        if self.critic is not None:
            lines["V"] = self.critic.formula
        reference = self.reference
        if reference is not None and (reference.templates or reference.ema) and "logp_ref" in self.all_needs:
            lines["π_ref"] = reference.formula
        if self.reward_model is not None:
            lines["r_φ"] = self.reward_model.formula
        labelled: list[tuple[str, Part]] = [
            ("ρ" if part.corrects_sampler else "mask", part) for part in self.corrections
        ]
        labelled += [("k", part) for part in self.terms] + [("reward", part) for part in self.shaping]
        for label, part in [*labelled, *(("filter", part) for part in self.filters)]:
            lines[label] = f"{lines[label]};  {part.formula}" if label in lines else part.formula
        lines["step"] = self.update_rule.formula
        return lines


def append_link(chain: str, link: Advantage) -> str:
    """Append a link's formula to the formula of the chain before it."""
    formula = link.formula
    if formula == type(link).__name__ and not link.starts_chain:  # a custom part without a formula
        return f"{formula}({chain})"
    if formula.startswith("/"):
        return f"({chain}){formula}"
    if formula.startswith(("− ", "+ ")):
        return f"{chain} {formula}"
    return chain * formula.startswith(";") + formula


def _coefficients(batch: Batch, aggregation: Aggregation, mask: Tensor) -> Tensor:
    """Compute c [B, T] over the tokens of `mask` [B, T], which also make the denominators."""
    c = check_per_token(aggregation(mask, batch.group), aggregation, mask).to(batch.reward.dtype)
    # a weight is one of sampled tokens
    return c if batch.weight is None else c * torch.where(batch.mask, batch.weight, 1)


def _averaged_tokens(batch: Batch, part: Part) -> Tensor:
    """Return the tokens [B, T] bool that a gate or term averages over: demonstrations and observations only if it needs them."""
    if "observation" in part.needs:
        return batch.observed_tokens
    return batch.mask if "demonstration" in part.needs else batch.policy_tokens
