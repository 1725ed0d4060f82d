"""Weights from one model to another in this process, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from policygrad.errors import EngineError
from policygrad.weight_sync.base import Published


@torch.no_grad()
def put_weights(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Puts the named tensors into the model's parameters, except where they already are its own memory.

    Raises:
        EngineError: a name that the model does not have, or a model without memory for it.
    """
    own = dict(model.named_parameters())
    for name in tensors:
        if name not in own:
            raise EngineError(
                f"the learner publishes {name!r}, which this {type(model).__name__} does not have: let publish() name its "
                "parameters"
            )
        if own[name].is_meta:
            raise EngineError(
                f"{name} is spread over the processes that learn, and no model here has room for it: take published.tensors[name] "
                "one by one, or let the processes draw themselves, --sampler.engine local"
            )
        tensor = tensors[name]
        if own[name].data_ptr() != tensor.data_ptr():
            own[name].copy_(tensor)


def taken(weights: Published, model: nn.Module) -> nn.Module | Callable[[Tensor], Tensor]:
    """Puts published weights into the model, and is it; where no process has them as a whole, what asks for their logits.

    Raises:
        EngineError: as `put_weights`.
    """
    if weights.logits is not None:
        return weights.logits
    put_weights(weights.tensors, model)
    return model
