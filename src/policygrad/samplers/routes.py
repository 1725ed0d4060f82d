"""The experts that tokens were sent to while a batch was decoded, put together again row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policygrad.models.routing import Routing
from policygrad.samplers.base import Request


@dataclass(frozen=True, eq=False)
class Routes:
    """Filled pass by pass; nothing is kept without a routing."""

    routing: Routing | None
    prompts: Sequence[Tensor]
    """Per completion, [P, layers, k]."""
    answers: Tensor
    """[rows, budget, layers, k], -1 where nothing was read."""

    @classmethod
    def begun(
        cls, routing: Routing | None, requests: Sequence[Request], repeats: Tensor, width: int, budget: int
    ) -> Routes:
        """After the contexts were read, each once, padded on the left to `width`."""
        if routing is None:
            return cls(None, (), torch.empty(0))
        taken = routing.take()
        read = taken.reshape(len(repeats), width, *taken.shape[1:]).repeat_interleave(repeats.cpu(), 0)
        prompts = [row[width - len(request.tokens) :] for row, request in zip(read, requests, strict=True)]
        return cls(routing, prompts, read.new_full((len(requests), budget, *read.shape[2:]), -1))

    def add(self, rows: Tensor, t: int) -> None:
        """After the completions `rows` have read their token t."""
        if self.routing is not None:
            self.answers[rows, t] = self.routing.take()

    def of(self, row: int, size: int) -> Tensor | None:
        """[P + size, layers, k] of one completion."""
        return None if self.routing is None else torch.cat([self.prompts[row], self.answers[row, :size]])
