"""The constrained step on problems made by hand: conjugate gradient, the step's length, the line search, what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import policygrad as pg
from policygrad.core.metrics import Mean, Metrics
from policygrad.core.trust_region import conjugate_gradient

NAN, INF = float("nan"), float("inf")


def random_fisher(seed: int, size: int) -> Tensor:
    """Symmetric positive definite, condition number below a hundred."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return (q * torch.linspace(0.1, 5.0, size, dtype=torch.float64)) @ q.T


@dataclass
class Quadratic:
    """L(δ) = gᵀδ + bend, KL(δ) = ½δᵀFδ + excess: what a step may ask, without a model."""

    F: Tensor
    g: Tensor
    bend: Callable[[Tensor], float] = lambda delta: 0.0
    excess: Callable[[Tensor], float] = lambda delta: 0.0
    start: float = 0.0
    theta: Tensor = field(init=False)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.theta = torch.zeros_like(self.g)

    def gradient(self) -> tuple[Tensor, Metrics]:
        return self.g, {"objective": Mean(self.start)}

    def fisher(self, v: Tensor, sampled: bool) -> Tensor:
        self.asked.append("sampled" if sampled else "exact")
        return self.F @ v

    def subsample(self, share: float) -> Quadratic:
        self.asked.append(f"some {share}")
        return self

    def kl(self, delta: Tensor) -> float:
        return float(0.5 * delta @ self.F @ delta)

    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        assert torch.equal(self.theta, torch.zeros_like(self.theta))  # the search looks, it does not move
        return self.start + float(self.g @ delta) + self.bend(delta), self.kl(delta) + self.excess(delta)

    def commit(self, delta: Tensor) -> None:
        self.theta = self.theta + delta

    def fit_critic(self) -> Metrics:
        self.asked.append("fit")
        return {"value_loss": Mean(1.0)}


def problem(seed: int = 0, size: int = 6, **options: object) -> Quadratic:
    generator = torch.Generator().manual_seed(seed + 100)
    g = torch.randn(size, generator=generator, dtype=torch.float64)
    return Quadratic(random_fisher(seed, size), g, **options)  # type: ignore[arg-type]


def run(p: Quadratic, step: pg.TrustRegion) -> dict[str, float]:
    return {name: metric.value for name, metric in step(p).items()}  # type: ignore[arg-type]


UNDAMPED = pg.TrustRegion(damping=0.0)


@settings(max_examples=30, derandomize=True)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 12))
def test_conjugate_gradient_solves_in_as_many_steps_as_there_are_dimensions(seed: int, size: int) -> None:
    F, b = random_fisher(seed, size), problem(seed, size).g
    x, residual = conjugate_gradient(lambda v: F @ v, b, iterations=3 * size)
    assert torch.allclose(x, torch.linalg.solve(F, b), rtol=1e-9, atol=1e-9)
    assert residual < 1e-9


def test_conjugate_gradient_reports_the_residual_it_stopped_at() -> None:
    p = problem(size=12)
    x, residual = conjugate_gradient(lambda v: p.F @ v, p.g, iterations=3)
    assert residual == pytest.approx(float((p.g - p.F @ x).norm() / p.g.norm()), rel=1e-9)
    assert 1e-3 < residual < 1


def test_conjugate_gradient_stops_early_on_indefinite_matrices() -> None:
    calls: list[int] = []

    def identity(v: Tensor) -> Tensor:
        calls.append(1)
        return v

    b = torch.tensor([3.0, 4.0])
    x, residual = conjugate_gradient(identity, b, iterations=10)
    assert torch.equal(x, b)
    assert (residual, len(calls)) == (0.0, 1)
    nothing, zero = conjugate_gradient(identity, torch.zeros(2), iterations=10)
    assert (float(nothing.norm()), zero, len(calls)) == (0.0, 0.0, 1)
    x, residual = conjugate_gradient(lambda v: -b, b, iterations=10)
    assert (float(x.norm()), residual) == (0.0, 1.0)
    x, residual = conjugate_gradient(lambda v: torch.full((2,), NAN), b, iterations=10)
    assert float(x.norm()) == 0.0
    assert math.isnan(residual)


