"""Models of transformers whose norms, positions and routers compute in float64 what they compute in float32 otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ROUNDING = ("Norm", "Rotary", "Router", "Gate", "Model")
"""In the names of classes that round to float32 on the way."""


def compute_in_double(model: Any) -> Any:
    """Let those modules round nothing; they can still be pickled."""
    for module in model.modules():
        if any(name in type(module).__name__ for name in ROUNDING):
            module.forward = _InDouble(module)
    return model.double()


class _InDouble:
    """A module's own forward, in which float32 means float64."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **options: Any) -> Any:
        with _Double():
            return type(self.module).forward(self.module, *args, **options)


class _Double(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _widen(x) for name, x in (kwargs or {}).items()}
        if function is Tensor.float:
            return args[0].double()
        return function(*map(_widen, args), **kwargs)


def _widen(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x
