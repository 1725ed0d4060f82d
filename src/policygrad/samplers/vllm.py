"""vLLM: its OpenAI-compatible `/v1/completions`, ids in and out, and the endpoints of its development mode for weights.

Source: vllm-project/vllm 0.32, vllm/entrypoints/openai/completion/protocol.py (`prompt` as ids, `logprobs`, `return_token_ids`,
`seed`) and vllm/entrypoints/rl/online/api_router.py (`/pause`, `/resume`, `/weight_info`, `/update_weight_version`); tried with a
server of that version (docs/engines.md). Adapters alone: `vllm_adapters`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policygrad.errors import EngineError
from policygrad.samplers.base import Request
from policygrad.samplers.concurrency import Gauges
from policygrad.samplers.drawn import Drawn
from policygrad.samplers.http import AwayError
from policygrad.samplers.sending import SendingSampler
from policygrad.samplers.transfer import Transfer
from policygrad.samplers.vllm_adapters import drop, take
from policygrad.samplers.vllm_transfer import VllmTransfer
from policygrad.weight_sync.folder import Publication, Write
from policygrad.weight_sync.safetensors_folder import safetensors_writer

if TYPE_CHECKING:
    from policygrad.weight_sync.nccl import Opens

_ASKS = 10.0
"""Seconds for a question that needs no computation."""
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
"""Of a model's configuration, by which a message tells two models apart."""


class Vllm(SendingSampler):
    """Servers of `vllm serve`."""

    name = "vLLM"
    way_out = (
        "Start it with --logprobs-mode processed_logprobs --generation-config vllm, in the learner's precision, as "
        "`policygrad engine vllm --print` says"
    )

    gauges = Gauges("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    head_too = True  # as in `writer`
    takes_adapters = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.names: dict[str, str] = {}  # of the model, or of its adapter of now, by address
        self.roots: dict[str, str] = {}  # what each server was started with
        self.taking: set[str] = set()  # servers that have taken over weights

    def writer(self) -> Write:
        # a reload of tied embeddings leaves the head as it was (vLLM 0.32): it is given twice
        return safetensors_writer(self.model, self.tokenizer.hf, head_too=True)

    async def greet(self, url: str) -> None:
        listed = await self.http.get(f"{url}/v1/models", timeout=_ASKS)
        try:
            self.names[url] = str(listed["data"][0]["id"])
        except (KeyError, TypeError, IndexError) as error:
            raise EngineError(f"{url}/v1/models lists no model: is it a server of vLLM?") from error
        self.roots[url] = str(listed["data"][0].get("root") or self.names[url])

    async def load(self, url: str, publication: Publication) -> None:
        if self.adapter:
            await take(self.http, url, publication, self.config.patience, again=url in self.refused)
            self.names[url] = publication.name
            return
        told = await self._control(url, "GET", "/weight_info")
        known = told.get("weight_version") if isinstance(told, dict) else None
        if known == publication.name and url not in self.refused:
            return
        await self._control(url, "POST", "/pause?mode=keep")
        try:
            if self.transfer is not None:
                await self.transfer.send(self.http, url, publication, known)
            else:
                await self._reload(url, publication)
            await self._control(url, "POST", "/reset_prefix_cache")
        finally:
            await self._control(url, "POST", "/resume")
        await self._control(url, "POST", "/update_weight_version", {"new_version": publication.name})

    async def _reload(self, url: str, publication: Publication) -> None:
        """Have a server read the weights of a folder.

        Raises:
            EngineError: it fails at the first ones that it is given, which are another model's than its own.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(publication.path)}}
        try:
            await self._control(url, "POST", "/collective_rpc", body, self.config.patience)
        except AwayError as error:
            if url in self.taking or not str(error).startswith("500"):
                raise
            served, config = self.roots[url], getattr(self.model, "config", None)
            ours = getattr(config, "name_or_path", "") or type(self.model).__name__
            raise EngineError(
                f"{url} serves the model {served}{_shape(_read_config(served))} and fails at the weights of the run's model "
                f"{ours}{_shape(config.to_dict() if config is not None else {})}, which have to be of the same shape: {error}. "
                f"Start it with the run's model. {self.way_out}"
            ) from error
        self.taking.add(url)

    def transfers(self) -> Callable[..., Transfer]:
        return VllmTransfer

    def over_nccl(self) -> Opens:
        from policygrad.weight_sync.nccl import by_id

        return by_id(next(self.model.parameters()).device, self.config.urls)

    async def close(self) -> None:
        if self.adapter and self.published is not None:
            for url in self.names:
                await drop(self.http, url, self.published.name)
        await super().close()

    async def _control(
        self, url: str, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = _ASKS
    ) -> Any:
        try:
            if method == "GET":
                return await self.http.get(url + path, timeout)
            return await self.http.post(url + path, body, timeout)
        except EngineError as error:
            raise EngineError(
                f"vLLM takes over weights in its development mode only: start it with VLLM_SERVER_DEV_MODE=1 in its environment "
                f"({error})"
            ) from error

    async def draw(self, url: str, request: Request, seed: int) -> Drawn:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.names[url],
            "prompt": request.tokens.tolist(),
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": seed,
            "n": 1,
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
            "ignore_eos": False,
            "stop_token_ids": sorted(self.tokenizer.end),
            "stream": False,
        }
        answer = await self.http.post(f"{url}/v1/completions", body)
        try:
            choice = answer["choices"][0]
            tokens, logp = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if tokens is None:
                raise EngineError(f"{url} gives no token ids: vLLM 0.11 or later does (return_token_ids)")
            return Drawn(tokens, logp, str(answer["model"]) if self.adapter else None)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise EngineError(
                f"{url} does not answer as vLLM does ({type(error).__name__} {error}): is it one?"
            ) from error


def _shape(config: Mapping[str, Any]) -> str:
    """` (num_hidden_layers 2, hidden_size 64)`; empty where a configuration does not say."""
    sizes = [f"{name} {config[name]}" for name in _SIZES if name in config]
    return f" ({', '.join(sizes)})" if sizes else ""


def _read_config(folder: str) -> dict[str, Any]:
    """A model's configuration; empty where the name is no folder of this machine."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
