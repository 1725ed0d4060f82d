"""One rollout on a local learner, as the steps of core ask about it: gradients, the Fisher product, the constrained move."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.controllers import re_adapted
from policygrad.core.metrics import Max, Mean, Metrics, Sum, merge
from policygrad.core.objective import measure, surrogate
from policygrad.learners.local.packing import Merged, active

if TYPE_CHECKING:
    from policygrad.learners.local.learner import LocalLearner


def average_objective(metrics: Metrics) -> Metrics:
    """The shares of one optimiser step add up to its objective; a rollout's steps are averaged, however many there are."""
    found = metrics.get("objective")
    return metrics if found is None else metrics | {"objective": Mean(found.value)}


@dataclass(frozen=True, eq=False)
class LocalProblem:
    """A rollout's share of completions for one optimiser step, on a LocalLearner."""

    learner: LocalLearner
    batch: Batch
    psi: Tensor
    algorithm: Algorithm
    seed: int

    def split(self, epoch: int, minibatches: int) -> list[LocalProblem]:
        """Minibatches of whole groups, shuffled by (weights' version, epoch)."""
        if minibatches == 1:
            return [self]
        groups = self.batch.group.unique()
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(self.seed * 1009 + epoch))
        return [self._of(groups[chunk]) for chunk in order.tensor_split(minibatches) if len(chunk)]

    def some(self, share: float) -> LocalProblem:
        """This share of the groups with a sampled token, at least one, drawn by the weights' version."""
        groups = self.batch.group[self.batch.mask.any(1)].unique()
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(self.seed))
        return self._of(groups[order[: max(1, round(share * len(groups)))]])

    def _of(self, groups: Tensor) -> LocalProblem:
        rows = torch.isin(self.batch.group, groups).nonzero().squeeze(1)
        return replace(self, batch=self.batch.select(rows), psi=self.psi[rows])

    @property
    def pretraining(self) -> bool:
        """Whether the policy stands still while its critic is fitted."""
        return self.algorithm.critic is not None and self.algorithm.critic.pretrain > 0

    def accumulate(self) -> Metrics:
        """Forward and backward of the policy and of its critic; gradients add up in the learner."""
        metrics = {} if self.pretraining else self._policy()
        if self.learner.critic is not None and self.algorithm.critic is not None:
            metrics |= self.learner.critic.accumulate(self.batch, self.algorithm.critic)
        return metrics

    @torch.no_grad()
    def measured(self) -> Metrics:
        """Of all sampled tokens, under the weights as they are."""
        return {} if self.pretraining else self._policy(learning=False)

    def adapted(self, metrics: Metrics) -> LocalProblem | None:
        algorithm = re_adapted(self.algorithm, self.batch, metrics)
        return None if algorithm is None else replace(self, algorithm=algorithm)

    def _policy(self, learning: bool = True) -> Metrics:
        """The policy's share, over the completions that can move the weights; over all of them when it only measures."""
        learner, batch = self.learner, self.batch
        coefficients = self.algorithm.all_coefficients(batch)
        rows = (active(batch, self.psi, coefficients) if learning else batch.mask.any(1)).nonzero().squeeze(1)
        merged = Merged.of(batch, self.psi, rows, self.algorithm.needs)
        summed, count = tuple(map(merged.summed, coefficients)), merged.count.float()
        metrics: Metrics = {
            "completions/computed": Sum(float(len(merged.unique))),
            "completions/offered": Sum(float(batch.mask.any(1).sum())),
        }
        bare = replace(batch, prompts=None, tokens=None)  # the equation does not read them
        for part in learner.scorer.packs(batch, merged.unique, learner.config.micro_tokens):
            at = merged.place[part.rows]
            share = bare.select(part.rows).to(learner.device)
            psi, coef = self.psi[part.rows].to(learner.device), tuple(c[at].to(learner.device) for c in summed)
            with learner.differentiating():
                out = learner.forward(part, self.algorithm)
                if learning:
                    surrogate(out, share, psi, self.algorithm, coef).backward()
            learner.optimizer.collect()
            metrics = merge(metrics, measure(out, share, psi, self.algorithm, coef, count[at].to(learner.device)))
        if (
            "clip_ratio/low" in metrics
        ):  # completions that were skipped have Ψ = 0: their tokens are not clipped, but count
            skipped = Mean(0.0, float(batch.mask.sum() - batch.mask[rows].sum()))
            metrics = merge(metrics, {"clip_ratio/low": skipped, "clip_ratio/high": skipped})
        return average_objective(metrics)

    def descend(self) -> Metrics:
        """One AdamW step; without any gradient (no completion could move the weights) none is taken, and that is counted."""
        norm, lr = self.learner.optimizer.step()  # first, for the critic has not moved when it refuses its gradient
        self.learner.version += 1
        metrics = {} if self.learner.critic is None else self.learner.critic.descend()
        if self.pretraining:
            return metrics | {"value_pretraining": Mean(1.0)}
        if norm is None:
            return metrics | {"updates/skipped": Sum(1.0)}
        return metrics | {"grad_norm": Max(norm), "lr": Mean(lr), "updates/taken": Sum(1.0)}

    def gradient(self) -> tuple[Tensor, Metrics]:
        """[P] of the surrogate objective; 0 while the policy stands still."""
        if self.pretraining:
            return self.learner.curvature.take_gradient(), {"value_pretraining": Mean(1.0)}
        metrics = self._policy()
        return -self.learner.curvature.take_gradient(), metrics

    def fisher(self, v: Tensor, sampled: bool) -> Tensor:
        return self.learner.curvature.fisher(self.batch, v, sampled)

    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        return self.learner.curvature.evaluate(self.batch, self.psi, self.algorithm, delta)

    def commit(self, delta: Tensor) -> None:
        self.learner.curvature.move(delta)
        self.learner.version += 1

    def fit(self) -> Metrics:
        """The critic's gradient and one AdamW step of it."""
        if self.learner.critic is None or self.algorithm.critic is None:
            return {}
        return self.learner.critic.accumulate(self.batch, self.algorithm.critic) | self.learner.critic.descend()
