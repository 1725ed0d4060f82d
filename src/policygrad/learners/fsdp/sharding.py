"""A model spread over the processes by FSDP2 (`fully_shard`), and its evaluator.

Each layer is a unit, gathered when it is called and let go after; what is left (embeddings, head) is the root's. The evaluator
calls a model past its root (see `network`), so the root is a module around the whole evaluation, `Call`: what it gathers is there
for all that happens within. Gradients are summed over the processes, never averaged: coefficients are of the whole update.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any, cast

import cloudpickle
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.hooks import RemovableHandle

from policygrad.core.batch import Forward
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.learners.fsdp.tensor_parallel import apply_tensor_parallel, resolve_tp_plan
from policygrad.learners.local.curvature import CallModule
from policygrad.learners.local.forward import Evaluator, Network, build_evaluator
from policygrad.learners.local.packing import Pack
from policygrad.learners.local.tree_attention import disable_tree_attention, enable_tree_attention
from policygrad.models.adapters import set_adapters_enabled
from policygrad.models.loading import at_least_float32
from policygrad.models.replica import copy_weights

# A model without its numbers: what a process needs to build its share of one that only rank 0 has read.


@dataclass(frozen=True)
class ModelSkeleton:
    """A model's structure, and which short cuts it allows."""

    structure: bytes
    """Its pickle, parameters without their numbers."""
    split_head: bool
    use_tree: bool
    window: int | None
    compute_dtype: torch.dtype | None
    """What it computes in, where that is less than float32, in which its weights are then kept."""

    @classmethod
    def of(cls, model: nn.Module, temperature: float) -> ModelSkeleton:
        """Of a whole model, which is tried on a made-up group (`probe`)."""
        structure = _pickle_structure(model)
        evaluator: Evaluator = build_evaluator(model, temperature)
        return cls(
            structure,
            evaluator.network.split_head,
            evaluator.network.use_tree,
            evaluator.window,
            _find_compute_dtype(model),
        )

    @classmethod
    def without_shortcuts(cls, model: nn.Module) -> ModelSkeleton:
        """Of one that is only ever called as a whole, such as a classifier, and need not be a causal language model."""
        return cls(_pickle_structure(model), False, False, None, _find_compute_dtype(model))

    def build_meta(self) -> Any:
        """The model, its parameters on the meta device; tied ones are one."""
        model = pickle.loads(self.structure)
        disable_tree_attention(model)
        if self.use_tree:
            enable_tree_attention(model)
        return model

    def build_empty(self, device: torch.device, *, at_least_fp32: bool = False) -> nn.Module:
        """The model on a device, with whatever numbers there are; nothing in it trains. wide: in float32 at least."""
        model: nn.Module = self.build_meta()
        kind = at_least_float32 if at_least_fp32 else lambda p: p
        materialise(model.modules(), device, lambda p: torch.empty_like(kind(p), device=device), {})
        return model.requires_grad_(False)


def materialise(
    modules: Iterable[nn.Module],
    device: torch.device,
    values: Callable[[nn.Parameter], Tensor],
    created: dict[Tensor, nn.Parameter],
) -> None:
    """Gives modules on the meta device parameters of these numbers, and their buffers to the device. made: what was made for which,
    so that tied ones stay one."""
    for module in modules:
        for key, p in module._parameters.items():
            if p is not None and p.is_meta:
                if p not in created:
                    created[p] = nn.Parameter(values(p), p.requires_grad)
                module._parameters[key] = created[p]
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)


def move_to_meta(model: nn.Module) -> None:
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
            return _meta_parameter, (tuple(x.shape), x.dtype, x.requires_grad)
        if isinstance(x, Tensor) and x.device.type != "cpu":  # where there may be another device of that name
            return x.detach().cpu().__reduce_ex__(2)  # type: ignore[no-untyped-call]
        return super().reducer_override(x)


def _find_compute_dtype(model: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in model.parameters() if at_least_float32(p).dtype != p.dtype), None)


def _meta_parameter(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)


