"""Find the loss that made a recording: the weight, the KL and the average that reproduce its gradient, or else its value.

The gradient of every loss here is −c·(w·ρ·Ψ + β·k) per token: w from a ratio and a gate, ρ a correction for the sampler, k a KL to
the reference, c the average. Each factor has candidates, the library's parts where it has them, and each combination is compared
with the recorded gradient by inner products; the best are then computed exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policygrad.audit.recording import AuditBatch
from policygrad.core import masked
from policygrad.core.aggregation import FixedLength, GroupTokenMean, SequenceMean, SequenceSum, TokenMean
from policygrad.core.base import Aggregation, Gate, Ratio, Term
from policygrad.core.batch import Batch, Forward
from policygrad.core.gates import (
    Clip,
    ClippedImportance,
    DivergenceClip,
    GammaKernel,
    GeometricMean,
    Importance,
    LogClip,
    OnPolicy,
    SecondMomentFilter,
    SigmoidGate,
    TaperedImportance,
)
from policygrad.core.ratios import MaskedIS, SequenceProduct, Token, TruncatedIS
from policygrad.core.ratios import Sequence as SequenceRatio
from policygrad.core.terms import KLForm, KLToOld, KLToReference, log_ratio
from policygrad.findings import least_squares, relative_error

CLIP_BOUNDS = (
    (0.2, 0.2),
    (0.2, 0.28),
    (0.1, 0.1),
    (0.3, 0.3),
    (0.2, 0.3),
    (0.2, 0.4),
    (3e-4, 4e-4),
    (2e-3, 2.5e-3),
)
"""Bounds of clips in papers and libraries, as (low, high): of PPO, DAPO, ProRL, GSPO, LUSPO."""
IMPORTANCE_CAPS = (5.0, 4.0, 3.0, 2.0, 1.28, 1.2, 6.0, 10.0)
CORRECTION_CAPS = (2.0, 3.0, 1.0, 5.0, 10.0)
_ROUND = (
    *(0.1, 0.15, 0.2, 0.25, 0.28, 0.3, 0.35, 0.4, 0.5, 1.0, 2.0),
    *(3e-4, 4e-4, 2e-3, 2.5e-3, 1e-3, 5e-3, 0.01, 0.02, 0.05),
)


@dataclass(frozen=True, eq=False)
class Weight:
    """A candidate for w·ρ·Ψ, the policy's part of a token."""

    old: str
    """π_old: "logp_old", "logp_sampler", or "the policy itself"."""
    ratio: str
    gate: str
    """The gate as policygrad writes it, or in words."""
    correction: str
    psi: str
    """"" for the recorded advantages, or what was done to them."""
    base_score: Tensor
    """[B, T] w·Ψ; 0 off the mask."""
    base_value: Tensor
    """[B, T] the objective per token without ρ, whose derivative is w·Ψ."""
    rho: Tensor | None
    """[B, T] ρ; None is 1."""
    ratios: Tensor
    """[B, T] r."""
    part: Gate | None = None
    fault: str = ""
    """A known fault that this candidate stands for."""
    equals: tuple[Weight, ...] = ()
    """Other candidates with the same numbers on this batch."""

    @property
    def score(self) -> Tensor:
        """[B, T] w·ρ·Ψ."""
        return self.base_score if self.rho is None else self.base_score * self.rho

    @property
    def value(self) -> Tensor:
        """[B, T] the objective per token."""
        return self.base_value if self.rho is None else self.base_value * self.rho


@dataclass(frozen=True, eq=False)
class Average:
    """A candidate for c."""

    name: str
    coefficients: Tensor
    """[B, T]; 0 off the mask."""
    part: Aggregation | None = None
    intended: Tensor | None = None
    """The coefficients of the same average over the full update, where this is one over a share of it."""
    fault: str = ""
    equals: tuple[str, ...] = ()
    """Other averages with the same coefficients on this batch."""


@dataclass(frozen=True, eq=False)
class Penalty:
    """A candidate for k: a KL to the reference, for β = 1."""

    name: str
    score: Tensor
    value: Tensor


@dataclass(frozen=True, eq=False)
class LossMatch:
    """One combination, and how far it is from the recorded numbers."""

    weight: Weight
    average: Average
    penalty: Penalty | None
    factor: float
    """Theirs over this formula; 1 where it was not free."""
    beta: float
    error: float
    """Largest difference over the largest gradient; without a gradient, the loss's error over the sum of its terms' sizes."""
    mask: str
    """The tokens of the loss: "" for the recorded mask."""
    tokens: Tensor
    """That mask."""


