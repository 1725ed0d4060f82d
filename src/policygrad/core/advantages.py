"""Advantages (lever 1): a chain of links `(psi [B, T], batch) -> psi [B, T]` that starts from the reward to go.

The reward to go at token t is `G_t = reward + Σ_{t' ≥ t} token_reward_t'`; without token rewards it is the
completion's reward R at every token. A completion's total reward is `R_i = G_{i,first}`. Group statistics are over the
completions that count (`Batch.counted`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import Advantage, Explanation, State, format_term
from policygrad.core.batch import Batch
from policygrad.core.chains import PER_COMPLETION, REWARD_UNIT, TO_GO, Stage
from policygrad.core.masked import Groups, split_by_group
from policygrad.core.metrics import Metric, Metrics, list_means, masked_mean
from policygrad.core.settings import SET, acts_with, choice, setting
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


def reward_to_go(batch: Batch) -> Tensor:
    """Compute `G_t` [B, T], the start of every chain; 0 at unsampled positions."""
    psi = batch.reward[:, None].expand(batch.mask.shape)
    if batch.token_reward is not None:
        psi = psi + masked.reverse_cumsum(masked.apply_mask(batch.token_reward, batch.mask))
    return masked.apply_mask(psi, batch.mask)


def total_rewards(batch: Batch) -> Tensor:
    """Compute `R_i` [B], the reward plus the sum of token rewards; 0 for completions that do not count."""
    total = batch.reward
    if batch.token_reward is not None:
        total = total + masked.apply_mask(batch.token_reward, batch.mask).sum(1)
    return masked.apply_mask(total, batch.counted)


def is_constant_group(batch: Batch) -> Tensor:
    """Mark completions of groups whose total rewards are all equal, or that have one member, [B] bool: Ψ = 0 there."""
    return Groups(batch.group, batch.counted).is_constant(total_rewards(batch))


Within = Literal["group", "peers"]
"""With which completions a part compares one."""


def choose_within() -> Any:
    """Declare the setting `within` of a part that compares completions."""
    return choice(group="all completions of the prompt", peers="those of the prompt with equal `Batch.peers`")


def needs_of(within: Within) -> frozenset[str]:
    """Return the batch fields that a comparison reads."""
    return frozenset({"peers"} if within == "peers" else ())


def compared_groups(batch: Batch, within: Within, part: object) -> Groups:
    """Return the sets of completions that are compared with each other: the groups, or the peers in each group."""
    if within == "group" or not len(batch.group):
        return Groups(batch.group, batch.counted)
    pairs = torch.stack([batch.group.long(), batch.require("peers", part)], 1)
    return Groups(torch.unique(pairs, dim=0, return_inverse=True)[1], batch.counted)


def _subtract(psi: Tensor, baseline: Tensor, batch: Batch, groups: Groups | None = None) -> Tensor:
    """Return Ψ − b, with b = R_i in groups of equal rewards, so that Ψ is exactly 0 there.

    A completion without a counted sibling has nothing to be compared with and gets Ψ = 0 at every token.

    Args:
        groups: the completions that were compared; None: those of each prompt.
    """
    groups = groups or Groups(batch.group, batch.counted)
    exact = _exact_if_constant(baseline, batch, groups)
    return masked.apply_mask(psi - exact[:, None], batch.mask & _has_sibling(batch, groups)[:, None])


def _exact_if_constant(baseline: Tensor, batch: Batch, groups: Groups) -> Tensor:
    """Return b [B], exactly R_i in groups of equal rewards."""
    total = total_rewards(batch)
    return torch.where(groups.is_constant(total) & batch.counted, total.to(baseline.dtype), baseline)


def _has_sibling(batch: Batch, groups: Groups) -> Tensor:
    """Mark completions with another counted completion to compare with, [B] bool."""
    return groups.size - batch.counted.long() > 0


def _mean_of_siblings(batch: Batch, groups: Groups) -> Tensor:
    """Compute mean_{j≠i} R_j [B]; 0 without a sibling."""
    total = total_rewards(batch)
    # A completion that counts in the statistics but is masked from the gradient has all counted ones as siblings.
    return (groups.sum(total) - total) / (groups.size - batch.counted.long()).clamp(min=1)


class Baseline(Advantage):
    """Base of the links that subtract a baseline from the reward."""

    takes: ClassVar[frozenset[Stage]] = TO_GO
    gives: ClassVar[Stage | None] = "centred"


class RewardScale(Advantage):
    """Base of the links that divide by a statistic of the rewards, and so take what has their unit."""

    takes: ClassVar[frozenset[Stage]] = REWARD_UNIT
    gives: ClassVar[Stage | None] = "score"


def _max_of_siblings(groups: Groups, x: Tensor) -> Tensor:
    """Compute max_{j≠i} x_j [B]; −inf without a sibling."""
    highest = groups.max(x)
    is_highest = (x >= highest) & groups.keep
    second = Groups(groups.index, groups.keep & ~is_highest).max(x)
    return torch.where(is_highest & (groups.sum(is_highest) == 1), second, highest)


_NO_MEANS: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class RunningMean(Baseline):
    """Ψ = R_i − b, b an exponential mean of earlier rewards. It does not depend on completion i, so Ψ is unbiased.

    per='rollout': b is the mean up to the rollout before, without start-up bias. per='sample': each completion is compared with the
    mean of those before it, also of its rollout, in the order of the batch, and then enters it: b ← decay·b + (1 − decay)·R_i, from
    b = 0. With by='role', that is role-conditioned advantage estimation. Completions that do not count (`Batch.counted`) change
    nothing. The state is {"mean": b, "count": rollouts seen}, or by role {"means": {role: b}, "counts": {role: rollouts}}.
    Source: Williams 1992, REINFORCE with a reinforcement baseline; by role, Liu et al. 2025 (SPIRAL), arXiv:2506.24119, eq. 2, in
    the order of the authors' code. Algorithm 1 updates b first, and its Ψ is `decay` times this one.
    """

    decay: float = setting(0.9, "in [0, 1)", hint="at 1 the mean never changes")
    by: Literal["all", "role"] = choice(all="one mean", role="a mean for each role of a game")
    per: Literal["rollout", "sample"] = choice(rollout="changes after each rollout", sample="after each completion")
    baseline = 0.0  # of the state; a field only of `FrozenRunningMean`
    means = _NO_MEANS  # likewise

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"role"} if self.by == "role" else ())

    @property
    def formula(self) -> str:
        b, of = ("b_role", " of its role") if self.by == "role" else ("b", "")
        return f"R − {b},  {b} = running mean of past rewards{of}"

    def init_state(self) -> State:
        return {"means": {}, "counts": {}} if self.by == "role" else {"mean": 0.0, "count": 0}

    def update_state(self, state: State, batch: Batch, metrics: Mapping[str, Metric]) -> State:
        """Return the means after a rollout: b ← b + (mean R − b)·(1 − decay)/(1 − decay^n) per rollout, the exponential mean
        without start-up bias; or each completion's update, one after the other."""
        means, counts = _read_means(state)
        roles = self._roles(batch)
        if self.per == "sample":
            means = self._walk(batch, means)[1]
        for role in dict.fromkeys(roles):
            rows = batch.counted & torch.tensor([name == role for name in roles], device=batch.mask.device)
            if not bool(rows.any()):
                continue
            counts[role] = counts.get(role, 0) + 1
            if self.per == "rollout":
                mean, new = means.get(role, 0.0), float(masked.mean(total_rewards(batch), rows))
                rate = (1 - self.decay) / (1 - self.decay ** counts[role])
                means[role] = mean + rate * (new - mean)
        if self.by == "role":
            return {"means": means, "counts": counts}
        return {"mean": means.get("", 0.0), "count": counts.get("", 0)}

    def with_state(self, state: State) -> FrozenRunningMean:
        means = _read_means(state)[0]
        if self.by == "role":
            return FrozenRunningMean(self.decay, self.by, self.per, means=tuple(sorted(means.items())))
        return FrozenRunningMean(self.decay, self.by, self.per, means[""])

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        return masked.apply_mask(psi - self._baselines(batch)[:, None].to(psi.dtype), batch.mask)

    def report(self, batch: Batch) -> Metrics:
        """baseline/ROLE: the mean that a role's completions are compared with, averaged over the rollout."""
        if self.by == "all":
            return {}
        values = zip(self._roles(batch), self._baselines(batch).tolist(), batch.counted.tolist(), strict=True)
        by_role: dict[str, list[float]] = {}
        for role, value, counted in values:
            if counted and role:
                by_role.setdefault(role, []).append(value)
        return list_means({f"baseline/{role}": values for role, values in by_role.items()})

    def _roles(self, batch: Batch) -> list[str]:
        """Return the name of the mean that each completion is compared with."""
        if self.by == "all":
            return [""] * len(batch.mask)
        return [batch.role_names[i] for i in batch.require("role", self).tolist()]

    def _baselines(self, batch: Batch) -> Tensor:
        """Return b for each completion, [B] float64."""
        means = dict(self.means) if self.by == "role" else {"": self.baseline}
        values = [means.get(role, 0.0) for role in self._roles(batch)]
        if self.per == "sample":
            values = self._walk(batch, means)[0]
        return torch.tensor(values, dtype=torch.float64, device=batch.mask.device)

    def _walk(self, batch: Batch, means: Mapping[str, float]) -> tuple[list[float], dict[str, float]]:
        """Return each completion's mean before it, and the means after all of them."""
        current, before = dict(means), list[float]()
        rows = zip(self._roles(batch), total_rewards(batch).tolist(), batch.counted.tolist(), strict=True)
        for role, reward, counted in rows:
            before.append(current.get(role, 0.0))
            if counted:
                current[role] = self.decay * before[-1] + (1 - self.decay) * reward
        return before, current


