"""LEVER 1: what multiplies ∇log π. A chain of links `(psi [B, T], batch) -> psi [B, T]`; it starts from the reward to go.

The reward to go at token t is `G_t = reward + Σ_{t' ≥ t} token_reward_t'`; without token rewards it is the
completion's reward R at every token. A completion's total is `R_i = G_{i,first}`. Group statistics run over the
completions that count (`Batch.counted`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from policygrad.core import ragged
from policygrad.core.batch import Batch
from policygrad.core.metrics import Metric
from policygrad.core.protocols import Advantage, State
from policygrad.core.ragged import Groups
from policygrad.errors import ConfigError


def reward_to_go(batch: Batch) -> Tensor:
    """`G_t` [B, T]: where every chain starts. Zero at unsampled positions and for completions without a reward."""
    psi = batch.reward[:, None].expand(batch.mask.shape)
    if batch.token_reward is not None:
        psi = psi + ragged.to_go(ragged.masked(batch.token_reward, batch.mask))
    return ragged.masked(psi, batch.mask)


def totals(batch: Batch) -> Tensor:
    """`R_i` [B]: reward plus the sum of token rewards; 0 for completions that do not count."""
    total = batch.reward
    if batch.token_reward is not None:
        total = total + ragged.masked(batch.token_reward, batch.mask).sum(1)
    return ragged.masked(total, batch.counted)


def no_spread(batch: Batch) -> Tensor:
    """[B] bool; completions of a group whose totals are all equal (max R = min R), or that has one member: Ψ = 0."""
    return Groups(batch.group, batch.counted).no_spread(totals(batch))


def _subtract(psi: Tensor, baseline: Tensor, batch: Batch) -> Tensor:
    """Ψ − b, with b = R_i exactly in a group without spread, so that Ψ is 0 there to the last bit.

    A completion without a counted sibling gets Ψ = 0 at every token: nothing to compare it with, token rewards or not.
    """
    exact = torch.where(no_spread(batch) & batch.counted, totals(batch), baseline)
    siblings = Groups(batch.group, batch.counted).size - batch.counted.long()
    return ragged.masked(psi - exact[:, None], batch.mask & (siblings > 0)[:, None])


@dataclass(frozen=True)
class RunningMean(Advantage):
    """Ψ = R_i − b, b an exponential mean of past batches' rewards, so independent of this batch's actions: unbiased.

    Its memory is {"mean": b, "count": rollouts seen}; before the first rollout b = 0.
    Source: Williams 1992, REINFORCE with a reinforcement baseline.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(
                f"RunningMean.decay must be in [0, 1), not {self.decay}: at 1 the mean never sees a reward"
            )

    @property
    def formula(self) -> str:
        return "R − b,  b = running mean of past rewards"

    def init(self) -> State:
        return {"mean": 0.0, "count": 0}

    def update(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """b ← b + (mean R − b)·(1 − decay)/(1 − decay^n): the exponential mean without its start-up bias."""
        if not bool(batch.counted.any()):
            return state
        mean, count = state["mean"], state["count"] + 1
        new = float(ragged.mean(totals(batch), batch.counted))
        rate = (1 - self.decay) / (1 - self.decay**count)
        return {"mean": mean + rate * (new - mean), "count": count}

    def at(self, state: State) -> Centred:
        return Centred(self.decay, state["mean"])

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        return ragged.masked(psi, batch.mask)


@dataclass(frozen=True)
class Centred(RunningMean):
    """A running mean at one rollout: Ψ = R_i − baseline."""

    baseline: float = 0.0

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        return ragged.masked(psi - self.baseline, batch.mask)


@dataclass(frozen=True)
class BatchMean(Advantage):
    """Ψ = R_i − mean over the batch; it includes R_i, so it scales the gradient by (n − 1)/n."""

    @property
    def formula(self) -> str:
        return "R − mean_batch"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        total = totals(batch)
        exact = torch.where(ragged.no_spread(total, batch.counted), total, ragged.mean(total, batch.counted))
        return ragged.masked(psi - exact[:, None], batch.mask)


@dataclass(frozen=True)
class LeaveOneOut(Advantage):
    """Ψ = R_i − 1/(G−1) Σ_{j≠i} R_j: unbiased, since the baseline does not see R_i. Source: Ahmadian et al. 2024."""

    group_statistic: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return "R_i − mean_{j≠i} R_j"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        groups, total = Groups(batch.group, batch.counted), totals(batch)
        # A completion that is masked from the gradient but counts in the statistics is among its siblings' others.
        others = (groups.size - batch.counted.long()).clamp(min=1)
        return _subtract(psi, (groups.sum(total) - total) / others, batch)


Norm = Literal["exact", "length"]


@dataclass(frozen=True)
class OptimalBaseline(Advantage):
    """Ψ = R_i − b_i, b_i = Σ_j n_j R_j / Σ_j n_j, with or without j = i, for b* = E[R‖s‖²]/E[‖s‖²], s = ∇log π(o) the score.

    Of all baselines that are constant over a completion, b* gives R − b the gradient of least total variance when each
    completion is one action (aggregation `SequenceSum`): E‖(R − b)s‖² is a parabola in b with its minimum there. Estimated
    from a handful of siblings the weights are noise of their own, and the siblings' plain mean (`LeaveOneOut`) can do better.
    Source: Weaver & Tao 2001; Greensmith, Bartlett & Baxter 2004, JMLR 5.
    """

    norm: Norm = "exact"
    """n: exact = ‖s‖², a backward pass per distinct completion.
    length = |o|, which ‖s‖² grows with when tokens' scores are orthogonal and of one size (Hao et al. 2025, OPO)."""
    leave_one_out: bool = True
    """Over the siblings only, so unbiased. False = the plug-in Σ_j n_j R_j / Σ_j n_j as published: it sees R_i, so it is biased."""
    group_statistic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise ConfigError(
                f"OptimalBaseline.norm must be 'exact' (‖∇log π(o)‖², from the learner) or 'length' (|o|), not {self.norm!r}"
            )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Lengths are known; only the exact norms ask something of a learner."""
        return frozenset({"score_norm"} if self.norm == "exact" else ())

    @property
    def formula(self) -> str:
        over, n = ("{j≠i}" if self.leave_one_out else "j"), ("‖∇log π(o)‖²" if self.norm == "exact" else "|o|")
        return f"R_i − Σ_{over} n_j R_j/Σ_{over} n_j,  n = {n}"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        groups, total, n = Groups(batch.group, batch.counted), totals(batch).double(), self._weights(batch)
        over = groups.others if self.leave_one_out else groups.sum
        count, whole = over(torch.ones_like(total)), over(n)
        plain = over(total) / count.clamp(min=1)  # scores of norm 0 all around: no reward weighs more than another
        weighted = over(n * total) / torch.where(whole > 0, whole, 1)
        return _subtract(psi, torch.where(whole > 0, weighted, plain).to(psi.dtype), batch)

    def _weights(self, batch: Batch) -> Tensor:
        """n [B] in float64. A completion that counts in the statistics but is masked from the gradient adds no score: n = 0."""
        if self.norm == "length":
            return batch.lengths.double()
        if batch.score_norm is None:
            raise ConfigError(
                "OptimalBaseline needs Batch.score_norm, ‖∇log π(o)‖² per completion: let a learner fill it "
                "(learner.evaluate with algorithm.needs), or use OptimalBaseline(norm='length')"
            )
        return ragged.masked(batch.score_norm.double(), batch.mask.any(1))


@dataclass(frozen=True)
class GroupMean(Advantage):
    """Ψ = R_i − mean_g = (G−1)/G of leave-one-out. Source: Liu et al. 2025 (Dr. GRPO), sec. 3.2."""

    group_statistic: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return "R_i − mean_g"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        return _subtract(psi, Groups(batch.group, batch.counted).mean(totals(batch)), batch)


@dataclass(frozen=True)
class GroupStd(Advantage):
    """Ψ ← Ψ/(std_g + eps), std over the group's totals. After `GroupMean`: the z-score of Shao et al. 2024 (GRPO), sec. 4.1.2.

    The worked example R = [0, 0, 1, 0] gives [−.5, −.5, 1.5, −.5] up to eps: ddof 1.
    """

    eps: float = 1e-4
    ddof: int = 1
    group_statistic: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return f"/(std_g + {self.eps:g})"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        scale = Groups(batch.group, batch.counted).std(totals(batch), self.ddof) + self.eps
        scale = torch.where(no_spread(batch), torch.ones_like(scale), scale)  # rounding is not spread
        return ragged.masked(psi / scale[:, None], batch.mask)


@dataclass(frozen=True)
class BatchStd(Advantage):
    """Ψ ← Ψ/(std_batch + eps), std of the completions' *centred* advantages over the batch. Source: Magistral 2025, sec. 2.1.

    of 'rewards': the std of the rewards, which has the prompts' unequal difficulty in it. Source: Liu et al. 2025 (Lite PPO).
    """

    eps: float = 1e-4
    ddof: int = 1
    of: Literal["advantages", "rewards"] = "advantages"

    def __post_init__(self) -> None:
        if self.of not in ("advantages", "rewards"):
            raise ConfigError(f"BatchStd.of must be 'advantages' (centred, as Ψ is) or 'rewards', not {self.of!r}")

    @property
    def formula(self) -> str:
        return f"/(std_batch{' R' if self.of == 'rewards' else ''} + {self.eps:g})"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        if self.of == "rewards":
            x, keep = totals(batch), batch.counted
        else:
            x, keep = ragged.first(psi, batch.mask), batch.mask.any(1)
        scale = ragged.std(x, keep, self.ddof) + self.eps
        scale = torch.where(ragged.no_spread(x, keep), torch.ones_like(scale), scale)  # rounding is not spread
        return ragged.masked(psi / scale, batch.mask)
