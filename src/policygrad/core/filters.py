"""Filters look at the task's score, before length or KL shaping, and decide which completions take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from policygrad.core.advantages import is_constant_group
from policygrad.core.base import Filter, State
from policygrad.core.batch import Batch, require_field
from policygrad.core.masked import Groups
from policygrad.core.metrics import Max, Mean, Metric, Metrics
from policygrad.core.outputs import check_same_batch
from policygrad.errors import ConfigError


@dataclass(frozen=True)
class DropZeroVariance(Filter):
    """Dynamic sampling: drop groups whose rewards are all equal (all right, all wrong). Source: Yu et al. 2025 (DAPO), eq. 11.

    mode 'refill': keep sampling until the step is full, at most `max_rounds` times the step's prompts; then reweight and report.
    mode 'reweight': keep the coefficients of the unfiltered step and multiply them by 1/(1 − f), f the fraction dropped.
    mode 'drop': the step is smaller, in its denominators too. Source: Khatri et al. 2025 (ScaleRL), arXiv:2510.13786.
    """

    mode: Literal["refill", "reweight", "drop"] = "refill"
    max_rounds: int = 4
    keep_leftovers: bool = True
    """With refill: groups with spread that a full step has no room for begin the next one; π_old/μ corrects for older weights.
    False = they are thrown away, and every sample is the policy's own."""
    uses_group_statistics: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mode not in ("refill", "reweight", "drop"):
            raise ConfigError(f"DropZeroVariance.mode must be 'refill', 'reweight' or 'drop', not {self.mode!r}")
        if self.max_rounds < 1:
            raise ConfigError(f"DropZeroVariance.max_rounds must be at least 1, not {self.max_rounds}")

    @property
    def formula(self) -> str:
        how = {
            "refill": f", ≤ {self.max_rounds} rounds of refill",
            "reweight": ", the rest × 1/(1 − f)",
            "drop": "",
        }[self.mode]
        return f"groups with max R = min R are dropped{how}"

    @property
    def refills(self) -> bool:  # type: ignore[override]
        return self.mode == "refill"

    @property
    def sampling_rounds(self) -> int:  # type: ignore[override]
        return self.max_rounds if self.refills else 1

    def find_dropped(self, batch: Batch) -> Tensor:
        return is_constant_group(batch)

    def __call__(self, batch: Batch) -> Batch:
        dropped = self.find_dropped(batch)
        if self.mode == "reweight":
            return reweight_kept(batch, dropped)
        counted = batch.counted & ~dropped
        return replace(batch, mask=batch.mask & ~dropped[:, None], in_statistics=counted)


def apply_filter(part: Filter, batch: Batch) -> Batch:
    """The batch after one filter. Raises ConfigError for a field that it needs and the batch lacks."""
    for name in sorted(part.needs):
        require_field(getattr(batch, name), part, name)
    return check_same_batch(part(batch), part, batch)


def reweight_kept(batch: Batch, dropped: Tensor) -> Batch:
    """Weight 0 for the dropped [B], 1/(1 − f) for the rest; the denominators stay those of the unfiltered step.

    f is the fraction of completions dropped, among those with a sampled token: groups of unequal size (a completion whose
    reward failed, an overlong mask before) count by what is left of them.
    """
    in_denominators = batch.mask.any(1)
    remaining = in_denominators & ~dropped
    scale = in_denominators.sum().to(batch.reward.dtype) / remaining.sum().clamp(min=1)  # 1/(1 − f)
    weight = (scale * ~dropped)[:, None].expand(batch.mask.shape)
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


SEED_STRIDE = 1_000_003
"""Rollouts until a seed's random numbers are the next one's: a generator takes 32 bits."""
Choice = Literal["random", "max_variance"]
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
        for name, value, choices in (("by", self.by, Choice), ("statistics", self.statistics, Statistics)):
            if value not in get_args(choices):
                raise ConfigError(
                    f"Downsample.{name} must be {' or '.join(map(repr, get_args(choices)))}, not {value!r}"
                )
        if self.seed < 0:
            raise ConfigError(f"Downsample.seed must be at least 0, not {self.seed}")

    @property
    def formula(self) -> str:
        which = "at random" if self.by == "random" else "of the largest variance of R"
        over = "statistics over all, × N/G" if self.statistics == "all" else "the others as if not sampled"
        return f"G = {self.keep} of a group's N, {which}; {over}"

    def init_state(self) -> State:
        return {"rollouts": 0}

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        return {"rollouts": state["rollouts"] + 1}

    def with_state(self, state: State) -> FrozenDownsample:
        return FrozenDownsample(self.keep, self.by, self.statistics, self.seed, state["rollouts"])

    def choose(self, batch: Batch, rollout: int = 0) -> Tensor:
        """[B] bool."""
        generator = torch.Generator().manual_seed((self.seed * SEED_STRIDE + rollout) % 2**32)
        order = torch.rand(len(batch.group), generator=generator).argsort().to(batch.group.device)
        order = order[batch.mask.any(1)[order]]
        chosen = torch.zeros_like(batch.group, dtype=torch.bool)
        for group in set(batch.group[order].tolist()):
            rows = order[batch.group[order] == group]
            chosen[
                rows[max_variance_subset(batch.reward[rows], self.keep)]
                if self.by == "max_variance"
                else rows[: self.keep]
            ] = True
        return chosen

    def __call__(self, batch: Batch) -> Batch:
        return self._apply_choice(batch, self.choose(batch))

    def _apply_choice(self, batch: Batch, chosen: Tensor) -> Batch:
        if self.statistics == "kept":
            return replace(batch, mask=batch.mask & chosen[:, None], in_statistics=batch.counted & chosen)
        groups, zero = Groups(batch.group, batch.mask.any(1)), torch.zeros_like(batch.reward)
        share = groups.size.to(zero.dtype) / groups.sum(chosen).clamp(min=1)
        weight = torch.where(chosen, share, zero)[:, None].expand(batch.mask.shape)
        return replace(batch, weight=weight if batch.weight is None else batch.weight * weight)