def _pickle_structure(model: nn.Module) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(model)
    return file.getvalue()


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedEvaluator(Evaluator):
    """Log-probabilities under a model of which each process has a share: all of them evaluate at once, each a pack of its own."""

    root: CallModule

    def forward(
        self,
        part: Pack,
        needs: frozenset[str] = frozenset(),
        old: Evaluator | None = None,
        reference: Evaluator | None = None,
        expected: Tensor | None = None,
    ) -> Forward:
        """As `Evaluator.forward`; `old` and `reference` are sharded too."""

        def work() -> dict[str, Tensor]:  # of a dataclass FSDP would not see the tensors
            out = Evaluator.forward(self, part, needs, old, reference, expected)
            return {f.name: x for f in fields(out) if (x := getattr(out, f.name)) is not None}

        return Forward(**cast(Any, self.root)(work))

    def states(self, part: Pack) -> Tensor:
        """As `Evaluator.states`. Until `at_rest` this process has the head as a whole: it asks for logits as often as it needs."""
        root = cast(Any, self.root)
        states: Tensor = root(lambda: Evaluator.states(self, part))
        if self.network.split_head:
            root.unshard()
        return states

    def run_in_root(self, work: Callable[[], Tensor]) -> Tensor:
        """As `Evaluator.run_in_root`; all processes do it at once."""
        output: Tensor = cast(Any, self.root)(lambda: work().clone())  # of a view FSDP could lose sight
        return output

    def release(self) -> None:
        """As `Evaluator.release`."""
        Evaluator.release(self)
        cast(Any, self.root).reshard()


@dataclass(frozen=True, eq=False, kw_only=True)
class AdapterlessEvaluator(ShardedEvaluator):
    """Of the policy with its adapters off: what it began as, in no memory of its own."""

    def forward(
        self,
        part: Pack,
        needs: frozenset[str] = frozenset(),
        old: Evaluator | None = None,
        reference: Evaluator | None = None,
        expected: Tensor | None = None,
    ) -> Forward:
        """As `Evaluator.forward`."""
        set_adapters_enabled(self.model, False)
        try:
            return ShardedEvaluator.forward(self, part, needs, old, reference, expected)
        finally:
            set_adapters_enabled(self.model, True)

    @classmethod
    def of(cls, policy: ShardedEvaluator) -> AdapterlessEvaluator:
        """Of this policy, whose adapters had not moved when it began."""
        return cls(policy.network, policy.temperature, policy.window, root=policy.root)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedNetwork(Network):
    """The halves of that model, called within its root; alone only its states are asked for."""

    root: CallModule

    def hidden(self, part: Pack, network: nn.Module | None = None) -> Tensor:
        """As `Network.hidden`."""
        if network is not None:
            return Network.hidden(self, part, network)
        states: Tensor = cast(Any, self.root)(lambda: Network.hidden(self, part))
        return states


def shard_model(
    skeleton: ModelSkeleton,
    source: nn.Module | None,
    workers: WorkerGroup,
    mesh: DeviceMesh,
    device: torch.device,
    temperature: float,
    tp_mesh: DeviceMesh | None = None,
) -> ShardedEvaluator:
    """The blueprint's model, with the numbers of `source`, which rank 0 has. No process holds more than a layer of it as a whole
    on the way. across: the processes that its layers' matrices are cut between too."""
    given = None if source is None else dict(source.named_parameters())

    def numbers(name: str, p: Tensor) -> Tensor:
        return workers.broadcast_tensor(None if given is None else given[name], p, device)

    return _build_sharded(skeleton, numbers, mesh, device, temperature, tp_mesh)


def shard_copy(
    evaluator: Evaluator,
    skeleton: ModelSkeleton,
    mesh: DeviceMesh,
    device: torch.device,
    tp_mesh: DeviceMesh | None = None,
) -> ShardedEvaluator:
    """Of a second model with the numbers of the evaluator's, of which each process copies its share; frozen."""

    def numbers(name: str, p: Tensor) -> Tensor:
        return torch.empty_like(p, device=device)

    copied = _build_sharded(skeleton, numbers, mesh, device, evaluator.temperature, tp_mesh)
    copy_weights(evaluator.model, copied.model)
    copied.model.requires_grad_(False)
    return copied


def _build_sharded(
    skeleton: ModelSkeleton,
    given: Callable[[str, Tensor], Tensor],
    mesh: DeviceMesh,
    device: torch.device,
    temperature: float,
    tp_mesh: DeviceMesh | None,
) -> ShardedEvaluator:
    """given: whole parameters, by name and likeness."""
    model = skeleton.build_meta()
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    root, made = CallModule(model), dict[Tensor, nn.Parameter]()

    def numbers(p: nn.Parameter) -> Tensor:
        return given(names[p], at_least_float32(p))

    plan, called = (
        resolve_tp_plan(model) if tp_mesh is not None else {},
        {module: name for name, module in model.named_modules()},
    )

    def before(unit: nn.Module) -> None:
        materialise(unit.modules(), device, numbers, made)
        if tp_mesh is not None and unit is not root:
            apply_tensor_parallel(unit, called, plan, tp_mesh)

    apply_fsdp(root, mesh, skeleton.compute_dtype, before)
    network = ShardedNetwork(model, split_head=skeleton.split_head, use_tree=skeleton.use_tree, root=root)
    return ShardedEvaluator(network, temperature, skeleton.window, root=root)


