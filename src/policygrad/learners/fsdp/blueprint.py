"""A model without its numbers: what a process needs to build its share of one that only rank 0 has read."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from policygrad.learners.local.forward import Evaluator, probe
from policygrad.learners.local.tree import as_before, take_branches
from policygrad.models.precision import at_least_float32


@dataclass(frozen=True)
class Blueprint:
    """A model's structure, and which short cuts it allows."""

    structure: bytes
    """Its pickle, parameters without their numbers."""
    split_head: bool
    branches: bool
    window: int | None
    narrow: torch.dtype | None
    """What it computes in, where that is less than float32, in which its weights are then kept."""

    @classmethod
    def of(cls, model: nn.Module, temperature: float) -> Blueprint:
        """Of a whole model, which is tried on a made-up group (`probe`)."""
        structure = _dumped(model)
        found: Evaluator = probe(model, temperature)
        return cls(structure, found.network.split_head, found.network.branches, found.window, _narrow(model))

    @classmethod
    def plain(cls, model: nn.Module) -> Blueprint:
        """Of one that is only ever called as a whole, such as a classifier, and need not be a causal language model."""
        return cls(_dumped(model), False, False, None, _narrow(model))

    def model(self) -> Any:
        """The model, its parameters on the meta device; tied ones are one."""
        model = pickle.loads(self.structure)
        as_before(model)
        if self.branches:
            take_branches(model)
        return model

    def empty(self, device: torch.device, *, wide: bool = False) -> nn.Module:
        """The model on a device, with whatever numbers there are; nothing in it trains. wide: in float32 at least."""
        model: nn.Module = self.model()
        kind = at_least_float32 if wide else lambda p: p
        fill(model.modules(), device, lambda p: torch.empty_like(kind(p), device=device), {})
        return model.requires_grad_(False)


def fill(
    modules: Iterable[nn.Module],
    device: torch.device,
    numbers: Callable[[nn.Parameter], Tensor],
    made: dict[Tensor, nn.Parameter],
) -> None:
    """Gives modules on the meta device parameters of these numbers, and their buffers to the device. made: what was made for which,
    so that tied ones stay one."""
    for module in modules:
        for key, p in module._parameters.items():
            if p is not None and p.is_meta:
                if p not in made:
                    made[p] = nn.Parameter(numbers(p), p.requires_grad)
                module._parameters[key] = made[p]
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)


def without_numbers(model: nn.Module) -> None:
    """Moves the parameters to the meta device, tied ones as one: of the model its structure is left, and its buffers."""
    made = dict[Tensor, nn.Parameter]()
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None:
                if p not in made:
                    made[p] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
                module._parameters[key] = made[p]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves out the numbers of parameters. Buffers keep theirs: they are small, and nobody else computes them."""

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, nn.Parameter):
            return _parameter, (tuple(x.shape), x.dtype, x.requires_grad)
        if isinstance(x, Tensor) and x.device.type != "cpu":  # where there may be another device of that name
            return x.detach().cpu().__reduce_ex__(2)  # type: ignore[no-untyped-call]
        return super().reducer_override(x)


def _narrow(model: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in model.parameters() if at_least_float32(p).dtype != p.dtype), None)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)


def _dumped(model: nn.Module) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(model)
    return file.getvalue()
