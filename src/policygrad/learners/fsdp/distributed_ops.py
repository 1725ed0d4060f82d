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
from policygrad.learners.fsdp.processes import Ranks
from policygrad.learners.fsdp.sharding import Place, Unit, instead, shard, swapped, watched
from policygrad.learners.local.curvature import Curvature, both, dual, middle
from policygrad.learners.local.packing import Division, Pack, nodes, pack
from policygrad.learners.local.score_norms import Norms, ScoreNorms, alone
from policygrad.models.loading import at_least_float32
from policygrad.models.replica import PlainAttention, copy_weights, full, local

_COMPARED = frozenset({"entropy", "kl_old"})


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedCurvature(Curvature):
    """As `Curvature`, with vectors of which each process has a share. `networks.old` is the policy as it is, a model of its own."""

    units: Sequence[Unit]

    def checked(self) -> Curvature:
        """Itself, if ⟨Jv, Jv⟩ = ⟨Jᵀ(Jv), v⟩ on a made-up text.

        Raises:
            ConfigError: it is not, or an operation of the model has no forward mode.
        """
        optimizer, part = self.networks.optimizer, self._made_up()
        generator, own = torch.Generator().manual_seed(0), [local(p.detach()) for p in optimizer.masters.values()]
        sizes = [float(p.std(correction=0)) + 1e-3 if p.numel() else 0.0 for p in own]
        drawn = [torch.randn(p.numel(), generator=generator) * size for p, size in zip(own, sizes, strict=True)]
        v = torch.cat([x.to(p) for x, p in zip(drawn, own, strict=True)])
        try:
            states, change = self._push(part, optimizer.split(v))
        except NotImplementedError as error:
            raise ConfigError(
                f"an operation of the model has no forward mode, which a trust region of several processes needs ({error}): let "
                "one process learn (learner.ranks 1), or take an algorithm of gradient steps, such as grpo"
            ) from error
        with torch.enable_grad(), self.networks.differentiating():
            torch.autograd.backward(self._root(lambda: (self._states(part) * change).sum()))
        optimizer.collect()
        summed = self.networks.division.summed
        pulled, processes = optimizer.take_gradient(), float(summed(torch.ones(1)))
        there, back = float(change.double().square().sum()), float(summed((pulled @ v).cpu())) / processes
        coarse = states.dtype not in (torch.float32, torch.float64)
        if not abs(there - back) <= (0.1 if coarse else 1e-3) * there:
            raise ConfigError(
                "an operation of the model has another derivative in forward mode than in reverse mode, so that a product with the "
                "Fisher matrix would be none: let one process learn (learner.ranks 1), or take an algorithm of gradient steps"
            )
        return self

    @property
    def _root(self) -> Callable[..., Any]:
        return cast(Callable[..., Any], self.units[-1].module)

    def _push(self, part: Pack, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        def moving(name: str, p: Tensor) -> Tensor:
            return dual(p.detach(), full(tangents[name]).to(p.dtype)) if name in tangents else p

        with PlainAttention(), torch.no_grad(), forward_ad.dual_level(), instead(self.units, moving):
            return both(self._root(lambda: self._states(part)))

    def _product(self, part: Pack, tangents: Mapping[str, Tensor], weight: Tensor, sampled: bool) -> None:
        _, change = self._push(part, tangents)
        places = self._of_head()
        ours = {place.name: full(tangents[place.name]) for place in places if place.name in tangents}
        with self.networks.differentiating():
            product = partial(self._surrogate, part, change, (places, ours), weight, sampled)
            torch.autograd.backward(self._root(product))

    def _surrogate(
        self,
        part: Pack,
        change: Tensor,
        head: tuple[Sequence[Place], Mapping[str, Tensor]],
        weight: Tensor,
        sampled: bool,
    ) -> Tensor:
        """[] whose gradient is Jᵀ(middle)Jv. head: where its parameters stand, and their tangents."""
        traced, shares = self._states(part), weight[part.mask]
        chunks = list(self._chunks(part, traced))
        total = traced.new_zeros(())
        for which, index, tokens, order in chunks:
            one = partial(self._of_chunk, index=index, tokens=tokens, weight=shares[order], sampled=sampled, head=head)
            given = (traced[which], change[which])
            total = total + (one(*given) if len(chunks) == 1 else checkpoint(one, *given, use_reentrant=False))
        return total

    def _of_chunk(
        self,
        states: Tensor,
        change: Tensor,
        *,
        index: Tensor,
        tokens: Tensor,
        weight: Tensor,
        sampled: bool,
        head: tuple[Sequence[Place], Mapping[str, Tensor]],
    ) -> Tensor:
        places, tangents = head

        def moving(name: str, p: Tensor) -> Tensor:
            return dual(p.detach(), tangents[name].to(p.dtype)) if name in tangents else p

        with torch.no_grad():
            with forward_ad.dual_level(), swapped(places, moving):
                logits, tangent = both(self._head(dual(states.detach(), change)))
            cotangent = middle(logits, tangent, index, tokens, weight.to(logits.dtype), sampled)
        return (self._head(states) * cotangent).sum()

    def _of_head(self) -> list[Place]:
        """Where the parameters of the head stand: in the root, which has them as a whole while it is called."""
        head = self.networks.policy.network.head
        modules = set() if head is None else set(head.modules())
        return [place for place in self.units[-1].places if place.module in modules]

    @contextmanager
    def _there(self, delta: Tensor) -> Iterator[Callable[[Pack], Forward]]:
        policy, optimizer, old = self.networks.policy, self.networks.optimizer, self.networks.old
        assert old is not None  # `FsdpLearner.update` remembers it
        for master, change in zip(optimizer.masters.values(), optimizer.split(delta).values(), strict=True):
            master.add_(change)
        try:
            yield lambda part: self.networks.forward(part, _COMPARED)
        finally:
            self.networks.at_rest()
            copy_weights(old.model, policy.model)


# Exact score norms under a model that is spread over processes: completions are dealt out, one at a time to each.
#
# A completion's gradient is never summed over the processes. It is squared where it comes up, a parameter after another, and
# let go.


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedScoreNorms(ScoreNorms):
    """As `ScoreNorms`. Memory: the gradient of a layer, as a whole."""

    units: Sequence[Unit]

    def _norms(self, batch: Batch, rows: Tensor) -> Norms:
        root: Any = self.units[-1].module
        root.set_requires_gradient_sync(False)
        try:
            with self._squares() as total:
                for part in self.division.dealt(alone(batch, rows), self._back):
                    total.zero_()
                    self._back(part)
                    yield part.rows, total.clone()[None]
        finally:
            root.set_requires_gradient_sync(True)

    @property
    def _device(self) -> torch.device:
        return next(self.evaluator.model.parameters()).device

    def _back(self, part: Pack) -> None:
        with torch.enable_grad():
            torch.autograd.backward(self.evaluator(part.to(self._device)).sum())

    @contextmanager
    def _squares(self) -> Iterator[Tensor]:
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
            with watched(self.units, see):
                yield total
        finally:
            for handle in handles:
                handle.remove()


# An update's micro-batches dealt out to processes, which take equally many: what one gathers and sums, all must.

T = TypeVar("T")
SLACK = 1.1
"""Tokens of a smaller micro-batch over the mean: none is ever quite full, and what two share is computed in both."""


@dataclass(frozen=True, eq=False)
class Dealt(Division):
    """All processes have the same batch, and each knows what the others do."""

    ranks: Ranks
    mesh: DeviceMesh
    narrow: torch.dtype | None
    """What a backbone computes in, where that is not what its weights are kept in."""
    tensor: int = 1
    """Neighbouring processes that compute the same."""

    def packs(
        self,
        made: Callable[[int], Iterator[T]],
        budget: int,
        idle: Callable[[Pack], object],
        tokens: Callable[[T], int] | None = None,
    ) -> Iterator[T]:
        """Smaller ones where that gives each process equally many."""
        count: Callable[[Any], int] = nodes if tokens is None else tokens
        return self.dealt(iter(_evened(made, budget, self.ranks.size // self.tensor, count)), idle)

    def dealt(self, packs: Iterator[T], idle: Callable[[Pack], object]) -> Iterator[T]:
        """As cards are dealt; then the passes for the sake of those that have one more."""
        rank, size, dealt = self.ranks.rank // self.tensor, self.ranks.size // self.tensor, list(packs)
        mine = dealt[rank::size]
        yield from mine
        for _ in range(-(-len(dealt) // size) - len(mine)):
            idle(_nothing())

    def summed(self, x: Tensor) -> Tensor:
        if self.ranks.rank % self.tensor:  # of those that compute the same one counts
            x.zero_()
        return self.ranks.summed(x)

    def merged(self, metrics: Metrics) -> Metrics:
        """In the order of the processes."""
        plain = {n: type(m)(*(float(getattr(m, f.name)) for f in fields(m))) for n, m in metrics.items()}
        return merge(*self.ranks.gathered(plain)[:: self.tensor])

    def spread(self, network: nn.Module) -> nn.Module:
        """A network that every process has built, with the numbers that rank 0 has drawn. A head alone stays in float32."""
        for p in network.parameters():
            p.data.copy_(self.ranks.given(p if self.ranks.rank == 0 else None, p, p.device))
        shard(network, self.mesh, self.narrow if hasattr(network, "backbone") else None)
        return network


def _evened(made: Callable[[int], Iterator[T]], budget: int, size: int, tokens: Callable[[T], int]) -> list[T]:
    """In as many turns as micro-batches of the budget take, but smaller ones where some would have none in the last turn."""
    packs = list(made(budget))
    places = -(-len(packs) // size) * size
    if len(packs) == places:
        return packs
    smaller = list(made(ceil(SLACK * sum(map(tokens, packs)) / places)))
    return smaller if len(smaller) <= places else packs


def _nothing() -> Pack:
    """The smallest micro-batch: one token after another."""
    one, token = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    batch = Batch(mask=token == 0, group=one, reward=torch.zeros(1), tokens=token, prompts=(one,))
    return next(pack(batch, one, 1))
