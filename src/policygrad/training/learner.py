"""The learner: owns the weights. An in-process implementation for any `AutoModelForCausalLM`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from policygrad.core.algorithm import Algorithm
from policygrad.core.metrics import Max, Mean, Metrics, Sum, merge
from policygrad.core.objective import measure, surrogate
from policygrad.core.types import Batch, Forward
from policygrad.rollout.draw import at_least_float32
from policygrad.rollout.types import Weights
from policygrad.training.forward import Scorer, probe
from policygrad.training.learner_config import LearnerConfig, OptimizerConfig
from policygrad.training.optimizer import Optimizer
from policygrad.training.packing import active, merge_equal
from policygrad.training.value_model import ValueModel, measure_values


class Learner(Protocol):
    """Owns the weights; `loop.py` is given one and never asks which."""

    def score(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Fills only the Batch fields that `needs` names."""
        ...

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """Hands `algorithm.step` a Problem: one rollout's worth of optimiser steps."""
        ...

    def publish(self) -> Weights:
        """The weights a sampler should use next."""
        ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON values): all that a resumed run needs."""
        ...

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The state of a checkpoint."""
        ...


class LocalLearner:
    """AdamW on a model in this process, packed micro-batches, a reference model only when an algorithm needs one."""

    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm,
        *,
        lr: float,
        steps: int,
        temperature: float = 1.0,
        config: LearnerConfig | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        """`steps`: rollouts of the run, for the schedule; `temperature`: the one completions are sampled at."""
        config = config or LearnerConfig()
        self.model, self.config, self.version, self.rollouts = model, config, 0, 0
        self.device = next(model.parameters()).device
        if config.gradient_checkpointing:
            _recompute_activations(model)
        self.scorer = probe(model, temperature)
        self.optimizer = Optimizer(model, optimizer or OptimizerConfig(), lr, steps * algorithm.step.updates)
        self.critic: ValueModel | None = None
        if algorithm.critic is not None:
            total = steps * algorithm.step.updates
            self.critic = ValueModel.of(
                model, self.scorer, algorithm.critic, config, optimizer or OptimizerConfig(), total
            )
        self.reference: Scorer | None = None
        self.refreshed = False  # a reference that is no longer the initial model is part of a checkpoint
        if "logp_ref" in algorithm.needs:
            frozen = copy.deepcopy(model).eval().requires_grad_(False)
            self.reference = replace(self.scorer, model=frozen)

    @torch.no_grad()
    def score(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """logp_old from the policy, logp_ref from the reference, values from the critic; equal completions once."""
        if self.critic is not None and "values" in needs:
            batch = self.critic.score(batch)
        scorers = {"logp_old": self.scorer, "logp_ref": self.reference}
        wanted = {name: scorer for name, scorer in scorers.items() if name in needs and scorer is not None}
        if not wanted:
            return batch
        rows = batch.mask.any(1).nonzero().squeeze(1)
        bare = replace(batch, logp_old=None, logp_ref=None, weight=None)
        unique, index = merge_equal(bare, torch.zeros(batch.mask.shape), rows)
        filled: dict[str, Any] = {}
        for name, scorer in wanted.items():
            out = at_least_float32(torch.zeros(batch.mask.shape, dtype=self.optimizer.dtype))
            for part in scorer.packs(batch, unique, self.config.micro_tokens):
                out[part.rows] = scorer(part.to(self.device)).cpu()
            out[rows] = out[unique[index]]
            filled[name] = out
        return replace(batch, **filled)

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """One rollout's optimiser steps, as `algorithm.step` takes them."""
        metrics = algorithm.step(LocalProblem(self, batch, psi, algorithm, seed=self.version))
        self.rollouts += 1
        if algorithm.reference is not None and self.reference is not None and algorithm.reference.due(self.rollouts):
            self.reference.model.load_state_dict(self.model.state_dict())
            self.refreshed = True
            if algorithm.reference.reset:
                self.optimizer.forget()
            metrics |= {"reference/refreshed": Sum(1.0)}
        return metrics if self.critic is None else metrics | measure_values(batch)

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """Transformers recompute activations only in training mode, in which they keep no cache: sampling needs the other.

        Dropout is 0 in both (see `load_model`).
        """
        self.model.train(self.config.gradient_checkpointing)
        try:
            yield
        finally:
            self.model.eval()

    def publish(self) -> Weights:
        """The model's own tensors: a sampler that decodes with the same model copies nothing."""
        return Weights(self.version, dict(self.model.named_parameters()))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, values = self.optimizer.state()
        state = {"version": self.version, "rollouts": self.rollouts, "refreshed": self.refreshed, "optimizer": values}
        if self.refreshed and self.reference is not None:
            tensors |= {f"reference/{n}": p.detach() for n, p in self.reference.model.named_parameters()}
        if self.critic is not None:
            more, state["critic"] = self.critic.optimizer.state()
            tensors |= {f"critic/{name}": tensor for name, tensor in more.items()}
        return tensors, state

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        if self.critic is not None:
            own = {n.removeprefix("critic/"): t for n, t in tensors.items() if n.startswith("critic/")}
            self.critic.optimizer.restore(own, values["critic"])
        if values["refreshed"] and self.reference is not None:
            for name, parameter in self.reference.model.named_parameters():
                parameter.data.copy_(tensors[f"reference/{name}"])
        mine = {name: tensor for name, tensor in tensors.items() if not name.startswith(("critic/", "reference/"))}
        self.optimizer.restore(mine, values["optimizer"])
        self.version, self.rollouts, self.refreshed = values["version"], values["rollouts"], values["refreshed"]


def _recompute_activations(model: Any) -> None:
    """Under its name in transformers ≥ 5.2x, or the one before."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


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
        shares = [groups[chunk] for chunk in order.tensor_split(minibatches) if len(chunk)]
        rows = [torch.isin(self.batch.group, share).nonzero().squeeze(1) for share in shares]
        return [replace(self, batch=self.batch.select(r), psi=self.psi[r]) for r in rows]

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

    def _policy(self) -> Metrics:
        """The policy's share, over the completions that can move the weights."""
        learner, batch = self.learner, self.batch
        coefficients = self.algorithm.all_coefficients(batch)
        rows = active(batch, self.psi, coefficients).nonzero().squeeze(1)
        unique, index = merge_equal(batch, self.psi, rows, self.algorithm.needs)
        summed = tuple(c.new_zeros(len(unique), c.shape[1]).index_add_(0, index, c[rows]) for c in coefficients)
        count = torch.zeros(len(unique)).index_add_(0, index, torch.ones(len(rows)))
        place = torch.zeros(len(batch.mask), dtype=torch.int64)
        place[unique] = torch.arange(len(unique))
        metrics: Metrics = {
            "completions/computed": Sum(float(len(unique))),
            "completions/offered": Sum(float(batch.mask.any(1).sum())),
        }
        bare = replace(batch, prompts=None, tokens=None)  # the equation does not read them
        for part in learner.scorer.packs(batch, unique, learner.config.micro_tokens):
            at = place[part.rows]
            share = bare.select(part.rows).to(learner.device)
            psi, coef = self.psi[part.rows].to(learner.device), tuple(c[at].to(learner.device) for c in summed)
            with learner.differentiating():
                out = Forward(learner.scorer(part.to(learner.device)))
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
        metrics = {} if self.learner.critic is None else self.learner.critic.descend()
        norm, lr = self.learner.optimizer.step()
        self.learner.version += 1
        if self.pretraining:
            return metrics | {"value_pretraining": Mean(1.0)}
        if norm is None:
            return metrics | {"updates/skipped": Sum(1.0)}
        return metrics | {"grad_norm": Max(norm), "lr": Mean(lr), "updates/taken": Sum(1.0)}
