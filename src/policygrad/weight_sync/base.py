"""What a learner publishes and a sampler takes over: a policy's weights, with their version."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.errors import EngineError
from policygrad.models.adapters import PEFT_PREFIX, iter_peft_modules, unwrap_layer


class StaleWeightsError(EngineError):
    """Weights that were published and nobody has kept: the learner has gone on. They are there again with the next publication."""


@dataclass(frozen=True, eq=False)
class PublishedWeights:
    """A policy's parameters by name, and how many updates made them."""

    version: int
    tensors: Mapping[str, Tensor]
    """In memory, or gathered one by one (`LazyStateDict`)."""
    logits: Callable[[Tensor], Tensor] | None = None
    """From ids [b, L] to the policy's logits [b, L, V], where no process has it as a whole; None = any model with these tensors
    gives them. Raises StaleWeightsError."""


# Weights of which no process has the whole: each tensor is gathered when it is asked for, and is then only the caller's.


@dataclass(frozen=True, eq=False)
class LazyStateDict(Mapping[str, Tensor]):
    """Tensors by name. Names, types and shapes are known without gathering; the tensors are gathered anew whenever asked for."""

    specs: Mapping[str, Tensor]
    """On the meta device."""
    gather: Callable[[str], Tensor] = field(repr=False)
    """May raise StaleWeightsError."""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.specs:
            raise KeyError(name)
        return self.gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def tensor_specs(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Of the same shapes and types, in the same order; nothing is gathered."""
    return tensors.specs if isinstance(tensors, LazyStateDict) else tensors


def with_alias(tensors: Mapping[str, Tensor], name: str, other: str) -> Mapping[str, Tensor]:
    """One more name, at the end, for the tensor of another; as they are where they have it."""
    if name in tensors:
        return tensors
    if not isinstance(tensors, LazyStateDict):
        return {**tensors, name: tensors[other]}
    gather = tensors.gather
    return LazyStateDict({**tensors.specs, name: tensors.specs[other]}, lambda n: gather(other if n == name else n))


# Weights from one model to another in this process, parameter by parameter.


@torch.no_grad()
def copy_weights_(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
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


def load_logit_source(weights: PublishedWeights, model: nn.Module) -> nn.Module | Callable[[Tensor], Tensor]:
    """Puts published weights into the model, and is it; where no process has them as a whole, what asks for their logits.

    Raises:
        EngineError: as `copy_weights_`.
    """
    if weights.logits is not None:
        return weights.logits
    copy_weights_(weights.tensors, model)
    return model


# Adapters in the weights that they adapt, W + (α/r)·B·A for W, where neither is anywhere as a whole: one layer's at a time.


def merge_adapters_lazily(model: nn.Module, tensors: LazyStateDict) -> LazyStateDict:
    """What `iter_merged_tensors` gives, of a model on the meta device whose parameters are gathered.

    Raises:
        ModelError: when one is gathered: a sum that is not finite.
    """
    inside = {id(module) for module in iter_peft_modules(model)}
    found = [(name, module) for name, module in model.named_modules() if id(module) in inside]
    beside = {id(p) for _, module in found for p in module.parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    made: dict[str, Callable[[], Tensor]] = {}
    likes: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in beside:
            likes[name.removeprefix(PEFT_PREFIX)] = tensors.specs[name]
            made[name.removeprefix(PEFT_PREFIX)] = partial(tensors.gather, name)
    for name, module in found:
        own = {key: names[id(p)] for key, p in module.named_parameters(remove_duplicate=False)}
        base: Any = module.get_base_layer() if hasattr(module, "get_base_layer") else None
        kept = module.modules_to_save[module.active_adapters[0]] if base is None else base
        for key, parameter in kept.named_parameters():
            whole = f"{name}.{key}".removeprefix(PEFT_PREFIX)
            likes[whole] = tensors.specs[names[id(parameter)]]
            made[whole] = partial(_merged, tensors, module, name, own, key)
    return LazyStateDict(likes, lambda name: made[name]())


def _merged(tensors: LazyStateDict, module: nn.Module, name: str, own: dict[str, str], key: str) -> Tensor:
    """A parameter of the module without PEFT. own: what the model calls the module's parameters."""
    copied = copy.deepcopy(module)
    for place, published in own.items():
        above, _, last = place.rpartition(".")
        copied.get_submodule(above)._parameters[last] = nn.Parameter(tensors.gather(published), requires_grad=False)
    return unwrap_layer(copied, name).get_parameter(key).detach()


# A policy's weights in portions that servers take one by one, and files hold, so that nobody holds the policy twice.

BUCKET_BYTES = 2**29
"""Bytes of a portion, unless one tensor has more."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Some of the weights, in the order in which they are sent."""

    names: Sequence[str]
    tensors: Sequence[Tensor]
    is_last: bool
    """Whether the policy is whole with these."""

    @property
    def dtypes(self) -> list[str]:
        """As torch names them, without its own name."""
        return [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(tensor.shape) for tensor in self.tensors]


def split_by_bytes(tensors: Mapping[str, Tensor], most: int = BUCKET_BYTES) -> list[list[str]]:
    """Names, in the mapping's order, of tensors of at most `most` bytes together; a larger one is alone. Nothing is gathered."""
    found, size = [list[str]()], 0
    for name, tensor in tensor_specs(tensors).items():
        if found[-1] and size + tensor.nbytes > most:
            found.append([])
            size = 0
        found[-1].append(name)
        size += tensor.nbytes
    return found


def iter_buckets(tensors: Mapping[str, Tensor], most: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """The portions, each gathered when its turn comes: whoever lets go of one before the next holds no more than one."""
    parts = split_by_bytes(tensors, most)
    for i, names in enumerate(parts, 1):
        yield Bucket(names, [tensors[name] for name in names], is_last=i == len(parts))
