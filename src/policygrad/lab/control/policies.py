"""Policies over discrete and continuous actions, a critic, and normalised observations."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from policygrad.errors import NumericsError
from policygrad.lab.control.environments import Spaces


@dataclass(frozen=True, eq=False)
class Categorical:
    """Discrete actions. Samples have no graph; log-probabilities, entropies and KLs are in nats, [n]."""

    logits: Tensor  # [n, A]

    def sample(self, generator: torch.Generator) -> Tensor:
        return torch.multinomial(self.logits.softmax(-1), 1, generator=generator).squeeze(1)

    def mode(self) -> Tensor:
        return self.logits.argmax(-1)

    def logp(self, action: Tensor) -> Tensor:
        return self.logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)

    def entropy(self) -> Tensor:
        logp = self.logits.log_softmax(-1)
        return -(logp.exp() * logp).sum(-1)

    def kl(self, other: Any) -> Tensor:
        """KL(self‖other), exact."""
        logp = self.logits.log_softmax(-1)
        other_logp: Tensor = other.logits.log_softmax(-1)
        return (logp.exp() * (logp - other_logp)).sum(-1)

    def at(self, rows: Tensor) -> Categorical:
        """Select states, without graph."""
        return Categorical(self.logits.detach()[rows])


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Continuous actions whose numbers are independent given the state. Methods as those of `Categorical`."""

    mean: Tensor  # [n, k]
    log_std: Tensor  # [n, k]

    def sample(self, generator: torch.Generator) -> Tensor:
        noise = torch.randn(self.mean.shape, generator=generator, dtype=self.mean.dtype)
        return (self.mean + self.log_std.exp() * noise).detach()

    def mode(self) -> Tensor:
        return self.mean

    def logp(self, action: Tensor) -> Tensor:
        z = (action - self.mean) * (-self.log_std).exp()
        return -(z * z / 2 + self.log_std + math.log(2 * math.pi) / 2).sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std + (1 + math.log(2 * math.pi)) / 2).sum(-1)

    def kl(self, other: Any) -> Tensor:
        spread = (2 * (self.log_std - other.log_std)).exp()
        shift = (self.mean - other.mean) * (-other.log_std).exp()
        kl: Tensor = (other.log_std - self.log_std + (spread + shift * shift - 1) / 2).sum(-1)
        return kl

    def at(self, rows: Tensor) -> Gaussian:
        return Gaussian(self.mean.detach()[rows], self.log_std.detach()[rows])


Distribution = Categorical | Gaussian  # π(·|s) at n states


def make_mlp(sizes: tuple[int, ...], gain: float, generator: torch.Generator) -> nn.Sequential:
    """Return linear layers with tanh in between and orthogonal weights, scaled by √2, or by `gain` in the last. Biases are 0.

    Source: Huang et al. 2022 (PPO details), no. 2.
    """
    layers: list[nn.Module] = []
    for i, (into, out) in enumerate(itertools.pairwise(sizes)):
        linear = nn.utils.skip_init(nn.Linear, into, out)  # type: ignore[no-untyped-call]
        last = i == len(sizes) - 2
        nn.init.orthogonal_(linear.weight, gain if last else math.sqrt(2), generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, nn.Tanh()]
    return nn.Sequential(*layers)


class ControlPolicy(nn.Module):
    """π_θ: maps states [n, d] to distributions over actions, initially near uniform or near N(0, 1)."""

    def __init__(self, spaces: Spaces, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.body = make_mlp((spaces.features, *hidden, spaces.actions), 0.01, generator)
        self.log_std = None if spaces.discrete else nn.Parameter(torch.zeros(spaces.actions))

    def forward(self, states: Tensor) -> Distribution:
        out = self.body(states)
        if self.log_std is None:
            return Categorical(out)
        return Gaussian(out, self.log_std + torch.zeros_like(out))  # a new tensor: π_old must not change with θ


class ControlValue(nn.Module):
    """V_φ: maps states [n, d] to [n]."""

    def __init__(self, spaces: Spaces, hidden: tuple[int, ...], generator: torch.Generator) -> None:
        super().__init__()
        self.body = make_mlp((spaces.features, *hidden, 1), 1.0, generator)

    def forward(self, states: Tensor) -> Tensor:
        values: Tensor = self.body(states).squeeze(-1)
        return values


@dataclass(frozen=True, eq=False)
class Normaliser:
    """Subtracts the mean of all observations so far and divides by their standard deviation, clamped to ±10.

    It is immutable: `observe` returns a new one, so a rollout and its updates normalise equally.
    """

    mean: Tensor  # [d]
    squares: Tensor  # [d] sum of squared deviations from the mean
    count: int = 0

    @classmethod
    def create(cls, features: int) -> Normaliser:
        """Return one without observations, which changes nothing."""
        return cls(*torch.zeros(2, features, dtype=torch.float64))

    def __call__(self, observation: Tensor) -> Tensor:
        if not self.count:
            return observation
        std = (self.squares / self.count).sqrt().clamp(min=1e-4).to(observation.dtype)
        return ((observation - self.mean.to(observation.dtype)) / std).clamp(-10, 10)

    def observe(self, observation: Tensor) -> Normaliser:
        """Include n more observations [n, d]. Source: Chan, Golub & LeVeque 1979, on parallel variances."""
        new, n = observation.double(), len(observation)
        mean, total = new.mean(0), self.count + n
        shift = mean - self.mean
        squares = self.squares + (new - mean).square().sum(0) + shift.square() * (self.count * n / total)
        return Normaliser(self.mean + shift * (n / total), squares, total)


Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class OptimisedNetwork(Generic[Network]):
    """A network and its Adam."""

    network: Network
    adam: torch.optim.Adam
    clip: float  # maximum norm of the gradient

    @classmethod
    def create(cls, network: Network, lr: float, clip: float) -> OptimisedNetwork[Network]:
        """Create the optimiser. eps is 1e-5: Huang et al. 2022 (PPO details), no. 3."""
        return cls(network, torch.optim.Adam(network.parameters(), lr=lr, eps=1e-5), clip)

    def descend(self) -> float:
        """Take one step and clear the gradient. Return its norm before clipping.

        Raises:
            NumericsError: A gradient that is not finite; the weights are unchanged.
        """
        norm = float(nn.utils.clip_grad_norm_(self.network.parameters(), self.clip))
        if not norm < float("inf"):
            raise NumericsError(f"the gradient's norm is {norm}: the weights are unchanged. Lower --lr")
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return norm

    def scale_lr(self, share: float) -> None:
        """Set the learning rate to a share of its initial value."""
        for group in self.adam.param_groups:
            group["lr"] = share * group.setdefault("initial_lr", group["lr"])
