"""Gates that choose among all tokens of an update: the fewest to leave out, or some of those that cost most entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.batch import Batch, Forward
from policygrad.core.gates import Clip
from policygrad.core.protocols import Gate
from policygrad.core.ratios import bounded_exp
from policygrad.core.selection import SELECTED, check_share, chosen, covariance, policy_now
from policygrad.core.terms import log_ratio
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class SecondMoment(Gate):
    """w = r, or 0 for the fewest tokens whose leaving brings the mean of (log r)² down to τ.

    Only tokens whose ratio has moved as Ψ pushes (Ψ > 0 and r > 1, Ψ < 0 and r < 1) are counted in that mean and can be left
    out, the furthest first; nothing is clipped otherwise. Source: Zheng et al. 2025 (M2PO), arXiv:2510.01161, algorithm 1.
    """

    threshold: float = 0.04
    """τ, nats²."""
    token_ratio: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = SELECTED
    select_needs: ClassVar[frozenset[str]] = frozenset({"logp"})

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < math.inf:
            raise ConfigError(f"SecondMoment.threshold must be at least 0 nats² and finite, not {self.threshold}")

    @property
    def formula(self) -> str:
        return (
            f"r, or 0 for the fewest tokens with mean (log r)² ≤ {self.threshold:g} over the others that moved with Ψ"
        )

    def select(self, out: Forward | None, batch: Batch, psi: Tensor) -> Tensor:
        """The tokens that are left out."""
        change = log_ratio(policy_now(out, self), batch.logp_old, batch.mask).double()
        pushed = batch.mask & (((psi > 0) & (change > 0)) | ((psi < 0) & (change < 0)))
        square = change**2
        ordered = square[pushed].sort().values
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
        beyond = ordered[means > self.threshold]  # the means grow, so that these are the largest
        return pushed & (square >= beyond[0]) if len(beyond) else torch.zeros_like(pushed)

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """What is left out: (below, above) r = 1, both [B, T] bool."""
        cut = chosen(batch, self)
        return cut & (psi < 0), cut & (psi > 0)

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return ragged.masked(ratio, ~chosen(batch, self))

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return self.weight(ratio, psi, batch) * psi


@dataclass(frozen=True)
class ClipCov(Gate):
    """As `Clip`, and 0 for a small share of the tokens whose covariance of log π_θ with Ψ is in (least, most).

    The authors draw the share at random from that band. Here it is every so manieth of the band in order of covariance, a
    draw without chance: the same for any order of the tokens, for any split, and in a run that is resumed.
    Source: Cui et al. 2025 (Clip-Cov), arXiv:2505.22617, sec. 4.
    """

    low: float = 1.0
    """As published the ratio is not clipped from below: 1 − low = 0."""
    high: float = 1.0
    share: float = 2e-4
    """Of all tokens of the update; at least one, where the band has one."""
    least: float = 1.0
    most: float = 5.0
    token_ratio: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = SELECTED
    select_needs: ClassVar[frozenset[str]] = frozenset({"logp"})

    def __post_init__(self) -> None:
        Clip(self.low, self.high)
        check_share(self, self.share)
        if not self.least < self.most:
            raise ConfigError(f"ClipCov needs least < most, not {self.least} and {self.most}: the band of covariances")

    @property
    def formula(self) -> str:
        band = f"{self.least:g}<cov(log π_θ, Ψ)<{self.most:g}"
        return f"{self._clip.formula}, or at {self.share:g} of all tokens, some of those with {band}"

    @property
    def _clip(self) -> Clip:
        return Clip(self.low, self.high)

    def select(self, out: Forward | None, batch: Batch, psi: Tensor) -> Tensor:
        """The tokens that are left out; those that the ratio leaves out already are not drawn."""
        logp = ragged.masked(policy_now(out, self), batch.mask)
        ratio = bounded_exp(log_ratio(logp, batch.logp_old, batch.mask))
        below, above = self._clip.clipped(ratio, psi, batch)
        cov = covariance(logp, psi, batch.mask)
        band = batch.mask & (cov > self.least) & (cov < self.most) & ~(below | above)
        ordered, count = cov[band].sort().values, max(1, int(self.share * int(batch.mask.sum())))
        every = torch.arange(min(count, len(ordered)), device=cov.device, dtype=torch.float64) + 0.5
        drawn = ordered[(every * (len(ordered) / max(1, len(every)))).long()]
        return band & torch.isin(cov, drawn)

    def clipped(self, ratio: Tensor, psi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Where the ratio or the choice cuts, by Ψ's sign: (below, above), both [B, T] bool."""
        below, above = self._clip.clipped(ratio, psi, batch)
        cut = chosen(batch, self)
        return below | (cut & (psi < 0)), above | (cut & (psi > 0))

    def weight(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return ragged.masked(self._clip.weight(ratio, psi, batch), ~chosen(batch, self))

    def value(self, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
        return ragged.masked(self._clip.value(ratio, psi, batch), ~chosen(batch, self))
