"""One rollout on two small networks, as the steps of core ask about it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call, jvp, vjp

from policygrad.core.aggregates import TokenMean
from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch, Forward
from policygrad.core.controllers import re_adapted
from policygrad.core.metrics import Max, Mean, Metrics, Sum, mean_of
from policygrad.core.objective import measure, objective, surrogate, with_selected
from policygrad.lab.control.networks import Optimised
from policygrad.lab.control.policies import ControlPolicy, ControlValue, Distribution


def placed(x: Tensor, mask: Tensor) -> Tensor:
    """[n] -> [B, T], 0 off the mask."""
    return x.new_zeros(mask.shape).masked_scatter(mask, x)


@dataclass(frozen=True, eq=False)
class ControlProblem:
    """A rollout, or some of its steps: n states in the order of `batch.mask`.

    A share of it keeps the batch's rows and empties the mask elsewhere: advantages and targets were computed before, so that
    single steps can be drawn, and minibatches are of equal size however long episodes are.
    """

    policy: Optimised[ControlPolicy]
    critic: Optimised[ControlValue] | None
    seed: int
    """Of the order in which steps are drawn: another one for every rollout."""
    batch: Batch
    psi: Tensor
    states: Tensor
    """[n, d]."""
    action: Tensor
    """[n] or [n, k]."""
    old: Distribution
    """π_old at the states."""
    algorithm: Algorithm

    # What a first-order step asks for.

    def split(self, epoch: int, minibatches: int) -> list[ControlProblem]:
        """Minibatches of single steps, shuffled by (seed, update, epoch)."""
        if minibatches == 1:
            return [self]
        return [self._of(chunk) for chunk in self._order(epoch).tensor_split(minibatches) if len(chunk)]

    def accumulate(self) -> Metrics:
        return self._policy_pass() | self._critic_pass()

    def descend(self) -> Metrics:
        norm = self.policy.descend()
        metrics: Metrics = {"grad_norm": Max(norm), "updates/taken": Sum(1.0)}
        return metrics | self._descend_critic()

    # What a trust region asks for: θ is one vector of P parameters.

    def some(self, share: float) -> ControlProblem:
        """This share of the steps, at least one."""
        return self._of(self._order(0)[: max(1, round(share * len(self.states)))])

    def gradient(self) -> tuple[Tensor, Metrics]:
        metrics = self._policy_pass()
        flat = torch.cat([-p.grad.flatten() for p in self.policy.network.parameters() if p.grad is not None])
        self.policy.adam.zero_grad(set_to_none=True)
        return flat, metrics

    def fisher(self, v: Tensor, sampled: bool) -> Tensor:
        """Exact: the Hessian of mean KL(π_old‖π_θ) by double backward. Source: Schulman et al. 2015 (TRPO), appendix C.1."""
        return self._sampled_fisher(v) if sampled else self._exact_fisher(v)

    @torch.no_grad()
    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        new: Distribution = functional_call(self.policy.network, self._moved(delta), (self.states,))
        out = self._forward(new)
        out = replace(out, logp=out.logp.double())
        value = objective(out, self.batch, self.psi, self.algorithm)
        return float(value), mean_of(placed(self.old.kl(new), self.batch.mask), self.batch.mask).value

    @torch.no_grad()
    def commit(self, delta: Tensor) -> None:
        moved = self._moved(delta)
        for name, parameter in self.policy.network.named_parameters():
            parameter.copy_(moved[name])

    def fit(self) -> Metrics:
        return {} if self.critic is None else self._critic_pass() | self._descend_critic()

    # What adapting β to the KL asks for.

    @torch.no_grad()
    def measured(self) -> Metrics:
        return self._policy_pass(learning=False)

    def adapted(self, metrics: Metrics) -> ControlProblem | None:
        algorithm = re_adapted(self.algorithm, self.batch, metrics)
        return None if algorithm is None else replace(self, algorithm=algorithm)

    # What stands behind them.

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed * 1009 + epoch) % 2**63)
        return torch.randperm(len(self.states), generator=generator)

    def _of(self, rows: Tensor) -> ControlProblem:
        rows = rows.sort().values
        chosen = torch.zeros(len(self.states), dtype=torch.bool)
        chosen[rows] = True
        mask = torch.zeros_like(self.batch.mask).masked_scatter(self.batch.mask, chosen)
        batch = replace(self.batch, mask=mask)
        return replace(self, batch=batch, states=self.states[rows], action=self.action[rows], old=self.old.at(rows))

    def _forward(self, distribution: Distribution) -> Forward:
        mask, needs = self.batch.mask, self.algorithm.forward_needs | self.algorithm.select_needs
        return Forward(
            placed(distribution.logp(self.action), mask),
            entropy=placed(distribution.entropy(), mask) if "entropy" in needs else None,
            kl_old=placed(self.old.kl(distribution), mask) if "kl_old" in needs else None,
        )

    def _policy_pass(self, learning: bool = True) -> Metrics:
        out = self._forward(self.policy.network(self.states))
        batch = with_selected(out, self.batch, self.psi, self.algorithm)
        coefficients = self.algorithm.all_coefficients(batch)
        if learning:
            torch.autograd.backward(surrogate(out, batch, self.psi, self.algorithm, coefficients))
        metrics = measure(out, batch, self.psi, self.algorithm, coefficients)
        return metrics | {"objective": Mean(metrics["objective"].value)}

    def _critic_pass(self) -> Metrics:
        critic, value, batch = self.algorithm.critic, self.critic, self.batch
        if critic is None or value is None or batch.returns is None:
            return {}
        each = critic.loss(placed(value.network(self.states), batch.mask), batch, batch.returns)
        loss = (TokenMean()(batch.mask, batch.group).to(each.dtype) * each).sum()
        torch.autograd.backward(loss)
        return {"value_loss": Mean(float(loss.detach()))}

    def _descend_critic(self) -> Metrics:
        return {} if self.critic is None else {"value_grad_norm": Max(self.critic.descend())}

    @property
    def _parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.policy.network.named_parameters()}

    def _shares(self, v: Tensor) -> dict[str, Tensor]:
        """The vector's share of every parameter."""
        parameters = self._parameters
        shares = torch.split(v, [p.numel() for p in parameters.values()])
        return {n: share.view_as(p) for (n, p), share in zip(parameters.items(), shares, strict=True)}

    def _moved(self, delta: Tensor) -> dict[str, Tensor]:
        return {name: self._parameters[name] + change for name, change in self._shares(delta).items()}

    def _exact_fisher(self, v: Tensor) -> Tensor:
        parameters = list(self.policy.network.parameters())
        now: Distribution = self.policy.network(self.states)
        everywhere = torch.ones(len(self.states), dtype=torch.bool)
        kl = now.at(everywhere).kl(now).mean()
        first = torch.autograd.grad(kl, parameters, create_graph=True)
        along = torch.cat([g.flatten() for g in first]) @ v
        return torch.cat([g.flatten() for g in torch.autograd.grad(along, parameters)])

    def _sampled_fisher(self, v: Tensor) -> Tensor:
        """mean s sᵀv over the actions taken, s = ∇log π: forward mode, then reverse mode."""

        def logp(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(self.policy.network, parameters, (self.states,)).logp(self.action)  # type: ignore[no-any-return]

        along = jvp(logp, (self._parameters,), (self._shares(v),))[1]
        pull = vjp(logp, self._parameters)[1]
        (product,) = pull(along / len(self.states))
        return torch.cat([product[name].flatten() for name in self._parameters])
