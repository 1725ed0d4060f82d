"""Filters: decide from the task's score, before any shaping, which completions take part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from policygrad.core.advantages import is_constant_group, total_rewards
from policygrad.core.base import Filter, State
from policygrad.core.batch import Batch
from policygrad.core.masked import Groups
from policygrad.core.metrics import Max, Mean, Metric, Metrics
from policygrad.core.outputs import check_same_batch
from policygrad.core.settings import COUNT, acts_with, check_setting, choice, setting

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


@dataclass(frozen=True)
class GroupFilter(Filter):
    """Base of the filters that drop prompts by their rewards, in one of the three ways that `DropZeroVariance` describes."""

    mode: Literal["refill", "reweight", "drop"] = choice(refill="", reweight="", drop="")
    max_rounds: int = acts_with(setting(4, COUNT), mode="refill")
    keep_leftovers: bool = acts_with(setting(True, ""), mode="refill")
    """With refill: surplus groups start the next step, and π_old/μ corrects for their older weights.
    False: they are discarded, and every sample is from the current policy."""
    uses_group_statistics: ClassVar[bool] = True
    chooses_by_reward: ClassVar[bool] = True

    @property
    def criterion(self) -> str:
        """Which groups are dropped, for the formula."""
        return type(self).__name__

    @property
    def formula(self) -> str:
        how = {"refill": f", ≤ {self.max_rounds} rounds of refill", "reweight": ", the others × 1/(1 − f)", "drop": ""}
        return f"groups with {self.criterion} are dropped{how[self.mode]}"

    @property
    def refills(self) -> bool:  # type: ignore[override]
        return self.mode == "refill"

    @property
    def sampling_rounds(self) -> int:  # type: ignore[override]
        return self.max_rounds if self.refills else 1

    def __call__(self, batch: Batch) -> Batch:
        dropped = self.find_dropped(batch)
        if self.mode == "reweight":
            return reweight_kept(batch, dropped)
        return replace(batch, mask=batch.mask & ~dropped[:, None], in_statistics=batch.counted & ~dropped)


@dataclass(frozen=True)
class DropZeroVariance(GroupFilter):
    """Dynamic sampling: drop groups whose rewards are all equal. Source: Yu et al. 2025 (DAPO), eq. 11.

    mode='refill' samples more prompts until the step is full, at most `max_rounds` times the step's number of prompts; groups
    that are still missing are made up for by reweighting, and reported. mode='reweight' keeps the coefficients of the unfiltered
    step and multiplies them by 1/(1 − f), f the fraction dropped. mode='drop' makes the step and its denominators smaller.
    Source: Khatri et al. 2025 (ScaleRL), arXiv:2510.13786.
    """

    tolerance: float = setting(0.0, "at least 0")
    """Rewards that differ by no more count as equal: for rewards with noise, such as a model's."""

    @property
    def criterion(self) -> str:
        return f"max R − min R ≤ {self.tolerance:g}" if self.tolerance else "max R = min R"

    def find_dropped(self, batch: Batch) -> Tensor:
        if not self.tolerance:
            return is_constant_group(batch)
        groups, total = Groups(batch.group, batch.counted), total_rewards(batch)
        return groups.max(total) + groups.max(-total) <= self.tolerance


@dataclass(frozen=True)
class RewardRange(GroupFilter):
    """Keep groups whose mean reward is between `low` and `high`, and drop the others, as DropZeroVariance does.

    Of rewards of 0 and 1 the range from 0 to 1 drops groups of equal rewards; a narrower one drops prompts that are nearly always
    or nearly never solved, too. Source: OpenRLHF, trainer/ppo_utils/samples_generator.py (--algo.dynamic_filtering_range).
    """

    low: float = setting(0.0, "a finite number")
    high: float = setting(1.0, "a finite number")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting(self, "low", self.low < self.high, f"below RewardRange.high = {self.high}")

    @property
    def criterion(self) -> str:
        return f"mean R ≤ {self.low:g} or ≥ {self.high:g}"

    def find_dropped(self, batch: Batch) -> Tensor:
        mean = Groups(batch.group, batch.counted).mean(total_rewards(batch))
        return ~((self.low < mean) & (mean < self.high))


def apply_filter(part: Filter, batch: Batch) -> Batch:
    """Apply one filter. Raises ConfigError if the batch lacks a field that it needs."""
    for name in sorted(part.needs):
        batch.require(name, part)
    return check_same_batch(part(batch), part, batch)


