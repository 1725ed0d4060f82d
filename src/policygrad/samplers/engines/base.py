"""A sampler whose completions come from servers of an engine. What is particular to one engine is in a file of its own.

Token ids go out and come back, never text. Every reply is checked: one log-probability per token, no placeholders, an end by the
policy or by the limit of tokens. A probe compares the server's log-probabilities with the learner's at first contact, after every
weight update, and when a server comes back.
"""

from __future__ import annotations

import asyncio
import base64
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from policygrad.core.batch import SamplingMask
from policygrad.core.metrics import Max, Mean, Metrics, Min, Sum
from policygrad.errors import ConfigError, EngineError
from policygrad.models.chat.messages import EncodedText
from policygrad.models.lora_config import Lora
from policygrad.models.moe_routing import Routing
from policygrad.models.tokenizer import Tokenizer
from policygrad.models.traits import adapter_configs
from policygrad.models.vision import encode_picture_file
from policygrad.planning.model_sizes import SMALL_MODEL_PARAMETERS
from policygrad.samplers.base import CompletionCallback, Generation, Request
from policygrad.samplers.config import ADAPTER, FOLDER, MERGED, NCCL, SamplerConfig
from policygrad.samplers.engines import probe, server_pool
from policygrad.samplers.engines.colocation import ColocatedServer, Memory
from policygrad.samplers.engines.http import HttpClient, ServerStartingError, ServerUnavailableError
from policygrad.samplers.engines.installation import Installation, find_installation
from policygrad.samplers.engines.llama_server import KEY_VARIABLE
from policygrad.samplers.engines.nccl_transfer import WeightTransfer
from policygrad.samplers.engines.polling import SharedPoll, repeat_during
from policygrad.samplers.engines.server_pool import EngineServer, ServerPool
from policygrad.samplers.engines.server_process import LaunchCommand, ServerProcess, find_free_port
from policygrad.samplers.engines.tail import RequestTail
from policygrad.samplers.local.sampling import derive_seeds
from policygrad.samplers.stop_texts import cut_at_stop, find_stop
from policygrad.utils.async_runner import gather_or_cancel
from policygrad.utils.child_environment import ENGINE_VARIABLES
from policygrad.utils.progress import ProgressCallback, ignore_progress
from policygrad.weight_sync.base import PublishedWeights, StaleWeightsError, load_logit_source
from policygrad.weight_sync.folder import (
    SHARED_MEMORY,
    VersionFolder,
    WeightVersion,
    WeightWriter,
    explain_unsupported_adapter,
    make_adapter_writer,
)

CALLBACK_INTERVAL = 0.05  # seconds between calls of the completion callback while no completion finishes
MAX_WAKE_FAILURES = 3  # attempts to wake a server, after which it is stopped and started again
ADAPTIVE_SLOTS = 256  # concurrent requests that a server is started for, if their number is adjusted to its load
REQUEST_TIMEOUT = 10.0  # seconds for a request that needs no computation
CACHED_URIS = 64  # pictures kept in the form in which they are sent: the completions of one prompt send the same


@dataclass(frozen=True)
class EngineCompletion:
    """A server's reply to one request."""

    tokens: Sequence[int]
    logp: Sequence[float]  # nats, one per token
    weight_version: str | None = None  # name of the weights that it was sampled with, if the engine tells
    routed_experts: np.ndarray | None = None
    """[tokens that the model read, layers, k], prompt first: the experts of each token; all but the last token are read."""
    sampling_mask: Sequence[Sequence[int]] | None = None
    """For each token the ids that top-k and top-p left."""


@dataclass(frozen=True)
class LaunchOptions:
    """What a server is started with."""

    model: str  # a folder, or a hub id
    folder: str | None  # the run's `sampler.folder`
    host: str
    port: int
    dtype: str  # float32 or bfloat16
    context_length: int  # maximum tokens of prompt and completion
    max_concurrency: int
    threads: int
    weight_transport: str = FOLDER
    lora: Lora | None = None  # the adapter that the run will send; None = merged weights
    colocate: bool = False  # True: it can sleep while the learner learns on its GPU
    records_experts: bool = False  # True: completions come with the experts that each token was routed to
    returns_masks: bool = False  # True: completions come with the tokens that top-k and top-p left
    sees: bool = False  # True: prompts may have pictures
    on_cpu: bool = False  # True on a machine without a GPU
    memory_fraction: float = 0.0  # of a GPU's memory, for weights and cache; 0 = the engine's own default


