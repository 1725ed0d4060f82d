"""c: what each token weighs, over one whole update: an aggregation of the tokens that count, times `Batch.weight`."""

from __future__ import annotations

from torch import Tensor

from policygrad.core import ragged
from policygrad.core.batch import Batch
from policygrad.core.outputs import per_token
from policygrad.core.protocols import Aggregation, Gate, LossTerm, Part, Term


def coefficients(batch: Batch, aggregate: Aggregation, mask: Tensor) -> Tensor:
    """c [B, T] of the tokens that `mask` [B, T] counts, in it and in its denominators."""
    c = per_token(aggregate(mask, batch.group), aggregate, mask).to(batch.reward.dtype)
    return c if batch.weight is None else c * ragged.masked(batch.weight, batch.mask)


def of_term(batch: Batch, term: Term | LossTerm, aggregate: Aggregation, gate: Gate, policy: Tensor) -> Tensor:
    """c^m [B, T] of a term: the policy's, unless it has an aggregation or tokens of its own."""
    where, mask = term.where(batch), taken(batch, term)
    alike = batch.demonstration is None or ("demonstration" in term.needs) is ("demonstration" in gate.needs)
    if where is None and term.aggregate is None and alike:
        return policy
    return coefficients(batch, term.aggregate or aggregate, mask if where is None else mask & where)


def taken(batch: Batch, part: Part) -> Tensor:
    """[B, T] bool; the tokens that a gate or a term averages over: demonstrations only where it says that it takes them."""
    return batch.mask if "demonstration" in part.needs else batch.own
