"""llama.cpp: completions by its native server's `/completion`, ids in and out, in float32.

Source: ggml-org/llama.cpp, tools/server/README.md (`prompt` as ids, `return_tokens`, `n_probs` with `post_sampling_probs`,
`samplers`, `seed`, `cache_prompt`; `/props`). Its server loads weights only when it starts, so it is run by `llama_server.py`,
here or on other machines, which follows the folder of versions.
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

from policygrad.errors import ConfigError, EngineError, install_command
from policygrad.samplers.base import Request
from policygrad.samplers.engines import llama_server
from policygrad.samplers.engines.base import EngineCompletion, EngineSampler, LaunchCommand, LaunchOptions
from policygrad.samplers.engines.http import ServerUnavailableError
from policygrad.weight_sync.folder import SERVER_LOG, WeightVersion, WeightWriter
from policygrad.weight_sync.gguf import make_gguf_writer

SMALL_MODEL_PARAMETERS = 5_000_000  # below this, one thread is faster than several that wait for each other
_PROPS_TIMEOUT = 5.0  # seconds in which a server must answer /props while it loads


class LlamaCppSampler(EngineSampler):
    """Samples from a llama.cpp server that it starts on this machine, or from those of `sampler.urls`."""

    name = "llama.cpp"
    launch_hint = "`policygrad engine llama_cpp --print` shows how its server is started"
    detection_routes = (("/props", "default_generation_settings"),)
    starts_server = True
    process: LlamaServerProcess | None = None

    @classmethod
    def launch_command(cls, options: LaunchOptions) -> LaunchCommand:
        if options.folder is None:
            raise ConfigError(
                "a llama.cpp server follows a folder of weights. Name it with --folder DIR, and in the run with --sampler.folder "
                "DIR"
            )
        return {}, _watch_command(
            Path(options.folder).expanduser(),
            host=options.host,
            port=options.port,
            max_concurrency=options.max_concurrency,
            context_length=options.context_length,
            threads=options.threads,
        )

    def weight_writer(self) -> WeightWriter:
        return make_gguf_writer(self.model, self.tokenizer.end_ids)

    def start_servers(self) -> Sequence[str]:
        if self.config.urls:
            return self.config.urls
        is_small = sum(p.numel() for p in self.model.parameters()) < SMALL_MODEL_PARAMETERS
        self.process = LlamaServerProcess(
            self.versions.root,
            max_concurrency=self.config.max_concurrency,
            context_length=self.config.resolve_context_length(self.tokenizer.context_length),
            threads=self.config.threads or (1 if is_small else os.cpu_count() or 1),
        )
        return [self.process.url]

    async def stop_servers(self) -> None:
        if self.process is not None:
            self.process.stop()

    async def load_weights(self, url: str, version: WeightVersion) -> None:
        if self.process is not None:
            self.process.ensure_running()
        try:
            props = await self.http.get(f"{url}/props", timeout=_PROPS_TIMEOUT)
        except ServerUnavailableError as error:
            line = "" if self.process is None else self.process.last_log_line()
            raise ServerUnavailableError(f"{error}; its log ends with: {line}" if line else str(error)) from error
        name = props.get("model_alias") if isinstance(props, dict) else None
        if name != version.name:
            hint = f". Let it follow {self.versions.root}, or name its folder: --sampler.folder DIR"
            raise ServerUnavailableError(f"it still serves {name}{'' if self.process else hint}")

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
            "cache_prompt": self.config.chunk_tokens > 0,  # the tokens so far were just read
            "stream": False,
        }
        if sampling.is_truncated:
            body |= {"samplers": ["temperature", "top_k", "top_p"], "top_k": sampling.top_k, "top_p": sampling.top_p}
            body["min_keep"] = 1
        reply = await self.http.post(f"{url}/completion", body)
        try:
            tokens = [int(token) for token in reply["tokens"]]
            entries = reply.get("completion_probabilities", [])
            if [entry["id"] for entry in entries] != tokens[: len(entries)]:
                raise EngineError(f"{url} returns probabilities of other tokens than it sampled")
            logp = [math.log(entry["prob"]) if entry["prob"] > 0 else -math.inf for entry in entries]
            return EngineCompletion(tokens, logp, reply.get("model"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"{url} does not answer as the server of llama.cpp does ({type(error).__name__} {error}): is it one?"
            ) from error


class LlamaServerProcess:
    """`llama_server.py watch` in a process that ends with this one, at a free port of this machine."""

    def __init__(self, folder: Path, **options: int) -> None:
        """Raises EngineError if the package xllamacpp is not installed. `options`: of `llama_server.py`."""
        if find_spec("xllamacpp") is None:
            raise EngineError(
                "without --sampler.urls a llama.cpp server is started here, which needs the package xllamacpp: "
                f"{install_command('llama-cpp')}"
            )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.folder, self.url = folder, f"http://127.0.0.1:{self.port}"
        self.argv = _watch_command(folder, port=self.port, parent=os.getpid(), **options)
        self.process: subprocess.Popen[bytes] | None = None

    def ensure_running(self) -> None:
        """Start it, unless it is running."""
        if self.process is not None and self.process.poll() is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / SERVER_LOG).open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the run, which continues to its next checkpoint
            )

    def last_log_line(self) -> str:
        """Return the last line of its log that is not blank, or an empty string."""
        try:
            text = (self.folder / SERVER_LOG).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return text.strip().rpartition("\n")[2].strip()

    def stop(self) -> None:
        """Terminate it; the server that it watches exits when it is gone."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        self.process = None


def _watch_command(folder: Path, **options: str | int) -> list[str]:
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [sys.executable, "-P", llama_server.__file__, "watch", f"--folder={folder.resolve()}", *argv]
