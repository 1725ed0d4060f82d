"""The experts that tokens were sent to while rows were decoded, put together again completion by completion."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policygrad.models.routing import Routing
from policygrad.samplers.base import Request


class Routes:
    """Filled pass by pass; nothing is kept without a routing."""

    def __init__(self, routing: Routing | None, requests: Sequence[Request], budget: int) -> None:
        self.routing, self.requests, self.budget = routing, requests, budget
        self.prompts: dict[int, Tensor] = {}  # per completion, [P, layers, k]
        self.answers = torch.empty(0)  # [requests, budget, layers, k], -1 where nothing was read

    def read(self, completions: Sequence[int], repeats: Tensor, width: int) -> None:
        """After the contexts of these completions were read, each once, padded on the left to `width`."""
        if self.routing is None:
            return
        taken = self.routing.take()
        read = taken.reshape(len(repeats), width, *taken.shape[1:]).repeat_interleave(repeats.cpu(), 0)
        for i, row in zip(completions, read, strict=True):
            self.prompts[i] = row[width - len(self.requests[i].tokens) :]
        if not len(self.answers):
            self.answers = read.new_full((len(self.requests), self.budget, *read.shape[2:]), -1)

    def add(self, completions: Tensor, count: Tensor, rows: Tensor) -> None:
        """After each of the completions has read its token `count`, at `rows` of the forward pass."""
        if self.routing is not None:
            self.answers[completions.cpu(), count.cpu()] = self.routing.take()[rows.cpu()]

    def of(self, i: int, size: int) -> Tensor | None:
        """[P + size, layers, k] of one completion."""
        return None if self.routing is None else torch.cat([self.prompts[i], self.answers[i, :size]])
