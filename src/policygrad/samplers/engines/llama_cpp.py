"""llama.cpp: its native server's `/completion`, ids in and out, in float32.

Source: ggml-org/llama.cpp, tools/server/README.md (`prompt` as ids, `return_tokens`, `n_probs` with `post_sampling_probs`,
`samplers`, `seed`, `cache_prompt`; `/props`). It loads weights when it starts, so that its servers are started by
`llama_server.py`, here or on other machines, and follow the folder of versions.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from policygrad.errors import EngineError, install_command
from policygrad.samplers.base import Request
from policygrad.samplers.engines import llama_server
from policygrad.samplers.engines.base import EngineCompletion, EngineSampler
from policygrad.samplers.engines.http import ServerUnavailableError
from policygrad.weight_sync.folder import SERVER_LOG, WeightVersion, WeightWriter
from policygrad.weight_sync.gguf import make_gguf_writer

# A llama.cpp server of our own on this machine, which ends with us and is started again where it dies.


class LlamaServerProcess:
    """`llama_server.py watch` in a process of its own, at a port that was free."""

    def __init__(self, folder: Path, *, max_concurrency: int, context_length: int, threads: int) -> None:
        """Raises EngineError where the package xllamacpp is missing."""
        if find_spec("xllamacpp") is None:
            raise EngineError(
                "without --sampler.urls a llama.cpp server is started here, which the package xllamacpp brings along: "
                f"{install_command('llama-cpp')}"
            )
        self.folder, self.port = folder, _free_port()
        numbers = {
            "port": self.port,
            "parallel": max_concurrency,
            "context": context_length,
            "threads": threads,
            "parent": os.getpid(),
        }
        self.argv = [f"--{key}={value}" for key, value in numbers.items()]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ensure_running(self) -> None:
        """Starts it, unless it runs."""
        if self.process is not None and self.process.poll() is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / SERVER_LOG).open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    llama_server.__file__,
                    "watch",
                    f"--folder={self.folder.resolve()}",
                    *self.argv,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the run, which goes on to its next checkpoint
            )

    def last_log_line(self) -> str:
        """Its last words; empty when it has said nothing."""
        try:
            lines = (self.folder / SERVER_LOG).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def stop(self) -> None:
        """With the server that it watches, which sees it go."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        self.process = None


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


SMALL_MODEL_PARAMETERS = 5_000_000
"""Parameters; below, one thread is faster than several that wait for each other."""
_LOADING = 5.0
"""Seconds in which a server says who it is."""


class LlamaCppSampler(EngineSampler):
    """A llama.cpp server of our own on this machine, or those of `sampler.urls`."""

    name = "llama.cpp"
    launch_hint = "Let `policygrad engine llama_cpp --print` say how its server is started"
    process: LlamaServerProcess | None = None

    def weight_writer(self) -> WeightWriter:
        return make_gguf_writer(self.model, self.tokenizer.end_ids)

    def start_servers(self) -> Sequence[str]:
        if self.config.urls:
            return self.config.urls
        small = sum(p.numel() for p in self.model.parameters()) < SMALL_MODEL_PARAMETERS
        self.process = LlamaServerProcess(
            self.versions.root,
            max_concurrency=self.config.max_concurrency,
            context_length=self.config.resolve_context_length(self.tokenizer.context_length),
            threads=self.config.threads or (1 if small else os.cpu_count() or 1),
        )
        return [self.process.url]

    async def stop_servers(self) -> None:
        if self.process is not None:
            self.process.stop()

    async def load_weights(self, url: str, publication: WeightVersion) -> None:
        if self.process is not None:
            self.process.ensure_running()
        try:
            said = await self.http.get(f"{url}/props", timeout=_LOADING)
        except ServerUnavailableError as error:
            said = "" if self.process is None else self.process.last_log_line()
            raise ServerUnavailableError(f"{error}; it says: {said}" if said else str(error)) from error
        name = said.get("model_alias") if isinstance(said, dict) else None
        if name != publication.name:
            follows = (
                ""
                if self.process
                else f": let it follow {self.versions.root}, or name its folder, --sampler.folder DIR"
            )
            raise ServerUnavailableError(f"it still serves {name}{follows}")

    async def complete(self, url: str, request: Request, seed: int) -> EngineCompletion:
        sampling = request.sampling
        body: dict[str, Any] = {
            "prompt": request.prompt_ids.tolist(),
            "n_predict": request.max_tokens,
            "temperature": sampling.temperature,
            "samplers": ["temperature"],
            "seed": seed,
            "n_probs": 1,
            "post_sampling_probs": True,
            "return_tokens": True,
            "cache_prompt": self.config.chunk_tokens > 0,  # its tokens so far have just been read
            "stream": False,
        }
        if sampling.is_truncated:
            body |= {"samplers": ["temperature", "top_k", "top_p"], "top_k": sampling.top_k, "top_p": sampling.top_p}
            body |= {"min_keep": 1}
        answer = await self.http.post(f"{url}/completion", body)
        try:
            tokens = [int(token) for token in answer["tokens"]]
            entries = answer.get("completion_probabilities", [])
            if [entry["id"] for entry in entries] != tokens[: len(entries)]:
                raise EngineError(f"{url} gives probabilities of other tokens than it has drawn")
            logp = [math.log(entry["prob"]) if entry["prob"] > 0 else -math.inf for entry in entries]
            return EngineCompletion(tokens, logp, answer.get("model"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"{url} does not answer as the server of llama.cpp does ({type(error).__name__} {error}): is it one?"
            ) from error
