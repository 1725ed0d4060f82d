"""An answer that is asked for piece by piece: each goes on from the prompt and the tokens so far, with what is left of the budget.

What is drawn is drawn from the same distribution as in one go, as every token's depends on those before it only. A piece that is
lost is asked again, those before it stay; where weights change between two pieces, each token has the version of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from policygrad.samplers.base import Generation, Request
from policygrad.samplers.seeds import seeds

Ask = Callable[[Request, int, bool], Awaitable[Generation]]
"""(request, 64 random bits, whether its answer is begun) -> what was drawn for it."""


async def in_pieces(request: Request, word: int, size: int, ask: Ask) -> Generation:
    """The whole answer. word: the first piece's random bits, the key's own. size: tokens of a piece; 0 = one for all."""
    parts = list[Generation]()
    left, tokens = request.max_tokens, request.tokens
    while True:
        piece = replace(request, tokens=tokens, max_tokens=min(left, size or left))
        if parts:  # 0 and then the piece: the turn k > 0 of an episode has a key of one number more
            word = int(seeds([(*request.key, 0, len(parts))])[0, 0])
        parts.append(part := await ask(piece, word, bool(parts)))
        left -= len(part.tokens)
        if part.finish_reason == "stop" or left == 0:
            return joined(parts)
        tokens = torch.cat([tokens, part.tokens])


def joined(parts: Sequence[Generation]) -> Generation:
    """One generation of pieces in their order; it ends as the last one does."""
    if len(parts) == 1:
        return parts[0]
    versions = {part.version for part in parts if isinstance(part.version, int)}
    whole = len(versions) == 1 and all(isinstance(part.version, int) for part in parts)
    return Generation(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.logp for part in parts]),
        parts[-1].finish_reason,
        versions.pop() if whole else torch.cat([_each(part) for part in parts]),
    )


def _each(part: Generation) -> Tensor:
    """[n] int64, the version of each token."""
    return torch.full_like(part.tokens, part.version) if isinstance(part.version, int) else part.version
