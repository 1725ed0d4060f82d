"""Completions drawn by actors, each with a whole policy of its own; weights go by Ray's object store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from policygrad.cluster.crew import Crew, Site, answered
from policygrad.cluster.needs import SAMPLERS
from policygrad.core.metrics import Metrics, Sum
from policygrad.learners.fsdp.blueprint import Blueprint
from policygrad.models.routing import Routing
from policygrad.models.tokenizer import Tokenizer, padding_id
from policygrad.samplers.asking import together
from policygrad.samplers.base import Generation, Request
from policygrad.samplers.local import LocalSampler
from policygrad.weight_sync.base import Published

PORTIONS = 2
"""Per actor, where there are several: whoever is faster takes more, and less is drawn again where one dies."""


class Sampler:
    """The actor. It has nothing of its own that another could not be given."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._local: LocalSampler | None = None

    def __repr__(self) -> str:
        return self._name

    def load(self, frame: Sequence[Any], weights: Sequence[Any], version: int) -> None:
        """frame: a reference to (blueprint, weights that stay, end tokens, padding, whether routes are kept). weights: one to those
        that are published. Inside lists, so that only who needs them fetches them."""
        import ray

        if self._local is None:
            blueprint, still, end, pad, routed = ray.get(frame[0])
            device = torch.device("cuda" if torch.cuda.is_available() and ray.get_gpu_ids() else "cpu")
            model = blueprint.empty(device).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name in still:
                        parameter.copy_(still[name])
            self._local = LocalSampler(model, end, pad, Routing.of(model) if routed else None)
        own = dict(self._local.model.named_parameters())
        with torch.no_grad():
            for name, tensor in ray.get(weights[0]).items():
                own[name].copy_(tensor)
        self._local.version = version

    def draw(self, requests: Sequence[Request]) -> list[Generation]:
        """As `LocalSampler.generate`."""
        assert self._local is not None  # it is asked once it is ready
        return asyncio.run(self._local.generate(requests))


class RaySampler:
    """Shares of a batch, each drawn by an actor. A generation depends on its request and the weights alone, so whoever draws it,
    and however often it had to be asked for, it is the same up to the rounding of a differently shaped matrix product."""

    def __init__(self, site: Site, count: int, model: nn.Module, tokenizer: Tokenizer, routed: bool) -> None:
        actors = {
            f"{SAMPLERS} {i}": site.actor(Sampler, SAMPLERS, i, max_restarts=site.config.restarts) for i in range(count)
        }
        self._crew = Crew(actors, self._ready, site.config.patience, SAMPLERS)
        self._model, self._routed = model, routed
        self._how = (tokenizer.end, padding_id(tokenizer))
        self._frame: Any = None
        self._weights: Any = None
        self._version, self._moved = -1, 0

    async def update(self, weights: Published) -> Metrics:
        """Returns when every actor has the weights, or is being started again while others have them."""
        import ray

        if self._frame is None:
            still = {name: p for name, p in self._model.named_parameters() if name not in weights.tensors}
            self._frame = ray.put((Blueprint.of(self._model, 1.0), _on_cpu(still), *self._how, self._routed))
        self._weights, self._version = ray.put(_on_cpu(weights.tensors)), weights.version
        await self._crew.ready()
        moved, self._moved = self._crew.servers.moved - self._moved, self._crew.servers.moved
        return {"sampler/moved": Sum(float(moved))}

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation per request, in their order.

        Raises:
            EngineError: no actor comes back.
        """
        parts = len(self._crew) * (PORTIONS if len(self._crew) > 1 else 1)
        bounds = [len(requests) * i // parts for i in range(parts + 1)]  # neighbours share what they have read
        shares = [list(requests[a:b]) for a, b in pairwise(bounds) if b > a]
        drawn: list[Any] = await together([self._crew.ask("draw", share) for share in shares])
        return [generation for share in drawn for generation in share]

    async def close(self) -> None:
        """Ends the actors."""
        await self._crew.servers.close()
        self._crew.close()

    async def _ready(self, actor: Any) -> None:
        await answered(actor, "load", [self._frame], [self._weights], self._version)


def _on_cpu(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu") for name, tensor in tensors.items()}
