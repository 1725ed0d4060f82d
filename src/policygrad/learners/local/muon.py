"""Muon: hidden matrices move along their orthogonalised momentum, and all other parameters by AdamW.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. The step is that of `torch.optim.Muon`, bit for bit in bf16. It is
written out here because torch's takes neither stacked experts nor sharded matrices. It also computes in bf16 on devices without
instructions for it, where that is many times slower than their own precision. A step is as long as one of AdamW, 0.2 per weight
(root mean square), so that its learning rate carries over (Liu et al. 2025, arXiv 2502.16982, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.learners.config import OptimizerConfig
from policygrad.learners.local.optimizer import make_adamw
from policygrad.models.replica import full_tensor, local_tensor, redistribute_like, take_shard
from policygrad.utils.devices import multiplies_in_bf16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration x ← a·x + b·x³ + c·x⁵ on singular values (Jordan et al. 2024)."""
ITERATIONS = 5
ADAMW_LENGTH = 0.2
"""Root mean square of an AdamW step per unit of learning rate (Liu et al. 2025, section 2.2)."""
_MIN_NORM = 1e-7


def build_muon(
    model: nn.Module, masters: Mapping[str, Tensor], config: OptimizerConfig, lr: float
) -> list[torch.optim.Optimizer]:
    """Return Muon on the hidden matrices, and AdamW on the other parameters, if there are some."""
    hidden = find_hidden_matrices(model, masters)
    groups = [m for n, m in masters.items() if n in hidden], [m for n, m in masters.items() if n not in hidden]
    muon = []
    if groups[0]:
        dtype = torch.bfloat16 if multiplies_in_bf16(str(groups[0][0].device)) else groups[0][0].dtype
        muon = [Muon(groups[0], lr, config.momentum, config.weight_decay, dtype)]
    return [*muon, *([make_adamw(groups[1], config, lr)] if groups[1] else [])]


def find_hidden_matrices(model: nn.Module, masters: Mapping[str, Tensor]) -> set[str]:
    """Return the names of hidden matrices: all but embeddings, the output head and vectors.

    A parameter [experts, out, in] of a module of experts is a stack of them. Other tensors, such as convolutions' kernels, are not.
    """
    outer = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    for module in model.modules():
        head = getattr(module, "get_output_embeddings", lambda: None)()
        outer |= set() if head is None else {id(p) for p in head.parameters()}
    stacked = {
        id(p)
        for module in model.modules()
        if "Experts" in type(module).__name__
        for p in module.parameters(recurse=False)
    }
    parameters = dict(model.named_parameters())
    hidden = set()
    for name in masters:
        p = parameters[name]
        is_matrix = p.ndim == 2 or (p.ndim == 3 and id(p) in stacked)
        if is_matrix and id(p) not in outer and min(p.shape[-2:]) > 1:
            hidden.add(name)
    return hidden


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum, on matrices [out, in] and stacks of them [experts, out, in], which may be sharded."""

    def __init__(
        self,
        params: list[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """dtype: The precision of the orthogonalisation."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the matrices that have a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, p: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)  # type: ignore[arg-type]
        gradient, buffer = local_tensor(p.grad), local_tensor(state["momentum_buffer"])  # type: ignore[arg-type]
        buffer.lerp_(gradient, 1 - momentum)
        # every process orthogonalises the full matrix and keeps its part
        lookahead = full_tensor(redistribute_like(gradient.lerp(buffer, momentum), p))
        direction, weight = take_shard(orthogonalise(lookahead.to(self.dtype)), p), local_tensor(p)
        weight.mul_(1 - lr * weight_decay)
        weight.add_(direction, alpha=-lr * ADAMW_LENGTH * math.sqrt(max(p.shape[-2:])))


def orthogonalise(x: Tensor) -> Tensor:
    """Return matrices [..., m, n] with the singular vectors of x and singular values near 1 (Newton-Schulz)."""
    a, b, c = COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    y = x.mT if is_tall else x
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=_MIN_NORM)
    add_product = torch.addmm if y.ndim == 2 else torch.baddbmm
    for _ in range(ITERATIONS):
        gram = y @ y.mT
        y = add_product(y, add_product(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if is_tall else y
