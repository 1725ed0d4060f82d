"""Reward shaping: turns the task's score into the reward that advantages read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import Shaping, State
from policygrad.core.batch import Batch
from policygrad.core.kl_controllers import AdaptiveBeta, Rule
from policygrad.core.masked import Groups
from policygrad.core.metrics import Metric
from policygrad.core.settings import check_setting, choice, setting
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


@dataclass(frozen=True)
class KLInReward(AdaptiveBeta, Shaping):
    """r_t −= β·u_t with u_t = log π_old − log π_ref, at rollout time: its gradient is that of the sequence KL.

    level='token' subtracts each token's penalty at that token, so that a token is charged for the KL to go. level='sequence' is
    R −= β Σ_t u_t: every token is charged for the completion's full KL. The expected gradients are equal. With a teacher of another
    tokenizer the penalty of a span of text is subtracted at its last token, and unaligned tokens cost nothing.

    Source: token: Stiennon et al. 2020; Ouyang et al. 2022, eq. 2. sequence: Ahmadian et al. 2024 (RLOO), sec. 2.

    Raises:
        ConfigError: a form other than k1 (k2 and k3 in the reward do not give the gradient of the sequence KL), an unknown level,
            or a rule without a target.
    """

    beta: float = setting(0.05, "at least 0")
    form: str = "k1"
    target: float | None = setting(None, "above 0", "nats per token, or None")
    """Target of the mean of u (k1, unbiased) in nats per sampled token; β is adapted to it after each rollout."""
    rule: Rule | None = None
    """How β adapts to the target; None means proportional."""
    level: Literal["token", "sequence"] = choice(
        token="the KL to go", sequence="the completion's full KL at every token"
    )
    """token: the KL to go; sequence: the full KL at every token."""
    needs: ClassVar[frozenset[str]] = frozenset({"logp_old", "logp_ref"})
    compares_spans: ClassVar[bool] = True
    multipliers: ClassVar[tuple[str, ...]] = ("beta",)

    def __post_init__(self) -> None:
        if self.form != "k1":
            raise ConfigError(
                f"KLInReward takes k1 only, not {self.form!r}: as a reward, k2 and k3 do not give the gradient of the "
                "sequence KL. Use form='k1', or KLToReference in the loss"
            )
        super().__post_init__()

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if algorithm.reference is not None and algorithm.reference.templates:
            yield (
                "KLInReward charges every completion, and π_ref with Reference.templates may not have read some: use "
                "KLToReference() in terms, or set templates=()"
            )

    @property
    def formula(self) -> str:
        at = "r_t −= {}·(log π_old − log π_ref)" if self.level == "token" else "R −= {}·Σ_t (log π_old − log π_ref)"
        return at.format(f"{self.beta:g}") + self.describe_target()

    def _u(self, batch: Batch) -> Tensor:
        return -batch.compare_with_reference(batch.require("logp_old", self), self)[0]

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """Adapt β to the mean of u over the rollout's sampled tokens."""
        if not batch.mask.any():
            return state
        return self.adapt(state["beta"], float(masked.mean(self._u(batch), batch.mask)), "proportional")

    def __call__(self, batch: Batch) -> Batch:
        penalty = masked.apply_mask(-self.beta * self._u(batch), batch.mask).to(batch.reward.dtype)
        if self.level == "sequence":
            return replace(batch, reward=batch.reward + penalty.sum(1))
        return replace(batch, token_reward=penalty if batch.token_reward is None else batch.token_reward + penalty)


@dataclass(frozen=True)
class SoftOverlong(Shaping):
    """R += 0 up to L_max − L_cache tokens, then linearly down to −scale at L_max, and −scale beyond.

    length is L_max; None means the batch's width T, and a trainer sets it to its generation budget. cache is L_cache as a fraction
    of L_max. scale is the largest penalty in units of the reward: 1 (DAPO), 0.1 (Magistral 2025, eq. 1).
    Source: Yu et al. 2025 (DAPO), eq. 13.
    """

    length: int | None = setting(None, "at least 1", "token")
    cache: float = setting(0.2, "above 0 and at most 1")
    scale: float = setting(1.0, "above 0", hint="remove the part for no penalty")

    @property
    def formula(self) -> str:
        times = "" if self.scale == 1 else f"{self.scale:g}·"
        ramp = f"min(0, ({1 - self.cache:g}·L − |o|)/({self.cache:g}·L))"
        return f"R += {times}{ramp}, at least −{self.scale:g},  L = {self.length or 'L_max'}"

    def __call__(self, batch: Batch) -> Batch:
        budget = float(batch.mask.shape[1] if self.length is None else self.length)
        length = batch.lengths.to(batch.reward.dtype)
        if batch.truncated is not None:  # also where an overlong mask emptied the completion
            length = torch.where(batch.truncated, budget, length)
        penalty = ((budget - length) / (budget * self.cache) - 1).clamp(-1, 0)  # exactly −1 at the budget
        return replace(batch, reward=batch.reward + self.scale * penalty)