@dataclass(frozen=True, eq=False)
class LossResult:
    """Every combination that gives the numbers, best first, or the nearest."""

    matches: tuple[LossMatch, ...]
    nearest: LossMatch | None
    by: str
    """"gradient", "loss", or "" if nothing could be compared."""
    reason: str = ""


# --- candidates


def name_part(part: object, *names: str) -> str:
    """Return a part's name with its settings, or those that are named, as in Python."""
    settings = [
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in vars(part).items()
        if value is not None and (not names or name in names)
    ]
    return f"{type(part).__name__}({', '.join(settings)})"


def library_batch(recording: AuditBatch, mask: Tensor, old: Tensor | None) -> Batch:
    """Return the recording as the library's batch, with a mask and a π_old."""
    rows = len(mask)
    return Batch(
        mask=mask,
        group=torch.arange(rows) if recording.group is None else recording.group,
        reward=torch.zeros(rows, dtype=torch.float64) if recording.reward is None else recording.reward,
        logp_old=old,
        logp_ref=recording.logp_ref,
        logp_sampler=recording.logp_sampler,
    )


def find_masks(recording: AuditBatch) -> list[tuple[str, Tensor]]:
    """Return masks that hold every token with a gradient, (what is wrong with it, mask), the recorded one first.

    Without a gradient all of them are possible.
    """
    mask = recording.mask
    support = mask if recording.gradient is None else recording.gradient.nan_to_num() != 0
    options = [("", mask)]
    for steps in (1, -1):
        moved = torch.zeros_like(mask)
        if steps > 0:
            moved[:, steps:] = mask[:, :-steps]
        else:
            moved[:, :steps] = mask[:, -steps:]
        side = "to the right" if steps > 0 else "to the left"
        options.append((f"the mask is shifted by one token {side}", moved))
    options.append(("every position counts, padding included", torch.ones_like(mask)))
    silent = mask.any(1) & ~support.any(1)
    if recording.advantage is not None:
        silent &= (masked.apply_mask(recording.advantage, mask) != 0).any(1)
    if recording.gradient is not None and bool(silent.any()) and not bool(silent.all()):
        count = int(silent.sum())
        options.insert(1, (f"{count} completions have no gradient and leave the denominators", mask & ~silent[:, None]))
    if recording.gradient is None:
        return options[:3]
    return [(name, option) for name, option in options if not bool((support & ~option).any())]


def averages(recording: AuditBatch, mask: Tensor) -> list[Average]:
    """Return the candidates for c: over the update, over micro-batches, over ranks."""
    group = torch.arange(len(mask)) if recording.group is None else recording.group
    width = mask.shape[1]
    length = recording.setting("max_length", "max_completion_length", "max_tokens", "loss_scale_factor")
    parts: list[Aggregation] = [SequenceMean(), TokenMean(), SequenceSum()]
    if recording.group is not None:
        parts.append(GroupTokenMean())
    parts += [FixedLength(int(L)) for L in dict.fromkeys([*([length] if length else []), float(width)])]
    results = list[Average]()
    for part in parts:
        name = name_part(part) if isinstance(part, FixedLength) else type(part).__name__
        results.append(Average(name, part(mask, group), part))
    flat = mask.double()
    results += _over_generations(recording, mask, TokenMean()(mask, group))
    for name, ids in _shares(recording):
        for part in (TokenMean(), SequenceMean(), SequenceSum()):
            results.append(_over_shares(part, name, ids, mask, group))
    results.append(Average("sum over tokens, not divided", flat, None))
    results.append(
        Average("sum over completions of token means, not divided", flat / mask.sum(1, keepdim=True).clamp(min=1))
    )
    everyone = len(mask)
    if int(mask.any(1).sum()) != everyone:
        share = int(mask.any(1).sum()) / everyone
        for part in (SequenceMean(), SequenceSum()):
            name = f"{type(part).__name__}, completions without tokens counted"
            results.append(Average(name, part(mask, group) * share))
    distinct = list[Average]()
    for average in results:
        same = (
            i for i, other in enumerate(distinct) if relative_error(average.coefficients, other.coefficients) < 1e-12
        )
        if (index := next(same, None)) is None:
            distinct.append(average)
        else:
            distinct[index] = replace(distinct[index], equals=(*distinct[index].equals, average.name))
    return distinct


