"""A model's adapters in its weights, W + (α/r)·B·A for W, for whatever knows no adapters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.errors import ModelError
from policygrad.models.adapters import PREFIX, tuned


def merged(model: nn.Module) -> nn.Module:
    """The model with its adapters in its weights, W + (α/r)·B·A for W, and no longer one of PEFT's; in place.

    Raises:
        ModelError: a sum that is not finite.
    """
    for module in list(tuned(model)):
        name = next(name for name, found in model.named_modules() if found is module)
        above, _, last = name.rpartition(".")
        found = plain(module, name)
        setattr(model.get_submodule(above), last, found)
    model._hf_peft_config_loaded = False  # type: ignore[assignment]
    model._weight_conversions = None  # type: ignore[assignment]  # of an adapter's names, by which saving would go
    del model.peft_config
    return model


def plain(module: Any, name: str) -> nn.Module:
    """What PEFT's module is without PEFT, in place. Raises ModelError: a sum that is not finite."""
    if not hasattr(module, "get_base_layer"):
        return module.modules_to_save[module.active_adapters[0]]  # type: ignore[no-any-return]
    try:
        module.merge(safe_merge=True)
    except ValueError as error:
        raise ModelError(f"{name} cannot be merged: {error}") from error
    return module.get_base_layer()  # type: ignore[no-any-return]


def merged_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each parameter that `merged` would leave, the model as it is: one layer's sum at a time.

    Raises:
        ModelError: a sum that is not finite.
    """
    inside = {id(module) for module in tuned(model)}
    found = [(name, module) for name, module in model.named_modules() if id(module) in inside]
    beside = {id(p) for _, module in found for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in beside:
            yield name.removeprefix(PREFIX), parameter
    for name, module in found:
        with torch.no_grad():
            whole = plain(copy.deepcopy(module), name)
        for key, parameter in whole.named_parameters():
            yield f"{name}.{key}".removeprefix(PREFIX), parameter
