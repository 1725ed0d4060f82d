"""Options of the sampler: this process, or servers of an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import tyro

from policygrad.errors import ConfigError
from policygrad.rewards.config import VARIABLE_NAMES
from policygrad.samplers.engines.registry import ENGINES, is_engine, list_engine_names, list_engines, load_engine_class
from policygrad.utils.child_environment import check_variable_names
from policygrad.utils.field_types import check_field_types, describe_idle, list_changed

if TYPE_CHECKING:  # the options are read without importing torch
    from policygrad.core.algorithm import Algorithm
    from policygrad.samplers.base import SamplingParams

LOCAL = "local"  # the engine name of the sampler in this process
FOLDER, NCCL = WEIGHT_TRANSPORTS = ("folder", "nccl")
AUTO, MERGED, ADAPTER = LORA_SYNCS = ("auto", "merged", "adapter")
OFF = "off"
KERNELS = (AUTO, OFF)
DEFAULT_CONTEXT_LENGTH = 4096
"""Tokens per request of a server that is started here. It reserves memory for `max_concurrency` requests of that length."""


@dataclass(frozen=True)
class SamplerConfig:
    """Options of the sampler."""

    engine: Annotated[str, tyro.conf.arg(metavar="|".join((LOCAL, *ENGINES)))] = LOCAL
    """local = sample in this process with the learner's weights; otherwise sample from servers of that engine (docs/engines.md)."""
    urls: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="URL", help_behavior_hint="(default: start them on this machine)")
    ] = ()
    """Servers, http://host:port each. Requests go to the least busy one."""
    servers: int = 1
    """Servers to start on this machine, each on a GPU of its own if there are enough; used without --sampler.urls."""
    gpus: Annotated[
        tuple[int, ...],
        tyro.conf.arg(metavar="N", help_behavior_hint="(default: those that the learner leaves, else its own)"),
    ] = ()
    """Numbers of the GPUs for servers that are started here, in turn."""
    gpu_memory: float = 0.0
    """Share of a GPU's memory for a server that is started here.
    0 = the engine's default; on the learner's GPU 0.4, or with --sampler.colocate what the learner's state leaves."""
    colocate: bool = False
    """Start servers on the learner's own GPUs. They sleep, and lend it their memory, while the learner learns."""
    python: Annotated[
        str | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="(default: the environment of policygrad)")
    ] = None
    """Virtual environment, or its Python, that has the engine to start (policygrad engine install ENGINE --into DIR)."""
    env: Annotated[tuple[str, ...], VARIABLE_NAMES] = ()
    """Environment variables that servers started here get besides the default ones (docs/isolation.md), such as a key."""
    folder: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="DIR", help_behavior_hint="(default: in the run's folder; for servers started here in /dev/shm)"
        ),
    ] = None
    """Folder for published weights; servers must see it under the same path."""
    weight_transport: Annotated[str, tyro.conf.arg(metavar="|".join(WEIGHT_TRANSPORTS))] = FOLDER
    """How weights reach servers. folder = through a shared folder; nccl = from GPU to GPU, if the engine supports it."""
    lora_sync: Annotated[str, tyro.conf.arg(metavar="|".join(LORA_SYNCS))] = AUTO
    """How LoRA weights reach servers. adapter = the adapter alone; merged = all weights, with the adapter merged.
    auto = the adapter if engine and adapter support it, else merged."""
    cuda_graphs: bool = True
    """Sampling in this process on a GPU: launch all kernels of a token as one CUDA graph, if the model allows it."""
    kernels: Annotated[str, tyro.conf.arg(metavar="|".join(KERNELS))] = OFF
    """Sampling in this process: Triton's kernels for attention and the draw of a token.
    auto = on a CUDA GPU, if Triton is installed (not measured on one yet); off = plain torch."""
    max_concurrency: int = 16
    """Maximum concurrent requests per server; 0 = adjust to the queue and cache use that the server reports."""
    chunk_tokens: int = 0
    """Request completions in chunks of this many tokens, so that finished chunks survive a lost server and a weight update.
    0 = no chunks."""
    context_length: int = 0
    """Maximum tokens of prompt and completion for a server that is started here.
    0 = the larger of 4096 and twice sampling.max_tokens, up to the model's limit."""
    threads: int = 0
    """CPU threads of a server that is started here; 0 = one for a small model, else one per core."""
    start_timeout: float = 600.0
    """Seconds that a server may take to start."""
    timeout: float = 600.0
    """Seconds per request."""
    heartbeat: float = 30.0
    """Check the health of a server with open requests every so many seconds, with the same timeout; 0 = never."""
    recovery_timeout: float = 120.0
    """Seconds that a server may be unavailable, or take to load weights, before it is given up."""
    logprob_tolerance: float = 0.0
    """Largest accepted difference in nats between log-probabilities of server and learner; 0 = 1e-4 in fp32, 0.2 in bf16."""

    def __post_init__(self) -> None:
        check_field_types(self, "sampler")
        if self.engine != LOCAL and not is_engine(self.engine):
            names = ", ".join((LOCAL, *list_engine_names()))
            raise ConfigError(f"sampler.engine must be one of {names}, not {self.engine!r}")
        for name, choices in {
            "lora_sync": LORA_SYNCS,
            "weight_transport": WEIGHT_TRANSPORTS,
            "kernels": KERNELS,
        }.items():
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"sampler.{name} must be {_join(choices, 'or')}, not {value!r}")
        check_variable_names(self.env, "sampler.env")
        self._check_numbers()
        self._check_urls()
        if self.engine == LOCAL:
            self._check_local()
        else:
            self._check_engine()

    def _check_numbers(self) -> None:
        if self.servers < 1:
            raise ConfigError(f"sampler.servers must be at least 1, not {self.servers}")
        if not 0 <= self.gpu_memory < 1:
            raise ConfigError(f"sampler.gpu_memory must be at least 0 and below 1, not {self.gpu_memory:g}")
        if min(self.gpus, default=0) < 0:
            raise ConfigError(f"sampler.gpus must be numbers of GPUs, from 0, not {min(self.gpus)}")
        if min(self.max_concurrency, self.chunk_tokens, self.context_length, self.threads) < 0:
            raise ConfigError(
                "sampler.max_concurrency, sampler.chunk_tokens, sampler.context_length and sampler.threads must be at least 0"
            )
        positive = (self.timeout, self.recovery_timeout, self.start_timeout)
        non_negative = (self.logprob_tolerance, self.heartbeat)
        if not (all(0 < x < math.inf for x in positive) and all(0 <= x < math.inf for x in non_negative)):
            raise ConfigError(
                "sampler.timeout, sampler.recovery_timeout and sampler.start_timeout must be above 0, sampler.logprob_tolerance "
                "and sampler.heartbeat at least 0, and all finite"
            )

    def _check_urls(self) -> None:
        """Refuse what is no address, and servers that are there already together with options for starting some."""
        if self.urls and (options := self._list_start_options()):
            raise ConfigError(
                f"sampler.{options[0]} is for servers that the run starts, and sampler.urls names some that run already: leave "
                "one of them out"
            )
        if invalid := [url for url in self.urls if not url.startswith(("http://", "https://"))]:
            raise ConfigError(f"sampler.urls must be addresses such as http://127.0.0.1:8080, not {invalid[0]!r}")
        if len(set(self.urls)) != len(self.urls):
            raise ConfigError(
                "sampler.urls names a server twice. Name it once; --sampler.max-concurrency gives it more requests"
            )

    def _list_start_options(self) -> list[str]:
        """Return the options for servers that are started here that have another value than the default."""
        is_set = {"servers": self.servers > 1, "python": self.python is not None, "gpus": bool(self.gpus)}
        is_set |= {"gpu_memory": self.gpu_memory > 0, "colocate": self.colocate, "env": bool(self.env)}
        return [name for name, value in is_set.items() if value]

    def _check_local(self) -> None:
        """Refuse options of servers."""
        is_set = {
            "urls": bool(self.urls),
            **dict.fromkeys(self._list_start_options(), True),
            "weight_transport": self.weight_transport != FOLDER,
            "lora_sync": self.lora_sync != AUTO,
            "max_concurrency": self.max_concurrency == 0,
            "chunk_tokens": self.chunk_tokens > 0,
        }
        for name in (name for name, value in is_set.items() if value):
            raise ConfigError(
                f"sampler.{name} is an option of servers, and sampler.engine is local. Choose --sampler.engine "
                f"{'|'.join(ENGINES)}, or leave it out."
            )

    def _check_engine(self) -> None:
        """Refuse what the engine does not support."""
        is_set = {"cuda_graphs": not self.cuda_graphs, "kernels": self.kernels != OFF}
        for own in (name for name, value in is_set.items() if value):
            raise ConfigError(
                f"sampler.{own} is for sampling in this process, and sampler.engine is {self.engine}: leave it out, or see "
                "the engine's own options"
            )
        name, engine = self.engine, load_engine_class(self.engine)
        if not self.urls and not engine.package:
            raise ConfigError(
                f"sampler.engine={name} has no servers, and policygrad does not start any of this engine. {engine.launch_hint}; "
                "then name it: --sampler.urls http://127.0.0.1:8000"
            )
        if self.colocate and not engine.can_sleep:
            supported = _join(list_engines(lambda e: e.can_sleep), "and")
            raise ConfigError(
                f"sampler.colocate is supported by {supported}, whose servers can sleep; {name} cannot. Leave it out: its server "
                "and the learner share the memory"
            )
        if self.lora_sync == ADAPTER and not engine.supports_lora:
            supported = _join(list_engines(lambda e: e.supports_lora), "and")
            raise ConfigError(
                f"sampler.lora_sync={ADAPTER} is supported by {supported}; {name} takes full models. Set --sampler.lora-sync "
                f"{MERGED}"
            )
        if self.weight_transport == NCCL and engine.transfer_class is None:
            supported = _join(list_engines(lambda e: e.transfer_class is not None), "and")
            raise ConfigError(
                f"sampler.weight_transport={NCCL} is supported by {supported}, not by {name}. Choose one of them, or set "
                f"--sampler.weight-transport {FOLDER}"
            )
        if self.max_concurrency == 0 and engine.gauges is None:
            supported = _join(list_engines(lambda e: e.gauges is not None), "and")
            raise ConfigError(
                f"sampler.max_concurrency=0 follows the load that {supported} report; {name} reports none. Give it a number."
            )

    @property
    def returns_routed_experts(self) -> bool:
        """True if the sampler reports which experts each token of a mixture used."""
        return self.engine == LOCAL or load_engine_class(self.engine).returns_routed_experts

    def check(self, max_staleness: int, sampling: SamplingParams) -> None:
        """Raise ConfigError for an engine that cannot sample like this."""
        if self.colocate and max_staleness:
            raise ConfigError(
                f"sampler.colocate lets servers sleep while the learner learns, and with max_staleness={max_staleness} they sample "
                "then: leave one of them out"
            )
        if sampling.is_truncated and self.engine != LOCAL and not load_engine_class(self.engine).returns_sampling_masks:
            raise ConfigError(
                f"training with top_p < 1 or top_k > 0 needs to know which tokens they left, which {self.engine} does not tell: "
                "use --sampler.engine local or vllm, or leave top_p = 1 and top_k = 0 (eval accepts both)"
            )

    def find_idle(self, sampling: SamplingParams) -> Iterator[str]:
        """Yield options that can have no effect with this engine, each with a remedy."""
        if self.engine == LOCAL:
            own = [f.name for f in fields(self) if f.name not in ("engine", "cuda_graphs", "kernels")]
            engines = "|".join(ENGINES)
            reason = (
                f"sampler.engine is local, and has no servers. Choose --sampler.engine {engines}, or leave this out"
            )
            yield from describe_idle(list_changed("sampler", self, own), reason)
            return
        reason = f"it is for sampling in this process, and sampler.engine is {self.engine}. Leave it out"
        yield from describe_idle(list_changed("", sampling, ["decode_rows"]), reason)
        if self.urls:
            reason = "it is for servers that the run starts, and sampler.urls names some that run already. Leave it out"
            yield from describe_idle(
                list_changed("sampler", self, ["context_length", "threads", "start_timeout"]), reason
            )

    def resolve_context_length(self, max_positions: int | None, max_tokens: int = 0) -> int:
        """Return the tokens per request of a server that is started here.

        Args:
            max_positions: The model's limit; None if it states none.
            max_tokens: Maximum sampled tokens per completion.
        """
        needed = max(DEFAULT_CONTEXT_LENGTH, 2 * max_tokens)
        return self.context_length or min(needed, needed if max_positions is None else max_positions)