def _over_generations(recording: AuditBatch, mask: Tensor, intended: Tensor) -> list[Average]:
    """Return token sums over the tokens of the rollouts that an update's completions came from, and over their expected share."""
    count, total = recording.generation_tokens, int(mask.sum())
    if count is None or bool((count == total).all()):
        return []
    text = ", ".join(f"{x:g}" for x in torch.unique(count).tolist())
    fault = f"the denominator is the number of tokens of the whole rollout ({text}), not of the update ({total})"
    each = mask.double() / count[:, None]
    results = [Average(f"sum over the rollout's {text} tokens", each, None, intended, fault)]
    accumulated, steps = recording.setting("gradient_accumulation_steps"), recording.setting("steps_per_generation")
    if accumulated and steps and accumulated != steps:
        share = accumulated / steps
        fault = (
            f"the denominator is {accumulated:g}/{steps:g} of the rollout's tokens ({text}), the number expected in an update, "
            f"not the update's own ({total})"
        )
        results.append(
            Average(f"sum over {share:g} times the rollout's {text} tokens", each / share, None, intended, fault)
        )
    return results


def _shares(recording: AuditBatch) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the ways in which the update was split, (name, id of each completion)."""
    micro, rank = recording.micro_batch, recording.rank
    if micro is not None and len(torch.unique(micro)) > 1:
        sizes = torch.unique(micro if rank is None else micro + (int(micro.max()) + 1) * rank, return_counts=True)[1]
        size = f" of {int(sizes[0])}" if len(torch.unique(sizes)) == 1 else ""
        if rank is not None and len(torch.unique(rank)) > 1:
            yield f"micro-batch{size} of each rank", micro + (int(micro.max()) + 1) * rank
        else:
            yield f"micro-batch{size}", micro
    if rank is not None and len(torch.unique(rank)) > 1:
        yield "rank", rank


def _over_shares(part: Aggregation, name: str, ids: Tensor, mask: Tensor, group: Tensor) -> Average:
    coefficients, shares = torch.zeros(mask.shape, dtype=torch.float64), torch.unique(ids)
    for share in shares.tolist():
        rows = ids == share
        coefficients[rows] = part(mask[rows], group[rows]) / len(shares)
    kinds = {
        "TokenMean": "token mean",
        "SequenceMean": "mean of completions' token means",
        "SequenceSum": "mean of completions",
    }
    kind = kinds[type(part).__name__]
    fault = f"the {kind} is taken over each {name} and then averaged, instead of over the update"
    return Average(f"{kind} over each {name}, averaged", coefficients, None, part(mask, group), fault)


def _gates(
    recording: AuditBatch, ratio: Tensor, psi: Tensor, mask: Tensor, level: Ratio
) -> Iterator[tuple[str, Gate | None, Tensor, str]]:
    """Iterate over (name, gate, weight, fault)."""
    yield "Importance", Importance(), ratio, ""
    for low, high in clip_bounds(recording, ratio, psi, mask):
        gate = Clip(low, high)
        yield name_part(gate), gate, gate.weight(ratio, psi, None), ""  # type: ignore[arg-type]
        inside = (ratio >= 1 - low) & (ratio <= 1 + high)
        text = "the clip is not one-sided: r is cut outside the bounds whatever the sign of Ψ (clip(r)·Ψ without the minimum)"
        yield f"clip(r, {1 - low:g}, {1 + high:g}) without the minimum", None, masked.apply_mask(ratio, inside), text
        for c in _dual_bounds(recording, ratio, psi, mask):
            dual = Clip(low, high, c)
            yield name_part(dual), dual, dual.weight(ratio, psi, None), ""  # type: ignore[arg-type]
    one = torch.ones_like(ratio)
    yield "OnPolicy", OnPolicy(), one, ""
    for low, high in _cap_bounds(recording, ratio, psi, mask):
        if 0 <= low <= 1 <= high:
            cap = ClippedImportance(low, high)
            yield name_part(cap), cap, cap.weight(ratio, psi, None), ""  # type: ignore[arg-type]
        else:
            fault = f"the bound {high:g} of the importance weight is below 1: an offset was given where the bound itself is meant"
            yield f"min(r, {high:g})", None, ratio.clamp(max=high), fault
    batch = library_batch(recording, mask, recording.logp_old)
    tau = (recording.setting("sapo_temperature_pos", "tau_pos"), recording.setting("sapo_temperature_neg", "tau_neg"))
    gates: list[Gate] = [SigmoidGate(), TaperedImportance(), GammaKernel()]
    if tau[0] and tau[1]:
        gates.insert(0, SigmoidGate(tau[0], tau[1]))
    k = [recording.setting(f"vespo_{name}") for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")]
    if all(x is not None for x in k):
        gates.append(GammaKernel(*(x for x in k if x is not None)))
    if level.per_token:
        configured = recording.setting("epsilon_low", "epsilon", "clip_ratio_low", "clip_ratio")
        gates += [
            GeometricMean(),
            DivergenceClip("tv", 0.15),
            DivergenceClip("kl", 0.05),
            LogClip(),
            SecondMomentFilter(),
        ]
        if configured is not None:
            upper = recording.setting("epsilon_high", "clip_ratio_high")
            gates += [GeometricMean(configured, configured if upper is None else upper)]
            if 0 < configured < 1:
                gates += [DivergenceClip("tv", configured), DivergenceClip("kl", configured)]
    seen = set[str]()
    for other in gates:
        if (name := name_part(other)) in seen:
            continue
        seen.add(name)
        selected = batch
        if "selected" in other.needs:
            assert recording.logp is not None
            selected = replace(batch, selected=other.select_tokens(Forward(recording.logp), batch, psi))
        yield name, other, other.weight(ratio, psi, selected), ""


def clip_bounds(recording: AuditBatch, ratio: Tensor, psi: Tensor, mask: Tensor) -> list[tuple[float, float]]:
    """Return bounds (low, high) of a clip: the settings', what the tokens without gradient show, and conventional ones."""
    low = recording.setting("epsilon_low", "clip_ratio_low", "epsilon", "clip_ratio", "cliprange")
    high = recording.setting("epsilon_high", "clip_ratio_high", "epsilon", "clip_ratio", "cliprange")
    bounds = list[tuple[float, float]]()
    if low is not None and high is not None:
        bounds.append((low, high))
    if recording.gradient is not None:
        zero = recording.gradient.nan_to_num() == 0
        sides = bracket(ratio, psi, mask & zero, mask & ~zero)
        if sides is not None:
            bounds += [
                pair for pair in CLIP_BOUNDS if all(at <= x < end for x, (at, end) in zip(pair, sides, strict=True))
            ]
            bounds.append((_conventional(*sides[0], low), _conventional(*sides[1], high)))
            lows, highs = ([x for x in _ROUND if at <= x < end][:6] for at, end in sides)
            bounds += itertools.product(lows, highs)
    return list(dict.fromkeys([*bounds, *CLIP_BOUNDS]))


