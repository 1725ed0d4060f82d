"""Softmax policies over prefixes: a table, shared parameters, a tiny transformer, a tiny mixture of experts. θ is a vector [P]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from policygrad.lab.sequences import Policy, sample_normal


@dataclass(frozen=True)
class TabularPolicy(Policy):
    """A separate logit for every prompt, prefix and token: scores at different states are orthogonal."""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [(self.prompts, len(self.tree.prefixes), self.tree.vocabulary)]

    def logits(self, theta: Tensor) -> Tensor:
        return self.split(theta)[0]


@dataclass(frozen=True)
class Bigram(Policy):
    """logit = W[position, previous token, token] + U[prompt, position, token]: prompts share parameters."""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        v, n = self.tree.vocabulary, self.tree.length
        return [(n, v, v), (self.prompts, n, v)]

    def logits(self, theta: Tensor) -> Tensor:
        shared, per_prompt = self.split(theta)
        position = torch.tensor([len(prefix) for prefix in self.tree.prefixes])
        previous = torch.tensor([prefix[-1] if prefix else 0 for prefix in self.tree.prefixes])
        return shared[position, previous] + per_prompt[:, position]


@dataclass(frozen=True)
class Transformer(Policy):
    """One block of width D: an attention head over prompt and prefix and a two-layer perceptron, both with residuals."""

    width: int = 4
    scale: float = 0.3

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        d, v = self.width, self.tree.vocabulary
        symbols = self.prompts + v
        return [(symbols, d), (self.tree.length, d), (3, d, d), (d, 2 * d), (2 * d, d), (d, v)]

    def logits(self, theta: Tensor) -> Tensor:
        symbol, position, attend, up, down, out = self.split(theta)
        length, prefixes = self.tree.length, self.tree.prefixes
        padded = torch.tensor([[*prefix, *[0] * (length - 1 - len(prefix))] for prefix in prefixes]).long()
        prompt = torch.arange(self.prompts)[:, None, None].expand(-1, len(prefixes), 1)
        ids = torch.cat([prompt, self.prompts + padded.reshape(1, len(prefixes), -1).expand(self.prompts, -1, -1)], 2)
        last = torch.tensor([len(prefix) for prefix in prefixes])
        x = symbol[ids] + position  # [X, S, L, D]
        query, key, value = (x @ w for w in attend)
        query = query[:, torch.arange(len(prefixes)), last]  # only the last position is read
        weight = (query[:, :, None] * key).sum(-1) / self.width**0.5
        weight = weight.masked_fill(torch.arange(length) > last[:, None], -torch.inf).softmax(-1)
        hidden = x[:, torch.arange(len(prefixes)), last] + (weight[..., None] * value).sum(2)
        logits: Tensor = (hidden + (hidden @ up).relu() @ down) @ out
        return logits


@dataclass(frozen=True)
class Experts(Policy):
    """A mixture of experts: a router on random features of the prefix selects one expert's logits per state, times its gate.

    Routing is discontinuous: where the scores of two experts are almost equal, a small change of θ selects the other. `frozen` [S]
    fixes the selection (routing replay).
    """

    experts: int = 4
    width: int = 6
    scale: float = 1.0
    frozen: tuple[int, ...] | None = None

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [(self.width, self.experts), (self.experts, self.width, self.tree.vocabulary)]

    @property
    def features(self) -> Tensor:
        """[S, width], constant."""
        return sample_normal((len(self.tree.prefixes), self.width), 1 / math.sqrt(self.width), 17)

    def routes(self, theta: Tensor) -> Tensor:
        """[S] int64, the expert of each state."""
        return (self.features @ self.split(theta)[0]).argmax(-1)

    def logits(self, theta: Tensor) -> Tensor:
        router, expert = self.split(theta)
        route = self.routes(theta) if self.frozen is None else torch.tensor(self.frozen)
        gate = (self.features @ router).softmax(-1).gather(-1, route[:, None])
        logits: Tensor = gate * torch.einsum("sd,sdv->sv", self.features, expert[route])
        return logits.expand(self.prompts, *logits.shape)