def _read_means(state: State) -> tuple[dict[str, float], dict[str, int]]:
    """Return a running mean's means and numbers of rollouts by role; "" where there are no roles."""
    if "means" in state:
        return dict(state["means"]), dict(state["counts"])
    return {"": state["mean"]}, {"": state["count"]}


@dataclass(frozen=True)
class FrozenRunningMean(RunningMean):
    """A `RunningMean` under a state: Ψ = R_i − baseline, or the mean of each role."""

    baseline: float = 0.0
    means: tuple[tuple[str, float], ...] = ()
    """The means by role."""


@dataclass(frozen=True)
class BatchMean(Baseline):
    """Ψ = R_i − mean over the batch. The mean includes R_i, which scales the gradient by (n − 1)/n."""

    formula = "R − mean_batch"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        total = total_rewards(batch)
        exact = torch.where(masked.is_constant(total, batch.counted), total, masked.mean(total, batch.counted))
        return masked.apply_mask(psi - exact[:, None], batch.mask)


@dataclass(frozen=True)
class LeaveOneOut(Baseline):
    """Ψ = R_i − 1/(G−1) Σ_{j≠i} R_j: unbiased, since the baseline excludes R_i. Source: Ahmadian et al. 2024."""

    within: Within = choose_within()
    uses_group_statistics: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return needs_of(self.within)

    @property
    def formula(self) -> str:
        return "R_i − mean_{j≠i} R_j" if self.within == "group" else "R_i − mean_{j≠i, peers} R_j"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        groups = compared_groups(batch, self.within, self)
        return _subtract(psi, _mean_of_siblings(batch, groups), batch, groups)

    def explain(self, before: Explanation, rewards: Sequence[float]) -> Explanation | None:
        if self.within != "group" or len(rewards) < 2:
            return None
        return before.subtract([(sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards])


@dataclass(frozen=True)
class OptimalBaseline(Baseline):
    """Ψ = R_i − b_i, b_i = Σ_j n_j R_j / Σ_j n_j, with or without j = i, for b* = E[R‖s‖²]/E[‖s‖²], s = ∇log π(o) the score.

    Of all baselines that are constant over a completion, b* minimises the total variance of the gradient when each completion is
    one action (aggregation `SequenceSum`): E‖(R − b)s‖² is a parabola in b with its minimum there. Estimated from few siblings
    the weights are themselves noisy, and the siblings' plain mean (`LeaveOneOut`) can be better.
    Source: Weaver & Tao 2001; Greensmith, Bartlett & Baxter 2004, JMLR 5.

    norm='logits' has a baseline for every token, the optimal token baseline: Ψ_t = G_t − Σ_j W_t^j G_t^j / Σ_j W_t^j over the
    completions with a t-th sampled token, G_t the reward to go and W_t = Σ_{s≤t} (1 − 2π_s + Σ_a π_a²). The summand is the squared
    norm of the gradient of log π(o_s) by the logits, a forward pass's proxy for the norm by the weights.
    Source: Li et al. 2026 (OTB), arXiv:2602.07078; t counts sampled tokens, as in verl's estimator for several turns.
    """

    norm: Literal["exact", "length", "logits"] = choice(
        exact="‖∇log π(o)‖², from the learner", length="|o|", logits="W_t, for every token"
    )
    """exact: n = ‖s‖², a backward pass per distinct completion.
    length: n = |o|, proportional to ‖s‖² if the tokens' scores are orthogonal and of equal size (Hao et al. 2025, OPO).
    logits: W_t, the sum of the tokens' squared gradient norms by the logits up to the token (Li et al. 2026, OTB)."""
    leave_one_out: bool = True
    """Exclude j = i, which is unbiased. False: the sums over all j as published, biased since they include R_i."""
    uses_group_statistics: ClassVar[bool] = True

    @property
    def gives(self) -> Stage | None:  # type: ignore[override]
        return "tokens" if self.norm == "logits" else "centred"

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        reads = {"exact": {"grad_logp_sq_norm"}, "logits": {"logp_old", "sum_pi_squared"}}
        return frozenset(reads.get(self.norm, ()))

    @property
    def formula(self) -> str:
        over = "{j≠i}" if self.leave_one_out else "j"
        if self.norm == "logits":
            return f"G_t − Σ_{over} W_t^j G_t^j/Σ_{over} W_t^j,  W_t = Σ_{{s≤t}} (1 − 2π_s + Σ_a π_a²)"
        n = "‖∇log π(o)‖²" if self.norm == "exact" else "|o|"
        return f"R_i − Σ_{over} n_j R_j/Σ_{over} n_j,  n = {n}"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        if self.norm == "logits":
            return self._subtract_per_token(psi, batch)
        groups, total = Groups(batch.group, batch.counted), total_rewards(batch).double()
        if self.norm == "length":
            n = batch.lengths.double()
        elif batch.grad_logp_sq_norm is None:
            raise ConfigError(
                "OptimalBaseline needs Batch.grad_logp_sq_norm, ‖∇log π(o)‖² per completion: let a learner fill it "
                "(learner.evaluate with algorithm.needs), or use OptimalBaseline(norm='length')"
            )
        else:  # 0 for a completion that counts in the statistics but is masked from the gradient
            n = masked.apply_mask(batch.grad_logp_sq_norm.double(), batch.mask.any(1))
        return _subtract(psi, self._weighted_mean(groups, total, n).to(psi.dtype), batch)

    def _weighted_mean(self, groups: Groups, x: Tensor, weight: Tensor) -> Tensor:
        """Mean of x over each group, with or without the completion itself; the plain mean where all weights are 0."""
        over = groups.sum_excluding_self if self.leave_one_out else groups.sum
        count, total_weight = over(torch.ones_like(x)), over(weight)
        plain = over(x) / count.clamp(min=1)
        weighted = over(weight * x) / torch.where(total_weight > 0, total_weight, 1)
        return torch.where(total_weight > 0, weighted, plain)

    def _subtract_per_token(self, psi: Tensor, batch: Batch) -> Tensor:
        """Return G_t − B_t, G_t being the chain's Ψ so far.

        Where no other completion is as long, leaving one out has none to average over and takes the mean of the others' total
        rewards. With the completion itself B_t = G_t there, so Ψ_t = 0.
        """
        mask, counted = batch.mask, batch.counted[:, None].expand(batch.mask.shape)
        of_squares = batch.require("logp_old", self) if batch.logp_learner is None else batch.logp_learner
        logp = masked.apply_mask(of_squares, mask).double()
        squares = masked.apply_mask(batch.require("sum_pi_squared", self), mask).double()
        # 1 − 2π + Σ_a π_a² without cancellation: (1 − π)² of the token, and the squares of all others
        norm = logp.expm1().square() + (squares - (2 * logp).exp()).clamp(min=0)
        energy = masked.apply_mask(norm, mask).cumsum(1)
        index = mask.cumsum(1) - 1
        same_place = Groups((batch.group[:, None] * mask.shape[1] + index)[mask], counted[mask])
        G, W = psi.double()[mask], energy[mask]
        baseline = self._weighted_mean(same_place, G, W)
        # exactly 0 where all are equal
        baseline = torch.where(same_place.is_constant(G) & counted[mask], G, baseline)
        num_compared = same_place.size - counted[mask].long() * self.leave_one_out
        groups = Groups(batch.group, batch.counted)
        beyond = (
            _exact_if_constant(_mean_of_siblings(batch, groups), batch, groups)
            .double()[:, None]
            .expand(mask.shape)[mask]
        )
        baseline = torch.where(num_compared > 0, baseline, beyond)
        per_token = torch.zeros_like(psi).masked_scatter(mask, (G - baseline).to(psi.dtype))
        return masked.apply_mask(per_token, mask & _has_sibling(batch, groups)[:, None])


@dataclass(frozen=True)
class GroupMean(Baseline):
    """Ψ = R_i − mean_g, which is (G−1)/G times leave-one-out. Source: Liu et al. 2025 (Dr. GRPO), sec. 3.2.

    within='peers' takes the mean over the comparable completions of the prompt: those of one role, or the attempts at one
    proposed problem. Source: prime-rl's hierarchical_grpo, https://github.com/PrimeIntellect-ai/prime-rl, docs/algorithms.md.
    """

    within: Within = choose_within()
    uses_group_statistics: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return needs_of(self.within)

    @property
    def formula(self) -> str:
        return "R_i − mean_g" if self.within == "group" else "R_i − mean_peers"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        groups = compared_groups(batch, self.within, self)
        return _subtract(psi, groups.mean(total_rewards(batch)), batch, groups)

    def explain(self, before: Explanation, rewards: Sequence[float]) -> Explanation | None:
        if self.within != "group" or len(rewards) < 2:
            return None
        mean = statistics.fmean(rewards)
        return before.subtract([mean] * len(rewards), ("mean", mean))


@dataclass(frozen=True)
class GroupStd(RewardScale):
    """Ψ ← Ψ/(std_g + eps), std of the group's total rewards. After `GroupMean` it is the z-score of Shao et al. 2024 (GRPO),
    sec. 4.1.2.

    The worked example R = [0, 0, 1, 0] gives [−.5, −.5, 1.5, −.5] up to eps: ddof 1.

    With `leave_one_out` the std is that of the other completions, as `LeaveOneOut` compares with their mean; where they are all
    equal, or too few for ddof, Ψ is not divided. Source: NeMo-RL, algorithms/utils.py (`calculate_baseline_and_std_per_prompt`).
    """

    eps: float = setting(1e-4, "at least 0")
    ddof: int = setting(1, "0 or 1")
    within: Within = choose_within()
    leave_one_out: bool = False
    """The std of the other completions."""
    uses_group_statistics: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return needs_of(self.within)

    @property
    def formula(self) -> str:
        of = "g" if self.within == "group" else "peers"
        return f"/(std_{f'{{j≠i, {of}}}' if self.leave_one_out else of} + {self.eps:g})"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        groups, total = compared_groups(batch, self.within, self), total_rewards(batch)
        if self.leave_one_out:
            scale, is_constant = self._std_of_siblings(groups, total)
        else:
            scale, is_constant = groups.std(total, self.ddof), groups.is_constant(total)
        scale = torch.where(is_constant, torch.ones_like(scale), scale + self.eps)  # ignore rounding
        return masked.apply_mask(psi / scale[:, None], batch.mask)

    def _std_of_siblings(self, groups: Groups, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the std over j ≠ i and where it is 0, each [B]."""
        others = groups.size - groups.keep.long()
        x = total - groups.mean(total)
        mean = groups.sum_excluding_self(x) / others.clamp(min=1)
        square = groups.sum_excluding_self(x**2) - others * mean**2
        std = (square.clamp(min=0) / (others - self.ddof).clamp(min=1)).sqrt()
        low, high = -_max_of_siblings(groups, -total), _max_of_siblings(groups, total)
        return std, (others <= self.ddof) | (low >= high)

    def explain(self, before: Explanation, rewards: Sequence[float]) -> Explanation | None:
        n, mean = len(rewards), statistics.fmean(rewards)
        if self.within != "group" or self.leave_one_out or n <= self.ddof:
            return None
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (n - self.ddof))
        return before if len(set(rewards)) == 1 else before.divide(deviation + self.eps, ("deviation", deviation))


@dataclass(frozen=True)
class BatchStd(Advantage):
    """Ψ ← Ψ/(std_batch + eps), std of the completions' *centred* advantages over the batch. Source: Magistral 2025, sec. 2.1.

    of='rewards' takes the std of the rewards, which includes differences between prompts. Source: Liu et al. 2025 (Lite PPO).
    """

    eps: float = setting(1e-4, "at least 0")
    ddof: int = setting(1, "0 or 1")
    of: Literal["advantages", "rewards"] = choice(advantages="the centred Ψ", rewards="")

    gives: ClassVar[Stage | None] = "score"

    @property
    def takes(self) -> frozenset[Stage]:  # type: ignore[override]
        return REWARD_UNIT if self.of == "rewards" else PER_COMPLETION

    @property
    def formula(self) -> str:
        return f"/(std_batch{' R' if self.of == 'rewards' else ''} + {self.eps:g})"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        if self.of == "rewards":
            x, keep = total_rewards(batch), batch.counted
        else:
            x, keep = masked.first_valid(psi, batch.mask), batch.mask.any(1)
        scale = masked.std(x, keep, self.ddof) + self.eps
        scale = torch.where(masked.is_constant(x, keep), torch.ones_like(scale), scale)  # ignore rounding
        return masked.apply_mask(psi / scale, batch.mask)


# Baselines from outside the group: the reward of the greedy completion, the optimal value, and a constant.


@dataclass(frozen=True)
class GreedyBaseline(Baseline):
    """Ψ = R_i − R(ō), ō the greedy completion of the same prompt. It is independent of o_i, so Ψ is unbiased.

    Each prompt needs one more generation, which is scored but not trained on. If its reward failed (NaN), Ψ = 0.
    Source: Li et al. 2023 (ReMax), arXiv:2310.10505, algorithm 1.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"baseline"})

    formula = "R − R(ō),  ō the greedy completion"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        return _subtract_baseline(psi, batch, self)