def bracket(
    ratio: Tensor, psi: Tensor, zero: Tensor, live: Tensor
) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Return where the lower and the upper bound of a clip must lie, as offsets ((at least, below), (at least, below)).

    Args:
        zero, live: tokens without and with a gradient, [B, T] bool.
    """
    up, down = psi > 0, psi < 0
    low = (_largest(1 - ratio[live & down]), _smallest(1 - ratio[zero & down & (ratio < 1)]))
    high = (_largest(ratio[live & up] - 1), _smallest(ratio[zero & up & (ratio > 1)] - 1))
    return (low, high) if low[0] < low[1] and high[0] < high[1] else None


def _largest(x: Tensor) -> float:
    return max(0.0, float(x.max())) if x.numel() else 0.0


def _smallest(x: Tensor) -> float:
    return float(x.min()) if x.numel() else math.inf


def _conventional(low: float, high: float, configured: float | None) -> float:
    """Return the number in [low, high) that is most likely meant."""
    for value in ([] if configured is None else [configured]) + list(_ROUND):
        if low <= value < high:
            return value
    return low if math.isinf(high) else (low + high) / 2


def _dual_bounds(recording: AuditBatch, ratio: Tensor, psi: Tensor, mask: Tensor) -> list[float]:
    """Return bounds of a dual clip that the batch can show: some token has Ψ < 0 and a ratio above it."""
    configured = recording.setting("delta", "clip_ratio_c")
    highest = _largest(masked.apply_mask(ratio, mask & (psi < 0)))
    candidates = [*([configured] if configured else []), 3.0, 10.0, 2.0, 4.0]
    if recording.gradient is not None:
        zero = recording.gradient.nan_to_num() == 0
        beyond, below = mask & zero & (psi < 0) & (ratio > 1), mask & ~zero & (psi < 0)
        first, last = _smallest(ratio[beyond]), _largest(ratio[below])
        if first < math.inf and last < first and not any(last <= c < first for c in candidates):
            candidates.append((last + first) / 2)
    return [c for c in dict.fromkeys(candidates) if 1 < c < highest]


def _cap_bounds(recording: AuditBatch, ratio: Tensor, psi: Tensor, mask: Tensor) -> list[tuple[float, float]]:
    """Return bounds (low, high) of an importance weight, absolute: the settings', what the gradient shows, conventional ones."""
    low = recording.setting("epsilon_low", "clip_ratio_low", "epsilon", "clip_ratio")
    high = recording.setting("epsilon_high", "clip_ratio_high", "epsilon", "clip_ratio")
    bounds = list[tuple[float, float]]()
    if low is not None and high is not None:
        bounds += [(0.0, high), (max(0.0, 1 - low), 1 + high), (0.0, 1 + high)]
    cap = _infer_cap(recording, ratio, psi, mask)
    if cap is not None:
        bounds.append((0.0, cap))
    return list(dict.fromkeys([*bounds, *((0.0, cap) for cap in IMPORTANCE_CAPS), (0.8, 1.2), (0.8, 1.28)]))


