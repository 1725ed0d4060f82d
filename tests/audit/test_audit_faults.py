"""Each fault of a loss is named with its factor, and two recordings of one batch are told apart field by field."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import policygrad as pg
from doubles.audit_peers import MICRO, clip_loss, make_update, split
from policygrad.audit.findings import Audit, audit, compare
from policygrad.findings import Finding


def finding(result: Audit, subject: str) -> Finding:
    return next(finding for finding in result.findings if finding.subject == subject)


@pytest.mark.parametrize(("scale", "seed"), [(0.5, 0), (4.0, 1), (-1.0, 2)])
def test_a_constant_factor(scale: float, seed: int) -> None:
    result = audit(clip_loss(make_update(seed), "sequences", scale=scale))
    scaled = finding(result, "scale")
    assert scaled.status == "differs"
    assert scaled.factor == pytest.approx(scale)
    assert not result.agrees
    if scale == MICRO:
        assert "the number of micro-batches" in scaled.message
    if scale == -1.0:
        assert "sign is reversed" in scaled.message


def test_a_token_mean_over_micro_batches() -> None:
    """Its factor is that of the gradients, by least squares, and the range of its weights is that of the tokens."""
    update = make_update(0)
    theirs, right = clip_loss(update, "micro_batch"), clip_loss(update, "tokens")
    result = finding(audit(theirs), "aggregation")
    assert result.status == "differs"
    assert "each micro-batch of 4 and then averaged, instead of over the update" in result.message
    expected = (theirs["gradient"] * right["gradient"]).sum() / (right["gradient"] ** 2).sum()
    assert result.factor == pytest.approx(float(expected))
    mask = update["mask"]
    weights = [int(mask.sum()) / MICRO / int(mask[rows].sum()) for rows in split(update["micro_batch"])]
    assert f"({min(weights):.3g} to {max(weights):.3g} times per token)" in result.message


def test_a_token_mean_over_ranks() -> None:
    update = make_update(3) | {"rank": torch.arange(16) // 8}
    result = finding(audit(clip_loss(update, "rank")), "aggregation")
    assert result.status == "differs"
    assert "over each rank" in result.message


@pytest.mark.parametrize(("steps", "side"), [(1, "right"), (-1, "left")])
def test_a_shifted_mask(steps: int, side: str) -> None:
    update = make_update(4)
    moved = update["mask"].roll(steps, 1)
    moved[:, 0 if steps > 0 else -1] = False
    if steps > 0:
        result = finding(audit(clip_loss(update, mask=moved)), "mask")
        assert f"shifted by one token to the {side}" in result.message
        assert result.status == "differs"
    else:  # one token fewer in each row: within the mask, so that it is the denominators that show it
        result = audit(clip_loss(update, mask=moved))
        assert not result.agrees


def test_padding_in_the_loss() -> None:
    update = make_update(5)
    result = finding(audit(clip_loss(update, mask=torch.ones_like(update["mask"]))), "mask")
    assert "padding included" in result.message


def test_a_ratio_against_the_sampler() -> None:
    update = make_update(6, sampler=0.2)
    result = finding(audit(clip_loss(update, old="logp_sampler")), "π_old")
    assert result.status == "differs"
    assert "π_old is the sampler's" in result.message


def test_a_temperature() -> None:
    update, generator = make_update(7), torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(16, 12, 20, generator=generator, dtype=torch.float64)
    tokens = torch.randint(20, (16, 12), generator=generator)

    def logp(temperature: float) -> torch.Tensor:
        return (logits / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    update |= {"logits": logits, "tokens": tokens, "logp": logp(1.0), "logp_old": logp(0.7), "logp_sampler": logp(0.7)}
    result = audit(clip_loss(update))
    old = finding(result, "log-probabilities: logp_old")
    assert old.status == "differs"
    assert "temperature 0.7" in old.message
    assert old.factor == pytest.approx(0.7)
    assert "π_old is the sampler's" in finding(result, "π_old").message
    assert finding(result, "log-probabilities: logp").status == "holds"


def test_another_ddof_is_a_factor_of_the_library_s_z_score() -> None:
    """ddof 0 is a formula of its own; against a row with ddof 1 it is √(G/(G − 1)) times as large."""
    update = make_update(8)
    reward = update["reward"].reshape(-1, 4)
    z = (reward - reward.mean(1, keepdim=True)) / reward.std(1, keepdim=True, correction=0)
    update["advantage"] = z.reshape(-1)
    result = audit(clip_loss(update), expect="grpo")
    assert "ddof=0" in finding(result, "advantages").message
    assert finding(result, "expected: grpo, Ψ").factor == pytest.approx((4 / 3) ** 0.5, rel=1e-3)


def test_scaled_and_shifted_advantages() -> None:
    update = make_update(9)
    halved = finding(audit({**update, "advantage": update["advantage"] / 2}), "advantages")
    assert halved.status == "differs"
    assert halved.factor == pytest.approx(0.5)
    moved = finding(audit({**update, "advantage": update["advantage"].roll(1)}), "advantages")
    assert "the advantage of the previous one" in moved.message


def test_a_clip_without_the_minimum() -> None:
    update = make_update(10)
    logp = update["logp"].clone().requires_grad_()
    r = (logp - update["logp_old"]).exp().clamp(0.8, 1.2)
    loss = -(r * update["advantage"][:, None] * update["mask"]).sum() / update["mask"].sum()
    [gradient] = torch.autograd.grad(loss, logp)
    result = finding(audit({**update, "loss": loss.detach(), "gradient": gradient}), "ratio and gate")
    assert result.status == "differs"
    assert "without the minimum" in result.message


def test_an_offset_as_a_bound() -> None:
    """CISPO's bound is absolute: 0.2 in its place weights every token by 0.2 on-policy."""
    update = make_update(11)
    logp = update["logp"].clone().requires_grad_()
    weight = (update["logp"] - update["logp_old"]).exp().clamp(max=0.7)
    loss = -(weight * update["advantage"][:, None] * logp * update["mask"]).sum() / update["mask"].sum()
    [gradient] = torch.autograd.grad(loss, logp)
    settings = {"epsilon": 0.7, "epsilon_high": 0.7}
    result = finding(
        audit({**update, "loss": loss.detach(), "gradient": gradient, "settings": settings}), "ratio and gate"
    )
    assert result.status == "differs"
    assert "below 1: an offset" in result.message


