"""One rollout on a local learner, as the first-order steps of core ask about it: gradients, updates, a β that adapts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch, Coefficients
from policygrad.core.kl_controllers import adapt_penalties
from policygrad.core.metrics import Max, Mean, Metrics, Sum, merge
from policygrad.core.objective import find_nonfinite_factors, measure_forward, surrogate, with_selected_tokens
from policygrad.core.outputs import explain_nonfinite
from policygrad.learners.local.curvature import Curvature
from policygrad.learners.local.networks import TrainedNetworks
from policygrad.learners.local.optimizer import describe_nonfinite
from policygrad.learners.local.packing import find_contributing
from policygrad.models.loading import at_least_float32


def average_objective(metrics: Metrics) -> Metrics:
    """The shares of one update add up to its objective; a rollout's steps are averaged, however many there are."""
    objective = metrics.get("objective")
    return metrics if objective is None else metrics | {"objective": Mean(objective.value)}


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalGradientProblem:
    """A rollout's share of completions for one update: all that a first-order step needs."""

    networks: TrainedNetworks
    batch: Batch
    psi: Tensor
    """[B, T]."""
    algorithm: Algorithm
    seed: int
    """The weights' version."""
    skip_inactive: bool = True
    """Completions that cannot move the weights are not computed. Off only to measure what that saves."""

    def split(self, epoch: int, minibatches: int) -> list[Self]:
        """Minibatches of whole groups, shuffled by (weights' version, epoch): of those groups that filters left something of,
        and as many as there are groups where those are fewer."""
        groups = torch.unique(self.batch.group[self.batch.mask.any(1)])
        if minibatches == 1 or not len(groups):
            return [self]
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(self.seed * 1009 + epoch))
        return [self._select_groups(groups[chunk]) for chunk in order.tensor_split(minibatches) if len(chunk)]

    def _select_groups(self, groups: Tensor) -> Self:
        rows = torch.isin(self.batch.group, groups).nonzero().squeeze(1)
        return replace(self, batch=self.batch.select(rows), psi=self.psi[rows])

    @property
    def is_pretraining(self) -> bool:
        """Whether the policy stands still while its critic is fitted."""
        return self.algorithm.critic is not None and self.algorithm.critic.pretrain > 0

    def accumulate(self) -> Metrics:
        """Forward and backward of the policy, its critic and its reward model; gradients add up in the learner."""
        return (
            ({} if self.is_pretraining else self.accumulate_policy())
            | self.accumulate_critic()
            | self.accumulate_reward_model()
        )

    def accumulate_critic(self) -> Metrics:
        """The critic's gradient; nothing without one."""
        if self.networks.critic is None or self.algorithm.critic is None:
            return {}
        return self.networks.critic.accumulate(self.batch, self.algorithm.critic)

    def accumulate_reward_model(self) -> Metrics:
        """The reward model's gradient; nothing without one."""
        return {} if self.networks.reward_model is None else self.networks.reward_model.accumulate(self.batch)

    def batch_with_selection(self) -> Batch:
        """The batch with what a part chooses among all of its tokens, under the policy as it is now."""
        part = self.algorithm.token_selector
        if part is None:
            return self.batch
        needs, networks = part.forward_needs, self.networks
        out = networks.score_batch(self.batch, networks.policy, needs - {"logp"}) if needs else None
        return with_selected_tokens(out, self.batch, self.psi, self.algorithm)

    def accumulate_policy(self, learning: bool = True) -> Metrics:
        """The policy's gradient, over the completions that can move the weights; or only what is measured, over all of them."""
        networks, batch, device = self.networks, self.batch_with_selection(), self.networks.device
        coefficients = self.algorithm.all_coefficients(batch)
        contributing = (
            find_contributing(batch, self.psi, coefficients) if learning and self.skip_inactive else batch.mask.any(1)
        )
        keep_groups = self.algorithm.gate.requires_full_groups  # a weight needs all of its group, those with Ψ = 0 too
        if keep_groups:
            contributing = torch.isin(batch.group, batch.group[contributing]) & batch.mask.any(1)
        rows = contributing.nonzero().squeeze(1)
        metrics: Metrics = {}
        bare = replace(batch, prompts=None, tokens=None, routed_experts=None)  # the equation does not read them
        needs = self.algorithm.forward_needs
        for part in networks.micro_batches(batch, rows, keep_groups, networks.dummy_pass(networks.policy, needs)):
            share = bare.select(part.rows).to(device)
            psi, coef = self.psi[part.rows].to(device), tuple(c[part.rows].to(device) for c in coefficients)
            with networks.backward_mode():
                expected = self._expected_gradient(share, psi, coef) if learning else None
                out = networks.forward(part, needs, expected)
                if learning:
                    torch.autograd.backward(surrogate(out, share, psi, self.algorithm, coef))
            networks.optimizer.accumulate_master_grads()
            metrics = merge(metrics, {"completions/computed": Sum(float(part.completions))})
            metrics = merge(metrics, measure_forward(out, share, psi, self.algorithm, coef))
        offered: Metrics = {"completions/offered": Sum(float(batch.mask.any(1).sum()))}
        metrics = {"completions/computed": Sum(0.0)} | offered | networks.division.reduce_metrics(metrics)
        routing = networks.policy.network.routing
        metrics |= {} if routing is None else networks.division.reduce_metrics(routing.pop_metrics())
        if "clip_ratio/low" in metrics:  # skipped completions have Ψ = 0: their tokens are not clipped, but count
            skipped = Mean(0.0, float(batch.mask.sum() - batch.mask[rows].sum()))
            metrics = merge(metrics, {"clip_ratio/low": skipped, "clip_ratio/high": skipped})
        return average_objective(metrics)

    def _expected_gradient(self, batch: Batch, psi: Tensor, coef: Coefficients) -> Tensor | None:
        """[b, T] the gradient that log π_θ will be given where it does not depend on log π_θ: all ratios are 1, and there are no
        terms. A wrong guess would cost time alone (see `head`)."""
        if batch.logp_old is not None or self.algorithm.terms or self.algorithm.forward_needs:
            return None
        logp = at_least_float32(torch.zeros_like(psi)).requires_grad_()
        return torch.autograd.grad(surrogate(logp, batch, psi, self.algorithm, coef), logp)[0]

    def descend(self) -> Metrics:
        """One AdamW step; without any gradient (no completion could move the weights) none is taken, and that is counted."""
        # first, for the critic has not moved when it refuses its gradient
        norm, lr = self.networks.optimizer.step(self._find_faulty_part)
        metrics = {} if self.networks.critic is None else self.networks.critic.descend()
        metrics |= {} if self.networks.reward_model is None else self.networks.reward_model.descend()
        if self.is_pretraining:
            return metrics | {"value_pretraining": Mean(1.0)}
        if norm is None:
            return metrics | {"updates/skipped": Sum(1.0)}
        return metrics | {"grad_norm": Max(norm), "lr": Mean(lr), "updates/taken": Sum(1.0)}

    @torch.no_grad()
    def _find_faulty_part(self) -> tuple[str, str]:
        """Name the part that made a gradient not finite, and say so in a sentence; "" where the model did, or no part alone. A pass
        over the completions: it is called after such a gradient only, by all processes that learn together."""
        networks, batch, needs = self.networks, self.batch_with_selection(), self.algorithm.forward_needs
        coefficients = self.algorithm.all_coefficients(batch)
        bare = replace(batch, prompts=None, tokens=None, routed_experts=None)
        rows, keep_groups = batch.mask.any(1).nonzero().squeeze(1), self.algorithm.gate.requires_full_groups
        nonfinite: Metrics = {}
        for pack in networks.micro_batches(batch, rows, keep_groups, networks.dummy_pass(networks.policy, needs)):
            share, psi = bare.select(pack.rows).to(networks.device), self.psi[pack.rows].to(networks.device)
            coef = tuple(c[pack.rows].to(networks.device) for c in coefficients)
            nonfinite = merge(
                nonfinite, find_nonfinite_factors(networks.forward(pack, needs), share, psi, self.algorithm, coef)
            )
        nonfinite = networks.division.reduce_metrics(nonfinite)
        first = next((key for key, bad in nonfinite.items() if bad.value), "logp")
        if first == "logp":
            return "", ""
        if first == "psi":
            return "the advantages", "The advantages it was given are NaN or infinite: correct what computes them"
        part = dict(self.algorithm.named_parts())[first]
        reads = part.needs | ({"logp_old"} if first in ("ratio", "gate") or first.startswith("terms") else set())
        return type(part).__name__, explain_nonfinite(part, first, batch, reads)


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalAdaptiveProblem(LocalGradientProblem):
    """What dual descent asks besides: where the policy is now, and the same rollout under another β."""

    @torch.no_grad()
    def measure(self) -> Metrics:
        """Of all sampled tokens, under the weights as they are."""
        return {} if self.is_pretraining else self.accumulate_policy(learning=False)

    def adapt(self, metrics: Metrics) -> Self | None:
        """With each β that adapts to KL(π_old‖π_θ) moved by `kl_old/last`; None once all are in their band."""
        algorithm = adapt_penalties(self.algorithm, self.batch, metrics)
        return None if algorithm is None else replace(self, algorithm=algorithm)