def _infer_cap(recording: AuditBatch, ratio: Tensor, psi: Tensor, mask: Tensor) -> float | None:
    """Return the cap of the weight from rows in which g/Ψ stops growing with r, or None."""
    if recording.gradient is None:
        return None
    caps = list[float]()
    live = mask & (psi != 0) & (recording.gradient.nan_to_num() != 0)
    for row in live.any(1).nonzero().flatten().tolist():
        tokens = live[row]
        per_psi = (recording.gradient[row, tokens] / psi[row, tokens]).abs()
        r = ratio[row, tokens]
        if len(r) < 3 or float(r.max()) <= 1:
            continue
        c = float(per_psi[r.argmin()] / r.min())
        if float(per_psi.max()) < 0.999 * c * float(r.max()):  # it did stop
            caps.append(float(per_psi.max()) / c)
    if not caps:
        return None
    cap = sorted(caps)[-1]
    return float(f"{cap:.4g}") if cap > 1 else None


def _corrections(recording: AuditBatch) -> list[tuple[str, TruncatedIS | MaskedIS | None]]:
    """Return candidates for ρ = π_old/μ."""
    options: list[tuple[str, TruncatedIS | MaskedIS | None]] = [("", None)]
    if recording.logp_sampler is None or recording.logp_old is None:
        return options
    configured = recording.setting("importance_sampling_cap", "vllm_importance_sampling_cap", "rollout_is_threshold")
    caps = list(dict.fromkeys([*([configured] if configured else []), *CORRECTION_CAPS]))
    for level in ("token", "sequence"):
        for cap in [*caps, 1e9]:
            part = TruncatedIS(cap, level)
            options.append(
                (f"π_old/μ per {level}, not bounded" if cap == 1e9 else name_part(part, "cap", "level"), part)
            )
        for low in (0.0, 0.5):
            for cap in caps:
                masking = MaskedIS(low, cap, level)
                options.append((name_part(masking), masking))
    return options


def _weights(
    recording: AuditBatch, mask: Tensor, psi: Tensor, psi_name: str, olds: Sequence[str], corrected: bool
) -> Iterator[Weight]:
    assert recording.logp is not None
    levels: tuple[Ratio, ...] = (Token(), SequenceRatio(), SequenceProduct())
    for old in olds:
        old_logp = getattr(recording, old) if old.startswith("logp") else None
        batch = library_batch(recording, mask, old_logp)
        change = log_ratio(recording.logp, old_logp, mask)
        corrections = [(name, part) for name, part in _corrections(recording) if (part is not None) is corrected]
        factors = list[tuple[str, Tensor | None]]()
        for name, part in corrections:
            old_batch = replace(batch, logp_old=recording.logp_old)
            rho = None if part is None else part(Forward(recording.logp), old_batch, psi)
            factors.append((name, None if rho is None else masked.apply_mask(rho, mask)))
        for level in levels if bool(change.any()) else levels[:1]:
            ratio = level(change, mask)
            for gate_name, gate, weight, fault in _gates(recording, ratio, psi, mask, level):
                base = masked.apply_mask(weight * psi, mask)
                value = weight * psi if gate is None else _value(gate, ratio, psi, batch, recording)
                if level.joint:
                    value = value / batch.lengths.clamp(min=1)[:, None]
                value, kind = masked.apply_mask(value, mask), type(level).__name__
                for name, rho in factors:
                    yield Weight(old, kind, gate_name, name, psi_name, base, value, rho, ratio, gate, fault)


