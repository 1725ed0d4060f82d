"""Derivatives by autograd, of functions of one tensor θ."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def derivative(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """∇f(θ), shaped like θ; f is a scalar."""
    theta = theta.detach().requires_grad_()
    return torch.autograd.grad(f(theta), theta)[0]


def jacobian(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """∂f/∂θ, shaped [*f, *θ]."""
    found: Tensor = torch.autograd.functional.jacobian(f, theta.detach(), vectorize=True)  # type: ignore[no-untyped-call]
    return found
