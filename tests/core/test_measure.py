"""What a forward pass reports, loss terms with a graph of their own, the first-order step, and what `show` prints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from random_batches import Shape, close, gradients, make, policy
from torch import Tensor

import policygrad as pg
from policygrad.algorithms import ABOUT
from policygrad.core.metrics import Metrics, Sum
from policygrad.core.objective import measure


def hand_batch() -> tuple[pg.Batch, Tensor]:
    """Ratios ½, 1, 2 and a hole for Ψ = +1, the same with other holes for Ψ = −1."""
    log2 = math.log(2)
    logp = torch.tensor([[-log2, 0.0, log2, math.nan], [-log2, math.nan, log2, 0.0]], dtype=torch.float64)
    zeros = torch.zeros_like(logp)
    batch = pg.Batch(
        mask=~logp.isnan(),
        group=torch.tensor([0, 0]),
        reward=torch.tensor([2.0, 0.0], dtype=torch.float64),
        logp_old=zeros,
        logp_ref=zeros,
        logp_sampler=zeros + 0.25,
    )
    return batch, logp


def test_measured_hand_numbers() -> None:
    """Three tokens a row. The second row stands for three equal completions."""
    batch, logp = hand_batch()
    algorithm = replace(pg.DR_GRPO, aggregate=pg.TokenMean())
    psi = algorithm.advantages(batch)
    found = measure(pg.Forward(logp), batch, psi, algorithm, algorithm.all_coefficients(batch), torch.tensor([1, 3]))
    values = {name: metric.value for name, metric in found.items()}
    k3 = (2 - 1 - math.log(2)) + 0 + (0.5 - 1 + math.log(2))  # u = −log 2, 0, log 2
    assert values == pytest.approx(
        {
            "objective": (0.5 + 1 + 1.2 - 0.8 - 1 - 2) / 6,
            "ratio/max": 2.0,
            "clip_ratio/low": 3 / 12,  # r = ½ where Ψ < 0
            "clip_ratio/high": 1 / 12,  # r = 2 where Ψ > 0
            "kl": k3 / 3,
            "kl_old": k3 / 3,  # symmetric ratios
            "mismatch/logp_max": 0.25,
        },
        rel=1e-14,
    )


@dataclass(frozen=True)
class ExactEntropy:
    """A loss term: its gradient is no multiple of ∇log π of the sampled token."""

    aggregate: None = None

    def objective(self, out: pg.Forward, batch: pg.Batch) -> Tensor:
        assert out.entropy is not None
        return 0.1 * out.entropy


def test_a_loss_term_brings_its_own_graph() -> None:
    batch, logits = make(Shape((3, 4), 5, seed=2, binary=False), 0.2)
    with_entropy = replace(pg.DAPO, terms=(ExactEntropy(),), filters=())  # type: ignore[arg-type]
    without = replace(with_entropy, terms=())
    psi = without.advantages(batch)
    logp = policy(logits, batch.tokens, batch.mask)
    p = torch.log_softmax(logits, -1)
    entropy = torch.where(batch.mask, -(p.exp() * p).sum(-1)[batch.tokens], math.nan)
    out = pg.Forward(logp, entropy=entropy)
    bonus = 0.1 * entropy[batch.mask].mean()
    (found,) = gradients(pg.surrogate(out, batch, psi, with_entropy), logits)
    (expected,) = gradients(pg.surrogate(logp, batch, psi, without) - bonus, logits)
    close(found, expected)
    value = pg.objective(out, batch, psi, with_entropy) - pg.objective(logp, batch, psi, without)
    torch.testing.assert_close(value, bonus.detach())


@dataclass
class Recorded:
    """A problem that writes down what a step asks of it."""

    asked: list[str] = field(default_factory=list)

    def split(self, epoch: int, minibatches: int) -> list[Recorded]:
        self.asked.append(f"split {epoch}")
        return [self] * minibatches

    def accumulate(self) -> Metrics:
        self.asked.append("accumulate")
        return {"passes": Sum(1.0)}

    def descend(self) -> Metrics:
        self.asked.append("descend")
        return {"steps": Sum(1.0)}


def test_the_first_order_step_descends_once_per_minibatch() -> None:
    problem, step = Recorded(), pg.FirstOrder(epochs=2, minibatches=2)
    measured = step(problem)  # type: ignore[arg-type]
    assert problem.asked == ["split 0", *["accumulate", "descend"] * 2, "split 1", *["accumulate", "descend"] * 2]
    assert step.updates == measured["steps"].value == measured["passes"].value == 4


def test_every_algorithm_can_say_what_it_is() -> None:
    assert set(ABOUT) == set(pg.ALGORITHMS)
    for name, about in ABOUT.items():
        assert pg.ALGORITHMS[name].name == name
        assert about.parent is None or about.parent in ABOUT
        lines = pg.ALGORITHMS[name].equation()
        assert {"Ψ", "w", "c", "step"} <= set(lines)
        assert ("k" in lines) == bool(pg.ALGORITHMS[name].terms)
    assert pg.GRPO.equation()["Ψ"].endswith("mean_g)/(std_g + 0.0001)")
    assert replace(pg.GRPO, step=pg.FirstOrder(2, 3)).equation()["step"] == "2 epochs × 3 minibatches"
