"""A learner for the table of logits: gradient ascent by autograd, in float64. The stand-in for a model's learner in tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch, Forward
from policygrad.core.kl_controllers import adapt_penalties
from policygrad.core.metrics import Max, Metrics, masked_mean
from policygrad.core.objective import measure_forward, objective, surrogate
from policygrad.learners.local.curvature import output_hessian_product
from policygrad.learners.local.updates import average_objective
from policygrad.weight_sync.base import PublishedWeights


class TabularLearner:
    """θ ← θ + lr·∇J on a table [prompts, length, vocabulary]."""

    def __init__(self, prompts: int, length: int, vocabulary: int, lr: float = 1.0) -> None:
        self.table = torch.zeros(prompts, length, vocabulary, dtype=torch.float64, requires_grad=True)
        self.reference, self.lr, self.version = self.table.detach().clone(), lr, 0
        self.old = self.reference

    def scores(self, table: Tensor, batch: Batch) -> Tensor:
        """[B, T, V] nats, over the vocabulary."""
        assert batch.prompts is not None
        prompt = torch.stack([row[0] for row in batch.prompts])[batch.group]
        return table.log_softmax(-1)[prompt, : batch.mask.shape[1]]

    def logp(self, table: Tensor, batch: Batch) -> Tensor:
        """[B, T] nats."""
        assert batch.tokens is not None
        return self.scores(table, batch).gather(-1, batch.tokens[..., None]).squeeze(-1)

    def forward(self, batch: Batch, needs: frozenset[str], table: Tensor | None = None) -> Forward:
        """log π_θ, and entropy and KL(π_old‖π_θ) where they are needed, of another table if one is given."""
        table = self.table if table is None else table
        now, old = self.scores(table, batch), self.scores(self.old, batch)
        exact = {"entropy": -(now.exp() * now).sum(-1), "kl_old": (old.exp() * (old - now)).sum(-1)}
        return Forward(self.logp(table, batch), **{name: exact[name] for name in needs})

    def evaluate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """logp_old and logp_ref where they are needed."""
        tables = {"logp_old": self.table.detach(), "logp_ref": self.reference}
        filled: dict[str, Any] = {name: self.logp(table, batch) for name, table in tables.items() if name in needs}
        return replace(batch, **filled)

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """The algorithm's steps on this rollout."""
        self.old = self.table.detach().clone()
        return algorithm.update_rule(TabularProblem(self, batch, psi, algorithm))

    def publish(self) -> PublishedWeights:
        return PublishedWeights(self.version, {"table": self.table})

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"table": self.table.detach().clone()}, {"version": self.version}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.table.copy_(tensors["table"])
        self.version = values["version"]


@dataclass(frozen=True, eq=False)
class TabularProblem:
    """One update's share of a rollout, on a table."""

    learner: TabularLearner
    batch: Batch
    psi: Tensor
    algorithm: Algorithm

    def split(self, epoch: int, minibatches: int) -> list[TabularProblem]:
        """Whole groups, in order."""
        return [self._of(share) for share in self.batch.group.unique().tensor_split(minibatches) if len(share)]

    def subsample(self, share: float) -> TabularProblem:
        """The first groups."""
        groups = self.batch.group.unique()
        return self._of(groups[: max(1, round(share * len(groups)))])

    def _of(self, groups: Tensor) -> TabularProblem:
        rows = torch.isin(self.batch.group, groups).nonzero().squeeze(1)
        return replace(self, batch=self.batch.select(rows), psi=self.psi[rows])

    def accumulate(self) -> Metrics:
        out = self.learner.forward(self.batch, self.algorithm.forward_needs)
        surrogate(out, self.batch, self.psi, self.algorithm).backward()
        return self._measure(out)

    def _measure(self, out: Forward) -> Metrics:
        coef = self.algorithm.all_coefficients(self.batch)
        return average_objective(measure_forward(out, self.batch, self.psi, self.algorithm, coef))

    def measure(self) -> Metrics:
        return self._measure(self.learner.forward(self.batch, self.algorithm.forward_needs))

    def adapt(self, metrics: Metrics) -> TabularProblem | None:
        algorithm = adapt_penalties(self.algorithm, self.batch, metrics)
        return None if algorithm is None else replace(self, algorithm=algorithm)

    def descend(self) -> Metrics:
        table = self.learner.table
        assert table.grad is not None
        norm = float(table.grad.norm())
        with torch.no_grad():
            table -= self.learner.lr * table.grad
        table.grad = None
        self.learner.version += 1
        return {"grad_norm": Max(norm)}

    def gradient(self) -> tuple[Tensor, Metrics]:
        """The gradient of the surrogate objective, flat."""
        metrics = self.accumulate()
        grad, self.learner.table.grad = self.learner.table.grad, None
        assert grad is not None
        return -grad.flatten(), metrics

    def fisher(self, v: Tensor, sampled: bool) -> Tensor:
        """F v. What `log_softmax` takes from a row of v is a constant, which F does not see."""
        table, mask = self.learner.table, self.batch.mask
        assert self.batch.tokens is not None
        logp, change = (self.learner.scores(x, self.batch)[mask] for x in (table, v.view_as(table)))
        each = torch.full((len(logp),), 1 / max(1, len(logp)), dtype=logp.dtype)
        weighted = output_hessian_product(
            logp.detach(), change, torch.arange(len(logp)), self.batch.tokens[mask], each, sampled
        )
        return torch.autograd.grad(logp, table, weighted)[0].flatten()

    @torch.no_grad()
    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        """(surrogate objective, mean KL(π_old‖π_θ)) at the table + delta."""
        moved = self.learner.table + delta.view_as(self.learner.table)
        out = self.learner.forward(self.batch, self.algorithm.forward_needs | {"kl_old"}, moved)
        assert out.kl_old is not None
        value = objective(out, self.batch, self.psi, self.algorithm)
        return float(value), masked_mean(out.kl_old, self.batch.mask).value

    @torch.no_grad()
    def commit(self, delta: Tensor) -> None:
        """Moves the table."""
        self.learner.table += delta.view_as(self.learner.table)
        self.learner.version += 1

    def fit_critic(self) -> Metrics:
        """A table has no critic."""
        return {}