def reweight_kept(batch: Batch, dropped: Tensor) -> Batch:
    """Give weight 0 to the dropped completions [B] and 1/(1 − f) to the others, with the denominators of the unfiltered step.

    f is the fraction of dropped completions among those with a sampled token.
    """
    in_denominators = batch.mask.any(1)
    remaining = in_denominators & ~dropped
    scale = in_denominators.sum().to(batch.reward.dtype) / remaining.sum().clamp(min=1)  # 1/(1 − f)
    return _multiply_weight(batch, scale * ~dropped)


def _multiply_weight(batch: Batch, factor: Tensor) -> Batch:
    """Multiply `Batch.weight` by a factor per completion [B]."""
    weight = factor[:, None].expand(batch.mask.shape)
    return replace(batch, weight=weight if batch.weight is None else batch.weight * weight)


@dataclass(frozen=True)
class MaskTruncated(Filter):
    """Mask completions that the token budget truncated (overlong filtering). Source: Yu et al. 2025 (DAPO), sec. 3.4.

    keep_in_statistics: their rewards still count in the group statistics.
    """

    keep_in_statistics: bool = False

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if "bootstrap" in algorithm.all_needs:
            yield "bootstrap=True needs truncated completions, and MaskTruncated masks them: remove it, or set bootstrap=False"
        compared = {name for link in algorithm.advantage if link.uses_group_statistics for name in link.needs}
        for name, units in (("turn_state", "turns"), ("step_end", "steps")):
            if self.keep_in_statistics and name in compared:
                yield (
                    f"the advantage compares {units}, and a masked completion has none: set "
                    "MaskTruncated(keep_in_statistics=False)"
                )

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


SEED_STRIDE = 1_000_003
"""Rollouts per seed before its random numbers coincide with the next seed's (a generator takes 32 bits)."""


@dataclass(frozen=True)
class Downsample(Filter):
    """Train on `keep` of a prompt's N completions, or on all if fewer have a reward and a token.

    Its state is {"rollouts": number done}, which with `seed` determines the random numbers, so that a resumed run makes the same
    choices. Source: Xu et al. 2025 (PODS), algorithm 1, with max_variance (algorithm 2) and statistics='kept' (app. A.3).
    """

    keep: int = setting(4, "at least 1", "completion")
    """G ≤ N, N the samples per prompt."""
    by: Literal["random", "max_variance"] = choice(random="", max_variance="")
    """random: with statistics='all' the expected gradient is that of all N.
    max_variance: the subset with the largest variance of rewards (some lowest and some highest), equal rewards in random order."""
    statistics: Literal["all", "kept"] = choice(all="", kept="")
    """all: baseline, scale and critic use all N; dropped completions get weight 0, and the others N/G.
    kept: dropped completions are ignored."""
    seed: int = setting(0, "at least 0")
    """Seed of the random choice."""
    rollout = 0  # of the state; a field only of `FrozenDownsample`

    @property
    def chooses_by_reward(self) -> bool:  # type: ignore[override]
        return self.by == "max_variance"

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if self is not algorithm.filters[-1]:
            yield "Downsample chooses among the completions that the other filters keep: put it last in filters"
        if "demonstration" in algorithm.all_needs:
            yield "Downsample chooses among all completions of a prompt and could drop the demonstration: remove one of the two"

    def find_sampling_conflicts(self, samples_per_prompt: int, temperature: float) -> Iterator[str]:
        if self.keep > samples_per_prompt:
            yield (
                f"Downsample trains on {self.keep} samples per prompt, and there are {samples_per_prompt}: set "
                f"samples_per_prompt to {self.keep} or more, or Downsample.keep to {samples_per_prompt} or less"
            )

    @property
    def formula(self) -> str:
        which = "at random" if self.by == "random" else "of the largest variance of R"
        over = "statistics over all, × N/G" if self.statistics == "all" else "the others ignored"
        return f"G = {self.keep} of a group's N, {which}; {over}"

    def init_state(self) -> State:
        return {"rollouts": 0}

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        return {"rollouts": state["rollouts"] + 1}

    def with_state(self, state: State) -> FrozenDownsample:
        return FrozenDownsample(self.keep, self.by, self.statistics, self.seed, state["rollouts"])

    def choose(self, batch: Batch) -> Tensor:
        """Choose completions, [B] bool."""
        generator = torch.Generator().manual_seed((self.seed * SEED_STRIDE + self.rollout) % 2**32)
        order = torch.rand(len(batch.group), generator=generator).argsort().to(batch.group.device)
        order = order[batch.mask.any(1)[order]]
        chosen = torch.zeros_like(batch.group, dtype=torch.bool)
        for group in set(batch.group[order].tolist()):
            rows = order[batch.group[order] == group]
            by_variance = self.by == "max_variance"
            kept = max_variance_subset(batch.outcomes[rows], self.keep) if by_variance else slice(self.keep)
            chosen[rows[kept]] = True
        return chosen

    def __call__(self, batch: Batch) -> Batch:
        chosen = self.choose(batch)
        if self.statistics == "kept":
            return replace(batch, mask=batch.mask & chosen[:, None], in_statistics=batch.counted & chosen)
        groups, zero = Groups(batch.group, batch.mask.any(1)), torch.zeros_like(batch.reward)
        share = groups.size.to(zero.dtype) / groups.sum(chosen).clamp(min=1)
        return _multiply_weight(batch, torch.where(chosen, share, zero))


