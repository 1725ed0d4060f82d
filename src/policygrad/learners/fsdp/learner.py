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
from policygrad.learners.fsdp.distributed_ops import Dealt, ShardedCurvature, ShardedScoreNorms
from policygrad.learners.fsdp.processes import Ranks
from policygrad.learners.fsdp.sharding import BareEvaluator, Blueprint, ShardedEvaluator, sharded, twin, units
from policygrad.learners.local.curvature import Curvature
from policygrad.learners.local.forward import Evaluator
from policygrad.learners.local.learner import LocalLearner
from policygrad.learners.local.score_norms import ScoreNorms, matching
from policygrad.models.replica import Build, full
from policygrad.weight_sync.base import Published

# Which box of a tensor a process holds: what it writes of a checkpoint, and what it reads.

_SHARDS = (Shard, _StridedShard)  # the second is one of the first before torch 2.12, and no longer

Read = Callable[[tuple[Sequence[int], Sequence[int]] | None], Tensor]
"""A box (offset, size) of a tensor, or all of it."""


def part_of(x: Tensor, first: bool, counts: bool = True) -> tuple[tuple[int, ...], Tensor] | None:
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
    return box_of(x)[0], local


def box_of(x: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
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


def part(whole: Tensor, offset: Sequence[int], size: Sequence[int]) -> Tensor:
    """A box of a tensor."""
    return whole[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))]


def share_as(kept: DTensor, like: Tensor, read: Read) -> Tensor:
    """A tensor of this shape, spread as a parameter is, of which this process reads no more than its own; by its rows where the
    shapes differ, which whoever takes it over then says."""
    if kept.shape != like.shape:
        return share_of(like, read, kept.device_mesh, kept.to_local().device)
    local = read(box_of(kept)).to(kept.to_local().device).contiguous()
    return DTensor.from_local(
        local, kept.device_mesh, kept.placements, run_check=False, shape=like.shape, stride=kept.stride()
    )


