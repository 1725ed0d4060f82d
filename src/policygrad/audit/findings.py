"""Audit recordings: a finding for each stage of a loss, and for each field of two recordings of the same batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policygrad.algorithms import ALGORITHMS, get_algorithm
from policygrad.audit.advantages import AdvantageResult, describe_chain, search_advantages
from policygrad.audit.recording import FIELDS, AuditBatch, as_batch
from policygrad.audit.search import (
    LossMatch,
    LossResult,
    bracket,
    library_batch,
    loss_values,
    name_part,
    project,
    search_loss,
    settle_by_value,
    value_error,
    value_tolerance,
)
from policygrad.core import masked
from policygrad.core.advantages import BatchMean, BatchStd, GroupMean, GroupStd, LeaveOneOut, reward_to_go
from policygrad.core.algorithm import Algorithm
from policygrad.core.batch import Batch, Forward
from policygrad.core.gates import Clip, OnPolicy, UnitWeight
from policygrad.core.objective import gate_weight, surrogate, with_selected_tokens
from policygrad.errors import PolicygradError
from policygrad.findings import (
    Cause,
    Finding,
    Tolerance,
    differs,
    explain_difference,
    holds,
    least_squares,
    not_checked,
    relative_error,
)


@dataclass(frozen=True)
class Audit:
    """All findings about a recording, or about two."""

    findings: tuple[Finding, ...]
    source: str = ""

    @property
    def agrees(self) -> bool:
        """True if something holds and nothing differs."""
        statuses = {finding.status for finding in self.findings}
        return "differs" not in statuses and "holds" in statuses

    def __str__(self) -> str:
        return render_text(self)

    def as_dict(self) -> dict[str, Any]:
        """Return the findings for JSON; see docs/trust.md."""
        findings = [finding.as_dict() for finding in self.findings]
        return {"source": self.source, "agrees": self.agrees, "findings": findings}


def render_text(audit: Audit) -> str:
    """Render one line per finding."""
    width = max((len(finding.subject) for finding in audit.findings), default=0)
    marks = {"holds": "ok", "differs": "DIFFERS", "not checked": "–"}
    return "\n".join(f"{f.subject:{width}}  {marks[f.status]:7}  {f.message}" for f in audit.findings)


def render_markdown(audit: Audit) -> str:
    """Render a table."""
    rows = [f"| {f.subject} | {f.status} | {f.message.replace('|', chr(92) + '|')} |" for f in audit.findings]
    return "\n".join(["| subject | status | message |", "| --- | --- | --- |", *rows])


# --- one recording


def audit(recording: AuditBatch | Mapping[str, Any] | str | Path, expect: str | None = None) -> Audit:
    """Name the formulas that reproduce a recording, stage by stage.

    Args:
        recording: a recording, tensors by name, or a file.
        expect: an algorithm of policygrad to compare with.
    """
    batch = as_batch(recording, "recording")
    advantages = search_advantages(batch)
    psi_options = [] if batch.advantage is None else [("", _fill_rows(batch.advantage, batch.mask))]
    if not psi_options:
        psi_options = _advantages_of_rewards(batch)
    loss = settle_by_value(batch, search_loss(batch, psi_options))
    best = loss.matches[0] if loss.matches else None
    findings = [
        *_check_logp(batch),
        _report_advantages(batch, advantages),
        *(_report_loss(batch, loss) if best is not None else [_report_nearest(batch, loss)]),
    ]
    if best is not None:
        findings.append(_name_rows(batch, advantages, best))
    if expect is not None:
        findings += compare_with_row(batch, get_algorithm(expect), best)
    return Audit(tuple(findings), batch.source)


def _fill_rows(psi: Tensor, mask: Tensor) -> Tensor:
    """Continue each row's advantage off the mask, where it is one number: a shifted mask reads it there."""
    first = masked.first_valid(psi, mask)[:, None].expand(mask.shape)
    constant = (masked.apply_mask(psi - first, mask) == 0).all(1, keepdim=True)
    beyond = torch.where(psi == 0, first, psi.nan_to_num())  # some write 0 there
    return torch.where(mask, psi, torch.where(constant, beyond, psi.nan_to_num()))