def _subtract_baseline(psi: Tensor, batch: Batch, part: Advantage) -> Tensor:
    """Return Ψ less the prompt's baseline; 0 where that is NaN."""
    baseline = batch.require("baseline", part).to(psi.dtype)[:, None]
    return masked.apply_mask(psi - baseline, batch.mask & baseline.isfinite())


@dataclass(frozen=True)
class OptimalValue(Baseline):
    """Ψ = R_i − V*(x), V*(x) = β·log E_{o∼π_ref}[exp(R(o)/β)]: the value of the best policy under a KL penalty β to π_ref.

    V* is estimated once, before the first update, from `samples` completions of each training prompt. A run trains on its first
    `prompts` prompts, over and over. If no completion of a prompt has a reward (NaN), Ψ = 0.
    Source: Brantley et al. 2025 (A*-PO), arXiv:2505.20686, and the authors' code.
    """

    samples: int = setting(8, "at least 1")
    """Completions of the initial policy per prompt, from which V* is estimated."""
    beta: float = setting(0.5, "above 0")
    """β of V*: towards 0 it is the best of the rewards, towards ∞ their mean."""
    prompts: int | None = setting(None, "at least 1", "or None")
    """Number of training prompts; None: all of the data, but no more than the run's steps take."""
    needs: ClassVar[frozenset[str]] = frozenset({"baseline"})
    providers: ClassVar[tuple[str, ...]] = ("policygrad.rollout.optimal_values:OptimalValues",)

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if levels := [type(part).__name__ for part in algorithm.filters if "level" in part.needs]:
            yield f"OptimalValue is estimated for the prompts of one level, and {levels[0]} moves to others: remove one of the two"
        if refilling := [type(part).__name__ for part in algorithm.filters if part.refills]:
            yield (
                f"OptimalValue is estimated for a fixed set of prompts, and {refilling[0]} replaces some by further ones: set "
                "DropZeroVariance(mode='drop'), or remove one of the two"
            )
        if (reference := algorithm.reference) is not None and "logp_ref" in algorithm.all_needs:
            refreshes = "refresh_every or refresh_after_stall" if reference.refreshes else ""
            if differs := reference.deviation or refreshes or ("another model" if reference.models else ""):
                yield (
                    "OptimalValue is estimated with the initial policy, which π_ref must then be, and Reference has "
                    f"{differs}: unset it, or use GreedyBaseline() or LeaveOneOut()"
                )

    @property
    def formula(self) -> str:
        return f"R − V*,  V* = {self.beta:g}·log mean_j exp(r_j/{self.beta:g}) over {self.samples} completions of π_ref"

    @property
    def extra_samples(self) -> str:
        return f"{self.samples} completions of every training prompt, before the first update"

    def value_prompts(self, logp_ref: Tensor, reward: Tensor) -> Tensor:
        return self.beta * (logp_ref + reward / self.beta).logsumexp(1)

    def estimate_value(self, rewards: Sequence[float]) -> float:
        """Return V* of a prompt, given the rewards of its completions; NaN without any."""
        if not rewards:
            return math.nan
        scaled = torch.tensor(rewards, dtype=torch.float64) / self.beta
        return self.beta * (float(scaled.logsumexp(0)) - math.log(len(rewards)))

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        return _subtract_baseline(psi, batch, self)


