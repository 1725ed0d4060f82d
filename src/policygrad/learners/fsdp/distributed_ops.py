"""Curvature of a policy that is spread over processes: θ and every direction are, too.

A push through J is a forward pass in which every unit, when it is gathered, has its part of the direction gathered beside it. A
pull through Jᵀ is FSDP's own way back, which sums over the processes. To look at another θ the shares are moved there, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from math import ceil
from typing import Any, TypeVar, cast

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
from policygrad.learners.fsdp.sharding import (
    FsdpUnit,
    ParameterSlot,
    apply_fsdp,
    observe_parameters,
    swap_parameters,
    swap_when_called,
)
from policygrad.learners.local.curvature import Curvature, make_dual, output_hessian_product, unpack_dual
from policygrad.learners.local.packing import Pack, WorkDivision, count_nodes, pack_micro_batches
from policygrad.learners.local.score_norms import Norms, ScoreNorms, pack_singly
from policygrad.models.loading import at_least_float32
from policygrad.models.replica import PlainAttention, copy_weights, full_tensor, local_tensor

_COMPARED = frozenset({"entropy", "kl_old"})


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedCurvature(Curvature):
    """As `Curvature`, with vectors of which each process has a share. `networks.old` is the policy as it is, a model of its own."""

    units: Sequence[FsdpUnit]

    def verify(self) -> Curvature:
        """Itself, if ⟨Jv, Jv⟩ = ⟨Jᵀ(Jv), v⟩ on a made-up text.

        Raises:
            ConfigError: it is not, or an operation of the model has no forward mode.
        """
        optimizer, part = self.networks.optimizer, self._synthetic_pack()
        generator, shards = (
            torch.Generator().manual_seed(0),
            [local_tensor(p.detach()) for p in optimizer.masters.values()],
        )
        sizes = [float(p.std(correction=0)) + 1e-3 if p.numel() else 0.0 for p in shards]
        directions = [torch.randn(p.numel(), generator=generator) * size for p, size in zip(shards, sizes, strict=True)]
        v = torch.cat([x.to(p) for x, p in zip(directions, shards, strict=True)])
        try:
            states, change = self._jvp_states(part, optimizer.split(v))
        except NotImplementedError as error:
            raise ConfigError(
                f"an operation of the model has no forward mode, which a trust region of several processes needs ({error}): let "
                "one process learn (learner.world_size 1), or take an algorithm of gradient steps, such as grpo"
            ) from error
        with torch.enable_grad(), self.networks.backward_mode():
            torch.autograd.backward(self._root(lambda: (self._states(part) * change).sum()))
        optimizer.accumulate_master_grads()
        summed = self.networks.division.all_reduce
        pulled, processes = optimizer.pop_flat_gradient(), float(summed(torch.ones(1)))
        forward_product, reverse_product = (
            float(change.double().square().sum()),
            float(summed((pulled @ v).cpu())) / processes,
        )
        coarse = states.dtype not in (torch.float32, torch.float64)
        if not abs(forward_product - reverse_product) <= (0.1 if coarse else 1e-3) * forward_product:
            raise ConfigError(
                "an operation of the model has another derivative in forward mode than in reverse mode, so that a product with the "
                "Fisher matrix would be none: let one process learn (learner.world_size 1), or take an algorithm of gradient steps"
            )
        return self

    @property
    def _root(self) -> Callable[..., Any]:
        return cast(Callable[..., Any], self.units[-1].module)

    def _jvp_states(self, part: Pack, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        def moving(name: str, p: Tensor) -> Tensor:
            return make_dual(p.detach(), full_tensor(tangents[name]).to(p.dtype)) if name in tangents else p

        with PlainAttention(), torch.no_grad(), forward_ad.dual_level(), swap_when_called(self.units, moving):
            return unpack_dual(self._root(lambda: self._states(part)))

    def _product(self, part: Pack, tangents: Mapping[str, Tensor], weight: Tensor, sampled: bool) -> None:
        _, change = self._jvp_states(part, tangents)
        places = self._head_slots()
        ours = {place.name: full_tensor(tangents[place.name]) for place in places if place.name in tangents}
        with self.networks.backward_mode():
            product = partial(self._product_surrogate, part, change, (places, ours), weight, sampled)
            torch.autograd.backward(self._root(product))

    def _product_surrogate(
        self,
        part: Pack,
        change: Tensor,
        head: tuple[Sequence[ParameterSlot], Mapping[str, Tensor]],
        weight: Tensor,
        sampled: bool,
    ) -> Tensor:
        """[] whose gradient is Jᵀ(middle)Jv. head: where its parameters stand, and their tangents."""
        traced, shares = self._states(part), weight[part.mask]
        chunks = list(self._chunks(part, traced))
        total = traced.new_zeros(())
        for which, index, tokens, order in chunks:
            one = partial(
                self._chunk_surrogate, index=index, tokens=tokens, weight=shares[order], sampled=sampled, head=head
            )
            given = (traced[which], change[which])
            total = total + (one(*given) if len(chunks) == 1 else checkpoint(one, *given, use_reentrant=False))
        return total

    def _chunk_surrogate(
        self,
        states: Tensor,
        change: Tensor,
        *,
        index: Tensor,
        tokens: Tensor,
        weight: Tensor,
        sampled: bool,
        head: tuple[Sequence[ParameterSlot], Mapping[str, Tensor]],
    ) -> Tensor:
        places, tangents = head

        def moving(name: str, p: Tensor) -> Tensor:
            return make_dual(p.detach(), tangents[name].to(p.dtype)) if name in tangents else p

        with torch.no_grad():
            with forward_ad.dual_level(), swap_parameters(places, moving):
                logits, tangent = unpack_dual(self._head(make_dual(states.detach(), change)))
            cotangent = output_hessian_product(logits, tangent, index, tokens, weight.to(logits.dtype), sampled)
        return (self._head(states) * cotangent).sum()

    def _head_slots(self) -> list[ParameterSlot]:
        """Where the parameters of the head stand: in the root, which has them as a whole while it is called."""
        head = self.networks.policy.network.head
        modules = set() if head is None else set(head.modules())
        return [place for place in self.units[-1].slots if place.module in modules]

    @contextmanager
    def _shifted(self, delta: Tensor) -> Iterator[Callable[[Pack], Forward]]:
        policy, optimizer, old = self.networks.policy, self.networks.optimizer, self.networks.old
        assert old is not None  # `FsdpLearner.update` remembers it
        for master, change in zip(optimizer.masters.values(), optimizer.split(delta).values(), strict=True):
            master.add_(change)
        try:
            yield lambda part: self.networks.forward(part, _COMPARED)
        finally:
            self.networks.release()
            copy_weights(old.model, policy.model)


# Exact score norms under a model that is spread over processes: completions are dealt out, one at a time to each.
#
# A completion's gradient is never summed over the processes. It is squared where it comes up, a parameter after another, and
# let go.


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedScoreNorms(ScoreNorms):
    """As `ScoreNorms`. Memory: the gradient of a layer, as a whole."""

    units: Sequence[FsdpUnit]

    def _norms(self, batch: Batch, rows: Tensor) -> Norms:
        root: Any = self.units[-1].module
        root.set_requires_gradient_sync(False)
        try:
            with self._accumulate_squares() as total:
                for part in self.division.distribute(pack_singly(batch, rows), self._backward):
                    total.zero_()
                    self._backward(part)
                    yield part.rows, total.clone()[None]
        finally:
            root.set_requires_gradient_sync(True)

    @property
    def _device(self) -> torch.device:
        return next(self.evaluator.model.parameters()).device

    def _backward(self, part: Pack) -> None:
        with torch.enable_grad():
            torch.autograd.backward(self.evaluator(part.to(self._device)).sum())

    @contextmanager
    def _accumulate_squares(self) -> Iterator[Tensor]:
        """[] to which each way back within adds Σ g² of the parameters that count; no gradient is left behind."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        seen, handles = dict[int, Tensor](), list[RemovableHandle]()

        def see(name: str, p: Tensor) -> None:  # FSDP keeps one object for each whole parameter
            if id(p) in seen or not p.requires_grad:
                return

            def arrived(p: Tensor) -> None:
                assert p.grad is not None
                if name in self.parameters:
                    total.add_(at_least_float32(p.grad).square().sum())
                p.grad = None

            seen[id(p)] = p
            handles.append(p.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]

        try:
            with observe_parameters(self.units, see):
                yield total
        finally:
            for handle in handles:
                handle.remove()


