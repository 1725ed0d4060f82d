"""Models sharded over ranks by FSDP2 (`fully_shard`), and evaluators of them.

Each transformer layer is one FSDP unit, gathered when it is called and freed after; the rest (embeddings, head) belongs to the
root. An evaluator calls backbone and head separately (see `Network`), so the root is `CallModule`, a module around a complete
evaluation: what it gathers stays available inside. Gradients are summed over the ranks and never averaged, since coefficients are
normalised over the full update.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import cloudpickle
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from policygrad.core.batch import Forward
from policygrad.errors import ConfigError
from policygrad.learners.fsdp.context_parallel import ContextGroup
from policygrad.learners.fsdp.path_calls import SharedCalls
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.learners.fsdp.tensor_parallel import apply_tensor_parallel, resolve_tp_plan
from policygrad.learners.fsdp.torchrun import ONE_PROCESS_HINT
from policygrad.learners.local.curvature import CallModule
from policygrad.learners.local.forward import Evaluator, Network, build_evaluator, get_backbone
from policygrad.learners.local.packing import Pack
from policygrad.learners.local.tree_attention import disable_tree_attention, enable_tree_attention
from policygrad.models.adapters import set_adapters_enabled
from policygrad.models.loading import at_least_float32
from policygrad.models.replica import copy_packed, copy_weights, is_packed, make_packed, replace_parameters
from policygrad.models.traits import placeholder_id
from policygrad.utils.out_of_memory import keep_gradients


@dataclass(frozen=True)
class ModelSkeleton:
    """A model without its weights, from which a rank builds its shard of a model that only rank 0 has read."""

    structure: bytes  # the pickled model, with parameters on the meta device
    split_head: bool
    use_tree: bool
    shares_pictures: bool
    reads_prefixes: bool
    window: int | None
    compute_dtype: torch.dtype | None
    """Precision of its passes, if lower than float32, in which the model that rank 0 has read is stored."""
    has_masters: bool = True
    """Shards are in float32 or better; False = in the precision of the model (`optimizer.masters=none`)."""

    @classmethod
    def of(cls, model: nn.Module, temperature: float) -> ModelSkeleton:
        """Make the skeleton of a causal language model, with the shortcuts that `build_evaluator` finds valid."""
        plain, evaluator = cls.without_shortcuts(model), build_evaluator(model, temperature)
        network = evaluator.network
        return replace(
            plain,
            split_head=network.split_head,
            use_tree=network.use_tree,
            shares_pictures=network.shares_pictures,
            reads_prefixes=network.reads_prefixes,
            window=evaluator.window,
        )

    @classmethod
    def without_shortcuts(cls, model: nn.Module) -> ModelSkeleton:
        """Make the skeleton of a model that is only called as a unit, such as a classifier."""
        file = io.BytesIO()
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(model)
        numbers = (p for p in model.parameters() if not is_packed(p))
        compute_dtype = next((p.dtype for p in numbers if at_least_float32(p).dtype != p.dtype), None)
        return cls(file.getvalue(), False, False, True, False, None, compute_dtype)

    def build_meta(self) -> Any:
        """Build the model with parameters on the meta device; tied ones are one object."""
        model = pickle.loads(self.structure)
        disable_tree_attention(model)
        if self.use_tree:
            enable_tree_attention(model, is_checked=True)
        return model

    def choose_stored(self, p: Tensor) -> Tensor:
        """Return a parameter in the precision in which its shards are stored."""
        return at_least_float32(p) if self.has_masters and not is_packed(p) else p

    def build_empty(self, device: torch.device, *, at_least_fp32: bool = False) -> nn.Module:
        """Build the model on a device, frozen, with uninitialised weights."""
        model: nn.Module = self.build_meta()
        like = at_least_float32 if at_least_fp32 else nn.Parameter.detach

        def make(p: nn.Parameter) -> Tensor:
            if is_packed(p):
                return copy_packed(p, torch.empty(p.shape, dtype=p.dtype, device=device))
            return torch.empty_like(like(p), device=device)

        materialise(list(model.modules()), device, make)
        return model.requires_grad_(False)


def materialise(
    modules: Sequence[nn.Module],
    device: torch.device,
    make: Callable[[nn.Parameter], Tensor],
    created: dict[Tensor, nn.Parameter] | None = None,
) -> None:
    """Replace meta parameters as `replace_parameters` does, and move buffers to the device."""
    replace_parameters(modules, lambda p: make(p) if p.is_meta else p, created)
    for module in modules:
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)


def move_to_meta(model: nn.Module) -> None:
    """Move the parameters to the meta device, tied ones as one; structure and buffers remain."""
    replace_parameters(model.modules(), lambda p: torch.empty_like(p, device="meta"))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles parameters without their values. Buffers keep theirs: they are small and computed nowhere else."""

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, nn.Parameter) and is_packed(
            x
        ):  # its scales, an eighth of a bit for each number, are part of the structure
            content, attributes = torch.empty(x.shape, dtype=x.dtype, device="meta"), dict(vars(x))
            attributes.pop("module", None)
            return make_packed, (type(x), content, attributes)
        if isinstance(x, nn.Parameter):
            return nn.Parameter, (torch.empty(x.shape, dtype=x.dtype, device="meta"), x.requires_grad)
        # the receiver may have no device of that name
        if isinstance(x, Tensor) and x.device.type not in ("cpu", "meta"):
            return x.detach().cpu().__reduce_ex__(2)  # type: ignore[no-untyped-call]
        return super().reducer_override(x)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedEvaluator(Evaluator):
    """Log-probabilities under a sharded model; all ranks evaluate at the same time, each a pack of its own or its part of one."""

    root: CallModule
    context: ContextGroup | None = None  # the ranks that divide this one's packs with it

    def share(self, part: Pack) -> Pack:
        """Return the nodes of a pack that this rank reads."""
        return part if self.context is None else self.context.divide(part, self.network_for(part).use_tree)

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of what the ranks that divide a pack have computed."""
        return x if self.context is None else self.context.add_up(x)

    def lead(
        self,
        part: Pack,
        backbone: nn.Module | None = None,
        call: Callable[[Callable[[], Tensor]], Tensor] | None = None,
    ) -> None:
        """Read what a pack follows, with the other ranks: a gradient cannot be computed inside the root."""
        readers, network = part.path_readers, self.network_for(part)
        if readers is None or not network.reads_segments:
            return
        main_backbone = get_backbone(self.model)
        if backbone is not None:
            network = replace(network, routing=None, load=None)
        calls = SharedCalls(network, backbone or main_backbone, call or self.root, readers.all_reduce)
        readers.open(network, backbone or main_backbone, calls).prepare(part)

    @contextmanager
    def keep_gradients(self) -> Iterator[None]:
        """Enclose passes that must leave no gradient. FSDP sums it for each parameter that has required one before."""
        put_back = keep_gradients(dict(self.model.named_parameters()))
        try:
            yield
        finally:
            put_back()

    def forward(self, part: Pack, *args: Any, **options: Any) -> Forward:
        """Evaluate inside the root; other evaluators are sharded too."""
        self.lead(part)

        def work() -> dict[str, Tensor]:  # FSDP does not find the tensors in a dataclass
            out = Evaluator.forward(self, part, *args, **options)
            return {f.name: x for f in fields(out) if (x := getattr(out, f.name)) is not None}

        return Forward(**self.root(work))

    def states(self, part: Pack) -> Tensor:
        """Return the states, and keep the full head on this rank until `release`, since logits may be asked for repeatedly."""
        self.lead(part)
        states: Tensor = self.root(lambda: Evaluator.states(self, part))
        if self.network.split_head:
            cast(FSDPModule, self.root).unshard()
        return states

    def run_in_root(self, work: Callable[[], Tensor]) -> Tensor:
        """Call `work` inside the root, in all ranks at the same time."""
        return self.root(lambda: work().clone())  # type: ignore[no-any-return]  # FSDP may lose track of a view

    def release(self) -> None:
        """Shard the root again."""
        Evaluator.release(self)
        cast(FSDPModule, self.root).reshard()


@dataclass(frozen=True, eq=False, kw_only=True)
class AdapterlessEvaluator(ShardedEvaluator):
    """Evaluates the policy with its adapters off, which is the initial policy and takes no memory."""

    def forward(self, part: Pack, *args: Any, **options: Any) -> Forward:
        set_adapters_enabled(self.model, False)
        try:
            return ShardedEvaluator.forward(self, part, *args, **options)
        finally:
            set_adapters_enabled(self.model, True)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedNetwork(Network):
    """A sharded model's backbone and head, called inside its root; only `hidden` may be called by itself."""

    root: CallModule

    def as_evaluator(self) -> Evaluator:
        return ShardedEvaluator(self, 1.0, root=self.root)

    def _read_prefixes(self, part: Pack, network: nn.Module, *, hidden: bool | None = None) -> Tensor | None:
        """Return None: a layer's state would have its gradient before the layer's output, with which FSDP gathers the layer."""
        return None

    def hidden(self, part: Pack, network: nn.Module | None = None) -> Tensor:
        """Return last hidden states, calling the root if it is this model's backbone."""
        if network is not None:
            return Network.hidden(self, part, network)
        return self.root(lambda: Network.hidden(self, part))  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class ShardPlacement:
    """Where a rank holds its shards, and which ranks hold the others."""

    mesh: DeviceMesh
    tp_mesh: DeviceMesh | None  # the ranks that share the layers' matrices (tensor parallelism)
    device: torch.device
    context: ContextGroup | None = None  # the ranks that divide this one's packs with it


