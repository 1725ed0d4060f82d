"""From logits to a token and its log-probability, with random numbers that belong to the completion, not to the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from policygrad.models.precision import at_least_float32
from policygrad.samplers.base import Sampling

_BELOW_ONE = 1 - 2**-40  # keeps u·total below the total after rounding, so that no token of probability 0 is ever drawn


def uniforms(keys: Sequence[tuple[int, ...]], n: int) -> Tensor:
    """[len(keys), n] float64 in [0, 1): row i from a counter-based generator keyed by keys[i], whatever else is drawn."""
    rows = [np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(n) for key in keys]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, n, dtype=torch.float64)


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
    """(token [N], logp [N]) by inverting the cumulative distribution at u [N]: one number per token, on any device."""
    logp = log_probabilities(logits, sampling)
    cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
    target = (u.to(cumulative.device) * _BELOW_ONE)[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True)
    return token.squeeze(1), logp.gather(-1, token).squeeze(1)
