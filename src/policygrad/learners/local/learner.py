"""The learner in this process, for any `AutoModelForCausalLM`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum
from policygrad.errors import CheckpointError, ConfigError, EngineError
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.local.curvature import Curvature
from policygrad.learners.local.forward import Evaluator, build_evaluator, recompute_activations
from policygrad.learners.local.networks import ImplicitRewardModel, TrainedNetworks, ValueModel, measure_values
from policygrad.learners.local.optimizer import Optimizer, check_moments, set_trainable
from policygrad.learners.local.packing import WorkDivision
from policygrad.learners.local.score_norms import ScoreNorms
from policygrad.learners.local.updates import LocalProblem
from policygrad.models.adapters import adapter_configs, is_initial_adapter, set_adapters_enabled
from policygrad.models.moe_routing import Routing
from policygrad.models.replica import (
    ModelFactory,
    clone_model,
    copy_weights,
    enable_gradients,
    trainable_parameters,
    unshared_parameters,
)
from policygrad.weight_sync.base import PublishedWeights

# What a learner refuses at the beginning, with the way out.


def check_adapters(model: nn.Module, config: LearnerConfig) -> None:
    """Raises ConfigError where adapters are to train, and there are none."""
    if config.lora and not adapter_configs(model):
        raise ConfigError(
            "learner.lora trains adapters, and this model has none: put them in first (peft.get_peft_model), or let "
            "policygrad.train load the model"
        )


def check_vocabulary_sizes(algorithm: Algorithm, reference: Any, policy: Any) -> None:
    """Raises ConfigError where distributions over different vocabularies would be compared."""
    widths = [int(m.get_output_embeddings().weight.shape[0]) for m in (reference, policy)]
    if "kl_ref" in algorithm.forward_needs and widths[0] != widths[1]:
        raise ConfigError(
            f"ExactKLToReference compares two distributions over one vocabulary, and the reference has {widths[0]} logits, the "
            f"policy {widths[1]}: take TeacherLogRatio() or KLToReference(), which read the sampled tokens alone"
        )


def check_routing_replay(algorithm: Algorithm) -> None:
    """Raises ConfigError for what looks at the policy past the routes that are replayed."""
    reasons = {
        type(algorithm.update_rule).__name__: not algorithm.update_rule.uses_lr,
        "OptimalBaseline(norm='exact')": "grad_logp_sq_norm" in algorithm.needs,
        "an exact KL to the old policy": "kl_old" in algorithm.forward_needs,
    }
    for name in (name for name, holds in reasons.items() if holds):
        raise ConfigError(
            f"{name} looks at policies in ways of its own, where no experts are replayed: set learner.routing_replay to false, or "
            "take an algorithm without it, such as grpo"
        )


def require_lr(algorithm: Algorithm, lr: float | None) -> None:
    """Raises ConfigError where a step needs a learning rate and has none."""
    if lr is None and algorithm.update_rule.uses_lr:
        raise ConfigError(
            f"{type(algorithm.update_rule).__name__} needs a learning rate: give LocalLearner a number as lr"
        )


AUXILIARY_PREFIXES = ("critic/", "reward_model/", "reference/")
"""What begins the names of a checkpoint's tensors that are not the policy's."""


class LocalLearner:
    """AdamW on a model in this process, packed micro-batches, a reference model only when an algorithm needs one."""

    division = WorkDivision()

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
        build: ModelFactory | None = None,
        reference: nn.Module | None = None,
    ) -> None:
        """`steps`: rollouts of the run, for the schedule; `temperature`: the one completions are sampled at; `lr`: None where
        the algorithm's step has no use for one; `build`: makes another instance of the model, for a reference, say, where
        its configuration cannot; `reference`: the model that `Reference.model` names, loaded (`load_reference`).

        Raises:
            ConfigError: no learning rate where one is needed; `config.trainable` fits no parameter; a reference that is named
                and not given.
            ModelError: the model is needed twice, and there is no way to make it a second time.
        """
        require_lr(algorithm, lr)
        config, adam = config or LearnerConfig(), optimizer or OptimizerConfig()
        self.model, self.config, self.build, self.rollouts, self.refreshed = model, config, build, 0, False
        check_adapters(model, config)
        if config.gradient_checkpointing:
            recompute_activations(model)
        set_trainable(model, config.trainable)
        self.evaluator = self._build_evaluator(model, temperature)
        if config.routing_replay:
            check_routing_replay(algorithm)
            self.evaluator = self.evaluator.with_routing(Routing.for_model(model))
        self.optimizer = Optimizer(model, adam, lr or 0.0, steps * algorithm.update_rule.updates)
        self.critic: ValueModel | None = None
        if algorithm.critic is not None:
            how = (config, adam, lr, (steps, algorithm.update_rule.critic_updates), build, self.division)
            self.critic = ValueModel.of(self.evaluator, algorithm.critic, *how)
        self.reference = self._build_reference(algorithm, reference, build)
        self.reward_model: ImplicitRewardModel | None = None
        if algorithm.reward_model is not None and self.reference is not None:
            total, made = steps * algorithm.update_rule.critic_updates, build if reference is None else None
            beginning = self._frozen_copy(self.reference, made)
            enable_gradients(beginning.model, self.reference.model)
            self.reward_model = ImplicitRewardModel.of(
                beginning, algorithm.reward_model, config, adam, lr, total, self.division
            )
        self.networks = TrainedNetworks(
            self.evaluator,
            self.optimizer,
            config,
            self.critic,
            reward_model=self.reward_model,
            reference=self.reference if "kl_ref" in algorithm.forward_needs else None,
            division=self.division,
        )
        self.uses_lr = algorithm.update_rule.uses_lr
        self.curvature = Curvature(self.networks) if self.uses_lr else self._build_curvature()
        self.norms = self._build_score_norms() if "grad_logp_sq_norm" in algorithm.needs else None

    def _build_evaluator(self, model: nn.Module, temperature: float) -> Evaluator:
        """The policy's evaluator, with the short cuts that its model allows."""
        return build_evaluator(model, temperature)

    def _frozen_copy(self, evaluator: Evaluator, build: ModelFactory | None) -> Evaluator:
        """Of a second model with the numbers of this one's, frozen."""
        return evaluator.with_model(clone_model(evaluator.model, build))

    def _build_curvature(self) -> Curvature:
        """What a trust region asks."""
        return Curvature(self.networks).verify()

    def _build_score_norms(self) -> ScoreNorms:
        """What an exact baseline asks."""
        return ScoreNorms.of(self.evaluator, self.config)

    def _build_reference(
        self, algorithm: Algorithm, given: nn.Module | None, build: ModelFactory | None
    ) -> Evaluator | None:
        """π_ref where a part reads it: the model that was given, or the policy as it is now."""
        if "logp_ref" not in algorithm.needs:
            return None
        named = algorithm.reference.model if algorithm.reference is not None else None
        if (named is None) != (given is None):
            raise ConfigError(
                f"Reference.model is {named!r}, and LocalLearner was given {'no' if given is None else 'a'} reference: give both, "
                "LocalLearner(…, reference=policygrad.load_reference(name, tokenizer)), or neither"
            )
        if given is None:
            evaluator = self._frozen_copy(self.evaluator, build)
            if is_initial_adapter(evaluator.model):  # what it began as is the base alone
                set_adapters_enabled(evaluator.model, False)
            return evaluator
        check_vocabulary_sizes(algorithm, given, self.model)
        return build_evaluator(given.requires_grad_(False), self.evaluator.temperature)

    @property
    def reference_parameters(self) -> int:
        """Of the reference in memory, beside the policy's; 0 without one."""
        return (
            0
            if self.reference is None
            else sum(p.numel() for p in unshared_parameters(self.reference.model, self.model).values())
        )

    @property
    def version(self) -> int:
        """How many updates made the weights."""
        return self.optimizer.num_updates

    @property
    def not_finite(self) -> str:
        """Where the last constrained step's gradient, or a product with F, was not finite, in words; "" = nowhere."""
        return self.optimizer.not_finite

    @property
    def lr(self) -> float | None:
        """The policy's peak learning rate, which the schedule multiplies; None where the step has no use for one. May be set
        between updates: the critic keeps its own, and a checkpoint holds neither.

        Raises:
            ConfigError: set to what is no rate, or where none is used.
        """
        return self.optimizer.lr if self.uses_lr else None

    @lr.setter
    def lr(self, value: float) -> None:
        if not self.uses_lr:
            raise ConfigError("the algorithm's step has no learning rate: its length is set by algorithm.update_rule")
        if not 0 <= value < math.inf:
            raise ConfigError(f"a learning rate must be at least 0 and finite, not {value}")
        self.optimizer.lr = value

    @torch.no_grad()
    def evaluate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """logp_old, entropy and score_norm from the policy, logp_ref from the reference, values and bootstrap from the critic,
        implicit_reward from the reward model, as it is now; equal completions once."""
        if self.critic is not None and "values" in needs:
            batch = self.critic.evaluate(batch)
        if self.critic is not None and "bootstrap" in needs:
            batch = self.critic.add_bootstrap(batch)
        if self.norms is not None and "grad_logp_sq_norm" in needs:
            with self.networks.backward_mode():
                batch = self.norms.evaluate(batch)
        filled: dict[str, Any] = {}
        if {"logp_old", "entropy"} & needs:
            out = self.networks.score_batch(batch, self.evaluator, needs & {"entropy"})
            filled |= {n: x for n, x in (("logp_old", out.logp), ("entropy", out.entropy)) if n in needs}
        rewarded = self.reward_model if "implicit_reward" in needs else None
        if self.reference is not None and ("logp_ref" in needs or rewarded is not None):
            filled["logp_ref"] = self.networks.score_batch(batch, self.reference).logp
        batch = replace(batch, **filled)
        if rewarded is not None:
            logp = self.networks.score_batch(batch, rewarded.evaluator).logp
            batch = replace(batch, implicit_reward=rewarded.part.rewards(logp, batch))
        self.networks.release()
        return batch

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """One rollout's updates, as `algorithm.update_rule` takes them."""
        if "kl_old" in algorithm.forward_needs:
            self.snapshot_old_policy()
        if self.config.routing_replay and batch.routed_experts is None:
            raise EngineError(
                "learner.routing_replay replays the experts that sampled, and the sampler does not tell them (Generation.routes): "
                "take the sampler of this process, or set learner.routing_replay to false"
            )
        try:
            metrics = algorithm.update_rule(self.build_problem(batch, psi, algorithm))
        finally:
            self.networks.release()
        self.rollouts += 1
        if (
            algorithm.reference is not None
            and self.reference is not None
            and algorithm.reference.should_refresh(self.rollouts)
        ):
            copy_weights(self.model, self.reference.model)
            self._on_reference_refreshed(self.reference.model)
            if algorithm.reference.reset_optimizer:
                self.optimizer.reset_moments()
            metrics |= {"reference/refreshed": Sum(1.0)}
        return metrics if self.critic is None else metrics | measure_values(batch)

    def build_problem(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> LocalProblem:
        """What a step is handed: this rollout, with Ψ [B, T], on these weights."""
        return LocalProblem(
            networks=self.networks,
            batch=batch,
            psi=psi,
            algorithm=algorithm,
            seed=self.version,
            curvature=self.curvature,
        )

    def snapshot_old_policy(self) -> None:
        """Keeps the policy as it is now, as π_old of an exact KL."""
        if self.networks.old is None:
            self.networks = replace(self.networks, old=self._frozen_copy(self.evaluator, self.build))
        else:
            copy_weights(self.model, self.networks.old.model)

    def _on_reference_refreshed(self, reference: nn.Module) -> None:
        """The reference is no longer what training began with, and so a part of checkpoints."""
        self.refreshed = True
        if adapter_configs(reference):
            set_adapters_enabled(reference, True)

    def publish(self) -> PublishedWeights:
        """The model's own tensors: a sampler that decodes with the same model copies nothing."""
        return PublishedWeights(self.version, dict(self.model.named_parameters()))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, values = self.optimizer.state()
        state = {"rollouts": self.rollouts, "refreshed": self.refreshed, "optimizer": values}
        if self.refreshed and self.reference is not None:
            tensors |= {
                f"reference/{n}": p.detach() for n, p in trainable_parameters(self.reference.model, self.model).items()
            }
        if self.critic is not None:
            more, state["critic"] = self.critic.optimizer.state()
            tensors |= {f"critic/{name}": tensor for name, tensor in more.items()}
        if self.reward_model is not None:
            more, state["reward_model"] = self.reward_model.optimizer.state()
            tensors |= {f"reward_model/{name}": tensor for name, tensor in more.items()}
        return tensors, state

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        if self.critic is not None:
            mine = {n.removeprefix("critic/"): t for n, t in tensors.items() if n.startswith("critic/")}
            self.critic.optimizer.restore(mine, values["critic"])
        if self.reward_model is not None:
            mine = {n.removeprefix("reward_model/"): t for n, t in tensors.items() if n.startswith("reward_model/")}
            self.reward_model.optimizer.restore(mine, values["reward_model"])
        if values["refreshed"] and self.reference is not None:
            for name, parameter in trainable_parameters(self.reference.model, self.model).items():
                parameter.data.copy_(tensors[f"reference/{name}"])
            self._on_reference_refreshed(self.reference.model)
        mine = {name: tensor for name, tensor in tensors.items() if not name.startswith(AUXILIARY_PREFIXES)}
        trained = {name.removeprefix("weights/") for name in mine if name.startswith("weights/")}
        if trained != set(self.optimizer.masters):
            odd = sorted(trained ^ set(self.optimizer.masters))[0]
            raise CheckpointError(
                f"it was made with other trainable parameters ({odd}, say): leave learner.trainable as it was"
            )
        self.optimizer.restore(mine, values["optimizer"])
        self.rollouts, self.refreshed = values["rollouts"], values["refreshed"]


def check_learner_state(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Raises CheckpointError where the state of an optimiser is not whole; KeyError or TypeError where there is none."""
    check_moments(tensors, values["optimizer"])
    for name in ("critic", "reward_model"):
        if name in values:
            check_moments(tensors, values[name], f"{name}/")
