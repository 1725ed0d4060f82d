"""V_φ: a value head with or without a backbone, its own parameters and its own AdamW. A policy step never moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from policygrad.core import ragged
from policygrad.core.aggregates import TokenMean
from policygrad.core.batch import Batch, required
from policygrad.core.critic import Critic, explained_variance
from policygrad.core.metrics import Max, Mean, Metric, Metrics, Sum, merge
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.local.division import Division
from policygrad.learners.local.forward import Evaluator
from policygrad.learners.local.network import backbone
from policygrad.learners.local.optimizer import Optimizer
from policygrad.learners.local.packing import Pack, micro_tokens, pack
from policygrad.learners.local.recompute import recompute_activations, without_effect
from policygrad.models.replica import Build, let_train, replica


class ValueNetwork(nn.Module):
    """A head on last hidden states: of a backbone of its own, which starts as the policy's, or of the policy itself, under
    stop-gradient.

    The head's last layer starts at 0, so V = 0. The policy is held in a closure: its parameters are none of the critic's.
    """

    def __init__(self, policy: Evaluator, critic: Critic, recompute: bool = False, build: Build | None = None) -> None:
        super().__init__()
        first = next(policy.model.parameters())
        if critic.features == "own":
            whole = replica(policy.model, build)
            if recompute:
                recompute_activations(whole)
            self.backbone = backbone(let_train(whole, policy.model))
            dtype, own = first.dtype, self.backbone
            self.states: Callable[[Pack], Tensor] = lambda part: policy.reading(part).hidden(part, own)
        else:  # a head is small: bf16 would save nothing
            dtype = first.dtype if first.dtype == torch.float64 else torch.float32
            self.states = lambda part: _fixed_states(policy, part).to(dtype)
        self.head = _head(policy.network.hidden_size, critic.hidden).to(first.device, dtype)

    def forward(self, part: Pack) -> Tensor:
        """[b, T] the value before each token is taken: at the position that predicts it. 0 off the mask."""
        values: Tensor = self.head(self.states(part)).squeeze(-1).float()
        return torch.where(part.mask, values.index_select(0, part.predictor.flatten()).view_as(part.mask), 0.0)


def _head(width: int, hidden: int) -> nn.Module:
    last = nn.Linear(hidden or width, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), last) if hidden else last


@torch.no_grad()
def _fixed_states(policy: Evaluator, part: Pack) -> Tensor:
    return policy.reading(part).hidden(part)


@dataclass(eq=False)
class ValueModel:
    """Evaluates and fits the value network, micro-batch by micro-batch."""

    network: ValueNetwork
    optimizer: Optimizer
    evaluator: Evaluator
    config: LearnerConfig
    division: Division = field(default_factory=Division)

    @classmethod
    def of(
        cls,
        evaluator: Evaluator,
        critic: Critic,
        config: LearnerConfig,
        adam: OptimizerConfig,
        lr: float | None,
        updates: tuple[int, int],
        build: Build | None = None,
        division: Division | None = None,
    ) -> ValueModel:
        """A critic that starts from the policy's weights. `lr`: the policy's; `updates`: rollouts, and updates of the
        critic in each, for the schedule."""
        rollouts, each = updates
        total = (rollouts + min(rollouts, critic.pretrain) * (critic.pretrain_epochs - 1)) * each
        network, division = (
            ValueNetwork(evaluator, critic, config.gradient_checkpointing, build),
            division or Division(),
        )
        division.spread(network)
        return cls(network, Optimizer(network, adam, critic.rate(lr), total), evaluator, config, division)

    def _packs(self, batch: Batch) -> Iterator[Pack]:
        made, budget = partial(pack, batch, torch.arange(len(batch.mask))), micro_tokens(self.config, self.network)
        return self.division.packs(made, budget, lambda part: without_effect(self.network(part.to(self._device))))

    @property
    def _device(self) -> torch.device:
        return next(self.network.parameters()).device

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Batch:
        """The batch with `values` [B, T], float32."""
        out, device = torch.zeros(batch.mask.shape), self._device
        for part in self._packs(batch):
            out[part.rows] = self.network(part.to(device)).cpu()
        return replace(batch, values=self.division.summed(out))

    def bootstrapped(self, batch: Batch) -> Batch:
        """The batch with `bootstrap` [B], float32: the value after the last sampled token of what was cut off, 0 elsewhere.

        Raises:
            ConfigError: a batch that does not say what was cut off.
        """
        cut = required(batch.truncated, self, "truncated") & batch.mask.any(1)
        width = batch.mask.shape[1]
        end = width - batch.mask.int().flip(1).argmax(1)  # what would come next has no token yet: any id stands for it
        after = cut[:, None] & (torch.arange(width + 1) == end[:, None])
        tokens, depth = (None if x is None else torch.nn.functional.pad(x, (0, 1)) for x in (batch.tokens, batch.depth))
        if depth is not None:  # it follows the last one that was sampled, whatever stands there
            depth = depth.scatter(1, end[:, None], 1 + depth.gather(1, end[:, None] - 1))
        text = Batch(
            mask=after, group=batch.group, reward=batch.reward, tokens=tokens, prompts=batch.prompts, depth=depth
        )
        return replace(
            batch, bootstrap=ragged.masked(required(self.evaluate(text).values, self, "values"), after).sum(1)
        )

    def accumulate(self, batch: Batch, critic: Critic) -> Metrics:
        """Adds the gradient of the value loss, a mean over the step's sampled tokens; in pre-training the last of several,
        after a step for each of the others."""
        for _ in range(critic.pretrain_epochs - 1 if critic.pretrain else 0):
            self._gradient(batch, critic)
            self.descend()
        return self._gradient(batch, critic)

    def _gradient(self, batch: Batch, critic: Critic) -> Metrics:
        assert batch.returns is not None
        assert batch.values is not None
        coefficient = TokenMean()(batch.mask, batch.group).to(batch.reward.dtype)
        bare = replace(batch, prompts=None, tokens=None, experts=None)
        device, metrics = self._device, dict[str, Metric]()
        self.network.train(self.config.gradient_checkpointing)
        for part in self._packs(batch):
            share, c = bare.select(part.rows).to(device), coefficient[part.rows].to(device)
            assert share.returns is not None
            loss = (c * critic.loss(self.network(part.to(device)), share, share.returns)).sum()
            torch.autograd.backward(loss)
            self.optimizer.collect()
            metrics = merge(metrics, {"value_loss": Sum(loss.detach().double())})
        self.network.eval()
        metrics = self.division.merged(metrics)
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
