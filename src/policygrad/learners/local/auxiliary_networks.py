"""The networks that train beside the policy, each with its own optimizer: a critic, and an implicit reward model; and a reference
that follows the policy as its moving average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.core import masked
from policygrad.core.aggregation import TokenMean
from policygrad.core.auxiliary import Critic, ImplicitReward, explained_variance
from policygrad.core.batch import Batch
from policygrad.core.metrics import Max, Mean, Metric, Metrics, Sum, merge
from policygrad.core.precision import move, widen
from policygrad.learners.base import LearnerSpec
from policygrad.learners.local.forward import (
    Evaluator,
    backward_mode,
    backward_zero,
    get_backbone,
    recompute_activations,
)
from policygrad.learners.local.networks import reads_segments
from policygrad.learners.local.optimizer import Optimizer
from policygrad.learners.local.packing import Pack, WorkDivision
from policygrad.models.loading import at_least_float32
from policygrad.models.replica import ModelFactory, clone_model, enable_gradients
from policygrad.utils.out_of_memory import keep_gradients
from policygrad.utils.spans import span


class ValueNetwork(nn.Module):
    """V_φ: a head on last hidden states, of a backbone that starts as the policy's or of the policy itself under stop-gradient.

    The head's last layer starts at 0, so V = 0. The policy is held in a closure, so its parameters are not the critic's.
    """

    def __init__(
        self, policy: Evaluator, critic: Critic, recompute: bool = False, build: ModelFactory | None = None
    ) -> None:
        super().__init__()
        first = next(policy.model.parameters())
        self.share, self.add_up = policy.share, policy.add_up
        if critic.backbone == "separate":
            model = clone_model(policy.model, build)
            if recompute:
                recompute_activations(model)
            self.backbone = get_backbone(enable_gradients(model, policy.model))
            dtype, backbone = first.dtype, self.backbone
            self.states: Callable[[Pack], Tensor] = lambda part: policy.network_for(part).hidden(part, backbone)
            self.lead: Callable[[Pack, Any], None] = lambda part, call: policy.lead(part, backbone, call)
        else:  # the head is small: bf16 would save nothing
            dtype = first.dtype if first.dtype == torch.float64 else torch.float32

            @torch.no_grad()
            def policy_states(part: Pack) -> Tensor:
                return policy.network_for(part).hidden(part).to(dtype)

            @torch.no_grad()
            def policy_lead(part: Pack, call: Any) -> None:
                policy.lead(part, get_backbone(policy.model))

            self.states, self.lead = policy_states, policy_lead
        width, hidden = policy.network.hidden_size, critic.hidden
        last = nn.Linear(hidden or width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        head = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), last) if hidden else last
        self.head = head.to(first.device, dtype)

    def forward(self, part: Pack) -> Tensor:
        """Return [b, T] the value before each token, read at the position that predicts it; 0 off the mask."""
        part = self.share(part)
        values: Tensor = self.head(self.states(part)).squeeze(-1).float()
        placed = values.index_select(0, part.predictor.flatten()).view_as(part.mask)
        return self.add_up(torch.where(part.mask, placed, 0.0))


class ValueModel:
    """Evaluates and fits the value network, one micro-batch at a time. Policy updates never change it."""

    def __init__(
        self,
        evaluator: Evaluator,
        critic: Critic,
        spec: LearnerSpec,
        build: ModelFactory | None = None,
        division: WorkDivision | None = None,
    ) -> None:
        self.config, self.division = spec.config, division or WorkDivision()
        self.can_follow = partial(reads_segments, evaluator, self.config, self.division, None)
        self.network = ValueNetwork(evaluator, critic, spec.config.gradient_checkpointing, build)
        self._root = self.division.shard(self.network)
        passes = spec.steps + min(spec.steps, critic.pretrain) * (critic.pretrain_epochs - 1)
        total = passes * spec.algorithm.update_rule.critic_updates
        rate, offload = critic.learning_rate(spec.lr), spec.config.offload
        self.optimizer = Optimizer(self.network, spec.optimizer, rate, total, offload=offload)

    def _micro_batches(self, batch: Batch) -> Iterator[Pack]:
        return self.division.micro_batches(
            batch,
            self.config,
            self.network,
            lambda part: backward_zero(self._predict(part)),
            can_follow=self.can_follow,
        )

    def _predict(self, part: Pack) -> Tensor:
        """Return [b, T] the values of a micro-batch."""
        part = part.to(self._device)
        self.network.lead(part, self._root)
        return self._root(lambda: self.network(part))

    @property
    def _device(self) -> torch.device:
        return next(self.network.parameters()).device

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Batch:
        """Return the batch with `values` [B, T], float32."""
        out = torch.zeros(batch.mask.shape)

        def work() -> None:
            for part in self._micro_batches(batch):
                with span("critic forward", completions=part.completions):
                    out[part.rows] = self._predict(part).cpu()

        self.division.memory.run(work)
        return replace(batch, values=self.division.all_reduce(out))

    def add_bootstrap(self, batch: Batch) -> Batch:
        """Return the batch with `bootstrap` [B], float32: the value after the last sampled token of truncated completions, else 0.

        Raises:
            ConfigError: The batch does not tell which completions were truncated.
        """
        truncated = batch.require("truncated", self) & batch.mask.any(1)
        width = batch.mask.shape[1]
        end = width - batch.mask.int().flip(1).argmax(1)  # the position after it has no token yet, and any id will do
        after = truncated[:, None] & (torch.arange(width + 1) == end[:, None])
        pad = partial(nn.functional.pad, pad=(0, 1))
        tokens, positions = (None if x is None else pad(x) for x in (batch.tokens, batch.positions))
        if positions is not None:  # it follows the last sampled token, whatever comes after that in the row
            positions = positions.scatter(1, end[:, None], 1 + positions.gather(1, end[:, None] - 1))
        text = Batch(
            mask=after,
            group=batch.group,
            reward=batch.reward,
            tokens=tokens,
            prompts=batch.prompts,
            positions=positions,
            prompt_media=batch.prompt_media,
            completion_media=batch.completion_media,
        )
        values = self.evaluate(text).require("values", self)
        return replace(batch, bootstrap=masked.apply_mask(values, after).sum(1))

    def accumulate(self, batch: Batch, critic: Critic) -> Metrics:
        """Add the gradient of the value loss, a mean over the step's sampled tokens.

        In pre-training there are several epochs: a step follows each but the last, whose gradient is left to the caller.
        """
        for _ in range(critic.pretrain_epochs - 1 if critic.pretrain else 0):
            self._add_gradient(batch, critic)
            self.descend()
        return self._add_gradient(batch, critic)

    def _add_gradient(self, batch: Batch, critic: Critic) -> Metrics:
        assert batch.returns is not None
        assert batch.values is not None
        coefficient = TokenMean()(batch.mask, batch.group).to(batch.reward.dtype)
        bare, device = batch.without_texts(), self._device

        def work() -> Metrics:
            metrics = dict[str, Metric]()
            self.network.train(self.config.gradient_checkpointing)
            for part in self._micro_batches(batch):
                share, c = bare.select(part.rows).to(device), move(coefficient[part.rows], device)
                assert share.returns is not None
                with span("critic forward and backward", completions=part.completions):
                    loss = (c * critic.loss(self._predict(part), share, share.returns)).sum()
                    torch.autograd.backward(loss)
                self.optimizer.accumulate_master_grads()
                metrics = merge(metrics, {"value_loss": Sum(widen(loss.detach()))})
            self.optimizer.accumulate_master_grads()  # of what the last micro-batches followed
            self.network.eval()
            return metrics

        metrics = self.division.memory.run(work, keep_gradients(self.optimizer.parameters, self.optimizer.masters))
        metrics = self.division.reduce_metrics(metrics)
        return {"value_loss": Mean(metrics["value_loss"].value)} if metrics else {}

    def descend(self) -> Metrics:
        norm, _ = self.optimizer.step()
        return {} if norm is None else {"value_grad_norm": Max(norm)}

    @staticmethod
    def measure(batch: Batch) -> Metrics:
        """Measure how much of a batch's new returns the critic predicted before it was fitted to them."""
        assert batch.returns is not None
        assert batch.values is not None
        values = batch.values[batch.mask].double()
        return {
            "explained_variance": Mean(explained_variance(batch.values, batch.returns, batch.mask)),
            "value": Mean(float(values.sum()), float(len(values))),
        }