def shard_model(
    skeleton: ModelSkeleton, source: nn.Module | None, workers: WorkerGroup, place: ShardPlacement, temperature: float
) -> ShardedEvaluator:
    """Build the skeleton's model with the weights of `source`, which rank 0 has; no rank ever holds more than one full layer."""
    weights: dict[str, nn.Parameter] = {} if source is None else dict(source.named_parameters())

    def values(name: str, like: Tensor) -> Tensor:
        return workers.broadcast_tensor(weights[name] if weights else None, like, place.device)

    return _build_sharded(skeleton, values, place, temperature)


def share_packed(source: nn.Module, target: nn.Module) -> None:
    """Let a model of the same architecture use another's weights in four bits, which never change."""
    modules = dict(target.named_modules())
    for name, p in source.named_parameters():
        if is_packed(p):
            path, _, key = name.rpartition(".")
            modules[path]._parameters[key] = p


def shard_copy(evaluator: Evaluator, skeleton: ModelSkeleton, place: ShardPlacement) -> ShardedEvaluator:
    """Build a second, frozen model with the evaluator's weights, of which each rank copies its shard."""

    copied = _build_sharded(
        skeleton, lambda name, like: torch.empty_like(like, device=place.device), place, evaluator.temperature
    )
    copy_weights(evaluator.model, copied.model)
    copied.model.requires_grad_(False)
    return copied