def _advantages_of_rewards(batch: AuditBatch) -> list[tuple[str, Tensor]]:
    """Return Ψ by conventional formulas for a recording with rewards and without advantages."""
    if batch.reward is None:
        return []
    chains: list[tuple[Any, ...]] = [(BatchMean(),), ()]
    if batch.group is not None:
        chains = [
            (GroupMean(), GroupStd(1e-4)),
            (GroupMean(), GroupStd(1e-6)),
            (GroupMean(), GroupStd(1e-4, 0)),
            (GroupMean(),),
            (LeaveOneOut(),),
            (GroupMean(), BatchStd(1e-4, of="rewards")),
            *chains,
        ]
    options = []
    for chain in chains:
        data = library_batch(batch, batch.mask, None)
        psi = reward_to_go(data)
        for link in chain:
            psi = link(psi, data)
        options.append((describe_chain(chain), psi))
    return options


def _check_logp(batch: AuditBatch) -> list[Finding]:
    """Check the log-probabilities against one another and against logits."""
    findings = list[Finding]()
    if batch.logits is not None and batch.tokens is not None:
        for name in ("logp", "logp_old", "logp_sampler", "logp_ref"):
            value = getattr(batch, name)
            if value is None:
                continue
            # Those of another policy say nothing about a temperature.
            if name == "logp" or batch.logp is None or relative_error(value[batch.mask], batch.logp[batch.mask]) < 1:
                findings += _find_temperature(batch, name, value)
    if batch.logp_old is not None and batch.logp_sampler is not None:
        error = relative_error(batch.logp_old[batch.mask], batch.logp_sampler[batch.mask])
        if error <= batch.tolerance:
            text = "π_old is the sampler's: logp_old equals logp_sampler, so the ratio also corrects for the engine"
            findings.append(differs("π_old", text, error=error))
    for name in ("logp_old", "logp_sampler", "logp_ref"):
        shift = _find_shift(batch, name)
        if shift:
            side = "right" if shift > 0 else "left"
            text = f"{name} is shifted by {abs(shift)} token to the {side} against logp"
            findings.append(differs(f"log-probabilities: {name}", text))
    return findings


def _find_temperature(batch: AuditBatch, name: str, value: Tensor) -> list[Finding]:
    assert batch.logits is not None
    assert batch.tokens is not None
    recorded = batch.setting("temperature") or 1.0

    def error(temperature: float) -> float:
        assert batch.logits is not None
        assert batch.tokens is not None
        logp = (batch.logits / temperature).log_softmax(-1).gather(-1, batch.tokens[..., None])[..., 0]
        return relative_error(value[batch.mask], logp[batch.mask])

    stage = f"log-probabilities: {name}"
    if error(recorded) <= batch.tolerance:
        return [holds(stage, f"{name} is that of the logits at temperature {recorded:g}", error=error(recorded))]
    low, high = math.log(0.05), math.log(20.0)
    coarse = min((low + (high - low) * i / 120 for i in range(121)), key=lambda x: error(math.exp(x)))
    low, high = coarse - 0.06, coarse + 0.06
    for _ in range(80):
        one, two = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, two) if error(math.exp(one)) < error(math.exp(two)) else (one, high)
    best = math.exp((low + high) / 2)
    rounded = float(f"{best:.3g}")
    best = rounded if error(rounded) <= max(batch.tolerance, error(best)) else best
    if error(best) > batch.tolerance:
        return (
            []
            if name != "logp"
            else [differs(stage, f"{name} is at no temperature that of the logits", error=error(best))]
        )
    text = f"{name} is under temperature {best:g}, where temperature {recorded:g} is recorded or implied"
    return [differs(stage, text, error=error(best), factor=best / recorded)]


def _find_shift(batch: AuditBatch, name: str) -> int:
    """Return ±1 if a field agrees with logp far better when it is moved by one token; 0 if not."""
    value = getattr(batch, name)
    if value is None or batch.logp is None or batch.mask.shape[1] < 4:
        return 0

    def distance(shift: int) -> float:
        assert batch.logp is not None
        moved, counted = value.roll(-shift, 1), batch.mask & batch.mask.roll(-shift, 1)
        if shift > 0:
            counted[:, -shift:] = False
        elif shift < 0:
            counted[:, :-shift] = False
        return float((moved - batch.logp)[counted].abs().mean()) if bool(counted.any()) else math.inf

    straight = distance(0)
    shifts = [(distance(shift), shift) for shift in (1, -1)]
    best, shift = min(shifts)
    return shift if best < 0.2 * straight else 0