class EngineSampler(ABC):
    """Routes requests to servers, checks replies and publishes weights. A subclass has one engine's facts and requests."""

    # Facts of the engine, read by `SamplerConfig`, the registry and the command line.

    name: ClassVar[str]
    """For messages."""
    launch_hint: ClassVar[str]
    """How its servers must be started, as a sentence."""
    health_route: ClassVar[str] = "/health"
    """A route that answers at once, however busy the server is."""
    detection_routes: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(route, key of its JSON reply) by which servers of this engine are recognised."""
    package: ClassVar[str] = ""
    """The Python package that has its servers. The run starts servers with `launch_command` when `sampler.urls` is empty; "" = it
    cannot, and needs `sampler.urls`."""
    variables: ClassVar[tuple[str, ...]] = ENGINE_VARIABLES
    """Names and patterns of the environment variables that servers get besides those of all child processes and those that
    `sampler.env` names (`filter_environment`)."""
    gauges: ClassVar[server_pool.PrometheusGauges | None] = None
    """Load metrics at /metrics; None if servers report none. `sampler.max_concurrency=0` needs them."""
    supports_lora: ClassVar[bool] = False
    """True if servers load adapters by name: `load_weights` is then given one if `adapter_only`."""
    lora_route: ClassVar[str] = ""
    """Prefix of the routes /load_lora_adapter and /unload_lora_adapter."""
    transfer_class: ClassVar[type[WeightTransfer] | None] = None
    """Sends weights over NCCL; None if servers only read folders."""
    can_sleep: ClassVar[bool] = False
    """True if servers free their GPU's memory on request, by `sleep` and `wake`: `sampler.colocate` needs it."""
    returns_routed_experts: ClassVar[bool] = False
    """True if completions have `Generation.routed_experts` where `records_experts` is set."""
    stops_at_texts: ClassVar[bool] = False
    """True if servers stop at `SamplingParams.stop`, and return the tokens up to the one that completes it. Otherwise completions
    run on, and are cut here."""
    asks_for_key: ClassVar[bool] = False
    """True if a server that `policygrad engine` starts answers only who sends the key in SAMPLER_API_KEY, if that is set."""
    supports_stop: ClassVar[bool] = False
    """True if a completion can end elsewhere than at the tokenizer's end tokens: `Request.stop`."""
    returns_sampling_masks: ClassVar[bool] = False
    """True if completions have `Generation.sampling_mask` where `Request.needs_mask` is set."""
    top_k_option: ClassVar[str] = ""
    """How a server is started that tells the `{k}` likeliest tokens of `score`, as a sentence; "" = any k."""
    scores_tokens: ClassVar[bool] = False
    """True if servers return the log-probabilities of given tokens: `score`. A teacher may be behind one (teachers.py)."""
    supports_pictures: ClassVar[bool] = False
    """True if prompts may have pictures: `Request.media`, which `pictured_prompt` prepares."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        config: SamplerConfig,
        folder: Path,
        temperature: float = 1.0,
        on_progress: ProgressCallback = ignore_progress,
        log_folder: Path | None = None,
    ) -> None:
        """
        Args:
            model: The learner's model, a copy that published weights are loaded into, or a model on the meta device if the policy
                is sharded.
            folder: Where weights are published.
            on_progress: Called while no server is available.
            log_folder: Where servers that are started here write what they print; default: beside `folder`.

        Raises:
            EngineError: The engine cannot serve this model, or cannot be sent its weights as configured.
        """
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.temperature, self.on_progress = temperature, on_progress
        self.log_folder = log_folder or folder.parent
        # Each version of an adapter has its own name, which every request states, so that a token's version is the name in its
        # request, and a server's prefix cache is never read across versions: vLLM hashes prefixes with the adapter's name
        # (vllm/v1/core/kv_cache_utils.py), SGLang keeps them by an id that is new at each load
        # (python/sglang/srt/lora/lora_registry.py).
        unnamed = f"{self.name} does not load adapters by name"
        reason = explain_unsupported_adapter(model) if self.supports_lora else unnamed
        if config.lora_sync == ADAPTER and reason:
            raise EngineError(f"sampler.lora_sync={ADAPTER}: {reason}. Send all weights: --sampler.lora-sync {MERGED}")
        self.adapter_only = config.lora_sync != MERGED and not reason
        writer = make_adapter_writer(model) if self.adapter_only else self.weight_writer()
        self.versions = VersionFolder(folder, writer)
        self.transfer: WeightTransfer | None = None
        if config.weight_transport == NCCL and self.transfer_class is not None:
            if adapter_configs(model):
                raise EngineError(
                    f"sampler.weight_transport={NCCL} sends no adapters: set --sampler.weight-transport {FOLDER}"
                )
            self.transfer = self.versions = self.transfer_class(folder, model, config)
        self.http = HttpClient(config.timeout, key=os.environ.get(KEY_VARIABLE, ""))
        self.published: WeightVersion | None = None
        self._logit_source: probe.LogitSource = model
        self.in_flight = config.chunk_tokens > 0
        self.serves_concurrently = True
        self.probe_results: dict[str, probe.ProbeResult] = {}  # by server, for the current weights
        self.adapter_names: dict[str, str] = {}  # by server: the current adapter
        self.must_reload = set[str]()  # servers that load their weights again, whatever version they report
        embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
        self.vocab_size = len(tokenizer.hf) if embeddings is None else int(embeddings.weight.shape[0])
        self.colocated: dict[str, ColocatedServer] = {}  # by server, of those that sleep while the learner learns
        self.records_experts = False
        """True: completions must come with the experts that each token was routed to. Set it before the first request."""
        self.returns_masks = False  # whether servers that are started here must return sampling masks
        self.load_monitor = server_pool.LoadMonitor(
            lambda url: self.http.get(url, config.heartbeat or config.timeout), self.gauges
        )
        self._heartbeats: dict[str, SharedPoll] = {}  # by server
        self.processes: dict[str, ServerProcess] = {}  # by server, of those that are started here
        self._start_versions: dict[str, WeightVersion] = {}  # by server: what its process was started with
        self._callback: CompletionCallback | None = None
        self._tail = RequestTail()
        dtype = next(model.parameters()).dtype
        self.logprob_tolerance = config.logprob_tolerance or probe.TOLERANCE.get(dtype, 0.2)
        self._servers: ServerPool | None = None

    # Implemented by an engine.

    @abstractmethod
    def weight_writer(self) -> WeightWriter:
        """Return what writes full weights in the engine's format."""

    @abstractmethod
    async def load_weights(self, url: str, version: WeightVersion) -> None:
        """Let a server load a version; return once it serves it. Raise ServerUnavailableError to be called again."""

    @abstractmethod
    async def complete(self, url: str, request: Request, seed: int) -> EngineCompletion:
        """Request one completion. Raise ServerUnavailableError to have it requested again.

        Args:
            seed: Below 2**31.
        """

    @classmethod
    def launch_command(cls, options: LaunchOptions) -> LaunchCommand:
        """Return the command that starts a server.

        Raises:
            ConfigError: The engine cannot be started with these options.
        """
        raise ConfigError(f"policygrad does not start servers of {cls.name}. {cls.launch_hint}")

    @classmethod
    async def score(
        cls, http: HttpClient, url: str, model: str, ids: Sequence[int], start: int, top_k: int = 0
    ) -> tuple[list[float], list[dict[int, float]]]:
        """Return the log-probabilities of the tokens ids[start:], nats, each after all before it, under softmax(logits) over the
        full vocabulary, and those of the likeliest tokens in its place by id; only for an engine with `scores_tokens`.

        Args:
            model: The model's name on the server.
            start: Number of tokens at the beginning that are not scored, at least 1.
            top_k: How many of the likeliest tokens are wanted; the server may tell more.
        """
        raise NotImplementedError

    async def handshake(self, url: str) -> None:  # noqa: B027
        """Called before a server loads weights, to learn what `complete` needs to know."""

    async def sleep(self, url: str) -> None:
        """Free a server's memory; only for an engine with `can_sleep`."""
        raise NotImplementedError

    async def wake(self, url: str, part: str) -> None:
        """Give a server the memory of a part back; only for an engine with `can_sleep`."""
        raise NotImplementedError

    @classmethod
    def requirements(cls, *, has_gpu: bool) -> list[str]:
        """Return pip's arguments that install the tested version of the engine."""
        return [cls.package]

    # The interface of a sampler.

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Return one generation per request, in order, from any of the servers. Weights may be updated meanwhile: later requests
        are sampled with the new ones, and each token has its version.

        Raises:
            EngineError: No server is available, or one sends invalid replies.
        """
        if self.published is None:
            raise EngineError("an engine has no weights before the first update(weights)")
        if not self.supports_stop and any(request.stop is not None for request in requests):
            raise EngineError(f"{self.name} ends completions at the tokenizer's end tokens alone: leave stop out")
        if not self.supports_pictures and any(request.media for request in requests):
            raise EngineError(
                f"a prompt has a picture, and policygrad sends {self.name} token ids alone. Use --sampler.engine vllm, sglang or "
                "local"
            )
        callback = self._callback

        async def generate_one(request: Request, seed: int) -> Generation:
            # in chunks, each of which continues the prompt and the tokens so far: the distribution is that of a single request,
            # because a token depends only on those before it. A lost chunk is requested again, and earlier ones stay
            chunks, remaining, stop = list[Generation](), request.max_tokens, request.sampling.stop
            prompt_ids, compact_ids = request.prompt_ids, request.compact_ids
            while remaining and not (chunks and chunks[-1].finish_reason == "stop"):
                if chunks:
                    # the 0 keeps it apart from the keys of an episode's later turns, which are one number longer
                    seed = int(derive_seeds([(*request.key, 0, len(chunks))])[0, 0])
                    prompt_ids = torch.cat([prompt_ids, chunks[-1].tokens])
                    compact_ids = None if compact_ids is None else torch.cat([compact_ids, chunks[-1].tokens])
                max_tokens = min(remaining, self.config.chunk_tokens or remaining)
                part = replace(request, prompt_ids=prompt_ids, compact_ids=compact_ids, max_tokens=max_tokens)
                chunks.append(await self.servers.call(partial(self._complete_at, part, seed), bool(chunks)))
                remaining -= len(chunks[-1].tokens)
                if stop:  # it may begin in one chunk and end in the next
                    whole = cut_at_stop(concat_generations(chunks), stop, self.tokenizer.decode)
                    chunks = [whole] if whole.finish_reason == "stop" else chunks
            generation = concat_generations(chunks)
            if callback is not None:
                callback([(request, generation.tokens)])
            return generation

        async def time_one(request: Request, seed: int) -> Generation:
            with self._tail.request():
                return await generate_one(request, seed)

        seeds = derive_seeds([request.key for request in requests])[:, 0].tolist()
        work = gather_or_cancel(map(time_one, requests, seeds))
        if callback is not None:

            async def call_back() -> None:
                callback([])

            work = repeat_during(work, call_back, CALLBACK_INTERVAL)
        return await (work if self.config.max_concurrency else self._load_poll.during(work))

    @contextmanager
    def on_completion(self, callback: CompletionCallback) -> Iterator[None]:
        self._callback = callback
        try:
            yield
        finally:
            self._callback = None

    async def update(self, weights: PublishedWeights) -> Metrics:
        """Publish the weights, let every server load them, and probe each.

        Raises:
            EngineError: The weights cannot be written, or a server samples from something else.
        """
        started, is_first = time.perf_counter(), self.published is None
        num_ready = sum(server.ready or self._is_lent(server.url) for server in self.servers.all)
        self._logit_source = load_logit_source(weights, self.model)
        self.published = self.versions.publish(weights)
        if self.colocated and torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the learner's allocator holds and does not use
        self.probe_results.clear()
        await self.servers.ready()
        starting = {self._start_versions.get(url) for url, process in self.processes.items() if process.is_starting}
        self.versions.remove_old_versions(self.published, *filter(None, starting))
        metrics: Metrics = {
            "publication/seconds": Sum(time.perf_counter() - started),
            "publication/bytes": Sum(float(self.published.bytes)),
        }
        if not is_first:
            metrics["publication/servers"] = Min(float(num_ready))
        metrics["publication/retries"] = Sum(float(self.servers.num_retries))
        self.servers.num_retries = 0
        metrics["engine/tail"] = Sum(self._tail.pop())
        if not self.config.max_concurrency:
            limits = sum(server.limit for server in self.servers.all)
            metrics["engine/max_concurrency"] = Mean(float(limits), float(len(self.servers.all)))
        if self.probe_results:
            metrics["publication/probe_max"] = Max(max(result.difference for result in self.probe_results.values()))
        return metrics

    async def lend_memory(self) -> Metrics:
        """Put servers that share the learner's GPU to sleep; the next update or request wakes them.

        Raises:
            EngineError: A server cannot sleep.
        """
        if not self.config.colocate:
            return {}
        started = time.perf_counter()
        await gather_or_cancel(map(self._lend_memory_of, self.servers.all))
        return {"time/lend_memory": Sum(time.perf_counter() - started)}

    async def _lend_memory_of(self, server: EngineServer) -> None:
        colocated, process = self.colocated[server.url], self.processes[server.url]
        server.ready = False  # the next request prepares it first
        try:
            await colocated.lend()
            self.must_reload.add(server.url)
        except ServerUnavailableError as error:
            if not colocated.has_slept:
                raise EngineError(f"{self.name} does not go to sleep: {error}. {process.read_log_end()}") from error
            await asyncio.to_thread(process.stop)  # so that its memory is free; it is started again when it is needed

    def _is_lent(self, url: str) -> bool:
        return url in self.colocated and self.colocated[url].memory is not Memory.AWAKE

    async def close(self) -> None:
        """Close connections, stop servers that were started here, and remove the published weights."""
        if self.adapter_only and self.published is not None:
            for url in self.adapter_names:
                await self.unload_adapter(url, self.published.name)
        if self._servers is not None:
            await self._servers.close()
        if self.transfer is not None:
            await self.transfer.close(self.http)
        await self.http.close()
        for process in self.processes.values():
            process.ask_to_stop()
        for process in self.processes.values():
            process.stop()
        self.versions.remove()

    def end_ids(self, request: Request) -> frozenset[int]:
        """Return the ids that end a request's completion."""
        return self.tokenizer.end_ids if request.stop is None else request.stop

    async def unload_adapter(self, url: str, name: str) -> None:
        """Let a server unload an adapter that it may have."""
        with suppress(ServerUnavailableError, EngineError):  # not loaded, evicted before, or the server is gone
            await self.http.post(f"{url}{self.lora_route}/unload_lora_adapter", {"lora_name": name}, REQUEST_TIMEOUT)

    async def probe(self, url: str) -> probe.ProbeResult:
        """Compare what a server samples with the model's distribution.

        Raises:
            EngineError: They differ.
        """
        version = 0 if self.published is None else self.published.version
        requests = probe.make_probe_requests(len(self.tokenizer.hf), self.temperature, version, self._probe_pictures)
        seeds = derive_seeds([request.key for request in requests])[:, 0].tolist()
        slots = asyncio.Semaphore(self.config.max_concurrency or server_pool.INITIAL_CONCURRENCY)

        async def complete(request: Request, seed: int) -> Generation:
            async with slots:
                return self._validate(url, request, await self.complete(url, request, seed >> 33), version)

        try:
            generations = await gather_or_cancel(map(complete, requests, seeds))
        except EngineError as error:
            raise EngineError(f"{url} does not answer as {self.name} does: {error}. {self.launch_hint}") from error
        arguments = (requests, generations, self.logprob_tolerance, f"{self.name} at {url}", self.launch_hint)
        if self._logit_source is self.model:
            return probe.compare_logprobs(self.model, *arguments)
        # in a thread, as it may wait for the learner
        return await asyncio.to_thread(probe.compare_logprobs, self._logit_source, *arguments)

    @cached_property
    def _probe_pictures(self) -> list[EncodedText]:
        """Prompts with pictures for the probe; none if the model does not see, or no request may have one."""
        if not self.supports_pictures:
            return []
        return probe.make_pictured_prompts(
            self.tokenizer, self.config.resolve_context_length(self.tokenizer.context_length)
        )

    @property
    def servers(self) -> ServerPool:
        """The servers, started on first use."""
        if self._servers is None:
            config = self.config
            limit = config.max_concurrency or server_pool.INITIAL_CONCURRENCY
            urls = config.urls or self._list_own_servers()
            self._servers = ServerPool(urls, self._prepare, limit, config.recovery_timeout, self.on_progress)
        return self._servers

    async def _prepare(self, server: EngineServer) -> None:
        """Let a server load the current weights, and probe it; start it if it is one of this run's that does not run."""
        process = self.processes.get(server.url)
        if process is None:
            await self._load_and_probe(server)
            return
        failure = process.ensure_running()
        if failure:
            raise EngineError(
                f"{self.name} does not start: {failure}\n`policygrad doctor` shows what this machine has."
            )
        if process.is_starting and server.url in self.colocated:
            self.colocated[server.url].mark_restarted()
        try:
            await self._load_and_probe(server)
        except ServerUnavailableError as error:
            if self._is_lent(server.url):
                self.colocated[server.url].failures += 1
                if self.colocated[server.url].failures == MAX_WAKE_FAILURES:
                    await asyncio.to_thread(process.stop)
            seconds, timeout = process.seconds_since_start, self.config.start_timeout
            if process.is_starting and seconds < timeout:
                text = f"starting {self.name}, for up to {timeout:g} s (its log: {process.log})"
                raise ServerStartingError(text, seconds, timeout) from error
            raise ServerUnavailableError(f"{error}. {process.read_log_end()}") from error
        process.is_starting = False

    async def _load_and_probe(self, server: EngineServer) -> None:
        assert self.published is not None
        await self.handshake(server.url)
        if not self.config.max_concurrency:
            await self.load_monitor.read(server.url)
        colocated = self.colocated.get(server.url)
        if colocated is not None and await colocated.begin_waking():
            self.must_reload.add(server.url)
        await self.load_weights(server.url, self.published)
        if colocated is not None:
            await colocated.finish_waking()
        try:
            self.probe_results[server.url] = await self.probe(server.url)
        except StaleWeightsError as error:
            raise ServerUnavailableError(f"it is probed after the next update: {error}") from error
        except EngineError:
            self.must_reload.add(server.url)
            raise
        self.must_reload.discard(server.url)

    def _list_own_servers(self) -> list[str]:
        """Return the addresses of the servers that the run starts, at free ports of this machine."""
        installation = find_installation(type(self), self.config.engine, self.config.python)
        root = self.versions.root
        shared_folder = str(root) if self.config.folder is None and root.is_relative_to(SHARED_MEMORY) else ""
        for number in range(self.config.servers):
            port = find_free_port()
            url, log = f"http://127.0.0.1:{port}", self.log_folder / f"server-{number}.log"
            make_command = partial(self._make_launch_command, installation, number, url)
            variables = (*self.variables, *self.config.env)
            self.processes[url] = ServerProcess(log, make_command, variables, shared_folder)
            if self.config.colocate:
                self.colocated[url] = ColocatedServer(self, url)
        return list(self.processes)

    def _make_launch_command(self, installation: Installation, number: int, url: str) -> LaunchCommand:
        """Return what starts a server with the newest weights, or with the base model if only an adapter is sent."""
        assert self.published is not None
        self._start_versions[url] = self.published
        config, gpus = self.config, self.config.gpus
        is_small = sum(p.numel() for p in self.model.parameters()) < SMALL_MODEL_PARAMETERS
        lora = None
        if self.adapter_only:
            [adapter] = adapter_configs(self.model).values()
            targets = adapter.target_modules
            lora = Lora(rank=adapter.r, targets=targets if isinstance(targets, str) else "+".join(sorted(targets)))
        environment, argv = self.launch_command(
            LaunchOptions(
                model=self.find_served_model(),
                folder=str(self.versions.root),
                host="127.0.0.1",
                port=int(url.rpartition(":")[2]),
                dtype=str(next(self.model.parameters()).dtype).removeprefix("torch."),
                context_length=config.resolve_context_length(self.tokenizer.context_length),
                max_concurrency=config.max_concurrency or ADAPTIVE_SLOTS,
                threads=config.threads or (1 if is_small else os.cpu_count() or 1),
                weight_transport=config.weight_transport,
                lora=lora,
                colocate=config.colocate,
                records_experts=self.records_experts,
                returns_masks=self.returns_masks,
                sees=self.tokenizer.pictures is not None,
                on_cpu=not gpus,
                memory_fraction=config.gpu_memory,
            )
        )
        if gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            gpu = gpus[number % len(gpus)]
            environment = {**environment, "CUDA_VISIBLE_DEVICES": visible[gpu] if visible != [""] else str(gpu)}
        return environment, installation.resolve(argv)

    def find_served_model(self) -> str:
        """Return the folder or hub id that a server starts with: the published weights, or the model that an adapter adapts."""
        if self.published is not None and (self.published.path / "config.json").is_file():
            return str(self.published.path)
        name = str(getattr(getattr(self.model, "config", None), "_name_or_path", ""))
        if not name:
            raise EngineError(
                f"a server of {self.name} starts with the run's model from a folder, and the model is an object that names none. "
                "Save it and pass the folder, or start the server yourself: --sampler.urls URL"
            )
        return name

    async def _complete_at(self, request: Request, seed: int, server: EngineServer) -> Generation:
        published = self.published  # a server loads others only after it has answered its open requests
        assert published is not None
        completion = await self._heartbeat(server.url).during(self.complete(server.url, request, seed >> 33))
        if completion.weight_version not in (None, published.name):  # it restarted between two requests
            raise ServerUnavailableError(
                f"it samples with the weights {completion.weight_version}; the current ones are {published.name}"
            )
        return self._validate(server.url, request, completion, published.version)

    @cached_property
    def _load_poll(self) -> SharedPoll:
        """Adjusts the servers' limits while completions are awaited, in however many calls."""
        return SharedPoll(partial(self.servers.adjust_limits, self.load_monitor.read), server_pool.LOAD_POLL_SECONDS)

    def _heartbeat(self, url: str) -> SharedPoll:
        """Return what looks whether a server lives while its replies are awaited."""
        if url not in self._heartbeats:
            seconds = self.config.heartbeat
            check = partial(self.http.check_alive, url + self.health_route, seconds)
            self._heartbeats[url] = SharedPoll(check, seconds)
        return self._heartbeats[url]

    def _validate(self, url: str, request: Request, completion: EngineCompletion, version: int) -> Generation:
        """Return the generation up to its first end token. Raises EngineError if the reply is no completion of the request."""
        tokens, logp, end_tokens = list(completion.tokens), list(completion.logp), self.end_ids(request)
        if len(tokens) != len(logp):
            raise EngineError(
                f"{url} returns {len(logp)} log-probabilities for {len(tokens)} tokens; tokens that are not complete UTF-8 text "
                "get lost in its text"
            )
        if invalid := [x for x in tokens if not (isinstance(x, int) and 0 <= x < self.vocab_size)]:
            raise EngineError(f"{url} returns {invalid[0]!r} as a token; the model has ids below {self.vocab_size}")
        end = next((i for i, token in enumerate(tokens) if token in end_tokens), None)
        if end is not None:
            tokens, logp = tokens[: end + 1], logp[: end + 1]
        if len(tokens) > request.max_tokens:
            raise EngineError(f"{url} returns {len(tokens)} tokens, and was asked for {request.max_tokens}")
        is_cut = end is None and len(tokens) != request.max_tokens
        stop = request.sampling.stop if self.stops_at_texts else ()
        if is_cut and find_stop(torch.tensor(tokens), stop, self.tokenizer.decode) is None:
            raise EngineError(
                f"{url} ends after {len(tokens)} of {request.max_tokens} tokens without an end token of the policy "
                f"({', '.join(map(str, sorted(end_tokens)))}). Its context is too short, or its model has other end tokens."
            )
        if bad := [x for x in logp if not (isinstance(x, float | int) and -9000 < x <= 1e-4 and math.isfinite(x))]:
            raise EngineError(
                f"{url} returns {bad[0]} as a log-probability: a placeholder, or a token that cannot be sampled"
            )
        sampled = torch.tensor(logp, dtype=torch.float32).clamp(max=0.0)
        if request.sampling.temperature == 0:  # the token has probability 1, whatever an engine returns
            sampled = torch.zeros_like(sampled)
        reason: Literal["stop", "length"] = "length" if end is None else "stop"
        experts = self._align_experts(url, request, completion, len(tokens)) if self.records_experts else None
        left = self._read_mask(url, tokens, completion) if request.needs_mask else None
        return Generation(torch.tensor(tokens, dtype=torch.int64), sampled, reason, version, experts, left)

    def _read_mask(self, url: str, tokens: Sequence[int], completion: EngineCompletion) -> SamplingMask:
        """Return which tokens top-k and top-p left, for `tokens`, the completion up to its first end token.

        Raises:
            EngineError: The server returns none, or one that leaves out a token that it sampled.
        """
        if completion.sampling_mask is None:
            raise EngineError(
                f"{url} does not return the tokens that top-k and top-p left, which training needs. Start it with "
                "--return-sampling-mask, or leave --top-p 1 and --top-k 0"
            )
        left = completion.sampling_mask[: len(tokens)]
        if len(left) != len(tokens) or any(token not in ids for token, ids in zip(tokens, left, strict=True)):
            raise EngineError(f"{url} returns a sampling mask without the tokens that it sampled")
        counts = torch.tensor([len(ids) for ids in left], dtype=torch.int32)
        return SamplingMask(torch.tensor([token for ids in left for token in ids], dtype=torch.int32), counts)

    def _align_experts(self, url: str, request: Request, completion: EngineCompletion, length: int) -> Tensor:
        """Return the experts of prompt and completion [P + n, layers with experts, k], -1 for the last token.

        Args:
            length: n, tokens of the completion up to its first end token.

        Raises:
            EngineError: The server returns none, or not one row for every token but the last.
        """
        if completion.routed_experts is None:
            raise EngineError(
                f"{url} returns no experts, and learner.routing_replay needs those that each token was routed to. Start it with "
                "--enable-return-routed-experts, or leave learner.routing_replay out"
            )
        experts = torch.from_numpy(completion.routed_experts.astype(np.int16))
        read = len(request.prompt_ids) + len(completion.tokens) - 1
        layers, k = self.expert_layers
        has_layers = experts.ndim == 3 and (experts.shape[1] == len(layers) or experts.shape[1] > layers[-1])
        if not has_layers or len(experts) != read or experts.shape[2] != k:
            raise EngineError(
                f"{url} returns experts of the shape {list(experts.shape)} for {read} tokens that were read; the model has "
                f"{len(layers)} layers with {k} experts per token"
            )
        if experts.shape[1] > len(layers):  # those of layers without experts are there too
            experts = experts[:, layers]
        read_before = experts[: len(request.prompt_ids) + length - 1]
        return torch.cat([read_before, read_before.new_full((1, *read_before.shape[1:]), -1)])

    def sampling_options(self, request: Request) -> dict[str, Any]:
        """Return the options of one completion that vLLM and SGLang name alike, so that a server's defaults have no effect."""
        return {
            "temperature": request.sampling.temperature,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "ignore_eos": request.stop is not None,
            "stop_token_ids": sorted(self.end_ids(request)),
        }

    def pictured_prompt(self, request: Request) -> tuple[list[int], list[str]]:
        """Return what an engine that expands pictures itself is sent for a prompt: ids with one mark for each picture, and the
        pictures as data URIs.

        Raises:
            EngineError: The request has no such ids, or no picture's file.
        """
        if request.compact_ids is None or not all(media.file for media in request.media):
            missing = "compact_ids" if request.compact_ids is None else "the files of its pictures"
            raise EngineError(
                f"{self.name} reads pictures from their files, and a request has not {missing}: pass those of Tokenizer.encode"
            )
        return request.compact_ids.tolist(), [to_data_uri(media.file) for media in request.media]

    @cached_property
    def expert_layers(self) -> tuple[list[int], int]:
        """The numbers of the layers with experts, and how many experts each token is routed to."""
        routing = Routing.for_model(self.model)
        names = {module: name for name, module in self.model.named_modules()}
        numbers = [re.search(r"\.(\d+)\.", f".{names[router.module]}.") for router in routing.routers]
        layers = [i if number is None else int(number[1]) for i, number in enumerate(numbers)]
        return layers, routing.routers[0].k


