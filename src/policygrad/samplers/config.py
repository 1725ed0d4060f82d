"""Where completions are drawn: this process, or servers. Data only, for the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import tyro

from policygrad.errors import ConfigError

LOCAL = "local"
ENGINES = {  # the class of each, as module:name; a sampler is one file
    "llama_cpp": "policygrad.samplers.engines.llama_cpp:LlamaCppSampler",
    "vllm": "policygrad.samplers.engines.vllm:Vllm",
    "sglang": "policygrad.samplers.engines.sglang:Sglang",
}

DEFAULT_CONTEXT_LENGTH = 4096
"""Tokens of a request at a server that is started here, unless more is asked for: memory for them is taken `parallel` times."""
STARTED_BY_HAND = ("vllm", "sglang")
"""Engines of which no server is started here."""
BY_FOLDER, NCCL = "folder", "nccl"
AUTO, WHOLE, ADAPTER = "auto", "whole", "adapter"
TAKE_ADAPTERS = ("vllm", "sglang")
"""Engines whose servers take adapters by name."""


@dataclass(frozen=True)
class SamplerConfig:
    """What draws completions."""

    engine: str = LOCAL
    """local = this process, with the learner's own weights; llama_cpp, vllm, sglang = servers of that engine (docs/engines.md)."""
    urls: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="URL", help_behavior_hint="(default: one is started here)")
    ] = ()
    """Servers, http://host:port each; the one with the fewest requests is asked next. None: llama_cpp starts one of its own."""
    folder: Annotated[
        str | None,
        tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: weights in the run's folder, or a temporary one)"),
    ] = None
    """Where weights are published, under a path that the servers know by the same name."""
    weight_transport: str = BY_FOLDER
    """How weights get to servers: by a folder, or from GPU to GPU: nccl (vllm, sglang, each on GPUs of its own)."""
    lora_sync: str = AUTO
    """adapter = servers are sent a run's LoRA adapter alone (vllm, sglang); whole = all weights, adapters in them.
    auto = the adapter where that can be, else all weights."""
    max_concurrency: int = 16
    """Requests that a server is given at a time; 0 = as many as its queue and its cache bear (vllm, sglang)."""
    chunk_tokens: int = 0
    """Tokens of an answer that are asked for at a time: what is drawn stays where a server is lost or weights change; 0 = all."""
    context_length: int = 0
    """Tokens of a prompt and its completion, for a server that is started here.
    0 = twice sampling.max_tokens and at least 4096, as far as the model reads."""
    threads: int = 0
    """Threads of a server that is started here; 0 = one for a small model, else as many as there are cores."""
    timeout: float = 600.0
    """Seconds that one answer may take."""
    heartbeat: float = 30.0
    """Seconds in which a server that owes an answer has to answer /health, asked as often; 0 = it is not asked."""
    recovery_timeout: float = 120.0
    """Seconds that a server may be away, or take over weights, before it is given up."""
    logprob_tolerance: float = 0.0
    """Nats by which a server's log-probabilities may differ from the learner's; 0 = 1e-4 in fp32, 0.2 in bf16."""

    def __post_init__(self) -> None:
        if self.engine != LOCAL and self.engine not in ENGINES:
            raise ConfigError(f"sampler.engine must be one of {', '.join((LOCAL, *ENGINES))}, not {self.engine!r}")
        if self.engine == LOCAL and self.urls:
            raise ConfigError(
                f"sampler.urls are servers, and sampler.engine is local: name theirs, --sampler.engine {'|'.join(ENGINES)}"
            )
        if self.engine == LOCAL and self.chunk_tokens:
            raise ConfigError(
                f"sampler.chunk_tokens is of an engine's servers, and sampler.engine is local: --sampler.engine {'|'.join(ENGINES)}"
            )
        if self.lora_sync not in (AUTO, WHOLE, ADAPTER):
            raise ConfigError(f"sampler.lora_sync must be {AUTO}, {WHOLE} or {ADAPTER}, not {self.lora_sync!r}")
        if self.lora_sync != AUTO and self.engine == LOCAL:
            raise ConfigError(
                f"sampler.lora_sync is of an engine's servers, and sampler.engine is local: --sampler.engine {'|'.join(ENGINES)}"
            )
        if self.lora_sync == ADAPTER and self.engine not in TAKE_ADAPTERS:
            raise ConfigError(
                f"sampler.lora_sync {ADAPTER} is for {' and '.join(TAKE_ADAPTERS)}, and {self.engine} takes whole models: "
                f"--sampler.lora-sync {WHOLE}"
            )
        if self.engine in STARTED_BY_HAND and not self.urls:
            raise ConfigError(
                f"sampler.engine {self.engine} needs servers: start one as `policygrad engine {self.engine} --print` says, "
                "and name it, --sampler.urls http://127.0.0.1:8000"
            )
        self._check_transfer()
        if odd := [url for url in self.urls if not url.startswith(("http://", "https://"))]:
            raise ConfigError(f"sampler.urls are addresses such as http://127.0.0.1:8080, not {odd[0]!r}")
        if len(set(self.urls)) != len(self.urls):
            raise ConfigError(
                "sampler.urls names a server twice: name each once, --sampler.max-concurrency gives it more requests"
            )
        if min(self.max_concurrency, self.chunk_tokens, self.context_length, self.threads) < 0:
            raise ConfigError(
                "sampler.max_concurrency, sampler.chunk_tokens, sampler.context_length and sampler.threads must be at least 0"
            )
        if self.max_concurrency == 0 and self.engine not in STARTED_BY_HAND:
            raise ConfigError(
                f"sampler.max_concurrency 0 goes by what {' and '.join(STARTED_BY_HAND)} say of themselves: give {self.engine} a number"
            )
        above, least = (self.timeout, self.recovery_timeout), (self.logprob_tolerance, self.heartbeat)
        if not (all(0 < x < math.inf for x in above) and all(0 <= x < math.inf for x in least)):
            raise ConfigError(
                "sampler.timeout and sampler.recovery_timeout must be above 0, sampler.logprob_tolerance and sampler.heartbeat at least 0, "
                "and all finite"
            )

    def _check_transfer(self) -> None:
        if self.weight_transport not in (BY_FOLDER, NCCL):
            raise ConfigError(f"sampler.weight_transport must be {BY_FOLDER} or {NCCL}, not {self.weight_transport!r}")
        if self.weight_transport == NCCL and self.engine not in STARTED_BY_HAND:
            raise ConfigError(
                f"sampler.weight_transport {NCCL} is for servers of {' and '.join(STARTED_BY_HAND)}, and sampler.engine is {self.engine}: "
                f"take one of these, or --sampler.weight-transport {BY_FOLDER}"
            )

    def resolve_context_length(self, max_positions: int | None, max_tokens: int = 0) -> int:
        """Tokens of a request at a server that is started here. reads: positions of the model, None where it does not say."""
        needed = max(DEFAULT_CONTEXT_LENGTH, 2 * max_tokens)
        return self.context_length or min(needed, needed if max_positions is None else max_positions)
