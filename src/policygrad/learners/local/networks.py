"""The networks that train, together: what a problem is made of, besides a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from policygrad.core import masked
from policygrad.core.aggregation import TokenMean
from policygrad.core.auxiliary import Critic, ImplicitReward, explained_variance
from policygrad.core.batch import Batch, Forward, require_field
from policygrad.core.metrics import Max, Mean, Metric, Metrics, Sum, merge
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.local.forward import (
    Evaluator,
    backward_mode,
    backward_zero,
    get_backbone,
    recompute_activations,
)
from policygrad.learners.local.optimizer import Optimizer
from policygrad.learners.local.packing import Pack, WorkDivision, micro_batch_tokens, pack_micro_batches
from policygrad.models.loading import at_least_float32
from policygrad.models.replica import ModelFactory, clone_model, enable_gradients

# V_φ: a value head with or without a backbone, its own parameters and its own AdamW. A policy step never moves them.


class ValueNetwork(nn.Module):
    """A head on last hidden states: of a backbone of its own, which starts as the policy's, or of the policy itself, under
    stop-gradient.

    The head's last layer starts at 0, so V = 0. The policy is held in a closure: its parameters are none of the critic's.
    """

    def __init__(
        self, policy: Evaluator, critic: Critic, recompute: bool = False, build: ModelFactory | None = None
    ) -> None:
        super().__init__()
        first = next(policy.model.parameters())
        if critic.backbone == "separate":
            model = clone_model(policy.model, build)
            if recompute:
                recompute_activations(model)
            self.backbone = get_backbone(enable_gradients(model, policy.model))
            dtype, backbone = first.dtype, self.backbone
            self.states: Callable[[Pack], Tensor] = lambda part: policy.network_for(part).hidden(part, backbone)
        else:  # a head is small: bf16 would save nothing
            dtype = first.dtype if first.dtype == torch.float64 else torch.float32
            self.states = lambda part: _fixed_states(policy, part).to(dtype)
        self.head = _build_head(policy.network.hidden_size, critic.hidden).to(first.device, dtype)

    def forward(self, part: Pack) -> Tensor:
        """[b, T] the value before each token is taken: at the position that predicts it. 0 off the mask."""
        values: Tensor = self.head(self.states(part)).squeeze(-1).float()
        return torch.where(part.mask, values.index_select(0, part.predictor.flatten()).view_as(part.mask), 0.0)


def _build_head(width: int, hidden: int) -> nn.Module:
    last = nn.Linear(hidden or width, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), last) if hidden else last


@torch.no_grad()
def _fixed_states(policy: Evaluator, part: Pack) -> Tensor:
    return policy.network_for(part).hidden(part)


@dataclass(eq=False)
class ValueModel:
    """Evaluates and fits the value network, micro-batch by micro-batch."""

    network: ValueNetwork
    optimizer: Optimizer
    evaluator: Evaluator
    config: LearnerConfig
    division: WorkDivision = field(default_factory=WorkDivision)

    @classmethod
    def of(
        cls,
        evaluator: Evaluator,
        critic: Critic,
        config: LearnerConfig,
        adam: OptimizerConfig,
        lr: float | None,
        updates: tuple[int, int],
        build: ModelFactory | None = None,
        division: WorkDivision | None = None,
    ) -> ValueModel:
        """A critic that starts from the policy's weights. `lr`: the policy's; `updates`: rollouts, and updates of the
        critic in each, for the schedule."""
        rollouts, each = updates
        total = (rollouts + min(rollouts, critic.pretrain) * (critic.pretrain_epochs - 1)) * each
        network, division = (
            ValueNetwork(evaluator, critic, config.gradient_checkpointing, build),
            division or WorkDivision(),
        )
        division.shard(network)
        return cls(network, Optimizer(network, adam, critic.learning_rate(lr), total), evaluator, config, division)

    def _micro_batches(self, batch: Batch) -> Iterator[Pack]:
        made, budget = (
            partial(pack_micro_batches, batch, torch.arange(len(batch.mask))),
            micro_batch_tokens(self.config, self.network),
        )
        return self.division.divide(made, budget, lambda part: backward_zero(self.network(part.to(self._device))))

    @property
    def _device(self) -> torch.device:
        return next(self.network.parameters()).device

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Batch:
        """The batch with `values` [B, T], float32."""
        out, device = torch.zeros(batch.mask.shape), self._device
        for part in self._micro_batches(batch):
            out[part.rows] = self.network(part.to(device)).cpu()
        return replace(batch, values=self.division.all_reduce(out))

    def add_bootstrap(self, batch: Batch) -> Batch:
        """The batch with `bootstrap` [B], float32: the value after the last sampled token of what was cut off, 0 elsewhere.

        Raises:
            ConfigError: a batch that does not say what was cut off.
        """
        cut = require_field(batch.truncated, self, "truncated") & batch.mask.any(1)
        width = batch.mask.shape[1]
        end = width - batch.mask.int().flip(1).argmax(1)  # what would come next has no token yet: any id stands for it
        after = cut[:, None] & (torch.arange(width + 1) == end[:, None])
        tokens, depth = (
            None if x is None else torch.nn.functional.pad(x, (0, 1)) for x in (batch.tokens, batch.positions)
        )
        if depth is not None:  # it follows the last one that was sampled, whatever stands there
            depth = depth.scatter(1, end[:, None], 1 + depth.gather(1, end[:, None] - 1))
        text = Batch(
            mask=after, group=batch.group, reward=batch.reward, tokens=tokens, prompts=batch.prompts, positions=depth
        )
        return replace(
            batch, bootstrap=masked.apply_mask(require_field(self.evaluate(text).values, self, "values"), after).sum(1)
        )

    def accumulate(self, batch: Batch, critic: Critic) -> Metrics:
        """Adds the gradient of the value loss, a mean over the step's sampled tokens; in pre-training the last of several,
        after a step for each of the others."""
        for _ in range(critic.pretrain_epochs - 1 if critic.pretrain else 0):
            self._add_gradient(batch, critic)
            self.descend()
        return self._add_gradient(batch, critic)

    def _add_gradient(self, batch: Batch, critic: Critic) -> Metrics:
        assert batch.returns is not None
        assert batch.values is not None
        coefficient = TokenMean()(batch.mask, batch.group).to(batch.reward.dtype)
        bare = replace(batch, prompts=None, tokens=None, routed_experts=None)
        device, metrics = self._device, dict[str, Metric]()
        self.network.train(self.config.gradient_checkpointing)
        for part in self._micro_batches(batch):
            share, c = bare.select(part.rows).to(device), coefficient[part.rows].to(device)
            assert share.returns is not None
            loss = (c * critic.loss(self.network(part.to(device)), share, share.returns)).sum()
            torch.autograd.backward(loss)
            self.optimizer.accumulate_master_grads()
            metrics = merge(metrics, {"value_loss": Sum(loss.detach().double())})
        self.network.eval()
        metrics = self.division.reduce_metrics(metrics)
        return {"value_loss": Mean(metrics["value_loss"].value)} if metrics else {}

    def descend(self) -> Metrics:
        """One AdamW step of the critic."""
        norm, _ = self.optimizer.step()
        return {} if norm is None else {"value_grad_norm": Max(norm)}


def measure_values(batch: Batch) -> Metrics:
    """How much of the fresh returns the critic foresaw, before it is fitted to them."""
    assert batch.returns is not None
    assert batch.values is not None
    seen = batch.values[batch.mask].double()
    return {
        "explained_variance": Mean(explained_variance(batch.values, batch.returns, batch.mask)),
        "value": Mean(float(seen.sum()), float(len(seen))),
    }


# π_φ of an implicit reward: a language model of its own, with its own AdamW. A policy step never moves it.


@dataclass(frozen=True, eq=False)
class ImplicitRewardModel:
    """π_φ, fitted micro-batch by micro-batch."""

    part: ImplicitReward
    evaluator: Evaluator
    """Of π_φ."""
    optimizer: Optimizer
    config: LearnerConfig
    division: WorkDivision = field(default_factory=WorkDivision)

    @classmethod
    def of(
        cls,
        evaluator: Evaluator,
        part: ImplicitReward,
        config: LearnerConfig,
        adam: OptimizerConfig,
        lr: float | None,
        updates: int,
        division: WorkDivision | None = None,
    ) -> ImplicitRewardModel:
        """Of the evaluator's model, which starts as the reference, so that r_φ = 0. `lr`: the policy's; `updates`: of the whole
        run, for the schedule."""
        model = evaluator.model
        if config.gradient_checkpointing:
            recompute_activations(model)
        optimizer = Optimizer(model, adam, part.learning_rate(lr), updates)
        return cls(part, evaluator, optimizer, config, division or WorkDivision())

    @property
    def _device(self) -> torch.device:
        return next(self.evaluator.model.parameters()).device

    def accumulate(self, batch: Batch) -> Metrics:
        """Adds the gradient of the cross-entropy, a mean over the update's completions."""
        rows = select_trained_rows(batch)
        if not len(rows):
            return {}
        bare, metrics = replace(batch, prompts=None, tokens=None), Metrics()
        made, budget = partial(pack_micro_batches, batch, rows), micro_batch_tokens(self.config, self.evaluator.model)
        for part in self.division.divide(made, budget, self._dummy_pass):
            with backward_mode(self.evaluator.model, self.config.gradient_checkpointing):
                logp = self.evaluator(part.to(self._device))
                each = self.part.loss(logp, bare.select(part.rows).to(self._device))
                loss = each.sum() / len(rows)
                torch.autograd.backward(loss)
            self.optimizer.accumulate_master_grads()
            metrics = merge(metrics, {"reward_model/loss": Sum(float(loss.detach()))})
        return {"reward_model/loss": Mean(self.division.reduce_metrics(metrics)["reward_model/loss"].value)}

    def _dummy_pass(self, part: Pack) -> None:
        with backward_mode(self.evaluator.model, self.config.gradient_checkpointing):
            backward_zero(self.evaluator(part.to(self._device)))

    def descend(self) -> Metrics:
        """One AdamW step of φ."""
        norm, _ = self.optimizer.step()
        return {} if norm is None else {"reward_model/grad_norm": Max(norm)}


