"""The equation, as a surrogate loss, an objective for metrics, and per-pass measurements.

    ∇J = Σ_{i,t} ( c_{i,t} · w_{i,t} · Ψ_{i,t} + Σ_m c^m_{i,t} · k^m_{i,t} ) · ∇log π_θ(o_{i,t})

c: the averaging of tokens (aggregation); w: the weight that gate and ratio give a token; Ψ: the advantage; k^m: score terms (KL,
entropy). All are under stop-gradient, so one loss −Σ sg[…] log π_θ serves every algorithm, and micro-batches and data-parallel
shards simply add up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from policygrad.core import masked
from policygrad.core.base import LossTerm, Term
from policygrad.core.batch import Batch, Coefficients, Forward
from policygrad.core.kl_controllers import beta_metrics
from policygrad.core.metrics import Max, Metrics, Sum, effective_size, masked_mean
from policygrad.core.outputs import check_per_token, is_finite
from policygrad.core.precision import widen
from policygrad.core.ratios import bounded_exp, bounded_expm1
from policygrad.core.terms import log_ratio
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm


def gate_weight(out: Forward, batch: Batch, psi: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Compute (w, r), each [B, T], without graph; r is 1 if the algorithm has no ratio."""
    psi = _check_and_mask(psi, out, batch)
    ratio = _compute_ratio(out, batch, algorithm)
    weight = algorithm.gate.weight(ratio, psi, with_selected_tokens(out, batch, psi, algorithm))
    return check_per_token(weight, algorithm.gate, batch.mask, "weight"), ratio


def _compute_ratio(out: Forward, batch: Batch, algorithm: Algorithm) -> Tensor:
    change, ratio = log_ratio(out.logp, batch.logp_old, batch.mask), algorithm.ratio
    return torch.ones_like(change) if ratio is None else check_per_token(ratio(change, batch.mask), ratio, batch.mask)