def share_of(like: Tensor, read: Read, mesh: DeviceMesh, device: torch.device) -> Tensor:
    """A tensor of this shape, spread by its rows, of which this process reads no more than its own."""
    placements = [Shard(0)]
    size, offset = compute_local_shape_and_global_offset(like.shape, mesh, placements)
    local = read((offset, size)).to(device)
    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=stride)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every process makes its share of."""

    policy: Blueprint
    reference: Blueprint | None
    """Of π_ref, where a part reads it, and it is a model of its own."""
    bare: bool
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
        self, ranks: Ranks, plan: Plan, source: nn.Module | None = None, reference: nn.Module | None = None
    ) -> None:
        """source, reference: the whole models, which rank 0 has: whose numbers are spread."""
        self.ranks, self._plan, self._published = ranks, plan, -1
        self.kept: dict[str, Any] = {}  # what others make of the whole model here
        torch.set_num_threads(plan.threads)
        self._device = _device(plan.device)
        self.whole = plan.policy.empty(self._device) if source is None and plan.samples else source
        if plan.streams:
            self.whole = None
        self._mesh, self._across = meshes(plan.device, ranks.size, plan.config.tensor)
        given = (ranks, self._mesh, self._device, plan.temperature, self._across)
        self._own = sharded(plan.policy, source, *given)
        self.division = Dealt(ranks, self._mesh, plan.policy.narrow, plan.config.tensor)
        self._theirs: ShardedEvaluator | None = BareEvaluator.of(self._own) if plan.bare else None
        if plan.reference is not None:
            self._theirs = sharded(plan.reference, reference, *given)
            self._theirs.model.requires_grad_(False)
        super().__init__(
            self._own.model,
            plan.algorithm,
            lr=plan.lr,
            steps=plan.steps,
            temperature=plan.temperature,
            config=plan.config,
            optimizer=plan.optimizer,
            build=lambda: plan.policy.empty(self._device, wide=True),
        )

    def _probed(self, model: nn.Module, temperature: float) -> Evaluator:
        return self._own

    def _reference(self, algorithm: Algorithm, given: nn.Module | None, build: Build | None) -> Evaluator | None:
        return self._theirs

    def _twin(self, evaluator: Evaluator, build: Build | None) -> Evaluator:
        blueprint = self._plan.reference if evaluator is self._theirs else self._plan.policy
        assert blueprint is not None  # of an adapter that is off there is no second one: see `RankedLearner.of`
        return twin(evaluator, blueprint, self._mesh, self._device, self._across)

    def _curvature(self) -> Curvature:
        return ShardedCurvature(self.networks, units=units(self._own.root)).checked()

    def _score_norms(self) -> ScoreNorms:
        chosen = matching(self.model, self.config.score_parameters)
        return ShardedScoreNorms(
            self.evaluator, chosen, 1, together=False, division=self.division, units=units(self._own.root)
        )

    def update(self, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Metrics:
        """As `LocalLearner.update`."""
        if isinstance(self.curvature, ShardedCurvature):  # which compares with a policy that stands still
            self.remember()
            self.curvature = replace(self.curvature, networks=self.networks)
        return super().update(batch, psi, algorithm)

    def set_lr(self, value: float) -> None:
        """As setting `lr`."""
        self.lr = value

    @torch.no_grad()
    def publish(self) -> Published:
        """The weights, gathered one after another into the whole model of each process that has one."""
        own = {} if self.whole is None else dict(self.whole.named_parameters())
        if self._published != self.version:
            for name, parameter in self.model.named_parameters():
                if self._published >= 0 and not parameter.requires_grad:
                    continue  # it is where it was
                whole = full(parameter)
                if own:
                    own[name].copy_(whole)
            self._published = self.version
        return Published(self.version, own)

    @torch.no_grad()
    def gathered(self, name: str, dtype: torch.dtype) -> Tensor:
        """One parameter, rounded before it is gathered."""
        parameter = self.model.get_parameter(name).detach()
        return full(parameter.to(dtype))

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """[b, L, V] of ids [b, L], which every process computes: each layer is gathered once."""
        ids = ids.to(self._device)
        where = torch.arange(ids.shape[1], device=self._device).expand_as(ids)
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": where, "use_cache": False}
        found: Tensor = cast(Any, self._own.root)(lambda: self.model(**call).logits)
        return found

    @torch.no_grad()
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As of one process, so that any number of them can go on with it; the tensors are rank 0's alone."""
        tensors, values = super().state()
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            whole = full(tensor)
            if self.ranks.rank == 0:
                found[name] = whole.cpu()
        return found, values

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """The state of a checkpoint, which rank 0 has; the others know its names, shapes and types."""
        self.adopt({name: self._spread(name, tensor) for name, tensor in tensors.items()}, values)

    @torch.no_grad()
    def adopt(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """A state of which this process has its share."""
        self._published = -1
        super().restore(tensors, values)

    def share(self, name: str, like: Tensor, read: Read) -> Tensor:
        """This process's share of a checkpoint's tensor of this name and shape."""
        if not like.ndim:
            return read(None)
        kept = self._kept(name) if self._across is not None else None
        return share_of(like, read, self._mesh, self._device) if kept is None else share_as(kept, like, read)

    def _kept(self, name: str) -> DTensor | None:
        """The parameter that a checkpoint's tensor is of, as it is spread; None where there is none of the name."""
        beside, _, rest = name.partition("/")
        own: Mapping[str, Tensor] = self.optimizer.masters
        if beside == "reference" and self.reference is not None:
            own, rest = dict(self.reference.model.named_parameters()), f"weights/{rest}"
        elif beside == "critic" and self.critic is not None:
            own = self.critic.optimizer.masters
        elif beside == "reward_model" and self.reward_model is not None:
            own = self.reward_model.optimizer.masters
        else:
            rest = name
        kind, _, rest = rest.partition("/")
        found = own.get(rest if kind == "weights" else rest.rpartition("/")[0])
        return found if isinstance(found, DTensor) else None

    def held(self) -> dict[str, tuple[torch.Size, tuple[int, ...], Tensor]]:
        """What this process is to write of the state: of each tensor the whole one's shape, where its part begins, the part."""
        tensors, _ = super().state()
        first = self.ranks.rank == 0, self.ranks.rank % self._plan.config.tensor == 0
        found = {name: (x.shape, part_of(x, *first)) for name, x in tensors.items()}
        return {name: (shape, *part) for name, (shape, part) in found.items() if part is not None}

    def values(self) -> dict[str, Any]:
        """The state's values, which all processes have."""
        return super().state()[1]

    def _spread(self, name: str, tensor: Tensor) -> Tensor:
        device = self._device if tensor.ndim else torch.device("cpu")
        whole = self.ranks.given(None if tensor.is_meta else tensor, tensor, device)
        kept = self._kept(name) if tensor.ndim and self._across is not None else None
        if kept is not None:
            return share_as(kept, whole, lambda box: whole if box is None else part(whole, *box))
        return distribute_tensor(whole, self._mesh, [Shard(0)], src_data_rank=None) if tensor.ndim else whole


def meshes(device: str, size: int, tensor: int) -> tuple[DeviceMesh, DeviceMesh | None]:
    """(of the processes that read other texts than this one, of those that share its layers' matrices, if any)."""
    if tensor == 1:
        return init_device_mesh(device, (size,)), None
    both = init_device_mesh(device, (size // tensor, tensor), mesh_dim_names=("texts", "tensor"))
    both._flatten("all")  # what is summed over both is summed once, and PyTorch does not warn that it takes two sums
    return both["texts"], both["tensor"]


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