def _report_advantages(batch: AuditBatch, result: AdvantageResult) -> Finding:
    if result.reason:
        return not_checked("advantages", f"not checked: {result.reason}")
    if result.matches:
        first = result.matches[0]
        epsilons = [m.epsilon for m in result.matches if m.family == first.family and m.epsilon is not None]
        alternatives = list(dict.fromkeys(m.family for m in result.matches if m.family != first.family))
        name = first.name
        if len(epsilons) > 1:
            numbers = ", ".join(f"{x:g}" for x in epsilons)
            name = f"{first.family} with eps {numbers} (not told apart)"
        text = f"{name}, to {first.error:.0e}" + _cannot_tell(alternatives)
        return holds("advantages", text, error=first.error)
    nearest = result.nearest
    assert nearest is not None
    if nearest.scaled_error <= batch.tolerance:
        text = f"{nearest.factor:.6g} times {nearest.name}{_explain_factor(nearest.factor, batch)}"
        return differs("advantages", text, error=nearest.error, factor=nearest.factor)
    rolled = _find_rolled_advantages(batch, result)
    if rolled:
        return rolled
    if batch.advantage is not None and batch.rollout_advantage is None and _varies_in_rows(batch.advantage, batch.mask):
        text = "not checked: they differ from token to token, as with a critic or rewards per token, which are not recorded"
        return not_checked("advantages", text)
    text = f"no formula reproduces them; nearest is {nearest.name}, which differs by {nearest.error:.2g} of the largest advantage"
    return differs("advantages", text, error=nearest.error)


def _varies_in_rows(psi: Tensor, mask: Tensor) -> bool:
    first = masked.first_valid(psi, mask)[:, None].expand(mask.shape)
    return relative_error(psi[mask], first[mask]) > 1e-6


def _find_rolled_advantages(batch: AuditBatch, result: AdvantageResult) -> Finding | None:
    """Look for the advantages of another row."""
    if batch.rollout_advantage is not None or batch.advantage is None:
        return None
    for steps, word in ((1, "previous"), (-1, "next")):
        moved = replace(batch, advantage=batch.advantage.roll(-steps, 0), mask=batch.mask)
        # Values off the mask are filled, because rows have other lengths.
        filled = masked.first_valid(moved.advantage, batch.mask.roll(-steps, 0))  # type: ignore[arg-type]
        moved_result = search_advantages(replace(moved, advantage=filled[:, None].expand(batch.mask.shape)))
        if moved_result.matches:
            text = f"{moved_result.matches[0].name}, but each completion has the advantage of the {word} one"
            return differs("advantages", text, error=moved_result.matches[0].error)
    return None


def _cannot_tell(alternatives: Iterable[str]) -> str:
    names = list(dict.fromkeys(alternatives))
    if not names:
        return ""
    shown = "; ".join(names[:6]) + (f"; and {len(names) - 6} more" if len(names) > 6 else "")
    return f". Cannot be told apart on this batch: {shown}"


def _explain_factor(factor: float, batch: AuditBatch) -> str:
    """Name the number of the batch that a factor is, or return ""."""
    counts = dict[str, float]()
    if batch.micro_batch is not None:
        counts["the number of micro-batches"] = float(len(torch.unique(batch.micro_batch)))
    if batch.rank is not None:
        counts["the number of ranks"] = float(len(torch.unique(batch.rank)))
    for name in ("gradient_accumulation_steps", "world_size", "num_processes", "num_generations"):
        if (value := batch.setting(name)) is not None:
            counts.setdefault(name, value)
    accumulated, steps = batch.setting("gradient_accumulation_steps"), batch.setting("steps_per_generation")
    if accumulated and steps:
        counts["gradient_accumulation_steps/steps_per_generation"] = accumulated / steps
    if batch.group is not None:
        sizes = torch.unique(batch.group, return_counts=True)[1]
        if len(torch.unique(sizes)) == 1:
            counts["the completions of a prompt, G"] = float(sizes[0])
            if sizes[0] > 1:
                counts["G/(G − 1)"] = float(sizes[0]) / float(sizes[0] - 1)
    counts["the number of completions"] = float(batch.mask.any(1).sum())
    counts["the number of tokens"] = float(batch.mask.sum())
    if abs(factor + 1) <= batch.tolerance:
        return ": the sign is reversed"
    names = list[str]()
    for name, count in counts.items():
        if count not in (0.0, 1.0):
            if abs(factor / count - 1) <= 10 * batch.tolerance:
                names.append(f"is {name}")
            elif abs(factor * count - 1) <= 10 * batch.tolerance:
                names.append(f"is 1 over {name}")
    return f": the factor {' or '.join(names)}" if names else ""


