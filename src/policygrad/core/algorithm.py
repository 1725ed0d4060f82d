"""What an algorithm is: data. One value per part of the equation, checked when it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
from policygrad.core.batch import Batch, Coefficients
from policygrad.core.filters import apply_filter, reweight_kept
from policygrad.core.gates import OnPolicy
from policygrad.core.metrics import Metric, Metrics, merge
from policygrad.core.outputs import check_per_token, check_same_batch, explain_nonfinite, is_finite
from policygrad.core.terms import describe_policy_share, scale_by_policy_share
from policygrad.core.updates import GradientSteps
from policygrad.core.validation import ROLES, check_demonstrations, check_rewards, validate_algorithm
from policygrad.errors import ConfigError, NumericsError

# c: what each token weighs, over one whole update: an aggregation of the tokens that count, times `Batch.weight`.


def token_coefficients(batch: Batch, aggregate: Aggregation, mask: Tensor) -> Tensor:
    """c [B, T] of the tokens that `mask` [B, T] counts, in it and in its denominators."""
    c = check_per_token(aggregate(mask, batch.group), aggregate, mask).to(batch.reward.dtype)
    return c if batch.weight is None else c * masked.apply_mask(batch.weight, batch.mask)


def term_coefficients(
    batch: Batch, term: Term | LossTerm, aggregate: Aggregation, gate: Gate, policy: Tensor
) -> Tensor:
    """c^m [B, T] of a term: the policy's, unless it has an aggregation or tokens of its own."""
    where, mask = term.token_mask(batch), averaged_tokens(batch, term)
    same_tokens = batch.demonstration is None or ("demonstration" in term.needs) is ("demonstration" in gate.needs)
    if where is None and term.aggregation is None and same_tokens:
        return policy
    return token_coefficients(batch, term.aggregation or aggregate, mask if where is None else mask & where)


def averaged_tokens(batch: Batch, part: Part) -> Tensor:
    """[B, T] bool; the tokens that a gate or a term averages over: demonstrations only where it says that it takes them."""
    return batch.mask if "demonstration" in part.needs else batch.policy_tokens


# The equation of an algorithm in words: each symbol with what is put in.


def describe_equation(a: Algorithm) -> dict[str, str]:
    """Symbol -> formula."""
    chain = "R"
    for link in a.advantage:
        chain = append_link(chain, link)
    lines = {"Ψ": chain + describe_policy_share(a.terms), "w": a.gate.formula, "c": a.aggregation.formula}
    if a.ratio is not None:
        lines["r"] = a.ratio.formula
    if a.old_policy == "sampler":
        lines["π_old"] = "μ, as the sampler says"
    if a.critic is not None:
        lines["V"] = a.critic.formula
    if a.reward_model is not None:
        lines["r_φ"] = a.reward_model.formula
    for name, label in (("corrections", "ρ"), ("terms", "k"), ("shaping", "reward"), ("filters", "filter")):
        for part in getattr(a, name):
            key = "mask" if name == "corrections" and not part.corrects_sampler else label
            lines[key] = f"{lines[key]};  {part.formula}" if key in lines else part.formula
    lines["step"] = a.update_rule.formula
    return lines


def append_link(chain: str, link: Advantage) -> str:
    """The chain so far with one link more."""
    formula = link.formula
    if formula == type(link).__name__ and not link.starts_chain:  # a part of one's own that does not say
        return f"{formula}({chain})"
    if formula.startswith("/"):
        return f"({chain}){formula}"
    if formula.startswith(("− ", "+ ")):
        return f"{chain} {formula}"
    return chain * formula.startswith(";") + formula