@dataclass(frozen=True)
class ConstantBaseline(Advantage):
    """Ψ ← Ψ − value. On-policy a constant does not change the expected gradient. Off-policy it sets the balance between learning
    from success and from failure; below the mean reward success dominates.

    After `GroupMean` with value = δV: Ψ = R_i − (mean_g + δV), Arnal et al. 2025 (AsymRE), arXiv:2506.20520. Alone, R_i − c: the
    baseline of Le Roux et al. 2025 (TOPR), arXiv:2503.14286, whose rewards of ±1 correspond to 0 and 1 around ½.
    """

    value: float = setting(0.5, "a finite number")

    @property
    def formula(self) -> str:
        return f"− {self.value:g}" if self.value >= 0 else f"+ {-self.value:g}"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        return masked.apply_mask(psi - self.value, batch.mask & batch.counted[:, None])

    def explain(self, before: Explanation, rewards: Sequence[float]) -> Explanation | None:
        return before.subtract([self.value] * len(rewards))


# Objectives other than the mean reward: the likelihood of success, pass@k, the likelihood of accepted completions.


@dataclass(frozen=True)
class DivideByGroupMean(RewardScale):
    """Ψ ← Ψ/mean_g. After `GroupMean`: (R_i − mean_g)/mean_g, maximum likelihood of success.

    For rewards of 0 and 1 and success probability p, log p = −Σ_k (1 − p)^k/k, so ∇log p = Σ_k 1/k ∇pass@k. The mean score of the
    correct ones among G samples is an unbiased estimate of the first G terms. Minus the mean score of all samples, and 0 where
    none is correct (Ψ = 0 where mean_g ≤ 0), it estimates the first G − 1. Other rewards must be at least 0. Source: Tajwar et
    al. 2026 (MaxRL), arXiv:2602.02710.

    Raises:
        ConfigError: a reward below 0, of a completion that counts.
    """

    uses_group_statistics: ClassVar[bool] = True

    formula = "/mean_g,  0 where mean_g ≤ 0"

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if shaping := " and ".join(type(part).__name__ for part in algorithm.shaping):
            yield (
                f"DivideByGroupMean maximises the likelihood of success, and {shaping} would make rewards negative: set shaping=() "
                "and add KLToReference() to terms, or replace DivideByGroupMean by GroupStd()"
            )

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        total = total_rewards(batch)
        if bool((below := total < 0).any()):
            row = int(below.nonzero()[0])
            raise ConfigError(
                f"DivideByGroupMean maximises the likelihood of success, and the reward of row {row} is {float(total[row]):g}: use "
                "a reward of at least 0, such as 1 for correct and 0 otherwise, or an algorithm for any reward, such as grpo"
            )
        mean = Groups(batch.group, batch.counted).mean(total)
        positive = mean > 0
        return masked.apply_mask(psi / torch.where(positive, mean, 1)[:, None], batch.mask & positive[:, None])

    def explain(self, before: Explanation, rewards: Sequence[float]) -> Explanation | None:
        mean = statistics.fmean(rewards)
        return before.divide(mean) if mean > 0 else None


