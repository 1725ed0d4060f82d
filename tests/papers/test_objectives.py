"""The papers' objectives on the batch of a run: any row, after filters, under a state; and which algorithms they state."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import policygrad as pg
from doubles.paper_variants import EXTRA_FIELDS
from doubles.random_batches import Shape, close, distributions, gradients, make, passed, policy
from policygrad.core.objective import with_selected_tokens
from policygrad.core.staleness import resolve_old_policy
from policygrad.papers.objectives import PAPER_OBJECTIVES, describe_departure, paper_objective

BUDGET = 9  # tokens, more than a batch is wide


def rollout(name: str, algorithm: pg.Algorithm, seed: int) -> tuple[pg.Batch, Tensor]:
    """A batch as the learner updates on it, and log π_θ that has moved."""
    batch, logits = make(Shape((4, 1, 3, 4), 6, seed=seed, binary=seed % 2 == 0), 0.15, EXTRA_FIELDS.get(name))
    logp = policy(logits, batch.tokens, algorithm.read_tokens(batch))
    _, batch = resolve_old_policy(algorithm, algorithm.apply_filters(batch, refilled=True), 0)
    return batch, logp


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
@pytest.mark.parametrize("name", PAPER_OBJECTIVES)
def test_a_run_of_a_row_has_the_papers_gradient(name: str, seed: int) -> None:
    """With its budget in the parts, and groups of equal rewards that dynamic sampling could not replace."""
    algorithm = pg.ALGORITHMS[name].with_max_tokens(BUDGET)
    algorithm = replace(algorithm, samples_per_prompt=16)
    algorithm = algorithm.with_state(algorithm.init_state())
    batch, logp = rollout(name, algorithm, seed)
    psi, out = algorithm.compute_advantages(batch), passed(logp, batch, algorithm)
    batch = with_selected_tokens(out, batch, psi, algorithm)
    over_vocabulary = distributions(logp, batch) if "kl_ref" in algorithm.forward_needs else None
    J = paper_objective(algorithm, batch, logp, BUDGET, over_vocabulary)
    (expected,) = torch.autograd.grad(J, logp, retain_graph=True)
    (actual,) = gradients(-pg.surrogate(out, batch, psi, algorithm), logp)
    tokens = algorithm.read_tokens(batch)
    close(actual, torch.where(tokens, expected, 0.0), scale=expected[tokens])
    torch.testing.assert_close(pg.objective(out, batch, psi, algorithm), J.detach(), rtol=1e-11, atol=1e-11)


def test_a_float32_batch_is_read_in_float64() -> None:
    algorithm = pg.KL_COV
    batch, logp = rollout("kl_cov", algorithm, 1)
    batch = replace(batch, **{k: x.float() for k, x in batch.tensors().items() if x.is_floating_point()})
    logp = logp.detach().float().requires_grad_()
    psi = algorithm.compute_advantages(batch)
    batch = with_selected_tokens(pg.Forward(logp), batch, psi, algorithm)
    J = paper_objective(algorithm, batch, logp, BUDGET)
    assert J.dtype == torch.float64
    (expected,) = torch.autograd.grad(J, logp)
    (actual,) = torch.autograd.grad(-pg.surrogate(logp, batch, psi, algorithm), logp)
    close(actual[batch.mask], expected[batch.mask], tolerance=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "state"),
    [(pg.REINFORCE, {"advantage.0": {"mean": 0.7, "count": 3}}), (pg.PPO_PENALTY, {"terms.0": {"beta": 4.0}})],
)
def test_the_current_state_is_read(algorithm: pg.Algorithm, state: dict[str, dict[str, float]]) -> None:
    batch, logp = rollout(algorithm.name, algorithm, 1)
    values = [float(paper_objective(a, batch, logp, BUDGET).detach()) for a in (algorithm, algorithm.with_state(state))]
    now = algorithm.with_state(state)
    assert values[0] != values[1]
    assert values[1] == pytest.approx(float(pg.objective(logp, batch, now.compute_advantages(batch), now)), rel=1e-12)


def test_settings_that_do_not_change_the_formula() -> None:
    for name in PAPER_OBJECTIVES:
        row = pg.ALGORITHMS[name]
        assert describe_departure(row) == "", name
        changed = replace(row.with_max_tokens(64), samples_per_prompt=16, head="fp32")
        assert describe_departure(changed.with_state(changed.init_state()), 64) == "", name


def test_a_departure_from_the_paper_has_its_reason() -> None:
    curriculum = replace(pg.GRPO, filters=(pg.PassRateBand(),))
    assert describe_departure(curriculum.with_state(curriculum.init_state())) == ""
    assert describe_departure(replace(pg.DAPO, filters=(pg.DropZeroVariance(max_rounds=2), pg.MaskTruncated()))) == ""
    assert describe_departure(replace(pg.DAPO, gate=pg.Clip(0.2, 0.2))) == (
        "gate differs from dapo's: Clip(low=0.2, high=0.2, c=None) instead of Clip(low=0.2, high=0.28, c=None)"
    )
    assert describe_departure(replace(pg.GRPO, terms=())) == (
        "terms differs from grpo's: none instead of KLToReference(beta=0.04, form='k3', target=None, rule=None, aggregation=None, "
        "cap=None, level='token')"
    )
    assert "corrections differs from ppo's: TruncatedIS" in describe_departure(
        replace(pg.PPO, corrections=(pg.TruncatedIS(),))
    )
    assert "old_policy differs" in describe_departure(
        replace(pg.RAFT, old_policy="learner", update_rule=pg.GradientSteps())
    )
    assert "'custom'" in describe_departure(replace(pg.GRPO, name="custom"))
    assert "length=20" in describe_departure(replace(pg.DAPO, shaping=(pg.SoftOverlong(length=20),)), 30)


def test_what_an_objective_cannot_be_computed_for_is_refused() -> None:
    batch, logp = rollout("grpo", pg.GRPO, 0)
    for fields, message in (
        ({"logp_ref": None}, r"needs Batch\.logp_ref"),
        ({"token_reward": batch.mask.double()}, "no token rewards"),
        ({"weight": 2 * batch.mask.double()}, "no weights"),
    ):
        with pytest.raises(pg.ConfigError, match=message):
            paper_objective(pg.GRPO, replace(batch, **fields), logp, BUDGET)
    with pytest.raises(pg.ConfigError, match="does not apply: gate differs"):
        paper_objective(replace(pg.GRPO, gate=pg.Importance()), batch, logp, BUDGET)
    for name in ("clip_cov", "kl_cov"):
        with pytest.raises(pg.ConfigError, match=r"Batch\.selected has \d+ tokens"):
            paper_objective(pg.ALGORITHMS[name], replace(batch, selected=batch.mask), logp, BUDGET)


def test_importing_the_package_does_not_import_them() -> None:
    code = "import sys, policygrad; sys.exit('policygrad.papers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