def _report_loss(batch: AuditBatch, result: LossResult) -> list[Finding]:
    """Report the stages of a loss that some combination reproduces."""
    best, by = result.matches[0], result.by
    findings = list[Finding]()
    if by == "loss" and len({(m.weight.gate, m.average.name) for m in result.matches}) > 12:
        text = f"{len(result.matches)} combinations give this loss: record the gradient (logp.grad) to tell them apart"
        return [not_checked("loss", text)]
    if by == "gradient":
        text = best.mask or "the gradient is 0 exactly off the mask"
        report = differs if best.mask.startswith(("the mask", "every")) else holds
        findings.append(report("mask", text, error=best.error))
    if best.weight.psi and batch.advantage is None:
        names = [m.weight.psi for m in result.matches]
        text = f"as the loss shows: {best.weight.psi}{_cannot_tell(name for name in names if name != best.weight.psi)}"
        findings.append(holds("advantages in the loss", text, error=best.error))
    elif best.weight.psi:
        findings.append(differs("advantages in the loss", best.weight.psi, error=best.error))
    findings.append(_report_old(batch, best))
    findings.append(_report_gate(batch, result))
    if best.weight.correction:
        candidates = [w for m in result.matches for w in (m.weight, *m.weight.equals)]
        key = (best.weight.gate, best.weight.ratio, best.weight.psi)
        corrections = {w.correction for w in candidates if (w.gate, w.ratio, w.psi) == key} - {
            best.weight.correction,
            "",
        }
        text = f"the weight is multiplied by {best.weight.correction}{_cannot_tell(sorted(corrections))}"
        findings.append(holds("correction for the sampler", text, error=best.error))
    findings.append(_report_penalty(batch, result))
    findings.append(_report_average(batch, result))
    if by == "gradient" and best.factor != 1.0:
        text = f"the gradient is {best.factor:.6g} times this formula's{_explain_factor(best.factor, batch)}"
        findings.append(differs("scale", text, error=best.error, factor=best.factor))
    if batch.loss is not None:
        findings.append(_report_value(batch, best))
    return findings


def _report_old(batch: AuditBatch, best: LossMatch) -> Finding:
    if best.weight.old == "logp_sampler":
        if batch.logp_old is None:
            return holds("π_old", "logp_sampler", error=best.error)
        text = "π_old is the sampler's: the ratio's denominator is logp_sampler, although logp_old is recorded"
        return differs("π_old", text, error=best.error)
    if best.weight.old == "the policy itself":
        if batch.logp_old is None:
            return holds("π_old", "the policy itself: every ratio is 1 (no logp_old is recorded)", error=best.error)
        return differs("π_old", "the policy itself: every ratio is 1, although logp_old is recorded", error=best.error)
    assert batch.logp_old is not None
    assert batch.logp is not None
    same = relative_error(batch.logp[best.tokens], batch.logp_old[best.tokens]) <= batch.tolerance
    text = "logp_old, which equals logp: every ratio is 1" if same else "logp_old"
    return holds("π_old", text, error=best.error)


