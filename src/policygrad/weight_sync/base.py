"""Published weights: what a learner publishes and a sampler loads, with their version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from policygrad.core.media import TextMedia
from policygrad.errors import EngineError


class StaleWeightsError(EngineError):
    """Published weights that are no longer available because the learner has moved on. The next version will be."""


class LogitFunction(Protocol):
    """Computes the logits of a sharded policy."""

    def __call__(self, ids: Tensor, media: Sequence[TextMedia] = ()) -> Tensor:
        """Return logits [b, L, V] of ids [b, L] and the pictures of each text (() = none has any). Raises StaleWeightsError."""


@dataclass(frozen=True, eq=False)
class PublishedWeights:
    """A policy's parameters by name."""

    version: int
    """Number of updates that made them."""
    tensors: Mapping[str, Tensor]
    """In memory, or gathered one by one (`LazyStateDict`)."""
    logits: LogitFunction | None = None
    """The policy's logits, if it is sharded; None = a model with these tensors gives them."""


# Sharded policies: a tensor is gathered when it is accessed, and belongs to the caller alone.


@dataclass(frozen=True, eq=False)
class LazyStateDict(Mapping[str, Tensor]):
    """Tensors by name. Names, dtypes and shapes are known without gathering; a tensor is gathered at every access."""

    specs: Mapping[str, Tensor]  # on the meta device
    gather: Callable[[str], Tensor] = field(repr=False)  # may raise StaleWeightsError

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.specs:
            raise KeyError(name)
        return self.gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def tensor_specs(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors with the same names, shapes and dtypes, in the same order, without gathering any."""
    return tensors.specs if isinstance(tensors, LazyStateDict) else tensors


def with_alias(tensors: Mapping[str, Tensor], alias: str, name: str) -> Mapping[str, Tensor]:
    """Add a second name for a tensor at the end, unless the mapping has that name."""
    if alias in tensors:
        return tensors
    if not isinstance(tensors, LazyStateDict):
        return {**tensors, alias: tensors[name]}
    gather = tensors.gather
    return LazyStateDict({**tensors.specs, alias: tensors.specs[name]}, lambda n: gather(name if n == alias else n))


@torch.no_grad()
def copy_weights_(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copy the named tensors into the model's parameters, except those that are the parameters' own memory. Raises
    EngineError if the model has no parameter of a name, or no memory for it."""
    parameters = dict(model.named_parameters())
    for name in tensors:
        if name not in parameters:
            raise EngineError(
                f"the learner publishes {name!r}, which this {type(model).__name__} does not have. publish() must use its "
                "parameter names."
            )
        if parameters[name].is_meta:
            raise EngineError(
                f"{name} is sharded over the learner's processes, and no model here has memory for it. Read "
                "published.tensors[name] one by one, or let the learner's processes sample: --sampler.engine local"
            )
        tensor = tensors[name]
        if parameters[name].data_ptr() != tensor.data_ptr():
            parameters[name].copy_(tensor)


def load_logit_source(weights: PublishedWeights, model: nn.Module) -> nn.Module | LogitFunction:
    """Copy published weights into the model and return it; for a sharded policy, return the function that computes its
    logits. Raises EngineError as in `copy_weights_`."""
    if weights.logits is not None:
        return weights.logits
    copy_weights_(weights.tensors, model)
    return model


# Weights in buckets of limited size, so that no process or file needs memory for a second copy of the policy.

BUCKET_BYTES = 2**29  # maximum bytes of a bucket, unless a single tensor is larger


@dataclass(frozen=True, eq=False)
class Bucket:
    """Consecutive tensors of the policy."""

    names: Sequence[str]
    tensors: Sequence[Tensor]
    is_last: bool

    @property
    def dtypes(self) -> list[str]:
        """Such as `float32`."""
        return [str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(tensor.shape) for tensor in self.tensors]


def split_by_bytes(tensors: Mapping[str, Tensor], max_bytes: int = BUCKET_BYTES) -> list[list[str]]:
    """Split names, in order, into lists of at most `max_bytes`; a larger tensor is alone. Nothing is gathered."""
    parts, size = [list[str]()], 0
    for name, tensor in tensor_specs(tensors).items():
        if parts[-1] and size + tensor.nbytes > max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.nbytes
    return parts


def iter_buckets(tensors: Mapping[str, Tensor], max_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Yield the policy bucket by bucket, each gathered when it is reached, so that a caller can release one before the next."""
    parts = split_by_bytes(tensors, max_bytes)
    for i, names in enumerate(parts, 1):
        yield Bucket(names, [tensors[name] for name in names], is_last=i == len(parts))
