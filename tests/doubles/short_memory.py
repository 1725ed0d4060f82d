"""Memory that runs out in a pass that a test chooses, as torch says it on a GPU and on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

ON_GPU = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB"
)
ON_CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "2147483648 bytes. Error code 12 (Cannot allocate memory)"
)


class Passes:
    """Counts the forward and backward passes of all backbones, and fails in those of some numbers (from 1)."""

    def __init__(self, *at: int, error: Exception = ON_GPU, always_from: float = float("inf")) -> None:
        """always_from: fail in each from this one on."""
        self.at, self.error, self.always_from, self.count = set(at), error, always_from, 0

    def begin(self) -> None:
        self.count += 1
        if self.count in self.at or self.count >= self.always_from:
            raise type(self.error)(str(self.error))


class _Backward(torch.autograd.Function):
    """x, whose backward pass counts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passes: Passes) -> torch.Tensor:
        ctx.passes = passes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.passes.begin()
        return gradient, None


@contextmanager
def short_of_memory(*at: int, error: Exception = ON_GPU, always_from: float = float("inf")) -> Iterator[Passes]:
    """Let memory run out within the block; without numbers only count."""
    passes = Passes(*at, error=error, always_from=always_from)

    def after(module: nn.Module, args: Any, out: Any) -> Any:
        if (
            type(getattr(out, "last_hidden_state", None)) is not torch.Tensor
        ):  # no backbone, or an estimate on fake tensors
            return None
        passes.begin()
        states = out.last_hidden_state
        if torch.is_grad_enabled() and states.requires_grad:
            out.last_hidden_state = _Backward.apply(states, passes)  # type: ignore[no-untyped-call]
        return out

    handle = register_module_forward_hook(after)
    try:
        yield passes
    finally:
        handle.remove()