# An update's micro-batches dealt out to processes, which take equally many: what one gathers and sums, all must.

T = TypeVar("T")
PACKING_SLACK = 1.1
"""Tokens of a smaller micro-batch over the mean: none is ever quite full, and what two share is computed in both."""


@dataclass(frozen=True, eq=False)
class FsdpWorkDivision(WorkDivision):
    """All processes have the same batch, and each knows what the others do."""

    workers: WorkerGroup
    mesh: DeviceMesh
    compute_dtype: torch.dtype | None
    """What a backbone computes in, where that is not what its weights are kept in."""
    tensor_parallel: int = 1
    """Neighbouring processes that compute the same."""

    def divide(
        self,
        make_packs: Callable[[int], Iterator[T]],
        budget: int,
        dummy_pass: Callable[[Pack], object],
        tokens: Callable[[T], int] | None = None,
    ) -> Iterator[T]:
        """Smaller ones where that gives each process equally many."""
        count: Callable[[Any], int] = count_nodes if tokens is None else tokens
        return self.distribute(
            iter(_equalise_counts(make_packs, budget, self.workers.size // self.tensor_parallel, count)), dummy_pass
        )

    def distribute(self, packs: Iterator[T], dummy_pass: Callable[[Pack], object]) -> Iterator[T]:
        """As cards are dealt; then the passes for the sake of those that have one more."""
        rank, size, dealt = (
            self.workers.rank // self.tensor_parallel,
            self.workers.size // self.tensor_parallel,
            list(packs),
        )
        mine = dealt[rank::size]
        yield from mine
        for _ in range(-(-len(dealt) // size) - len(mine)):
            dummy_pass(_minimal_pack())

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.workers.rank % self.tensor_parallel:  # of those that compute the same one counts
            x.zero_()
        return self.workers.all_reduce(x)

    def reduce_metrics(self, metrics: Metrics) -> Metrics:
        """In the order of the processes."""
        plain = {n: type(m)(*(float(getattr(m, f.name)) for f in fields(m))) for n, m in metrics.items()}
        return merge(*self.workers.all_gather(plain)[:: self.tensor_parallel])

    def shard(self, network: nn.Module) -> nn.Module:
        """A network that every process has built, with the numbers that rank 0 has drawn. A head alone stays in float32."""
        for p in network.parameters():
            p.data.copy_(self.workers.broadcast_tensor(p if self.workers.rank == 0 else None, p, p.device))
        apply_fsdp(network, self.mesh, self.compute_dtype if hasattr(network, "backbone") else None)
        return network


def _equalise_counts(made: Callable[[int], Iterator[T]], budget: int, size: int, tokens: Callable[[T], int]) -> list[T]:
    """In as many turns as micro-batches of the budget take, but smaller ones where some would have none in the last turn."""
    packs = list(made(budget))
    places = -(-len(packs) // size) * size
    if len(packs) == places:
        return packs
    smaller = list(made(ceil(PACKING_SLACK * sum(map(tokens, packs)) / places)))
    return smaller if len(smaller) <= places else packs


def _minimal_pack() -> Pack:
    """The smallest micro-batch: one token after another."""
    one, token = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    batch = Batch(mask=token == 0, group=one, reward=torch.zeros(1), tokens=token, prompts=(one,))
    return next(pack_micro_batches(batch, one, 1))
