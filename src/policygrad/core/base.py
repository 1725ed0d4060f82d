"""The roles of an algorithm's parts: what each is called with, and every attribute that one may declare, with its default.

A part of one's own inherits the base of its role (`class Tent(pg.Gate)`) and overrides what is different; one that does not
inherit declares all of it. Both are looked at when an `Algorithm` is built (`roles.py`), never found out later.

A part with a memory keeps it apart from its settings, as a plain dict that JSON can hold: `init` makes it, `update` moves it
after each rollout, and `with_state` gives the part as it is with that memory, for one rollout.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch import Tensor

from policygrad.core.batch import Batch, Forward
from policygrad.core.metrics import Metric, Metrics

State = dict[str, Any]


class Part:
    """What every part may declare."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """The fields of `Batch` it reads beyond mask, group and reward: a learner or a rollout fills them."""
    uses_group_statistics: ClassVar[bool] = False
    """Whether it compares the samples of one prompt, which is refused where there is one, or they are all equal."""
    forward_needs: ClassVar[frozenset[str]] = frozenset()
    """The fields of `Forward` that `select` reads of the policy as it is: a pass of its own where there are any."""
    length: int | None = 0
    """Tokens; None = open, so that a run sets its generation budget (`Algorithm.with_max_tokens`). 0 = it has no such length."""

    @property
    def formula(self) -> str:
        """What it puts into the equation, in a line."""
        return type(self).__name__

    def init_state(self) -> State | None:
        """What it remembers before the first rollout; None = it has no memory."""
        return None

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """The memory after a rollout, `batch` after shaping, and what its updates measured."""
        return state

    def with_state(self, state: State) -> Self:
        """The part with its memory put in."""
        return self

    def report(self, batch: Batch) -> Metrics:
        """What it has to say about a rollout, beside what `measure` tells."""
        return {}

    def select_tokens(self, out: Forward | None, batch: Batch, psi: Tensor) -> Tensor:
        """[B, T] bool; the tokens it chooses among all of one update, for a part whose `needs` name `selected`. Asked once per
        update, before the update is split, so that no micro-batch and no rank has a choice of its own. `out` is the policy as
        it is now, without graph; None where `select_needs` is empty."""
        raise NotImplementedError(f"{type(self).__name__} reads Batch.selected, and has no select(out, batch, psi)")


class Advantage(Part):
    """One link of the chain that makes Ψ; the first link receives the reward to go."""

    starts_chain: ClassVar[bool] = False
    """Whether it starts from the rewards and ignores the Ψ it is given, so that it must come first."""
    reads_reward: ClassVar[bool] = True
    """Whether it reads rewards. A run whose advantages read none needs no reward function."""
    samples_values: ClassVar[bool] = False
    """Whether a rollout shall estimate `Batch.values`, from `samples` fresh completions of each step's prefix."""
    samples: int = 0

    @abstractmethod
    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        """[B, T] -> [B, T]."""
        ...


class Ratio(Part):
    """How per-token log-ratios become the importance ratio r."""

    joint: ClassVar[bool] = False
    """Whether r is of the whole completion, so that a token holds 1/|o| of the objective's value."""

    @abstractmethod
    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """log(π_θ/π_old) [B, T] -> r [B, T]."""
        ...


