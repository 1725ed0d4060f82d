"""One rollout on two small networks, as the steps of core ask about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

from policygrad.core.aggregates import TokenMean
from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch, Forward
from policygrad.core.controllers import re_adapted
from policygrad.core.metrics import Max, Mean, Metrics, Sum, mean_of
from policygrad.core.objective import measure, objective, surrogate
from policygrad.lab.control.policies import Distribution

if TYPE_CHECKING:
    from policygrad.lab.control.learner import ControlLearner


def placed(x: Tensor, mask: Tensor) -> Tensor:
    """[n] -> [B, T], 0 off the mask."""
    return x.new_zeros(mask.shape).masked_scatter(mask, x)


def descend(adam: torch.optim.Adam, network: nn.Module, clip: float) -> float:
    """One step; the gradient's norm before it was clipped.

    Raises:
        FloatingPointError: a gradient that is not finite; the weights are as they were.
    """
    norm = float(nn.utils.clip_grad_norm_(network.parameters(), clip))
    if not norm < float("inf"):
        raise FloatingPointError(f"the gradient's norm is {norm}: the weights were left as they were. Lower --lr")
    adam.step()
    adam.zero_grad(set_to_none=True)
    return norm


@dataclass(frozen=True, eq=False)
class ControlProblem:
    """A rollout, or some of its steps: n states in the order of `batch.mask`.

    A share of it keeps the batch's rows and empties the mask elsewhere: advantages and targets were computed before, so that
    single steps can be drawn, and minibatches are of equal size however long episodes are.
    """

    learner: ControlLearner
    batch: Batch
    psi: Tensor
    states: Tensor
    """[n, d]."""
    action: Tensor
    """[n] or [n, k]."""
    old: Distribution
    """π_old at the states."""
    algorithm: Algorithm

    def _order(self, epoch: int) -> Tensor:
        seed = (self.learner.seed * 1_000_003 + self.learner.updates) * 1009 + epoch
        return torch.randperm(len(self.states), generator=torch.Generator().manual_seed(seed % 2**63))

    def split(self, epoch: int, minibatches: int) -> list[ControlProblem]:
        """Minibatches of single steps, shuffled by (seed, update, epoch)."""
        if minibatches == 1:
            return [self]
        return [self._of(chunk) for chunk in self._order(epoch).tensor_split(minibatches) if len(chunk)]

    def some(self, share: float) -> ControlProblem:
        """This share of the steps, at least one."""
        return self._of(self._order(0)[: max(1, round(share * len(self.states)))])

    def _of(self, rows: Tensor) -> ControlProblem:
        rows = rows.sort().values
        chosen = torch.zeros(len(self.states), dtype=torch.bool)
        chosen[rows] = True
        mask = torch.zeros_like(self.batch.mask).masked_scatter(self.batch.mask, chosen)
        batch = replace(self.batch, mask=mask)
        return replace(self, batch=batch, states=self.states[rows], action=self.action[rows], old=self.old.at(rows))

    def _forward(self, distribution: Distribution) -> Forward:
        mask, needs = self.batch.mask, self.algorithm.forward_needs
        return Forward(
            placed(distribution.logp(self.action), mask),
            entropy=placed(distribution.entropy(), mask) if "entropy" in needs else None,
            kl_old=placed(self.old.kl(distribution), mask) if "kl_old" in needs else None,
        )

    def _policy(self, learning: bool = True) -> Metrics:
        coefficients = self.algorithm.all_coefficients(self.batch)
        out = self._forward(self.learner.policy(self.states))
        if learning:
            torch.autograd.backward(surrogate(out, self.batch, self.psi, self.algorithm, coefficients))
        metrics = measure(out, self.batch, self.psi, self.algorithm, coefficients)
        return metrics | {"objective": Mean(metrics["objective"].value)}

    def _critic(self) -> Metrics:
        critic, network, batch = self.algorithm.critic, self.learner.critic, self.batch
        if critic is None or network is None or batch.returns is None:
            return {}
        each = critic.loss(placed(network(self.states), batch.mask), batch, batch.returns)
        loss = (TokenMean()(batch.mask, batch.group).to(each.dtype) * each).sum()
        torch.autograd.backward(loss)
        return {"value_loss": Mean(float(loss.detach()))}

    def accumulate(self) -> Metrics:
        return self._policy() | self._critic()

    @torch.no_grad()
    def measured(self) -> Metrics:
        return self._policy(learning=False)

    def adapted(self, metrics: Metrics) -> ControlProblem | None:
        algorithm = re_adapted(self.algorithm, self.batch, metrics)
        return None if algorithm is None else replace(self, algorithm=algorithm)

    def descend(self) -> Metrics:
        norm = descend(self.learner.adam, self.learner.policy, self.learner.clip)
        metrics: Metrics = {"grad_norm": Max(norm), "updates/taken": Sum(1.0)}
        return metrics | self._descend_critic()

    def _descend_critic(self) -> Metrics:
        if self.learner.critic is None:
            return {}
        return {"value_grad_norm": Max(descend(self.learner.critic_adam, self.learner.critic, self.learner.clip))}

    def fit(self) -> Metrics:
        return {} if self.learner.critic is None else self._critic() | self._descend_critic()

    @property
    def _parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.learner.policy.named_parameters()}

    def _split(self, v: Tensor) -> dict[str, Tensor]:
        """The vector's share of every parameter."""
        parameters = self._parameters
        shares = torch.split(v, [p.numel() for p in parameters.values()])
        return {n: share.view_as(p) for (n, p), share in zip(parameters.items(), shares, strict=True)}

    def _moved(self, delta: Tensor) -> dict[str, Tensor]:
        return {name: self._parameters[name] + change for name, change in self._split(delta).items()}

    def gradient(self) -> tuple[Tensor, Metrics]:
        metrics = self._policy()
        flat = torch.cat([-p.grad.flatten() for p in self.learner.policy.parameters() if p.grad is not None])
        self.learner.adam.zero_grad(set_to_none=True)
        return flat, metrics

    def fisher(self, v: Tensor, sampled: bool) -> Tensor:
        """Exact: the Hessian of mean KL(π_old‖π_θ) by double backward. Source: Schulman et al. 2015 (TRPO), appendix C.1."""
        return self._sampled_fisher(v) if sampled else self._exact_fisher(v)

    def _exact_fisher(self, v: Tensor) -> Tensor:
        parameters = list(self.learner.policy.parameters())
        now: Distribution = self.learner.policy(self.states)
        everywhere = torch.ones(len(self.states), dtype=torch.bool)
        kl = now.at(everywhere).kl(now).mean()
        first = torch.autograd.grad(kl, parameters, create_graph=True)
        along = torch.cat([g.flatten() for g in first]) @ v
        return torch.cat([g.flatten() for g in torch.autograd.grad(along, parameters)])

    def _sampled_fisher(self, v: Tensor) -> Tensor:
        """mean s sᵀv over the actions taken, s = ∇log π: forward mode, then reverse mode."""

        def logp(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(self.learner.policy, parameters, (self.states,)).logp(self.action)  # type: ignore[no-any-return]

        along = jvp(logp, (self._parameters,), (self._split(v),))[1]
        pull = vjp(logp, self._parameters)[1]
        (product,) = pull(along / len(self.states))
        return torch.cat([product[name].flatten() for name in self._parameters])

    @torch.no_grad()
    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        new: Distribution = functional_call(self.learner.policy, self._moved(delta), (self.states,))
        out = self._forward(new)
        out = replace(out, logp=out.logp.double())
        value = objective(out, self.batch, self.psi, self.algorithm)
        return float(value), mean_of(placed(self.old.kl(new), self.batch.mask), self.batch.mask).value

    @torch.no_grad()
    def commit(self, delta: Tensor) -> None:
        moved = self._moved(delta)
        for name, parameter in self.learner.policy.named_parameters():
            parameter.copy_(moved[name])
