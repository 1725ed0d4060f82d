"""The audit names the formulas of honest batches, and states nothing that their numbers do not support."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.audit_peers import ROWS, clip_loss, make_update
from doubles.random_batches import Shape, gradients, make, policy
from policygrad.audit.findings import Audit, audit
from policygrad.core.objective import with_selected_tokens

HONEST = ["vespo", "magistral", "reinforce_pp_baseline", "maxrl", "passk", "m2po", "opo", "cpgd", "asymre", "topr"]
"""Rows whose gate, aggregation, advantage or term test_audit_verl.py does not show."""
OTHERS = [
    *("grpo", "dr_grpo", "dapo", "gspo", "luspo", "cispo", "sapo", "rloo", "gmpo", "lite_ppo", "dppo", "prorl", "gpg"),
]


def mark_full(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.full) for name in names]


def statement(result: Audit, subject: str) -> str:
    return next(finding.message for finding in result.findings if finding.subject == subject)


def honest_update(name: str, seed: int) -> tuple[pg.Algorithm, dict[str, object]]:
    """An update of one of the library's algorithms, from a random batch with holes and empty completions."""
    algorithm = replace(pg.ALGORITHMS[name], filters=(), shaping=()).with_max_tokens(8)
    batch, logits = make(Shape((4, 4, 4, 4), 8, seed, name in ("maxrl", "passk")), 0.3)
    leaf = policy(logits, batch.tokens, batch.mask).detach().requires_grad_()  # type: ignore[arg-type]
    psi = algorithm.compute_advantages(batch)
    step = with_selected_tokens(pg.Forward(leaf), batch, psi, algorithm)
    [gradient] = gradients(pg.surrogate(leaf, step, psi, algorithm), leaf)
    update = {name: getattr(batch, name) for name in ("mask", "group", "logp_old", "logp_ref")}
    value = -pg.objective(leaf, step, psi, algorithm)
    reward = batch.reward.nan_to_num()
    return algorithm, update | {
        "reward": reward,
        "advantage": psi,
        "logp": leaf.detach(),
        "gradient": gradient,
        "loss": value,
    }


@pytest.mark.parametrize("name", [*HONEST, *mark_full(*OTHERS)])
def test_nothing_differs_on_an_honest_batch(name: str) -> None:
    algorithm, update = honest_update(name, 0)
    result = audit(update, expect=None)
    assert result.agrees, str(result)
    average = statement(result, "aggregation")
    assert type(algorithm.aggregation).__name__ in average
    gate = statement(result, "ratio and gate")
    kinds = {type(algorithm.gate).__name__} | ({"OnPolicy"} if isinstance(algorithm.gate, pg.UnitWeight) else set())
    assert any(kind in gate for kind in kinds) or "no token is clipped" in gate, gate
    if algorithm.terms and not (isinstance(algorithm.terms[0], pg.KLToOld) and algorithm.terms[0].cap):
        term = algorithm.terms[0]
        assert isinstance(term, pg.KLToReference)
        assert f"KLToReference(beta={term.beta:.4g}, form='{term.form}')" in statement(result, "KL")


@pytest.mark.parametrize("name", ["grpo", "maxrl", *mark_full("dr_grpo", "dapo", "gspo", "sapo", "rloo")])
def test_an_algorithm_is_what_it_is_expected_to_be(name: str) -> None:
    _, update = honest_update(name, 3)
    result = audit({**update, "settings": {"max_length": 8}}, expect=name)
    expected = [finding for finding in result.findings if finding.subject.startswith("expected")]
    assert len(expected) >= 3
    if name != "rloo":  # its KL in the reward is not in this batch
        assert {finding.status for finding in expected} == {"holds"}, str(result)


def test_the_difference_from_another_algorithm_has_its_factor() -> None:
    update = clip_loss(make_update(), "tokens", 0.2, 0.28)
    result = audit(update, expect="dr_grpo")
    [c] = [finding for finding in result.findings if finding.subject == "expected: dr_grpo, c"]
    tokens = int(update["mask"].sum())
    assert c.status == "differs"
    assert c.factor == pytest.approx(ROWS * 12 / tokens)
    statuses = {finding.subject: finding.status for finding in result.findings}
    assert statuses["expected: dr_grpo, Ψ"] == "differs"  # divided by the std
    assert statuses["expected: dr_grpo, w"] == "differs"  # the upper bound


