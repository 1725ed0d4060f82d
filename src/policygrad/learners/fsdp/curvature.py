"""Curvature of a policy that is spread over processes: θ and every direction are, too.

A push through J is a forward pass in which every unit, when it is gathered, has its part of the direction gathered beside it. A
pull through Jᵀ is FSDP's own way back, which sums over the processes. To look at another θ the shares are moved there, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from policygrad.core.batch import Forward
from policygrad.errors import ConfigError
from policygrad.learners.fsdp.units import Place, Unit, instead, swapped
from policygrad.learners.local.curvature import Curvature, both, dual, middle
from policygrad.learners.local.packing import Pack
from policygrad.models.attention import PlainAttention
from policygrad.models.replica import copy_weights, full, local

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
