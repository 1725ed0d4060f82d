"""Which policy a rollout's samples are held to be from, said once: π_old as the learner sees it, or μ as the sampler says."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.metrics import Max, Mean, Metrics
from policygrad.core.ratios import TruncatedIS
from policygrad.errors import ConfigError


def resolve_old_policy(algorithm: Algorithm, batch: Batch, version: int) -> tuple[Algorithm, Batch]:
    """(the algorithm for this rollout, its batch), before a learner fills what `algorithm.needs`; version: the learner's.

    sampler: log π_old is what the sampler said. recomputed: π_old is the learner's policy, with nothing to change where it
    drew every token itself; where it did not, π_old/μ is no longer 1 and w is corrected for it, by `TruncatedIS` unless the
    algorithm has a correction for it: a rollout older than the weights never counts as on-policy. That is so for a whole rollout
    and for the groups that dynamic sampling carries over from the step before; with 'sampler' their ratio has their own π_old.

    Raises:
        ConfigError: a sampler that has not said its log-probabilities, where they are needed.
    """
    if algorithm.old_policy == "sampler":
        return algorithm, replace(
            batch, logp_old=_require_sampler_logprobs(batch, "old_policy='sampler' reads them as π_old")
        )
    lag = _version_lag(batch, version)
    if lag is None or not bool((lag != 0).any()):
        return algorithm, batch
    if not any(part.corrects_sampler for part in algorithm.corrections):
        _require_sampler_logprobs(batch, "the samples are older than the weights, which is corrected for by π_old/μ")
        algorithm = replace(algorithm, corrections=(*algorithm.corrections, TruncatedIS()))
    return algorithm, batch


AGE_BINS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Versions; a token counts for the smallest that it is not older than, the oldest for the last."""


def staleness_metrics(batch: Batch, version: int) -> Metrics:
    """staleness/mean and /max: by how many versions the weights are ahead of those that drew the tokens; where some are, also
    staleness/age_N, the share of tokens that are N old, or less and older than the N before. Nothing where nobody has said which
    weights drew them."""
    lag = _version_lag(batch, version)
    if lag is None or not len(lag):
        return {}
    count, largest = float(len(lag)), float(lag.max())
    metrics: Metrics = {"staleness/mean": Mean(lag.sum().double(), count), "staleness/max": Max(largest)}
    if largest > 0:
        place = torch.bucketize(lag, torch.tensor(AGE_BINS, device=lag.device)).clamp(max=len(AGE_BINS) - 1)
        shares = place.bincount(minlength=len(AGE_BINS)).double()
        metrics |= {f"staleness/age_{age}": Mean(share, count) for age, share in zip(AGE_BINS, shares, strict=True)}
    return metrics


def _version_lag(batch: Batch, version: int) -> Tensor | None:
    """[n] versions, of the sampled tokens; no weights drew a demonstration."""
    return None if batch.version is None else version - batch.version[batch.policy_tokens]


def _require_sampler_logprobs(batch: Batch, why: str) -> Tensor:
    if batch.logp_sampler is None:
        raise ConfigError(
            f"Batch.logp_sampler is None, and {why}: let the sampler give the log-probability of each token it draws"
        )
    return batch.logp_sampler
