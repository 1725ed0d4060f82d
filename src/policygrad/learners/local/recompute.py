"""Recomputed activations: less memory for more time, and the mode that a backward pass needs for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def differentiating(model: nn.Module, recompute: bool) -> Iterator[None]:
    """Transformers recompute activations only in training mode, in which they keep no cache: sampling needs the other.

    Dropout is 0 in both (see `load_model`).
    """
    model.train(recompute)
    try:
        yield
    finally:
        model.eval()


def recompute_activations(model: Any) -> None:
    """Under its name in transformers ≥ 5.2x, or the one before."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def without_effect(x: Tensor) -> None:
    """A way back that adds 0 to every gradient; none where nothing is differentiated."""
    if x.requires_grad:
        torch.autograd.backward(x.sum() * 0)
