"""llama.cpp: completions by its native server's `/completion`, ids in and out, in float32.

Source: ggml-org/llama.cpp, tools/server/README.md (`prompt` as ids, `return_tokens`, `n_probs` with `post_sampling_probs`,
`samplers`, `seed`, `cache_prompt`; `/props`). Its server loads weights only when it starts, so it is run by `llama_server.py`,
here or on other machines, which follows the folder of versions.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError, EngineError
from policygrad.samplers.base import Request
from policygrad.samplers.engines import llama_server
from policygrad.samplers.engines.base import EngineCompletion, EngineSampler, LaunchOptions, reading_reply
from policygrad.samplers.engines.http import ServerUnavailableError
from policygrad.samplers.engines.server_process import LaunchCommand
from policygrad.utils.child_environment import DEVICE_VARIABLES
from policygrad.weight_sync.folder import WeightVersion, WeightWriter
from policygrad.weight_sync.gguf import make_gguf_writer

_PROPS_TIMEOUT = 5.0  # seconds in which a server must answer /props while it loads


class LlamaCppSampler(EngineSampler):
    """Samples from a llama.cpp server that it starts on this machine, or from those of `sampler.urls`."""

    name = "llama.cpp"
    launch_hint = "`policygrad engine llama_cpp --print` shows how its server is started"
    detection_routes = (("/props", "default_generation_settings"),)
    package = "xllamacpp"
    asks_for_key = True
    variables = (
        *DEVICE_VARIABLES,
        "GGML_*",
        "LLAMA_*",
        "XLLAMACPP_*",
        "VK_*",
        "MTL_*",
        llama_server.KEY_VARIABLE,
    )  # it downloads nothing

    @classmethod
    def launch_command(cls, options: LaunchOptions) -> LaunchCommand:
        if options.folder is None:
            raise ConfigError(
                "a llama.cpp server follows a folder of weights. Name it with --folder DIR, and in the run with --sampler.folder "
                "DIR"
            )
        names = ("host", "port", "max_concurrency", "context_length", "threads")
        argv = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
        folder = Path(options.folder).expanduser().resolve()
        return {}, ["python", "-P", llama_server.__file__, "watch", f"--folder={folder}", *argv]

    def weight_writer(self) -> WeightWriter:
        return make_gguf_writer(self.model, self.tokenizer.end_ids)

    def find_served_model(self) -> str:
        return ""  # it follows the folder of versions

    async def load_weights(self, url: str, version: WeightVersion) -> None:
        props = await self.http.get(f"{url}/props", timeout=_PROPS_TIMEOUT)
        name = props.get("model_alias") if isinstance(props, dict) else None
        if name != version.name:
            hint = f". Let it follow {self.versions.root}, or name its folder: --sampler.folder DIR"
            raise ServerUnavailableError(f"it still serves {name}{'' if url in self.processes else hint}")

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
        with reading_reply(url, "the server of llama.cpp"):
            tokens = [int(token) for token in reply["tokens"]]
            entries = reply.get("completion_probabilities", [])
            if [entry["id"] for entry in entries] != tokens[: len(entries)]:
                raise EngineError(f"{url} returns probabilities of other tokens than it sampled")
            logp = [math.log(entry["prob"]) if entry["prob"] > 0 else -math.inf for entry in entries]
            return EngineCompletion(tokens, logp, reply.get("model"))
