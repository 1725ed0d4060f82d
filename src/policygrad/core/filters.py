"""Filters look at the task's score, before length or KL shaping, and decide which completions take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from policygrad.core.advantages import no_spread
from policygrad.core.batch import Batch, required
from policygrad.core.metrics import Metric
from policygrad.core.outputs import same_batch
from policygrad.core.protocols import Filter, State
from policygrad.core.ragged import Groups
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class DropNoSpread(Filter):
    """Dynamic sampling: drop groups whose rewards are all equal (all right, all wrong). Source: Yu et al. 2025 (DAPO), eq. 11.

    mode 'refill': keep sampling until the step is full, at most `max_rounds` times the step's prompts; then reweight and report.
    mode 'reweight': keep the coefficients of the unfiltered step and multiply them by 1/(1 − f), f the fraction dropped.
    mode 'drop': the step is smaller, in its denominators too. Source: Khatri et al. 2025 (ScaleRL), arXiv:2510.13786.
    """

    mode: Literal["refill", "reweight", "drop"] = "refill"
    max_rounds: int = 4
    carry: bool = True
    """With refill: groups with spread that a full step has no room for begin the next one; π_old/μ corrects for older weights.
    False = they are thrown away, and every sample is the policy's own."""
    group_statistic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mode not in ("refill", "reweight", "drop"):
            raise ConfigError(f"DropNoSpread.mode must be 'refill', 'reweight' or 'drop', not {self.mode!r}")
        if self.max_rounds < 1:
            raise ConfigError(f"DropNoSpread.max_rounds must be at least 1, not {self.max_rounds}")

    @property
    def formula(self) -> str:
        how = {
            "refill": f", ≤ {self.max_rounds} rounds of refill",
            "reweight": ", the rest × 1/(1 − f)",
            "drop": "",
        }[self.mode]
        return f"groups with max R = min R are dropped{how}"

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
    return same_batch(part(batch), part, batch)


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


SEEDS = 1_000_003
"""Rollouts until a seed's random numbers are the next one's: a generator takes 32 bits."""
Choice = Literal["random", "spread"]
Statistics = Literal["all", "kept"]


@dataclass(frozen=True)
class Downsample(Filter):
    """Of a prompt's N completions `keep` move the policy, or all where fewer have a reward and a token.

    Its memory is {"rollouts": so many are done}: with `seed` it names the random numbers, so that every rollout draws others, and a
    resumed run the same.
    Source: Xu et al. 2025 (PODS), algorithm 1, with spread (algorithm 2) and statistics = kept (app. A.3).

    Raises:
        ConfigError: a setting that means nothing; in a run, more to keep than are sampled.
    """

    keep: int = 4
    """G ≤ N, N being the samples per prompt."""
    by: Choice = "random"
    """random: the gradient's expectation stays that of all N, where statistics = all.
    spread: those with the largest variance of rewards, some lowest and some highest ones; equal rewards in random order."""
    statistics: Statistics = "all"
    """all: the N make the baseline and the scale; who is left out has weight 0, the others N/G: a prompt weighs as before.
    A critic is fitted to all N.
    kept: the others are as if they had not been sampled."""
    seed: int = 0
    """Of the choice alone."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigError(f"Downsample.keep must be at least 1 completion, not {self.keep}")
        for name, value, known in (("by", self.by, Choice), ("statistics", self.statistics, Statistics)):
            if value not in get_args(known):
                raise ConfigError(f"Downsample.{name} must be {' or '.join(map(repr, get_args(known)))}, not {value!r}")
        if self.seed < 0:
            raise ConfigError(f"Downsample.seed must be at least 0, not {self.seed}")

    @property
    def formula(self) -> str:
        which = "at random" if self.by == "random" else "of the largest variance of R"
        over = "statistics over all, × N/G" if self.statistics == "all" else "the others as if not sampled"
        return f"G = {self.keep} of a group's N, {which}; {over}"

    def init(self) -> State:
        return {"rollouts": 0}

    def update(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        return {"rollouts": state["rollouts"] + 1}

    def at(self, state: State) -> Downsampling:
        return Downsampling(self.keep, self.by, self.statistics, self.seed, state["rollouts"])

    def chosen(self, batch: Batch, rollout: int = 0) -> Tensor:
        """[B] bool."""
        generator = torch.Generator().manual_seed((self.seed * SEEDS + rollout) % 2**32)
        order = torch.rand(len(batch.group), generator=generator).argsort().to(batch.group.device)
        order = order[batch.mask.any(1)[order]]
        chosen = torch.zeros_like(batch.group, dtype=torch.bool)
        for group in set(batch.group[order].tolist()):
            rows = order[batch.group[order] == group]
            chosen[rows[most_spread(batch.reward[rows], self.keep)] if self.by == "spread" else rows[: self.keep]] = (
                True
            )
        return chosen

    def __call__(self, batch: Batch) -> Batch:
        return self._kept(batch, self.chosen(batch))

    def _kept(self, batch: Batch, chosen: Tensor) -> Batch:
        if self.statistics == "kept":
            return replace(batch, mask=batch.mask & chosen[:, None], in_statistics=batch.counted & chosen)
        groups, zero = Groups(batch.group, batch.mask.any(1)), torch.zeros_like(batch.reward)
        share = groups.size.to(zero.dtype) / groups.sum(chosen).clamp(min=1)
        weight = torch.where(chosen, share, zero)[:, None].expand(batch.mask.shape)
        return replace(batch, weight=weight if batch.weight is None else batch.weight * weight)


@dataclass(frozen=True)
class Downsampling(Downsample):
    """A down-sampling at one rollout."""

    rollout: int = 0

    def __call__(self, batch: Batch) -> Batch:
        return self._kept(batch, self.chosen(batch, self.rollout))


def most_spread(reward: Tensor, keep: int) -> Tensor:
    """[min(keep, n)] indices of the subset of reward [n] with the largest variance: k lowest and keep − k highest ones.

    Of the keep + 1 such subsets the best is the best of all subsets: Xu et al. 2025 (PODS), lemma 3.1.
    """
    order = reward.argsort(stable=True)
    if keep >= len(order):
        return order
    x = reward[order].double()
    x = x - x.mean()
    subsets = [torch.cat([order[:k], order[len(order) - keep + k :]]) for k in range(keep + 1)]
    ends = [torch.cat([x[:k], x[len(x) - keep + k :]]) for k in range(keep + 1)]
    return subsets[int(torch.stack([end.var(correction=0) for end in ends]).argmax())]


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