def _value(gate: Gate, ratio: Tensor, psi: Tensor, batch: Batch, recording: AuditBatch) -> Tensor:
    if "selected" in gate.needs:
        assert recording.logp is not None
        batch = replace(batch, selected=gate.select_tokens(Forward(recording.logp), batch, psi))
    return gate.value(ratio, psi, batch)


def _penalties(recording: AuditBatch, mask: Tensor, old: str) -> list[Penalty | None]:
    """Return candidates for a KL in the loss, to π_ref or to π_old; none comes first."""
    options: list[Penalty | None] = [None]
    if recording.logp is None:
        return options
    old_logp = getattr(recording, old) if old.startswith("logp") else None
    batch = library_batch(recording, mask, old_logp)
    out, zero = Forward(masked.apply_mask(recording.logp, mask)), torch.zeros_like(recording.logp)
    parts: list[tuple[str, Term]] = []
    if recording.logp_ref is not None:
        forms: tuple[KLForm, ...] = ("k3", "k2", "r*k3", "r*k1")
        parts += [(form, KLToReference(1.0, form)) for form in forms]
    if old_logp is not None and recording.gradient is not None:
        parts += [("KLToOld", KLToOld(1.0)), ("KLToOld with a cap", KLToOld(1.0, cap=2.0))]
    for name, part in parts:
        score, value = (
            masked.apply_mask(x, mask) for x in (part.score(out, batch, zero), part.value(out, batch, zero))
        )
        if bool(score.any()):
            options.append(Penalty(name, score, value))
    if recording.logp_ref is not None:
        u = masked.apply_mask(recording.logp - recording.logp_ref, mask)
        options.append(Penalty("k1", -mask.double(), -u))
    return options


# --- matching


def search_loss(recording: AuditBatch, psi_options: Sequence[tuple[str, Tensor]]) -> LossResult:
    """Find the combinations that reproduce the recorded gradient, or without one the recorded loss.

    Args:
        psi_options: (name, Ψ [B, T]); the recorded advantages have the name "".
    """
    if recording.logp is None:
        return LossResult((), None, "", "no log-probabilities of the policy are recorded (logp)")
    if recording.gradient is None and recording.loss is None:
        return LossResult((), None, "", "neither a gradient nor a loss is recorded")
    if not psi_options:
        return LossResult((), None, "", "no advantages are recorded")
    olds = ["logp_old"] if recording.logp_old is not None else ["the policy itself"]
    alternatives = [name for name in ("logp_old", "logp_sampler") if getattr(recording, name) is not None]
    alternatives = [name for name in [*alternatives, "the policy itself"] if name not in olds]
    rolled = [
        (f"the advantages are those of the {word} completion", psi.roll(steps, 0))
        for _, psi in psi_options[:1]
        for word, steps in (("previous", 1), ("next", -1))
    ]
    masks, nearest = find_masks(recording), list[LossMatch]()
    by = "gradient" if recording.gradient is not None else "loss"
    levels: list[tuple[list[tuple[str, Tensor]], list[str], bool, bool]] = [
        (list(psi_options), olds, False, False),
        (list(psi_options), olds, True, False),
        (list(psi_options), alternatives, False, False),
    ]
    if by == "gradient":
        levels += [
            (list(psi_options), olds, False, True),
            (list(psi_options), [*olds, *alternatives], True, True),
            (list(psi_options), alternatives, False, True),
            (rolled, olds, False, True),
        ]
    else:
        masks = masks[:1]
    for options, names, corrected, free in levels:
        if corrected and (recording.logp_sampler is None or recording.logp_old is None):
            continue
        for mask_name, mask in masks:
            results = _match(recording, options, names, corrected, free, mask_name, mask)
            matches = tuple(match for match in results if match.error <= allowed_error(recording))
            if matches:
                return LossResult(matches, matches[0], by)
            nearest += results[:1]
    return LossResult((), min(nearest, key=_distance, default=None), by)


def allowed_error(recording: AuditBatch) -> float:
    """Return the error below which a combination counts as exact; one number, a loss, supports only a small one."""
    return recording.tolerance if recording.gradient is not None else max(1e-9, 10 * recording.precision)


