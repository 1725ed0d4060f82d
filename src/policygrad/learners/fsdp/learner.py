"""One process's share of a learner that is spread over several: the same calls in all of them, in the same order.

It is the local learner on a model of which this process holds a share. What is computed once per rollout or update (coefficients,
the choice of tokens, minibatches) every process computes from the same batch; forward and backward passes are divided.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metrics
from policygrad.errors import ConfigError
from policygrad.learners.config import LearnerConfig, OptimizerConfig
from policygrad.learners.fsdp.distributed_ops import FsdpWorkDivision, ShardedCurvature, ShardedScoreNorms
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.learners.fsdp.sharding import (
    AdapterlessEvaluator,
    ModelSkeleton,
    ShardedEvaluator,
    find_fsdp_units,
    shard_copy,
    shard_model,
)
from policygrad.learners.local.curvature import Curvature
from policygrad.learners.local.forward import Evaluator
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.score_norms import ScoreNorms, select_parameters
from policygrad.models.replica import ModelFactory, full_tensor
from policygrad.weight_sync.base import PublishedWeights

# Which box of a tensor a process holds: what it writes of a checkpoint, and what it reads.

_SHARDS = (Shard, _StridedShard)  # the second is one of the first before torch 2.12, and no longer

BoxReader = Callable[[tuple[Sequence[int], Sequence[int]] | None], Tensor]
"""A box (offset, size) of a tensor, or all of it."""


def shard_to_write(x: Tensor, first: bool, counts: bool = True) -> tuple[tuple[int, ...], Tensor] | None:
    """(where it begins, its numbers) of what this process is to write; None: it has none, or another writes it.
    first: whether this is rank 0, which writes what is not spread. counts: whether this is the first of those that share matrices
    and all have the rest.

    Raises:
        ConfigError: a tensor that is spread in ways of which no process has a box.
    """
    if not isinstance(x, DTensor):
        return ((0,) * x.ndim, x) if first else None
    if odd := [p for p in x.placements if not isinstance(p, (*_SHARDS, Replicate))]:
        raise ConfigError(f"a tensor that is spread as {odd[0]} cannot be saved: let the processes shard its rows")
    where: Sequence[int] = x.device_mesh.get_coordinate() or ()
    if any(isinstance(p, Replicate) and at for p, at in zip(x.placements, where, strict=True)):
        return None
    local = x.to_local()
    if (not local.numel() and any(where)) or (x.device_mesh.ndim == 1 and not counts):
        return None
    return local_box(x)[0], local


def local_box(x: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, size) of this process's part. What `_StridedShard` cuts is cut after the rest: rows that tensor parallelism has
    dealt out already, which FSDP then deals out among those that have the same."""
    offset, size = [0] * x.ndim, list(x.shape)
    where: Sequence[int] = x.device_mesh.get_coordinate() or ()
    cuts = zip(x.placements, where, x.device_mesh.shape, strict=True)
    for p, at, count in sorted(cuts, key=lambda found: isinstance(found[0], _StridedShard)):
        if isinstance(p, _SHARDS):
            each = -(-size[p.dim] // count)
            begin = min(at * each, size[p.dim])
            offset[p.dim] += begin
            size[p.dim] = min(each, size[p.dim] - begin)
    return tuple(offset), tuple(size)


def slice_box(full_tensor: Tensor, offset: Sequence[int], size: Sequence[int]) -> Tensor:
    """A box of a tensor."""
    return full_tensor[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))]


def shard_like(parameter: DTensor, like: Tensor, read: BoxReader) -> Tensor:
    """A tensor of this shape, spread as a parameter is, of which this process reads no more than its own; by its rows where the
    shapes differ, which whoever takes it over then says."""
    if parameter.shape != like.shape:
        return shard_rows(like, read, parameter.device_mesh, parameter.to_local().device)
    local = read(local_box(parameter)).to(parameter.to_local().device).contiguous()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=like.shape, stride=parameter.stride()
    )


def shard_rows(like: Tensor, read: BoxReader, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """A tensor of this shape, spread by its rows, of which this process reads no more than its own."""
    placements = [Shard(0)]
    size, offset = compute_local_shape_and_global_offset(like.shape, mesh, placements)
    local = read((offset, size)).to(device)
    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=stride)


