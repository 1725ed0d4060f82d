"""Sampling by the model's own `generate`, for what it can do and the samplers of policygrad cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from policygrad.models.vision import picture_inputs
from policygrad.samplers.base import Generation, Request
from policygrad.weight_sync.base import PublishedWeights


def replaces_generate(model: Any) -> bool:
    """Return True if a model has another `generate` than transformers' own, which is then what samples."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = vars(model).get("generate") or getattr(type(base), "generate", None)
    return found is not None and not str(getattr(found, "__module__", "")).startswith("transformers.")


class GenerateSampler:
    """Samples all requests of a call as one batch with `model.generate`. It reports no log-probabilities.

    Args:
        options: Arguments of `GenerationConfig`.
    """

    def __init__(self, model: nn.Module, end_ids: Sequence[int], pad: int, options: Mapping[str, Any]) -> None:
        self.model, self.end_ids, self.pad, self.version = model, list(end_ids), pad, 0
        self.options = dict(options)

    async def update(self, weights: PublishedWeights) -> None:
        """Note the version: the weights are the model's own."""
        self.version = weights.version

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        device = next(self.model.parameters()).device
        width = max(len(request.prompt_ids) for request in requests)
        ids = torch.full((len(requests), width), self.pad, dtype=torch.int64)
        attention, slots = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for row, request in enumerate(requests):
            first_column = width - len(request.prompt_ids)
            ids[row, first_column:] = request.prompt_ids
            attention[row, first_column:] = 1
            for media in request.media:
                slots[row, first_column + media.slots] = True
        first, inputs = requests[0], {"input_ids": ids.to(device)}
        if pictures := [media for request in requests for media in request.media]:
            inputs = picture_inputs(self.model, inputs["input_ids"], slots.to(device), pictures)
        options: dict[str, Any] = {
            "max_new_tokens": max(request.max_tokens for request in requests),
            "do_sample": True,
            "pad_token_id": self.pad,
            "eos_token_id": self.end_ids,
            "temperature": first.sampling.temperature,
            **self.options,
        }
        config = GenerationConfig(**options, disable_compile=True)  # type: ignore[no-untyped-call]
        model: Any = self.model
        torch.manual_seed(hash(first.key) & 0x7FFFFFFF)
        with torch.no_grad():
            out = model.generate(**inputs, attention_mask=attention.to(device), generation_config=config)
        return [self._cut(row, request.max_tokens) for row, request in zip(out[:, width:].cpu(), requests, strict=True)]

    def _cut(self, tokens: torch.Tensor, max_tokens: int) -> Generation:
        """Return a completion up to its first end token."""
        tokens = tokens[:max_tokens]
        ends = torch.isin(tokens, torch.tensor(self.end_ids)).nonzero()
        stopped = len(ends) > 0
        tokens = tokens[: int(ends[0]) + 1] if stopped else tokens
        return Generation(tokens, torch.zeros(len(tokens)), "stop" if stopped else "length", self.version)