@settings(max_examples=20, derandomize=True)
@given(seed=st.integers(0, 10**6), delta=st.floats(1e-4, 1.0), damping=st.sampled_from([0.0, 0.1, 3.0]))
def test_the_full_step_has_the_quadratic_kl_delta_whatever_the_damping(seed: int, delta: float, damping: float) -> None:
    p = problem(seed, 8)
    metrics = run(p, pg.TrustRegion(delta, cg_iters=16, damping=damping, line_search=False))
    assert p.kl(p.theta) == pytest.approx(delta, rel=1e-9)
    x = torch.linalg.solve(p.F + damping * torch.eye(8, dtype=torch.float64), p.g)
    assert torch.allclose(p.theta, math.sqrt(2 * delta / float(x @ p.F @ x)) * x, rtol=1e-6, atol=1e-9)
    assert metrics["trust_region/kl"] == pytest.approx(delta)
    assert metrics["trust_region/improvement"] == pytest.approx(float(p.g @ p.theta))
    assert metrics["updates/taken"] == 1


def test_undamped_it_is_the_natural_gradient() -> None:
    """√(2δ/gᵀF⁻¹g)·F⁻¹g; with gᵀFg in the root, as one source prints it, the KL would be another."""
    p = problem(3)
    run(p, replace(UNDAMPED, line_search=False))
    direct = torch.linalg.solve(p.F, p.g)
    right = math.sqrt(2 * 0.01 / float(p.g @ direct)) * direct
    misprint = math.sqrt(2 * 0.01 / float(p.g @ p.F @ p.g)) * direct
    assert torch.allclose(p.theta, right, rtol=1e-8)
    assert abs(p.kl(misprint) / 0.01 - 1) > 0.1


def test_accepts_the_first_candidate_inside_the_region() -> None:
    """A KL that is 1.5 times its quadratic model: 0.8² = 0.64 of the length is the first with 0.64²·1.5 < 1."""
    p = problem(excess=lambda delta: 0.5 * problem().kl(delta))
    metrics = run(p, UNDAMPED)
    assert metrics["trust_region/backtracks"] == 1  # 0.8² · 1.5 = 0.96
    assert metrics["trust_region/kl"] == pytest.approx(0.96 * 0.01)
    assert metrics["trust_region/kl"] == pytest.approx(1.5 * p.kl(p.theta))
    assert metrics["trust_region/accepted"] == 1
    assert metrics["kl_old/last"] == metrics["trust_region/kl"]


def test_a_surrogate_that_falls_further_out_is_backtracked_to_where_it_rises() -> None:
    """L = gᵀδ − c·|δ|² turns negative beyond some length."""
    full = problem()
    run(full, replace(UNDAMPED, line_search=False))  # with it, a KL that rounding puts above δ would shorten it
    c = 1.3 * float(full.g @ full.theta) / float(full.theta @ full.theta)
    p = problem(bend=lambda delta: -c * float(delta @ delta))
    metrics = run(p, UNDAMPED)
    assert metrics["trust_region/backtracks"] == 2  # 1 − 1.3·0.8^j > 0 from j = 2
    assert torch.allclose(p.theta, 0.64 * full.theta, rtol=1e-9)
    best = problem(bend=lambda delta: -c * float(delta @ delta))
    assert (
        run(best, replace(UNDAMPED, candidates="best"))["trust_region/backtracks"] == 4
    )  # s(1 − 1.3 s) at 0.8^4 = 0.41
    scores = {j: 0.8**j * (1 - 1.3 * 0.8**j) for j in range(10)}
    assert max(scores, key=scores.get) == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("candidates", ["first", "best"])
@pytest.mark.parametrize(
    "options",
    [{"bend": lambda d: -1.0 if d.any() else 0.0}, {"excess": lambda d: 1.0}],
    ids=["the surrogate falls", "the KL stays above δ"],
)
def test_without_an_acceptable_candidate_the_parameters_stay(options: dict[str, object], candidates: str) -> None:
    p = problem(**options)
    metrics = run(p, replace(UNDAMPED, candidates=candidates))
    assert torch.equal(p.theta, torch.zeros_like(p.theta))
    assert metrics["trust_region/accepted"] == metrics["trust_region/kl"] == metrics["trust_region/improvement"] == 0
    assert metrics["trust_region/backtracks"] == 10
    assert metrics["updates/skipped"] == 1
    assert not {"updates/taken", "trust_region/nonfinite"} & metrics.keys()


def test_full_step_is_always_taken_without_line_search() -> None:
    p = problem(bend=lambda d: -1.0 if d.any() else 0.0, excess=lambda d: 1.0)
    metrics = run(p, replace(UNDAMPED, line_search=False))
    assert metrics["updates/taken"] == 1
    assert metrics["trust_region/kl"] == pytest.approx(1.01)
    assert metrics["trust_region/improvement"] < 0