@dataclass(frozen=True)
class PassAtK(Advantage):
    """Ψ_i = (E[max of k | i among them] − R̄)/(σ + eps): the advantage for pass@k, exact over all k-subsets of the group.

    R̄ and σ are the mean and standard deviation of a k-subset's largest reward. With c of G rewards 1 and the others 0,
    R̄ = 1 − C(G−c, k)/C(G, k), σ = √(R̄(1 − R̄)), and Ψσ is 1 − R̄ for correct completions and 1 − R̄ − C(G−c−1, k−1)/C(G−1, k−1) for
    incorrect ones; k = 1 is the z-score with ddof 0. Other rewards count by their order. Ψ = 0 where all k-subsets have the same
    maximum, and in groups with fewer than k counted completions. Source: Chen et al. 2025 (pass@k training), arXiv:2508.10751,
    the analytical derivation.
    """

    k: int = setting(4, "at least 1", hint="pass@1 is the mean reward")
    eps: float = acts_with(setting(1e-6, "at least 0"), normalise=SET)
    normalise: bool = True
    """Divide by σ.
    False: G/k times the unbiased pass@k gradient with a group baseline, Walder & Karkhanis 2025 (PKPO), arXiv:2505.15201."""
    uses_group_statistics: ClassVar[bool] = True
    starts_chain: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "score"

    def find_sampling_conflicts(self, samples_per_prompt: int, temperature: float) -> Iterator[str]:
        if samples_per_prompt <= self.k:
            yield (
                f"PassAtK(k={self.k}) compares {self.k}-subsets of a prompt's samples, and {samples_per_prompt} samples have at "
                f"most one: set samples_per_prompt to {self.k + 1} or more, or a smaller k"
            )

    @property
    def formula(self) -> str:
        over = f"/(σ + {self.eps:g})" if self.normalise else ""
        return f"(E[max of {self.k} | i among them] − R̄){over},  R̄, σ of the max of {self.k} of the group"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        total, counted, k = total_rewards(batch), batch.counted, self.k

        def shares(n: int, offset: int, chosen: int, subsets: int) -> Tensor:
            """C(j − offset, chosen)/subsets for j = 1 … n, [n]."""
            return total.new_tensor(
                [comb(j - offset, chosen) / subsets if j >= offset else 0.0 for j in range(1, n + 1)]
            )

        size = Groups(batch.group, counted).size
        out = torch.zeros_like(total)
        for n in sorted({n for n in size[counted].tolist() if n >= k}):
            rows = (counted & (size == n)).nonzero().squeeze(1)
            rows = rows[total[rows].argsort(stable=True)]
            rows = rows[batch.group[rows].argsort(stable=True)].view(-1, n)
            reward = total[rows]  # [groups, n], ascending: the j-th is the maximum of C(j−1, k−1) of C(n, k) subsets
            largest, with_i = shares(n, 1, k - 1, comb(n, k)), comb(n - 1, k - 1)
            mean = (reward @ largest)[:, None]
            as_largest = reward * shares(n, 1, k - 1, with_i)
            above = reward * shares(n, 2, k - 2, with_i) if k > 1 else torch.zeros_like(reward)
            psi = as_largest + masked.reverse_cumsum(above) - above - mean
            if self.normalise:
                psi = psi / (((reward - mean) ** 2 @ largest).sqrt()[:, None] + self.eps)
            one_maximum = reward[:, k - 1] >= reward[:, -1]
            out[rows] = masked.apply_mask(psi, ~one_maximum[:, None])
        return masked.apply_mask(out[:, None], batch.mask)


