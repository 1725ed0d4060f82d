"""Adapters in the weights that they adapt, W + (α/r)·B·A for W, where neither is anywhere as a whole: one layer's at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from policygrad.models.adapters import PREFIX, tuned
from policygrad.models.merging import plain
from policygrad.weight_sync.gathered import Gathered


def merged_one_by_one(model: nn.Module, tensors: Gathered) -> Gathered:
    """What `merged_tensors` gives, of a model on the meta device whose parameters are gathered.

    Raises:
        ModelError: when one is gathered: a sum that is not finite.
    """
    inside = {id(module) for module in tuned(model)}
    found = [(name, module) for name, module in model.named_modules() if id(module) in inside]
    beside = {id(p) for _, module in found for p in module.parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    made: dict[str, Callable[[], Tensor]] = {}
    likes: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in beside:
            likes[name.removeprefix(PREFIX)] = tensors.likes[name]
            made[name.removeprefix(PREFIX)] = partial(tensors.gather, name)
    for name, module in found:
        own = {key: names[id(p)] for key, p in module.named_parameters(remove_duplicate=False)}
        base: Any = module.get_base_layer() if hasattr(module, "get_base_layer") else None
        kept = module.modules_to_save[module.active_adapters[0]] if base is None else base
        for key, parameter in kept.named_parameters():
            whole = f"{name}.{key}".removeprefix(PREFIX)
            likes[whole] = tensors.likes[names[id(parameter)]]
            made[whole] = partial(_merged, tensors, module, name, own, key)
    return Gathered(likes, lambda name: made[name]())


def _merged(tensors: Gathered, module: nn.Module, name: str, own: dict[str, str], key: str) -> Tensor:
    """A parameter of the module without PEFT. own: what the model calls the module's parameters."""
    copied = copy.deepcopy(module)
    for place, published in own.items():
        above, _, last = place.rpartition(".")
        copied.get_submodule(above)._parameters[last] = nn.Parameter(tensors.gather(published), requires_grad=False)
    return plain(copied, name).get_parameter(key).detach()
