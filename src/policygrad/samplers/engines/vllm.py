"""vLLM: completions by its OpenAI-compatible `/v1/completions`, ids in and out; weights by the routes of its development mode.

Source: vllm-project/vllm 0.32, vllm/entrypoints/openai/completion/protocol.py (`prompt` as ids, `logprobs`, `return_token_ids`,
`seed`), vllm/entrypoints/scale_out/token_in_token_out (`/inference/v1/generate` for sampling masks and for prompts with pictures,
which the server expands itself) and vllm/entrypoints/rl/online/api_router.py (`/pause`, `/resume`, `/weight_info`,
`/update_weight_version`). Tested with a server of that version (docs/engines.md).
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from policygrad.errors import ConfigError, EngineError
from policygrad.models.lora_config import DEFAULT_RANK
from policygrad.samplers.base import Request
from policygrad.samplers.config import FOLDER, MERGED, NCCL
from policygrad.samplers.engines.base import (
    REQUEST_TIMEOUT,
    EngineCompletion,
    EngineSampler,
    LaunchOptions,
    lora_refused_error,
    reading_reply,
)
from policygrad.samplers.engines.colocation import CACHE
from policygrad.samplers.engines.http import HttpClient, ServerUnavailableError
from policygrad.samplers.engines.nccl_transfer import CONTROL_TIMEOUT, WeightTransfer
from policygrad.samplers.engines.server_pool import PrometheusGauges
from policygrad.samplers.engines.server_process import LaunchCommand
from policygrad.utils.child_environment import ENGINE_VARIABLES
from policygrad.weight_sync.base import Bucket
from policygrad.weight_sync.folder import WeightVersion, WeightWriter, make_safetensors_writer
from policygrad.weight_sync.nccl import UniqueIdGroup

VERSION = "0.32.0"  # the tested one
CPU_CACHE_GIB = "2"  # of the key-value cache on a CPU
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # valid values of --max-lora-rank (vllm/config/lora.py)
_SERVER_ERROR = "500"
"""How an error begins whose cause is in the engine: vLLM replies with that status whatever its engine raises."""
# (part of the reply, how to solve it).
_LORA_HINTS = (
    ('"Not Found"', "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"),
    ("not enabled", "Start it with --enable-lora"),
    ("max_lora_rank", "Start it with a --max-lora-rank of at least the adapter's rank"),
    ("target modules", "Adapt layers that it knows: --learner.lora targets=…"),
    ("No adapter found", "Give it access to the folder under the same path, --sampler.folder"),
)
_SHAPE_FIELDS = ("num_hidden_layers", "hidden_size", "vocab_size")
"""Fields of a model's configuration that an error message compares."""


