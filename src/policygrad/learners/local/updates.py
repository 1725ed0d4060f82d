"""One rollout as the update rules of core see it: gradients and steps, adaptive β, and what a trust region needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch, Coefficients
from policygrad.core.kl_controllers import adapt_penalties
from policygrad.core.metrics import Max, Mean, Metrics, Sum, merge
from policygrad.core.objective import find_nonfinite_factors, measure_forward, surrogate, with_selected_tokens
from policygrad.core.outputs import explain_nonfinite
from policygrad.core.precision import move
from policygrad.learners.local.networks import TrainedNetworks
from policygrad.learners.local.optimizer import describe_nonfinite
from policygrad.learners.local.packing import Pack, find_contributing
from policygrad.models.loading import at_least_float32
from policygrad.utils.out_of_memory import keep_gradients
from policygrad.utils.spans import span

if TYPE_CHECKING:
    from policygrad.learners.local.curvature import Curvature
    from policygrad.learners.local.expert_balance import ExpertBalance, Load


def average_objective(metrics: Metrics) -> Metrics:
    """Turn the sum over an update's micro-batches into its objective, which is then averaged over a rollout's updates."""
    objective = metrics.get("objective")
    return metrics if objective is None else metrics | {"objective": Mean(objective.value)}


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalGradientProblem:
    """The completions of one update, for update rules of gradient steps."""

    networks: TrainedNetworks
    batch: Batch
    psi: Tensor  # [B, T]
    algorithm: Algorithm
    seed: int  # version of the weights
    skip_inactive: bool = True
    """Do not compute completions that have no gradient; False only to measure what that saves."""

    def split(self, epoch: int, minibatches: int) -> list[Self]:
        """Split into minibatches of whole groups, shuffled by (version, epoch).

        Groups that filters left empty do not count; with fewer groups than minibatches there are as many minibatches as groups.
        """
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
        """The policy is fixed while its critic is fitted."""
        return self.algorithm.critic is not None and self.algorithm.critic.pretrain > 0

    def accumulate(self) -> Metrics:
        """Accumulate the gradients of the policy, its critic and its reward model."""
        metrics = {} if self.is_pretraining else self.accumulate_policy()
        if self.networks.critic is not None and self.algorithm.critic is not None:
            metrics |= self.networks.critic.accumulate(self.batch, self.algorithm.critic)
        if self.networks.reward_model is not None:
            metrics |= self.networks.reward_model.accumulate(self.batch)
        return metrics

    def batch_with_selection(self) -> Batch:
        """Return the batch with the tokens that a part selects among all, under the current policy."""
        part = self.algorithm.token_selector
        if part is None:
            return self.batch
        needs, networks = part.forward_needs, self.networks
        out = networks.score_batch(self.batch, networks.policy, needs - {"logp"}) if needs else None
        return with_selected_tokens(out, self.batch, self.psi, self.algorithm)

    def accumulate_policy(self, learning: bool = True) -> Metrics:
        """Accumulate the policy's gradient over the completions that have one; `learning=False` only measures, over all."""
        networks, batch = self.networks, self.batch_with_selection()
        coefficients = self.algorithm.all_coefficients(batch)
        balance = networks.balance if learning else None
        is_skipping = learning and self.skip_inactive and balance is None  # the experts of every token are balanced
        contributing = find_contributing(batch, self.psi, coefficients) if is_skipping else batch.mask.any(1)
        if self.algorithm.gate.requires_full_groups:  # a weight needs all of its group, also where Ψ = 0
            contributing = torch.isin(batch.group, batch.group[contributing]) & batch.mask.any(1)
        rows = contributing.nonzero().squeeze(1)
        load = None
        memory = networks.division.memory
        if balance is not None and len(rows):
            with span("experts' load"):
                load = memory.run(lambda: self._measure_load(balance, batch, rows, coefficients))
        run = partial(self._run_micro_batches, batch, rows, coefficients, learning, load)
        undo = partial(self._clear, keep_gradients(networks.optimizer.parameters, networks.optimizer.masters))
        with networks.count_experts(learning) as report_experts:
            metrics, balance_loss = memory.run(lambda: networks.run_compiled(run, undo), undo)
            expert_load = report_experts()
        offered: Metrics = {"completions/offered": Sum(float(batch.mask.any(1).sum()))}
        zeros = {name: Sum(0.0) for name in ("completions/computed", "tokens/offered", "tokens/computed")}
        metrics = zeros | offered | networks.division.reduce_metrics(metrics)
        metrics |= {} if balance is None or load is None else balance.report(balance_loss)
        routing = networks.policy.network.routing
        if routing is not None:
            metrics |= networks.division.reduce_metrics(routing.pop_metrics(), by_node=True)
        metrics |= expert_load
        if "clip_ratio/low" in metrics:  # skipped completions have Ψ = 0: their tokens count as not clipped
            skipped = Mean(0.0, float(batch.mask.sum() - batch.mask[rows].sum()))
            metrics = merge(metrics, {"clip_ratio/low": skipped, "clip_ratio/high": skipped})
        return average_objective(metrics)

    def _run_micro_batches(
        self, batch: Batch, rows: Tensor, coefficients: Coefficients, learning: bool, load: Load | None
    ) -> tuple[Metrics, float]:
        """Return what the passes measure, and the load-balancing loss; `learning` accumulates the gradients too."""
        networks, balance, needs = self.networks, self.networks.balance, self.algorithm.forward_needs
        metrics, balance_loss = Metrics(), 0.0
        for part, share, psi, coef in self._micro_batches(batch, rows, coefficients):
            name = "forward and backward" if learning else "forward"
            with span(name, completions=part.completions), networks.backward_mode():
                # Known if it does not depend on log π_θ: ratios of 1 and no terms. A wrong guess would only cost time.
                expected: Tensor | None = None
                if learning and batch.logp_old is None and not self.algorithm.terms and not needs:
                    zero = at_least_float32(torch.zeros_like(psi)).requires_grad_()
                    expected = torch.autograd.grad(surrogate(zero, share, psi, self.algorithm, coef), zero)[0]
                if balance is None or load is None:
                    out = networks.forward(part, needs, expected)
                    if learning:
                        torch.autograd.backward(surrogate(out, share, psi, self.algorithm, coef))
                else:
                    part = part.to(networks.device)
                    with balance.observe() as logits:
                        out = networks.forward(part, needs, expected)
                    more = balance.loss_of_pack(networks.policy, part, logits, load)
                    torch.autograd.backward(surrogate(out, share, psi, self.algorithm, coef) + more)
                    balance_loss += float(more.detach())
            networks.optimizer.accumulate_master_grads()
            counts = {"completions/computed": part.completions, "tokens/computed": part.num_computed}
            counts["tokens/offered"] = int(part.reads.sum())
            metrics = merge(metrics, {name: Sum(float(count)) for name, count in counts.items()})
            metrics = merge(metrics, measure_forward(out, share, psi, self.algorithm, coef))
        networks.optimizer.accumulate_master_grads()  # of what the last micro-batches followed
        return metrics, balance_loss

    def _measure_load(self, balance: ExpertBalance, batch: Batch, rows: Tensor, coefficients: Coefficients) -> Load:
        """Count how often the completions' tokens chose each expert."""
        return balance.measure(
            self.networks.policy, (part for part, *_ in self._micro_batches(batch, rows, coefficients))
        )

    def _clear(self, put_back: Callable[[], None]) -> None:
        """Forget what an unfinished pass over the micro-batches has accumulated; `put_back` gives gradients of before."""
        put_back()
        if (load := self.networks.policy.network.load) is not None:
            load.pop_loads()
        if self.networks.policy.network.routing is not None:
            self.networks.policy.network.routing.pop_metrics()

    def _micro_batches(
        self, batch: Batch, rows: Tensor, coefficients: Coefficients
    ) -> Iterator[tuple[Pack, Batch, Tensor, Coefficients]]:
        """Iterate over micro-batches of the completions `rows`, each with its share of the batch, of Ψ and of the coefficients."""
        networks, needs, device = self.networks, self.algorithm.forward_needs, self.networks.device
        bare = batch.without_texts()  # which the equation does not read
        dummy_pass = networks.dummy_pass(networks.policy, needs)
        keep_groups = self.algorithm.gate.requires_full_groups
        read = replace(batch, mask=self.algorithm.read_tokens(batch))
        options: dict[str, Any] = {"rows": rows, "keep_groups": keep_groups, "with_reference": "kl_ref" in needs}
        options["can_follow"] = networks.can_follow
        for part in networks.micro_batches(read, dummy_pass, **options):
            coef = tuple(move(c[part.rows], device) for c in coefficients)
            yield part, bare.select(part.rows).to(device), move(self.psi[part.rows], device), coef

    def descend(self) -> Metrics:
        """Take one step of the optimizer; none, which is counted, if no completion had a gradient."""
        # first: if it refuses its gradient the critic must not have moved
        with span("optimizer step"):
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
        """Return the part that made a gradient not finite and a sentence about it; ("", "") if the model did, or no part alone."""
        batch, needs = self.batch_with_selection(), self.algorithm.forward_needs
        rows, coefficients = batch.mask.any(1).nonzero().squeeze(1), self.algorithm.all_coefficients(batch)

        def count() -> Metrics:
            counts = Metrics()
            for pack, share, psi, coef in self._micro_batches(batch, rows, coefficients):
                out = self.networks.forward(pack, needs)
                counts = merge(counts, find_nonfinite_factors(out, share, psi, self.algorithm, coef))
            return counts

        counts = self.networks.division.memory.run(count)
        counts = self.networks.division.reduce_metrics(counts)
        first = next((key for key, count in counts.items() if count.value), "logp")
        if first == "logp":
            return "", ""
        if first == "psi":
            return "the advantages", "The advantages are NaN or infinite: correct what computes them"
        part = dict(self.algorithm.named_parts())[first]
        reads_old = first in ("ratio", "gate") or first.startswith("terms")
        return type(part).__name__, explain_nonfinite(part, first, batch, *(["logp_old"] if reads_old else []))


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalProblem(LocalGradientProblem):
    """Adds what dual descent and a trust region need: the current KL, the same rollout under another β, and the curvature."""

    curvature: Curvature | None = None
    """None = the update rule takes gradient steps, which need none."""

    @torch.no_grad()
    def measure(self) -> Metrics:
        """Measure all sampled tokens under the current weights."""
        return {} if self.is_pretraining else self.accumulate_policy(learning=False)

    def adapt(self, metrics: Metrics) -> Self | None:
        """Return the problem with each β that targets KL(π_old‖π_θ) adapted to `kl_old/last`; None once all are in their band."""
        algorithm = adapt_penalties(self.algorithm, self.batch, metrics)
        return None if algorithm is None else replace(self, algorithm=algorithm)

    def subsample(self, share: float) -> Self:
        """Return the problem with this share of the groups that have a sampled token, at least one, chosen by the version."""
        groups = torch.unique(self.batch.group[self.batch.mask.any(1)])
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(self.seed))
        return self._select_groups(groups[order[: max(1, round(share * len(groups)))]])

    def gradient(self) -> tuple[Tensor, Metrics]:
        """Return [P] the gradient of the surrogate objective, 0 in pre-training; `Optimizer.not_finite` describes a bad one."""
        metrics: Metrics = {"value_pretraining": Mean(1.0)} if self.is_pretraining else self.accumulate_policy()
        gradient = self.networks.optimizer.pop_flat_gradient()
        self.networks.optimizer.not_finite = self._describe_nonfinite(gradient)
        return gradient if self.is_pretraining else -gradient, metrics

    def inner_product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ⟨a, b⟩ [] of two vectors [P], also if they are sharded."""
        return self.networks.division.all_reduce((a @ b).cpu())

    def fisher(self, v: Tensor, sampled: bool) -> Tensor:
        """Return [P] F v, a mean over the sampled tokens; `Optimizer.not_finite` describes a bad one."""
        assert self.curvature is not None
        with span("fisher product"):
            product = self.curvature.fisher(self.batch, v, sampled)
        optimizer = self.networks.optimizer
        if not optimizer.not_finite and (where := self._describe_nonfinite(product)):
            optimizer.not_finite = f", in a product with the Fisher matrix{where}"
        return product

    def _describe_nonfinite(self, vector: Tensor) -> str:
        """Return as text where a vector is not finite; empty if it is."""
        if math.isfinite(float(self.inner_product(vector, vector))):
            return ""
        optimizer = self.networks.optimizer
        return describe_nonfinite(optimizer.split(vector), optimizer.masters)

    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        """Return (surrogate objective, mean KL(π_old‖π_θ) in nats per sampled token) at θ + delta [P]."""
        assert self.curvature is not None
        with span("line search"):
            return self.curvature.evaluate(self.batch, self.psi, self.algorithm, delta)

    def commit(self, delta: Tensor) -> None:
        """θ ← θ + delta [P]."""
        self.networks.optimizer.move(delta)

    def fit_critic(self) -> Metrics:
        """Take one step of the critic's optimizer."""
        critic, settings = self.networks.critic, self.algorithm.critic
        return {} if critic is None or settings is None else critic.accumulate(self.batch, settings) | critic.descend()