@dataclass(frozen=True)
class MarginalMax(Advantage):
    """Ψ_i = max_j R_j − max_{j≠i} R_j: what completion i adds to the best of its group, the pass@k objective for k = G.

    Only a best completion without an equal has Ψ ≠ 0, its lead over the second. The maximum of the others is a baseline that does
    not depend on completion i, so the gradient of E[max_j R_j] is unbiased. `PassAtK` estimates smaller k from all subsets.
    verl's grpo_passk divides by the group's std: (MarginalMax(), GroupStd(eps=1e-6)).
    Source: Tang et al. 2025 (inference-time objectives), arXiv:2503.19595, the leave-one-out control variate; verl,
    trainer/ppo/core_algos.py (`compute_grpo_passk_outcome_advantage`).
    """

    starts_chain: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "centred"
    uses_group_statistics: ClassVar[bool] = True

    formula = "max_g R − max_{j≠i} R_j"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        groups, total = Groups(batch.group, batch.counted), total_rewards(batch)
        lead = groups.max(total) - _max_of_siblings(groups, total)
        has_sibling = batch.counted & _has_sibling(batch, groups)
        return masked.apply_mask(masked.apply_mask(lead, has_sibling)[:, None], batch.mask)

    def explain(self, before: Explanation, rewards: Sequence[float]) -> Explanation | None:
        if len(rewards) < 2:
            return None
        best = max(rewards)
        others = [max(*rewards[:i], *rewards[i + 1 :], -math.inf) for i in range(len(rewards))]
        values = tuple(best - other for other in others)
        return Explanation(
            values, tuple(f"({format_term(best)} − {format_term(x)})" for x in others), (("maximum", best),)
        )