def test_k1_in_the_loss() -> None:
    update = make_update(12)
    update["logp_ref"] = update["logp"].roll(1, 0) - 0.3
    gradient = clip_loss(update)["gradient"] + 0.05 * update["mask"] / update["mask"].sum()
    result = finding(audit({**update, "gradient": gradient}), "KL")
    assert result.status == "differs"
    assert "k1 in the loss with β = 0.05" in result.message


def test_numbers_of_no_formula_are_not_explained() -> None:
    update = make_update(13)
    gradient = torch.randn(16, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * update["mask"]
    result = audit({**update, "gradient": gradient})
    loss = finding(result, "loss")
    assert loss.status == "differs"
    assert loss.message.startswith("no combination reproduces the gradient. Nearest:")


# --- two recordings


def test_equal_recordings_agree() -> None:
    update = clip_loss(make_update(20))
    result = pg.audit.compare(update, dict(update))
    assert result.agrees
    assert {finding.status for finding in result.findings} == {"holds"}


def moved_mask(update: dict[str, Any]) -> torch.Tensor:
    mask: torch.Tensor = update["mask"].roll(1, 1)
    mask[:, 0] = False
    return mask


@pytest.mark.parametrize(
    ("field", "change", "text"),
    [
        ("mask", moved_mask, "shifted by one token to the right"),
        (
            "gradient",
            lambda update: 0.25 * update["gradient"],
            "0.25 times as large: the factor is 1 over the number of micro-batches",
        ),
        ("logp", lambda update: update["logp"].roll(1, 1), "shifted by one token to the right"),
        ("advantage", lambda update: update["advantage"].roll(-1), "each has the next row's numbers"),
        ("logp", lambda update: update["logp"] - 0.5, "every value is smaller by 0.5"),
        ("reward", lambda update: update["reward"][torch.arange(16) ^ 3], "rows are in another order"),
    ],
)
def test_what_differs_between_two_recordings(field: str, change, text: str) -> None:  # type: ignore[no-untyped-def]
    update = clip_loss(make_update(21))
    result = compare(update, {**update, field: change(update)})
    differing = [f for f in result.findings if f.status == "differs"]
    assert [f.subject for f in differing] == [field]
    assert text in differing[0].message


def test_the_first_different_token_is_named() -> None:
    update = make_update(22)
    other = update["logp"].clone()
    other[3, 1] += 1
    [finding] = [f for f in compare(update, {**update, "logp": other}).findings if f.status == "differs"]
    assert "1 of" in finding.message
    assert "the first, row 3, column 1," in finding.message
