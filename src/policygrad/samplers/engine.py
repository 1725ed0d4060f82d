"""A sampler whose completions are drawn by servers outside this process. What one engine says and hears is a file of its own.

Token ids go out and come back, never text. What comes back is checked: as many log-probabilities as tokens, none of them a
placeholder, an end that is the policy's or the budget's; and a probe compares them with the learner's own, at first contact,
after every publication, and when a server that was away comes back.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from policygrad.core.metrics import Max, Mean, Metrics, Min, Sum
from policygrad.errors import EngineError
from policygrad.models.tokenizer import Tokenizer
from policygrad.rewards.waits import Phase, nobody
from policygrad.samplers import concurrency, probe
from policygrad.samplers.adapter_names import by_name
from policygrad.samplers.asking import attended, repeating, together
from policygrad.samplers.base import Generation, Request, Watch
from policygrad.samplers.config import SamplerConfig
from policygrad.samplers.drawn import Drawn, generation
from policygrad.samplers.http import AwayError, Http
from policygrad.samplers.pieces import in_pieces
from policygrad.samplers.seeds import seeds
from policygrad.samplers.servers import Server, Servers
from policygrad.weight_sync.adapter_folder import adapter_writer
from policygrad.weight_sync.base import PassedError, Published
from policygrad.weight_sync.folder import Publication, VersionFolder, Write
from policygrad.weight_sync.in_process import taken

TAIL = 0.9
"""The share of answers that come before the tail."""
LOOKS = 0.05
"""Seconds between two looks of whoever watches, where no completion comes."""


class EngineSampler(ABC):
    """Routes, checks and publishes; an engine fills in what it says and hears."""

    name: ClassVar[str]
    way_out: ClassVar[str]
    """What its servers have to be started with, as a sentence."""
    health: ClassVar[str] = "/health"
    """A question that is answered at once, whatever else a server is at."""
    gauges: ClassVar[concurrency.Gauges | None] = None
    """What its servers say of their queue and their cache, at /metrics; None = nothing."""
    takes_adapters: ClassVar[bool] = False
    """Whether its servers take adapters by name: `load` is given one then, where `adapter` is true."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        config: SamplerConfig,
        folder: Path,
        temperature: float = 1.0,
        tell: Phase = nobody,
    ) -> None:
        """model: with the learner's weights, or a replica that takes them over, or without any, where they are gathered; folder:
        where weights are published; tell: is told when no server is there.

        Raises:
            EngineError: a model that the engine cannot be given.
        """
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.temperature, self.tell = temperature, tell
        self.adapter = by_name(config.publish, model, self.name, self.takes_adapters)
        self.versions = VersionFolder(folder, adapter_writer(model) if self.adapter else self.writer())
        self.http = Http(config.timeout)
        self.published: Publication | None = None
        self._source: probe.Source = model  # of log-probabilities
        self.in_flight = config.piece > 0
        self.verdicts: dict[str, probe.Verdict] = {}  # by server, of the weights of now
        self.refused = set[str]()  # whose last probe failed: they are given their weights again whatever they say
        table: Any = model.get_input_embeddings()  # type: ignore[operator]
        self.vocabulary = len(tokenizer.hf) if table is None else int(table.weight.shape[0])
        self.loads = concurrency.Loads(lambda url: self.http.get(url, config.heartbeat or config.timeout), self.gauges)
        self._watch: Watch | None = None
        self._tail = 0.0
        dtype = next(model.parameters()).dtype
        self.tolerance = config.tolerance or probe.TOLERANCE.get(dtype, 0.2)
        self._servers: Servers | None = None

    # what an engine fills in

    @abstractmethod
    def writer(self) -> Write:
        """How whole weights are written for it."""

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

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation per request, in their order, from whichever servers are there. Weights may be updated meanwhile: what is
        asked for after that is drawn with them, and each token says its version.

        Raises:
            EngineError: no server answers, or one says what cannot be.
        """
        if self.published is None:
            raise EngineError("an engine has no weights before the first update(weights)")
        words, over = seeds([request.key for request in requests]), list[float]()

        async def one(request: Request, word: int) -> Generation:
            found = await in_pieces(request, word, self.config.piece, self._ask)
            over.append(time.perf_counter())
            if self._watch is not None:
                self._watch([(request, found.tokens)])
            return found

        work = [one(request, word) for request, word in zip(requests, words[:, 0].tolist(), strict=True)]
        resize = None if self.config.parallel else partial(self.loads.resize, self.servers)
        async with repeating(LOOKS, self._look if self._watch else None), repeating(concurrency.LOOKS, resize):
            found = await together(work)
        self._tail += over[-1] - over[int(TAIL * (len(over) - 1))] if over else 0.0
        return found

    async def _look(self) -> None:
        if self._watch is not None:
            self._watch([])

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """As `Watchable`: told of every completion as it comes, and from time to time of none."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    async def update(self, weights: Published) -> Metrics:
        """Writes the weights, has every server take them over, and compares what it then draws with the learner's distribution.

        Raises:
            EngineError: they cannot be written, or a server draws from something else.
        """
        began, first, there = time.perf_counter(), self.published is None, sum(s.ready for s in self.servers.all)
        self._source = taken(weights, self.model)
        self.published = self.versions.publish(weights)
        self.verdicts.clear()
        await self.servers.ready()
        self.versions.sweep(self.published)
        took = time.perf_counter() - began
        found: Metrics = {"publication/seconds": Sum(took), "publication/bytes": Sum(float(self.published.bytes))}
        if not first:
            found["publication/servers"] = Min(float(there))
        found["publication/asked_again"] = Sum(float(self.servers.moved))
        self.servers.moved = 0
        found["engine/tail"], self._tail = Sum(self._tail), 0.0
        if not self.config.parallel:
            found["engine/parallel"] = Mean(float(sum(s.limit for s in self.servers.all)), float(len(self.servers.all)))
        if self.verdicts:
            found["publication/probe_max"] = Max(max(verdict.difference for verdict in self.verdicts.values()))
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
            first = config.parallel or concurrency.FIRST
            self._servers = Servers(self.start(), self._prepare, first, config.patience, self.tell)
        return self._servers

    async def _prepare(self, server: Server) -> None:
        """Gives a server the weights of now, and probes it."""
        assert self.published is not None
        await self.greet(server.url)
        if not self.config.parallel:
            await self.loads.check(server.url)
        await self.load(server.url, self.published)
        try:
            self.verdicts[server.url] = await self.probe(server.url)
        except PassedError as error:
            raise AwayError(f"it is looked at after the next publication: {error}") from error
        except EngineError:
            self.refused.add(server.url)
            raise
        self.refused.discard(server.url)

    async def probe(self, url: str) -> probe.Verdict:
        """Whether a server draws from the model's distribution.

        Raises:
            EngineError: it does not.
        """
        version = 0 if self.published is None else self.published.version
        asked = probe.requests(len(self.tokenizer.hf), self.temperature, version)
        words = seeds([request.key for request in asked])[:, 0].tolist()
        gate = asyncio.Semaphore(self.config.parallel or concurrency.FIRST)

        async def one(request: Request, word: int) -> Generation:
            async with gate:
                return self._generation(url, request, await self.draw(url, request, word >> 33), version)

        try:
            drawn = await together([one(request, word) for request, word in zip(asked, words, strict=True)])
        except EngineError as error:
            raise EngineError(f"{url} does not answer as {self.name} does: {error}. {self.way_out}") from error
        how = (asked, drawn, self.tolerance, f"{self.name} at {url}", self.way_out)
        if self._source is self.model:
            return probe.judge(self.model, *how)
        return await asyncio.to_thread(probe.judge, self._source, *how)  # it may wait for what the learner is at

    async def _ask(self, request: Request, word: int, begun: bool) -> Generation:
        return await self.servers.call(partial(self._one, request, word >> 33), begun)

    async def _one(self, request: Request, seed: int, server: Server) -> Generation:
        published = self.published  # a server is given others only when it has answered what it was asked
        assert published is not None
        heartbeat = self.config.heartbeat
        pulse = partial(self.http.alive, server.url + self.health, heartbeat)
        drawn = await attended(self.draw(server.url, request, seed), pulse, heartbeat)
        if drawn.weights not in (None, published.name):  # it went and came back between two requests
            raise AwayError(f"it draws with the weights {drawn.weights}, and those of now are {published.name}")
        return self._generation(server.url, request, drawn, published.version)

    def _generation(self, url: str, request: Request, drawn: Drawn, version: int) -> Generation:
        return generation(url, request, drawn, version, ends=self.tokenizer.end, vocabulary=self.vocabulary)