@dataclass(frozen=True)
class RejectionSampling(Advantage):
    """Ψ = 1 for an accepted completion, else 0: the likelihood of accepted completions.

    The threshold is one of the task's reward (`Batch.outcomes`), whatever shaping does; the best of a prompt is that of the shaped
    rewards, as in RAFT with a KL in the reward.
    Source: Xiong et al. 2025, arXiv:2504.11343 (correct ones); Dong et al. 2023 (RAFT), arXiv:2304.06767 (the best of each prompt).
    """

    keep: Literal["right", "best"] = choice(right="R_i ≥ threshold", best="the best of each prompt")
    """right: R_i ≥ threshold; best: R_i = max_g R, including ties."""
    threshold: float = acts_with(setting(1.0, "a finite number"), keep="right")
    starts_chain: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "score"

    @property
    def uses_group_statistics(self) -> bool:  # type: ignore[override]
        return self.keep == "best"

    @property
    def formula(self) -> str:
        return f"1 where R ≥ {f'{self.threshold:g}' if self.keep == 'right' else 'max_g R'}, else 0"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        total, counted = total_rewards(batch), batch.counted
        is_best = total >= Groups(batch.group, counted).max(total)
        accepted = batch.outcomes >= self.threshold if self.keep == "right" else is_best
        return masked.apply_mask((accepted & counted).to(total.dtype)[:, None], batch.mask)


@dataclass(frozen=True)
class ClassLabels(Advantage):
    """Ψ = ±G/(1 + n_±): the rewards as labels, + for R ≥ threshold and − below it, n_± the group's samples with the same label.

    The rewards are the task's, whatever shaping does (`Batch.outcomes`). A group with one label only gives Ψ = 0, as in the
    authors' code. With `ClassificationWeight` it is the gradient of τ times the
    in-group classification loss. G is the group's size, which makes `SequenceMean` a mean over prompts.
    Source: Zhai et al. 2026 (REAL), arXiv:2602.05630.
    """

    threshold: float = 1.0
    starts_chain: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "score"
    uses_group_statistics: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return f"G/(1 + n_+) where R ≥ {self.threshold:g}, else −G/(1 + n_−);  0 where a group has one of the two only"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        total, counted = total_rewards(batch), batch.counted
        positive = batch.outcomes >= self.threshold
        groups = Groups(batch.group, counted)
        num_positive = groups.sum(positive)
        num_negative = groups.size - num_positive
        same_label = torch.where(positive, num_positive, num_negative).to(total.dtype)
        label = torch.where(positive, 1.0, -1.0).to(total.dtype) * groups.size / (1 + same_label)
        both = (num_positive > 0) & (num_negative > 0) & counted
        return masked.apply_mask(label[:, None].expand(batch.mask.shape), batch.mask & both[:, None])


@dataclass(frozen=True)
class PreferencePairs(Advantage):
    """Ψ_i = 2β/(G − 1)·Σ_j ±σ(∓β(h_i − h_j)), + where R_i > R_j, − where R_i < R_j; h the completion's log π_old/π_ref.

    The gradient of DPO's loss −log σ(β(h_right − h_wrong)) for samples of the policy itself, the mean over the prompt's pairs; the
    rewards only say which of two is preferred, and a pair with equal ones adds 0. A pair that the policy already tells apart by
    more than π_ref does counts little: that is the penalty for leaving π_ref. With `SequenceSum`, two samples and one update per
    rollout, as Ψ is of π_old, it is online DPO.
    Source: Guo et al. 2024 (OAIF), arXiv:2402.04792, algorithm 1, with the loss of Rafailov et al. 2023 (DPO), eq. 7; for two
    samples as in TRL, experimental/online_dpo/online_dpo_trainer.py.
    """

    beta: float = setting(0.1, "above 0")
    """β of the KL to π_ref whose best policy the preferences are taken to describe."""
    needs: ClassVar[frozenset[str]] = frozenset({"logp_old", "logp_ref"})
    starts_chain: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "score"
    uses_group_statistics: ClassVar[bool] = True

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if algorithm.reference is not None and algorithm.reference.templates:
            yield (
                "PreferencePairs compares all completions of a prompt with π_ref, which may not have read some with "
                "Reference.templates: set templates=()"
            )

    @property
    def formula(self) -> str:
        return (
            f"{2 * self.beta:g}·mean_{{j≠i}} ±σ(∓{self.beta:g}(h_i − h_j)), + where R_i>R_j;  h = Σ_t log π_old/π_ref"
        )

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        total = total_rewards(batch)
        change = masked.apply_mask(batch.require("logp_old", self) - batch.require("logp_ref", self), batch.mask)
        h, compared = change.sum(1).to(total.dtype), batch.counted & batch.mask.any(1)
        value = torch.zeros_like(total)
        for rows in split_by_group(compared.nonzero().flatten(), batch.group):
            sign = (total[rows, None] - total[rows]).sign()
            pulls = sign * torch.sigmoid(-sign * self.beta * (h[rows, None] - h[rows]))
            value[rows] = 2 * self.beta * pulls.sum(1) / max(1, len(rows) - 1)
        return masked.apply_mask(value[:, None], batch.mask)


# Several reward functions: each is normalised within its group before they are summed.


