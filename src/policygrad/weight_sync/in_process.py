"""Weights from one model to another in this process, parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


@torch.no_grad()
def put_weights(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Puts the named tensors into the model's parameters, except where they already are its own memory."""
    own = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if own[name].data_ptr() != tensor.data_ptr():
            own[name].copy_(tensor)
