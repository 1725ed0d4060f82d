"""SGLang: completions by its native `/generate`, ids in and out; weights by `/update_weights_from_disk`.

Source: sgl-project/sglang 0.5, python/sglang/srt/managers/io_struct.py and docs of the native API. Checked against replies of that
form, not against a running server, which needs a GPU (docs/engines.md).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from policygrad.errors import ConfigError, EngineError
from policygrad.models.lora_config import DEFAULT_RANK, DEFAULT_TARGETS
from policygrad.samplers.base import Request
from policygrad.samplers.config import FOLDER
from policygrad.samplers.engines.base import (
    EngineCompletion,
    EngineSampler,
    LaunchOptions,
    lora_refused_error,
    reading_reply,
)
from policygrad.samplers.engines.colocation import CACHE, WEIGHTS
from policygrad.samplers.engines.http import HttpClient, ServerUnavailableError
from policygrad.samplers.engines.nccl_transfer import CONTROL_TIMEOUT, WeightTransfer
from policygrad.samplers.engines.server_pool import PrometheusGauges
from policygrad.samplers.engines.server_process import LaunchCommand
from policygrad.utils.child_environment import ENGINE_VARIABLES
from policygrad.weight_sync.base import Bucket
from policygrad.weight_sync.folder import WeightVersion, WeightWriter, make_safetensors_writer
from policygrad.weight_sync.nccl import StoreGroup

VERSION = "0.5"  # whose documented interface this follows
# (part of the reply, how to solve it).
_LORA_HINTS = (
    ("answers 404", "Use a server that loads adapters at run time, SGLang 0.5 or later"),
    ("not enabled", "Start it with --enable-lora"),
    ("incompatible", "Start it with --max-lora-rank and --lora-target-modules for this adapter"),
    ("No such file", "Give it access to the folder under the same path, --sampler.folder"),
)


class SglangTransfer(WeightTransfer):
    """Sends weights over NCCL. A request's tensors are broadcast one by one, and loaded when all have arrived. A server exits
    when a request names a group that it does not know, so one that restarted must join first.

    Source: sgl-project/sglang 0.5, python/sglang/srt/managers/io_struct.py (`InitWeightsUpdateGroupReqInput`,
    `UpdateWeightsFromDistributedReqInput`), python/sglang/srt/model_executor/model_runner.py and
    python/sglang/srt/entrypoints/http_server.py.
    """

    group_class = StoreGroup

    async def get_world_size(self, http: HttpClient, url: str) -> int:
        info = await _get_first_supported(http, url, "/server_info", "/get_server_info")
        parallel = [name for name in ("dp_size", "pp_size") if int(info.get(name) or 1) > 1]
        if parallel and not (parallel == ["dp_size"] and info.get("enable_dp_attention")):
            raise EngineError(
                f"{url} has {' and '.join(f'{name} {info[name]}' for name in parallel)}, with which SGLang loads no weights over "
                f"NCCL. Start one server for each, or set --sampler.weight-transport {FOLDER}"
            )
        if "tp_size" not in info:
            raise EngineError(f"{url}/server_info has no tp_size: is it a server of SGLang 0.5?")
        return int(info["tp_size"])

    async def init_group(self, http: HttpClient, url: str, init_request: Mapping[str, Any]) -> None:
        reply = await http.post(f"{url}/init_weights_update_group", dict(init_request), self._timeout)
        _check_success(url, "the weights", reply)

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
        reply = await http.post(f"{url}/update_weights_from_distributed", body, self._timeout)
        _check_success(url, "the weights", reply)

    async def destroy_group(self, http: HttpClient, url: str, group: str) -> None:
        await http.post(f"{url}/destroy_weights_update_group", {"group_name": group}, CONTROL_TIMEOUT)


class SglangSampler(EngineSampler):
    """Samples from servers of `sglang.launch_server`."""

    name, package = "SGLang", "sglang"
    launch_hint = (
        "Start it without SGLANG_RETURN_ORIGINAL_LOGPROB, in the learner's precision, as "
        "`policygrad engine sglang --print` shows"
    )
    detection_routes = (("/get_model_info", "model_path"), ("/model_info", "model_path"))
    variables = (
        *ENGINE_VARIABLES,
        *(
            "SGLANG_*",
            "SGL_*",
            "MOONCAKE_*",
            "DEEP_NORMAL_*",
            "IS_H200",
            "USE_TRITON_W8A8_FP8_KERNEL",
            "DISABLE_OPENAPI_DOC",
        ),
    )
    gauges = PrometheusGauges("sglang:num_queue_reqs", "sglang:token_usage")
    supports_stop = True
    stops_at_texts = True
    supports_lora = True
    can_sleep = True
    returns_routed_experts = True
    scores_tokens = True
    supports_pictures = True
    transfer_class = SglangTransfer

    @classmethod
    def launch_command(cls, options: LaunchOptions) -> LaunchCommand:
        """Log-probabilities are taken after the temperature unless the environment says otherwise, and the model's own sampling
        defaults are off. Weights over NCCL need no option."""
        argv = ["python", "-m", "sglang.launch_server", "--model-path", options.model, "--dtype", options.dtype]
        argv += ["--context-length", str(options.context_length)]
        argv += ["--max-running-requests", str(options.max_concurrency)]
        argv += ["--host", options.host, "--port", str(options.port), "--sampling-defaults", "openai"]
        if options.on_cpu:
            argv += ["--device", "cpu"]
        elif options.memory_fraction:
            argv += ["--mem-fraction-static", f"{options.memory_fraction:g}"]
        if options.lora is not None:
            argv += ["--max-loras-per-batch", "1", "--max-lora-rank", str(options.lora.rank or DEFAULT_RANK)]
        argv += ["--enable-metrics"]
        if options.colocate:
            argv += ["--enable-memory-saver", *["--enable-weights-cpu-backup"] * (options.lora is not None)]
        if options.records_experts:
            argv += ["--enable-return-routed-experts"]
        if options.lora is not None:
            targets = options.lora.targets or DEFAULT_TARGETS
            argv += ["--enable-lora", "--lora-target-modules"]
            argv += ("all" if targets == DEFAULT_TARGETS else targets).split("+")
        return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}, argv

    @classmethod
    def requirements(cls, *, has_gpu: bool) -> list[str]:
        if not has_gpu:
            raise ConfigError(
                "SGLang has no release for machines without a GPU: build it from its sources, or use vllm"
            )
        return [f"sglang[all]=={VERSION}.*"]

    @classmethod
    async def score(
        cls, http: HttpClient, url: str, model: str, ids: Sequence[int], start: int, top_k: int = 0
    ) -> tuple[list[float], list[dict[int, float]]]:
        # at temperature 1 those before and after the temperature are the same. Entries are [log-probability, id, text], and the
        # first may be that of the token before the first one with a log-probability
        body: dict[str, Any] = {"input_ids": list(ids), "return_logprob": True, "logprob_start_len": start - 1}
        body |= {"top_logprobs_num": top_k} if top_k else {}
        sampling = {"max_new_tokens": 1, "temperature": 1.0}
        reply = await http.post(f"{url}/generate", body | {"sampling_params": sampling, "stream": False})
        with reading_reply(url, cls.name):
            entries = reply["meta_info"]["input_token_logprobs"][-len(ids[start:]) :]
            if [int(entry[1]) for entry in entries] != list(ids[start:]):
                raise EngineError(f"{url} returns log-probabilities of other tokens than it was given")
            given, likeliest = [entry[0] for entry in entries], list[dict[int, float]]()
            if top_k:
                listed = reply["meta_info"]["input_top_logprobs"][-len(ids[start:]) :]
                likeliest = [{int(i): logp for logp, i, *_ in place} for place in listed]
            return given, likeliest

    def weight_writer(self) -> WeightWriter:
        return make_safetensors_writer(self.model, self.tokenizer)

    async def load_weights(self, url: str, version: WeightVersion) -> None:
        if self.adapter_only:
            await self._load_adapter(url, version)
            return
        if self.transfer is not None:
            info = await _get_first_supported(self.http, url, "/model_info", "/get_model_info")
            server_version = info.get("weight_version")
            if server_version != version.name or url in self.must_reload:
                await self.transfer.send(self.http, url, version, server_version)
            return
        body = {
            "model_path": str(version.path),
            "weight_version": version.name,
            "abort_all_requests": False,
            "flush_cache": True,
        }
        reply = await self.http.post(f"{url}/update_weights_from_disk", body, self.config.recovery_timeout)
        _check_success(url, str(version.path), reply)

    async def complete(self, url: str, request: Request, seed: int) -> EngineCompletion:
        sampling = request.sampling
        if sampling.is_truncated:
            raise EngineError(
                "SGLang returns log-probabilities before top-k and top-p. Leave sampling.top_k at 0 and sampling.top_p at 1."
            )
        sampling_params: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            **self.sampling_options(request),
            "top_p": 1.0,
            "top_k": -1,
            "sampling_seed": seed,
        }
        if sampling.stop:
            texts = {"stop": list(sampling.stop), "no_stop_trim": True, "skip_special_tokens": False}
            sampling_params |= texts
        body: dict[str, Any] = {
            "input_ids": request.prompt_ids.tolist(),
            "sampling_params": sampling_params,
            "return_logprob": True,
            "stream": False,
        }
        if request.media:
            body["input_ids"], body["image_data"] = self.pictured_prompt(request)
            self._check_reencoding(body["input_ids"])
        if self.adapter_only:
            body["lora_path"] = self.adapter_names.get(url)
        if self.records_experts:
            body["return_routed_experts"] = True
        reply = await self.http.post(f"{url}/generate", body)
        with reading_reply(url, self.name):
            info = reply["meta_info"]
            if (info.get("finish_reason") or {}).get("type") == "abort":
                raise ServerUnavailableError(f"the request was aborted: {info['finish_reason'].get('message', '')}")
            if request.media and info["prompt_tokens"] != len(request.prompt_ids):
                raise EngineError(
                    f"{url} reads a prompt with pictures as {info['prompt_tokens']} tokens, and the run's model as "
                    f"{len(request.prompt_ids)}. Its processor's settings are not the run's: start it with the run's model, whose "
                    "folder has the processor's files, and without --mm-process-config"
                )
            entries = info["output_token_logprobs"]
            tokens = [int(token) for token in reply["output_ids"]]
            if [int(entry[1]) for entry in entries] != tokens[: len(entries)]:
                raise EngineError(f"{url} returns log-probabilities of other tokens than it sampled")
            version = None if self.adapter_only else info.get("weight_version")  # when the completion started
            experts = self._decode_experts(info.get("routed_experts")) if self.records_experts else None
            return EngineCompletion(tokens, [entry[0] for entry in entries], version, experts)

    def _check_reencoding(self, ids: list[int]) -> None:
        """Raise EngineError for a prompt with pictures that has other ids once it is decoded and encoded again.

        SGLang does that to place them (python/sglang/srt/multimodal/processors/base_processor.py), and tells no ids.
        """
        tokenizer = self.tokenizer.hf
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if list(tokenizer(text, add_special_tokens=False)["input_ids"]) != ids:
            raise EngineError(
                "SGLang decodes a prompt with pictures and encodes it again, and this one then has other tokens than were sampled: "
                "it continues a turn or a chunk. Use --sampler.engine vllm, or prompts of one turn without --sampler.chunk-tokens"
            )

    async def sleep(self, url: str) -> None:
        body = {"tags": [CACHE, WEIGHTS]}
        await self.http.post(f"{url}/release_memory_occupation", body, self.config.recovery_timeout)

    async def wake(self, url: str, part: str) -> None:
        await self.http.post(f"{url}/resume_memory_occupation", {"tags": [part]}, self.config.recovery_timeout)

    def _decode_experts(self, text: str | None) -> np.ndarray | None:
        """Decode the experts of a reply, int32 numbers in base64: [tokens read, all layers of the model, k]."""
        if text is None:
            return None
        config: Any = self.model.config
        return np.frombuffer(base64.b64decode(text), np.int32).reshape(
            -1, config.num_hidden_layers, self.expert_layers[1]
        )

    # Adapters: `/load_lora_adapter` and `/unload_lora_adapter`.
    #
    # Source: sgl-project/sglang 0.5, python/sglang/srt/managers/{io_struct,tokenizer_control_mixin}.py (both reply `success`,
    # `error_message` and `loaded_adapters`, with status 400 on failure; an adapter is unloaded once no request uses it) and
    # docs/advanced_features/lora.ipynb. A request names the adapter as `lora_path`; the reply does not repeat it.

    async def _load_adapter(self, url: str, version: WeightVersion) -> None:
        """Let the server serve this version, and unload older versions from the same folder. Other runs' adapters stay."""
        for name in {self.adapter_names.pop(url, ""), version.name} - {""}:  # it may have the current one already
            await self.unload_adapter(url, name)
        body = {"lora_name": version.name, "lora_path": str(version.path)}
        try:
            reply = await self.http.post(f"{url}/load_lora_adapter", body, self.config.recovery_timeout)
        except EngineError as error:
            raise lora_refused_error(url, error, _LORA_HINTS, "sglang") from error
        if not (isinstance(reply, dict) and reply.get("success")):
            raise lora_refused_error(url, reply, _LORA_HINTS, "sglang")
        for name, adapter in (reply.get("loaded_adapters") or {}).items():  # left by a killed run, for example
            path = adapter.get("lora_path") if isinstance(adapter, dict) else adapter
            if name != version.name and Path(str(path)).parent == version.path.parent:
                await self.unload_adapter(url, name)
        self.adapter_names[url] = version.name


async def _get_first_supported(http: HttpClient, url: str, *routes: str) -> dict[str, Any]:
    """Return the reply to the first route that the server supports. Raises EngineError if it supports none."""
    refusal: EngineError | None = None
    for route in routes:
        try:
            reply = await http.get(url + route, CONTROL_TIMEOUT)
        except EngineError as error:
            refusal = error
            continue
        if isinstance(reply, dict):
            return reply
    raise EngineError(f"{url} supports none of {', '.join(routes)}: is it a server of SGLang 0.5?") from refusal


def _check_success(url: str, what: str, reply: Any) -> None:
    if not (isinstance(reply, dict) and reply.get("success")):
        message = reply.get("message") if isinstance(reply, dict) else reply
        raise EngineError(f"{url} did not load {what}: {message}")