class VllmTransfer(WeightTransfer):
    """Sends weights over NCCL. Each request of an update returns once its tensors are loaded; tensors are broadcast one by one.

    Source: vllm-project/vllm 0.32, vllm/entrypoints/rl/online/api_router.py and vllm/distributed/weight_transfer/nccl_engine.py.
    """

    group_class = UniqueIdGroup
    sends_tied_head = True  # see `VllmSampler.weight_writer`

    async def get_world_size(self, http: HttpClient, url: str) -> int:
        reply = await http.get(f"{url}/get_world_size", CONTROL_TIMEOUT)
        try:
            return int(reply["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{url}/get_world_size returns {reply!r}: is it a server of vLLM 0.32?") from error

    async def init_group(self, http: HttpClient, url: str, init_request: Mapping[str, Any]) -> None:
        try:
            await http.post(f"{url}/init_weight_transfer_engine", {"init_info": dict(init_request)}, self._timeout)
        except (ServerUnavailableError, EngineError) as error:
            if isinstance(error, ServerUnavailableError) and not str(error).startswith(_SERVER_ERROR):
                raise
            raise EngineError(
                f"{url} does not join a group over NCCL. Start it with --weight-transfer-config "
                '\'{"backend":"nccl"}\', as `policygrad engine vllm --weight-transport nccl --print` shows, or set '
                f"--sampler.weight-transport {FOLDER} ({error})"
            ) from error

    async def start_update(self, http: HttpClient, url: str) -> None:
        await http.post(f"{url}/start_weight_update", None, CONTROL_TIMEOUT)

    async def receive_bucket(self, http: HttpClient, url: str, bucket: Bucket, group: str, version: str) -> None:
        info = {"names": list(bucket.names), "dtype_names": bucket.dtypes, "shapes": bucket.shapes}
        await http.post(f"{url}/update_weights", {"update_info": info}, self._timeout)

    async def finish_update(self, http: HttpClient, url: str, version: str) -> None:
        await http.post(f"{url}/finish_weight_update", {"weight_version": version}, self._timeout)

    async def recover(self, http: HttpClient, url: str) -> None:
        with suppress(ServerUnavailableError, EngineError):  # no update was started
            await http.post(f"{url}/finish_weight_update", None, CONTROL_TIMEOUT)
        with suppress(ServerUnavailableError, EngineError):  # no group, or a vLLM that cannot leave one
            await self.destroy_group(http, url, "")

    async def destroy_group(self, http: HttpClient, url: str, group: str) -> None:
        await http.post(f"{url}/shutdown_weight_transfer_engine", None, CONTROL_TIMEOUT)


class VllmSampler(EngineSampler):
    """Samples from servers of `vllm serve`."""

    name, package = "vLLM", "vllm"
    launch_hint = (
        "Start it with --logprobs-mode processed_logprobs --generation-config vllm, in the learner's precision, as "
        "`policygrad engine vllm --print` shows"
    )
    detection_routes = (("/version", "version"),)
    variables = (*ENGINE_VARIABLES, "VLLM_*", "[QKV]_SCALE_CONSTANT")
    gauges = PrometheusGauges("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    supports_lora = True
    supports_stop = True
    stops_at_texts = True
    can_sleep = True
    returns_routed_experts = True
    returns_sampling_masks = True
    scores_tokens = True
    top_k_option = "start vLLM with --max-logprobs {k}, which is 20 by default"
    supports_pictures = True
    lora_route = "/v1"
    transfer_class = VllmTransfer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.model_names: dict[str, str] = {}  # by server: the name of its model in requests
        self.served_models: dict[str, str] = {}  # by server: the model that it was started with
        self.reloaded_servers: set[str] = set()

    @classmethod
    def launch_command(cls, options: LaunchOptions) -> LaunchCommand:
        """Development mode loads weights, and adapters do not need it. Log-probabilities are taken after the temperature, and the
        model's own sampling defaults are off."""
        argv = ["vllm", "serve", options.model, "--served-model-name", "policy", "--dtype", options.dtype]
        argv += ["--max-model-len", str(options.context_length), "--max-num-seqs", str(options.max_concurrency)]
        argv += ["--host", options.host, "--port", str(options.port)]
        argv += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        if options.weight_transport == NCCL:
            argv += ["--weight-transfer-config", '{"backend":"nccl"}']
        if options.colocate:
            argv += ["--enable-sleep-mode"]
        environment: dict[str, str] = {}
        returns = ["--enable-return-routed-experts"] if options.records_experts else []
        if options.returns_masks:
            returns += ["--return-sampling-mask"]
        if returns and options.on_cpu:
            raise ConfigError(
                "learner.routing_replay, top_p and top_k: vLLM returns experts and sampling masks on a GPU only. Use "
                "--sampler.engine local, or leave these options out"
            )
        if returns:
            argv += returns
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # only this one returns them, and it needs Triton
        if options.returns_masks or options.sees:  # opens `/inference/v1/generate`
            argv += ["--enable-scale-out"]
        if options.on_cpu:  # nothing is gained there by compiling, and by default it takes most of the memory
            argv += ["--enforce-eager"]
            environment = {
                "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB),
                "OMP_NUM_THREADS": str(options.threads),
            }
        elif options.memory_fraction:
            argv += ["--gpu-memory-utilization", f"{options.memory_fraction:g}"]
        if options.lora is None:
            return {"VLLM_SERVER_DEV_MODE": "1", **environment}, argv
        rank = options.lora.rank or DEFAULT_RANK
        if rank > LORA_RANKS[-1]:
            raise ConfigError(
                f"--lora rank={rank}: vLLM serves adapters up to rank {LORA_RANKS[-1]}. Send all weights: --sampler.lora-sync "
                f"{MERGED}"
            )
        argv += ["--max-loras", "1", "--max-lora-rank", str(min(r for r in LORA_RANKS if r >= rank)), "--enable-lora"]
        sleeping = {"VLLM_SERVER_DEV_MODE": "1"} if options.colocate else {}
        return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", **sleeping, **environment}, argv

    @classmethod
    def requirements(cls, *, has_gpu: bool) -> list[str]:
        # vllm-project/vllm, docs/getting_started/installation/cpu.x86.inc.md
        wheel = f"vllm-{VERSION}+cpu-cp38-abi3-manylinux_2_34_x86_64.whl"
        release = f"https://github.com/vllm-project/vllm/releases/download/v{VERSION}/{wheel}"
        on_cpu = [release, "--extra-index-url", "https://download.pytorch.org/whl/cpu"]
        return [f"vllm=={VERSION}"] if has_gpu else on_cpu

    @classmethod
    async def score(
        cls, http: HttpClient, url: str, model: str, ids: Sequence[int], start: int, top_k: int = 0
    ) -> tuple[list[float], list[dict[int, float]]]:
        # `prompt_logprobs` skip temperature and sampling parameters, under raw_logprobs and processed_logprobs alike
        # (vllm/v1/worker/gpu_model_runner.py, `_get_prompt_logprobs_dict`). An entry has the k likeliest tokens, and the given
        # one if it is not among them; one token is sampled, the least that a request may
        body = {"model": model, "prompt": list(ids), "prompt_logprobs": top_k, "max_tokens": 1, "temperature": 1.0}
        reply = await http.post(f"{url}/v1/completions", body | {"add_special_tokens": False, "stream": False})
        with reading_reply(url, cls.name):
            try:
                entries = reply["choices"][0]["prompt_logprobs"]
                if len(entries) != len(ids):
                    raise EngineError(f"{url} returns log-probabilities of {len(entries)} tokens for {len(ids)}")
                given = [
                    entry[str(token)]["logprob"] for token, entry in zip(ids[start:], entries[start:], strict=True)
                ]
                if not top_k:
                    return given, []
                return given, [{int(i): x["logprob"] for i, x in entry.items()} for entry in entries[start:]]
            except KeyError as error:
                raise EngineError(f"{url} returns no log-probability of the token {error} that it was given") from error

    def weight_writer(self) -> WeightWriter:
        # vLLM 0.32 keeps the old head when tied embeddings are reloaded, so the head is written under its own name too
        return make_safetensors_writer(self.model, self.tokenizer, write_tied_head=True)

    async def handshake(self, url: str) -> None:
        reply = await self.http.get(f"{url}/v1/models", timeout=REQUEST_TIMEOUT)
        try:
            self.model_names[url] = str(reply["data"][0]["id"])
        except (KeyError, TypeError, IndexError) as error:
            raise EngineError(f"{url}/v1/models lists no model: is it a server of vLLM?") from error
        self.served_models[url] = str(reply["data"][0].get("root") or self.model_names[url])

    async def load_weights(self, url: str, version: WeightVersion) -> None:
        if self.adapter_only:
            await self._load_adapter(url, version)
            return
        info = await self._control(url, "GET", "/weight_info")
        server_version = info.get("weight_version") if isinstance(info, dict) else None
        if server_version == version.name and url not in self.must_reload:
            return
        await self._control(url, "POST", "/pause?mode=keep")
        try:
            if self.transfer is not None:
                await self.transfer.send(self.http, url, version, server_version)
            else:
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(version.path)}}
                try:
                    await self._control(url, "POST", "/collective_rpc", body, self.config.recovery_timeout)
                except ServerUnavailableError as error:
                    # if it fails at the first weights that it is given, they belong to another model than its own
                    if url in self.reloaded_servers or not str(error).startswith(_SERVER_ERROR):
                        raise
                    served, config = self.served_models[url], getattr(self.model, "config", None)
                    ours = getattr(config, "name_or_path", "") or type(self.model).__name__
                    shape = _format_shape({} if config is None else config.to_dict())
                    raise EngineError(
                        f"{url} serves the model {served}{_format_shape(_read_config(served))} and fails to load the weights of "
                        f"the run's model {ours}{shape}, which must have the same shape: {error}. Start it with the run's model. "
                        f"{self.launch_hint}"
                    ) from error
                self.reloaded_servers.add(url)
            await self._control(url, "POST", "/reset_prefix_cache")
            if self.tokenizer.pictures is not None:  # what the old vision tower made of pictures
                await self._control(url, "POST", "/reset_encoder_cache")
        finally:
            await self._control(url, "POST", "/resume")
        await self._control(url, "POST", "/update_weight_version", {"new_version": version.name})

    async def complete(self, url: str, request: Request, seed: int) -> EngineCompletion:
        sampling, model = request.sampling, self.adapter_names.get(url, self.model_names[url])
        options: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            **self.sampling_options(request),
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": seed,
            "logprobs": 0,
        }
        left: list[list[int]] | None = None
        by_ids = request.needs_mask or bool(request.media)
        if by_ids:  # only this route returns masks, and reads pictures beside ids
            body = {
                "model": model,
                "token_ids": request.prompt_ids.tolist(),
                "sampling_params": options,
                "stream": False,
            }
            if request.media:
                ids, uris = self.pictured_prompt(request)
                parts = [{"type": "image_url", "url": uri} for uri in uris]
                body |= {"token_ids": ids, "content_parts": parts, "return_token_ids": True}
            reply = await self.http.post(f"{url}/inference/v1/generate", body)
        else:
            tokens_only: dict[str, Any] = {"return_token_ids": True, "add_special_tokens": False, "stream": False}
            if sampling.stop:  # the other route decodes nothing
                texts = {"stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
                tokens_only |= texts
            body = {"model": model, "prompt": request.prompt_ids.tolist(), **options, **tokens_only}
            reply = await self.http.post(f"{url}/v1/completions", body)
        with reading_reply(url, self.name):
            choice = reply["choices"][0]
            tokens = choice["token_ids"]
            if by_ids:
                logp = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                left = choice["sampling_mask"] if request.needs_mask else None
            else:
                logp = choice["logprobs"]["token_logprobs"]
            if tokens is None:
                raise EngineError(f"{url} returns no token ids; vLLM 0.11 or later does (return_token_ids)")
            if request.media:
                self._check_expansion(url, request, reply["prompt_token_ids"])
            experts = decode_experts(choice.get("routed_experts")) if self.records_experts else None
            version = str(reply["model"]) if self.adapter_only else None
            return EngineCompletion(tokens, logp, version, experts, left)

    def _check_expansion(self, url: str, request: Request, read: Sequence[int]) -> None:
        """Raise EngineError unless the server has read a prompt with pictures as the ids that the learner reads."""
        ours, theirs = request.prompt_ids.tolist(), list(read)
        if ours == theirs:
            return
        name, mark = self.tokenizer.name, getattr(self.tokenizer.pictures, "placeholder", -1)
        if ours.count(mark) > sum(len(media.slots) for media in request.media):
            raise EngineError(
                f"{url} takes a token that the policy wrote for a picture: {name!r} has sampled {mark}, which stands for a part of "
                "one, before a picture of a later turn. Use --sampler.engine local, or show all pictures in the first turn"
            )
        different = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        raise EngineError(
            f"{url} reads a prompt with pictures as other tokens than {name!r} does in the run: {len(theirs)} with "
            f"{theirs.count(mark)} parts of pictures, not {len(ours)} with {ours.count(mark)}; token {different + 1} is "
            "the first that differs. Its processor's settings are not the run's: start it with the run's model, whose folder has "
            "the processor's files, and without --mm-processor-kwargs and --media-io-kwargs"
        )

    async def sleep(self, url: str) -> None:
        # level 2 forgets the weights, which are replaced anyway; level 1 keeps a copy in the host's memory, for an adapter's base
        level = 1 if self.adapter_only else 2
        await self._control(url, "POST", f"/sleep?level={level}&mode=wait", None, self.config.recovery_timeout)
        if not await self._is_sleeping(url):
            raise ServerUnavailableError("it says that it sleeps, and is awake")

    async def wake(self, url: str, part: str) -> None:
        await self._control(url, "POST", f"/wake_up?tags={part}", None, self.config.recovery_timeout)
        if part == CACHE and await self._is_sleeping(url):
            raise ServerUnavailableError("it says that it is awake, and sleeps")

    async def _is_sleeping(self, url: str) -> bool:
        reply = await self._control(url, "GET", "/is_sleeping")
        try:
            return bool(reply["is_sleeping"])
        except (KeyError, TypeError) as error:
            raise EngineError(f"{url}/is_sleeping returns {reply!r}: is it a server of vLLM?") from error

    async def _control(
        self, url: str, method: str, route: str, body: dict[str, Any] | None = None, timeout: float = REQUEST_TIMEOUT
    ) -> Any:
        try:
            if method == "GET":
                return await self.http.get(url + route, timeout)
            return await self.http.post(url + route, body, timeout)
        except EngineError as error:
            raise EngineError(
                "vLLM loads weights only in its development mode. Start it with VLLM_SERVER_DEV_MODE=1 in its environment "
                f"({error})"
            ) from error

    # Adapters: `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`.
    #
    # Source: vllm-project/vllm 0.32, vllm/entrypoints/serve/lora (both routes exist with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 only)
    # and vllm/entrypoints/openai/models/serving.py (checks and replies; `/v1/models` lists adapters with their folder as `root`).
    # A request names the adapter as `model`, and the reply repeats it. An unloaded adapter may stay in the engine's memory until
    # another is loaded in its place (vllm-project/vllm, issue 54839): with --max-loras 1 that is the next version.

    async def _load_adapter(self, url: str, version: WeightVersion) -> None:
        """Let the server serve this version, and unload older versions from the same folder. Other runs' adapters stay."""
        reply = await self.http.get(f"{url}/v1/models", REQUEST_TIMEOUT)
        try:
            cards = [card for card in reply["data"] if card.get("parent")]
            loaded = [str(card["id"]) for card in cards if Path(str(card.get("root"))).parent == version.path.parent]
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"{url}/v1/models lists no models: is it a server of vLLM?") from error
        is_loaded = version.name in loaded and url not in self.must_reload
        for name in loaded:
            if not (is_loaded and name == version.name):
                await self.unload_adapter(url, name)
        if is_loaded:
            self.adapter_names[url] = version.name
            return
        body = {"lora_name": version.name, "lora_path": str(version.path)}
        try:
            await self.http.post(f"{url}/v1/load_lora_adapter", body, self.config.recovery_timeout)
        except (EngineError, ServerUnavailableError) as error:
            # a 500 with a JSON reply is a refusal with its reason
            if isinstance(error, ServerUnavailableError) and not str(error).startswith(f"{_SERVER_ERROR} {{"):
                raise
            raise lora_refused_error(url, error, _LORA_HINTS, "vllm") from error
        self.adapter_names[url] = version.name


def decode_experts(text: str | None) -> np.ndarray | None:
    """Decode the experts of a reply, a NumPy file in base64: [tokens read, all layers of the model, k]."""
    return None if text is None else np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def _format_shape(config: Mapping[str, Any]) -> str:
    """Return ` (num_hidden_layers 2, hidden_size 64)`, or nothing if the configuration has none of the fields."""
    sizes = [f"{name} {config[name]}" for name in _SHAPE_FIELDS if name in config]
    return f" ({', '.join(sizes)})" if sizes else ""


def _read_config(folder: str) -> dict[str, Any]:
    """Read a model's configuration; empty if the name is no folder of this machine."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
