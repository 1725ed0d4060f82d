"""Pairs of samples by which is preferred: DPO's loss on samples of the policy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Shape, close, gradients, make, policy, shapes


def test_a_pair_by_hand() -> None:
    """h = 0.5 and −1: the preferred one is already 1.5 nats ahead, and pulls with β σ(−1.5 β) times 2/(G − 1)."""
    batch = pg.Batch(
        mask=torch.ones(3, 1, dtype=torch.bool),
        group=torch.tensor([0, 0, 1]),
        reward=torch.tensor([3.0, 1.0, 9.0]).double(),
        logp_old=torch.tensor([[-0.5], [-2.0], [-1.0]]).double(),
        logp_ref=torch.full((3, 1), -1.0).double(),
    )
    psi = pg.ONLINE_DPO.compute_advantages(batch)[:, 0].tolist()
    pull = 2 * 0.1 / (1 + math.exp(0.1 * 1.5))
    assert psi == pytest.approx([pull, -pull, 0.0])
    turned = pg.ONLINE_DPO.compute_advantages(replace(batch, reward=-batch.reward))[:, 0].tolist()
    stronger = 2 * 0.1 / (1 + math.exp(-0.1 * 1.5))
    assert turned == pytest.approx([-stronger, stronger, 0.0])
    assert pg.ONLINE_DPO.compute_advantages(replace(batch, reward=torch.ones(3).double())).abs().sum() == 0


def dpo_loss(logp: Tensor, batch: pg.Batch, beta: float) -> Tensor:
    """−log σ(β(log π_θ(o⁺)/π_ref(o⁺) − log π_θ(o⁻)/π_ref(o⁻))), the mean over a prompt's pairs, over completions."""
    assert batch.logp_ref is not None
    h = torch.where(batch.mask, logp - batch.logp_ref, 0).sum(1)
    rows = batch.mask.any(1).nonzero().flatten().tolist()
    loss = logp[batch.mask].sum() * 0
    for i in rows:
        others = [j for j in rows if batch.group[j] == batch.group[i]]
        for j in others:
            if batch.reward[i] > batch.reward[j]:
                pairs = math.comb(len(others), 2)
                loss = loss - len(others) / pairs * torch.nn.functional.logsigmoid(beta * (h[i] - h[j]))
    return loss / max(1, len(rows))


@settings(max_examples=40, derandomize=True)
@given(shape=shapes(), beta=st.sampled_from([0.1, 1.0, 5.0]))
def test_its_gradient_is_that_of_dpos_loss(shape: Shape, beta: float) -> None:
    batch, logits = make(shape)
    logp = policy(logits, batch.tokens, batch.mask)
    batch = replace(batch, logp_old=logp.detach())
    algorithm = replace(pg.ONLINE_DPO, advantage=(pg.parts.PreferencePairs(beta),))
    loss = pg.surrogate(logp, batch, algorithm.compute_advantages(batch), algorithm)
    expected = gradients(dpo_loss(logp, batch, beta), logp, logits)
    for result, wanted in zip(gradients(loss, logp, logits), expected, strict=True):
        close(result, wanted, scale=expected[0])


def test_pairs_of_a_reference_that_reads_other_prompts_are_refused() -> None:
    with pytest.raises(pg.ConfigError, match=r"may not have read some with Reference\.templates"):
        replace(pg.ONLINE_DPO, reference=pg.SDPO.reference)