def _build_sharded(
    skeleton: ModelSkeleton, values: Callable[[str, Tensor], Tensor], place: ShardPlacement, temperature: float
) -> ShardedEvaluator:
    """Build and shard layer by layer; `values(name, like)` returns a full parameter."""
    model = skeleton.build_meta()
    if not skeleton.has_masters and len(kinds := {p.dtype for p in model.parameters()}) > 1:
        raise ConfigError(
            f"optimizer.masters=none shards weights of one precision, and {type(model).__name__} has "
            f"{', '.join(sorted(map(str, kinds)))}: leave it out, or {ONE_PROCESS_HINT}"
        )
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    module_names = {module: name for name, module in model.named_modules()}
    root, created = CallModule(model), dict[Tensor, nn.Parameter]()
    plan = resolve_tp_plan(model) if place.tp_mesh is not None else {}

    def make(p: nn.Parameter) -> Tensor:
        value = values(names[p], skeleton.choose_stored(p))
        return copy_packed(p, value) if is_packed(p) else value

    def prepare(unit: nn.Module) -> None:
        materialise(list(unit.modules()), place.device, make, created)
        if place.tp_mesh is not None and unit is not root:
            apply_tensor_parallel(unit, module_names, plan, place.tp_mesh)

    apply_fsdp(root, place.mesh, skeleton.compute_dtype, prepare)
    network = ShardedNetwork(
        model,
        split_head=skeleton.split_head,
        use_tree=skeleton.use_tree,
        shares_pictures=skeleton.shares_pictures,
        reads_prefixes=skeleton.reads_prefixes,
        root=root,
    )
    return ShardedEvaluator(network, temperature, skeleton.window, root=root, context=place.context)


