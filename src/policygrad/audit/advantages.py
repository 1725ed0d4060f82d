"""Find the formula that made the advantages of a recording from its rewards and groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policygrad.audit.recording import AuditBatch
from policygrad.core import masked
from policygrad.core.advantages import (
    BatchMean,
    BatchStd,
    ConstantBaseline,
    DivideByGroupMean,
    GroupMean,
    GroupStd,
    LeaveOneOut,
    OptimalBaseline,
    PassAtK,
    reward_to_go,
)
from policygrad.core.base import Advantage
from policygrad.core.batch import Batch
from policygrad.core.gae import Whiten
from policygrad.core.masked import Groups
from policygrad.errors import ConfigError
from policygrad.findings import least_squares, relative_error

EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4)
"""Numbers that libraries add to a standard deviation."""


@dataclass(frozen=True)
class AdvantageMatch:
    """A formula and the advantages that it gives."""

    name: str
    """The links as policygrad names them, or the formula in words."""
    family: str
    """The name without its epsilon."""
    epsilon: float | None
    psi: Tensor
    """[B, T], or [R, 1] of a full rollout."""
    chain: tuple[Advantage, ...] | None
    """The links, where they are the library's."""
    error: float
    """Largest difference over the largest advantage."""
    factor: float
    """Theirs over this formula, by least squares."""
    scaled_error: float
    """The error once this formula is multiplied by the factor."""


@dataclass(frozen=True)
class AdvantageResult:
    """The outcome: formulas that give the numbers, and the nearest if none does."""

    matches: tuple[AdvantageMatch, ...]
    nearest: AdvantageMatch | None
    theirs: Tensor
    reason: str = ""
    """The reason if nothing was compared."""


def search_advantages(recording: AuditBatch) -> AdvantageResult:
    """Compare the recorded advantages with every candidate formula."""
    prepared = _prepare(recording)
    if isinstance(prepared, str):
        return AdvantageResult((), None, torch.zeros(0), prepared)
    batch, theirs, rewards = prepared
    mask, variants = batch.mask, [("", batch)]
    if not bool(mask.any(1).all()):
        variants.append((" over completions with tokens", replace(batch, in_statistics=None)))
    target = masked.apply_mask(theirs, mask)[mask]
    results = list[AdvantageMatch]()
    for suffix, data in variants:
        candidates = itertools.chain(_candidates(recording, data, rewards), _with_constant(recording, data, theirs))
        for name, family, epsilon, chain, function in candidates:
            try:
                psi = function()
            except ConfigError:  # a formula that these rewards do not permit, such as one for rewards of at least 0
                continue
            values = psi[mask]
            if not bool(values.isfinite().all()):
                continue
            factor = least_squares(target, values)
            errors = relative_error(target, values), relative_error(target, factor * values)
            results.append(
                AdvantageMatch(name + suffix, family + suffix, epsilon, psi, chain, errors[0], factor, errors[1])
            )
    if not results:
        return AdvantageResult((), None, theirs, "the rewards or the groups are missing")
    matches = tuple(match for match in results if match.error <= recording.advantage_tolerance)
    nearest = min(results, key=lambda match: (match.scaled_error > recording.advantage_tolerance, match.error))
    return AdvantageResult(matches, nearest, theirs)


def _prepare(recording: AuditBatch) -> tuple[Batch, Tensor, Tensor | None] | str:
    """Return (batch, their advantages, rewards by function), or the reason why there are none."""
    if recording.rollout_advantage is not None and recording.rollout_reward is not None:
        rows = len(recording.rollout_reward)
        group = recording.rollout_group
        batch = Batch(
            mask=torch.ones(rows, 1, dtype=torch.bool),
            group=torch.arange(rows) if group is None else group,
            reward=recording.rollout_reward,
        )
        return batch, recording.rollout_advantage[:, None], recording.rollout_rewards
    if recording.advantage is None:
        return "no advantages are recorded"
    if recording.reward is None:
        return "no rewards are recorded"
    rows = len(recording.mask)
    batch = Batch(
        mask=recording.mask,
        group=torch.arange(rows) if recording.group is None else recording.group,
        reward=recording.reward,
        logp_old=recording.logp_old,
        logp_ref=recording.logp_ref,
        in_statistics=recording.reward.isfinite(),  # others count completions that the mask empties
    )
    return batch, recording.advantage, recording.rewards