TEACHER_KEY = "TEACHER_API_KEY"


@dataclass(frozen=True)
class TeacherServerConfig:
    """Options for teachers behind a server: `Reference.model` or `Reference.teachers` with addresses."""

    max_concurrency: int = 64
    """Maximum concurrent requests to each server; a request scores one completion."""
    timeout: float = 600.0
    """Seconds per request."""
    recovery_timeout: float = 600.0
    """Seconds that a server may be unavailable, or take to start, before the run ends, resumably."""
    api_key: str = TEACHER_KEY
    """Name of the environment variable that holds the servers' API key; none is sent where it is not set."""

    def __post_init__(self) -> None:
        check_field_types(self, "teacher_server")
        if self.max_concurrency < 1:
            raise ConfigError(f"teacher_server.max_concurrency must be at least 1, not {self.max_concurrency}")
        if not all(0 < seconds < math.inf for seconds in (self.timeout, self.recovery_timeout)):
            raise ConfigError(
                "teacher_server.timeout and teacher_server.recovery_timeout must be above 0 seconds and finite, not "
                f"{self.timeout:g} and {self.recovery_timeout:g}"
            )
        if not self.api_key.isidentifier():
            raise ConfigError(
                f"teacher_server.api_key is the *name* of an environment variable, such as {TEACHER_KEY}, not a key: set that "
                "variable to the key"
            )

    def check(self, algorithm: Algorithm, sampling: SamplingParams) -> None:
        """Raise ConfigError for options without such a teacher, and for samples that it cannot score."""
        servers = () if algorithm.reference is None else algorithm.reference.servers
        if not servers:
            if self != TeacherServerConfig():
                raise ConfigError(
                    "teacher_server.* are options for a teacher at http://HOST:PORT/v1, and this run has none: leave them out, or "
                    "set --teacher to the server's address"
                )
            return
        if sampling.temperature != 1:
            raise ConfigError(
                f"temperature={sampling.temperature:g}: the teacher at {servers[0]} tells log-probabilities at temperature 1, and "
                "they must be at the sampling temperature. Set --temperature 1, or let the run load the teacher from a folder"
            )
        if sampling.is_truncated:
            raise ConfigError(
                f"top_p and top_k: the teacher at {servers[0]} tells log-probabilities over its full vocabulary, and they must be "
                "over the tokens that top_p and top_k leave. Leave top_p = 1 and top_k = 0, or let the run load the teacher from a "
                "folder"
            )


def _join(names: Sequence[str], conjunction: str) -> str:
    return f" {conjunction} ".join(", ".join(names).rsplit(", ", 1))
