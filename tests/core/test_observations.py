"""Tokens that the environment wrote: predicted by one term, with a denominator of its own, and read by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

import policygrad as pg
from doubles.cases import naming
from doubles.random_batches import NAN, Random, Shape, close, extra_of, gradients, make, passed, policy, shapes
from policygrad.core.objective import find_nonfinite_factors, measure_forward, with_selected_tokens

WITHOUT = [name for name, algorithm in pg.ALGORITHMS.items() if not algorithm.reads_observations]


def conversation() -> pg.Batch:
    """Two prompts of two completions; s sampled, e the environment's, t the template's: s e e s, s t s, s, and a failed e s."""
    return pg.Batch(
        mask=torch.tensor([[1, 0, 0, 1], [1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool(),
        observation=torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]).bool(),
        group=torch.tensor([0, 0, 1, 1]),
        reward=torch.tensor([1.0, 0.0, 0.5, NAN], dtype=torch.float64),
    )


def test_the_coefficients_by_hand() -> None:
    """λ = 0.05 over two completions with an observation: 1/(2·2) and 1/(2·1). The failed one has none."""
    batch = conversation()
    policy_c, observed_c = pg.ECHO.all_coefficients(batch)
    assert policy_c.tolist() == [[1 / 6, 0, 0, 1 / 6], [1 / 6, 0, 1 / 6, 0], [1 / 3, 0, 0, 0], [0] * 4]
    assert observed_c.tolist() == [[0, 1 / 4, 1 / 4, 0], [0] * 4, [0, 1 / 2, 0, 0], [0] * 4]
    logp = torch.full((4, 4), -2.0, dtype=torch.float64, requires_grad=True)
    psi = torch.zeros_like(batch.mask, dtype=torch.float64)
    (gradient,) = gradients(-pg.surrogate(logp, batch, psi, pg.ECHO), logp)
    torch.testing.assert_close(gradient, 0.05 * observed_c)
    assert pg.objective(logp, batch, psi, pg.ECHO).item() == pytest.approx(-2 * 0.05)
    metrics = measure_forward(pg.Forward(logp), batch, psi, pg.ECHO, (policy_c, observed_c))
    nll = metrics["observation/nll"]
    assert (nll.value, float(nll.count)) == (2.0, 3.0)  # type: ignore[attr-defined]


def test_over_all_tokens_a_long_observation_counts_more() -> None:
    algorithm = replace(pg.ECHO, terms=(pg.ObservationNLL(0.1, pg.TokenMean()),))
    assert algorithm.all_coefficients(conversation())[1].sum(1).tolist() == pytest.approx([2 / 3, 0, 1 / 3, 0])


def test_weights_are_those_of_sampled_tokens() -> None:
    """A group of weight 0, which dynamic sampling could not replace, still shows what its actions led to."""
    batch = conversation()
    weighted = replace(batch, weight=torch.where(batch.mask, 0.0, NAN))
    policy_c, observed_c = pg.ECHO.all_coefficients(weighted)
    assert policy_c.sum() == 0
    assert torch.equal(observed_c, pg.ECHO.all_coefficients(batch)[1])


def test_no_other_part_reads_anything_there() -> None:
    for name in WITHOUT:
        with naming(name):
            check_unread(name, Shape((4, 1, 3), 5, seed=3, binary=False))


@pytest.mark.full
@pytest.mark.parametrize("name", WITHOUT)
@settings(max_examples=4, derandomize=True)
@given(shape=shapes())
def test_no_other_part_reads_anything_there_on_random_shapes(name: str, shape: Shape) -> None:
    check_unread(name, shape)


def check_unread(name: str, shape: Shape) -> None:
    """With marks, and numbers where there was NaN, every algorithm's gradient, value and metrics are the same bits."""
    algorithm = pg.ALGORITHMS[name]
    batch, logits = make(shape, 0.2, extra_of(algorithm))
    marked = replace(batch, observation=Random(shape.seed + 5).uniform(*batch.mask.shape) < 0.7)
    results = []
    for given_batch, read in ((batch, batch.mask), (marked, torch.ones_like(batch.mask))):
        leaf = policy(logits, batch.tokens, read).detach().requires_grad_()
        rollout = algorithm.apply_filters(given_batch)
        psi = algorithm.compute_advantages(rollout)
        rollout = with_selected_tokens(passed(leaf, rollout), rollout, psi, algorithm)
        out, coef = passed(leaf, rollout), algorithm.all_coefficients(rollout)
        (gradient,) = gradients(pg.surrogate(out, rollout, psi, algorithm), leaf)
        metrics = measure_forward(out, rollout, psi, algorithm, coef)
        results.append((gradient, pg.objective(out, rollout, psi, algorithm), *coef))
        results[-1] += tuple(torch.tensor(float(m.value)) for _, m in sorted(metrics.items()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@settings(max_examples=20, derandomize=True)
@given(shape=shapes())
def test_without_observations_it_is_grpo_without_the_kl(shape: Shape) -> None:
    batch, logits = make(shape, 0.3)
    batch = replace(batch, observation=torch.zeros_like(batch.mask))
    logp = policy(logits, batch.tokens, batch.mask)
    losses = [pg.surrogate(logp, batch, a.compute_advantages(batch), a) for a in (pg.ECHO, replace(pg.GRPO, terms=()))]
    assert torch.equal(*(gradients(loss, logits)[0] for loss in losses))


class PredictsSurprise(pg.LossTerm):
    """A custom loss term over observations."""

    needs = frozenset({"observation"})

    def objective(self, out: pg.Forward, batch: pg.Batch, psi: torch.Tensor) -> torch.Tensor:
        return -(out.logp**2)


def test_a_custom_loss_term_over_observations() -> None:
    batch = conversation()
    algorithm = replace(pg.GRPO, terms=(PredictsSurprise(),))
    logp = torch.full((4, 4), -2.0, dtype=torch.float64, requires_grad=True)
    psi = torch.zeros_like(batch.mask, dtype=torch.float64)
    (gradient,) = gradients(-pg.surrogate(logp, batch, psi, algorithm), logp)
    close(gradient, 4 * pg.SequenceMean()(batch.observed_tokens, batch.group))


def test_a_nonfinite_observation_is_the_models_output() -> None:
    batch = conversation()
    psi = torch.zeros_like(batch.mask, dtype=torch.float64)
    logp = torch.zeros(4, 4, dtype=torch.float64)
    logp[0, 1] = NAN
    factors = find_nonfinite_factors(pg.Forward(logp), batch, psi, pg.ECHO, pg.ECHO.all_coefficients(batch))
    assert {name for name, factor in factors.items() if factor.value} == {"logp"}
    logp[0, 1], logp[1, 1] = 0.0, NAN  # the template's token, which nobody reads
    factors = find_nonfinite_factors(pg.Forward(logp), batch, psi, pg.ECHO, pg.ECHO.all_coefficients(batch))
    assert not any(factor.value for factor in factors.values())


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a negative coefficient": (lambda: pg.ObservationNLL(-0.1), r"ObservationNLL\.coefficient must be at least 0"),
    "a trust region": (lambda: replace(pg.TRPO, terms=(pg.ObservationNLL(),)), r"TrustRegion.*GradientSteps\(\)"),
    "single tokens": (
        lambda: replace(
            pg.TRPO_VINE,
            update_rule=pg.GradientSteps(),
            terms=(pg.SelfNormalisation(), pg.ObservationNLL()),
        ),
        r"reads Batch\.observation",
    ),
    "no marks": (
        lambda: pg.ECHO.all_coefficients(replace(conversation(), observation=None)),
        r"ObservationNLL needs Batch\.observation",
    ),
    "marks that are numbers": (
        lambda: replace(conversation(), observation=torch.zeros(4, 4)),
        r"Batch\.observation must be bool",
    ),
    "a single coefficient": (
        lambda: pg.surrogate(
            torch.zeros(4, 4),
            conversation(),
            torch.zeros(4, 4),
            replace(pg.GRPO, terms=(PredictsSurprise(),)),
            torch.zeros(4, 4),
        ),
        r"PredictsSurprise aggregates differently",
    ),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(pg.ConfigError, match=message):
        build()