Candidate = tuple[str, str, float | None, tuple[Advantage, ...] | None, Callable[[], Tensor]]


def _apply(chain: tuple[Advantage, ...], batch: Batch) -> Tensor:
    psi = reward_to_go(batch)
    for link in chain:
        psi = link(psi, batch)
    return psi


def describe_chain(chain: tuple[Advantage, ...]) -> str:
    """Name the links of an advantage, with the settings that matter."""
    names = []
    for link in chain:
        settings = [
            f"{name}={getattr(link, name)}" for name in ("of", "ddof", "k", "norm", "value") if hasattr(link, name)
        ]
        if isinstance(link, OptimalBaseline) or (isinstance(link, GroupStd) and link.leave_one_out):
            settings.append(f"leave_one_out={link.leave_one_out}")
        if hasattr(link, "eps"):
            settings.append(f"eps={link.eps:g}")
        names.append(type(link).__name__ + (f"({', '.join(settings)})" if settings else ""))
    return ", ".join(names) or "the reward"


def _candidates(recording: AuditBatch, batch: Batch, rewards: Tensor | None) -> Iterator[Candidate]:
    """Iterate over formulas, conventional ones first."""
    grouped = recording.group is not None or recording.rollout_group is not None
    means: list[tuple[Advantage, ...]] = [(GroupMean(),), (LeaveOneOut(),)] if grouped else []
    for baseline in [*means, (BatchMean(),), ()]:
        yield from _library((*baseline,), batch)
    for ddof in (1, 0):
        for eps in EPSILONS:
            if grouped:
                for baseline in means:
                    yield from _library((*baseline, GroupStd(eps, ddof)), batch)
            for baseline in [*means, (BatchMean(),)]:
                yield from _library((*baseline, BatchStd(eps, ddof, "advantages")), batch)
                if baseline != (BatchMean(),):
                    yield from _library((*baseline, BatchStd(eps, ddof, "rewards")), batch)
    if grouped:
        yield from _library((GroupMean(), DivideByGroupMean()), batch)
        for exclude in (True, False):
            yield from _library((OptimalBaseline("length", exclude),), batch)
        for k in (2, 4, 8):
            for eps in (1e-6, 0.0):
                yield from _library((PassAtK(k, eps),), batch)
    bases: list[tuple[Advantage, ...]] = [(), *means]
    if grouped:
        bases += [(GroupMean(), GroupStd(1e-6, 1)), (GroupMean(), GroupStd(1e-4, 1))]
    for base in bases:
        yield from _whitened(base, batch)
    if rewards is not None and rewards.shape[1] > 1 and grouped:
        yield from _per_reward(recording, batch, rewards)
    if grouped and batch.logp_ref is not None and batch.logp_old is not None:
        yield from _penalised(recording, batch)


def _library(chain: tuple[Advantage, ...], batch: Batch) -> Iterator[Candidate]:
    epsilons = [link.eps for link in chain if hasattr(link, "eps")]
    name = describe_chain(chain)
    family = name.replace(f"eps={epsilons[-1]:g}", "eps") if epsilons else name
    yield name, family, epsilons[-1] if epsilons else None, chain, lambda: _apply(chain, batch)


