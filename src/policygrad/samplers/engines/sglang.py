"""SGLang: its native `/generate`, ids in and out, and `/update_weights_from_disk`.

Source: sgl-project/sglang 0.5, python/sglang/srt/managers/io_struct.py and docs of the native API. Checked against answers of that
form, not against a running server: it needs a GPU (docs/engines.md). Adapters alone: `sglang_adapters`.
"""

from __future__ import annotations

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


# How a server of SGLang takes an adapter by name, and drops those before it: `/load_lora_adapter`, `/unload_lora_adapter`.
#
# Source: sgl-project/sglang 0.5, python/sglang/srt/managers/{io_struct,tokenizer_control_mixin}.py (both answer `success`,
# `error_message` and `loaded_adapters`, with status 400 where it is no success; an adapter is taken out once nobody draws
# with it) and docs/advanced_features/lora.ipynb. A completion is asked of the adapter as `lora_path`, and its answer does not
# name it. Checked against answers of that form, not against a running server.

_ASKS = 10.0
"""Seconds for a question that needs no computation."""
_HINTS = (
    ("answers 404", "Take a server that loads adapters while it runs, SGLang 0.5 or later"),
    ("not enabled", "Start it with --enable-lora"),
    ("incompatible", "Start it with --max-lora-rank and --lora-target-modules for this adapter"),
    ("No such file", "Let it see the folder under the same path, --sampler.folder"),
)
"""(what is in its answer, the way out)."""


async def load_adapter(http: HttpClient, url: str, publication: WeightVersion, timeout: float, previous: str) -> None:
    """Returns when the server answers to the publication's name, and to none of the same folder's before it. patience: seconds for
    loading. before: the name that it was given last, "" = none that is known.

    Raises:
        ServerUnavailableError: it does not answer, or not now.
        EngineError: it takes no adapters, or not this one; which option is missing.
    """
    for name in {previous, publication.name} - {""}:  # it may have the one of now, and be made ready again
        await unload_adapter(http, url, name)
    body = {"lora_name": publication.name, "lora_path": str(publication.path)}
    try:
        told = await http.post(f"{url}/load_lora_adapter", body, timeout)
    except EngineError as error:
        raise lora_refused_error(url, error, _HINTS, "sglang") from error
    if not (isinstance(told, dict) and told.get("success")):
        raise lora_refused_error(url, told, _HINTS, "sglang")
    for name in _others(told, publication):
        await unload_adapter(http, url, name)


async def unload_adapter(http: HttpClient, url: str, name: str) -> None:
    """Has the server forget an adapter, if it has it."""
    with suppress(ServerUnavailableError, EngineError):
        await http.post(f"{url}/unload_lora_adapter", {"lora_name": name}, _ASKS)


def _others(told: dict[str, Any], publication: WeightVersion) -> list[str]:
    """Adapters that it has from the publication's folder, of a run that was killed say: another run's are let be."""
    found = told.get("loaded_adapters") or {}
    paths = {name: ref.get("lora_path") if isinstance(ref, dict) else ref for name, ref in found.items()}
    mine = publication.path.parent
    return [name for name, path in paths.items() if name != publication.name and Path(str(path)).parent == mine]


# SGLang's words for weights that come over a group of processes.
#
# Source: sgl-project/sglang 0.5, python/sglang/srt/managers/io_struct.py (`InitWeightsUpdateGroupReqInput`,
# `UpdateWeightsFromDistributedReqInput`), python/sglang/srt/model_executor/model_runner.py and
# python/sglang/srt/entrypoints/http_server.py. A request's tensors are broadcast one by one, and loaded when all of them are
# there. A server that is told of a group that it does not know ends: one that was started again is to join first.


class SglangTransfer(WeightTransfer):
    """`/init_weights_update_group`, `/update_weights_from_distributed`, `/destroy_weights_update_group`."""

    async def get_world_size(self, http: HttpClient, url: str) -> int:
        told = await get_first_supported(http, url, "/server_info", "/get_server_info")
        many = [name for name in ("dp_size", "pp_size") if int(told.get(name) or 1) > 1]
        if many and not (many == ["dp_size"] and told.get("enable_dp_attention")):
            raise EngineError(
                f"{url} has {' and '.join(f'{name} {told[name]}' for name in many)}, with which SGLang takes no weights over NCCL: "
                "start a server for each, or publish by a folder, --sampler.weight-transport folder"
            )
        if "tp_size" not in told:
            raise EngineError(f"{url}/server_info does not say tp_size: is it a server of SGLang 0.5?")
        return int(told["tp_size"])

    async def init_group(self, http: HttpClient, url: str, invitation: Mapping[str, Any]) -> None:
        _done(url, await http.post(f"{url}/init_weights_update_group", dict(invitation), self._timeout))

    async def receive_bucket(self, http: HttpClient, url: str, bucket: Bucket, group: str, version: str) -> None:
        body: dict[str, Any] = {
            "names": list(bucket.names),
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group,
            "flush_cache": bucket.is_last,
            "abort_all_requests": False,
        }
        if bucket.is_last:
            body["weight_version"] = version
        _done(url, await http.post(f"{url}/update_weights_from_distributed", body, self._timeout))

    async def destroy_group(self, http: HttpClient, url: str, group: str) -> None:
        await http.post(f"{url}/destroy_weights_update_group", {"group_name": group}, CONTROL_TIMEOUT)


