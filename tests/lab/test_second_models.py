"""What the lab knows of a teacher and of a reward model: by the definition, and what it makes of the rows that need one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import policygrad as pg
from policygrad.lab.estimators import enumerate_steps, estimate_gradients
from policygrad.lab.measurement import measure_algorithm
from policygrad.lab.sequences import perturb_policy
from policygrad.lab.setting import LabSetting
from policygrad.lab.worlds import one_prompt


@pytest.fixture(scope="module")
def setting() -> LabSetting:
    setting = one_prompt(length=3, seed=4)
    return replace(setting, reference=perturb_policy(setting.world, setting.theta, 0.3, seed=9))


def test_learned_process_rewards_telescope(setting: LabSetting) -> None:
    """Σ_t r_φ(o_t) = R − β·log E_{π_ref}[exp(R/β)], and given any prefix what is to come is worth 0 in that exponential mean."""
    beta, world = 0.3, setting.world
    algorithm = replace(pg.PRIME, reward_model=pg.ImplicitReward(beta))
    book = setting.enumerate_batch(algorithm)
    assert book.implicit_reward is not None
    assert setting.reference is not None
    chance = world.logp(setting.reference).exp().flatten()
    worth = world.reward.flatten()
    normaliser = beta * (chance * (worth / beta).exp()).sum().log()
    torch.testing.assert_close(book.implicit_reward.sum(1), worth - normaliser, rtol=1e-12, atol=1e-12)
    for state in range(int(world.state.max()) + 1):  # E[exp(r_φ/β) | s] = 1: π_φ is a distribution
        here = (world.state == state) & world.mask
        p = torch.where(here, chance[:, None], 0)
        mean = (p * (book.implicit_reward / beta).exp()).sum() / p.sum()
        assert float(mean) == pytest.approx(1, rel=1e-12)


def test_a_teachers_whole_kl_is_unbiased_and_its_tokens_are_not(setting: LabSetting) -> None:
    """Of ∇ −KL(π_θ‖π_T) of completions, what distillation states as its objective; a completion is one action."""
    steps = enumerate_steps(setting, 1)
    full = replace(pg.DISTILL, advantage=(pg.TeacherLogRatio(discount=1.0),), aggregation=pg.SequenceSum())
    tokens = replace(full, advantage=(pg.TeacherLogRatio(),))
    exact = replace(full, advantage=(pg.TeacherLogRatio(0.0),), terms=(pg.ExactKLToReference(),))
    result = {
        name: measure_algorithm(a, setting, steps).figures
        for name, a in (("whole", full), ("tokens", tokens), ("exact", exact))
    }
    assert result["whole"].bias < 1e-12
    assert result["tokens"].bias > 0.01
    gradients = [estimate_gradients(a, setting, steps).mean for a in (tokens, exact)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert result["exact"].variance < result["tokens"].variance


def test_rewards_are_not_part_of_a_distillation_s_objective(setting: LabSetting) -> None:
    other = replace(setting, world=replace(setting.world, reward=1 - setting.world.reward))
    assert torch.equal(setting.true_gradient(pg.DISTILL), other.true_gradient(pg.DISTILL))
    assert not torch.equal(setting.true_gradient(pg.PRIME), other.true_gradient(pg.PRIME))


def test_process_rewards_that_say_the_truth_double_the_gradient_and_lengths_bias_it(setting: LabSetting) -> None:
    """What is left to win of R after a prefix is an advantage too; the per-token baseline is none (its bias is of lengths)."""
    steps = enumerate_steps(setting, 2)
    prime = replace(
        pg.PRIME,
        filters=(),
        aggregation=pg.SequenceSum(),
        ratio=None,
        gate=pg.OnPolicy(),
        update_rule=pg.GradientSteps(),
    )
    result = measure_algorithm(prime, setting, steps).figures
    rloo = measure_algorithm(replace(pg.RLOO, shaping=()), setting, steps).figures
    assert rloo.bias < 1e-12
    assert result.cosine > 0.9
    assert 1.2 < result.scale < 3