# One rollout on a local learner, as a trust region asks about it: the Fisher product, a look ahead, the constrained move.


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalProblem(LocalAdaptiveProblem):
    """All that any step asks."""

    curvature: Curvature

    def subsample(self, share: float) -> Self:
        """This share of the groups with a sampled token, at least one, drawn by the weights' version."""
        groups = torch.unique(self.batch.group[self.batch.mask.any(1)])
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(self.seed))
        return self._select_groups(groups[order[: max(1, round(share * len(groups)))]])

    def gradient(self) -> tuple[Tensor, Metrics]:
        """[P] of the surrogate objective; 0 while the policy stands still. Where it is not finite, the optimiser says."""
        metrics: Metrics = {"value_pretraining": Mean(1.0)} if self.is_pretraining else self.accumulate_policy()
        gradient = self.networks.optimizer.pop_flat_gradient()
        self.networks.optimizer.not_finite = self._describe_nonfinite(gradient)
        return gradient if self.is_pretraining else -gradient, metrics

    def inner_product(self, a: Tensor, b: Tensor) -> Tensor:
        """⟨a, b⟩ [] of two vectors [P], or of those that processes have shares of."""
        return self.networks.division.all_reduce((a @ b).cpu())

    def fisher(self, v: Tensor, sampled: bool) -> Tensor:
        """[P] F v, a mean over the sampled tokens. Where it is not finite, the optimiser says."""
        product = self.curvature.fisher(self.batch, v, sampled)
        optimizer = self.networks.optimizer
        if not optimizer.not_finite and (where := self._describe_nonfinite(product)):
            optimizer.not_finite = f", in a product with the Fisher matrix{where}"
        return product

    def _describe_nonfinite(self, vector: Tensor) -> str:
        """Where it is not finite, in words; "" = nowhere."""
        if math.isfinite(float(self.inner_product(vector, vector))):
            return ""
        optimizer = self.networks.optimizer
        return describe_nonfinite(optimizer.split(vector), optimizer.masters)

    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        """(surrogate objective, mean KL(π_old‖π_θ) in nats a sampled token) at θ + delta [P]."""
        return self.curvature.evaluate(self.batch, self.psi, self.algorithm, delta)

    def commit(self, delta: Tensor) -> None:
        """θ ← θ + delta [P]."""
        self.networks.optimizer.move(delta)

    def fit_critic(self) -> Metrics:
        """The critic's gradient and one AdamW step of it."""
        critic = self.networks.critic
        return {} if critic is None or self.algorithm.critic is None else self.accumulate_critic() | critic.descend()
