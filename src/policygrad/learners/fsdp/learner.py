"""One rank's part of a sharded learner: every rank makes the same calls in the same order.

It is the local learner on a sharded model. What is computed once per rollout or update (coefficients, token selection, minibatches)
every rank computes from the same batch; forward and backward passes are divided between the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.media import TextMedia
from policygrad.core.metrics import Metrics
from policygrad.errors import ConfigError
from policygrad.learners.base import LearnerSpec
from policygrad.learners.fsdp.context_parallel import ContextGroup
from policygrad.learners.fsdp.distributed_ops import FsdpWorkDivision, ShardedCurvature, ShardedScoreNorms
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.learners.fsdp.sharding import (
    AdapterlessEvaluator,
    ModelSkeleton,
    ShardedEvaluator,
    ShardPlacement,
    find_fsdp_units,
    shard_copy,
    shard_model,
    share_packed,
)
from policygrad.learners.local.curvature import Curvature
from policygrad.learners.local.forward import Evaluator, choose_kernels
from policygrad.learners.local.learner import LocalLearner, is_live
from policygrad.learners.local.packing import MICRO_TOKENS_FLAG, WorkDivision
from policygrad.learners.local.score_norms import ScoreNorms, select_parameters
from policygrad.models.replica import ModelFactory, full_tensor, local_box
from policygrad.models.traits import placeholder_id
from policygrad.models.vision import read_texts
from policygrad.utils.out_of_memory import MemoryBudget
from policygrad.weight_sync.base import PublishedWeights

_SHARDS = (Shard, _StridedShard)  # before torch 2.12 the second is a subclass of the first
BoxReader = Callable[[tuple[Sequence[int], Sequence[int]] | None], Tensor]
"""Reads a box of a stored tensor, or all of it (None)."""


# Which box of a tensor a rank holds: what it writes to a checkpoint and reads from one.


def shard_to_write(x: Tensor, is_first: bool, is_first_of_tp: bool) -> tuple[tuple[int, ...], Tensor] | None:
    """Return (offset, local tensor) of what this rank writes; None if it holds nothing or another rank writes the same.

    The first rank writes tensors that are not sharded; the ranks that share layers all hold the parameters outside them.

    Raises:
        ConfigError: The tensor's placement gives a rank no box.
    """
    if not isinstance(x, DTensor):
        return ((0,) * x.ndim, x) if is_first else None
    if unknown := [p for p in x.placements if not isinstance(p, (*_SHARDS, Replicate))]:
        raise ConfigError(f"a tensor with the placement {unknown[0]} cannot be saved: shard its rows")
    coordinates: Sequence[int] = x.device_mesh.get_coordinate() or ()
    if any(isinstance(p, Replicate) and at for p, at in zip(x.placements, coordinates, strict=True)):
        return None
    local = x.to_local()
    if (not local.numel() and any(coordinates)) or (x.device_mesh.ndim == 1 and not is_first_of_tp):
        return None
    return local_box(x)[0], local


def shard_like(parameter: DTensor, like: Tensor, read: BoxReader) -> Tensor:
    """Return a tensor of the shape of `like`, placed as a parameter is, reading only this rank's part.

    If the shapes differ it is sharded by rows; the caller reports the mismatch.
    """
    if parameter.shape != like.shape:
        return shard_rows(like, read, parameter.device_mesh, parameter.to_local().device)
    local = read(local_box(parameter)).to(parameter.to_local().device).contiguous()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=like.shape, stride=parameter.stride()
    )


def shard_rows(like: Tensor, read: BoxReader, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """Return a tensor of the shape of `like`, sharded by rows, reading only this rank's part."""
    placements = [Shard(0)]
    size, offset = compute_local_shape_and_global_offset(like.shape, mesh, placements)
    local = read((offset, size)).to(device)
    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=stride)


@dataclass(frozen=True, kw_only=True)
class FsdpSpec:
    """What rank 0 sends the others to make a learner from."""

    learner: LearnerSpec
    policy: ModelSkeleton
    reference: ModelSkeleton | None  # skeleton of π_ref, if a part reads it and it is a model of its own
    adapterless_reference: bool  # π_ref is the policy with its adapters off
    device: str  # cpu or cuda
    threads: int  # CPU threads of each rank
    replicate_policy: bool = False  # every rank has the full policy beside its shard, to sample with
    stream_weights: bool = False  # no rank has the full policy, not even rank 0 to publish it from


