"""SGLang: its native `/generate`, ids in and out, and `/update_weights_from_disk`.

Source: sgl-project/sglang 0.5, python/sglang/srt/managers/io_struct.py and docs of the native API. Checked against answers of that
form, not against a running server: it needs a GPU (docs/engines.md). Adapters alone: `sglang_adapters`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from policygrad.errors import EngineError
from policygrad.samplers.base import Request
from policygrad.samplers.concurrency import Gauges
from policygrad.samplers.drawn import Drawn
from policygrad.samplers.http import AwayError
from policygrad.samplers.sending import SendingSampler
from policygrad.samplers.sglang_adapters import drop, take
from policygrad.samplers.sglang_transfer import SglangTransfer, weight_version
from policygrad.samplers.transfer import Transfer
from policygrad.weight_sync.folder import Publication, Write
from policygrad.weight_sync.safetensors_folder import safetensors_writer

if TYPE_CHECKING:
    from policygrad.weight_sync.nccl import Opens


class Sglang(SendingSampler):
    """Servers of `sglang.launch_server`."""

    name = "SGLang"
    way_out = (
        "Start it without SGLANG_RETURN_ORIGINAL_LOGPROB, in the learner's precision, as "
        "`policygrad engine sglang --print` says"
    )

    gauges = Gauges("sglang:num_queue_reqs", "sglang:token_usage")
    takes_adapters = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.names: dict[str, str] = {}  # of the adapter of now, by address

    def writer(self) -> Write:
        return safetensors_writer(self.model, self.tokenizer.hf, head_too=False)

    def transfers(self) -> Callable[..., Transfer]:
        return SglangTransfer

    def over_nccl(self) -> Opens:
        from policygrad.weight_sync.nccl import by_store

        return by_store(next(self.model.parameters()).device, self.config.urls)

    async def load(self, url: str, publication: Publication) -> None:
        if self.adapter:
            before = self.names.pop(url, "")
            await take(self.http, url, publication, self.config.patience, before)
            self.names[url] = publication.name
            return
        if self.transfer is not None:
            known = await weight_version(self.http, url)
            if known != publication.name or url in self.refused:
                await self.transfer.send(self.http, url, publication, known)
            return
        body = {
            "model_path": str(publication.path),
            "weight_version": publication.name,
            "abort_all_requests": False,
            "flush_cache": True,
        }
        told = await self.http.post(f"{url}/update_weights_from_disk", body, self.config.patience)
        if not (isinstance(told, dict) and told.get("success")):
            said = told.get("message") if isinstance(told, dict) else told
            raise EngineError(f"{url} did not take over {publication.path}: {said}")

    async def close(self) -> None:
        if self.adapter and self.published is not None:
            for url in self.names:
                await drop(self.http, url, self.published.name)
        await super().close()

    async def draw(self, url: str, request: Request, seed: int) -> Drawn:
        sampling = request.sampling
        if sampling.cuts_off:
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
            "stop_token_ids": sorted(self.tokenizer.end),
        }
        body: dict[str, Any] = {
            "input_ids": request.tokens.tolist(),
            "sampling_params": wanted,
            "return_logprob": True,
            "stream": False,
        }
        if self.adapter:
            body["lora_path"] = self.names.get(url)
        answer = await self.http.post(f"{url}/generate", body)
        try:
            about = answer["meta_info"]
            if (about.get("finish_reason") or {}).get("type") == "abort":
                raise AwayError(f"the request was aborted: {about['finish_reason'].get('message', '')}")
            entries = about["output_token_logprobs"]
            tokens = [int(token) for token in answer["output_ids"]]
            if [int(entry[1]) for entry in entries] != tokens[: len(entries)]:
                raise EngineError(f"{url} gives log-probabilities of other tokens than it has drawn")
            weights = None if self.adapter else about.get("weight_version")  # of what the server began with
            return Drawn(tokens, [entry[0] for entry in entries], weights)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise EngineError(
                f"{url} does not answer as SGLang does ({type(error).__name__} {error}): is it one?"
            ) from error
