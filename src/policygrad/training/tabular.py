"""A learner for the table of logits: gradient ascent by autograd, in float64. The stand-in for a model's learner in tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.metrics import Max, Metrics
from policygrad.core.objective import measure, surrogate
from policygrad.core.types import Batch, Forward
from policygrad.rollout.types import Weights
from policygrad.training.learner import average_objective


class TabularLearner:
    """θ ← θ + lr·∇J on a table [prompts, length, vocabulary]."""

    def __init__(self, prompts: int, length: int, vocabulary: int, lr: float = 1.0) -> None:
        self.table = torch.zeros(prompts, length, vocabulary, dtype=torch.float64, requires_grad=True)
        self.reference, self.lr, self.version = self.table.detach().clone(), lr, 0

    def logp(self, table: Tensor, batch: Batch) -> Tensor:
        """[B, T] nats."""
        assert batch.tokens is not None
        assert batch.prompts is not None
        prompt = torch.stack([row[0] for row in batch.prompts])[batch.group]
        scores = table.log_softmax(-1)[prompt, : batch.mask.shape[1]]
        return scores.gather(-1, batch.tokens[..., None]).squeeze(-1)

    def score(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """logp_old and logp_ref where they are needed."""
        tables = {"logp_old": self.table.detach(), "logp_ref": self.reference}
        filled: dict[str, Any] = {name: self.logp(table, batch) for name, table in tables.items() if name in needs}
        return replace(batch, **filled)

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """The algorithm's steps on this rollout."""
        return algorithm.step(TabularProblem(self, batch, psi, algorithm))

    def publish(self) -> Weights:
        return Weights(self.version, {"table": self.table})

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"table": self.table.detach().clone()}, {"version": self.version}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.table.copy_(tensors["table"])
        self.version = values["version"]


@dataclass(frozen=True, eq=False)
class TabularProblem:
    """One optimiser step's share of a rollout, on a table."""

    learner: TabularLearner
    batch: Batch
    psi: Tensor
    algorithm: Algorithm

    def split(self, epoch: int, minibatches: int) -> list[TabularProblem]:
        """Whole groups, in order."""
        shares = self.batch.group.unique().tensor_split(minibatches)
        rows = [torch.isin(self.batch.group, share).nonzero().squeeze(1) for share in shares]
        return [replace(self, batch=self.batch.select(r), psi=self.psi[r]) for r in rows if len(r)]

    def accumulate(self) -> Metrics:
        out = Forward(self.learner.logp(self.learner.table, self.batch))
        surrogate(out, self.batch, self.psi, self.algorithm).backward()
        coef = self.algorithm.all_coefficients(self.batch)
        return average_objective(measure(out, self.batch, self.psi, self.algorithm, coef))

    def descend(self) -> Metrics:
        table = self.learner.table
        assert table.grad is not None
        norm = float(table.grad.norm())
        with torch.no_grad():
            table -= self.learner.lr * table.grad
        table.grad = None
        self.learner.version += 1
        return {"grad_norm": Max(norm)}
