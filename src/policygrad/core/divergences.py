"""Divergences of two distributions over the vocabulary: of all tokens, or of the likeliest and of the others as one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from policygrad.core.batch import TopTokens

Owner = Literal["policy", "reference"]
Others = Literal["one", "none"]
Over = Literal["sampled", "vocabulary"]


@dataclass(frozen=True)
class Divergence:
    """Which divergence of π_θ and π_ref a pass computes (`ExactKLToReference`)."""

    alpha: float = 1.0
    top_k: int = 0
    """Likeliest tokens that are compared one by one; 0 = all."""
    top_of: Owner = "policy"
    others: Others = "one"
    over: Over = "sampled"
    """sampled: over the tokens that top-k and top-p leave; vocabulary: over all, also where completions are sampled by these."""

    def compute(self, logp: Tensor, reference: Tensor) -> Tensor:
        """Return the divergence [n] from log π_θ [n, V], with its graph, and log π_ref [n, V]."""
        if 0 < self.top_k < logp.shape[-1]:
            chosen = (logp.detach() if self.top_of == "policy" else reference).topk(self.top_k, sorted=False).indices
            logp, reference = (self._reduce(x, chosen) for x in (logp, reference))
        return self._compare(logp, reference)

    def compute_top(self, logp: Tensor, top: TopTokens) -> Tensor:
        """Return the divergence [n] from log π_θ [n, V], with its graph, and what is known of π_ref: its k likeliest tokens."""
        known = top.logp.to(logp.dtype)
        if self.others == "none":
            known = known - known.logsumexp(-1, keepdim=True)
        else:
            left = 1 - top.logp.double().exp().sum(-1, keepdim=True)
            known = torch.cat([known, left.clamp(min=LEAST_LEFT).log().to(logp.dtype)], -1)
        return self._compare(self._reduce(logp, top.ids.long()), known)

    def _compare(self, logp: Tensor, reference: Tensor) -> Tensor:
        """Return the divergence [n] of two distributions over the same tokens."""
        if self.alpha == 1:
            return expectation(logp.exp(), logp - reference)
        if self.alpha == 0:
            return expectation(reference.exp(), reference - logp)
        # where both are −∞, the derivative of logaddexp would be NaN
        weighted = (reference + math.log(self.alpha), logp + math.log1p(-self.alpha))
        mixture = torch.logaddexp(*(x.clamp(min=LEAST) for x in weighted))
        of_reference, of_policy = (expectation(x.exp(), x - mixture) for x in (reference, logp))
        return self.alpha * of_reference + (1 - self.alpha) * of_policy

    def _reduce(self, logp: Tensor, chosen: Tensor) -> Tensor:
        """Return log-probabilities [n, k + 1] of the chosen tokens and of all others together; or [n, k] of the chosen ones alone,
        which then sum to 1."""
        top = logp.gather(-1, chosen)
        if self.others == "none":
            return top - top.clamp(min=LEAST).logsumexp(-1, keepdim=True)
        left = logp.scatter(-1, chosen, -torch.inf).clamp(min=LEAST)  # all −∞ would have a derivative of NaN
        return torch.cat([top, left.logsumexp(-1, keepdim=True)], -1)


REVERSE_KL = Divergence()
LEAST = -1e30
"""Nats of what has probability 0, where −∞ would make a derivative NaN."""

LEAST_LEFT = 2.0**-24
"""Probability that is left beside known ones: what float32 numbers that sum to 1 do not tell."""


def expectation(p: Tensor, x: Tensor) -> Tensor:
    """Return Σ p·x over the vocabulary with 0·∞ = 0, since excluded tokens have a logit of −∞."""
    return (p * torch.where(p > 0, x, 0)).sum(-1)