class Gate(Part):
    """Lever 2: how much of a token's gradient the ratio lets through."""

    on_policy: ClassVar[bool] = False
    """Whether it takes no ratio: true only while π_θ = π_old."""
    requires_token_ratio: ClassVar[bool] = False
    """Whether it reads the tokens' own ratios, so that no other ratio fits."""
    requires_full_groups: ClassVar[bool] = False
    """Whether a token's weight depends on its group's other tokens, so that no micro-batch may split a group."""

    @abstractmethod
    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        """[B, T]; w, the derivative of `value` in log π_θ divided by Ψ."""
        ...

    @abstractmethod
    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        """[B, T]; the paper's objective per token."""
        ...

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Where it cuts, for the metrics: (below, above), both [B, T] bool; None = a gate that never does."""
        return None


class Correction(Part):
    """A factor on w: for a sampler μ that is not π_old, or a mask on tokens."""

    corrects_sampler: ClassVar[bool] = True
    """Whether it accounts for μ ≠ π_old, so that samples older than the weights need no other correction. A mask does not."""

    @abstractmethod
    def __call__(self, batch: Batch, psi: Tensor) -> Tensor:
        """[B, T]."""
        ...


class Aggregation(Part):
    """How tokens are averaged over the whole update."""

    @abstractmethod
    def __call__(self, mask: Tensor, group: Tensor) -> Tensor:
        """c [B, T], before `Batch.weight`; zero where the mask is False."""
        ...


class ObjectiveTerm(Part):
    """What `Term` and `LossTerm` have in common: coefficients of their own, or those of the policy."""

    forward_needs: ClassVar[frozenset[str]] = frozenset()
    """The fields of `Forward` it reads beyond logp: entropy, values, kl_old, kl_ref."""
    constrained_kl: ClassVar[str | None] = None
    """'kl_old' for a penalty that holds π_θ near π_old."""
    aggregation: Aggregation | None = None
    """None = as the policy's tokens are averaged."""
    mixture_weight: float = 0.0
    """Its share of a mixture, (1 − μ)·J + μ·its own: the policy's term has what all shares leave of 1. 0 = it comes on top."""

    def token_mask(self, batch: Batch) -> Tensor | None:
        """[B, T] or [B, 1] bool: the tokens that count, in it and in its denominators; None = all."""
        return None


class Term(ObjectiveTerm):
    """An additive score term k, under stop-gradient."""

    @abstractmethod
    def score(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        """k [B, T]; what multiplies ∇log π_θ."""
        ...

    @abstractmethod
    def value(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        """[B, T]; the term's share of the paper's objective."""
        ...


class LossTerm(ObjectiveTerm):
    """What is no multiple of ∇log π_θ: an additive term with a graph of its own (exact entropy)."""

    @abstractmethod
    def objective(self, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
        """[B, T] with graph; to be maximised, aggregated like a term."""
        ...


class Shaping(Part):
    """From the task's score to the reward."""

    @abstractmethod
    def __call__(self, batch: Batch) -> Batch:
        """The batch with another `reward` or `token_reward`."""
        ...


class Filter(Part):
    """Which completions take part, by the task's score."""

    sampling_rounds: int = 1
    """Rounds of sampling, of the step's prompts each, that a step may take."""
    keep_leftovers: bool = False
    """Whether groups that a refilled step has no room for begin the next one."""
    refills: bool = False
    """Whether a group whose completions are all `dropped` is set aside and another prompt sampled in its place: the filter is
    not called then, and what cannot be refilled is given weight 0."""

    excluded_examples: frozenset[int] = frozenset()
    """The prompts, by their `Batch.example_id`, that a rollout shall pass over."""
    task_level: int | None = None
    """How difficult a rollout's prompts shall be, from 0 on, of a task that has levels; None = as the task makes them."""

    @abstractmethod
    def __call__(self, batch: Batch) -> Batch:
        """The batch with another `mask`, `in_statistics` or `weight`."""
        ...

    def find_dropped(self, batch: Batch) -> Tensor:
        """[B] bool; the completions it takes out."""
        return batch.mask.any(1) & ~self(batch).mask.any(1)


class UpdateRule(Part):
    """How the parameters move."""

    uses_lr: ClassVar[bool] = True
    """Whether the policy's learning rate means anything."""
    minibatches: int = 1
    """Shares of whole groups that a rollout is split into."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """Updates of the policy per rollout, at most."""
        ...

    @property
    def critic_updates(self) -> int:
        """Optimiser steps of the critic per rollout, where there is one: together with the policy's."""
        return self.updates

    @abstractmethod
    def __call__(self, problem: object) -> Metrics:
        """One rollout's updates. `problems.asked` gives the problem as the kind that the rule needs, or refuses it."""
        ...