async def get_weight_version(http: HttpClient, url: str) -> object:
    """What a server calls its weights; None = it does not say."""
    return (await get_first_supported(http, url, "/model_info", "/get_model_info")).get("weight_version")


async def get_first_supported(http: HttpClient, url: str, *paths: str) -> dict[str, Any]:
    """The answer to the first of these questions that the server knows.

    Raises:
        EngineError: it knows none of them.
    """
    refused: EngineError | None = None
    for path in paths:
        try:
            told = await http.get(url + path, CONTROL_TIMEOUT)
        except EngineError as error:
            refused = error
            continue
        if isinstance(told, dict):
            return told
    raise EngineError(f"{url} answers none of {', '.join(paths)}: is it a server of SGLang 0.5?") from refused


def _done(url: str, told: Any) -> None:
    if not (isinstance(told, dict) and told.get("success")):
        said = told.get("message") if isinstance(told, dict) else told
        raise EngineError(f"{url} did not take over the weights: {said}")


class SglangSampler(NcclEngineSampler):
    """Servers of `sglang.launch_server`."""

    name = "SGLang"
    launch_hint = (
        "Start it without SGLANG_RETURN_ORIGINAL_LOGPROB, in the learner's precision, as "
        "`policygrad engine sglang --print` says"
    )

    gauges = PrometheusGauges("sglang:num_queue_reqs", "sglang:token_usage")
    supports_lora = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.adapter_names: dict[str, str] = {}  # of the adapter of now, by address

    def weight_writer(self) -> WeightWriter:
        return make_safetensors_writer(self.model, self.tokenizer.hf, write_tied_head=False)

    def transfer_class(self) -> Callable[..., WeightTransfer]:
        return SglangTransfer

    def group_factory(self) -> GroupFactory:
        from policygrad.weight_sync.nccl import store_groups

        return store_groups(next(self.model.parameters()).device, self.config.urls)

    async def load_weights(self, url: str, publication: WeightVersion) -> None:
        if self.adapter_only:
            before = self.adapter_names.pop(url, "")
            await load_adapter(self.http, url, publication, self.config.recovery_timeout, before)
            self.adapter_names[url] = publication.name
            return
        if self.transfer is not None:
            known = await get_weight_version(self.http, url)
            if known != publication.name or url in self.failed_probes:
                await self.transfer.send(self.http, url, publication, known)
            return
        body = {
            "model_path": str(publication.path),
            "weight_version": publication.name,
            "abort_all_requests": False,
            "flush_cache": True,
        }
        told = await self.http.post(f"{url}/update_weights_from_disk", body, self.config.recovery_timeout)
        if not (isinstance(told, dict) and told.get("success")):
            said = told.get("message") if isinstance(told, dict) else told
            raise EngineError(f"{url} did not take over {publication.path}: {said}")

    async def close(self) -> None:
        if self.adapter_only and self.published is not None:
            for url in self.adapter_names:
                await unload_adapter(self.http, url, self.published.name)
        await super().close()

    async def complete(self, url: str, request: Request, seed: int) -> EngineCompletion:
        sampling = request.sampling
        if sampling.is_truncated:
            raise EngineError("SGLang gives log-probabilities before top-k and top-p: leave top_k at 0 and top_p at 1")
        wanted = {
            "max_new_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "sampling_seed": seed,
            "n": 1,
            "stop_token_ids": sorted(self.tokenizer.end_ids),
        }
        body: dict[str, Any] = {
            "input_ids": request.prompt_ids.tolist(),
            "sampling_params": wanted,
            "return_logprob": True,
            "stream": False,
        }
        if self.adapter_only:
            body["lora_path"] = self.adapter_names.get(url)
        answer = await self.http.post(f"{url}/generate", body)
        try:
            about = answer["meta_info"]
            if (about.get("finish_reason") or {}).get("type") == "abort":
                raise ServerUnavailableError(f"the request was aborted: {about['finish_reason'].get('message', '')}")
            entries = about["output_token_logprobs"]
            tokens = [int(token) for token in answer["output_ids"]]
            if [int(entry[1]) for entry in entries] != tokens[: len(entries)]:
                raise EngineError(f"{url} gives log-probabilities of other tokens than it has drawn")
            weights = None if self.adapter_only else about.get("weight_version")  # of what the server began with
            return EngineCompletion(tokens, [entry[0] for entry in entries], weights)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise EngineError(
                f"{url} does not answer as SGLang does ({type(error).__name__} {error}): is it one?"
            ) from error
