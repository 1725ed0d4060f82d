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
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from policygrad.core.metrics import Max, Mean, Metrics, Min, Sum
from policygrad.errors import EngineError
from policygrad.models.tokenizer import Tokenizer
from policygrad.samplers.base import CompletionCallback, Generation, Request
from policygrad.samplers.config import ADAPTER, WHOLE, SamplerConfig
from policygrad.samplers.engines import probe, server_pool
from policygrad.samplers.engines.http import HttpClient, ServerUnavailableError
from policygrad.samplers.engines.server_pool import EngineServer, ServerPool
from policygrad.samplers.local.sampling import derive_seeds
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.weight_sync.base import PublishedWeights, StaleWeightsError, load_logit_source
from policygrad.weight_sync.folder import (
    VersionFolder,
    WeightVersion,
    WeightWriter,
    explain_unsupported_adapter,
    make_adapter_writer,
)

# An answer that is asked for piece by piece: each goes on from the prompt and the tokens so far, with what is left of the budget.
#
# What is drawn is drawn from the same distribution as in one go, as every token's depends on those before it only. A piece that is
# lost is asked again, those before it stay; where weights change between two pieces, each token has the version of its own.

Ask = Callable[[Request, int, bool], Awaitable[Generation]]
"""(request, 64 random bits, whether its answer is begun) -> what was drawn for it."""


async def generate_in_chunks(request: Request, seed: int, chunk_tokens: int, complete: Ask) -> Generation:
    """The whole answer. word: the first piece's random bits, the key's own. size: tokens of a piece; 0 = one for all."""
    parts = list[Generation]()
    left, tokens = request.max_tokens, request.prompt_ids
    while True:
        piece = replace(request, prompt_ids=tokens, max_tokens=min(left, chunk_tokens or left))
        if parts:  # 0 and then the piece: the turn k > 0 of an episode has a key of one number more
            seed = int(derive_seeds([(*request.key, 0, len(parts))])[0, 0])
        parts.append(part := await complete(piece, seed, bool(parts)))
        left -= len(part.tokens)
        if part.finish_reason == "stop" or left == 0:
            return concat_generations(parts)
        tokens = torch.cat([tokens, part.tokens])


def concat_generations(parts: Sequence[Generation]) -> Generation:
    """One generation of pieces in their order; it ends as the last one does."""
    if len(parts) == 1:
        return parts[0]
    versions = {part.version for part in parts if isinstance(part.version, int)}
    whole = len(versions) == 1 and all(isinstance(part.version, int) for part in parts)
    return Generation(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.logp for part in parts]),
        parts[-1].finish_reason,
        versions.pop() if whole else torch.cat([_each(part) for part in parts]),
    )


def _each(part: Generation) -> Tensor:
    """[n] int64, the version of each token."""
    return torch.full_like(part.tokens, part.version) if isinstance(part.version, int) else part.version


# What a server answers, and what it has to be so that a rollout can be made of it.


@dataclass(frozen=True)
class EngineCompletion:
    """A server's answer to one request: as many log-probabilities [nats] as token ids."""

    tokens: Sequence[int]
    logp: Sequence[float]
    weight_version: str | None = None
    """The name of the publication that it was drawn with, where the engine says so."""


def validate_completion(
    url: str,
    request: Request,
    completion: EngineCompletion,
    version: int,
    *,
    end_tokens: frozenset[int],
    vocab_size: int,
) -> Generation:
    """The generation, up to its first end token. version: of the weights that drew it. ends: the policy's end tokens. vocabulary:
    ids that the model knows.

    Raises:
        EngineError: what no rollout can be made of.
    """
    tokens, logp = list(completion.tokens), list(completion.logp)
    if len(tokens) != len(logp):
        raise EngineError(
            f"{url} gives {len(logp)} log-probabilities for {len(tokens)} tokens: tokens whose text is no whole "
            "UTF-8 are lost in its text"
        )
    if odd := [x for x in tokens if not (isinstance(x, int) and 0 <= x < vocab_size)]:
        raise EngineError(f"{url} gives {odd[0]!r} as a token, and the model knows those below {vocab_size}")
    end = next((i for i, token in enumerate(tokens) if token in end_tokens), None)
    if end is not None:
        tokens, logp = tokens[: end + 1], logp[: end + 1]
    if len(tokens) > request.max_tokens:
        raise EngineError(f"{url} gives {len(tokens)} tokens, and was asked for {request.max_tokens}")
    if end is None and len(tokens) != request.max_tokens:
        raise EngineError(
            f"{url} ends after {len(tokens)} of {request.max_tokens} tokens, without an end token of the policy "
            f"({', '.join(map(str, sorted(end_tokens)))}): its context is too short, or its model has other end tokens"
        )
    if strange := [x for x in logp if not (isinstance(x, float | int) and -9000 < x <= 1e-4 and math.isfinite(x))]:
        raise EngineError(
            f"{url} gives {strange[0]} as a log-probability: a placeholder, or a token that could not be drawn"
        )
    sampled = torch.tensor(logp, dtype=torch.float32).clamp(max=0.0)
    greedy = request.sampling.temperature == 0  # all probability is on what is taken, whatever an engine says
    return Generation(
        torch.tensor(tokens, dtype=torch.int64),
        torch.zeros_like(sampled) if greedy else sampled,
        "length" if end is None else "stop",
        version,
    )


