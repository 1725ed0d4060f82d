"""From logits to a token and its log-probability, with random numbers that belong to the completion, not to the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from policygrad.models.precision import at_least_float32
from policygrad.samplers.base import Sampling
from policygrad.samplers.seeds import seeds

_BELOW_ONE = 1 - 2**-40  # keeps u·total below the total after rounding, so that no token of probability 0 is ever drawn
_BLOCK = 64
"""Tokens of a vocabulary that are summed at a time."""


def uniforms(keys: Sequence[tuple[int, ...]], n: int) -> Tensor:
    """[len(keys), n] float64 in [0, 1): row i from a counter-based generator keyed by keys[i], whatever else is drawn.

    The numbers are those of numpy's `Generator(Philox(SeedSequence(keys[i])))`, one object set to each row's state instead of many.
    """
    philox = np.random.Philox(key=0)
    generator, state = np.random.Generator(philox), philox.state
    found = np.empty((len(keys), n))
    for row, seed in zip(found, seeds(keys), strict=True):
        state["state"]["key"] = seed
        philox.state = state
        generator.random(out=row)
    return torch.from_numpy(found)


def log_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """[N, V] nats of the distribution that is sampled: temperature, then top-k, then top-p, renormalised.

    Temperature 0 puts all probability on the largest logit.
    """
    logits = at_least_float32(logits)
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter_(-1, best, 0.0)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.top_k:
        k = min(sampling.top_k, logits.shape[-1])
        logits = logits.masked_fill(logits < logits.topk(k, -1).values[..., -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        probability = ordered.softmax(-1)
        outside = probability.cumsum(-1) - probability >= sampling.top_p  # the token that crosses top_p stays
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    return logits.log_softmax(-1)


def draw(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(token [N], logp [N]) by inverting the cumulative distribution at u [N]: one number per token, on any device.

    Sums are in float64, so that devices differ where u is within the rounding of a probability of a token's boundary, not of a sum.
    """
    if sampling.temperature == 0 or sampling.cuts_off:
        logits = log_probabilities(logits, sampling)
    else:
        logits = at_least_float32(logits)
        if sampling.temperature != 1:
            logits = logits / sampling.temperature
    largest = logits.amax(-1, keepdim=True)
    token, total = _invert((logits - largest).exp_(), u.to(logits.device)[:, None] * _BELOW_ONE)
    logp = logits.gather(-1, token).double() - largest - total.log()
    return token.squeeze(1), logp.to(logits.dtype).squeeze(1)


def _invert(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The first token [N, 1] whose cumulative weight is above u [N, 1] times the total, and the total [N, 1] in float64.

    A wide vocabulary is summed by blocks, and only the block that the token is in is cumulated: one pass over all weights.
    """
    size = weights.shape[1]
    if size <= 8 * _BLOCK:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True), cumulative[:, -1:]
    whole = size - size % _BLOCK
    sums = weights[:, :whole].view(len(weights), -1, _BLOCK).sum(-1, dtype=torch.float64)
    rest = weights[:, whole:].sum(-1, dtype=torch.float64, keepdim=True)
    cumulative = torch.cat([sums, rest], 1).cumsum(-1)
    total = cumulative[:, -1:]
    block = torch.searchsorted(cumulative, u * total, right=True)
    before = nn.functional.pad(cumulative, (1, 0)).gather(1, block)
    places = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    within = weights.gather(1, places.clamp(max=size - 1)).masked_fill_(places >= size, 0)
    inner = within.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(inner, u * total - before, right=True)
    last = torch.searchsorted(inner, inner[:, -1:].contiguous())  # where a block's two sums differ in their last bit
    return block * _BLOCK + torch.minimum(found, last), total