BROKEN: dict[str, Callable[[], Quadratic]] = {
    "gradient NaN": lambda: Quadratic(random_fisher(0, 2), torch.tensor([NAN, 1.0], dtype=torch.float64)),
    "gradient inf": lambda: Quadratic(random_fisher(0, 2), torch.tensor([INF, 1.0], dtype=torch.float64)),
    "Fisher NaN": lambda: Quadratic(torch.full((2, 2), NAN, dtype=torch.float64), torch.ones(2, dtype=torch.float64)),
    "surrogate NaN": lambda: problem(bend=lambda d: NAN if d.any() else 0.0),
    "surrogate at the start NaN": lambda: problem(start=NAN),
    "KL inf": lambda: problem(excess=lambda d: INF if d.any() else 0.0),
}


@pytest.mark.parametrize("line_search", [True, False])
@pytest.mark.parametrize("name", BROKEN)
def test_non_finite_values_leave_parameters_and_are_reported(name: str, line_search: bool) -> None:
    p = BROKEN[name]()
    metrics = run(p, pg.TrustRegion(line_search=line_search))
    assert torch.equal(p.theta, torch.zeros_like(p.theta))
    assert metrics["trust_region/nonfinite"] >= 1
    assert metrics["updates/skipped"] == 1
    assert "updates/taken" not in metrics
    assert all(math.isfinite(v) for k, v in metrics.items() if k != "objective")
    assert p.asked.count("fit") == 5  # the critic is still fitted


@pytest.mark.parametrize("sign", [0, -1])
def test_flat_curvature_leaves_parameters_and_is_reported(sign: int) -> None:
    """Rounding can do that; every number is finite, so that is not what is said."""
    p = Quadratic(sign * random_fisher(0, 2), torch.ones(2, dtype=torch.float64))
    metrics = run(p, pg.TrustRegion())
    assert torch.equal(p.theta, torch.zeros_like(p.theta))
    assert (metrics["trust_region/flat"], metrics["updates/skipped"], metrics["trust_region/accepted"]) == (1, 1, 0)
    assert "trust_region/nonfinite" not in metrics
    assert p.asked.count("fit") == 5


def test_a_candidate_that_is_not_finite_gives_way_to_a_shorter_one() -> None:
    longest = problem()
    run(longest, replace(UNDAMPED, line_search=False))
    limit = 0.9 * float(longest.theta.norm())
    p = problem(bend=lambda d: NAN if float(d.norm()) > limit else 0.0)
    metrics = run(p, UNDAMPED)
    assert (metrics["trust_region/backtracks"], metrics["trust_region/nonfinite"]) == (1, 1)
    assert metrics["updates/taken"] == 1
    assert torch.allclose(p.theta, 0.8 * longest.theta)


def test_zero_gradient_makes_no_products() -> None:
    p = Quadratic(random_fisher(0, 3), torch.zeros(3, dtype=torch.float64))
    metrics = run(p, pg.TrustRegion())
    assert set(p.asked) == {"fit"}
    assert metrics["updates/skipped"] == 1
    assert "trust_region/nonfinite" not in metrics


