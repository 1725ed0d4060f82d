"""vLLM: its OpenAI-compatible `/v1/completions`, ids in and out, and the endpoints of its development mode for weights.

Source: vllm-project/vllm 0.32, vllm/entrypoints/openai/completion/protocol.py (`prompt` as ids, `logprobs`, `return_token_ids`,
`seed`) and vllm/entrypoints/rl/online/api_router.py (`/pause`, `/resume`, `/weight_info`, `/update_weight_version`); tried with a
server of that version (docs/engines.md). Adapters alone: `vllm_adapters`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policygrad.errors import EngineError
from policygrad.samplers.base import Request
from policygrad.samplers.engines.base import EngineCompletion, lora_refused_error
from policygrad.samplers.engines.http import HttpClient, ServerUnavailableError
from policygrad.samplers.engines.nccl_transfer import CONTROL_TIMEOUT, NcclEngineSampler, WeightTransfer
from policygrad.samplers.engines.server_pool import PrometheusGauges
from policygrad.weight_sync.base import Bucket
from policygrad.weight_sync.folder import WeightVersion, WeightWriter, make_safetensors_writer

if TYPE_CHECKING:
    from policygrad.weight_sync.nccl import GroupFactory


# How a server of vLLM takes an adapter by name, and drops those before it: `/v1/load_lora_adapter`, `/v1/unload_lora_adapter`.
#
# Source: vllm-project/vllm 0.32, vllm/entrypoints/serve/lora (both routes, there with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
# only) and vllm/entrypoints/openai/models/serving.py (what they check and answer; `/v1/models` lists adapters with their
# folder, as `root`). A completion is asked of the adapter as `model`, and its answer names it there again. What is unloaded
# may stay in the engine's memory until another is loaded in its place (vllm-project/vllm, issue 54839): with --max-loras 1
# that is the next one.

_ASKS = 10.0
"""Seconds for a question that needs no computation."""
_REFUSED = "500 {"
"""How an answer begins that is a refusal with its reason: vLLM gives what its engine raises that status."""
_HINTS = (
    ('"Not Found"', "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"),
    ("not enabled", "Start it with --enable-lora"),
    ("max_lora_rank", "Start it with a --max-lora-rank that is not below the adapter's"),
    ("target modules", "Adapt layers that it knows, --learner.lora targets=…"),
    ("No adapter found", "Let it see the folder under the same path, --sampler.folder"),
)
"""(what is in its answer, the way out)."""


async def load_adapter(
    http: HttpClient, url: str, publication: WeightVersion, timeout: float, *, force_reload: bool
) -> None:
    """Returns when the server answers to the publication's name, and to none of the same folder's before it. patience: seconds for
    loading. again: load it also where the server has it.

    Raises:
        ServerUnavailableError: it does not answer, or not now.
        EngineError: it takes no adapters, or not this one; which option is missing.
    """
    names = await _loaded(http, url, publication.path.parent)
    has = publication.name in names and not force_reload
    for name in names:
        if not (has and name == publication.name):
            await unload_adapter(http, url, name)
    if has:
        return
    body = {"lora_name": publication.name, "lora_path": str(publication.path)}
    try:
        await http.post(f"{url}/v1/load_lora_adapter", body, timeout)
    except EngineError as error:
        raise lora_refused_error(url, error, _HINTS, "vllm") from error
    except ServerUnavailableError as error:
        if not str(error).startswith(_REFUSED):
            raise
        raise lora_refused_error(url, error, _HINTS, "vllm") from error


async def unload_adapter(http: HttpClient, url: str, name: str) -> None:
    """Has the server forget an adapter. One that it has dropped already, for want of room, it does not find."""
    with suppress(ServerUnavailableError, EngineError):
        await http.post(f"{url}/v1/unload_lora_adapter", {"lora_name": name}, _ASKS)


async def _loaded(http: HttpClient, url: str, folder: Path) -> list[str]:
    """Names of the adapters that it has from this folder: another run's are let be."""
    listed = await http.get(f"{url}/v1/models", _ASKS)
    try:
        cards = [card for card in listed["data"] if card.get("parent")]
        return [str(card["id"]) for card in cards if Path(str(card.get("root"))).parent == folder]
    except (KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{url}/v1/models lists no models: is it a server of vLLM?") from error


# vLLM's words for weights that come over a group of processes.
#
# Source: vllm-project/vllm 0.32, vllm/entrypoints/rl/online/api_router.py and
# vllm/distributed/weight_transfer/nccl_engine.py. An update is begun, takes weights in any number of requests, each of which
# returns when its weights are there, and is finished. Nothing is packed: tensors are broadcast one by one, as they lie, and
# each is loaded as it comes.

_ASKED_FOR = '--weight-transfer-config \'{"backend":"nccl"}\', as `policygrad engine vllm --transfer nccl --print` says'


class VllmTransfer(WeightTransfer):
    """`/init_weight_transfer_engine`, `/start_weight_update`, `/update_weights`, `/finish_weight_update`."""

    async def get_world_size(self, http: HttpClient, url: str) -> int:
        told = await http.get(f"{url}/get_world_size", CONTROL_TIMEOUT)
        try:
            return int(told["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{url}/get_world_size says {told!r}: is it a server of vLLM 0.32?") from error

    async def init_group(self, http: HttpClient, url: str, invitation: Mapping[str, Any]) -> None:
        try:
            await http.post(f"{url}/init_weight_transfer_engine", {"init_info": dict(invitation)}, self._timeout)
        except (ServerUnavailableError, EngineError) as error:
            if isinstance(error, ServerUnavailableError) and not str(error).startswith("500"):
                raise
            raise EngineError(
                f"{url} joins no group over NCCL: start it with {_ASKED_FOR}, or publish by a folder, --sampler.weight-transport folder "
                f"({error})"
            ) from error

    async def start_update(self, http: HttpClient, url: str) -> None:
        await http.post(f"{url}/start_weight_update", None, CONTROL_TIMEOUT)

    async def receive_bucket(self, http: HttpClient, url: str, bucket: Bucket, group: str, version: str) -> None:
        told = {"names": list(bucket.names), "dtype_names": bucket.dtypes, "shapes": bucket.shapes}
        await http.post(f"{url}/update_weights", {"update_info": told}, self._timeout)

    async def finish_update(self, http: HttpClient, url: str, version: str) -> None:
        await http.post(f"{url}/finish_weight_update", {"weight_version": version}, self._timeout)

    async def recover(self, http: HttpClient, url: str) -> None:
        with suppress(ServerUnavailableError, EngineError):  # none was begun
            await http.post(f"{url}/finish_weight_update", None, CONTROL_TIMEOUT)
        with suppress(ServerUnavailableError, EngineError):  # there is no group, or it is a vLLM that cannot forget one
            await self.destroy_group(http, url, "")

    async def destroy_group(self, http: HttpClient, url: str, group: str) -> None:
        await http.post(f"{url}/shutdown_weight_transfer_engine", None, CONTROL_TIMEOUT)


_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
"""Of a model's configuration, by which a message tells two models apart."""


class VllmSampler(NcclEngineSampler):
    """Servers of `vllm serve`."""

    name = "vLLM"
    launch_hint = (
        "Start it with --logprobs-mode processed_logprobs --generation-config vllm, in the learner's precision, as "
        "`policygrad engine vllm --print` says"
    )

    gauges = PrometheusGauges("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    send_tied_head = True  # as in `writer`
    supports_lora = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.model_names: dict[str, str] = {}  # of the model, or of its adapter of now, by address
        self.served_models: dict[str, str] = {}  # what each server was started with
        self.reloaded_servers: set[str] = set()  # servers that have taken over weights

    def weight_writer(self) -> WeightWriter:
        # a reload of tied embeddings leaves the head as it was (vLLM 0.32): it is given twice
        return make_safetensors_writer(self.model, self.tokenizer.hf, write_tied_head=True)

    async def handshake(self, url: str) -> None:
        listed = await self.http.get(f"{url}/v1/models", timeout=_ASKS)
        try:
            self.model_names[url] = str(listed["data"][0]["id"])
        except (KeyError, TypeError, IndexError) as error:
            raise EngineError(f"{url}/v1/models lists no model: is it a server of vLLM?") from error
        self.served_models[url] = str(listed["data"][0].get("root") or self.model_names[url])

    async def load_weights(self, url: str, publication: WeightVersion) -> None:
        if self.adapter_only:
            await load_adapter(
                self.http, url, publication, self.config.recovery_timeout, force_reload=url in self.failed_probes
            )
            self.model_names[url] = publication.name
            return
        told = await self._control(url, "GET", "/weight_info")
        known = told.get("weight_version") if isinstance(told, dict) else None
        if known == publication.name and url not in self.failed_probes:
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

    async def _reload(self, url: str, publication: WeightVersion) -> None:
        """Have a server read the weights of a folder.

        Raises:
            EngineError: it fails at the first ones that it is given, which are another model's than its own.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(publication.path)}}
        try:
            await self._control(url, "POST", "/collective_rpc", body, self.config.recovery_timeout)
        except ServerUnavailableError as error:
            if url in self.reloaded_servers or not str(error).startswith("500"):
                raise
            served, config = self.served_models[url], getattr(self.model, "config", None)
            ours = getattr(config, "name_or_path", "") or type(self.model).__name__
            raise EngineError(
                f"{url} serves the model {served}{_shape(_read_config(served))} and fails at the weights of the run's model "
                f"{ours}{_shape(config.to_dict() if config is not None else {})}, which have to be of the same shape: {error}. "
                f"Start it with the run's model. {self.launch_hint}"
            ) from error
        self.reloaded_servers.add(url)

    def transfer_class(self) -> Callable[..., WeightTransfer]:
        return VllmTransfer

    def group_factory(self) -> GroupFactory:
        from policygrad.weight_sync.nccl import unique_id_groups

        return unique_id_groups(next(self.model.parameters()).device, self.config.urls)

    async def close(self) -> None:
        if self.adapter_only and self.published is not None:
            for url in self.model_names:
                await unload_adapter(self.http, url, self.published.name)
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

    async def complete(self, url: str, request: Request, seed: int) -> EngineCompletion:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.model_names[url],
            "prompt": request.prompt_ids.tolist(),
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
            "stop_token_ids": sorted(self.tokenizer.end_ids),
            "stream": False,
        }
        answer = await self.http.post(f"{url}/v1/completions", body)
        try:
            choice = answer["choices"][0]
            tokens, logp = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if tokens is None:
                raise EngineError(f"{url} gives no token ids: vLLM 0.11 or later does (return_token_ids)")
            return EngineCompletion(tokens, logp, str(answer["model"]) if self.adapter_only else None)
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
