"""LEVER 2, first half: the importance ratio r from per-token log-ratios log(π_θ/π_old) [B, T], under stop-gradient.

Exponents are bounded to a little under half the range of the dtype (±43 nats in float32), so that a weight and its
product with another stay finite; no ratio a run can survive comes near.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.protocols import Ratio


def _bounded(x: Tensor) -> Tensor:
    bound = 0.49 * math.log(torch.finfo(x.dtype).max)
    return x.clamp(-bound, bound)


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x) with x clipped to just under half the dtype's exponent range: finite, and so is the product of two of them."""
    return _bounded(x).exp()


def bounded_expm1(x: Tensor) -> Tensor:
    """exp(x) − 1 under the same bound, exact also where x is small (a KL of 1e-6 nats is a square of 1e-3)."""
    return _bounded(x).expm1()


@dataclass(frozen=True)
class Token(Ratio):
    """r_t = π_θ(o_t)/π_old(o_t), token by token. Source: Schulman et al. 2017 (PPO), eq. 6."""

    @property
    def formula(self) -> str:
        return "r_t = π_θ(o_t)/π_old(o_t)"

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return bounded_exp(ragged.masked(log_ratio, mask))


@dataclass(frozen=True)
class Sequence(Ratio):
    """s_i = exp(mean_t log r_t), the geometric mean, for every token of completion i. Source: Zheng et al. 2025 (GSPO), eq. 7."""

    @property
    def formula(self) -> str:
        return "s_i = exp(mean_t log r_t)"

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        log_ratio = ragged.masked(log_ratio, mask)
        mean = log_ratio.sum(1) / mask.sum(1).clamp(min=1)
        return bounded_exp(mean)[:, None].expand(log_ratio.shape)


@dataclass(frozen=True)
class SequenceProduct(Ratio):
    """Π_t r_t: the only unbiased ratio, of huge variance; for study. Source: importance sampling of whole completions.

    The objective per completion is Π_t r_t·Ψ, whose derivative in every log π_θ(o_t) is Π_t r_t·Ψ itself: in sums over
    tokens each holds 1/|o| of the value and the whole of the weight (`joint`).
    """

    joint: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return "Π_t r_t"

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        log_ratio = ragged.masked(log_ratio, mask)
        return bounded_exp(log_ratio.sum(1))[:, None].expand(log_ratio.shape)
