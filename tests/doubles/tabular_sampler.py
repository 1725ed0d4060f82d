"""The smallest policy there is: a table of logits, one row per (prompt, position). A stand-in for a model in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from policygrad.models.chat.messages import EncodedText
from policygrad.models.chat.turns import AssistantMessage
from policygrad.samplers.base import Generation, Request
from policygrad.samplers.local.sampling import philox_uniforms, sample_tokens
from policygrad.weight_sync.base import PublishedWeights


class TabularSampler:
    """Samples from π(token | prompt, t) = softmax(table[prompt, t]); token 0 ends a completion.

    A prompt is its first token; what follows is a prefix of the answer, t counts on from there.
    """

    def __init__(self, prompts: int, length: int, vocabulary: int) -> None:
        self.table, self.version = torch.zeros(prompts, length, vocabulary, dtype=torch.float64), 0

    async def update(self, weights: PublishedWeights) -> None:
        """The learner's table."""
        self.table, self.version = weights.tensors["table"].detach().clone(), weights.version

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> Generation:
        start = len(request.prompt_ids) - 1
        budget = min(request.max_tokens, self.table.shape[1] - start)
        u = philox_uniforms([request.key], budget)[0]
        tokens: list[Tensor] = []
        logps: list[Tensor] = []
        for t in range(budget):
            token, logp = sample_tokens(
                self.table[request.prompt_ids[0], start + t][None], u[t : t + 1], request.sampling
            )
            tokens.append(token)
            logps.append(logp)
            if int(token) == 0:
                break
        reason = "stop" if int(tokens[-1]) == 0 else "length"
        return Generation(torch.cat(tokens), torch.cat(logps), reason, self.version)  # type: ignore[arg-type]


class TabularTokenizer:
    """Prompts and completions are written as numbers: "3" is prompt 3, tokens are joined by spaces."""

    context_length = None
    pictures = None

    def encode(self, prompt: Any, max_tokens: int, source: str = "", tools: Any = None) -> EncodedText:
        return EncodedText(torch.tensor([int(word) for word in prompt.split()]))

    def encode_answer(
        self, prompt_ids: Tensor, prompt: Any, text: str, source: str = "", tools: Any = None
    ) -> list[int]:
        return [*(int(word) for word in text.split()), 0]

    end_ids = frozenset({0})

    def read_turn(self, text: str, context_ids: Tensor, tools: Any = ()) -> AssistantMessage:
        return AssistantMessage(text)

    def decode(self, tokens: Tensor) -> str:
        return " ".join(str(int(t)) for t in tokens if int(t) != 0)

    def encode_continuation(
        self, so_far: Any, reply: str, new: Any, source: str = "", tools: Any = None, *, end: int | None = None
    ) -> EncodedText:
        return self.encode(new, 0)