def _report_gate(batch: AuditBatch, result: LossResult) -> Finding:
    best = result.matches[0]
    weight = best.weight
    level = {"Token": "per token", "Sequence": "per completion (Sequence)"}.get(weight.ratio, f"({weight.ratio})")
    equivalent = [w for m in result.matches for w in (m.weight, *m.weight.equals)]
    equivalent = [w for w in equivalent if (w.psi, w.correction) == (weight.psi, weight.correction)]
    ones = relative_error(torch.ones_like(weight.ratios[best.tokens]), weight.ratios[best.tokens]) <= batch.tolerance
    if ones and not weight.fault:
        return holds("ratio and gate", "w = 1: every ratio is 1, where all gates agree", error=best.error)
    levels = {"Token": "per token", "Sequence": "per completion", "SequenceProduct": "of the product"}
    names = [f"{w.gate} {levels[w.ratio]}" for w in equivalent if (w.gate, w.ratio) != (weight.gate, weight.ratio)]
    if weight.fault:
        return differs("ratio and gate", f"{weight.gate}, ratio {level}: {weight.fault}", error=best.error)
    text = f"{weight.gate}, ratio {level}"
    names = [_without_bounds(name) for name in names]
    if isinstance(weight.part, Clip) and result.by == "gradient":
        text += _describe_bounds(weight.ratios, weight.score, best.tokens, batch)
    if isinstance(weight.part, Clip):
        names = [name for name in names if not name.startswith("Clip") or "c=" in name]  # a dual clip is another gate
    elif weight.gate == "Importance":
        clips = [name for name in names if name.startswith(("Clip ", "clip("))]
        if clips:
            up, down = _reach(weight, best.tokens)
            text += f": no token is clipped, so a clip with low ≥ {down:.3g} and high ≥ {up:.3g} is the same"
            names = [name for name in names if name not in clips]
    return holds("ratio and gate", text + f", to {best.error:.0e}" + _cannot_tell(names), error=best.error)


def _without_bounds(name: str) -> str:
    """Leave out the settings of a part that differ between candidates with the same numbers."""
    head, opened, tail = name.partition("(")
    if not opened or head not in ("Clip", "ClippedImportance"):
        return name
    dual = " and a dual bound" if "c=" in tail else ""
    return f"{head} with other bounds{dual}{tail.partition(')')[2]}"


def _reach(weight: Any, tokens: Tensor) -> tuple[float, float]:
    """Return how far r exceeds 1 where Ψ > 0, and falls below it where Ψ < 0."""
    up, down = tokens & (weight.score > 0), tokens & (weight.score < 0)
    high = float((weight.ratios[up] - 1).max()) if bool(up.any()) else 0.0
    low = float((1 - weight.ratios[down]).max()) if bool(down.any()) else 0.0
    return max(0.0, high), max(0.0, low)


def _describe_bounds(ratios: Tensor, score: Tensor, tokens: Tensor, batch: AuditBatch) -> str:
    """Say between which numbers the bounds of a clip must lie."""
    psi = batch.advantage
    if psi is None:
        return ""
    zero = score == 0
    sides = bracket(ratios, psi, tokens & zero & (psi != 0), tokens & ~zero)
    if sides is None:
        return ""
    parts = []
    for name, (at_least, below) in zip(("low", "high"), sides, strict=True):
        end = f" and < {below:.4g}" if math.isfinite(below) else ", no token being clipped there"
        parts.append(f"{name} ≥ {at_least:.4g}{end}")
    return f" (the gradient shows {'; '.join(parts)})"


def _report_penalty(batch: AuditBatch, result: LossResult) -> Finding:
    best = result.matches[0]
    if best.penalty is None:
        if batch.logp_ref is None:
            return not_checked("KL", "none that this recording could show: no logp_ref is recorded")
        return holds("KL", "none in the loss", error=best.error)
    names = [m.penalty.name for m in result.matches if m.penalty is not None and m.penalty.name != best.penalty.name]
    configured = batch.setting("beta", "kl_loss_coef")
    if best.penalty.name == "k1":
        text = f"k1 in the loss with β = {best.beta:.4g}: its gradient is β·∇log π, which is 0 in expectation"
        return differs("KL", text, error=best.error)
    kind, beta = best.penalty.name, f"beta={best.beta:.4g}"
    part = f"{kind}({beta})" if kind.startswith(("KL", "Drift")) else f"KLToReference({beta}, form={kind!r})"
    text = f"{part} in the loss{_cannot_tell(names)}"
    if configured is not None and abs(best.beta / configured - 1) > 100 * batch.tolerance:
        text += f"; the settings say β = {configured:g}, so it is {best.beta / configured:.4g} times that"
        return differs("KL", text, error=best.error, factor=best.beta / configured)
    return holds("KL", text, error=best.error)


