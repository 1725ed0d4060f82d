"""Merging the LoRA adapters of a sharded policy, W + (α/r)·B·A, one module at a time."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from policygrad.models.adapters import outermost_peft_modules, unwrap_layer
from policygrad.models.traits import PEFT_PREFIX
from policygrad.weight_sync.base import LazyStateDict


def merge_adapters_lazily(model: nn.Module, tensors: LazyStateDict) -> LazyStateDict:
    """Return what `iter_merged_tensors` returns, for a model on the meta device whose parameters are gathered. An access
    raises ModelError if a sum is not finite."""
    adapted = outermost_peft_modules(model)
    adapted_parameters = {id(p) for _, module in adapted for p in module.parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    specs: dict[str, Tensor] = {}
    unchanged: dict[str, str] = {}
    merged: dict[str, tuple[str, nn.Module, str]] = {}  # to the module, by name, and its parameter without PEFT
    for name, parameter in model.named_parameters():
        if id(parameter) not in adapted_parameters:
            unchanged[name.removeprefix(PEFT_PREFIX)] = name
            specs[name.removeprefix(PEFT_PREFIX)] = tensors.specs[name]
    for name, module in adapted:
        base: Any = module.get_base_layer() if hasattr(module, "get_base_layer") else None
        result = module.modules_to_save[module.active_adapters[0]] if base is None else base
        for key, parameter in result.named_parameters():
            merged_name = f"{name}.{key}".removeprefix(PEFT_PREFIX)
            specs[merged_name] = tensors.specs[names[id(parameter)]]
            merged[merged_name] = name, module, key

    def gather(name: str) -> Tensor:
        if name in unchanged:
            return tensors.gather(unchanged[name])
        module_name, module, key = merged[name]
        module_copy = copy.deepcopy(module)
        for path, parameter in module.named_parameters(remove_duplicate=False):
            parent, _, attribute = path.rpartition(".")
            gathered = nn.Parameter(tensors.gather(names[id(parameter)]), requires_grad=False)
            module_copy.get_submodule(parent)._parameters[attribute] = gathered
        return unwrap_layer(module_copy, module_name).get_parameter(key).detach()

    return LazyStateDict(specs, gather)