@dataclass(frozen=True)
class FrozenDownsample(Downsample):
    """A down-sampling at one rollout."""

    rollout: int = 0

    def __call__(self, batch: Batch) -> Batch:
        return self._apply_choice(batch, self.choose(batch, self.rollout))


def max_variance_subset(reward: Tensor, keep: int) -> Tensor:
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
class SeparateDemonstrations(Filter):
    """Demonstrations take no part in a group's statistics: samples are compared with samples."""

    needs: ClassVar[frozenset[str]] = frozenset({"demonstration"})

    @property
    def formula(self) -> str:
        return "demonstrations out of the statistics"

    def __call__(self, batch: Batch) -> Batch:
        shown = require_field(batch.demonstration, self, "demonstration")
        return replace(batch, in_statistics=batch.counted & ~shown)


# Which prompts are sampled at all: what has been solved need not come again, what is too hard can wait.


class Curriculum(Filter):
    """A filter that takes nothing out of a batch: a rollout passes its prompts over before anything is drawn."""

    needs: ClassVar[frozenset[str]] = frozenset({"example_id"})

    def __call__(self, batch: Batch) -> Batch:
        return batch


@dataclass(frozen=True)
class NoPositiveResampling(Curriculum):
    """A prompt whose completions reach a mean reward of `threshold` is not sampled again, in this epoch or a later one.

    Its memory is {"solved": the numbers of those prompts} (`Batch.example_id`). It takes nothing out of a batch: a rollout passes
    its prompts over before anything is drawn. Source: Khatri et al. 2025 (ScaleRL), arXiv:2510.13786.
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ConfigError(
                f"NoPositiveResampling.threshold is a mean reward and must be above 0, not {self.threshold}: prompts that are "
                "never solved would rest too"
            )

    @property
    def formula(self) -> str:
        return f"prompts with mean_g R ≥ {self.threshold:g} do not come again"

    def init_state(self) -> State:
        return {"solved": []}

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """By the rewards of all that the policy sampled for a prompt, filtered or not; one that failed counts as 0."""
        solved = (number for number, rate in _pass_rates(batch, self).items() if rate >= self.threshold)
        return {"solved": sorted({*state["solved"], *solved})}

    def with_state(self, state: State) -> FrozenSolvedFilter:
        return FrozenSolvedFilter(self.threshold, frozenset(state["solved"]))


@dataclass(frozen=True)
class FrozenSolvedFilter(NoPositiveResampling):
    """The same at one rollout: the prompts that rest."""

    solved: frozenset[int] = frozenset()

    @property
    def excluded_examples(self) -> frozenset[int]:  # type: ignore[override]
        return self.solved

    def report(self, batch: Batch) -> Metrics:
        """prompts/excluded: how many."""
        return {"prompts/excluded": Max(float(len(self.solved)))}


@dataclass(frozen=True)
class PassRateBand(Curriculum):
    """A prompt whose completions' mean reward is not between `low` and `high` rests for `rest` rollouts, and each time in a row
    that it is found outside twice as long, `longest` at most: what is solved and what is too hard comes again, seldom.

    Its memory is {"rollouts": how many there were, "outside": {number of a prompt: [the rollout with which it may come again, how
    often in a row it was outside]}}. Source: Bae et al. 2025 (arXiv:2504.03380), who train on prompts between two pass rates; how
    long the others rest is ours.

    Raises:
        ConfigError: a band without an inside, or a rest that is none.
    """

    low: float = 0.0
    high: float = 1.0
    cooldown: int = 4
    max_cooldown: int = 256

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ConfigError(f"PassRateBand.low must be below PassRateBand.high, not {self.low} and {self.high}")
        if not 1 <= self.cooldown <= self.max_cooldown:
            raise ConfigError(
                f"PassRateBand.cooldown is a number of rollouts from 1 to longest, not {self.cooldown} with longest {self.max_cooldown}"
            )

    @property
    def formula(self) -> str:
        return f"prompts without {self.low:g} < mean_g R < {self.high:g} rest for {self.cooldown}, {2 * self.cooldown}, … rollouts"

    def init_state(self) -> State:
        return {"rollouts": 0, "outside": {}}

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """By the rewards of all that the policy sampled for a prompt, filtered or not; one that failed counts as 0."""
        now, outside = state["rollouts"] + 1, dict(state["outside"])
        for number, rate in _pass_rates(batch, self).items():
            _, times = outside.pop(str(number), (0, 0))
            if not self.low < rate < self.high:
                outside[str(number)] = [now + min(self.cooldown * 2**times, self.max_cooldown), times + 1]
        return {"rollouts": now, "outside": outside}

    def with_state(self, state: State) -> FrozenPassRateFilter:
        now = state["rollouts"]
        waiting = frozenset(int(number) for number, (until, _) in state["outside"].items() if until > now)
        return FrozenPassRateFilter(self.low, self.high, self.cooldown, self.max_cooldown, waiting)


@dataclass(frozen=True)
class FrozenPassRateFilter(PassRateBand):
    """The same at one rollout: the prompts that rest."""

    outside: frozenset[int] = frozenset()

    @property
    def excluded_examples(self) -> frozenset[int]:  # type: ignore[override]
        return self.outside

    def report(self, batch: Batch) -> Metrics:
        """prompts/excluded: how many."""
        return {"prompts/excluded": Max(float(len(self.outside)))}


@dataclass(frozen=True)
class MovingLevel(Curriculum):
    """The difficulty of a task that has levels, moved by how well its prompts are solved: a level up when the mean reward of the
    last `rollouts` rollouts at a level is at least `up`, a level down when it is at most `down`.

    Its memory is {"level": the level, "rates": the mean rewards of rollouts at it so far}. Rollouts that were sampled before
    the level moved (`Run.staleness`) do not count. For tasks `curriculum:…`, whose levels are reasoning-gym's own
    (Stojanovski et al. 2025, arXiv:2505.24760); when to move is ours.

    Raises:
        ConfigError: bounds without a middle, no rollouts, a level below the first.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"level", "levels"})
    up: float = 0.7
    down: float = 0.1
    rollouts: int = 2
    start: int = 0

    def __post_init__(self) -> None:
        if not self.down < self.up:
            raise ConfigError(f"MovingLevel.down must be below MovingLevel.up, not {self.down} and {self.up}")
        if self.rollouts < 1 or self.start < 0:
            raise ConfigError(
                f"MovingLevel.rollouts is a number of rollouts, at least 1, and start a level from 0 on, not {self.rollouts} and "
                f"{self.start}"
            )

    @property
    def formula(self) -> str:
        return f"a level up at mean R ≥ {self.up:g} over {self.rollouts} rollouts, down at ≤ {self.down:g}"

    def init_state(self) -> State:
        return {"level": self.start, "rates": []}

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """By the rewards of all that the policy sampled at the level, filtered or not; one that failed counts as 0."""
        level, last = (
            require_field(batch.level, self, "level"),
            int(require_field(batch.levels, self, "levels").max()) - 1,
        )
        now = min(state["level"], last)
        at_level = (level == now) if batch.demonstration is None else (level == now) & ~batch.demonstration
        if not at_level.any():
            return {"level": now, "rates": list(state["rates"])}
        rates = [*state["rates"], float(batch.reward[at_level].double().mean())][-self.rollouts :]
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
    """The same at one rollout: the level."""

    current_level: int = 0

    @property
    def task_level(self) -> int:  # type: ignore[override]
        return self.current_level

    def report(self, batch: Batch) -> Metrics:
        """prompts/level: the prompts', a mean."""
        level = require_field(batch.level, self, "level").double()
        return {"prompts/level": Mean(float(level.sum()), float(len(level)))}


def _pass_rates(batch: Batch, part: Curriculum) -> dict[int, float]:
    """The mean reward of what the policy sampled, by the prompt's number."""
    example = require_field(batch.example_id, part, "example_id")
    is_sampled = (
        torch.ones_like(batch.reward, dtype=torch.bool) if batch.demonstration is None else ~batch.demonstration
    )
    numbers, index = torch.unique(example[is_sampled], return_inverse=True)
    count = torch.bincount(index, minlength=len(numbers))
    rate = (
        torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, index, batch.reward[is_sampled].double()) / count
    )
    return dict(zip(numbers.tolist(), rate.tolist(), strict=True))
