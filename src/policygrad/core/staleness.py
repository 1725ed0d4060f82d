"""The definition of π_old for a rollout (recomputed by the learner, or the sampler's log-probabilities), and staleness metrics."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch
from policygrad.core.metrics import Max, Mean, Metrics
from policygrad.core.ratios import TruncatedIS
from policygrad.errors import ConfigError

AGE_BINS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Upper bounds of the histogram bins of token ages, in weight versions; older tokens count in the last."""


def resolve_old_policy(algorithm: Algorithm, batch: Batch, version: int) -> tuple[Algorithm, Batch]:
    """Prepare a rollout's algorithm and batch for its choice of π_old, before a learner fills `algorithm.needs`.

    With old_policy='sampler', log π_old is the sampler's log-probability. With old_policy='learner', π_old is the learner's
    policy. If that did not sample every token itself (the rollout, or groups left over from the previous step, are older than the
    weights), π_old/μ is not 1 and w must be corrected: by `TruncatedIS`, unless the algorithm has such a correction.

    Args:
        version: the learner's version of the weights.

    Raises:
        ConfigError: the sampler's log-probabilities are needed and missing.
    """
    if algorithm.old_policy == "sampler":
        return algorithm, replace(
            batch, logp_old=_require_sampler_logprobs(batch, "old_policy='sampler' reads them as π_old")
        )
    lag = _version_lag(batch, version)
    if lag is None or not bool((lag != 0).any()):
        return algorithm, batch
    if not any(part.corrects_sampler for part in algorithm.corrections):
        _require_sampler_logprobs(batch, "the samples are older than the weights, which needs a correction by π_old/μ")
        algorithm = replace(algorithm, corrections=(*algorithm.corrections, TruncatedIS()))
    return algorithm, batch


def staleness_metrics(batch: Batch, version: int) -> Metrics:
    """Measure how many versions the weights are ahead of those that sampled the tokens; empty if versions are unknown.

    staleness/mean and /max; if some tokens are stale, also staleness/age_N, the share of tokens whose age is at most N and above
    the previous bin.
    """
    lag = _version_lag(batch, version)
    if lag is None or not len(lag):
        return {}
    count, largest = float(len(lag)), float(lag.max())
    metrics: Metrics = {"staleness/mean": Mean(lag.sum().double(), count), "staleness/max": Max(largest)}
    if largest > 0:
        bins = torch.bucketize(lag, torch.tensor(AGE_BINS, device=lag.device)).clamp(max=len(AGE_BINS) - 1)
        shares = bins.bincount(minlength=len(AGE_BINS)).double()
        metrics |= {f"staleness/age_{age}": Mean(share, count) for age, share in zip(AGE_BINS, shares, strict=True)}
    return metrics


def _version_lag(batch: Batch, version: int) -> Tensor | None:
    """Return the age of each sampled token in versions, [n]; demonstrations have none."""
    return None if batch.version is None else version - batch.version[batch.policy_tokens]


def _require_sampler_logprobs(batch: Batch, why: str) -> Tensor:
    if batch.logp_sampler is None:
        raise ConfigError(
            f"Batch.logp_sampler is None, and {why}: the sampler must return the log-probability of each token"
        )
    return batch.logp_sampler