def select_trained_rows(batch: Batch) -> Tensor:
    """[n] completions that φ is fitted to: those with a sampled token that a filter has not given weight 0."""
    selected = batch.mask.any(1)
    if batch.weight is not None:
        selected = selected & ((batch.weight != 0) & batch.mask).any(1)
    return selected.nonzero().squeeze(1)


@dataclass(frozen=True, eq=False)
class TrainedNetworks:
    """The policy with its optimiser, the critic and the reward model with their own, the policy as it was, and the reference."""

    policy: Evaluator
    optimizer: Optimizer
    config: LearnerConfig
    critic: ValueModel | None = None
    old: Evaluator | None = None
    """π_old, when the rollout's updates began; only where an exact KL(π_old‖π_θ) is asked for."""
    reward_model: ImplicitRewardModel | None = None
    reference: Evaluator | None = None
    division: WorkDivision = field(default_factory=WorkDivision)

    @property
    def device(self) -> torch.device:
        """The policy's."""
        return next(self.policy.model.parameters()).device

    def micro_batches(
        self,
        batch: Batch,
        rows: Tensor | None = None,
        keep_groups: bool = False,
        dummy_pass: Callable[[Pack], object] | None = None,
    ) -> Iterator[Pack]:
        """The completions `rows`, or all, in micro-batches: this process's share; `whole`: of whole groups; `idle`: a pass like
        those they are for, on the device, which adds nothing; None = one of the policy alone."""
        rows = torch.arange(len(batch.mask)) if rows is None else rows
        made, budget = (
            partial(pack_micro_batches, batch, rows, keep_groups=keep_groups),
            micro_batch_tokens(self.config, self.policy.model),
        )
        dummy = dummy_pass or self.dummy_pass(self.policy)
        return self.division.divide(made, budget, lambda part: dummy(part.to(self.device)))

    def dummy_pass(self, evaluator: Evaluator, needs: frozenset[str] = frozenset()) -> Callable[[Pack], None]:
        """A pass of the evaluator that adds nothing to any gradient."""

        def one(part: Pack) -> None:
            with backward_mode(evaluator.model, self.config.gradient_checkpointing):
                backward_zero(evaluator.forward(part, needs, self.old, self.reference).logp)

        return one

    def forward(self, part: Pack, needs: frozenset[str], expected: Tensor | None = None) -> Forward:
        """log π_θ of a micro-batch, and what the algorithm's loss terms read beside it."""
        return self.policy.forward(part.to(self.device), needs, self.old, self.reference, expected)

    @torch.no_grad()
    def score_batch(self, batch: Batch, evaluator: Evaluator, needs: frozenset[str] = frozenset()) -> Forward:
        """A pass of the policy, or another model, over all completions: [B, T] on the CPU, without graph."""
        names = ("logp", *sorted(needs))
        empty = at_least_float32(torch.zeros(batch.mask.shape, dtype=self.optimizer.dtype))
        outputs = {name: empty.clone() for name in names}
        for part in self.micro_batches(batch, dummy_pass=self.dummy_pass(evaluator, needs)):
            out = evaluator.forward(part.to(self.device), needs, self.old, self.reference)
            for name in names:
                outputs[name][part.rows] = getattr(out, name).cpu()
        return Forward(**{name: self.division.all_reduce(x) for name, x in outputs.items()})

    def release(self) -> None:
        """Of the policy and of what it is compared with (`Evaluator.release`)."""
        for evaluator in (self.policy, self.old, self.reference):
            if evaluator is not None:
                evaluator.release()

    def backward_mode(self) -> AbstractContextManager[None]:
        """The policy in the mode for backward passes."""
        return backward_mode(self.policy.model, self.config.gradient_checkpointing)
