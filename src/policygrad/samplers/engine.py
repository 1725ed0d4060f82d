"""A sampler whose completions are drawn by servers outside this process. What one engine says and hears is a file of its own.

Token ids go out and come back, never text. What comes back is checked: as many log-probabilities as tokens, none of them a
placeholder, an end that is the policy's or the budget's; and a probe compares them with the learner's own, at first contact,
after every publication, and when a server that was away comes back.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from policygrad.core.metrics import Max, Metrics, Sum
from policygrad.errors import EngineError
from policygrad.models.tokenizer import Tokenizer
from policygrad.samplers import probe
from policygrad.samplers.base import Generation, Request
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.http import Http
from policygrad.samplers.seeds import seeds
from policygrad.samplers.servers import Server, Servers
from policygrad.weight_sync.base import Published
from policygrad.weight_sync.folder import Publication, VersionFolder, Write
from policygrad.weight_sync.in_process import put_weights


@dataclass(frozen=True)
class Drawn:
    """A server's answer to one request: as many log-probabilities [nats] as token ids."""

    tokens: Sequence[int]
    logp: Sequence[float]


class EngineSampler(ABC):
    """Routes, checks and publishes; an engine fills in what it says and hears."""

    name: ClassVar[str]
    way_out: ClassVar[str]
    """What its servers have to be started with, as a sentence."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        config: SamplerConfig,
        folder: Path,
        temperature: float = 1.0,
    ) -> None:
        """model: with the learner's weights, or a replica that takes them over; folder: where weights are published.

        Raises:
            EngineError: a model that the engine cannot be given.
        """
        self.model, self.tokenizer, self.config, self.temperature = model, tokenizer, config, temperature
        self.versions = VersionFolder(folder, self.writer())
        self.http = Http(config.timeout)
        self.published: Publication | None = None
        self.verdict: probe.Verdict | None = None
        dtype = next(model.parameters()).dtype
        self.tolerance = config.tolerance or probe.TOLERANCE.get(dtype, 0.2)
        self._servers: Servers | None = None

    # what an engine fills in

    @abstractmethod
    def writer(self) -> Write:
        """How weights are written for it."""

    @abstractmethod
    async def draw(self, url: str, request: Request, seed: int) -> Drawn:
        """One completion. seed: below 2**31. Raises AwayError where it shall be asked again."""

    @abstractmethod
    async def load(self, url: str, publication: Publication) -> None:
        """Returns when the server answers with these weights. Raises AwayError where that shall be tried again."""

    async def greet(self, url: str) -> None:  # noqa: B027
        """Learns of a server what `draw` has to know."""

    def start(self) -> Sequence[str]:
        """The servers' addresses; starts one where none is given and the engine can."""
        return self.config.urls

    async def stop(self) -> None:  # noqa: B027
        """Ends what `start` began, if anything."""

    # the sampler

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation per request, in their order, from whichever servers are there.

        Raises:
            EngineError: no server answers, or one says what cannot be.
        """
        if self.published is None:
            raise EngineError("an engine has no weights before the first update(weights)")
        servers, version = self.servers, self.published.version
        words = seeds([request.key for request in requests])
        work = [
            servers.call(partial(self._one, request, word >> 33, version))
            for request, word in zip(requests, words[:, 0].tolist(), strict=True)
        ]
        return await _all(work)

    async def update(self, weights: Published) -> Metrics:
        """Writes the weights, has every server take them over, and compares what it then draws with the learner's distribution.

        Raises:
            EngineError: they cannot be written, or a server draws from something else.
        """
        began = time.perf_counter()
        put_weights(weights.tensors, self.model)
        self.published = self.versions.publish(weights)
        await self.servers.ready()
        self.versions.sweep(self.published)
        took = time.perf_counter() - began
        found: Metrics = {"publication/seconds": Sum(took), "publication/bytes": Sum(float(self.published.bytes))}
        found["publication/asked_again"] = Sum(float(self.servers.moved))
        self.servers.moved = 0
        if self.verdict is not None:
            found["publication/probe_max"] = Max(self.verdict.difference)
        return found

    async def close(self) -> None:
        """Ends connections and servers that were started here, and removes the weights that were published for them."""
        if self._servers is not None:
            await self._servers.close()
        await self.http.close()
        await self.stop()
        self.versions.remove()

    @property
    def servers(self) -> Servers:
        if self._servers is None:
            config = self.config
            self._servers = Servers(self.start(), self._prepare, config.parallel, config.patience)
        return self._servers

    async def _prepare(self, server: Server) -> None:
        """Gives a server the weights of now, and probes it."""
        assert self.published is not None
        await self.greet(server.url)
        await self.load(server.url, self.published)
        self.verdict = await self.probe(server.url)

    async def probe(self, url: str) -> probe.Verdict:
        """Whether a server draws from the model's distribution.

        Raises:
            EngineError: it does not.
        """
        version = 0 if self.published is None else self.published.version
        asked = probe.requests(len(self.tokenizer.hf), self.temperature, version)
        words = seeds([request.key for request in asked])[:, 0].tolist()
        gate = asyncio.Semaphore(self.config.parallel)

        async def one(request: Request, word: int) -> Generation:
            async with gate:
                return self._checked(url, request, await self.draw(url, request, word >> 33), version)

        try:
            drawn = await _all([one(request, word) for request, word in zip(asked, words, strict=True)])
        except EngineError as error:
            raise EngineError(f"{url} does not answer as {self.name} does: {error}. {self.way_out}") from error
        return probe.judge(self.model, asked, drawn, self.tolerance, f"{self.name} at {url}", self.way_out)

    async def _one(self, request: Request, seed: int, version: int, server: Server) -> Generation:
        return self._checked(server.url, request, await self.draw(server.url, request, seed), version)

    def _checked(self, url: str, request: Request, drawn: Drawn, version: int) -> Generation:
        """The generation, up to its first end token. Raises EngineError for what no rollout can be made of."""
        tokens, logp = list(drawn.tokens), list(drawn.logp)
        if len(tokens) != len(logp):
            raise EngineError(
                f"{url} gives {len(logp)} log-probabilities for {len(tokens)} tokens: tokens whose text is no whole "
                "UTF-8 are lost in its text"
            )
        end = next((i for i, token in enumerate(tokens) if token in self.tokenizer.end), None)
        if end is not None:
            tokens, logp = tokens[: end + 1], logp[: end + 1]
        elif len(tokens) != request.max_tokens:
            raise EngineError(
                f"{url} ends after {len(tokens)} of {request.max_tokens} tokens, without an end token of the policy "
                f"({', '.join(map(str, sorted(self.tokenizer.end)))}): its context is too short, or its model has other end tokens"
            )
        if odd := [x for x in logp if not (isinstance(x, float | int) and -9000 < x <= 1e-4 and math.isfinite(x))]:
            raise EngineError(
                f"{url} gives {odd[0]} as a log-probability: a placeholder, or a token that could not be drawn"
            )
        sampled = torch.tensor(logp, dtype=torch.float32).clamp(max=0.0)
        greedy = (
            request.sampling.temperature == 0
        )  # all probability is on the token that is taken, whatever an engine says
        return Generation(
            torch.tensor(tokens, dtype=torch.int64),
            torch.zeros_like(sampled) if greedy else sampled,
            "length" if end is None else "stop",
            version,
        )


async def _all(work: Sequence[Any]) -> list[Generation]:
    """All results; the first error ends the others."""
    tasks = [asyncio.ensure_future(some) for some in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
