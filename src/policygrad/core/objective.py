"""THE EQUATION.

    ∇J = Σ_{i,t} ( c_{i,t} · w_{i,t} · Ψ_{i,t} + Σ_m c^m_{i,t} · k^m_{i,t} ) · ∇log π_θ(o_{i,t})

c: how tokens are averaged (aggregates); w: what the ratio lets through (ratios, gates); Ψ: the advantage; k^m: score
terms (KL, entropy). All of them under stop-gradient, so one loss −Σ sg[…] log π_θ serves every algorithm, and
micro-batches and data-parallel shards are plain sums.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import Gate, LossTerm, Term
from policygrad.core.batch import Batch, Coefficients, Forward
from policygrad.core.kl_controllers import beta_metrics
from policygrad.core.metrics import Max, Metrics, Sum, effective_size, masked_mean
from policygrad.core.outputs import check_per_token, is_finite
from policygrad.core.ratios import bounded_exp, bounded_expm1
from policygrad.core.terms import log_ratio
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


def gate_weight(out: Forward, batch: Batch, psi: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """(w, r), each [B, T], without graph; r is 1 where the algorithm has no ratio."""
    psi = _masked(psi, out, batch)
    ratio = _ratio(out, batch, algorithm)
    weight = algorithm.gate.weight(ratio, psi, with_selected_tokens(out, batch, psi, algorithm))
    return check_per_token(weight, algorithm.gate, batch.mask, "weight"), ratio


def _ratio(out: Forward, batch: Batch, algorithm: Algorithm) -> Tensor:
    change, ratio = log_ratio(out.logp, batch.logp_old, batch.mask), algorithm.ratio
    return torch.ones_like(change) if ratio is None else check_per_token(ratio(change, batch.mask), ratio, batch.mask)


def _value(gate: Gate, ratio: Tensor, psi: Tensor, batch: Batch) -> Tensor:
    return check_per_token(gate.value(ratio, psi, batch), gate, batch.mask, "value")


def _score(term: Term, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
    return check_per_token(term.score(out, batch, psi), term, batch.mask, "score")


def _of_term(term: Term | LossTerm, out: Forward, batch: Batch, psi: Tensor) -> Tensor:
    """A term's share of the objective per token; with graph where it is a loss term."""
    if isinstance(term, LossTerm):
        return check_per_token(term.objective(out, batch, psi), term, batch.mask, "objective")
    return check_per_token(term.value(out, batch, psi), term, batch.mask, "value")