def _report_average(batch: AuditBatch, result: LossResult) -> Finding:
    best = result.matches[0]
    average = best.average
    names = [name for m in result.matches for name in (m.average.name, *m.average.equals) if name != average.name]
    sizes = None if batch.micro_batch is None else torch.unique(batch.micro_batch, return_counts=True)[1]
    if sizes is not None and len(torch.unique(sizes)) == 1:  # a mean of equal parts' means is the mean
        names = [name for name in names if not name.startswith("mean of completions")]
    factor = None if average.intended is None else project(batch, best, average.intended)
    if average.fault and factor is not None:
        assert average.intended is not None
        text = f"{average.fault}: {_size(factor)} on this batch"
        inside = average.intended > 0
        spread = average.coefficients[inside] / average.intended[inside]
        if float(spread.max() - spread.min()) > 1e-6:
            text += f" ({float(spread.min()):.3g} to {float(spread.max()):.3g} times per token)"
        accumulated, steps = batch.setting("gradient_accumulation_steps"), batch.setting("steps_per_generation")
        if accumulated and steps and accumulated != steps and average.name.startswith("sum over the rollout's"):
            share = accumulated / steps
            text += f"; about {share:g} is to be expected, gradient_accumulation_steps/steps_per_generation"
            text += " (huggingface/trl#6024)" if str(batch.settings.get("trainer", "")).startswith("trl") else ""
        return differs("aggregation", text + _cannot_tell(names), error=best.error, factor=factor)
    text = f"{average.name}, to {best.error:.0e}{_cannot_tell(names)}"
    return holds("aggregation", text, error=best.error)


def _size(factor: float) -> str:
    if factor < 0:
        return f"{factor:.4g} times the intended gradient"
    if abs(factor - 1) < 5e-4:
        return "the gradient has the intended size, but other weights"
    return f"{factor:.4g} times the intended gradient, {'too large' if factor > 1 else 'too small'}"


def _report_value(batch: AuditBatch, best: LossMatch) -> Finding:
    """Compare the recorded loss with the value of the formula that gives its gradient."""
    assert batch.loss is not None
    actual, limit = float(batch.loss), value_tolerance(batch)
    forms = loss_values(batch, best)
    name, _, _ = min(forms, key=lambda form: abs(actual - form[1]) / form[2])
    error = min(abs(actual - value) / scale for _, value, scale in forms)
    if error <= limit:
        return holds("loss", f"{actual:.6g} is {name}, to {error:.0e} of the sum of its terms", error=error)
    if (unscaled := value_error(batch, best)) <= limit:
        text = f"{actual:.6g} is the formula's value, without the factor of the gradient"
        return holds("loss", text, error=unscaled)
    for _, value, scale in forms:
        factor = actual / value if abs(value) > limit * scale else math.nan
        explained = _explain_factor(factor, batch) if math.isfinite(factor) else ""
        if explained:
            text = f"{actual:.6g} is {factor:.6g} times the value that belongs to the gradient{explained}"
            return differs("loss", text, error=error, factor=factor)
    text = f"{actual:.6g} is not the value that belongs to the gradient, {forms[0][1]:.6g} or {forms[1][1]:.6g}"
    return differs("loss", text, error=error)


def _report_nearest(batch: AuditBatch, result: LossResult) -> Finding:
    if result.reason:
        return not_checked("loss", f"not checked: {result.reason}")
    nearest = result.nearest
    if nearest is None:
        return not_checked("loss", "not checked: no candidate applies to this recording")
    parts = [nearest.weight.gate, nearest.weight.ratio, nearest.weight.correction, nearest.average.name]
    if nearest.penalty is not None:
        parts.append(f"KL {nearest.penalty.name} with β = {nearest.beta:.3g}")
    text = f"no combination reproduces the {result.by}. Nearest: {', '.join(part for part in parts if part)}"
    if batch.gradient is not None:
        total = nearest.weight.score + (0 if nearest.penalty is None else nearest.beta * nearest.penalty.score)
        gap = (batch.gradient + nearest.factor * nearest.average.coefficients * total).abs()
        scale = float(batch.gradient[batch.mask].abs().max()) or 1.0
        wrong = nearest.tokens & (gap > batch.tolerance * scale)
        row, column = divmod(int(masked.apply_mask(gap, nearest.tokens).argmax()), gap.shape[1])
        text += f", which differs at {int(wrong.sum())} of {int(nearest.tokens.sum())} tokens, most at row {row}, column {column}"
        if nearest.factor != 1.0:
            text += f", after a factor of {nearest.factor:.4g}"
    text += f"; largest difference {nearest.error:.2g} of the largest"
    return differs("loss", text, error=nearest.error)


