"""A network with the optimiser that moves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

from policygrad.errors import NumericsError

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class Optimised(Generic[Network]):
    """A network's weights and their Adam."""

    network: Network
    adam: torch.optim.Adam
    clip: float
    """Of the gradient's norm."""

    @classmethod
    def fresh(cls, network: Network, lr: float, clip: float) -> Optimised[Network]:
        """It has taken no update. eps is 1e-5: Huang et al. 2022 (PPO details), no. 3."""
        return cls(network, torch.optim.Adam(network.parameters(), lr=lr, eps=1e-5), clip)

    def descend(self) -> float:
        """One update, after which there is no gradient; the gradient's norm before it was clipped.

        Raises:
            NumericsError: a gradient that is not finite; the weights are as they were.
        """
        norm = float(nn.utils.clip_grad_norm_(self.network.parameters(), self.clip))
        if not norm < float("inf"):
            raise NumericsError(f"the gradient's norm is {norm}: the weights were left as they were. Lower --lr")
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return norm

    def slow(self, share: float) -> None:
        """Sets the learning rate to this share of what it began with."""
        for group in self.adam.param_groups:
            group["lr"] = share * group.setdefault("initial_lr", group["lr"])
