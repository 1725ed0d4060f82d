"""Trust regions: a step along the surrogate's natural gradient that changes the policy by at most δ nats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from policygrad.core.base import UpdateRule
from policygrad.core.metrics import Max, Mean, Metrics, Sum, merge
from policygrad.core.settings import COUNT, choice, setting
from policygrad.core.updates import CurvatureProblem, ShardedProblem, require_problem
from policygrad.errors import ConfigError

if TYPE_CHECKING:
    from policygrad.core.algorithm import Algorithm

DEFAULT_CRITIC_STEPS = 5  # critic updates per rollout where `TrustRegion.critic_steps` is None
InnerProduct = Callable[[Tensor, Tensor], Tensor]  # ⟨a, b⟩ [] of two vectors [P]


def conjugate_gradient(
    product: Callable[[Tensor], Tensor], b: Tensor, iterations: int, inner: InnerProduct = torch.dot
) -> tuple[Tensor, float]:
    """Solve A x = b for a symmetric positive definite A, with at most `iterations` products A v.

    Stops early once the residual is at rounding level, or where A has non-positive or non-finite curvature; x is then the last
    iterate. Source: Hestenes & Stiefel 1952, eq. 3:1.

    Args:
        inner: the inner product; for sharded vectors it sums over processes.

    Returns:
        (x [P], ‖b − A x‖/‖b‖); the residual is NaN after non-finite curvature.
    """
    x, residual = torch.zeros_like(b), b.clone()
    direction, square = residual.clone(), inner(residual, residual)
    first = float(square)
    for _ in range(iterations):
        if not float(square) > torch.finfo(b.dtype).eps ** 2 * first:
            break
        image = product(direction)
        curvature = inner(direction, image)
        if not math.isfinite(float(curvature)):
            return x, math.nan
        if not float(curvature) > 0:
            break
        length = square / curvature
        x = x + length * direction
        residual = residual - length * image
        before, square = square, inner(residual, residual)
        direction = residual + square / before * direction
    return x, math.sqrt(float(square) / first) if first else 0.0


class _Point(NamedTuple):
    """An evaluated candidate of the line search: θ_old + scale·(full step)."""

    scale: float
    improvement: float
    kl: float
    backtracks: int


@dataclass(frozen=True)
class TrustRegion(UpdateRule):
    """Maximise the surrogate L subject to mean KL(π_old‖π_θ) ≤ δ nats per sampled token.

    The direction x ≈ (F + damping)⁻¹∇L comes from conjugate gradient, and the full step is √(2δ/xᵀFx)·x with the undamped F. The
    line search takes backtrack_coeff^j of it for the first (or best) j at which L improves and the KL, exact over the vocabulary,
    is at most δ; without such a j the parameters stay. Without the line search the full step is taken: a natural gradient step
    whose length δ sets. The policy's step uses no learning rate, AdamW or gradient clipping.

    Source: Schulman et al. 2015 (TRPO), eq. 12 to 14 and appendix C; Kakade 2001 (natural gradient).
    """

    delta: float = setting(0.01, "above 0", hint="it is in nats per token")
    """Maximum KL, nats per sampled token."""
    cg_iters: int = setting(10, COUNT)
    """Conjugate gradient iterations."""
    damping: float = setting(0.1, "at least 0")
    backtrack_coeff: float = setting(0.8, "between 0 and 1")
    backtrack_iters: int = setting(10, COUNT)
    """Candidates of the line search."""
    line_search: bool = True
    fisher: Literal["exact", "sampled"] = choice(exact="", sampled="")
    """exact: over the vocabulary; sampled: E[ssᵀ] of the sampled tokens."""
    fisher_fraction: float = setting(1.0, "above 0 and at most 1")
    """Fraction of the groups that conjugate gradient uses (0.1 in the paper, appendix C.1).
    It affects the direction only; the length, L and the KL are computed on all groups."""
    candidates: Literal["first", "best"] = choice(first="", best="")
    """first: the first acceptable candidate; best: the acceptable one with the largest L."""
    critic_steps: int | None = setting(None, COUNT)
    """Critic updates per rollout; None: 5 if there is a critic."""
    needs: ClassVar[frozenset[str]] = frozenset({"logp_old"})
    uses_lr: ClassVar[bool] = False
    """δ sets the length of the step."""
    step_size: ClassVar[tuple[str, str]] = ("delta", "in nats per token")

    def __post_init__(self) -> None:
        super().__post_init__()
        searching = ("backtrack_coeff", "backtrack_iters", "candidates")
        changed = [name for name in searching if getattr(self, name) != getattr(TrustRegion, name)]
        if changed and not self.line_search:
            raise ConfigError(
                f"TrustRegion.{changed[0]} has no effect with line_search=False: unset it, or set line_search=True"
            )

    def find_conflicts(self, algorithm: Algorithm) -> Iterator[str]:
        if (selector := algorithm.token_selector) is not None:
            yield (
                f"{type(selector).__name__} selects tokens of one gradient step, and TrustRegion tries several: use "
                "GradientSteps(), or remove it"
            )
        if algorithm.reward_model is not None:
            yield "TrustRegion updates only the policy, not ImplicitReward: set update_rule=GradientSteps(), or reward_model=None"
        if any("kl_ref" in term.forward_needs for term in algorithm.terms):
            yield (
                "TrustRegion evaluates candidate weights without evaluating the reference there: replace ExactKLToReference() by "
                "KLToReference(form='r*k1')"
            )
        if self.line_search and algorithm.ratio is None:
            yield (
                "TrustRegion's line search compares the surrogate of several policies, which without a ratio is constant: "
                "set ratio=Token() and gate=Importance(), or line_search=False"
            )
        if self.critic_steps is not None and algorithm.critic is None:
            yield "TrustRegion.critic_steps needs a critic: unset it, or set critic=Critic()"
        if algorithm.reference is not None and algorithm.reference.reset_optimizer:
            yield "Reference(reset_optimizer=True) resets AdamW's moments, and TrustRegion has none: set reset_optimizer=False"
        if "demonstration" in algorithm.all_needs:
            yield "TrustRegion measures the policy's samples, not demonstrations: set update_rule=GradientSteps(), or remove them"
        if algorithm.reads_observations:
            yield "TrustRegion measures the policy's samples: set update_rule=GradientSteps(), or remove ObservationNLL()"

    @property
    def updates(self) -> int:
        """One constrained step per rollout."""
        return 1

    @property
    def critic_updates(self) -> int:
        return DEFAULT_CRITIC_STEPS if self.critic_steps is None else self.critic_steps

    @property
    def formula(self) -> str:
        length = f"√(2·{self.delta:g}/xᵀFx)·x,  x ≈ (F + {self.damping:g})⁻¹∇L"
        if not self.line_search:
            return length
        which = "the first" if self.candidates == "first" else "the best"
        return f"{which} {self.backtrack_coeff:g}^j·{length} with L up and KL(π_old‖π_θ) ≤ {self.delta:g}"

    def __call__(self, problem: object) -> Metrics:
        problem = require_problem(problem, CurvatureProblem, self)  # type: ignore[type-abstract]
        gradient, measured = problem.gradient()
        metrics = merge(measured, self._move(problem, gradient))
        return merge(metrics, *(problem.fit_critic() for _ in range(self.critic_updates)))

    def _move(self, problem: CurvatureProblem, gradient: Tensor) -> Metrics:
        inner = problem.inner_product if isinstance(problem, ShardedProblem) else torch.dot
        square = float(inner(gradient, gradient))
        norm = math.sqrt(square) if math.isfinite(square) else math.inf
        if norm == 0:  # no completion contributes to the gradient
            return {"updates/skipped": Sum(1.0)}
        if not math.isfinite(norm):
            return self._report(None, not_finite=1)
        # Conjugate gradient: x ≈ (F + damping)⁻¹∇L.
        sampled = self.fisher == "sampled"
        subset = problem if self.fisher_fraction == 1 else problem.subsample(self.fisher_fraction)
        damped = lambda v: subset.fisher(v, sampled) + self.damping * v  # noqa: E731
        x, residual = conjugate_gradient(damped, gradient, self.cg_iters, inner)
        # The KL itself sets the length: undamped, and on all groups, since few of them give a poor estimate of the curvature.
        curvature = float(inner(x, problem.fisher(x, sampled)))
        broken = math.isnan(residual)
        solved: Metrics = {} if broken else {"trust_region/residual": Mean(residual)}
        solved["grad_norm"] = Max(norm)
        if not math.isfinite(curvature) or (broken and curvature <= 0):
            return self._report(None, not_finite=1)
        if curvature <= 0:  # rounding: the quadratic model of the KL reaches δ at no length
            return self._report(None, not_finite=0) | solved | {"trust_region/flat": Sum(1.0)}
        full = math.sqrt(2 * self.delta / curvature) * x
        point, not_finite = self._search(problem, full)
        if point is not None:
            problem.commit(point.scale * full)
        return self._report(point, not_finite + broken) | solved

    def _search(self, problem: CurvatureProblem, full: Tensor) -> tuple[_Point | None, int]:
        """Return (the chosen candidate or None, number of candidates that were not finite)."""
        before, _ = problem.evaluate(torch.zeros_like(full))
        if not math.isfinite(before):
            return None, 1
        best, not_finite = None, 0
        for j in range(self.backtrack_iters if self.line_search else 1):
            scale = self.backtrack_coeff**j
            after, kl = problem.evaluate(scale * full)
            point = _Point(scale, after - before, kl, j)
            if not math.isfinite(after + kl):
                not_finite += 1
            elif self.line_search and (point.improvement <= 0 or point.kl > self.delta):
                continue
            elif best is None or point.improvement > best.improvement:
                best = point
                if self.candidates == "first":
                    break
        return best, not_finite

    def _report(self, point: _Point | None, not_finite: int) -> Metrics:
        """Return the metrics of the search. An adaptive β reads `kl_old/last`."""
        chosen = point or _Point(0.0, 0.0, 0.0, self.backtrack_iters if self.line_search else 1)
        metrics: Metrics = {
            "trust_region/accepted": Mean(float(point is not None)),
            "trust_region/kl": Mean(chosen.kl),
            "trust_region/improvement": Mean(chosen.improvement),
            "trust_region/backtracks": Mean(float(chosen.backtracks)),
            "kl_old/last": Mean(chosen.kl),
            ("updates/skipped" if point is None else "updates/taken"): Sum(1.0),
        }
        return metrics | ({"trust_region/nonfinite": Sum(float(not_finite))} if not_finite else {})