class FsdpLearner(LocalLearner):
    """A shard of the policy, its moments and its reference."""

    def __init__(
        self, workers: WorkerGroup, spec: FsdpSpec, source: nn.Module | None = None, reference: nn.Module | None = None
    ) -> None:
        """`source` and `reference` are the full models, in rank 0 alone."""
        self.workers, self._fsdp_spec, self._published_version = workers, spec, -1
        self.cache: dict[str, Any] = {}  # for callers: what they make of the full model in this rank
        config, temperature = spec.learner.config, spec.learner.temperature
        torch.set_num_threads(spec.threads)
        device = torch.device(spec.device)
        if spec.device != "cpu":
            device = torch.device(spec.device, int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        self.full_model = source
        if source is None and spec.replicate_policy:
            self.full_model = spec.policy.build_empty(device)
        if spec.stream_weights:
            self.full_model = None
        meshes = build_meshes(spec.device, workers.size, config.tensor_parallel)
        context = build_context_group(spec.device, workers.size, config.context_parallel)
        self._place = ShardPlacement(*meshes, device, context)
        policy = shard_model(spec.policy, source, workers, self._place, temperature)
        if self.full_model is not None:
            share_packed(policy.model, self.full_model)
        self._policy_evaluator = choose_kernels(policy, config)
        self._reference_evaluator: ShardedEvaluator | None = None
        if spec.adapterless_reference:
            policy = self._policy_evaluator
            self._reference_evaluator = AdapterlessEvaluator(
                policy.network, policy.temperature, policy.window, root=policy.root, context=policy.context
            )
        elif spec.reference is not None:
            shared = shard_model(spec.reference, reference, workers, self._place, temperature)
            self._reference_evaluator = choose_kernels(shared, config)
            self._reference_evaluator.model.requires_grad_(False)
        build = partial(spec.policy.build_empty, device, at_least_fp32=True)
        super().__init__(self._policy_evaluator.model, spec.learner, build=build)

    def _build_division(self) -> WorkDivision:
        spec, device = self._fsdp_spec, self._place.device
        memory = MemoryBudget(MICRO_TOKENS_FLAG, "tokens", device, retries=False)
        config = spec.learner.config
        sizes = config.tensor_parallel, config.context_parallel
        return FsdpWorkDivision(self.workers, self._place.mesh, spec.policy.compute_dtype, *sizes, memory=memory)

    def _build_evaluator(self, model: nn.Module, temperature: float) -> Evaluator:
        return self._policy_evaluator

    def _build_reference(
        self, algorithm: Algorithm, given: nn.Module | None, build: ModelFactory | None
    ) -> Evaluator | None:
        return self._policy_evaluator if is_live(algorithm) else self._reference_evaluator

    def _frozen_copy(self, evaluator: Evaluator, build: ModelFactory | None) -> Evaluator:
        is_reference = evaluator is self._reference_evaluator
        skeleton = self._fsdp_spec.reference if is_reference else self._fsdp_spec.policy
        assert skeleton is not None  # an adapterless reference is never copied: see `FsdpController`
        return shard_copy(evaluator, skeleton, self._place)

    def _build_curvature(self) -> Curvature:
        return ShardedCurvature(self.networks, units=find_fsdp_units(self._policy_evaluator.root)).verify()

    def _build_score_norms(self) -> ScoreNorms:
        parameters = select_parameters(self.model, self.config.score_parameters)
        units = find_fsdp_units(self._policy_evaluator.root)
        return ShardedScoreNorms(self.evaluator, parameters, 1, batched=False, division=self.division, units=units)

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        if isinstance(self.curvature, ShardedCurvature):  # it compares with a policy that does not move
            self.snapshot_old_policy()
            self.curvature = replace(self.curvature, networks=self.networks)
        return super().update(batch, psi, algorithm)

    def set_lr(self, value: float) -> None:
        self.lr = value

    @torch.no_grad()
    def publish(self) -> PublishedWeights:
        """Gather the weights one after another into the full model of each rank that has one."""
        targets = {} if self.full_model is None else dict(self.full_model.named_parameters())
        if self._published_version != self.version:
            for name, parameter in self.model.named_parameters():
                if self._published_version >= 0 and not parameter.requires_grad:
                    continue  # published before, and unchanged
                full_parameter = full_tensor(parameter)
                if targets:
                    targets[name].copy_(full_parameter)
            self._published_version = self.version
        return PublishedWeights(self.version, targets)

    @torch.no_grad()
    def gather_parameter(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one full parameter, rounded to `dtype` before it is gathered."""
        return full_tensor(self.model.get_parameter(name).detach().to(dtype))

    @torch.no_grad()
    def compute_logits(self, ids: Tensor, media: Sequence[TextMedia] = ()) -> Tensor:
        """Return logits [b, L, V] of token ids [b, L] and the pictures of each text (() = none has any); every rank computes them,
        so each layer is gathered once."""
        ids = ids.to(self._place.device)
        if placeholder_id(self.model) is not None:
            return self._policy_evaluator.root(lambda: read_texts(self.model, ids, media))  # type: ignore[no-any-return]
        positions = torch.arange(ids.shape[1], device=self._place.device).expand_as(ids)
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions, "use_cache": False}
        return self._policy_evaluator.root(lambda: self.model(**call).logits)  # type: ignore[no-any-return]

    @torch.no_grad()
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state in the form of one process's, with tensors in rank 0 alone."""
        tensors, values = super().state()
        gathered: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            complete = full_tensor(tensor)
            if self.workers.rank == 0:
                gathered[name] = complete.cpu()
        return gathered, values

    def state_values(self) -> dict[str, Any]:
        return super().state()[1]

    def sharded_state(self) -> dict[str, tuple[torch.Size, tuple[int, ...], Tensor]]:
        """Return what this rank writes of the state: by tensor its full shape, the offset of the part, and the part."""
        tensors, _ = super().state()
        rank, tp_size = self.workers.rank, self._fsdp_spec.learner.config.tensor_parallel
        shards = {name: (x.shape, shard_to_write(x, rank == 0, rank % tp_size == 0)) for name, x in tensors.items()}
        return {name: (shape, *shard) for name, (shape, shard) in shards.items() if shard is not None}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint, which rank 0 has; the others have its tensors on the meta device."""
        shards = dict[str, Tensor]()
        for name, tensor in tensors.items():
            device = self._place.device if tensor.ndim else torch.device("cpu")
            complete = self.workers.broadcast_tensor(None if tensor.is_meta else tensor, tensor, device)

            def read(box: tuple[Sequence[int], Sequence[int]] | None, complete: Tensor = complete) -> Tensor:
                if box is None:
                    return complete
                return complete[tuple(slice(at, at + n) for at, n in zip(*box, strict=True))].clone()  # frees the rest

            shards[name] = self.load_shard(name, complete, read)
        self.load_shards(shards, values)

    @torch.no_grad()
    def load_shards(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load a state that is sharded already."""
        self._published_version = -1
        super().restore(tensors, values)

    def load_shard(self, name: str, like: Tensor, read: BoxReader) -> Tensor:
        """Return this rank's part of a checkpoint's tensor with the shape of `like`."""
        if not like.ndim:
            return read(None)
        if self._place.tp_mesh is None:
            return shard_rows(like, read, self._place.mesh, self._place.device)
        # placed as the parameter is that it belongs to; otherwise sharded by rows
        prefix, _, rest = name.partition("/")
        optimizers = self._auxiliary_optimizers()
        parameters: Mapping[str, Tensor] = optimizers.get(prefix, self.optimizer).masters
        kind, _, key = (rest if prefix in optimizers else name).partition("/")
        if prefix == "reference" and self.reference is not None:
            parameters = dict(self.reference.model.named_parameters())
        elif kind != "weights":  # adam/NAME/MOMENT
            key = key.rpartition("/")[0]
        parameter = parameters.get(key)
        if not isinstance(parameter, DTensor):
            return shard_rows(like, read, self._place.mesh, self._place.device)
        return shard_like(parameter, like, read)


def build_meshes(device: str, size: int, tp_size: int) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh of the ranks that read different texts, and that of the ranks that share layers (None = no sharing).

    They are the same for all learners of a process group. DTensor remembers meshes and finds them by their contents: of two equal
    ones it may use the groups of the first, and another rank those of the second, so that both wait for ever.
    """
    key = device, size, tp_size
    if key not in (meshes := _built.of_group().meshes):
        if tp_size == 1:
            meshes[key] = init_device_mesh(device, (size,)), None
        else:
            mesh = init_device_mesh(device, (size // tp_size, tp_size), mesh_dim_names=("texts", "tensor"))
            mesh._flatten(
                "all"
            )  # so that a sum over both dimensions is one operation, about which PyTorch does not warn
            meshes[key] = mesh["texts"], mesh["tensor"]
    return meshes[key]


def build_context_group(device: str, size: int, count: int) -> ContextGroup | None:
    """Return the `count` neighbouring ranks that divide packs, this one among them (context parallelism); None = it alone."""
    if count == 1:
        return None
    key = device, size, count
    if key not in (contexts := _built.of_group().contexts):
        mesh = init_device_mesh(device, (size // count, count), mesh_dim_names=("packs", "nodes"))["nodes"]
        contexts[key] = ContextGroup(mesh.get_group(), mesh.get_local_rank(), count)
    return contexts[key]


@dataclass
class _Built:
    """The meshes of a process group."""

    world: object = None
    meshes: dict[tuple[str, int, int], tuple[DeviceMesh, DeviceMesh | None]] = field(default_factory=dict)
    contexts: dict[tuple[str, int, int], ContextGroup] = field(default_factory=dict)

    def of_group(self) -> _Built:
        """Return self, emptied where the process group is another one by now."""
        if self.world is not dist.group.WORLD:
            self.world, self.meshes, self.contexts = dist.group.WORLD, {}, {}
        return self


_built = _Built()
