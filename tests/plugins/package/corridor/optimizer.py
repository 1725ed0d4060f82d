"""An optimizer: steps of the gradient's sign, which remember nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.learners.config import OptimizerConfig
from policygrad.learners.optimizers import OptimizerRow


class Signs(torch.optim.Optimizer):
    """w ← w − lr·sign(g)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign())


def build_signs(
    model: nn.Module, masters: Mapping[str, Tensor], config: OptimizerConfig, lr: float
) -> list[torch.optim.Optimizer]:
    """Return the optimizer, on all masters."""
    return [Signs(list(masters.values()), {"lr": lr})]


SIGNS = OptimizerRow("corridor.optimizer:build_signs", options=frozenset(), moment_bytes=0)