@dataclass(frozen=True)
class Algorithm:
    """A policy-gradient method as a composition of parts; `dataclasses.replace` makes the next one.

    Raises:
        ConfigError: parts that contradict each other, with the reason and the way out.
    """

    name: str = "custom"
    """What it is called in logs."""
    advantage: tuple[Advantage, ...] = ()
    """Lever 1: the chain from the reward to Ψ; empty = the reward itself."""
    ratio: Ratio | None = None
    """Lever 2: the importance ratio; None = on-policy, r = 1."""
    gate: Gate = OnPolicy()
    """Lever 2: what the ratio lets through."""
    aggregation: Aggregation = SequenceSum()
    """How tokens are averaged over the update."""
    terms: tuple[Term | LossTerm, ...] = ()
    """Additive score and loss terms: KL, entropy."""
    shaping: tuple[Shaping, ...] = ()
    """From the task's score to the reward: KL in the reward, overlong penalty."""
    filters: tuple[Filter, ...] = ()
    """Which completions take part: dynamic sampling, overlong mask."""
    corrections: tuple[Correction, ...] = ()
    """Factors on w for a sampler that is not π_old."""
    update_rule: UpdateRule = field(default_factory=GradientSteps)
    """How the parameters move."""
    critic: Critic | None = None
    """V, for the advantages that need values."""
    reward_model: ImplicitReward | None = None
    """r_φ, a second trained model, for the advantages that need process rewards learned from outcomes."""
    reference: Reference | None = field(default_factory=Reference)
    """π_ref, for the parts that need it."""
    samples_per_prompt: int = 8
    """G, the default group size."""
    old_policy: Literal["learner", "sampler"] = "learner"
    """π_old: recomputed = by the learner, with a correction for π_old/μ where the samples are older than the weights; sampler =
    μ, what the engine says, so that the ratio itself weighs old samples."""

    def __post_init__(self) -> None:
        validate_algorithm(self)

    def parts(self) -> Iterator[tuple[str, Part]]:
        """(field, part), in the order of the data's way."""
        return ((name, part) for name, _, part in self._keyed())

    def named_parts(self) -> Iterator[tuple[str, Part]]:
        """(field and position as in `advantage.0`, part), in the same order."""
        return ((key, part) for _, key, part in self._keyed())

    def _keyed(self) -> Iterator[tuple[str, str, Any]]:
        """(field, field and position as in `advantage.0`, part)."""
        for name in ROLES:
            value = getattr(self, name)
            if isinstance(value, tuple):
                yield from ((name, f"{name}.{i}", part) for i, part in enumerate(value))
            elif value is not None:
                yield name, name, value

    @property
    def all_needs(self) -> frozenset[str]:
        """The Batch fields that the parts say they read."""
        return frozenset[str]().union(*(part.needs for _, part in self.parts()))

    @property
    def needs(self) -> frozenset[str]:
        """The Batch fields a learner must fill: what the parts declare, and logp_old when a rollout feeds several updates;
        not where π_old is the sampler, which has said it."""
        filled = self.all_needs - {"selected"}
        if self.old_policy == "sampler":
            return filled - {"logp_old"}
        return filled | ({"logp_old"} if self.update_rule.updates > 1 else frozenset())

    @property
    def token_selector(self) -> Part | None:
        """The part that chooses among all tokens of an update (`Part.select_tokens`), if there is one."""
        return next((part for _, part in self.parts() if "selected" in part.needs), None)

    @property
    def reads_reward(self) -> bool:
        """Whether a part learns from rewards, so that a run needs some; a distillation does not."""
        learned = bool(self.filters or self.critic or self.reward_model) or not self.advantage
        return learned or any(link.reads_reward for link in self.advantage)

    @property
    def filter_needs(self) -> frozenset[str]:
        """The Batch fields that filters read, which are to be filled before `filtered`."""
        return frozenset[str]().union(*(part.needs for part in self.filters))

    @property
    def forward_needs(self) -> frozenset[str]:
        """The Forward fields beyond logp that terms read: entropy, kl_old."""
        return frozenset[str]().union(*(term.forward_needs for term in self.terms))

    @property
    def selection_needs(self) -> frozenset[str]:
        """The Forward fields beyond logp that the choice among an update's tokens reads, without graph."""
        return frozenset() if self.token_selector is None else self.token_selector.forward_needs - {"logp"}

    def apply_filters(self, batch: Batch, *, refilled: bool = False) -> Batch:
        """The batch after the filters, which look at the task's score. Raises ConfigError for a field that one needs and lacks.

        refilled: a rollout has sampled others in the place of what a refilling filter drops; what it still drops could not be
        refilled, so it gets weight 0 and the rest more.
        """
        for part in self.filters:
            if refilled and part.refills:
                dropped = part.find_dropped(batch)
                batch = reweight_kept(batch, dropped) if bool(dropped.any()) else batch
            else:
                batch = apply_filter(part, batch)
        return batch

    def shape_rewards(self, batch: Batch) -> Batch:
        """The batch after reward shaping."""
        for part in self.shaping:
            batch = check_same_batch(part(batch), part, batch)
        return batch

    def compute_advantages(self, batch: Batch, shaped: Batch | None = None) -> Tensor:
        """Ψ [B, T]: reward shaping and the chain of lever 1; 0 off the mask. Computed once per rollout, before splitting.

        shaped: the batch after `shaped`, here and below, where a caller has it already.

        Raises:
            ConfigError: a reward that is NaN or infinite, of a completion that counts: it would be its whole group's; a part
                that returns another shape than [B, T].
            NumericsError: a Ψ that is NaN or infinite, with the part that made it.
        """
        check_rewards(batch)
        check_demonstrations(self, batch)
        psi = reward_to_go(shaped := shaped or self.shape_rewards(batch))
        for link in self.advantage:
            psi = check_per_token(link(psi, shaped), link, shaped.mask)
        psi = masked.apply_mask(scale_by_policy_share(psi, self.terms), batch.mask)
        if not is_finite(psi, batch.mask):
            raise self._not_finite(batch, shaped)
        return psi

    def _not_finite(self, batch: Batch, shaped: Batch) -> NumericsError:
        """Name the part that makes Ψ not finite: the parts are called once more, one after the other."""
        before = batch
        for i, part in enumerate(self.shaping):
            after = part(before)
            if not is_finite(reward_to_go(after), batch.mask):
                return NumericsError(
                    explain_nonfinite(part, f"shaping.{i}", before, part.needs), part=type(part).__name__
                )
            before = after
        psi = reward_to_go(shaped)
        for i, link in enumerate(self.advantage):
            psi = link(psi, shaped)
            if not is_finite(psi, batch.mask):
                return NumericsError(explain_nonfinite(link, f"psi.{i}", shaped, link.needs), part=type(link).__name__)
        return NumericsError(
            f"the advantages of {self.name} are NaN or infinite, though no part makes them so when called again"
        )

    def add_critic_targets(self, batch: Batch, shaped: Batch | None = None) -> Batch:
        """The batch with the critic's targets, from the rewards after shaping; computed once per rollout, like Ψ."""
        if self.critic is None:
            return batch
        return replace(batch, returns=self.critic.targets(shaped or self.shape_rewards(batch)))

    def apply_corrections(self, weight: Tensor, batch: Batch, psi: Tensor) -> Tensor:
        """w times the corrections [B, T]."""
        for correction in self.corrections:
            weight = weight * check_per_token(correction(batch, psi), correction, batch.mask)
        return weight

    def coefficients(self, batch: Batch) -> Tensor:
        """c [B, T] of the policy term over one whole update, `batch.weight` included; 0 off the mask."""
        return token_coefficients(batch, self.aggregation, averaged_tokens(batch, self.gate))

    def all_coefficients(self, batch: Batch) -> Coefficients:
        """(c, c^1, c^2, …): the policy's coefficients and those of each term."""
        policy = self.coefficients(batch)
        return (policy, *(term_coefficients(batch, term, self.aggregation, self.gate, policy) for term in self.terms))

    def init_state(self) -> State:
        """What the parts remember before the first rollout, by field and position; JSON can hold it, and a checkpoint does."""
        made = {key: part.init_state() for _, key, part in self._keyed()}
        return {key: state for key, state in made.items() if state is not None}

    def update_state(
        self,
        state: State,
        batch: Batch,
        metrics: Mapping[str, Metric] | None = None,
        shaped: Batch | None = None,
    ) -> State:
        """The memory after a rollout: `batch` as its updates saw it, and what they measured. Data in, data out."""
        seen, parts = (
            shaped or self.with_state(state).shape_rewards(batch),
            {key: part for _, key, part in self._keyed()},
        )
        return {key: parts[key].update_state(memory, seen, metrics or {}) for key, memory in state.items()}

    def with_state(self, state: State) -> Algorithm:
        """The algorithm for one rollout: each part as it is with its memory (a running mean, an adaptive β).

        Raises:
            ConfigError: the memory of other parts.
        """
        if state.keys() != (expected := self.init_state().keys()):
            raise ConfigError(
                f"this state holds the memory of {', '.join(state) or 'no part'}, and in {self.name} "
                f"{', '.join(expected) or 'no part'} has one: begin anew with algorithm.init_state()"
            )
        return self._map_parts(lambda key, part: part.with_state(state[key]) if key in state else part)

    def report(self, batch: Batch) -> Metrics:
        """What the parts have to say about a rollout (the range of a λ that follows the lengths)."""
        return merge(*(part.report(batch) for _, part in self.parts()))

    def with_max_tokens(self, max_tokens: int) -> Algorithm:
        """The same with every open `length` set to the generation budget (fixed length, soft overlong penalty)."""

        def fill(key: str, part: Any) -> Any:
            if key.startswith("terms.") and part.aggregation is not None:
                part = replace(part, aggregation=fill("aggregation", part.aggregation))
            return replace(part, length=max_tokens) if part.length is None else part

        return self._map_parts(fill)

    def _map_parts(self, change: Callable[[str, Any], Any]) -> Algorithm:
        changed: dict[str, Any] = {}
        for name, key, part in self._keyed():
            new = change(key, part)
            changed[name] = (*changed.get(name, ()), new) if key != name else new
        return replace(self, **changed)

    def equation(self) -> Mapping[str, str]:
        """The equation's symbols with what this algorithm puts in: for `show` and `--dry-run`."""
        return describe_equation(self)
