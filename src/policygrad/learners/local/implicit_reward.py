"""π_φ of an implicit reward: a language model of its own, with its own AdamW. A policy step never moves it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from policygrad.core.batch import Batch
from policygrad.core.metrics import Max, Mean, Metrics, Sum, merge
from policygrad.core.reward_model import ImplicitReward
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.local.division import Division
from policygrad.learners.local.forward import Evaluator
from policygrad.learners.local.optimizer import Optimizer
from policygrad.learners.local.packing import Pack, micro_tokens, pack
from policygrad.learners.local.recompute import differentiating, recompute_activations, without_effect


@dataclass(frozen=True, eq=False)
class ImplicitRewardModel:
    """π_φ, fitted micro-batch by micro-batch."""

    part: ImplicitReward
    evaluator: Evaluator
    """Of π_φ."""
    optimizer: Optimizer
    config: LearnerConfig
    division: Division = field(default_factory=Division)

    @classmethod
    def of(
        cls,
        evaluator: Evaluator,
        part: ImplicitReward,
        config: LearnerConfig,
        adam: OptimizerConfig,
        lr: float | None,
        updates: int,
        division: Division | None = None,
    ) -> ImplicitRewardModel:
        """Of the evaluator's model, which starts as the reference, so that r_φ = 0. `lr`: the policy's; `updates`: of the whole
        run, for the schedule."""
        model = evaluator.model
        if config.gradient_checkpointing:
            recompute_activations(model)
        optimizer = Optimizer(model, adam, part.rate(lr), updates)
        return cls(part, evaluator, optimizer, config, division or Division())

    @property
    def _device(self) -> torch.device:
        return next(self.evaluator.model.parameters()).device

    def accumulate(self, batch: Batch) -> Metrics:
        """Adds the gradient of the cross-entropy, a mean over the update's completions."""
        rows = trained(batch)
        if not len(rows):
            return {}
        bare, metrics = replace(batch, prompts=None, tokens=None), Metrics()
        made, budget = partial(pack, batch, rows), micro_tokens(self.config, self.evaluator.model)
        for part in self.division.packs(made, budget, self._idle):
            with differentiating(self.evaluator.model, self.config.gradient_checkpointing):
                logp = self.evaluator(part.to(self._device))
                each = self.part.loss(logp, bare.select(part.rows).to(self._device))
                loss = each.sum() / len(rows)
                torch.autograd.backward(loss)
            self.optimizer.collect()
            metrics = merge(metrics, {"reward_model/loss": Sum(float(loss.detach()))})
        return {"reward_model/loss": Mean(self.division.merged(metrics)["reward_model/loss"].value)}

    def _idle(self, part: Pack) -> None:
        with differentiating(self.evaluator.model, self.config.gradient_checkpointing):
            without_effect(self.evaluator(part.to(self._device)))

    def descend(self) -> Metrics:
        """One AdamW step of φ."""
        norm, _ = self.optimizer.step()
        return {} if norm is None else {"reward_model/grad_norm": Max(norm)}


def trained(batch: Batch) -> Tensor:
    """[n] completions that φ is fitted to: those with a sampled token that a filter has not given weight 0."""
    kept = batch.mask.any(1)
    if batch.weight is not None:
        kept = kept & ((batch.weight != 0) & batch.mask).any(1)
    return kept.nonzero().squeeze(1)