def _score(term: Term, out: Forward, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Tensor:
    return _correct(
        check_per_token(term.score(out, batch, psi), term, batch.mask, "score"), term, out, batch, psi, algorithm
    )


def _term_value(term: Term | LossTerm, out: Forward, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Tensor:
    """Compute a term's share of the objective per token; a loss term's has a graph."""
    if isinstance(term, LossTerm):
        value = check_per_token(term.objective(out, batch, psi), term, batch.mask, "objective")
    else:
        value = check_per_token(term.value(out, batch, psi), term, batch.mask, "value")
    return _correct(value, term, out, batch, psi, algorithm)


def _correct(x: Tensor, term: Term | LossTerm, out: Forward, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Tensor:
    """Multiply a term by the corrections, which have no graph, if the policy learns from it."""
    if not algorithm.corrections or not algorithm.corrects(term):
        return x
    with torch.no_grad():
        factor = algorithm.apply_corrections(torch.ones_like(x), out, batch, psi)
    return masked.apply_mask(x, batch.mask) * masked.apply_mask(factor, batch.mask)


@torch.no_grad()
def with_selected_tokens(out: Forward | None, batch: Batch, psi: Tensor, algorithm: Algorithm) -> Batch:
    """Fill `Batch.selected` by `Part.select_tokens`, if a part needs it and it is not filled yet.

    Args:
        batch: one full update, before any split.
    """
    part = algorithm.token_selector
    if part is None or batch.selected is not None:
        return batch
    current = None if out is None else Forward(**{name: x.detach() for name, x in out.tensors().items()})
    selected = part.select_tokens(current, batch, masked.apply_mask(psi, batch.mask))
    return replace(batch, selected=check_per_token(selected, part, batch.mask, "select_tokens") & batch.mask)


def _check_and_mask(psi: Tensor, out: Forward, batch: Batch) -> Tensor:
    """Check the shapes of Ψ and `out`, which could otherwise broadcast silently (Ψ [B] where B = T), and mask Ψ."""
    _check_shape("psi", psi, batch)
    for name, value in out.tensors().items():
        _check_shape(f"out.{name}", value, batch)
    return masked.apply_mask(psi, batch.mask)


def _check_shape(name: str, value: Tensor, batch: Batch) -> None:
    if value.shape != batch.mask.shape:
        hint = {
            "psi": "use `algorithm.compute_advantages(batch)`; one value per completion is psi[:, None].expand(mask.shape)",
            "out.logp": "log π_θ of the sampled tokens without the prompt, padded like Batch.mask",
        }.get(name, "one value per token of the batch")
        raise ConfigError(
            f"{name} has shape {list(value.shape)}, expected [B, T] = {list(batch.mask.shape)} as in Batch.mask: {hint}"
        )


def _prepare_update(
    out: Forward, batch: Batch, psi: Tensor, algorithm: Algorithm, coef: Tensor | Coefficients | None
) -> tuple[Batch, Coefficients]:
    """Return the batch with its selected tokens, and its coefficients, one tensor for the policy and one per term.

    A share of an update comes with both; its `coef` can be a single tensor if no term has an aggregation.
    """
    if coef is None:
        batch = with_selected_tokens(out, batch, psi, algorithm)
        return batch, algorithm.all_coefficients(batch)
    if algorithm.token_selector is not None and batch.selected is None:
        raise ConfigError(
            f"{type(algorithm.token_selector).__name__} selects among all tokens of an update, and this share of one (`coef` is "
            "given) has no Batch.selected: take the share of `policygrad.core.objective.with_selected_tokens` of the full update"
        )
    if isinstance(coef, tuple):
        for i, c in enumerate(coef):
            _check_shape(f"coef[{i}]", c, batch)
        if len(coef) != 1 + len(algorithm.terms):
            raise ConfigError(
                f"coef holds {len(coef)} tensors; {algorithm.name} needs {1 + len(algorithm.terms)}, the policy's and one per "
                "term: pass this share's part of `algorithm.all_coefficients(step)`"
            )
        return batch, coef
    _check_shape("coef", coef, batch)
    other_aggregations = [
        type(term).__name__ for term in algorithm.terms if term.aggregation is not None or term.reads_observations
    ]
    if other_aggregations:
        raise ConfigError(
            f"{', '.join(other_aggregations)} aggregates differently from the policy term: pass this share's part of "
            "`algorithm.all_coefficients(step)`, a tuple, as `coef`"
        )
    return batch, (coef,) * (1 + len(algorithm.terms))


def surrogate(
    out: Forward | Tensor, batch: Batch, psi: Tensor, algorithm: Algorithm, coef: Tensor | Coefficients | None = None
) -> Tensor:
    """Compute a scalar loss with gradient −Σ (c w Ψ + Σ c^m k^m) ∇log π_θ. Its value has no meaning; `objective` is the metric.

    Args:
        out: the forward pass, or only its log π_θ [B, T], with graph.
        psi: [B, T], from `algorithm.compute_advantages` of the full rollout.
        coef: this share's part of `algorithm.coefficients(step)` [B, T], or of the tuple `all_coefficients` if a term has its own
            aggregation; None: `batch` is the full update.

    Raises:
        ConfigError: an argument or a part's result with another shape than the batch's; a missing field that a part needs.
    """
    out = out if isinstance(out, Forward) else Forward(out)
    psi = _check_and_mask(psi, out, batch)
    batch, (policy, *per_term) = _prepare_update(out, batch, psi, algorithm, coef)
    with torch.no_grad():
        weight, _ = gate_weight(out, batch, psi, algorithm)
        score = policy * algorithm.apply_corrections(weight, out, batch, psi) * psi
        score = masked.apply_mask(score, batch.mask)
        for term, c in zip(algorithm.terms, per_term, strict=True):
            if not isinstance(term, LossTerm):
                score = score + masked.apply_mask(
                    c * _score(term, out, batch, psi, algorithm), term.scored_tokens(batch)
                )
    loss = -(score * masked.apply_mask(out.logp, algorithm.read_tokens(batch))).sum()
    for term, c in zip(algorithm.terms, per_term, strict=True):
        if isinstance(term, LossTerm):
            loss = (
                loss
                - (
                    c * masked.apply_mask(_term_value(term, out, batch, psi, algorithm), term.scored_tokens(batch))
                ).sum()
            )
    return loss


@torch.no_grad()
def objective(
    out: Forward | Tensor, batch: Batch, psi: Tensor, algorithm: Algorithm, coef: Tensor | Coefficients | None = None
) -> Tensor:
    """Compute the paper's objective [], a metric: Σ c·gate.value(r, Ψ) + Σ c^m·term.value. Shares of an update add up."""
    out = out if isinstance(out, Forward) else Forward(out)
    psi = _check_and_mask(psi, out, batch)
    batch, (policy, *per_term) = _prepare_update(out, batch, psi, algorithm, coef)
    ratio, gate = _compute_ratio(out, batch, algorithm), algorithm.gate
    gate_value = check_per_token(gate.value(ratio, psi, batch), gate, batch.mask, "value")
    value = algorithm.apply_corrections(gate_value, out, batch, psi)
    if algorithm.ratio is not None and algorithm.ratio.joint:  # each token holds 1/|o| of the completion's value
        value = value / batch.lengths.clamp(min=1)[:, None]
    total = masked.apply_mask(policy * value, batch.mask).sum()
    for term, c in zip(algorithm.terms, per_term, strict=True):
        total = (
            total
            + masked.apply_mask(c * _term_value(term, out, batch, psi, algorithm), term.scored_tokens(batch)).sum()
        )
    return total


@torch.no_grad()
def find_nonfinite_factors(
    out: Forward, batch: Batch, psi: Tensor, algorithm: Algorithm, coef: Coefficients
) -> Metrics:
    """Find which factors of a non-finite gradient contain NaN or infinity.

    Returns:
        1 or 0 by part key, as in `terms.0`, each after the factors that it depends on; `logp` (the model's output) comes first.
    """
    psi = _check_and_mask(psi, out, batch)
    weight, ratio = gate_weight(out, batch, psi, algorithm)
    outputs = out.tensors()
    factors = {"logp": [*outputs.values()], "psi": [psi], "ratio": [ratio], "gate": [weight], "aggregation": [coef[0]]}
    tokens = {"logp": algorithm.read_tokens(batch)}  # which count; by default the sampled ones
    for i, correction in enumerate(algorithm.corrections):
        factors[f"corrections.{i}"] = [correction(out, batch, psi)]
    for i, (term, c) in enumerate(zip(algorithm.terms, coef[1:], strict=True)):
        tokens[f"terms.{i}"] = scored = term.scored_tokens(batch)
        if not isinstance(term, LossTerm):
            factors[f"terms.{i}"] = [c, _score(term, out, batch, psi, algorithm)]
            continue
        with torch.enable_grad():  # a finite objective can have a gradient that is not
            leaves = {name: x.detach().clone().requires_grad_() for name, x in outputs.items()}
            value = _term_value(term, Forward(**leaves), batch, psi, algorithm)
            gradients: tuple[Tensor | None, ...] = ()
            if value.requires_grad:
                total = masked.apply_mask(value, scored).sum()
                gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        factors[f"terms.{i}"] = [c, value, *(x for x in gradients if x is not None)]
    return {
        key: Max(float(not all(is_finite(x, tokens.get(key, batch.mask)) for x in values)))
        for key, values in factors.items()
    }


@torch.no_grad()
def measure_forward(out: Forward, batch: Batch, psi: Tensor, algorithm: Algorithm, coef: Coefficients) -> Metrics:
    """Compute the metrics of one forward pass.

    - objective; ratio/max; clip_ratio/low and /high; beta/…, each adaptive β
    - kl: KL(π_θ‖π_ref), nats per token (r·k3, unbiased under samples of π_old)
    - kl_old: KL(π_old‖π_θ), nats per token (k3, or exact with `out.kl_old`)
    - entropy/exact: entropy of π_θ over the vocabulary, nats per token, with `out.entropy`
    - observation/nll: −log π_θ of the tokens that the environment wrote, nats per token, if a term learns to predict them
    - mismatch/logp_max and /logp_mean: largest and mean |log π_old − log μ|, nats per token; mismatch/ess: effective sample size of
      π_old/μ as a fraction of the tokens. Absent with old_policy='sampler', where μ is π_old.

    KLs and mismatches exclude demonstrations. A learner that skips completions with Ψ = 0 and no term does not measure them,
    although their π_θ changes too: `kl_old` is then the mean over the others (over all with KLToOld).
    """
    mask, policy_tokens, psi = batch.mask, batch.policy_tokens, _check_and_mask(psi, out, batch)
    ratio = _compute_ratio(out, batch, algorithm)
    logp = masked.apply_mask(out.logp.detach(), mask)
    metrics: Metrics = beta_metrics(algorithm.parts()) | {
        "objective": Sum(widen(objective(out, batch, psi, algorithm, coef))),
        "ratio/max": Max(masked.apply_mask(ratio, mask).max() if mask.any() else 1.0),
    }
    clipped = algorithm.gate.clipped(ratio, psi, batch)
    if clipped is not None:
        for name, tokens in zip(("low", "high"), clipped, strict=True):
            tokens = check_per_token(tokens, algorithm.gate, mask, "clipped")
            metrics[f"clip_ratio/{name}"] = masked_mean(widen(tokens), mask)
    if algorithm.reads_observations and bool((observed := batch.observed_tokens).any()):
        metrics["observation/nll"] = masked_mean(-masked.apply_mask(out.logp.detach(), observed), observed)
    if batch.logp_ref is not None and batch.reference_spans is None:
        u = logp - masked.apply_mask(batch.logp_ref, mask)
        # Without r, a token whose probability has collapsed would count about e^9.
        r = bounded_exp(log_ratio(out.logp, batch.logp_old, mask))
        metrics["kl"] = masked_mean(r * (bounded_expm1(-u) + u), batch.compared_tokens)
    if batch.logp_old is not None:
        change = logp - masked.apply_mask(batch.logp_old, mask)
        metrics["kl_old"] = masked_mean(bounded_expm1(change) - change, policy_tokens)
    if out.kl_old is not None:
        metrics["kl_old"] = masked_mean(out.kl_old, policy_tokens)
    if out.entropy is not None:
        metrics["entropy/exact"] = masked_mean(out.entropy.detach(), policy_tokens)
    if batch.logp_sampler is not None and algorithm.old_policy != "sampler":
        old = logp if batch.logp_old is None else masked.apply_mask(batch.logp_old, mask)
        gap = masked.apply_mask(old - masked.apply_mask(batch.logp_sampler, mask), policy_tokens)
        metrics["mismatch/logp_max"] = Max(gap.abs().max() if gap.numel() else 0.0)
        metrics["mismatch/logp_mean"] = masked_mean(gap.abs(), policy_tokens)
        metrics["mismatch/ess"] = effective_size(bounded_exp(gap), policy_tokens)
    return metrics
