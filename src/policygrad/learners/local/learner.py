"""The learner: owns the weights. An in-process implementation for any `AutoModelForCausalLM`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch, Forward
from policygrad.core.metrics import Metrics, Sum
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.local.curvature import Curvature
from policygrad.learners.local.forward import Scorer, probe
from policygrad.learners.local.optimizer import Optimizer, train_only
from policygrad.learners.local.packing import Merged, Pack
from policygrad.learners.local.problem import LocalProblem
from policygrad.learners.local.score_norms import ScoreNorms
from policygrad.learners.local.value_model import ValueModel, measure_values
from policygrad.models.precision import at_least_float32
from policygrad.weight_sync.base import Published


class Learner(Protocol):
    """Owns the weights; `loop.py` is given one and never asks which."""

    def score(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Fills only the Batch fields that `needs` names."""
        ...

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """Hands `algorithm.step` a Problem: one rollout's worth of optimiser steps."""
        ...

    def publish(self) -> Published:
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
        lr: float | None,
        steps: int,
        temperature: float = 1.0,
        config: LearnerConfig | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        """`steps`: rollouts of the run, for the schedule; `temperature`: the one completions are sampled at; `lr`: None where
        the algorithm's step has no use for one.

        Raises:
            ValueError: no learning rate where one is needed; `config.trainable` fits no parameter.
        """
        if lr is None and algorithm.step.uses_lr:
            raise ValueError(f"{type(algorithm.step).__name__} needs a learning rate: give LocalLearner a number as lr")
        config = config or LearnerConfig()
        self.model, self.config, self.version, self.rollouts = model, config, 0, 0
        self.device = next(model.parameters()).device
        if config.gradient_checkpointing:
            recompute_activations(model)
        train_only(model, config.trainable)
        self.scorer = probe(model, temperature)
        self.optimizer = Optimizer(model, optimizer or OptimizerConfig(), lr or 0.0, steps * algorithm.step.updates)
        curvature = Curvature(self.scorer, self.optimizer, config.micro_tokens, self.differentiating)
        self.curvature = curvature if algorithm.step.uses_lr else curvature.checked()
        self.norms = ScoreNorms.of(self.scorer, config) if "score_norm" in algorithm.needs else None
        self.critic: ValueModel | None = None
        if algorithm.critic is not None:
            updates = (steps, algorithm.step.value_updates)
            self.critic = ValueModel.of(
                self.scorer, algorithm.critic, config, optimizer or OptimizerConfig(), lr, updates
            )
        self.old: Scorer | None = None  # the policy when a rollout's updates began, for an exact KL(π_old‖π_θ)
        self.reference: Scorer | None = None
        self.refreshed = False  # a reference that is no longer the initial model is part of a checkpoint
        if "logp_ref" in algorithm.needs:
            frozen = copy.deepcopy(model).eval().requires_grad_(False)
            self.reference = replace(self.scorer, model=frozen)

    @torch.no_grad()
    def score(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """logp_old and score_norm from the policy, logp_ref from the reference, values from the critic; equal completions once."""
        if self.critic is not None and "values" in needs:
            batch = self.critic.score(batch)
        if self.norms is not None and "score_norm" in needs:
            with self.differentiating():
                batch = self.norms.score(batch)
        scorers = {"logp_old": self.scorer, "logp_ref": self.reference}
        wanted = {name: scorer for name, scorer in scorers.items() if name in needs and scorer is not None}
        if not wanted:
            return batch
        merged = Merged.of_texts(batch)
        filled: dict[str, Any] = {}
        for name, scorer in wanted.items():
            out = at_least_float32(torch.zeros(batch.mask.shape, dtype=self.optimizer.dtype))
            for part in scorer.packs(batch, merged.unique, self.config.micro_tokens):
                out[part.rows] = scorer(part.to(self.device)).cpu()
            filled[name] = merged.spread(out)
        return replace(batch, **filled)

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """One rollout's optimiser steps, as `algorithm.step` takes them."""
        if "kl_old" in algorithm.forward_needs:
            self._remember()
        metrics = algorithm.step(LocalProblem(self, batch, psi, algorithm, seed=self.version))
        self.rollouts += 1
        if algorithm.reference is not None and self.reference is not None and algorithm.reference.due(self.rollouts):
            self.reference.model.load_state_dict(self.model.state_dict())
            self.refreshed = True
            if algorithm.reference.reset:
                self.optimizer.forget()
            metrics |= {"reference/refreshed": Sum(1.0)}
        return metrics if self.critic is None else metrics | measure_values(batch)

    def _remember(self) -> None:
        """Keeps the policy as it is now."""
        if self.old is None:
            self.old = replace(self.scorer, model=copy.deepcopy(self.model).eval().requires_grad_(False))
        else:
            self.old.model.load_state_dict(self.model.state_dict())

    def forward(self, part: Pack, algorithm: Algorithm) -> Forward:
        """log π_θ of a micro-batch, and what the algorithm's loss terms read beside it."""
        return self.scorer.forward(part.to(self.device), algorithm.forward_needs, self.old)

    def differentiating(self) -> AbstractContextManager[None]:
        """The mode for backward passes."""
        return differentiating(self.model, self.config.gradient_checkpointing)

    def publish(self) -> Published:
        """The model's own tensors: a sampler that decodes with the same model copies nothing."""
        return Published(self.version, dict(self.model.named_parameters()))

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
        trained = {name.removeprefix("weights/") for name in mine if name.startswith("weights/")}
        if trained != set(self.optimizer.masters):
            odd = sorted(trained ^ set(self.optimizer.masters))[0]
            raise RuntimeError(
                f"it was made with other trainable parameters ({odd}, say): leave learner.trainable as it was"
            )
        self.optimizer.restore(mine, values["optimizer"])
        self.version, self.rollouts, self.refreshed = values["version"], values["rollouts"], values["refreshed"]


@contextmanager
def differentiating(model: nn.Module, recompute: bool) -> Iterator[None]:
    """Transformers recompute activations only in training mode, in which they keep no cache: sampling needs the other.

    Dropout is 0 in both (see `load_model`).
    """
    model.train(recompute)
    try:
        yield
    finally:
        model.eval()


def recompute_activations(model: Any) -> None:
    """Under its name in transformers ≥ 5.2x, or the one before."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
