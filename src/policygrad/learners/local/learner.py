"""The learner in this process, for any `AutoModelForCausalLM`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from policygrad.core.algorithm import Algorithm
from policygrad.core.auxiliary import is_server
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics, Sum
from policygrad.errors import CheckpointError, ConfigError, EngineError
from policygrad.learners.base import LearnerSpec
from policygrad.learners.local.forward import Evaluator, build_evaluator, choose_kernels, recompute_activations
from policygrad.learners.local.networks import TrainedNetworks
from policygrad.learners.local.optimizer import Optimizer, check_moments, set_trainable
from policygrad.learners.local.packing import WorkDivision
from policygrad.learners.local.updates import LocalProblem
from policygrad.models.loading import Float32Head, compute_head_in_float32
from policygrad.models.replica import (
    ModelFactory,
    clone_model,
    copy_weights,
    enable_gradients,
    trainable_parameters,
    unshared_parameters,
)
from policygrad.models.traits import adapter_configs, has_experts, read_balance_coefficient
from policygrad.utils.out_of_memory import MemoryBudget
from policygrad.weight_sync.base import PublishedWeights

if TYPE_CHECKING:
    from policygrad.learners.local.auxiliary_networks import ImplicitRewardModel, MovingAverage, ValueModel
    from policygrad.learners.local.curvature import Curvature
    from policygrad.learners.local.expert_balance import ExpertBalance
    from policygrad.learners.local.score_norms import ScoreNorms

AUXILIARY_PREFIXES = ("critic/", "reward_model/", "reference/")
"""Prefixes of a checkpoint's tensors that are not the policy's."""


class LocalLearner:
    """Updates a model in this process, with packed micro-batches and a reference model only if the algorithm needs one."""

    supports_snapshots = True

    def __init__(
        self,
        model: nn.Module,
        spec: LearnerSpec,
        *,
        build: ModelFactory | None = None,
        reference: nn.Module | None = None,
        teachers: Mapping[int, nn.Module] | None = None,
    ) -> None:
        """
        Args:
            build: Makes another instance of the model, for a reference, say, if its configuration cannot.
            reference: The model that `Reference.model` names, loaded (`load_reference`); None for a server.
            teachers: Those of `Reference.teachers` that are no servers, loaded, by their position there.

        Raises:
            ConfigError: No learning rate; no parameter that `config.trainable` matches; a reference is named but not given.
            ModelError: The model is needed twice and cannot be made a second time.
        """
        algorithm, config = spec.algorithm, spec.config
        rule = algorithm.update_rule
        if spec.lr is None and rule.uses_lr:
            raise ConfigError(f"{type(rule).__name__} needs a learning rate: give LearnerSpec a number as lr")
        if config.lora and not adapter_configs(model):
            raise ConfigError(
                "learner.lora trains adapters, and this model has none: add them (peft.get_peft_model), or let policygrad.train "
                "load the model"
            )
        self.model, self.config, self.build, self.rollouts, self.refreshed = model, config, build, 0, False
        self.division = self._build_division()
        if config.resolve(algorithm.head).head == "fp32":
            compute_head_in_float32(model)
        if config.gradient_checkpointing:
            recompute_activations(model)
        set_trainable(model, config.trainable, config.vision)
        self.evaluator = self._build_evaluator(model, spec.temperature)
        if config.routing_replay:
            check_routing_replay(algorithm)
        if config.routing_replay or has_experts(model):
            self.evaluator = self._follow_routers(self.evaluator)
        total = spec.steps * rule.updates
        self.optimizer = Optimizer(model, spec.optimizer, spec.lr or 0.0, total, offload=config.offload)
        self.optimizer.check_masters()
        self.critic = self._build_critic(spec)
        self.reference = self._build_reference(algorithm, reference, build)
        self.teachers = self._build_teachers(algorithm, teachers or {})
        settings = algorithm.reference
        self.reads_other_texts = settings is not None and bool(settings.templates or settings.tokenizer)
        self.average: MovingAverage | None = None
        if self.reference is not None and settings is not None and settings.ema is not None:
            from policygrad.learners.local.auxiliary_networks import MovingAverage

            self.average = MovingAverage(self.reference.model, self.optimizer)
            self._on_reference_refreshed()
        self.reward_model: ImplicitRewardModel | None = None
        if algorithm.reward_model is not None and self.reference is not None:
            from policygrad.learners.local.auxiliary_networks import ImplicitRewardModel

            initial = self._frozen_copy(self.reference, build if reference is None else None)
            enable_gradients(initial.model, self.reference.model)
            self.reward_model = ImplicitRewardModel(initial, algorithm.reward_model, spec, self.division)
        compared = self.reference if "kl_ref" in algorithm.forward_needs else None
        self.networks = TrainedNetworks(
            self.evaluator, self.optimizer, config, self.critic, self.reward_model, compared, self.division
        )
        if read_balance_coefficient(model):
            from policygrad.learners.local.expert_balance import find_expert_balance

            balance = find_expert_balance(self.evaluator, config, self.division)
            check_expert_balance(balance, algorithm)
            self.networks = replace(self.networks, balance=balance)
        for term in (term for term in algorithm.terms if "kl_ref" in term.forward_needs):
            self.networks = replace(self.networks, divergence=term.divergence)
        if config.compiles:
            from policygrad.learners.local.compilation import CompiledBlocks

            self.networks = replace(self.networks, compiled=CompiledBlocks(model, config.gradient_checkpointing))
        self.uses_lr = rule.uses_lr
        self.curvature = None if self.uses_lr else self._build_curvature()
        self.norms = self._build_score_norms() if "grad_logp_sq_norm" in algorithm.needs else None

    # A sharded learner makes these otherwise.

    def _build_division(self) -> WorkDivision:
        return WorkDivision(next(self.model.parameters()).device)

    def _build_evaluator(self, model: nn.Module, temperature: float) -> Evaluator:
        return choose_kernels(build_evaluator(model, temperature), self.config)

    def _follow_routers(self, evaluator: Evaluator) -> Evaluator:
        """Return the evaluator with what replays its experts, if that is asked for, and counts them."""
        from policygrad.models.moe_routing import Routing, find_routing

        network, model = evaluator.network, evaluator.model
        if self.config.routing_replay:
            network = replace(network, routing=Routing.for_model(model))
        if not self.config.compiles:  # compiled blocks do not show their routers
            network = replace(network, load=find_routing(model))
        return replace(evaluator, network=network)

    def _build_critic(self, spec: LearnerSpec) -> ValueModel | None:
        if spec.algorithm.critic is None:
            return None
        from policygrad.learners.local.auxiliary_networks import ValueModel

        return ValueModel(self.evaluator, spec.algorithm.critic, spec, self.build, self.division)

    def _frozen_copy(self, evaluator: Evaluator, build: ModelFactory | None) -> Evaluator:
        """Make an evaluator of a second, frozen model with the same weights."""
        network = replace(evaluator.network, model=clone_model(evaluator.model, build), routing=None, load=None)
        return replace(evaluator, network=network)

    def _build_curvature(self) -> Curvature:
        from policygrad.learners.local.curvature import Curvature

        return Curvature(self.networks).verify()

    def _build_score_norms(self) -> ScoreNorms:
        from policygrad.learners.local.score_norms import ScoreNorms

        return replace(ScoreNorms.of(self.evaluator, self.config), division=self.division)

    def _build_reference(
        self, algorithm: Algorithm, given: nn.Module | None, build: ModelFactory | None
    ) -> Evaluator | None:
        """Make π_ref if a part reads it: the given model, a copy of the current policy, or the policy itself."""
        if "logp_ref" not in algorithm.needs:
            return None
        if is_live(algorithm):
            return self.evaluator
        named = algorithm.reference.model if algorithm.reference is not None else None
        if is_scored_elsewhere(algorithm):
            return None
        if (named is None) != (given is None):
            raise ConfigError(
                f"Reference.model is {named!r}, and LocalLearner was given {'no' if given is None else 'a'} reference: give both, "
                "LocalLearner(…, reference=policygrad.load_reference(name, tokenizer)), or neither"
            )
        if given is None:
            evaluator = self._frozen_copy(self.evaluator, build)
            if adapter_configs(evaluator.model):
                from policygrad.models.adapters import is_initial_adapter, set_adapters_enabled

                if is_initial_adapter(evaluator.model):  # the initial policy is the base model alone
                    set_adapters_enabled(evaluator.model, False)
            return evaluator
        check_vocabulary_sizes(algorithm, given, self.model)
        return self._build_frozen(given)

    def _build_teachers(self, algorithm: Algorithm, given: Mapping[int, nn.Module]) -> dict[int, Evaluator]:
        """Make the evaluators of the teachers in memory, by their position in `Reference.teachers`, if a part reads them."""
        models = algorithm.reference.models if algorithm.reference is not None and algorithm.reference.teachers else {}
        positions = {i for i, model in enumerate(models.values()) if not is_server(model)}
        if "logp_ref" not in algorithm.needs:
            return {}
        if positions != given.keys():
            raise ConfigError(
                f"LocalLearner was given the teachers {sorted(given)}, and those of Reference.teachers that are no servers are "
                f"{sorted(positions)}, counted from 0: give LocalLearner(…, teachers={{0: policygrad.load_reference(name, "
                "tokenizer)})"
            )
        return {i: self._build_frozen(given[i]) for i in sorted(given)}

    def _build_frozen(self, model: nn.Module) -> Evaluator:
        """Make the evaluator of another frozen model, computed like the policy."""
        if isinstance(self.evaluator.network.head, Float32Head):
            compute_head_in_float32(model)
        return choose_kernels(build_evaluator(model.requires_grad_(False), self.evaluator.temperature), self.config)

    @property
    def reference_parameters(self) -> int:
        """Parameters of the reference or the teachers in memory beside the policy's; 0 without one."""
        frozen = [*(() if self.reference is None else (self.reference,)), *self.teachers.values()]
        return sum(p.numel() for x in frozen for p in unshared_parameters(x.model, self.model).values())

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of the policy, and of what trains beside it."""
        return [self.optimizer, *self._auxiliary_optimizers().values()]

    @property
    def memory(self) -> MemoryBudget:
        """What limits the tokens of a pass once memory has run out."""
        return self.division.memory

    @property
    def version(self) -> int:
        """Number of updates that made the weights."""
        return self.optimizer.num_updates

    @property
    def not_finite(self) -> str:
        """Where the last trust-region gradient or Fisher product was not finite, as text; empty if nowhere."""
        return self.optimizer.not_finite

    @property
    def lr(self) -> float | None:
        """The policy's peak learning rate, which the schedule multiplies; None if the update rule uses none.

        It may be set between updates, which raises ConfigError for an invalid rate or where none is used; the critic keeps
        its own, and checkpoints contain neither."""
        return self.optimizer.lr if self.uses_lr else None

    @lr.setter
    def lr(self, value: float) -> None:
        if not self.uses_lr:
            raise ConfigError(
                "the algorithm's update rule has no learning rate: algorithm.update_rule sets the step's length"
            )
        if not 0 <= value < math.inf:
            raise ConfigError(f"a learning rate must be at least 0 and finite, not {value}")
        self.optimizer.lr = value

    @torch.no_grad()
    def evaluate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Fill logp_old, logp_learner, entropy, sum_pi_squared and grad_logp_sq_norm from the policy, logp_ref from the reference,
        values and bootstrap from the critic, implicit_reward from the reward model, all with the current weights; equal
        completions are computed once.

        If memory runs out in one of these all are computed again, in equal passes: a difference of two that are equal is then 0, as
        the rewards of a new implicit reward model are, and not rounding, which a normalisation would enlarge.
        """
        while True:
            limit, filled = self.memory.limit, self._fill(batch, needs)
            if self.memory.limit == limit:
                return filled

    def _fill(self, batch: Batch, needs: frozenset[str]) -> Batch:
        if self.critic is not None and "values" in needs:
            batch = self.critic.evaluate(batch)
        if self.critic is not None and "bootstrap" in needs:
            batch = self.critic.add_bootstrap(batch)
        if self.norms is not None and "grad_logp_sq_norm" in needs:
            with self.networks.backward_mode():
                batch = self.norms.evaluate(batch)
        filled: dict[str, Any] = {}
        exact = needs & {"entropy", "sum_pi_squared"}
        own = needs & {"logp_old", "logp_learner"}
        if exact or own:
            out = self.networks.score_batch(batch, self.evaluator, exact)
            filled |= {name: getattr(out, name) for name in exact} | dict.fromkeys(own, out.logp)
        reward_model = self.reward_model if "implicit_reward" in needs else None
        if self.reference is not None and ("logp_ref" in needs or reward_model is not None):
            read = self._as_reference_reads(batch)
            filled["logp_ref"] = batch.fold_reference(self.networks.score_batch(read, self.reference).logp)
        if self.teachers and "logp_ref" in needs:
            filled["logp_ref"] = self._score_with_teachers(batch)
        batch = replace(batch, **filled)
        if reward_model is not None:
            logp = self.networks.score_batch(batch, reward_model.evaluator).logp
            batch = replace(batch, implicit_reward=reward_model.part.rewards(logp, batch))
        self.networks.release()
        return batch

    def _score_with_teachers(self, batch: Batch) -> Tensor:
        """Return log π_T [B, T] of each completion's teacher; where that is a server, what `logp_ref` has already."""
        chosen = batch.require("teacher", self)
        logp = torch.zeros(batch.mask.shape) if batch.logp_ref is None else batch.logp_ref.clone()
        for position, evaluator in self.teachers.items():
            rows = (chosen == position).nonzero()[:, 0]
            if len(rows):
                logp[rows] = self.networks.score_batch(batch.select(rows), evaluator).logp.to(logp)
        return logp

    def _as_reference_reads(self, batch: Batch) -> Batch:
        """Return the completions after the prompts that π_ref reads, in its tokens, without those for which there is none."""
        if self.reads_other_texts and not batch.reference_prompts:
            raise ConfigError(
                "Batch.reference_prompts is empty, and Reference.templates or tokenizer gives π_ref prompts of its own: fill it, "
                "as a run's rollout does, or set templates=() and tokenizer=None"
            )
        read = batch.as_reference_reads()
        return read if read.has_reference is None else replace(read, mask=read.mask & read.has_reference[:, None])

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """Update the weights on one rollout, by the algorithm's update rule."""
        if "kl_old" in algorithm.forward_needs:
            self.snapshot_old_policy()
        if self.config.routing_replay and batch.routed_experts is None:
            raise EngineError(
                "learner.routing_replay needs the experts that the sampler used, and this sampler does not report them "
                "(Generation.routed_experts): use --sampler.engine local, or set learner.routing_replay=false"
            )
        loading, compiled = self._move_optimizers(Optimizer.load), self.networks.compiled
        try:
            graphs = 0 if compiled is None else compiled.count_graphs()
            metrics = algorithm.update_rule(self.build_problem(batch, psi, algorithm))
            if compiled is not None:
                metrics |= {"compiled_graphs": Sum(float(compiled.count_graphs() - graphs))}
        finally:
            self.networks.release()
            moving = loading + self._move_optimizers(Optimizer.unload)
        if self.config.offload:
            metrics |= {"time/offload": Sum(moving)}
        self.rollouts += 1
        settings = algorithm.reference
        if self.average is not None and settings is not None and settings.ema is not None:
            self.average.update(self.optimizer, settings.ema)
        if settings is not None and self.reference is not None and settings.should_refresh(self.rollouts):
            copy_weights(self.model, self.reference.model)
            self._on_reference_refreshed()
            if settings.reset_optimizer:
                self.optimizer.clear_moments()  # the schedule continues
            metrics |= {"reference/refreshed": Sum(1.0)}
        return metrics if self.critic is None else metrics | self.critic.measure(batch)

    def build_problem(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> LocalProblem:
        """Return what an update rule works on: this rollout, with Ψ [B, T], on the current weights."""
        return LocalProblem(
            networks=self.networks,
            batch=batch,
            psi=psi,
            algorithm=algorithm,
            seed=self.version,
            curvature=self.curvature,
        )

    def cuts_long_texts(self) -> bool:
        """Return whether texts longer than a micro-batch are read in segments (`segments`)."""
        return self.networks.can_follow(1.0)

    def snapshot_old_policy(self) -> None:
        """Keep the current policy as the π_old of an exact KL."""
        if self.networks.old is None:
            self.networks = replace(self.networks, old=self._frozen_copy(self.evaluator, self.build))
        else:
            copy_weights(self.model, self.networks.old.model)

    def _on_reference_refreshed(self) -> None:
        """The reference is no longer the initial policy, so checkpoints must contain it."""
        self.refreshed = True
        if self.reference is not None and adapter_configs(self.reference.model):
            from policygrad.models.adapters import set_adapters_enabled

            set_adapters_enabled(self.reference.model, True)

    def _reference_weights(self) -> dict[str, Tensor]:
        """Return the reference's weights that a checkpoint holds, in the precision in which they are averaged."""
        assert self.reference is not None
        averages = {} if self.average is None else self.average.averages
        return {**trainable_parameters(self.reference.model, self.model), **averages}

    def publish(self) -> PublishedWeights:
        """Return the model's own tensors; a sampler that uses the same model copies nothing."""
        return PublishedWeights(self.version, dict(self.model.named_parameters()))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, values = self.optimizer.state()
        state = {"rollouts": self.rollouts, "refreshed": self.refreshed, "optimizer": values}
        if self.refreshed and self.reference is not None:
            tensors |= {f"reference/{name}": p.detach() for name, p in self._reference_weights().items()}
        for name, optimizer in self._auxiliary_optimizers().items():
            more, state[name] = optimizer.state()
            tensors |= {f"{name}/{key}": tensor for key, tensor in more.items()}
        return tensors, state

    def check_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Raise CheckpointError for an optimizer state that is incomplete; KeyError or TypeError if it is missing."""
        check_moments(tensors, values["optimizer"])
        for name in ("critic", "reward_model"):
            if name in values:
                check_moments(tensors, values[name], f"{name}/")

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        for name, optimizer in self._auxiliary_optimizers().items():
            stored = {n.removeprefix(f"{name}/"): t for n, t in tensors.items() if n.startswith(f"{name}/")}
            optimizer.restore(stored, values[name])
        if values["refreshed"] and self.reference is not None:
            for name, parameter in self._reference_weights().items():
                parameter.data.copy_(tensors[f"reference/{name}"])
            if self.average is not None:
                self.average.write()
            self._on_reference_refreshed()
        policy = {name: tensor for name, tensor in tensors.items() if not name.startswith(AUXILIARY_PREFIXES)}
        trained = {name.removeprefix("weights/") for name in policy if name.startswith("weights/")}
        if trained != set(self.optimizer.masters):
            example = sorted(trained ^ set(self.optimizer.masters))[0]
            raise CheckpointError(
                f"it was saved with different trainable parameters ({example}, for example): restore learner.trainable"
            )
        self.optimizer.restore(policy, values["optimizer"])
        self.rollouts, self.refreshed = values["rollouts"], values["refreshed"]

    def _move_optimizers(self, move: Callable[[Optimizer], None]) -> float:
        """Load or unload every optimizer; return the seconds that it took."""
        started = time.perf_counter()
        for optimizer in self.optimizers:
            move(optimizer)
        return time.perf_counter() - started

    def _auxiliary_optimizers(self) -> dict[str, Optimizer]:
        networks = {"critic": self.critic, "reward_model": self.reward_model}
        return {name: network.optimizer for name, network in networks.items() if network is not None}


def is_scored_elsewhere(algorithm: Algorithm) -> bool:
    """Return whether `logp_ref` comes from several teachers, or from a server, and not from one reference of the learner's."""
    reference = algorithm.reference
    return reference is not None and bool(reference.teachers or (reference.models and not reference.num_in_memory))


def check_vocabulary_sizes(algorithm: Algorithm, reference: Any, policy: Any) -> None:
    """Raise ConfigError if an exact KL would compare distributions over different vocabularies."""
    sizes = [int(m.get_output_embeddings().weight.shape[0]) for m in (reference, policy)]
    if "kl_ref" in algorithm.forward_needs and sizes[0] != sizes[1]:
        raise ConfigError(
            f"ExactKLToReference needs one vocabulary; the reference has {sizes[0]} logits and the policy {sizes[1]}. Use "
            "TeacherLogRatio() or KLToReference(), which read the sampled tokens alone"
        )


def is_live(algorithm: Algorithm) -> bool:
    """Return True if π_ref is the policy itself."""
    return algorithm.reference is not None and algorithm.reference.live


def check_expert_balance(balance: ExpertBalance | None, algorithm: Algorithm) -> None:
    """Raise ConfigError for an update rule whose steps would leave the experts' loss out."""
    if balance is not None and not algorithm.update_rule.uses_lr:
        raise ConfigError(
            f"{type(algorithm.update_rule).__name__} compares surrogates without the load-balancing loss that the model's config "
            "asks for (output_router_logits): set it to false there, or use GradientSteps()"
        )


def check_routing_replay(algorithm: Algorithm) -> None:
    """Raise ConfigError for parts that evaluate the policy without the replayed routes."""
    unsupported = {
        type(algorithm.update_rule).__name__: not algorithm.update_rule.uses_lr,
        "OptimalBaseline(norm='exact')": "grad_logp_sq_norm" in algorithm.needs,
        "an exact KL to the old policy": "kl_old" in algorithm.forward_needs,
        "an exact divergence from the live policy": "kl_ref" in algorithm.forward_needs and is_live(algorithm),
    }
    for name in (name for name, is_used in unsupported.items() if is_used):
        raise ConfigError(
            f"{name} evaluates the policy without replayed experts: set learner.routing_replay=false, or choose an algorithm "
            "without it, such as grpo"
        )
