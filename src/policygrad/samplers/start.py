"""What each engine's server is started with, so that it draws from the policy and takes over weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from policygrad.samplers import llama_server


@dataclass(frozen=True)
class Start:
    """What all engines are told."""

    model: str
    """A folder, or a hub id."""
    folder: str
    """Of versions, which llama.cpp's follows."""
    host: str
    port: int
    dtype: str
    """float32 or bfloat16."""
    context: int
    """Tokens of a prompt and its completion."""
    parallel: int
    threads: int
    nccl: bool = False
    """Whether vLLM's is sent its weights over NCCL."""


Words = tuple[dict[str, str], list[str]]
"""(environment, words)."""


def llama_cpp(start: Start) -> Words:
    """A server of `xllamacpp` that follows a folder: see `llama_server`."""
    names = ("folder", "host", "port", "parallel", "context", "threads")
    options = [word for name in names for word in (f"--{name}", str(getattr(start, name)))]
    return {}, [sys.executable, "-P", llama_server.__file__, "watch", *options]


def vllm(start: Start) -> Words:
    """Development mode takes over weights; log-probabilities after the temperature; no defaults of the model's own."""
    options: dict[str, object] = {
        "--served-model-name": "policy",
        "--dtype": start.dtype,
        "--max-model-len": start.context,
        "--max-num-seqs": start.parallel,
        "--host": start.host,
        "--port": start.port,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
    }
    if start.nccl:
        options["--weight-transfer-config"] = '{"backend":"nccl"}'
    return {"VLLM_SERVER_DEV_MODE": "1"}, ["vllm", "serve", start.model, *_words(options)]


def sglang(start: Start) -> Words:
    """Log-probabilities after the temperature unless the environment asks for others; no defaults of the model's own. Weights over
    NCCL need no words."""
    options = {
        "--model-path": start.model,
        "--dtype": start.dtype,
        "--context-length": start.context,
        "--max-running-requests": start.parallel,
        "--host": start.host,
        "--port": start.port,
        "--sampling-defaults": "openai",
    }
    words = ["python", "-m", "sglang.launch_server", *_words(options), "--enable-metrics"]
    return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}, words


def _words(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (name, str(value))]


COMMANDS: dict[str, Callable[[Start], Words]] = {"llama_cpp": llama_cpp, "vllm": vllm, "sglang": sglang}