def _with_constant(recording: AuditBatch, batch: Batch, theirs: Tensor) -> Iterator[Candidate]:
    """A constant baseline, after the group's mean or alone; its value is that of the first completion."""
    grouped = recording.group is not None or recording.rollout_group is not None
    bases: list[tuple[Advantage, ...]] = [(GroupMean(),), ()] if grouped else [()]
    for base in bases:
        gap = (_apply(base, batch) - theirs)[batch.mask]
        if gap.numel() >= 3 and bool(gap[0].isfinite()) and float(gap[0]) != 0:
            yield from _library((*base, ConstantBaseline(float(f"{float(gap[0]):.9g}"))), batch)


def _whitened(base: tuple[Advantage, ...], batch: Batch) -> Iterator[Candidate]:
    """Whitening over tokens (the library's `Whiten`, ddof 1, or ddof 0) and over completions."""
    start = describe_chain(base)
    yield from _library((*base, Whiten(1e-8)), batch)
    for over in ("completions", "tokens") if base else ("tokens",):  # of the reward it is BatchMean with BatchStd
        for ddof in (1, 0):
            for eps in EPSILONS:

                def whiten(over: str = over, ddof: int = ddof, eps: float = eps) -> Tensor:
                    psi = _apply(base, batch)
                    if over == "tokens":
                        centre, spread = masked.mean(psi, batch.mask), masked.std(psi, batch.mask, ddof)
                    else:
                        rows = masked.first_valid(psi, batch.mask)
                        centre, spread = masked.mean(rows, batch.counted), masked.std(rows, batch.counted, ddof)
                    return masked.apply_mask((psi - centre) / (spread + eps), batch.mask)

                name = f"{start}, whitened over {over} (ddof={ddof}, eps"
                yield f"{name}={eps:g})", f"{name})", eps, None, whiten


def _per_reward(recording: AuditBatch, batch: Batch, rewards: Tensor) -> Iterator[Candidate]:
    """GDPO: a z-score for each reward, their weighted sum, and whitening over the completions."""
    groups = Groups(batch.group, batch.counted)
    weights = torch.tensor(recording.settings.get("reward_weights") or [1.0] * rewards.shape[1], dtype=torch.float64)
    for ddof in (1, 0):
        for eps in EPSILONS:
            for last in (True, False):

                def score(ddof: int = ddof, eps: float = eps, last: bool = last) -> Tensor:
                    columns = [
                        (column - groups.mean(column)) / (groups.std(column, ddof) + eps)
                        for column in rewards.unbind(1)
                    ]
                    total = (torch.stack(columns, 1) * weights).sum(1)
                    if last:
                        spread = masked.std(total, batch.counted, ddof) + eps
                        total = (total - masked.mean(total, batch.counted)) / spread
                    return masked.apply_mask(total[:, None].expand(batch.mask.shape), batch.mask)

                tail = ", whitened over completions" if last else ""
                name = f"a group's z-score of each reward, summed{tail} (RewardZScores, ddof={ddof}, eps"
                yield f"{name}={eps:g})", f"{name})", eps, None, score


def _penalised(recording: AuditBatch, batch: Batch) -> Iterator[Candidate]:
    """KL in the reward, −β·Σ_t (log π_old − log π_ref), before a baseline of the group; β from the settings or by convention."""
    assert batch.logp_old is not None
    assert batch.logp_ref is not None
    kl = masked.apply_mask(batch.logp_old - batch.logp_ref, batch.mask).sum(1)
    configured = recording.setting("beta", "kl_coef")
    chains: list[tuple[Advantage, ...]] = [(GroupMean(),), (LeaveOneOut(),), (GroupMean(), GroupStd(1e-4, 1))]
    chains.append((GroupMean(), GroupStd(1e-6, 1)))
    for chain in chains:
        for beta in dict.fromkeys([*([configured] if configured else []), 1e-3, 0.01, 0.04, 0.05, 0.1]):

            def penalise(chain: tuple[Advantage, ...] = chain, beta: float = beta) -> Tensor:
                return _apply(chain, replace(batch, reward=batch.reward - beta * kl))

            name = f"{describe_chain(chain)} of the reward − {beta:g}·KL (KLInReward)"
            yield name, name, None, None, penalise
