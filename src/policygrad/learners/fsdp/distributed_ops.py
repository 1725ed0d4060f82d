"""What the ranks compute together beyond a gradient: Fisher products, exact score norms, and the division of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from math import ceil
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from policygrad.core.batch import Batch, Forward
from policygrad.core.metrics import Metrics, merge
from policygrad.errors import ConfigError
from policygrad.learners.fsdp.processes import WorkerGroup
from policygrad.learners.fsdp.sharding import FsdpUnit, apply_fsdp, swap_parameters, swap_when_called
from policygrad.learners.local.curvature import (
    CallModule,
    Curvature,
    make_dual,
    output_hessian_product,
    unpack_dual,
)
from policygrad.learners.local.packing import (
    MICRO_TOKENS_FLAG,
    Pack,
    PathPacks,
    WorkDivision,
    make_smallest_pack,
    pack_micro_batches,
)
from policygrad.learners.local.score_norms import Norms, ScoreNorms
from policygrad.models.loading import at_least_float32
from policygrad.models.replica import PlainAttention, copy_weights, full_tensor, local_tensor
from policygrad.utils.out_of_memory import MemoryBudget

T = TypeVar("T")
PACKING_SLACK = 1.1
"""Token limit of a smaller micro-batch over the mean: packs are never quite full, and a shared prefix counts in each."""
_COMPARED = frozenset({"entropy", "kl_old"})
_HINT = "train in one process (learner.world_size=1), or choose an algorithm of gradient steps, such as grpo"


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedCurvature(Curvature):
    """Curvature of a sharded policy, with sharded vectors; `networks.old` is a model of its own with the current weights.

    J v is a forward pass in which every unit, when it is gathered, gathers its part of v too. Jᵀ w is FSDP's backward pass, which
    sums over the ranks. To evaluate another θ the shards are moved there and back.
    """

    units: Sequence[FsdpUnit]

    def verify(self) -> Curvature:
        """Return self if ⟨Jv, Jv⟩ = ⟨Jᵀ(Jv), v⟩ on a synthetic text. Raises ConfigError if it is not, or an operation
        of the model has no forward mode."""
        optimizer, part = self.networks.optimizer, self._synthetic_pack()
        generator = torch.Generator().manual_seed(0)
        shards = [local_tensor(p.detach()).flatten() for p in optimizer.masters.values()]
        scales = [float(p.std(correction=0)) + 1e-3 if p.numel() else 0.0 for p in shards]
        v = torch.cat(
            [(torch.randn(len(p), generator=generator) * x).to(p) for p, x in zip(shards, scales, strict=True)]
        )
        try:
            states, change = self._jvp_states(part, optimizer.split(v))
        except NotImplementedError as error:
            raise ConfigError(
                f"a trust region in several processes needs forward-mode derivatives, which an operation of the model lacks "
                f"({error}): {_HINT}"
            ) from error
        with torch.enable_grad(), self.networks.backward_mode():
            torch.autograd.backward(self._root(lambda: (self._states(part) * change).sum()))
        optimizer.accumulate_master_grads()
        all_reduce = self.networks.division.all_reduce
        pulled, processes = optimizer.pop_flat_gradient(), float(all_reduce(torch.ones(1)))
        forward_product = float(change.double().square().sum())
        reverse_product = float(all_reduce((pulled @ v).cpu())) / processes
        tolerance = 1e-3 if states.dtype in (torch.float32, torch.float64) else 0.1
        if not abs(forward_product - reverse_product) <= tolerance * forward_product:
            raise ConfigError(
                "an operation of the model has different derivatives in forward and reverse mode, so Fisher products would be "
                f"wrong: {_HINT}"
            )
        return self

    @property
    def _root(self) -> nn.Module:
        return self.units[-1].module

    def _jvp_states(self, part: Pack, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        def add_tangent(name: str, p: Tensor) -> Tensor:
            return make_dual(p.detach(), full_tensor(tangents[name]).to(p.dtype)) if name in tangents else p

        with PlainAttention(), torch.no_grad(), forward_ad.dual_level(), swap_when_called(self.units, add_tangent):
            return unpack_dual(self._root(lambda: self._states(part)))

    def _product(self, part: Pack, tangents: Mapping[str, Tensor], weight: Tensor, sampled: bool) -> None:
        _, change = self._jvp_states(part, tangents)
        head = self.networks.policy.network.head
        head_modules = set() if head is None else set(head.modules())
        slots = [slot for slot in self.units[-1].slots if slot.module in head_modules]  # full while the root is called
        head_tangents = {slot.name: full_tensor(tangents[slot.name]) for slot in slots if slot.name in tangents}

        def chunk_surrogate(states: Tensor, change: Tensor, index: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
            def add_tangent(name: str, p: Tensor) -> Tensor:
                return make_dual(p.detach(), head_tangents[name].to(p.dtype)) if name in head_tangents else p

            with torch.no_grad():
                with forward_ad.dual_level(), swap_parameters(slots, add_tangent):
                    logits, tangent = unpack_dual(self._head(make_dual(states.detach(), change)))
                cotangent = output_hessian_product(logits, tangent, index, tokens, weight.to(logits.dtype), sampled)
            return (self._head(states) * cotangent).sum()

        def surrogate() -> Tensor:
            """Return a scalar whose gradient is Jᵀ H J v, with H the output Hessian."""
            traced, weights = self._states(part), weight[part.mask]
            chunks = list(self._chunks(part, traced))
            total = traced.new_zeros(())
            for which, index, tokens, order in chunks:
                inputs = (traced[which], change[which], index, tokens, weights[order])
                recomputed = partial(checkpoint, chunk_surrogate, use_reentrant=False)
                total = total + (recomputed if len(chunks) > 1 else chunk_surrogate)(*inputs)
            return total

        with self.networks.backward_mode():
            torch.autograd.backward(self._root(surrogate))

    @contextmanager
    def _shifted(self, delta: Tensor) -> Iterator[Callable[[Pack], Forward]]:
        policy, optimizer, old = self.networks.policy, self.networks.optimizer, self.networks.old
        assert old is not None  # `FsdpLearner.update` has made it
        for master, change in zip(optimizer.masters.values(), optimizer.split(delta).values(), strict=True):
            master.add_(change)
        try:
            yield lambda part: self.networks.forward(part, _COMPARED)
        finally:
            self.networks.release()
            copy_weights(old.model, policy.model)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedScoreNorms(ScoreNorms):
    """Exact score norms under a sharded model: each rank takes a completion at a time.

    A completion's gradient is not summed over the ranks: each parameter's is squared as it appears, then freed. Memory: one full
    layer's gradient.
    """

    units: Sequence[FsdpUnit]

    def _norms(self, batch: Batch, rows: Tensor) -> Norms:
        root: Any = self.units[-1].module
        root.set_requires_gradient_sync(False)
        total = torch.zeros((), dtype=torch.float64, device=next(self.evaluator.model.parameters()).device)
        seen, handles = dict[int, Tensor](), list[RemovableHandle]()

        def observe(name: str, p: Tensor) -> Tensor:  # FSDP reuses one object for each full parameter
            if id(p) in seen or not p.requires_grad:
                return p

            def add_square(p: Tensor) -> None:
                assert p.grad is not None
                if name in self.parameters:
                    total.add_(at_least_float32(p.grad).square().sum())
                p.grad = None

            seen[id(p)] = p
            handles.append(p.register_post_accumulate_grad_hook(add_square))  # type: ignore[no-untyped-call]
            return p

        def backward(part: Pack) -> None:
            with torch.enable_grad():
                torch.autograd.backward(self.evaluator(part.to(total.device)).sum())

        try:
            with swap_when_called(self.units, observe):
                for part in self.division.distribute(pack_micro_batches(batch, rows, 0), backward):
                    total.zero_()
                    backward(part)
                    yield part.rows, total.clone()[None]
        finally:
            root.set_requires_gradient_sync(True)
            for handle in handles:
                handle.remove()


@dataclass(frozen=True, eq=False)
class FsdpWorkDivision(WorkDivision):
    """Deals an update's micro-batches out to the ranks, equally many to each, since all must gather and sum equally often.

    Every rank has the same batch and knows what the others do.
    """

    workers: WorkerGroup
    mesh: DeviceMesh
    compute_dtype: torch.dtype | None  # precision of a backbone's passes, if lower than that of its weights
    tensor_parallel: int = 1  # number of neighbouring ranks that compute the same
    context_parallel: int = 1  # number of neighbouring ranks that read the same micro-batches, each some of the nodes
    memory: MemoryBudget = field(default_factory=lambda: MemoryBudget(MICRO_TOKENS_FLAG, "tokens", retries=False))
    """It begins nothing anew: a rank that has left a pass cannot return to the operations in which the others wait for it."""

    @property
    def follows_paths(self) -> bool:  # type: ignore[override]
        """Ranks that read the same texts divide them already."""
        return self.neighbours == 1

    @property
    def neighbours(self) -> int:
        """Number of neighbouring ranks that have the same micro-batches, and the same results."""
        return self.tensor_parallel * self.context_parallel

    def divide(
        self,
        make_packs: Callable[[int], Iterator[T]],
        budget: int,
        dummy_pass: Callable[[Pack], object],
        count_tokens: Callable[[T], int],
    ) -> Iterator[T]:
        """Divide micro-batches, smaller ones if that gives each rank equally many."""
        size = self.workers.size // self.neighbours
        made = make_packs(budget)
        if isinstance(made, PathPacks):
            return self._divide_paths(made, dummy_pass)  # type: ignore[return-value]  # T is Pack
        packs = list(made)
        slots = -(-len(packs) // size) * size
        if len(packs) != slots:
            made = make_packs(ceil(PACKING_SLACK * sum(map(count_tokens, packs)) / slots))
            candidates: Iterator[Any] = made.read_whole() if isinstance(made, PathPacks) else made
            smaller: list[T] = list(candidates)
            packs = smaller if len(smaller) <= slots else packs
        return self.distribute(iter(packs), dummy_pass)

    def _divide_paths(self, packs: PathPacks, dummy_pass: Callable[[Pack], object]) -> Iterator[Pack]:
        """Give each rank neighbouring texts, since it reads what they have in common once."""
        plans = packs.plan(self.workers.size)
        rank_plans, most = plans[self.workers.rank], max(map(len, plans))
        for number, pack in enumerate(packs.lay_out(rank_plans, self.workers.all_reduce, most)):
            if number < len(rank_plans):
                yield pack
            else:
                dummy_pass(pack)

    def distribute(self, packs: Iterator[T], dummy_pass: Callable[[Pack], object]) -> Iterator[T]:
        """Deal out round-robin; a rank with fewer makes dummy passes."""
        rank, size = self.workers.rank // self.neighbours, self.workers.size // self.neighbours
        all_packs = list(packs)
        mine = all_packs[rank::size]
        yield from mine
        for _ in range(-(-len(all_packs) // size) - len(mine)):
            dummy_pass(make_smallest_pack())

    def all_reduce(self, x: Tensor, *, by_node: bool = False) -> Tensor:
        if self.workers.rank % self._count_same(by_node):  # count one of the ranks that compute the same
            x.zero_()
        return self.workers.all_reduce(x)

    def reduce_metrics(self, metrics: Metrics, *, by_node: bool = False) -> Metrics:
        """Merge the ranks' metrics, in their order."""
        plain = {n: type(m)(*(float(getattr(m, f.name)) for f in fields(m))) for n, m in metrics.items()}
        return merge(*self.workers.all_gather(plain)[:: self._count_same(by_node)])

    def _count_same(self, by_node: bool) -> int:
        """Return how many neighbouring ranks have counted the same."""
        return self.tensor_parallel if by_node else self.neighbours

    def shard(self, network: nn.Module) -> Callable[[Callable[[], Tensor]], Tensor]:
        """Shard a network that every rank has built, with rank 0's initial weights; return its root. A head without backbone stays
        in float32."""
        for p in network.parameters():
            p.data.copy_(self.workers.broadcast_tensor(p if self.workers.rank == 0 else None, p, p.device))
        root = CallModule(network)
        apply_fsdp(root, self.mesh, self.compute_dtype if hasattr(network, "backbone") else None)
        return root
