"""What a forward pass reports, loss terms with a graph of their own, the first-order step, and what `show` prints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Shape, close, gradients, make, policy
from policygrad.catalog import CATALOG
from policygrad.core.metrics import EffectiveSize, Max, Mean, Metrics, Min, Sum, drop_unmeasured, merge
from policygrad.core.objective import measure_forward


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


def test_a_mean_over_nothing_is_left_out() -> None:
    """It is no number, also where it joins one that is; sums and extremes are always numbers."""
    empty: Metrics = {
        "reward": Mean(0.0, 0.0),
        "ess": EffectiveSize(0.0, 0.0, 0.0),
        "count": Sum(0.0),
        "most": Max(0.0),
    }
    assert drop_unmeasured(empty).keys() == {"count", "most"}
    joined = merge(empty, {"reward": Mean(torch.tensor(3.0), torch.tensor(2.0))})
    assert drop_unmeasured(joined)["reward"].value == 1.5
    assert "ess" not in drop_unmeasured(joined)


def test_measured_hand_numbers() -> None:
    """Three tokens a row."""
    batch, logp = hand_batch()
    algorithm = replace(pg.DR_GRPO, aggregation=pg.TokenMean())
    psi = algorithm.compute_advantages(batch)
    found = measure_forward(pg.Forward(logp), batch, psi, algorithm, algorithm.all_coefficients(batch))
    values = {name: metric.value for name, metric in found.items()}
    k3 = (2 - 1 - math.log(2)) + 0 + (0.5 - 1 + math.log(2))  # u = −log 2, 0, log 2
    assert values == pytest.approx(
        {
            "objective": (0.5 + 1 + 1.2 - 0.8 - 1 - 2) / 6,
            "ratio/max": 2.0,
            "clip_ratio/low": 1 / 6,  # r = ½ where Ψ < 0
            "clip_ratio/high": 1 / 6,  # r = 2 where Ψ > 0
            "kl": (0.5 * (1 - math.log(2)) + 2 * (math.log(2) - 0.5)) / 3,  # r·k3
            "kl_old": k3 / 3,  # symmetric ratios
            "mismatch/logp_max": 0.25,
            "mismatch/logp_mean": 0.25,
            "mismatch/ess": 1.0,  # all weights are equal
        },
        rel=1e-14,
    )


def test_the_kl_to_the_reference_is_that_of_the_policy_also_after_it_has_moved() -> None:
    """Every token of a vocabulary as often as π_old samples it, in ten: π_θ has all but given up the last one."""
    each = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2])
    old, new, reference = (
        torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.3, 0.2], [0.6, 0.4 - 1e-6, 1e-6], [0.4, 0.3, 0.3])
    )
    batch = pg.Batch(
        mask=torch.ones(10, 1, dtype=torch.bool),
        group=torch.zeros(10, dtype=torch.long),
        reward=torch.zeros(10, dtype=torch.float64),
        logp_old=old.log()[each, None],
        logp_ref=reference.log()[each, None],
    )
    out, psi = pg.Forward(new.log()[each, None]), torch.zeros(10, 1, dtype=torch.float64)
    found = measure_forward(out, batch, psi, pg.DR_GRPO, pg.DR_GRPO.all_coefficients(batch))
    assert found["kl"].value == pytest.approx(float((new * (new / reference).log()).sum()), rel=1e-12)
    assert found["kl_old"].value == pytest.approx(float((old * (old / new).log()).sum()), rel=1e-12)


def test_the_mismatch_between_sampler_and_policy_by_hand() -> None:
    """π_old/μ = 2, 1, ½ in one row, ½ in the other, which stands for two equal completions: in one pass, or merged."""
    log2 = math.log(2)
    gap = torch.tensor([[log2, 0.0, -log2], [-log2, math.nan, math.nan]], dtype=torch.float64)
    mask = ~gap.isnan()
    batch = pg.Batch(
        mask=mask,
        group=torch.tensor([0, 0]),
        reward=torch.tensor([1.0, 0.0], dtype=torch.float64),
        logp_old=torch.full_like(gap, -3.0),
        logp_sampler=-3.0 - gap,
    )
    algorithm = pg.DR_GRPO
    psi, coefficients = algorithm.compute_advantages(batch), algorithm.all_coefficients(batch)

    def found(rows: list[int]) -> Metrics:
        at = torch.tensor(rows)
        share = batch.select(at)
        return measure_forward(pg.Forward(gap[at] - 3), share, psi[at], algorithm, tuple(c[at] for c in coefficients))

    for metrics in (found([0, 1]), merge(found([0]), found([1])), merge(found([1]), found([0]))):
        assert metrics["mismatch/logp_max"].value == pytest.approx(log2, rel=1e-14)
        assert metrics["mismatch/logp_mean"].value == pytest.approx((log2 + 0 + log2 + log2) / 4, rel=1e-14)
        total, squares = 2 + 1 + 0.5 + 0.5, 4 + 1 + 0.25 + 0.25
        assert metrics["mismatch/ess"].value == pytest.approx(total**2 / (4 * squares), rel=1e-14)
    assert EffectiveSize(0.0, 0.0, 0.0).value == 1.0
    alike = measure_forward(
        pg.Forward(gap - 3), replace(batch, logp_old=batch.logp_sampler), psi, pg.RAFT, coefficients
    )
    assert not [
        name for name in alike if name.startswith("mismatch/")
    ]  # μ compared with itself would say that all is well


def test_nan_is_reported_by_max_and_min() -> None:
    for kind, other in ((Max, 2.0), (Min, 2.0), (Max, math.inf), (Min, -math.inf)):
        assert math.isnan((kind(math.nan) | kind(other)).value)
        assert math.isnan((kind(other) | kind(math.nan)).value)
    assert (Max(1.0) | Max(math.inf)).value == math.inf
    assert (Min(1.0) | Min(torch.tensor(-2.0))).value == -2.0


@dataclass(frozen=True)
class ExactEntropy(pg.LossTerm):
    """A loss term: its gradient is no multiple of ∇log π of the sampled token."""

    aggregation: None = None

    def objective(self, out: pg.Forward, batch: pg.Batch, psi: Tensor) -> Tensor:
        assert out.entropy is not None
        return 0.1 * out.entropy


def test_loss_term_has_its_own_graph() -> None:
    batch, logits = make(Shape((3, 4), 5, seed=2, binary=False), 0.2)
    with_entropy = replace(pg.DAPO, terms=(ExactEntropy(),), filters=())
    without = replace(with_entropy, terms=())
    psi = without.compute_advantages(batch)
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
    problem, step = Recorded(), pg.GradientSteps(epochs=2, minibatches=2)
    measured = step(problem)  # type: ignore[arg-type]
    assert problem.asked == ["split 0", *["accumulate", "descend"] * 2, "split 1", *["accumulate", "descend"] * 2]
    assert step.updates == measured["steps"].value == measured["passes"].value == 4


def test_every_algorithm_has_a_catalog_entry_and_an_equation() -> None:
    assert set(CATALOG) == set(pg.ALGORITHMS)
    for name, about in CATALOG.items():
        assert pg.ALGORITHMS[name].name == name
        assert about.parent is None or about.parent in CATALOG
        lines = pg.ALGORITHMS[name].equation()
        assert {"Ψ", "w", "c", "step"} <= set(lines)
        assert ("k" in lines) == bool(pg.ALGORITHMS[name].terms)
    assert pg.GRPO.equation()["Ψ"].endswith("mean_g)/(std_g + 0.0001)")
    assert replace(pg.GRPO, update_rule=pg.GradientSteps(2, 3)).equation()["step"] == "2 epochs × 3 minibatches"