def apply_fsdp(
    root: nn.Module,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None,
    prepare: Callable[[nn.Module], None] = lambda unit: None,
) -> None:
    """Leaves each process its share of the module's parameters, layer by layer, each after `before`. narrow: what they are gathered
    in, where that is less than they are kept in; gradients are summed in float32 then."""
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for unit in (*reversed(find_layers(root)), root):
        prepare(unit)
        one = fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        one.set_gradient_divide_factor(1.0)
        one.set_force_sum_reduction_for_comms(True)
        if hasattr(
            one, "set_reduce_scatter_unused_params"
        ):  # torch 2.13: experts that only some processes' tokens go to
            one.set_reduce_scatter_unused_params(True, recurse=False)


def find_layers(model: nn.Module) -> list[nn.Module]:
    """What the model is a pile of, as transformers names it (`_no_split_modules`); nothing where it does not."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]


# The units that `fully_shard` gathers one after another, and where in each of them which parameter stands.
#
# While a unit is called its modules hold the whole parameters: they can be watched then, or others put in their place.

Replacement = Callable[[str, Tensor], Tensor]
"""(a parameter's name, the parameter as a whole) -> what stands in its place."""


@dataclass(frozen=True, eq=False)
class ParameterSlot:
    """Where a module holds a parameter; one that is tied has several."""

    module: nn.Module
    key: str
    name: str
    """The parameter's, in the model."""

    @property
    def value(self) -> Tensor:
        """What is there now."""
        value = self.module._parameters[self.key]
        assert value is not None
        return value

    def put(self, x: Any) -> None:
        """Also what is no parameter."""
        self.module._parameters[self.key] = x


@dataclass(frozen=True, eq=False)
class FsdpUnit:
    """A layer, or the root with what is left."""

    module: nn.Module
    slots: tuple[ParameterSlot, ...]


def find_fsdp_units(root: CallModule) -> list[FsdpUnit]:
    """Of a sharded model that is not being called; the root is the last."""
    names = {id(p): name for name, p in root.model.named_parameters()}
    units, seen = list[FsdpUnit](), set[nn.Module]()
    for unit in reversed([module for module in root.modules() if isinstance(module, FSDPModule)]):
        mine = [module for module in unit.modules() if module not in seen]
        seen.update(mine)
        parameters = ((module, key, p) for module in mine for key, p in module._parameters.items() if p is not None)
        units.append(FsdpUnit(unit, tuple(ParameterSlot(module, key, names[id(p)]) for module, key, p in parameters)))
    return units


@contextmanager
def swap_parameters(slots: Iterable[ParameterSlot], replacement: Replacement) -> Iterator[None]:
    """Within, each parameter gives way to what `other` makes of it, once for all its places."""
    before, made = [(place, place.value) for place in slots], dict[int, Tensor]()
    for place, p in before:
        if id(p) not in made:
            made[id(p)] = replacement(place.name, p)
        place.put(made[id(p)])
    try:
        yield
    finally:
        for place, p in before:
            place.put(p)


@contextmanager
def swap_when_called(units: Sequence[FsdpUnit], replacement: Replacement) -> Iterator[None]:
    """Within, each unit that is called is `swapped`; processes that call the same units may gather in `other`."""
    handles = list[RemovableHandle]()
    for unit in units:
        handles += _swapping(unit, replacement)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _swapping(unit: FsdpUnit, replacement: Replacement) -> list[RemovableHandle]:
    stack = ExitStack()

    def enter(module: nn.Module, args: Any) -> None:
        stack.enter_context(swap_parameters(unit.slots, replacement))

    def restore(module: nn.Module, args: Any, out: Any) -> None:
        stack.close()

    # FSDP's own hooks come first, where a unit is gathered, and last, where it is let go.
    return [unit.module.register_forward_pre_hook(enter), unit.module.register_forward_hook(restore, prepend=True)]


@contextmanager
def observe_parameters(units: Sequence[FsdpUnit], observe: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within, `see` is told each whole parameter and its name, whenever its unit is called."""

    def telling(unit: FsdpUnit) -> RemovableHandle:
        def enter(module: nn.Module, args: Any) -> None:
            for place in unit.slots:
                observe(place.name, place.value)

        return unit.module.register_forward_pre_hook(enter)

    handles = [telling(unit) for unit in units]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