@dataclass(frozen=True)
class FrozenDownsample(Downsample):
    """A `Downsample` under a state."""

    rollout: int = 0


def max_variance_subset(reward: Tensor, keep: int) -> Tensor:
    """Return [min(keep, n)] indices of the subset of reward [n] with the largest variance: k lowest and keep − k highest.

    The best of these keep + 1 subsets is the best of all: Xu et al. 2025 (PODS), lemma 3.1.
    """
    order = reward.argsort(stable=True)
    if keep >= len(order):
        return order
    x = reward[order].double()
    x = x - x.mean()
    lowest = [torch.cat([x[:k], x[len(x) - keep + k :]]).var(correction=0) for k in range(keep + 1)]
    k = int(torch.stack(lowest).argmax())
    return torch.cat([order[:k], order[len(order) - keep + k :]])


@dataclass(frozen=True)
class SeparateDemonstrations(Filter):
    """Exclude demonstrations from group statistics, so that samples are compared with samples only."""

    needs: ClassVar[frozenset[str]] = frozenset({"demonstration"})

    formula = "demonstrations out of the statistics"

    def __call__(self, batch: Batch) -> Batch:
        shown = batch.require("demonstration", self)
        return replace(batch, in_statistics=batch.counted & ~shown)


# Curricula: which prompts are sampled at all.


class Curriculum(Filter):
    """A filter that leaves batches unchanged and chooses the prompts of the next rollout."""

    needs: ClassVar[frozenset[str]] = frozenset({"example_id"})

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if any(part.refills for part in algorithm.filters):
            yield (
                f"{type(self).__name__} learns pass rates from a step's groups, and a filter that refills removes some of them "
                "first: set DropZeroVariance(mode='drop'), or remove one of the two"
            )

    def __call__(self, batch: Batch) -> Batch:
        return batch


@dataclass(frozen=True)
class _Excluding(Curriculum):
    excluded_examples: frozenset[int] = frozenset()

    def report(self, batch: Batch) -> Metrics:
        """prompts/excluded: number of excluded prompts."""
        return {"prompts/excluded": Max(float(len(self.excluded_examples)))}


@dataclass(frozen=True)
class NoPositiveResampling(Curriculum):
    """Never sample a prompt again once its completions reach a mean reward of `threshold`.

    Its state is {"solved": ids of those prompts} (`Batch.example_id`). Source: Khatri et al. 2025 (ScaleRL), arXiv:2510.13786.
    """

    threshold: float = setting(0.9, "above 0", hint="it would exclude prompts that are never solved")

    @property
    def formula(self) -> str:
        return f"prompts with mean_g R ≥ {self.threshold:g} are not sampled again"

    def init_state(self) -> State:
        return {"solved": []}

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """Update from the rewards of all samples of a prompt, filtered or not; a failed reward counts as 0."""
        solved = (example for example, rate in _pass_rates(batch, self).items() if rate >= self.threshold)
        return {"solved": sorted({*state["solved"], *solved})}

    def with_state(self, state: State) -> FrozenSolvedFilter:
        return FrozenSolvedFilter(self.threshold, frozenset(state["solved"]))


@dataclass(frozen=True)
class FrozenSolvedFilter(_Excluding, NoPositiveResampling):
    """A `NoPositiveResampling` under a state."""