def _name_rows(batch: AuditBatch, advantages: AdvantageResult, best: LossMatch) -> Finding:
    """Name the algorithms of the matrix with the same ratio, kind of gate and average."""
    average = best.average.part
    kinds: set[type] = {type(w.part) for w in (best.weight, *best.weight.equals) if w.part is not None}
    kinds |= {UnitWeight} if OnPolicy in kinds else set()
    ratios = {w.ratio for w in (best.weight, *best.weight.equals)}
    names = [
        name
        for name, row in ALGORITHMS.items()
        if average is not None
        and type(row.aggregation) is type(average)
        and type(row.gate) in kinds
        and (row.ratio is None or type(row.ratio).__name__ in ratios)
    ]
    if not names:
        return not_checked("algorithms", "no algorithm of policygrad has this ratio, gate and aggregation together")
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return holds("algorithms", f"ratio, gate and aggregation are those of {listed} (policygrad show NAME)")


# --- one recording against an algorithm


def compare_with_row(batch: AuditBatch, algorithm: Algorithm, best: LossMatch | None) -> list[Finding]:
    """Compare a recording with an algorithm's own numbers: Ψ, weights, coefficients, gradient."""
    stage = f"expected: {algorithm.name}"
    length = batch.setting("max_length", "max_completion_length", "max_tokens")
    algorithm = algorithm.with_max_tokens(int(length) if length else batch.mask.shape[1])
    data = library_batch(batch, batch.mask, batch.logp_old)
    findings = list[Finding]()
    psi = None
    if batch.rollout_reward is not None and batch.rollout_group is not None and batch.rollout_advantage is not None:
        rows = len(batch.rollout_reward)
        mask = torch.ones(rows, 1, dtype=torch.bool)
        rollout = Batch(mask=mask, group=batch.rollout_group, reward=batch.rollout_reward)
        findings.append(_compare_advantages(stage, batch.rollout_advantage[:, None], rollout, algorithm, batch)[0])
    elif batch.reward is not None and batch.group is not None:
        finding, psi = _compare_advantages(stage, batch.advantage, data, algorithm, batch)
        findings += [] if batch.advantage is None else [finding]
    psi = batch.advantage if batch.advantage is not None else psi
    if psi is None or batch.logp is None:
        return [
            *findings,
            not_checked(stage, "not checked: advantages (or rewards and groups) and logp are needed"),
        ]
    out = Forward(batch.logp.clone().requires_grad_())
    try:
        data = with_selected_tokens(out, data, psi, algorithm)
        weight, _ = gate_weight(out, data, psi, algorithm)
        loss = surrogate(out, data, psi, algorithm)
    except PolicygradError as error:
        return [*findings, not_checked(stage, f"not checked: {error}")]
    if best is not None:
        name, tokens = f"weights ({name_part(algorithm.gate)})", batch.mask & (masked.apply_mask(psi, batch.mask) != 0)
        expected = algorithm.apply_corrections(weight, out, data, psi)
        findings.append(_compare_tensors(f"{stage}, w", name, best.weight.score / psi, expected, tokens, batch))
        name, c = f"coefficients ({name_part(algorithm.aggregation)})", algorithm.coefficients(data)
        theirs = best.factor * best.average.coefficients
        findings.append(_compare_tensors(f"{stage}, c", name, theirs, c, batch.mask, batch, project(batch, best, c)))
    if batch.gradient is not None:
        [expected] = torch.autograd.grad(loss, out.logp)
        findings.append(
            _compare_tensors(f"{stage}, gradient", "the full gradient", batch.gradient, expected, batch.mask, batch)
        )
    return findings


