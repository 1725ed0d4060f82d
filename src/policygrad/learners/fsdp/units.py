"""The units that `fully_shard` gathers one after another, and where in each of them which parameter stands.

While a unit is called its modules hold the whole parameters: they can be watched then, or others put in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from policygrad.learners.local.curvature import Call

Other = Callable[[str, Tensor], Tensor]
"""(a parameter's name, the parameter as a whole) -> what stands in its place."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a module holds a parameter; one that is tied has several."""

    module: nn.Module
    key: str
    name: str
    """The parameter's, in the model."""

    @property
    def held(self) -> Tensor:
        """What is there now."""
        found = self.module._parameters[self.key]
        assert found is not None
        return found

    def put(self, x: Any) -> None:
        """Also what is no parameter."""
        self.module._parameters[self.key] = x


@dataclass(frozen=True, eq=False)
class Unit:
    """A layer, or the root with what is left."""

    module: nn.Module
    places: tuple[Place, ...]


def units(root: Call) -> list[Unit]:
    """Of a sharded model that is not being called; the root is the last."""
    names = {id(p): name for name, p in root.model.named_parameters()}
    found, taken = list[Unit](), set[nn.Module]()
    for unit in reversed([module for module in root.modules() if isinstance(module, FSDPModule)]):
        mine = [module for module in unit.modules() if module not in taken]
        taken.update(mine)
        held = ((module, key, p) for module in mine for key, p in module._parameters.items() if p is not None)
        found.append(Unit(unit, tuple(Place(module, key, names[id(p)]) for module, key, p in held)))
    return found


@contextmanager
def swapped(places: Iterable[Place], other: Other) -> Iterator[None]:
    """Within, each parameter gives way to what `other` makes of it, once for all its places."""
    before, made = [(place, place.held) for place in places], dict[int, Tensor]()
    for place, p in before:
        if id(p) not in made:
            made[id(p)] = other(place.name, p)
        place.put(made[id(p)])
    try:
        yield
    finally:
        for place, p in before:
            place.put(p)


@contextmanager
def instead(units: Sequence[Unit], other: Other) -> Iterator[None]:
    """Within, each unit that is called is `swapped`; processes that call the same units may gather in `other`."""
    handles = list[RemovableHandle]()
    for unit in units:
        handles += _swapping(unit, other)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _swapping(unit: Unit, other: Other) -> list[RemovableHandle]:
    stack = ExitStack()

    def enter(module: nn.Module, args: Any) -> None:
        stack.enter_context(swapped(unit.places, other))

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        stack.close()

    # FSDP's own hooks come first, where a unit is gathered, and last, where it is let go.
    return [unit.module.register_forward_pre_hook(enter), unit.module.register_forward_hook(leave, prepend=True)]


@contextmanager
def watched(units: Sequence[Unit], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within, `see` is told each whole parameter and its name, whenever its unit is called."""

    def telling(unit: Unit) -> RemovableHandle:
        def enter(module: nn.Module, args: Any) -> None:
            for place in unit.places:
                see(place.name, place.held)

        return unit.module.register_forward_pre_hook(enter)

    handles = [telling(unit) for unit in units]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