@pytest.mark.parametrize(
    ("average", "settings", "name"),
    [
        ("sequences", {}, "SequenceMean"),
        ("tokens", {}, "TokenMean"),
        ("fixed", {"max_completion_length": 100}, "FixedLength(length=100)"),
    ],
)
def test_averages(average: str, settings: dict[str, int], name: str) -> None:
    result = audit({**clip_loss(make_update(1), average), "settings": settings})
    assert result.agrees, str(result)
    assert statement(result, "aggregation").startswith(name)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.37, 0.21)])
def test_bounds_are_read_off_the_gradient(low: float, high: float) -> None:
    """The bracket holds the true bounds, and a conventional pair is chosen in it."""
    result = audit(drop(clip_loss(make_update(2), "tokens", low, high), "loss"))
    text = statement(result, "ratio and gate")
    assert text.startswith("Clip(")
    brackets = [[float(x) for x in found] for found in re.findall(r"≥ ([\d.]+) and < ([\d.]+)", text)]
    (low_from, low_to), (high_from, high_to) = brackets
    assert low_from <= low < low_to
    assert high_from <= high < high_to


def drop(update: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in update.items() if name not in names}


def test_on_policy_gates_are_not_told_apart() -> None:
    update = make_update(3)
    update["logp_old"] = update["logp"]
    result = audit(clip_loss(update))
    assert result.agrees
    assert "where all gates agree" in statement(result, "ratio and gate")


def test_equal_lengths_leave_averages_open() -> None:
    update = make_update(4)
    update["mask"] = torch.ones_like(update["mask"])
    text = statement(audit(clip_loss(update)), "aggregation")
    assert "Cannot be told apart" in text
    assert "TokenMean" in text
    assert "SequenceMean" in text


def test_an_epsilon_below_the_resolution_is_said_to_be_open() -> None:
    update = {name: value.float() if name == "advantage" else value for name, value in make_update(5).items()}
    reward = update["reward"].reshape(-1, 4)
    z = (reward - reward.mean(1, keepdim=True)) / reward.std(1, keepdim=True)
    text = audit({**update, "advantage": z.reshape(-1).float()}).findings[0].message
    assert "eps 0, 1e-08, 1e-06" in text
    assert "not told apart" in text


@pytest.mark.parametrize(
    ("formula", "name"),
    [
        (
            lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True, correction=0) + 1e-6),
            "GroupStd(ddof=0, eps=1e-06)",
        ),
        (lambda x: (x - x.mean(1, keepdim=True)) / (x.std() + 1e-4), "BatchStd(of=rewards, ddof=1, eps=0.0001)"),
        (lambda x: x - (x.sum(1, keepdim=True) - x) / 3, "LeaveOneOut"),
        (lambda x: x - x.mean(1, keepdim=True), "GroupMean"),
        (
            lambda x: (x - x.mean()) / (x.std(correction=0) + 1e-8),
            "BatchMean, BatchStd(of=advantages, ddof=0, eps=1e-08)",
        ),
    ],
)
def test_advantages(formula, name: str) -> None:  # type: ignore[no-untyped-def]
    update = make_update(6)
    update["advantage"] = formula(update["reward"].reshape(-1, 4)).reshape(-1)
    finding = audit(update).findings[0]
    assert finding.status == "holds"
    assert name in finding.message


def test_advantages_of_several_rewards() -> None:
    update = make_update(7)
    columns = torch.stack([update["reward"], update["reward"].roll(3) ** 2], 1)
    grouped = columns.reshape(-1, 4, 2)
    z = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).sum(2).reshape(-1)
    update |= {"rewards": columns, "reward": columns.sum(1), "advantage": (z - z.mean()) / (z.std() + 1e-4)}
    finding = audit(update).findings[0]
    assert finding.status == "holds", finding
    assert "RewardZScores" in finding.message


def test_a_loss_alone_is_enough_where_few_formulas_give_it() -> None:
    update = drop(clip_loss(make_update(8), "sequences"), "gradient")
    result = audit({**update, "settings": {"epsilon": 0.2}})
    assert result.agrees
    assert statement(result, "aggregation").startswith("SequenceMean")


def test_a_correction_for_the_sampler() -> None:
    update = make_update(9, sampler=0.4)
    rho = (update["logp_old"] - update["logp_sampler"]).exp()
    truncated = audit(clip_loss(update, correction=rho.clamp(max=2)))
    assert truncated.agrees, str(truncated)
    assert "TruncatedIS(cap=2, level=token)" in statement(truncated, "correction for the sampler")
    assert float(rho.max()) > 2
    gone = torch.where((rho >= 0.5) & (rho <= 2), rho, 0)
    removed = audit(clip_loss(update, correction=gone))
    assert "MaskedIS(low=0.5, high=2, level=token)" in statement(removed, "correction for the sampler")