def _match(
    recording: AuditBatch,
    psi_options: Sequence[tuple[str, Tensor]],
    olds: Sequence[str],
    corrected: bool,
    free: bool,
    mask_name: str,
    mask: Tensor,
) -> list[LossMatch]:
    """Return combinations in order of preference, those that match exactly before the nearest."""
    results = list[LossMatch]()
    for old in olds:
        weights = [
            weight
            for name, psi in psi_options
            for weight in _weights(recording, mask, masked.apply_mask(psi, mask), name, [old], corrected)
        ]
        if not weights:
            continue
        candidates, penalties = averages(recording, mask), _penalties(recording, mask, old)
        if recording.gradient is None:
            results += _match_loss(recording, weights, candidates, penalties, mask_name, mask)
        else:
            results += _match_gradient(recording, weights, candidates, penalties, free, mask_name, mask)
    exact = [match for match in results if match.error <= allowed_error(recording)]
    # A KL's free β always brings a fit nearer: without an exact match it counts only if it brings it much nearer.
    return exact or sorted(results, key=_distance)[:1]


def _distance(match: LossMatch) -> float:
    return match.error * (1 if match.penalty is None else 3)


def _match_gradient(
    recording: AuditBatch,
    weights: Sequence[Weight],
    candidates: Sequence[Average],
    penalties: Sequence[Penalty | None],
    free: bool,
    mask_name: str,
    mask: Tensor,
) -> list[LossMatch]:
    assert recording.gradient is not None
    sample = subsample_tokens(mask)  # the inner products need no more of them; what is left is computed on all
    g = recording.gradient[sample]
    s = torch.stack([_take(weight, sample) for weight in weights])  # [S, N]
    finite = s.isfinite().all(1)
    weights, s = [weight for weight, fits in zip(weights, finite.tolist(), strict=True) if fits], s[finite]
    weights, s = _merge_equal(weights, s)
    c = torch.stack([average.coefficients[sample] for average in candidates])  # [C, N]
    norm = float((g * g).sum()) or 1.0
    pp, gp = (c * c) @ (s * s).T, (c * -g) @ s.T  # [C, S]
    results, screened = list[LossMatch](), list[tuple[float, int, int, int, float, float]]()
    for index, penalty in enumerate(penalties):
        if penalty is None:
            factor = gp / pp.clamp(min=1e-300) if free else torch.ones_like(gp)
            beta = torch.zeros_like(gp)
            residual = norm - 2 * factor * gp + factor**2 * pp
        else:
            k = penalty.score[sample]
            qq = ((c * c) @ (k * k))[:, None]
            gq = ((c * -g) @ k)[:, None]
            pq = (c * c) @ (s * k).T
            if free:
                determinant = (pp * qq - pq * pq).clamp(min=1e-300)
                factor = (gp * qq - gq * pq) / determinant
                slope = (gq * pp - gp * pq) / determinant
            else:
                factor = torch.ones_like(gp)
                slope = (gq - pq) / qq.clamp(min=1e-300)
            residual = (
                norm - 2 * factor * gp - 2 * slope * gq + factor**2 * pp + 2 * factor * slope * pq + slope**2 * qq
            )
            beta = slope / torch.where(factor == 0, 1, factor)
        flat = residual.flatten()
        for place in flat.argsort(stable=True)[:200].tolist():
            row, column = divmod(place, len(weights))
            values = float(flat[place]), index, row, column, float(factor[row, column]), float(beta[row, column])
            screened.append(values)
    best = min((value[0] for value in screened), default=0.0)
    limit = max(norm * (50 * recording.tolerance) ** 2 * len(g), 1e-12 * norm, best * 1.0001)
    for residual_value, index, row, column, factor_value, beta_value in screened:
        if residual_value > limit or not math.isfinite(factor_value) or factor_value == 0:
            continue
        penalty = penalties[index]
        if penalty is not None and not beta_value > 0:
            continue
        total = weights[column].score + (0 if penalty is None else beta_value * penalty.score)
        predicted = -factor_value * candidates[row].coefficients * total
        error = relative_error(recording.gradient[mask], predicted[mask])
        results.append(
            LossMatch(weights[column], candidates[row], penalty, factor_value, beta_value, error, mask_name, mask)
        )
    order = {id(weight): i for i, weight in enumerate(weights)}
    places = {id(average): i for i, average in enumerate(candidates)}

    def rank(match: LossMatch) -> tuple[bool, bool, bool, int, int]:
        fault = bool(match.average.fault or match.weight.fault)
        return match.penalty is not None, fault, match.factor != 1.0, places[id(match.average)], order[id(match.weight)]

    return sorted(results, key=rank)