@dataclass(frozen=True, kw_only=True)
class FsdpSpec:
    """What every process makes its share of."""

    policy: ModelSkeleton
    reference: ModelSkeleton | None
    """Of π_ref, where a part reads it, and it is a model of its own."""
    adapterless_reference: bool
    """Whether π_ref is the policy with its adapters off."""
    algorithm: Algorithm
    lr: float | None
    steps: int
    temperature: float
    config: LearnerConfig
    optimizer: OptimizerConfig
    device: str
    """cpu or cuda."""
    threads: int
    """That each process computes with, on the CPU."""
    samples: bool
    """Whether every process has the whole policy beside its share, to draw completions with."""
    streams: bool = False
    """Whether none has it, not even rank 0 to publish it from."""


class FsdpLearner(LocalLearner):
    """A share of the policy, its moments and its reference."""

    def __init__(
        self, workers: WorkerGroup, spec: FsdpSpec, source: nn.Module | None = None, reference: nn.Module | None = None
    ) -> None:
        """source, reference: the whole models, which rank 0 has: whose numbers are spread."""
        self.workers, self._spec, self._published = workers, spec, -1
        self.cache: dict[str, Any] = {}  # what others make of the whole model here
        torch.set_num_threads(spec.threads)
        self._device = _select_device(spec.device)
        self.full_model = spec.policy.build_empty(self._device) if source is None and spec.samples else source
        if spec.streams:
            self.full_model = None
        self._dp_mesh, self._tp_mesh = build_meshes(spec.device, workers.size, spec.config.tensor_parallel)
        given = (workers, self._dp_mesh, self._device, spec.temperature, self._tp_mesh)
        self._policy_evaluator = shard_model(spec.policy, source, *given)
        self.division = FsdpWorkDivision(workers, self._dp_mesh, spec.policy.compute_dtype, spec.config.tensor_parallel)
        self._reference_evaluator: ShardedEvaluator | None = (
            AdapterlessEvaluator.of(self._policy_evaluator) if spec.adapterless_reference else None
        )
        if spec.reference is not None:
            self._reference_evaluator = shard_model(spec.reference, reference, *given)
            self._reference_evaluator.model.requires_grad_(False)
        super().__init__(
            self._policy_evaluator.model,
            spec.algorithm,
            lr=spec.lr,
            steps=spec.steps,
            temperature=spec.temperature,
            config=spec.config,
            optimizer=spec.optimizer,
            build=lambda: spec.policy.build_empty(self._device, at_least_fp32=True),
        )

    def _build_evaluator(self, model: nn.Module, temperature: float) -> Evaluator:
        return self._policy_evaluator

    def _build_reference(
        self, algorithm: Algorithm, given: nn.Module | None, build: ModelFactory | None
    ) -> Evaluator | None:
        return self._reference_evaluator

    def _frozen_copy(self, evaluator: Evaluator, build: ModelFactory | None) -> Evaluator:
        blueprint = self._spec.reference if evaluator is self._reference_evaluator else self._spec.policy
        assert blueprint is not None  # of an adapter that is off there is no second one: see `FsdpController.of`
        return shard_copy(evaluator, blueprint, self._dp_mesh, self._device, self._tp_mesh)

    def _build_curvature(self) -> Curvature:
        return ShardedCurvature(self.networks, units=find_fsdp_units(self._policy_evaluator.root)).verify()

    def _build_score_norms(self) -> ScoreNorms:
        chosen = select_parameters(self.model, self.config.score_parameters)
        return ShardedScoreNorms(
            self.evaluator,
            chosen,
            1,
            batched=False,
            division=self.division,
            units=find_fsdp_units(self._policy_evaluator.root),
        )

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """As `LocalLearner.update`."""
        if isinstance(self.curvature, ShardedCurvature):  # which compares with a policy that stands still
            self.snapshot_old_policy()
            self.curvature = replace(self.curvature, networks=self.networks)
        return super().update(batch, psi, algorithm)

    def set_lr(self, value: float) -> None:
        """As setting `lr`."""
        self.lr = value

    @torch.no_grad()
    def publish(self) -> PublishedWeights:
        """The weights, gathered one after another into the whole model of each process that has one."""
        targets = {} if self.full_model is None else dict(self.full_model.named_parameters())
        if self._published != self.version:
            for name, parameter in self.model.named_parameters():
                if self._published >= 0 and not parameter.requires_grad:
                    continue  # it is where it was
                full_parameter = full_tensor(parameter)
                if targets:
                    targets[name].copy_(full_parameter)
            self._published = self.version
        return PublishedWeights(self.version, targets)

    @torch.no_grad()
    def gather_parameter(self, name: str, dtype: torch.dtype) -> Tensor:
        """One parameter, rounded before it is gathered."""
        parameter = self.model.get_parameter(name).detach()
        return full_tensor(parameter.to(dtype))

    @torch.no_grad()
    def compute_logits(self, ids: Tensor) -> Tensor:
        """[b, L, V] of ids [b, L], which every process computes: each layer is gathered once."""
        ids = ids.to(self._device)
        where = torch.arange(ids.shape[1], device=self._device).expand_as(ids)
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": where, "use_cache": False}
        output: Tensor = cast(Any, self._policy_evaluator.root)(lambda: self.model(**call).logits)
        return output

    @torch.no_grad()
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As of one process, so that any number of them can go on with it; the tensors are rank 0's alone."""
        tensors, values = super().state()
        gathered: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            complete = full_tensor(tensor)
            if self.workers.rank == 0:
                gathered[name] = complete.cpu()
        return gathered, values

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The state of a checkpoint, which rank 0 has; the others know its names, shapes and types."""
        self.load_shards({name: self._shard_tensor(name, tensor) for name, tensor in tensors.items()}, values)

    @torch.no_grad()
    def load_shards(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """A state of which this process has its share."""
        self._published = -1
        super().restore(tensors, values)

    def load_shard(self, name: str, like: Tensor, read: BoxReader) -> Tensor:
        """This process's share of a checkpoint's tensor of this name and shape."""
        if not like.ndim:
            return read(None)
        parameter = self._sharded_parameter(name) if self._tp_mesh is not None else None
        return (
            shard_rows(like, read, self._dp_mesh, self._device)
            if parameter is None
            else shard_like(parameter, like, read)
        )

    def _sharded_parameter(self, name: str) -> DTensor | None:
        """The parameter that a checkpoint's tensor is of, as it is spread; None where there is none of the name."""
        prefix, _, key = name.partition("/")
        parameters: Mapping[str, Tensor] = self.optimizer.masters
        if prefix == "reference" and self.reference is not None:
            parameters, key = dict(self.reference.model.named_parameters()), f"weights/{key}"
        elif prefix == "critic" and self.critic is not None:
            parameters = self.critic.optimizer.masters
        elif prefix == "reward_model" and self.reward_model is not None:
            parameters = self.reward_model.optimizer.masters
        else:
            key = name
        kind, _, key = key.partition("/")
        parameter = parameters.get(key if kind == "weights" else key.rpartition("/")[0])
        return parameter if isinstance(parameter, DTensor) else None

    def sharded_state(self) -> dict[str, tuple[torch.Size, tuple[int, ...], Tensor]]:
        """What this process is to write of the state: of each tensor the whole one's shape, where its part begins, the part."""
        tensors, _ = super().state()
        first = self.workers.rank == 0, self.workers.rank % self._spec.config.tensor_parallel == 0
        shards = {name: (x.shape, shard_to_write(x, *first)) for name, x in tensors.items()}
        return {name: (shape, *part) for name, (shape, part) in shards.items() if part is not None}

    def state_values(self) -> dict[str, Any]:
        """The state's values, which all processes have."""
        return super().state()[1]

    def _shard_tensor(self, name: str, tensor: Tensor) -> Tensor:
        device = self._device if tensor.ndim else torch.device("cpu")
        full_tensor = self.workers.broadcast_tensor(None if tensor.is_meta else tensor, tensor, device)
        parameter = self._sharded_parameter(name) if tensor.ndim and self._tp_mesh is not None else None
        if parameter is not None:
            return shard_like(
                parameter, full_tensor, lambda box: full_tensor if box is None else slice_box(full_tensor, *box)
            )
        return (
            distribute_tensor(full_tensor, self._dp_mesh, [Shard(0)], src_data_rank=None)
            if tensor.ndim
            else full_tensor
        )


def build_meshes(device: str, size: int, tensor: int) -> tuple[DeviceMesh, DeviceMesh | None]:
    """(of the processes that read other texts than this one, of those that share its layers' matrices, if any)."""
    if tensor == 1:
        return init_device_mesh(device, (size,)), None
    both = init_device_mesh(device, (size // tensor, tensor), mesh_dim_names=("texts", "tensor"))
    both._flatten("all")  # what is summed over both is summed once, and PyTorch does not warn that it takes two sums
    return both["texts"], both["tensor"]


def _select_device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