# The task's score on another scale: bounded, normalised by all scores so far, or with a term for length.


@dataclass(frozen=True)
class ClipReward(Shaping):
    """R ← clip(R, low, high), the completion's reward before a KL is subtracted: put it first.

    Source: OpenRLHF, models/utils.py (--reward.clip_range); Ouyang et al. 2022 and TRL's reward_clip_range clip alike.
    """

    low: float = setting(-10.0, "a number", unbounded=True)
    high: float = setting(10.0, "a number", unbounded=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_setting(self, "low", self.low < self.high, f"below ClipReward.high = {self.high}")

    @property
    def formula(self) -> str:
        return f"R ← clip(R, {self.low:g}, {self.high:g})"

    def __call__(self, batch: Batch) -> Batch:
        return replace(batch, reward=batch.reward.clamp(self.low, self.high))


@dataclass(frozen=True)
class RunningScale(Shaping):
    """R ← (R − mean)/(std + eps), mean and std of the task's scores of all rollouts so far, this one included.

    Its state is {"count", "mean", "square"}: scores seen, their mean, and their summed squared deviations from it. Group baselines
    and z-scores undo a shift, and z-scores the scale too; it is for critics, and for rewards beside a KL or a term.
    Source: TRL 0.11, PPOTrainer's use_score_norm and use_score_scaling (`RunningMoments`), with ddof 1.
    """

    center: bool = True
    """Subtract the mean. False: R/(std + eps)."""
    eps: float = setting(1e-7, "at least 0")
    count = 0.0  # of the state; fields only of `FrozenRunningScale`
    mean = 0.0
    square = 0.0

    @property
    def formula(self) -> str:
        return f"R ← {'(R − mean)' if self.center else 'R'}/(std + {self.eps:g}) of all scores so far"

    def init_state(self) -> State:
        return {"count": 0, "mean": 0.0, "square": 0.0}

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        count, mean, square = self.with_state(state)._moments(batch)
        return {"count": count, "mean": mean, "square": square}

    def with_state(self, state: State) -> FrozenRunningScale:
        return FrozenRunningScale(self.center, self.eps, state["count"], state["mean"], state["square"])

    def _moments(self, batch: Batch) -> tuple[float, float, float]:
        """Return (count, mean, summed squares) with this rollout's scores. Source: Chan, Golub & LeVeque 1979, eq. 2.1."""
        scores = batch.outcomes[batch.counted].double()
        if not len(scores):
            return self.count, self.mean, self.square
        new, mean = len(scores), float(scores.mean())
        count, distance = self.count + new, mean - self.mean
        square = self.square + float(((scores - mean) ** 2).sum()) + distance**2 * self.count * new / count
        return count, self.mean + distance * new / count, square

    def __call__(self, batch: Batch) -> Batch:
        count, mean, square = self._moments(batch)
        std = math.sqrt(square / (count - 1)) if count > 1 else 0.0
        scale = std + self.eps if std else 1.0  # the scores have been equal so far
        return replace(batch, reward=(batch.reward - (mean if self.center else 0.0)) / scale)


@dataclass(frozen=True)
class FrozenRunningScale(RunningScale):
    """A `RunningScale` under a state."""

    count: float = 0.0
    mean: float = 0.0
    square: float = 0.0


@dataclass(frozen=True)
class GroupLength(Shaping):
    """R += weight·λ for correct completions and weight·min(0, λ) for others, λ = ½ − (|o| − min_g|o|)/(max_g|o| − min_g|o|).

    The shortest completion of a prompt has λ = ½ and the longest −½; 0 where all are equally long. Correct is a score of at least
    `threshold`. The authors begin without it and add it later: resume a run with it for that.
    Source: Kimi Team 2025 (Kimi k1.5), arXiv:2501.12599, sec. 2.3.3.
    """

    weight: float = setting(0.5, "above 0", hint="remove the part for no penalty")
    """The paper has a weight, and no number for it."""
    threshold: float = 1.0
    uses_group_statistics: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        span = "(|o| − min_g|o|)/(max_g|o| − min_g|o|)"
        return f"R += {self.weight:g}·λ where R ≥ {self.threshold:g}, else {self.weight:g}·min(0, λ),  λ = ½ − {span}"

    def __call__(self, batch: Batch) -> Batch:
        length = batch.lengths.to(batch.reward.dtype)
        groups = Groups(batch.group, batch.mask.any(1))
        shortest, longest = -groups.max(-length), groups.max(length)
        spread = longest - shortest
        rate = 0.5 - (length - shortest) / torch.where(spread > 0, spread, 1)
        rate = torch.where(batch.outcomes >= self.threshold, rate, rate.clamp(max=0))
        bonus = masked.apply_mask(self.weight * rate, batch.mask.any(1) & (spread > 0))
        return replace(batch, reward=batch.reward + bonus)