def _compare_advantages(
    stage: str, theirs: Tensor | None, data: Batch, algorithm: Algorithm, batch: AuditBatch
) -> tuple[Finding, Tensor | None]:
    """Return (finding, the algorithm's Ψ); the recorded rewards are shaped already."""
    try:
        psi = algorithm.compute_advantages(data, shaped=data)
    except PolicygradError as error:
        return not_checked(f"{stage}, Ψ", f"not checked: {error}"), None
    return _compare_tensors(f"{stage}, Ψ", "advantages", psi if theirs is None else theirs, psi, data.mask, batch), psi


def _compare_tensors(
    subject: str,
    name: str,
    actual: Tensor,
    expected: Tensor,
    mask: Tensor,
    batch: AuditBatch,
    factor: float | None = None,
) -> Finding:
    """Compare two tensors on a mask.

    Args:
        factor: What to report as the factor between them; None = that by least squares.
    """
    actual, expected = masked.apply_mask(actual, mask), masked.apply_mask(expected, mask)
    error = relative_error(actual, expected)
    difference = explain_difference(
        expected,
        actual,
        mask,
        Tolerance(of_largest=batch.tolerance),
        describe_factor=lambda x: _explain_factor(x, batch),
    )
    if difference is None:
        return holds(subject, f"{name}: equal, to {error:.0e}", error=error)
    factor = least_squares(actual, expected) if factor is None else factor
    overall = "" if difference.factor is not None else f"; {factor:.4g} times overall"
    return differs(subject, f"{name}: {difference.message}{overall}", error=error, factor=factor)


# --- two recordings of one batch


def compare(
    ours: AuditBatch | Mapping[str, Any] | str | Path, theirs: AuditBatch | Mapping[str, Any] | str | Path
) -> Audit:
    """Compare two recordings of the same batch field by field, and name the kind of each difference.

    For example `print(policygrad.audit.compare("ours.safetensors", {"mask": mask, "logp": logp}))`.
    """
    mine, other = as_batch(ours, "ours"), as_batch(theirs, "theirs")
    left, right = mine.tensors(), other.tensors()
    tolerance = Tolerance(of_largest=max(mine.tolerance, other.tolerance))
    findings = list[Finding]()
    for name in FIELDS:
        if name in left and name in right:
            findings.append(_compare_field(name, left[name], right[name], mine, other, tolerance))
        elif name in left or name in right:
            side = "ours" if name in left else "theirs"
            findings.append(not_checked(name, f"only in {side}"))
    return Audit(tuple(findings), f"{mine.source} and {other.source}")


def _compare_field(
    name: str, left: Tensor, right: Tensor, mine: AuditBatch, other: AuditBatch, tolerance: Tolerance
) -> Finding:
    is_id = name in ("group", "micro_batch", "rank", "rollout_group")  # ids are equal if they split the batch alike
    if is_id and left.shape == right.shape:
        left, right = (torch.unique(x, return_inverse=True)[1] for x in (left, right))
        if torch.equal(left[:, None] == left, right[:, None] == right):
            return holds(name, "the same sets of completions", error=0.0)
    per_token = left.shape == right.shape == mine.mask.shape and name not in ("rewards", "mask")
    counted = mine.mask & other.mask if per_token else torch.ones(left.shape, dtype=torch.bool)
    causes = _iter_temperatures(mine) if name.startswith("logp") else ()
    difference = explain_difference(
        left, right, counted, tolerance, causes, describe_factor=lambda factor: _explain_factor(factor, mine)
    )
    if difference is not None:
        return differs(name, difference.message, error=difference.error, factor=difference.factor)
    if not left.is_floating_point():
        return holds(name, "equal", error=0.0)
    error = relative_error(left[counted], right[counted])
    return holds(name, f"equal, to {error:.0e}", error=error)


def _iter_temperatures(batch: AuditBatch) -> Iterator[Cause]:
    """Iterate over the log-probabilities that the recorded logits give at conventional temperatures."""
    if batch.logits is None or batch.tokens is None:
        return
    for temperature in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0):
        logp = (batch.logits / temperature).log_softmax(-1).gather(-1, batch.tokens[..., None])[..., 0]
        yield Cause(f"under temperature {temperature:g}", logp, factor=temperature)