def _still(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


@torch.no_grad()
def with_selected_tokens(out: Forward | None, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Batch:
    """The batch with `selected`, what a part chooses among all of its tokens (`Part.select_tokens`); as it is where no part does, or
    where it has been done. `batch` is one whole update, before any split."""
    part = algorithm.token_selector
    if part is None or batch.selected is not None:
        return batch
    now = (
        None if out is None else Forward(out.logp.detach(), *(_still(x) for x in (out.entropy, out.values, out.kl_old)))
    )
    chosen = check_per_token(
        part.select_tokens(now, batch, masked.apply_mask(psi, batch.mask)), part, batch.mask, "select"
    )
    return replace(batch, selected=chosen & batch.mask)


def _masked(psi: Tensor, out: Forward, batch: Batch) -> Tensor:
    """Ψ, 0 off the mask. What would broadcast in silence (Ψ [B] where B = T) or fail deep inside torch is refused here."""
    for name, value in (("psi", psi), *((f"out.{f.name}", getattr(out, f.name)) for f in fields(Forward))):
        if value is not None:
            _check_shape(name, value, batch)
    return masked.apply_mask(psi, batch.mask)


def _check_shape(name: str, value: Tensor, batch: Batch) -> None:
    if value.shape != batch.mask.shape:
        way_out = {
            "psi": "take it from `algorithm.advantages(batch)`; one value per completion is psi[:, None].expand(mask.shape)",
            "out.logp": "log π_θ of the sampled tokens alone, without the prompt's, padded like Batch.mask",
        }.get(name, "one value per token of the batch")
        raise ConfigError(
            f"{name} has shape {list(value.shape)}, expected [B, T] = {list(batch.mask.shape)} as in Batch.mask: {way_out}"
        )


def _of_update(
    out: Forward, batch: Batch, psi: Tensor, algorithm: Algorithm, coef: Tensor | Coefficients | None
) -> tuple[Batch, Coefficients]:
    """The batch with what is selected among all of its tokens, and its coefficients; a share is given both."""
    if coef is None:
        batch = with_selected_tokens(out, batch, psi, algorithm)
    elif algorithm.token_selector is not None and batch.selected is None:
        raise ConfigError(
            f"{type(algorithm.token_selector).__name__} chooses among all tokens of an update, and a share of it (`coef` is given) "
            "has no Batch.selected: take the share from `policygrad.core.objective.with_selected` of the whole"
        )
    return batch, _coefficients(batch, algorithm, coef)


def _coefficients(batch: Batch, algorithm: Algorithm, coef: Tensor | Coefficients | None) -> Coefficients:
    """One tensor for the policy and one per term; a lone tensor serves the terms that have no aggregation of their own."""
    if coef is None:
        return algorithm.all_coefficients(batch)
    for i, c in enumerate(coef if isinstance(coef, tuple) else (coef,)):
        _check_shape(f"coef[{i}]" if isinstance(coef, tuple) else "coef", c, batch)
    if isinstance(coef, tuple):
        if len(coef) != 1 + len(algorithm.terms):
            raise ConfigError(
                f"coef holds {len(coef)} tensors; {algorithm.name} needs {1 + len(algorithm.terms)}, the policy's and one per "
                "term: pass this share's part of `algorithm.all_coefficients(step)`"
            )
        return coef
    other_aggregations = [type(term).__name__ for term in algorithm.terms if term.aggregation is not None]
    if other_aggregations:
        raise ConfigError(
            f"{', '.join(other_aggregations)} aggregates otherwise than the policy term: pass this share's part of "
            "`algorithm.all_coefficients(step)`, a tuple, as `coef`"
        )
    return (coef,) * (1 + len(algorithm.terms))


def surrogate(
    out: Forward | Tensor,
    batch: Batch,
    psi: Tensor,
    algorithm: Algorithm,
    coef: Tensor | Coefficients | None = None,
) -> Tensor:
    """Scalar loss with gradient −Σ (c w Ψ + Σ c^m k^m) ∇log π_θ. Its value means nothing; `objective` is the metric.

    Args:
        out: the forward pass, or its log π_θ [B, T] alone, with graph.
        psi: [B, T], from `algorithm.advantages` of the whole rollout.
        coef: this share's part of `algorithm.coefficients(step)` [B, T] (or of `all_coefficients`, a tuple, when a term
            has an aggregation of its own); None = `batch` is the whole update.

    Raises:
        ConfigError: an argument, or what a part returns, whose shape is not the batch's, named; a field that a part needs and the
            batch lacks.
    """
    out = out if isinstance(out, Forward) else Forward(out)
    psi = _masked(psi, out, batch)
    batch, (policy, *per_term) = _of_update(out, batch, psi, algorithm, coef)
    with torch.no_grad():
        weight, _ = gate_weight(out, batch, psi, algorithm)
        score = policy * algorithm.apply_corrections(weight, batch, psi) * psi
        for term, c in zip(algorithm.terms, per_term, strict=True):
            if not isinstance(term, LossTerm):
                score = score + c * _score(term, out, batch, psi)
        score = masked.apply_mask(score, batch.mask)
    loss = -(score * masked.apply_mask(out.logp, batch.mask)).sum()
    for term, c in zip(algorithm.terms, per_term, strict=True):
        if isinstance(term, LossTerm):
            loss = loss - (c * masked.apply_mask(_of_term(term, out, batch, psi), batch.mask)).sum()
    return loss


@torch.no_grad()
def objective(
    out: Forward | Tensor,
    batch: Batch,
    psi: Tensor,
    algorithm: Algorithm,
    coef: Tensor | Coefficients | None = None,
) -> Tensor:
    """The paper's objective [], a metric: Σ c·gate.value(r, Ψ) + Σ c^m·term.value. A share's values add up to the step's."""
    out = out if isinstance(out, Forward) else Forward(out)
    psi = _masked(psi, out, batch)
    batch, (policy, *per_term) = _of_update(out, batch, psi, algorithm, coef)
    ratio = _ratio(out, batch, algorithm)
    value = algorithm.apply_corrections(_value(algorithm.gate, ratio, psi, batch), batch, psi)
    if algorithm.ratio is not None and algorithm.ratio.joint:  # each token holds 1/|o| of the completion's value
        value = value / batch.lengths.clamp(min=1)[:, None]
    total = masked.apply_mask(policy * value, batch.mask).sum()
    for term, c in zip(algorithm.terms, per_term, strict=True):
        total = total + masked.apply_mask(c * _of_term(term, out, batch, psi), batch.mask).sum()
    return total


@torch.no_grad()
def find_nonfinite_factors(
    out: Forward, batch: Batch, psi: Tensor, algorithm: Algorithm, coef: Coefficients
) -> Metrics:
    """Measure which factors of a gradient hold NaN or infinity: 1 or 0 by field and position, as in `terms.0`, each after those
    that it is computed from. `logp` comes first: what the model itself yields. For after a gradient that was not finite."""
    psi = _masked(psi, out, batch)
    weight, ratio = gate_weight(out, batch, psi, algorithm)
    passed = [x for f in fields(Forward) if (x := getattr(out, f.name)) is not None]
    factors = {"logp": passed, "psi": [psi], "ratio": [ratio], "gate": [weight], "aggregation": [coef[0]]}
    for i, correction in enumerate(algorithm.corrections):
        factors[f"corrections.{i}"] = [correction(batch, psi)]
    for i, (term, c) in enumerate(zip(algorithm.terms, coef[1:], strict=True)):
        factors[f"terms.{i}"] = [c, *_gradient_of(term, out, batch, psi)]
    return {key: Max(float(not all(is_finite(x, batch.mask) for x in some))) for key, some in factors.items()}


def _gradient_of(term: Term | LossTerm, out: Forward, batch: Batch, psi: Tensor) -> list[Tensor]:
    """A term's score; a loss term's objective and its gradient in each field of the forward pass, which may be NaN alone."""
    if not isinstance(term, LossTerm):
        return [_score(term, out, batch, psi)]
    with torch.enable_grad():
        given = {f.name: x for f in fields(Forward) if (x := getattr(out, f.name)) is not None}
        leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
        value = _of_term(term, Forward(**leaves), batch, psi)
        if not value.requires_grad:
            return [value]
        gradients = torch.autograd.grad(
            masked.apply_mask(value, batch.mask).sum(), list(leaves.values()), allow_unused=True
        )
    return [value, *(x for x in gradients if x is not None)]


@torch.no_grad()
def measure_forward(
    out: Forward,
    batch: Batch,
    psi: Tensor,
    algorithm: Algorithm,
    coef: Coefficients,
) -> Metrics:
    """What one forward pass tells.

    objective; ratio/max; clip_ratio/low and /high; kl, of π_θ to π_ref (nats a token, r·k3: unbiased though π_old sampled),
    and kl_old, of π_old to π_θ (k3; exact where `out.kl_old` is); beta/…, each β that adapts to a target; and of
    log π_old − log μ, μ what sampled:
    mismatch/logp_max, its largest size, mismatch/logp_mean, its mean size (nats a token), mismatch/ess, the effective sample
    size of π_old/μ as a fraction of the tokens; none of these with old_policy='sampler', where μ stands for π_old.

    All are of the completions in `batch`; KLs and mismatches are of what the policy sampled, demonstrations left out. A learner
    that skips completions with Ψ = 0 and no term's coefficient does not measure them, though their π_θ changes too: `kl_old` is
    then a mean over those computed (all of them with KLToOld).
    """
    mask, policy_tokens, psi = batch.mask, batch.policy_tokens, _masked(psi, out, batch)
    ratio = _ratio(out, batch, algorithm)
    logp = masked.apply_mask(out.logp.detach(), mask)
    metrics: Metrics = beta_metrics(part for _, part in algorithm.parts()) | {
        "objective": Sum(objective(out, batch, psi, algorithm, coef).double()),
        "ratio/max": Max(masked.apply_mask(ratio, mask).max() if mask.any() else 1.0),
    }
    clipped = algorithm.gate.clipped(ratio, psi, batch)
    if clipped is not None:
        for name, where in zip(("low", "high"), clipped, strict=True):
            where = check_per_token(where, algorithm.gate, mask, "clipped")
            metrics[f"clip_ratio/{name}"] = masked_mean(where.double(), mask)
    if batch.logp_ref is not None:
        u = logp - masked.apply_mask(batch.logp_ref, mask)
        r = bounded_exp(
            log_ratio(out.logp, batch.logp_old, mask)
        )  # without it a token that π_θ has given up on counts e^9
        metrics["kl"] = masked_mean(r * (bounded_expm1(-u) + u), policy_tokens)
    if batch.logp_old is not None:
        change = logp - masked.apply_mask(batch.logp_old, mask)
        metrics["kl_old"] = masked_mean(bounded_expm1(change) - change, policy_tokens)
    if out.kl_old is not None:
        metrics["kl_old"] = masked_mean(out.kl_old, policy_tokens)
    if batch.logp_sampler is not None and algorithm.old_policy != "sampler":  # that has it for π_old
        old = logp if batch.logp_old is None else masked.apply_mask(batch.logp_old, mask)
        gap = masked.apply_mask(old - masked.apply_mask(batch.logp_sampler, mask), policy_tokens)
        metrics["mismatch/logp_max"] = Max(gap.abs().max() if gap.numel() else 0.0)
        metrics["mismatch/logp_mean"] = masked_mean(gap.abs(), policy_tokens)
        metrics["mismatch/ess"] = effective_size(bounded_exp(gap), policy_tokens)
    return metrics


__all__ = ["find_nonfinite_factors", "gate_weight", "measure_forward", "objective", "surrogate", "with_selected_tokens"]