# How questions are asked at the same time: all or none, with somebody looking in, and given up where nobody is there any more.

T = TypeVar("T")


async def with_heartbeat(work: Coroutine[Any, Any, T], check: Callable[[], Awaitable[None]], seconds: float) -> T:
    """What `work` comes to. As long as it takes, `pulse` is asked every so many seconds, and its error ends it; 0 = never."""
    if not seconds:
        return await work
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=seconds))[0]:
            await check()
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # one that failed while this was cancelled, too


@asynccontextmanager
async def run_periodically(seconds: float, action: Callable[[], Awaitable[None]] | None) -> AsyncIterator[None]:
    """Inside, `look` is awaited again and again, so many seconds after it is done; None = not at all. What it raises is raised at
    the end."""
    if action is None:
        yield
        return

    async def looks() -> None:
        while True:
            await asyncio.sleep(seconds)
            await action()

    task = asyncio.ensure_future(looks())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def gather_or_cancel(work: Sequence[Any]) -> list[Generation]:
    """All results; the first error ends the others."""
    tasks = [asyncio.ensure_future(some) for some in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


# Adapters by name: whether servers are sent a run's adapter alone, and what is said where one does not take it.
#
# Each version has a name of its own, that of its publication, which every request says. So a token's version is the name that
# it was asked under, and what was kept of a prompt under an older one is never read: vLLM hashes prefixes with the adapter's
# name (vllm/v1/core/kv_cache_utils.py), SGLang keeps them by an id that each loading draws anew
# (python/sglang/srt/lora/lora_registry.py). A server answers what it was asked under the old name before it is given the new
# one; then the old one is taken out of it.


def resolve_lora_sync(lora_sync: str, model: nn.Module, engine: str, supports_lora: bool) -> bool:
    """Whether servers are sent the adapter alone. way: `SamplerConfig.lora_sync`. engine: its name, for people. takes: whether its
    servers can.

    Raises:
        EngineError: the adapter alone is asked for, and cannot be sent.
    """
    reason = explain_unsupported_adapter(model) if supports_lora else f"{engine} takes no adapters by name"
    if lora_sync == ADAPTER and reason:
        raise EngineError(
            f"--sampler.lora-sync {ADAPTER}: {reason}: send all weights, with what is trained in them, --sampler.lora-sync {WHOLE}"
        )
    return lora_sync != WHOLE and not reason


def lora_refused_error(url: str, said: object, hints: tuple[tuple[str, str], ...], engine: str) -> EngineError:
    """What is raised where a server does not take an adapter. said: its answer. hints: (what an answer has in it, the way out); the
    first that fits is told. engine: as the command line names it."""
    hint = next((way for known, way in hints if known.lower() in str(said).lower()), "")
    start = f"start it as `policygrad engine {engine} --lora rank=N --print` says"
    return EngineError(
        f"{url} does not take the adapter: {said}. {hint or start}; or send all weights, --sampler.lora-sync {WHOLE}"
    )


TAIL_QUANTILE = 0.9
"""The share of answers that come before the tail."""
CALLBACK_INTERVAL = 0.05
"""Seconds between two looks of whoever watches, where no completion comes."""


class EngineSampler(ABC):
    """Routes, checks and publishes; an engine fills in what it says and hears."""

    name: ClassVar[str]
    launch_hint: ClassVar[str]
    """What its servers have to be started with, as a sentence."""
    health: ClassVar[str] = "/health"
    """A question that is answered at once, whatever else a server is at."""
    gauges: ClassVar[server_pool.PrometheusGauges | None] = None
    """What its servers say of their queue and their cache, at /metrics; None = nothing."""
    supports_lora: ClassVar[bool] = False
    """Whether its servers take adapters by name: `load` is given one then, where `adapter` is true."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        config: SamplerConfig,
        folder: Path,
        temperature: float = 1.0,
        on_progress: ProgressCallback = ignore_progress,
    ) -> None:
        """model: with the learner's weights, or a replica that takes them over, or without any, where they are gathered; folder:
        where weights are published; tell: is told when no server is there.

        Raises:
            EngineError: a model that the engine cannot be given.
        """
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.temperature, self.on_progress = temperature, on_progress
        self.adapter_only = resolve_lora_sync(config.lora_sync, model, self.name, self.supports_lora)
        self.versions = VersionFolder(folder, make_adapter_writer(model) if self.adapter_only else self.weight_writer())
        self.http = HttpClient(config.timeout)
        self.published: WeightVersion | None = None
        self._logit_source: probe.LogitSource = model  # of log-probabilities
        self.in_flight = config.chunk_tokens > 0
        self.probe_results: dict[str, probe.ProbeResult] = {}  # by server, of the weights of now
        self.failed_probes = set[str]()  # whose last probe failed: they are given their weights again whatever they say
        table: Any = model.get_input_embeddings()  # type: ignore[operator]
        self.vocab_size = len(tokenizer.hf) if table is None else int(table.weight.shape[0])
        self.load_monitor = server_pool.LoadMonitor(
            lambda url: self.http.get(url, config.heartbeat or config.timeout), self.gauges
        )
        self._callback: CompletionCallback | None = None
        self._tail = 0.0
        dtype = next(model.parameters()).dtype
        self.tolerance = config.logprob_tolerance or probe.TOLERANCE.get(dtype, 0.2)
        self._servers: ServerPool | None = None

    # what an engine fills in

    @abstractmethod
    def weight_writer(self) -> WeightWriter:
        """How whole weights are written for it."""

    @abstractmethod
    async def complete(self, url: str, request: Request, seed: int) -> EngineCompletion:
        """One completion. seed: below 2**31. Raises ServerUnavailableError where it shall be asked again."""

    @abstractmethod
    async def load_weights(self, url: str, weights: WeightVersion) -> None:
        """Returns when the server answers with these weights. Raises ServerUnavailableError where that shall be tried again."""

    async def handshake(self, url: str) -> None:  # noqa: B027
        """Learns of a server what `draw` has to know."""

    def start_servers(self) -> Sequence[str]:
        """The servers' addresses; starts one where none is given and the engine can."""
        return self.config.urls

    async def stop_servers(self) -> None:  # noqa: B027
        """Ends what `start` began, if anything."""

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation per request, in their order, from whichever servers are there. Weights may be updated meanwhile: what is
        asked for after that is drawn with them, and each token says its version.

        Raises:
            EngineError: no server answers, or one says what cannot be.
        """
        if self.published is None:
            raise EngineError("an engine has no weights before the first update(weights)")
        words, over = derive_seeds([request.key for request in requests]), list[float]()

        async def one(request: Request, word: int) -> Generation:
            found = await generate_in_chunks(request, word, self.config.chunk_tokens, self._ask)
            over.append(time.perf_counter())
            if self._callback is not None:
                self._callback([(request, found.tokens)])
            return found

        work = [one(request, word) for request, word in zip(requests, words[:, 0].tolist(), strict=True)]
        resize = None if self.config.max_concurrency else partial(self.load_monitor.adjust_limits, self.servers)
        async with (
            run_periodically(CALLBACK_INTERVAL, self._look if self._callback else None),
            run_periodically(server_pool.LOAD_POLL_SECONDS, resize),
        ):
            found = await gather_or_cancel(work)
        self._tail += over[-1] - over[int(TAIL_QUANTILE * (len(over) - 1))] if over else 0.0
        return found

    async def _look(self) -> None:
        if self._callback is not None:
            self._callback([])

    @contextmanager
    def on_completion(self, callback: CompletionCallback) -> Iterator[None]:
        """As `SupportsStreaming`: told of every completion as it comes, and from time to time of none."""
        self._callback = callback
        try:
            yield
        finally:
            self._callback = None

    async def update(self, weights: PublishedWeights) -> Metrics:
        """Writes the weights, has every server take them over, and compares what it then draws with the learner's distribution.

        Raises:
            EngineError: they cannot be written, or a server draws from something else.
        """
        began, first, there = time.perf_counter(), self.published is None, sum(s.ready for s in self.servers.all)
        self._logit_source = load_logit_source(weights, self.model)
        self.published = self.versions.publish(weights)
        self.probe_results.clear()
        await self.servers.ready()
        self.versions.remove_old_versions(self.published)
        took = time.perf_counter() - began
        found: Metrics = {"publication/seconds": Sum(took), "publication/bytes": Sum(float(self.published.bytes))}
        if not first:
            found["publication/servers"] = Min(float(there))
        found["publication/retries"] = Sum(float(self.servers.num_retries))
        self.servers.num_retries = 0
        found["engine/tail"], self._tail = Sum(self._tail), 0.0
        if not self.config.max_concurrency:
            found["engine/max_concurrency"] = Mean(
                float(sum(s.limit for s in self.servers.all)), float(len(self.servers.all))
            )
        if self.probe_results:
            found["publication/probe_max"] = Max(max(verdict.difference for verdict in self.probe_results.values()))
        return found

    async def close(self) -> None:
        """Ends connections and servers that were started here, and removes the weights that were published for them."""
        if self._servers is not None:
            await self._servers.close()
        await self.http.close()
        await self.stop_servers()
        self.versions.remove()

    @property
    def servers(self) -> ServerPool:
        if self._servers is None:
            config = self.config
            first = config.max_concurrency or server_pool.INITIAL_CONCURRENCY
            self._servers = ServerPool(
                self.start_servers(), self._prepare, first, config.recovery_timeout, self.on_progress
            )
        return self._servers

    async def _prepare(self, server: EngineServer) -> None:
        """Gives a server the weights of now, and probes it."""
        assert self.published is not None
        await self.handshake(server.url)
        if not self.config.max_concurrency:
            await self.load_monitor.require_load(server.url)
        await self.load_weights(server.url, self.published)
        try:
            self.probe_results[server.url] = await self.probe(server.url)
        except StaleWeightsError as error:
            raise ServerUnavailableError(f"it is looked at after the next publication: {error}") from error
        except EngineError:
            self.failed_probes.add(server.url)
            raise
        self.failed_probes.discard(server.url)

    async def probe(self, url: str) -> probe.ProbeResult:
        """Whether a server draws from the model's distribution.

        Raises:
            EngineError: it does not.
        """
        version = 0 if self.published is None else self.published.version
        asked = probe.make_probe_requests(len(self.tokenizer.hf), self.temperature, version)
        words = derive_seeds([request.key for request in asked])[:, 0].tolist()
        gate = asyncio.Semaphore(self.config.max_concurrency or server_pool.INITIAL_CONCURRENCY)

        async def one(request: Request, word: int) -> Generation:
            async with gate:
                return self._generation(url, request, await self.complete(url, request, word >> 33), version)

        try:
            drawn = await gather_or_cancel([one(request, word) for request, word in zip(asked, words, strict=True)])
        except EngineError as error:
            raise EngineError(f"{url} does not answer as {self.name} does: {error}. {self.launch_hint}") from error
        how = (asked, drawn, self.tolerance, f"{self.name} at {url}", self.launch_hint)
        if self._logit_source is self.model:
            return probe.compare_logprobs(self.model, *how)
        return await asyncio.to_thread(
            probe.compare_logprobs, self._logit_source, *how
        )  # it may wait for what the learner is at

    async def _ask(self, request: Request, word: int, begun: bool) -> Generation:
        return await self.servers.call(partial(self._one, request, word >> 33), begun)

    async def _one(self, request: Request, seed: int, server: EngineServer) -> Generation:
        published = self.published  # a server is given others only when it has answered what it was asked
        assert published is not None
        heartbeat = self.config.heartbeat
        pulse = partial(self.http.check_alive, server.url + self.health, heartbeat)
        drawn = await with_heartbeat(self.complete(server.url, request, seed), pulse, heartbeat)
        if drawn.weight_version not in (None, published.name):  # it went and came back between two requests
            raise ServerUnavailableError(
                f"it draws with the weights {drawn.weight_version}, and those of now are {published.name}"
            )
        return self._generation(server.url, request, drawn, published.version)

    def _generation(self, url: str, request: Request, drawn: EngineCompletion, version: int) -> Generation:
        return validate_completion(
            url, request, drawn, version, end_tokens=self.tokenizer.end_ids, vocab_size=self.vocab_size
        )