class ImplicitRewardModel:
    """π_φ of an implicit reward, a language model fitted one micro-batch at a time. Policy updates never change it."""

    def __init__(
        self, evaluator: Evaluator, part: ImplicitReward, spec: LearnerSpec, division: WorkDivision | None = None
    ) -> None:
        """Use the evaluator's model, which is a copy of the reference, so that r_φ = 0."""
        self.part, self.evaluator, self.config, self.division = part, evaluator, spec.config, division or WorkDivision()
        if spec.config.gradient_checkpointing:
            recompute_activations(evaluator.model)
        total = spec.steps * spec.algorithm.update_rule.critic_updates
        rate, offload = part.learning_rate(spec.lr), spec.config.offload
        self.optimizer = Optimizer(evaluator.model, spec.optimizer, rate, total, offload=offload)

    def accumulate(self, batch: Batch) -> Metrics:
        """Add the gradient of the cross-entropy, a mean over the update's completions."""
        selected = batch.mask.any(1)  # a sampled token and, after filters, a weight other than 0
        if batch.weight is not None:
            selected = selected & ((batch.weight != 0) & batch.mask).any(1)
        rows = selected.nonzero().squeeze(1)
        if not len(rows):
            return {}
        model, recompute = self.evaluator.model, self.config.gradient_checkpointing
        bare, device = batch.without_texts(), next(model.parameters()).device
        can_follow = partial(reads_segments, self.evaluator, self.config, self.division, None)

        def dummy_pass(part: Pack) -> None:
            with backward_mode(model, recompute):
                backward_zero(self.evaluator(part))

        def work() -> Metrics:
            metrics = Metrics()
            options: dict[str, Any] = {"rows": rows, "can_follow": can_follow}
            for part in self.division.micro_batches(batch, self.config, model, dummy_pass, **options):
                with span("reward model forward and backward"), backward_mode(model, recompute):
                    logp = self.evaluator(part.to(device))
                    loss = self.part.loss(logp, bare.select(part.rows).to(device)).sum() / len(rows)
                    torch.autograd.backward(loss)
                self.optimizer.accumulate_master_grads()
                metrics = merge(metrics, {"reward_model/loss": Sum(float(loss.detach()))})
            self.optimizer.accumulate_master_grads()  # of what the last micro-batches followed
            return metrics

        metrics = self.division.memory.run(work, keep_gradients(self.optimizer.parameters, self.optimizer.masters))
        return {"reward_model/loss": Mean(self.division.reduce_metrics(metrics)["reward_model/loss"].value)}

    def descend(self) -> Metrics:
        norm, _ = self.optimizer.step()
        return {} if norm is None else {"reward_model/grad_norm": Max(norm)}


class MovingAverage:
    """Makes a frozen model's weights an exponential average of the policy's, in float32 where its own are less precise."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Start from the model's weights; those that the optimizer does not train stay as they are."""
        parameters = dict(model.named_parameters())
        self.parameters = {name: parameters[name] for name in optimizer.masters}
        self.averages = {name: at_least_float32(p.detach()) for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, optimizer: Optimizer, rate: float) -> None:
        """Average ← (1 − rate)·average + rate·policy."""
        for name, average in self.averages.items():
            average.lerp_(optimizer.weight(name).detach().to(average), rate)
        self.write()

    @torch.no_grad()
    def write(self) -> None:
        """Round the averages to the model's precision."""
        for name, average in self.averages.items():
            if self.parameters[name].dtype != average.dtype:
                self.parameters[name].copy_(average)
