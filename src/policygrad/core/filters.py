"""Filters look at the task's score, before length or KL shaping, and decide which completions take part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from policygrad.core.advantages import no_spread
from policygrad.core.batch import Batch, required
from policygrad.core.protocols import Filter
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class DropNoSpread(Filter):
    """Dynamic sampling: drop groups whose rewards are all equal (all right, all wrong). Source: Yu et al. 2025 (DAPO), eq. 11.

    mode 'refill': keep sampling until the step is full, at most `max_rounds` rounds of the step's size; then reweight and report.
    mode 'reweight': keep the coefficients of the unfiltered step and multiply them by 1/(1 − f), f the fraction dropped.
    """

    mode: Literal["refill", "reweight"] = "refill"
    max_rounds: int = 4
    group_statistic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mode not in ("refill", "reweight"):
            raise ConfigError(f"DropNoSpread.mode must be 'refill' or 'reweight', not {self.mode!r}")
        if self.max_rounds < 1:
            raise ConfigError(f"DropNoSpread.max_rounds must be at least 1, not {self.max_rounds}")

    @property
    def formula(self) -> str:
        how = f"≤ {self.max_rounds} rounds of refill" if self.mode == "refill" else "the rest × 1/(1 − f)"
        return f"groups with max R = min R are dropped, {how}"

    @property
    def refill(self) -> bool:  # type: ignore[override]
        return self.mode == "refill"

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return self.max_rounds if self.refill else 1

    def dropped(self, batch: Batch) -> Tensor:
        return no_spread(batch)

    def __call__(self, batch: Batch) -> Batch:
        dropped = self.dropped(batch)
        if self.mode == "reweight":
            return reweight(batch, dropped)
        counted = batch.counted & ~dropped
        return replace(batch, mask=batch.mask & ~dropped[:, None], in_statistics=counted)


def applied(part: Filter, batch: Batch) -> Batch:
    """The batch after one filter. Raises ConfigError for a field that it needs and the batch lacks."""
    for name in sorted(part.needs):
        required(getattr(batch, name), part, name)
    return part(batch)


def reweight(batch: Batch, dropped: Tensor) -> Batch:
    """Weight 0 for the dropped [B], 1/(1 − f) for the rest; the denominators stay those of the unfiltered step.

    f is the fraction of completions dropped, among those with a sampled token: groups of unequal size (a completion whose
    reward failed, an overlong mask before) count by what is left of them.
    """
    in_denominators = batch.mask.any(1)
    kept = in_denominators & ~dropped
    rest = in_denominators.sum().to(batch.reward.dtype) / kept.sum().clamp(min=1)  # 1/(1 − f)
    weight = (rest * ~dropped)[:, None].expand(batch.mask.shape)
    return replace(batch, weight=weight if batch.weight is None else batch.weight * weight)


@dataclass(frozen=True)
class MaskTruncated(Filter):
    """Completions cut off by the token budget do not move the policy (overlong filtering). Source: Yu et al. 2025 (DAPO), sec. 3.4.

    keep_in_statistics: their rewards still count in the group's baseline.
    """

    keep_in_statistics: bool = False

    @property
    def formula(self) -> str:
        return "truncated completions are masked" + (", their rewards count" if self.keep_in_statistics else "")

    def __call__(self, batch: Batch) -> Batch:
        if batch.truncated is None:
            return batch
        counted = batch.counted
        return replace(
            batch,
            mask=batch.mask & ~batch.truncated[:, None],
            in_statistics=counted if self.keep_in_statistics else counted & ~batch.truncated,
        )


@dataclass(frozen=True)
class DemonstrationsApart(Filter):
    """Demonstrations take no part in a group's statistics: samples are compared with samples."""

    needs: ClassVar[frozenset[str]] = frozenset({"demonstration"})

    @property
    def formula(self) -> str:
        return "demonstrations out of the statistics"

    def __call__(self, batch: Batch) -> Batch:
        shown = required(batch.demonstration, self, "demonstration")
        return replace(batch, in_statistics=batch.counted & ~shown)