def apply_fsdp(
    root: nn.Module,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None,
    prepare: Callable[[nn.Module], None] = lambda unit: None,
) -> None:
    """Shard a module's parameters layer by layer, each after `prepare`. Weights in four bits stay whole in every process.

    `compute_dtype`: the precision in which parameters are gathered, if lower than theirs; gradients are then summed in float32.
    """
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # the transformer layers, as transformers names them
    names = {name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    # a vision tower's belong to the root: every rank calls the same units, and not every micro-batch has a picture
    seeing: list[Any] = [model for model in root.modules() if placeholder_id(model) is not None]
    towers = {module for model in seeing for module in {*model.modules()} - {*model.get_decoder().modules()}}
    layers = [module for module in root.modules() if type(module).__name__ in names and module not in towers]
    for unit in (*reversed(layers), root):
        prepare(unit)
        packed = {p for p in unit.parameters() if is_packed(p)}
        ignored: dict[str, Any] = {"ignored_params": packed} if packed else {}
        module = fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy, **ignored)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13: experts that only some ranks' tokens use
            module.set_reduce_scatter_unused_params(True, recurse=False)


# FSDP units and the slots of their parameters. While a unit is called its modules hold full parameters, which can be observed or
# replaced.

Replacement = Callable[[str, Tensor], Tensor]
"""(a parameter's name, the full parameter) → the tensor to use in its place."""


@dataclass(frozen=True, eq=False)
class ParameterSlot:
    """A module's attribute that holds a parameter; a tied parameter has several."""

    module: nn.Module
    key: str
    name: str  # the parameter's name in the model

    @property
    def value(self) -> Tensor:
        """The tensor that the slot holds."""
        value = self.module._parameters[self.key]
        assert value is not None
        return value

    def put(self, x: Any) -> None:
        """Put a tensor into the slot, parameter or not."""
        self.module._parameters[self.key] = x


@dataclass(frozen=True, eq=False)
class FsdpUnit:
    """A layer, or the root with all that is in no layer."""

    module: nn.Module
    slots: tuple[ParameterSlot, ...]


def find_fsdp_units(root: CallModule) -> list[FsdpUnit]:
    """Return the units of a sharded model, the root last. The model must not be in a call."""
    names = {id(p): name for name, p in root.model.named_parameters()}
    units, seen = list[FsdpUnit](), set[nn.Module]()
    for unit in reversed([module for module in root.modules() if isinstance(module, FSDPModule)]):
        modules = [module for module in unit.modules() if module not in seen]
        seen.update(modules)
        parameters = ((module, key, p) for module in modules for key, p in module._parameters.items() if p is not None)
        units.append(FsdpUnit(unit, tuple(ParameterSlot(module, key, names[id(p)]) for module, key, p in parameters)))
    return units


@contextmanager
def swap_parameters(slots: Iterable[ParameterSlot], replacement: Replacement) -> Iterator[None]:
    """Replace parameters inside the context; `replacement` is called once per parameter, however many slots hold it."""
    originals, created = [(slot, slot.value) for slot in slots], dict[int, Tensor]()
    for slot, p in originals:
        if id(p) not in created:
            created[id(p)] = replacement(slot.name, p)
        slot.put(created[id(p)])
    try:
        yield
    finally:
        for slot, p in originals:
            slot.put(p)


@contextmanager
def swap_when_called(units: Sequence[FsdpUnit], replacement: Replacement) -> Iterator[None]:
    """Replace the parameters of each unit while it is called; `replacement` may gather if all ranks call the same units."""
    with ExitStack() as hooks:
        for unit in units:
            stack = ExitStack()

            def enter(module: nn.Module, args: Any, unit: FsdpUnit = unit, stack: ExitStack = stack) -> None:
                stack.enter_context(swap_parameters(unit.slots, replacement))

            def restore(module: nn.Module, args: Any, out: Any, stack: ExitStack = stack) -> None:
                stack.close()

            # FSDP gathers in its pre-hook, before this one, and frees in its forward hook, after this one.
            hooks.enter_context(unit.module.register_forward_pre_hook(enter))
            hooks.enter_context(unit.module.register_forward_hook(restore, prepend=True))
        yield