@dataclass(frozen=True)
class PassRateBand(Curriculum):
    """Skip prompts whose mean reward is not between `low` and `high` for `cooldown` rollouts.

    The cooldown doubles each consecutive time that a prompt is outside the band, up to `max_cooldown`, so that solved and too
    difficult prompts are retried occasionally. The state is {"rollouts": number done, "outside": {example id: [first rollout at
    which it may be sampled again, consecutive times outside]}}. Source: Bae et al. 2025 (arXiv:2504.03380) train on prompts
    between two pass rates; the cooldown is ours.

    """

    low: float = setting(0.0, "a number", unbounded=True)
    high: float = setting(1.0, "a number", unbounded=True)
    cooldown: int = 4
    max_cooldown: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting(self, "low", self.low < self.high, f"below PassRateBand.high = {self.high}")
        possible = f"from 1 to max_cooldown = {self.max_cooldown} rollouts"
        check_setting(self, "cooldown", 1 <= self.cooldown <= self.max_cooldown, possible)

    @property
    def formula(self) -> str:
        pauses = f"{self.cooldown}, {2 * self.cooldown}, …"
        return f"prompts without {self.low:g} < mean_g R < {self.high:g} are skipped for {pauses} rollouts"

    def init_state(self) -> State:
        return {"rollouts": 0, "outside": {}}

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """Update from the rewards of all samples of a prompt, filtered or not; a failed reward counts as 0."""
        now, outside = state["rollouts"] + 1, dict(state["outside"])
        for example, rate in _pass_rates(batch, self).items():
            _, times = outside.pop(str(example), (0, 0))
            if not self.low < rate < self.high:
                outside[str(example)] = [now + min(self.cooldown * 2**times, self.max_cooldown), times + 1]
        return {"rollouts": now, "outside": outside}

    def with_state(self, state: State) -> FrozenPassRateFilter:
        now = state["rollouts"]
        excluded = frozenset(int(example) for example, (until, _) in state["outside"].items() if until > now)
        return FrozenPassRateFilter(self.low, self.high, self.cooldown, self.max_cooldown, excluded)


@dataclass(frozen=True)
class FrozenPassRateFilter(_Excluding, PassRateBand):
    """A `PassRateBand` under a state."""


@dataclass(frozen=True)
class MovingLevel(Curriculum):
    """Adapt the difficulty of a task that has levels: one level up when the mean reward of the last `rollouts` rollouts at the
    current level is at least `up`, one level down when it is at most `down`.

    Its state is {"level": current level, "rates": mean rewards of rollouts at it}. Rollouts that were sampled before the level
    changed do not count. For tasks `curriculum:…`, whose levels are those of reasoning-gym (Stojanovski et al. 2025,
    arXiv:2505.24760); the rule for moving is ours.

    """

    needs: ClassVar[frozenset[str]] = frozenset({"level", "levels"})
    up: float = setting(0.7, "a number", unbounded=True)
    down: float = setting(0.1, "a number", unbounded=True)
    rollouts: int = setting(2, COUNT)
    start: int = setting(0, "at least 0")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting(self, "down", self.down < self.up, f"below MovingLevel.up = {self.up}")

    @property
    def formula(self) -> str:
        return f"a level up at mean R ≥ {self.up:g} over {self.rollouts} rollouts, down at ≤ {self.down:g}"

    def init_state(self) -> State:
        return {"level": self.start, "rates": []}

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """Update from the rewards of all samples at the current level, filtered or not; a failed reward counts as 0."""
        level, last = batch.require("level", self), int(batch.require("levels", self).max()) - 1
        now = min(state["level"], last)
        at_level = (level == now) if batch.demonstration is None else (level == now) & ~batch.demonstration
        if not at_level.any():
            return {"level": now, "rates": list(state["rates"])}
        rates = [*state["rates"], float(batch.outcomes[at_level].double().mean())][-self.rollouts :]
        if len(rates) < self.rollouts:
            return {"level": now, "rates": rates}
        mean = sum(rates) / len(rates)
        moved = now + 1 if mean >= self.up else now - 1 if mean <= self.down else now
        moved = min(max(moved, 0), last)
        return {"level": moved, "rates": rates if moved == now else []}

    def with_state(self, state: State) -> FrozenLevelFilter:
        return FrozenLevelFilter(self.up, self.down, self.rollouts, self.start, state["level"])


@dataclass(frozen=True)
class FrozenLevelFilter(MovingLevel):
    """A `MovingLevel` under a state."""

    task_level: int = 0

    def report(self, batch: Batch) -> Metrics:
        """prompts/level: mean level of the prompts."""
        level = batch.require("level", self).double()
        return {"prompts/level": Mean(float(level.sum()), float(len(level)))}


def _pass_rates(batch: Batch, part: Curriculum) -> dict[int, float]:
    """Return the mean of the task's reward over the samples of each example id; the batch may be shaped."""
    example = batch.require("example_id", part)
    shown = batch.demonstration
    is_sampled = torch.ones_like(batch.reward, dtype=torch.bool) if shown is None else ~shown
    ids, index = torch.unique(example[is_sampled], return_inverse=True)
    count = torch.bincount(index, minlength=len(ids))
    rate = torch.zeros(len(ids), dtype=torch.float64).index_add_(0, index, batch.outcomes[is_sampled].double()) / count
    return dict(zip(ids.tolist(), rate.tolist(), strict=True))