@lru_cache(CACHED_URIS)
def to_data_uri(file: bytes) -> str:
    """Return a picture's file as a data URI, so that every reader of it sees the pixels that the run's processor sees."""
    kind, data = encode_picture_file(file)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def lora_refused_error(url: str, reply: object, hints: Sequence[tuple[str, str]], engine: str) -> EngineError:
    """Return the error for a server that does not load an adapter.

    Args:
        hints: (part of the reply, how to solve it); the first that matches is shown.
        engine: The engine's name on the command line.
    """
    default = f"start it as `policygrad engine {engine} --lora rank=N --print` shows"
    hint = next((hint for part, hint in hints if part.lower() in str(reply).lower()), default)
    return EngineError(
        f"{url} does not load the adapter: {reply}. {hint}; or send all weights: --sampler.lora-sync {MERGED}"
    )


@contextmanager
def reading_reply(url: str, server: str) -> Iterator[None]:
    """Raise EngineError where what is read of a server's reply is not there, or is something else.

    Args:
        server: Whose replies are expected.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineError(
            f"{url} does not answer as {server} does ({type(error).__name__} {error}): is it one?"
        ) from error


def concat_generations(chunks: Sequence[Generation]) -> Generation:
    """Join consecutive chunks of a completion."""
    if len(chunks) == 1:
        return chunks[0]
    versions = [chunk.version for chunk in chunks]
    experts = [chunk.routed_experts for chunk in chunks if chunk.routed_experts is not None]
    masks = [chunk.sampling_mask for chunk in chunks if chunk.sampling_mask is not None]
    joined, length = None, 0
    for part in experts:  # a chunk's last token is read by the next one, as the end of its prompt
        joined = part if joined is None else torch.cat([joined[:-1], part[length - 1 :]])
        length = len(part)
    same = versions[0] if all(isinstance(v, int) and v == versions[0] for v in versions) else None
    return Generation(
        torch.cat([chunk.tokens for chunk in chunks]),
        torch.cat([chunk.logp for chunk in chunks]),
        chunks[-1].finish_reason,
        torch.cat([torch.as_tensor(c.version).expand(len(c.tokens)) for c in chunks]) if same is None else same,
        joined,
        SamplingMask.concat(masks) if masks else None,
    )
