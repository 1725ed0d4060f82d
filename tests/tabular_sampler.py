"""The smallest policy there is: a table of logits, one row per (prompt, position). A stand-in for a model in tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policygrad.samplers.base import Completion, Group, Prompt, Sampling
from policygrad.samplers.draw import draw, uniforms
from policygrad.weight_sync.base import Published


class TabularSampler:
    """Samples from π(token | prompt, t) = softmax(table[prompt, t]); token 0 ends a completion.

    A prompt is its first token; what follows is a prefix of the answer, t counts on from there.
    """

    def __init__(self, prompts: int, length: int, vocabulary: int) -> None:
        self.table, self.version = torch.zeros(prompts, length, vocabulary, dtype=torch.float64), 0

    def load(self, weights: Published) -> None:
        """The learner's table."""
        self.table, self.version = weights.tensors["table"].detach().clone(), weights.version

    def sample(self, prompts: Sequence[Prompt], n: int, sampling: Sampling) -> list[Group]:
        """n completions of each prompt."""
        return [Group(p, tuple(self._one(p, j, sampling) for j in range(n)), self.version) for p in prompts]

    def _one(self, prompt: Prompt, sample: int, sampling: Sampling) -> Completion:
        start = len(prompt.tokens) - 1
        budget = min(prompt.budget(sampling), self.table.shape[1] - start)
        u = uniforms([(*prompt.key, sample)], budget)[0]
        tokens: list[Tensor] = []
        logps: list[Tensor] = []
        for t in range(budget):
            token, logp = draw(self.table[prompt.tokens[0], start + t][None], u[t : t + 1], sampling)
            tokens.append(token)
            logps.append(logp)
            if int(token) == 0:
                break
        return Completion(torch.cat(tokens), torch.cat(logps), int(tokens[-1]) != 0)


class TabularTokenizer:
    """Prompts and completions are written as numbers: "3" is prompt 3, tokens are joined by spaces."""

    def encode(self, prompt: str, max_tokens: int, source: str = "") -> Tensor:
        return torch.tensor([int(word) for word in prompt.split()])

    def decode(self, tokens: Tensor) -> str:
        return " ".join(str(int(t)) for t in tokens if int(t) != 0)