@dataclass(frozen=True)
class RewardZScores(Advantage):
    """Ψ_i = Σ_k w_k (r_{k,i} − mean_g r_k)/(std_g r_k + eps) over the reward functions k, w_k their weights.

    It distinguishes completions with equal sums of rewards, such as a long correct and a short incorrect one. A reward that is
    constant over its group adds exactly 0. A missing reward (NaN) adds 0 and is left out of the statistics. `BatchStd` after it is
    the paper's normalisation over the batch, whose mean is already 0. Source: Liu et al. 2026 (GDPO), arXiv:2601.05242.

    Raises:
        ConfigError: a batch without rewards per function, or with token rewards, which would be ignored.
    """

    eps: float = setting(1e-4, "at least 0")
    ddof: int = setting(1, "0 or 1")
    needs: ClassVar[frozenset[str]] = frozenset({"rewards"})
    starts_chain: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "score"
    uses_group_statistics: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return f"Σ_k w_k (r_k − mean_g r_k)/(std_g r_k + {self.eps:g})"

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        rewards = batch.require("rewards", self)
        if batch.token_reward is not None:
            raise ConfigError(
                "RewardZScores reads one number per completion and reward function and would ignore Batch.token_reward: remove the "
                "process rewards, or use grpo_process"
            )
        weights = batch.reward_weights or (1.0,) * rewards.shape[1]
        total = torch.zeros_like(batch.reward)
        for k, weight in enumerate(weights):
            r = rewards[:, k]
            has_reward = batch.counted & ~r.isnan()
            groups = Groups(batch.group, has_reward)
            scaled = (r - groups.mean(r)) / (groups.std(r, self.ddof) + self.eps)
            z = masked.apply_mask(scaled, has_reward & ~groups.is_constant(r))
            total = total + weight * z.to(total.dtype)
        return masked.apply_mask(total[:, None].expand(batch.mask.shape), batch.mask)


# Distillation: a teacher's log-probabilities of the sampled tokens.


@dataclass(frozen=True)
class TeacherLogRatio(Advantage):
    """Ψ_t = coefficient·Σ_{s≥t} discount^{s−t}·log(π_T/π_old)_s over sampled tokens: minus a sampled estimate of the reverse KL.

    π_T is the reference, a teacher, at the sampling temperature. With discount 0, E Ψ_t ∇log π is −∇KL(π_θ‖π_T) in each visited
    state, for fixed visits (`ExactKLToReference` computes it over the full vocabulary). With discount 1 it is that of full
    completions. Rewards are not read.

    With a teacher of another tokenizer (`Reference.tokenizer`) s are spans of text, and all tokens of a span have its
    log π_T(span) − log π_old(span): with discount 0, −∇KL between the models' distributions of the next span.
    Source: Lu & Thinking Machines Lab 2025 (on-policy distillation), "Loss function: reverse KL"; Gu et al. 2024 (MiniLLM), sec.
    2.2, for full completions; Niu et al. 2026, arXiv:2606.09456, for spans, whose log-ratio the authors divide among the tokens.
    """

    coefficient: float = setting(1.0, "at least 0")
    """0 disables the sampled estimate, where an exact term replaces it."""
    discount: float = setting(0.0, "in [0, 1]")
    """In [0, 1]: the weight of later tokens' KL in a token's Ψ."""
    starts_chain: ClassVar[bool] = True
    gives: ClassVar[Stage | None] = "tokens"
    reads_reward: ClassVar[bool] = False
    compares_spans: ClassVar[bool] = True
    multipliers: ClassVar[tuple[str, ...]] = ("coefficient",)

    def find_run_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        """A custom loop may fill `logp_ref` by itself; a run takes it from the reference, by default the initial policy."""
        if algorithm.reference is None or not algorithm.reference.is_teacher:
            yield (
                f"{algorithm.name} learns from a teacher: set --teacher to a folder, a hub id, a run folder or a server (from "
                "Python reference=Reference(model=…)), with the policy's tokenizer. The initial policy would teach it nothing, "
                "unless it reads more than the policy (Reference.templates; algorithm sdft)"
            )

    @property
    def reference_penalty(self) -> float:
        return self.coefficient

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """π_old only for an estimate that is used."""
        return frozenset({"logp_ref", "logp_old"} if self.coefficient else {"logp_ref"})

    @property
    def formula(self) -> str:
        if not self.coefficient:
            return "0"
        scale = "" if self.coefficient == 1 else f"{self.coefficient:g}·"
        if self.discount == 0:
            return f"{scale}log(π_ref/π_old)_t"
        return f"{scale}Σ_{{s≥t}} {self.discount:g}^{{s−t}}·log(π_ref/π_old)_s"

    def _log_ratio(self, batch: Batch, old: Tensor) -> tuple[Tensor, Tensor]:
        """Return log(π_T/π_old) [B, T], and the tokens [B, T] bool that the teacher has read."""
        log_ratio, read = batch.compare_with_reference(old, self)
        return log_ratio.to(batch.reward.dtype), read

    def _sum_to_go(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        """Return Σ_{s≥t} discount^{s−t}·log_ratio_s [B, T]; where spans are compared, s are spans and t is the token's."""
        if batch.reference_spans is None:
            return masked.discounted_reverse_cumsum(log_ratio, batch.mask, self.discount)
        return masked.discounted_over_spans(log_ratio, batch.mask, batch.reference_spans, self.discount)

    def __call__(self, psi: Tensor, batch: Batch) -> Tensor:
        if not self.coefficient:
            return torch.zeros_like(psi)
        log_ratio, _ = self._log_ratio(batch, batch.require("logp_old", self))
        return self.coefficient * self._sum_to_go(log_ratio, batch)

    def report(self, batch: Batch) -> Metrics:
        """teacher/kl: KL(π_old‖π_T) in nats per token, from the samples; without π_old, of the sampler's policy."""
        old = batch.logp_sampler if batch.logp_old is None else batch.logp_old
        if old is None:
            return {}
        log_ratio, read = self._log_ratio(batch, old)
        return {"teacher/kl": masked_mean(-log_ratio, read)} if bool(read.any()) else {}
