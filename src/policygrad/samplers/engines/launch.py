"""What each engine's server is started with, so that it draws from the policy and takes over weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from policygrad.errors import ConfigError
from policygrad.models.lora_config import DEFAULT_RANK, DEFAULT_TARGETS, Lora
from policygrad.samplers.engines import llama_server

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's --max-lora-rank may be (vllm/config/lora.py)."""


@dataclass(frozen=True)
class LaunchOptions:
    """What all engines are told."""

    model: str
    """A folder, or a hub id."""
    folder: str
    """Of versions, which llama.cpp's follows."""
    host: str
    port: int
    dtype: str
    """float32 or bfloat16."""
    context_length: int
    """Tokens of a prompt and its completion."""
    max_concurrency: int
    threads: int
    nccl: bool = False
    """Whether vLLM's is sent its weights over NCCL."""
    lora: Lora | None = None
    """The run's adapter, which is sent alone; None = whole weights are."""


Words = tuple[dict[str, str], list[str]]
"""(environment, words)."""


def llama_cpp(start: LaunchOptions) -> Words:
    """A server of `xllamacpp` that follows a folder: see `llama_server`."""
    names = ("folder", "host", "port", "parallel", "context", "threads")
    options = [word for name in names for word in (f"--{name}", str(getattr(start, name)))]
    return {}, [sys.executable, "-P", llama_server.__file__, "watch", *options]


def vllm(start: LaunchOptions) -> Words:
    """Development mode takes over weights, adapters are taken without it; log-probabilities after the temperature; no defaults of
    the model's own.

    Raises:
        ConfigError: a rank that it has no room for.
    """
    options: dict[str, object] = {
        "--served-model-name": "policy",
        "--dtype": start.dtype,
        "--max-model-len": start.context_length,
        "--max-num-seqs": start.max_concurrency,
        "--host": start.host,
        "--port": start.port,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
    }
    if start.nccl:
        options["--weight-transfer-config"] = '{"backend":"nccl"}'
    words = ["vllm", "serve", start.model, *_words(options)]
    if start.lora is None:
        return {"VLLM_SERVER_DEV_MODE": "1"}, words
    rank = start.lora.rank or DEFAULT_RANK
    if rank > RANKS[-1]:
        raise ConfigError(f"--lora rank={rank}: vLLM serves adapters up to rank {RANKS[-1]}: --sampler.lora-sync whole")
    room = {"--max-loras": 1, "--max-lora-rank": min(r for r in RANKS if r >= rank)}
    return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}, [*words, *_words(room), "--enable-lora"]


def sglang(start: LaunchOptions) -> Words:
    """Log-probabilities after the temperature unless the environment asks for others; no defaults of the model's own. Weights over
    NCCL need no words."""
    options: dict[str, object] = {
        "--model-path": start.model,
        "--dtype": start.dtype,
        "--context-length": start.context_length,
        "--max-running-requests": start.max_concurrency,
        "--host": start.host,
        "--port": start.port,
        "--sampling-defaults": "openai",
    }
    if start.lora is not None:
        options |= {"--max-loras-per-batch": 1, "--max-lora-rank": start.lora.rank or DEFAULT_RANK}
    words = ["python", "-m", "sglang.launch_server", *_words(options), "--enable-metrics"]
    if start.lora is not None:
        targets = start.lora.targets or DEFAULT_TARGETS
        words += [
            "--enable-lora",
            "--lora-target-modules",
            *("all" if targets == DEFAULT_TARGETS else targets).split("+"),
        ]
    return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}, words


def _words(options: Mapping[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (name, str(value))]


COMMANDS: dict[str, Callable[[LaunchOptions], Words]] = {"llama_cpp": llama_cpp, "vllm": vllm, "sglang": sglang}
