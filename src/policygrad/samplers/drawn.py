"""What a server answers, and what it has to be so that a rollout can be made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from policygrad.errors import EngineError
from policygrad.samplers.base import Generation, Request


@dataclass(frozen=True)
class Drawn:
    """A server's answer to one request: as many log-probabilities [nats] as token ids."""

    tokens: Sequence[int]
    logp: Sequence[float]
    weights: str | None = None
    """The name of the publication that it was drawn with, where the engine says so."""


def generation(
    url: str, request: Request, drawn: Drawn, version: int, *, ends: frozenset[int], vocabulary: int
) -> Generation:
    """The generation, up to its first end token. version: of the weights that drew it. ends: the policy's end tokens. vocabulary:
    ids that the model knows.

    Raises:
        EngineError: what no rollout can be made of.
    """
    tokens, logp = list(drawn.tokens), list(drawn.logp)
    if len(tokens) != len(logp):
        raise EngineError(
            f"{url} gives {len(logp)} log-probabilities for {len(tokens)} tokens: tokens whose text is no whole "
            "UTF-8 are lost in its text"
        )
    if odd := [x for x in tokens if not (isinstance(x, int) and 0 <= x < vocabulary)]:
        raise EngineError(f"{url} gives {odd[0]!r} as a token, and the model knows those below {vocabulary}")
    end = next((i for i, token in enumerate(tokens) if token in ends), None)
    if end is not None:
        tokens, logp = tokens[: end + 1], logp[: end + 1]
    if len(tokens) > request.max_tokens:
        raise EngineError(f"{url} gives {len(tokens)} tokens, and was asked for {request.max_tokens}")
    if end is None and len(tokens) != request.max_tokens:
        raise EngineError(
            f"{url} ends after {len(tokens)} of {request.max_tokens} tokens, without an end token of the policy "
            f"({', '.join(map(str, sorted(ends)))}): its context is too short, or its model has other end tokens"
        )
    if strange := [x for x in logp if not (isinstance(x, float | int) and -9000 < x <= 1e-4 and math.isfinite(x))]:
        raise EngineError(
            f"{url} gives {strange[0]} as a log-probability: a placeholder, or a token that could not be drawn"
        )
    sampled = torch.tensor(logp, dtype=torch.float32).clamp(max=0.0)
    greedy = request.sampling.temperature == 0  # all probability is on what is taken, whatever an engine says
    return Generation(
        torch.tensor(tokens, dtype=torch.int64),
        torch.zeros_like(sampled) if greedy else sampled,
        "length" if end is None else "stop",
        version,
    )