def subsample_tokens(mask: Tensor, most: int = 4096) -> tuple[Tensor, Tensor]:
    """Return (rows, columns) of tokens of a mask: all of them, or evenly spaced ones if they are many."""
    rows, columns = mask.nonzero(as_tuple=True)
    step = -(-len(rows) // most)
    return rows[::step], columns[::step]


def _take(weight: Weight, sample: tuple[Tensor, Tensor]) -> Tensor:
    base = weight.base_score[sample]
    return base if weight.rho is None else base * weight.rho[sample]


def _merge_equal(weights: Sequence[Weight], scores: Tensor) -> tuple[list[Weight], Tensor]:
    """Merge candidates with the same scores; the first of them stands for all."""
    probe = torch.cos(torch.arange(2 * scores.shape[1], dtype=torch.float64) * 1.7 + 0.3).reshape(2, -1)
    sums, size = scores @ probe.T, scores.abs().sum(1)
    places = dict[tuple[int, ...], int]()
    merged, first = list[list[Weight]](), list[int]()
    largest = float(size.max()) or 1.0
    for i, weight in enumerate(weights):
        key = tuple(round(float(x) / largest * 1e10) for x in (*sums[i], size[i]))
        if key in places:
            merged[places[key]].append(weight)
        else:
            places[key] = len(merged)
            merged.append([weight])
            first.append(i)
    return [replace(same[0], equals=tuple(same[1:])) for same in merged], scores[first]


def _match_loss(
    recording: AuditBatch,
    weights: Sequence[Weight],
    candidates: Sequence[Average],
    penalties: Sequence[Penalty | None],
    mask_name: str,
    mask: Tensor,
) -> list[LossMatch]:
    """Match a loss's value alone, with β from the settings: one number supports only few candidates."""
    assert recording.loss is not None
    beta, results = recording.setting("beta", "kl_loss_coef") or 0.0, list[LossMatch]()
    for weight in weights:
        for average in candidates:
            for penalty in penalties if beta else [None]:
                if beta and penalty is None:
                    continue
                match = LossMatch(weight, average, penalty, 1.0, beta if penalty else 0.0, math.inf, mask_name, mask)
                error = min(
                    abs(float(recording.loss) - value) / size for _, value, size in loss_values(recording, match)
                )
                results.append(replace(match, error=error))
    return results


def loss_values(recording: AuditBatch, match: LossMatch) -> list[tuple[str, float, float]]:
    """Return (name, value, sum of the terms' sizes) of the forms in which a loss with this gradient is written."""
    assert recording.logp is not None
    c, factor = match.average.coefficients, match.factor
    kl = 0.0 if match.penalty is None else match.beta * match.penalty.value
    logp = masked.apply_mask(recording.logp, match.tokens)
    forms = [
        ("−Σ c·(value + KL)", match.weight.value + kl),
        ("−Σ c·(w·Ψ·log π + KL)", match.weight.score * logp + kl),
        ("−Σ c·(w·Ψ + KL)", match.weight.score + kl),
    ]
    return [
        (name, -factor * float((c * x).sum()), abs(factor) * float((c * x.abs()).sum()) or 1.0) for name, x in forms
    ]


def project(recording: AuditBatch, match: LossMatch, coefficients: Tensor) -> float:
    """Return the factor by which a match's gradient is larger than under other coefficients, by least squares."""
    total = match.weight.score + (0 if match.penalty is None else match.beta * match.penalty.score)
    return least_squares(match.factor * match.average.coefficients * total, coefficients * total)


def value_error(recording: AuditBatch, match: LossMatch) -> float:
    """Return the smallest error of a form of the loss, with the factor of the gradient or without, over its terms' sizes."""
    assert recording.loss is not None
    actual, errors = float(recording.loss), list[float]()
    for _, value, size in loss_values(recording, match):
        errors += [abs(actual - value) / size, abs(actual - value / match.factor) / size * abs(match.factor)]
    return min(errors)


def value_tolerance(recording: AuditBatch) -> float:
    """Return the error below which a loss's value counts as equal."""
    return max(1e-9, 100 * recording.precision)


def settle_by_value(recording: AuditBatch, result: LossResult) -> LossResult:
    """Put first the combination that gives the loss's value too: gates with one gradient can have other values."""
    if recording.loss is None or result.by != "gradient":
        return result
    for index, match in enumerate(result.matches):
        family = (match.weight, *match.weight.equals)
        for weight in family:
            other = replace(match, weight=replace(weight, equals=tuple(w for w in family if w is not weight)))
            if value_error(recording, other) <= value_tolerance(recording):
                remaining = (*result.matches[:index], *result.matches[index + 1 :])
                return replace(result, matches=(other, *remaining))
    return result
