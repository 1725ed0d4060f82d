"""Servers of models that see, in the form that vLLM and SGLang document, without a network: they expand pictures themselves."""

from __future__ import annotations

import base64
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from torch import nn

from doubles.http_engines import FormServer, SglangForm, VllmForm
from doubles.vision_models import make_family
from policygrad.core.media import TextMedia
from policygrad.models.tokenizer import Tokenizer
from policygrad.models.vision import read_texts
from policygrad.samplers.base import SamplingParams
from policygrad.samplers.engines.base import EngineCompletion
from policygrad.samplers.local.sampling import log_probabilities
from policygrad.utils.pictures import Picture

SERVED = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
"""Sizes whose attention heads have 32 numbers, as vLLM needs on a CPU."""


def save_served(folder: Path, *, tied: bool = False) -> Path:
    """Write a random Idefics3 that a real vLLM serves, with its processor, and return the folder."""
    small, processor = make_family("idefics3")
    config: Any = copy.deepcopy(small.config)
    for name, value in SERVED.items():
        setattr(config.text_config, name, value)
        setattr(config.vision_config, name, value)
    config.text_config.num_key_value_heads, config.text_config.head_dim = 2, 32
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    torch.manual_seed(1)
    model: Any = type(small)(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


class Seeing(FormServer):
    """A server with a copy of a model and a processor of its own."""

    stale: tuple[str, ...] = ()
    """Parameters with these parts of a name are never loaded."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer) -> None:
        super().__init__(torch.zeros(1, 1), tokenizer.end_ids)
        self.model, self.tokenizer = copy.deepcopy(model), tokenizer

    def load(self, folder: str) -> None:
        tensors = load_file(Path(folder) / "model.safetensors")
        fresh = {name: x for name, x in tensors.items() if not any(part in name for part in self.stale)}
        self.model.load_state_dict(fresh, strict=False)

    def expand(self, ids: Sequence[int], uris: Sequence[str]) -> tuple[list[int], TextMedia]:
        """Return a prompt's ids with all placeholder tokens, and its pictures."""
        assert self.tokenizer.pictures is not None
        pictures = [Picture(data=base64.b64decode(uri.partition(",")[2], validate=True)) for uri in uris]
        text = self.tokenizer.pictures.expand(self.tokenizer.hf.decode(ids), pictures, "a request")
        expanded = list(self.tokenizer.hf(text, add_special_tokens=False)["input_ids"])
        return expanded, self.tokenizer.pictures.media(torch.tensor(expanded), pictures, "a request")

    def draw(
        self, tokens: list[int], temperature: float, max_tokens: int, seed: int, media: TextMedia = ()
    ) -> EngineCompletion:
        generator, params = torch.Generator().manual_seed(seed), SamplingParams(temperature=temperature)
        completion, logp = list[int](), list[float]()
        while len(completion) < max_tokens and not (completion and completion[-1] in self.end):
            with torch.no_grad():
                logits = read_texts(self.model, torch.tensor([[*tokens, *completion]]), [media])[:, -1]
            row = log_probabilities(logits, params)[0]
            completion.append(int(row.exp().multinomial(1, generator=generator)))
            logp.append(float(row[completion[-1]]))
        return EngineCompletion(completion, logp)


class SeeingVllm(Seeing, VllmForm):
    """`vllm serve` of a model that sees; with --enable-scale-out if `scales_out`."""

    scales_out = True

    def tell(self, path: str, body: Any) -> Any:
        if path != "/inference/v1/generate":
            return super().tell(path, body)
        if not self.scales_out:
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            return httpx.Response(403, json={"error": {"message": message, "type": "PermissionDeniedError"}})
        assert all(part["type"] == "image_url" for part in body["content_parts"])
        ids, media = self.expand(body["token_ids"], [part["url"] for part in body["content_parts"]])
        params = body["sampling_params"]
        drawn = self.draw(ids, params["temperature"], params["max_tokens"], params["seed"], media)
        entries = [{"token_id": t, "logprob": p} for t, p in zip(drawn.tokens, drawn.logp, strict=True)]
        choice = {"index": 0, "logprobs": {"content": entries}, "token_ids": drawn.tokens, "sampling_mask": None}
        sent = ids if body.get("return_token_ids") else None
        return {"request_id": "1", "model": body["model"], "choices": [choice], "prompt_token_ids": sent}


class SeeingSglang(Seeing, SglangForm):
    """`sglang.launch_server` of a model that sees."""

    def tell(self, path: str, body: Any) -> Any:
        if path != "/generate" or "image_data" not in body:
            return super().tell(path, body)
        ids, self.media = self.expand(body["input_ids"], body["image_data"])
        try:
            return super().tell(path, {**body, "input_ids": ids})
        finally:
            self.media = ()

    media: TextMedia = ()

    def draw(
        self, tokens: list[int], temperature: float, max_tokens: int, seed: int, media: TextMedia = ()
    ) -> EngineCompletion:
        return super().draw(tokens, temperature, max_tokens, seed, media or self.media)