def test_number_of_calls_per_step() -> None:
    p = problem(size=12)
    run(p, pg.TrustRegion(cg_iters=4, fisher="sampled", critic_steps=3))
    assert p.asked == ["sampled"] * 5 + ["fit"] * 3  # one more product, for the step's length
    step = pg.TrustRegion(critic_steps=3)
    assert (step.updates, step.critic_updates, pg.TrustRegion().critic_updates) == (1, 3, 5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"delta": 0.0}, "delta must be above 0"),
        ({"delta": -0.1}, "delta must be above 0"),
        ({"delta": NAN}, "delta must be above 0"),
        ({"delta": INF}, "finite"),
        ({"cg_iters": 0}, "cg_iters must be at least 1"),
        ({"backtrack_iters": 0}, "backtrack_iters must be at least 1"),
        ({"critic_steps": 0}, "critic_steps must be at least 1"),
        ({"damping": -1.0}, "damping must be at least 0"),
        ({"damping": NAN}, "damping must be at least 0"),
        ({"backtrack_coeff": 1.0}, "backtrack_coeff must be between 0 and 1"),
        ({"backtrack_coeff": 0.0}, "backtrack_coeff must be between 0 and 1"),
        ({"fisher": "full"}, "'exact' or 'sampled', not 'full'"),
        ({"candidates": "last"}, "'first' or 'best', not 'last'"),
        ({"line_search": False, "backtrack_iters": 3}, "backtrack_iters has no effect with line_search=False"),
        ({"line_search": False, "candidates": "best"}, "candidates has no effect with line_search=False"),
    ],
)
def test_refuses(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pg.TrustRegion(**options)  # type: ignore[arg-type]


def test_refuses_algorithms_it_cannot_serve() -> None:
    with pytest.raises(ValueError, match="which without a ratio is constant"):
        replace(pg.REINFORCE, update_rule=pg.TrustRegion())
    with pytest.raises(ValueError, match=r"critic_steps needs a critic.*critic=Critic"):
        replace(pg.DR_GRPO, update_rule=pg.TrustRegion(critic_steps=5))
    with pytest.raises(ValueError, match="resets AdamW's moments"):
        replace(pg.PRORL, update_rule=pg.TrustRegion())
    assert replace(pg.REINFORCE, update_rule=pg.TrustRegion(line_search=False)).needs == {"logp_old"}
    assert replace(pg.DR_GRPO, update_rule=pg.TrustRegion()).update_rule.updates == 1


def test_the_rows_differ_in_the_line_search_alone() -> None:
    assert replace(pg.NATURAL, name="trpo", update_rule=pg.TRPO.update_rule) == pg.TRPO
    assert pg.NATURAL.update_rule == pg.TrustRegion(line_search=False)
    assert pg.TRPO.update_rule == pg.TrustRegion(0.01, 10, 0.1, 0.8, 10)
    assert "0.8^j" in pg.TRPO.equation()["step"]
    assert "0.8^j" not in pg.NATURAL.equation()["step"]


def test_fisher_fraction_affects_the_direction_only() -> None:
    """Few groups that know little curvature turn the step; they do not lengthen it."""
    p, few = problem(), problem(5)
    few.F = 0.01 * few.F
    few.g = p.g
    asked: list[float] = []
    p.subsample = lambda share: asked.append(share) or few  # type: ignore[method-assign, assignment, func-returns-value]
    metrics = run(p, pg.TrustRegion(0.01, fisher_fraction=0.25, cg_iters=12, damping=0.0, line_search=False))
    assert asked == [0.25]
    assert (few.asked.count("exact") > 1, p.asked.count("exact")) == (True, 1)
    assert metrics["trust_region/kl"] == pytest.approx(0.01, rel=1e-9)
    direction = torch.linalg.solve(few.F, p.g)
    assert float(p.theta @ direction / (p.theta.norm() * direction.norm())) == pytest.approx(1, abs=1e-9)
    uninterrupted = problem()
    uninterrupted.subsample = lambda share: pytest.fail("nothing to leave out")  # type: ignore[method-assign, assignment]
    run(uninterrupted, pg.TrustRegion(cg_iters=2))
    for share in (0.0, -1.0, 1.5, NAN):
        with pytest.raises(ValueError, match="fisher_fraction"):
            pg.TrustRegion(fisher_fraction=share)


@dataclass
class Half(Quadratic):
    """One of two equal processes, each with half of every vector: the other has the same numbers."""

    def inner_product(self, a: Tensor, b: Tensor) -> Tensor:
        return 2 * (a @ b)

    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        value, kl = super().evaluate(delta)
        return 2 * value, 2 * kl


@pytest.mark.parametrize("seed", range(3))
def test_sharded_vectors_give_the_same_step(seed: int) -> None:
    half = problem(seed)  # the excess: the full step would be at δ but for rounding
    F, g = torch.block_diag(half.F, half.F), torch.cat([half.g, half.g])
    uninterrupted = Quadratic(F, g, excess=lambda delta: 1e-3)
    mine = Half(half.F, half.g, excess=lambda delta: 5e-4)
    step = pg.TrustRegion(cg_iters=4)  # fewer than would leave rounding alone of the residual
    expected, result = run(uninterrupted, step), run(mine, step)
    assert torch.allclose(torch.cat([mine.theta, mine.theta]), uninterrupted.theta, rtol=1e-9, atol=0)
    assert float(mine.theta.norm()) > 1e-3
    assert result["trust_region/backtracks"] == 1
    assert result == pytest.approx(expected, rel=1e-9)
