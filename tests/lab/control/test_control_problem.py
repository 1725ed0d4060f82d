"""Policies for classic control: their distributions, Fisher products and steps, against the literal definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import policygrad as pg
from doubles.control import CONTINUOUS, DISCRETE
from policygrad.lab.control.environments import Spaces
from policygrad.lab.control.policies import Categorical, ControlPolicy, Distribution, Gaussian, Normaliser
from policygrad.lab.control.train import ControlLearner, ControlProblem, Settings, find_preset


def distributions(
    seed: int = 0,
) -> list[tuple[Distribution, Distribution, torch.distributions.Distribution, list[Tensor]]]:
    """(one, another, the first as torch has it, the leaves it depends on) of each kind."""
    g = torch.Generator().manual_seed(seed)
    logits, mean, log_std = (torch.randn(5, 3, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3))
    other = torch.randn(5, 3, generator=g, dtype=torch.float64)
    normal = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
    return [
        (Categorical(logits), Categorical(other), torch.distributions.Categorical(logits=logits), [logits]),
        (Gaussian(mean, log_std), Gaussian(other, other / 2), normal, [mean, log_std]),
    ]


@pytest.mark.parametrize("kind", [0, 1])
def test_distributions_equal_torch_s(kind: int) -> None:
    ours, other, theirs, leaves = distributions()[kind]
    action = theirs.sample()
    pairs = [(ours.logp(action), theirs.log_prob(action)), (ours.entropy(), theirs.entropy())]
    theirs_other = {
        0: lambda d: torch.distributions.Categorical(logits=d.logits),
        1: lambda d: torch.distributions.Independent(torch.distributions.Normal(d.mean, d.log_std.exp()), 1),
    }[kind](other)
    pairs.append((ours.kl(other), torch.distributions.kl_divergence(theirs, theirs_other)))
    for mine, reference in pairs:
        assert mine.shape == (5,)
        assert torch.allclose(mine, reference, atol=1e-12)
        for a, b in zip(
            torch.autograd.grad(mine.sum(), leaves, retain_graph=True, allow_unused=True),
            torch.autograd.grad(reference.sum(), leaves, retain_graph=True, allow_unused=True),
            strict=True,
        ):
            assert torch.allclose(torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b, atol=1e-12)
    draws = torch.stack([ours.sample(torch.Generator().manual_seed(i)).double() for i in range(4000)]).detach()
    many = torch.stack([theirs.sample() for _ in range(4000)]).double()
    assert (draws.mean(0) - many.mean(0)).abs().max() < 6 * float(many.std(0).max()) * math.sqrt(2 / 4000)


def problem(spaces: Spaces, algorithm: pg.Algorithm, seed: int = 0) -> ControlProblem:
    """A made-up rollout of two rows of 4 and 2 steps, in float64; the policy has moved away from π_old where ratios matter."""
    learner = ControlLearner(spaces, algorithm, Settings(lr=1e-3, hidden=(4,)), seed)
    policy = learner.policy.network.double()
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=g, dtype=p.dtype))
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    states = torch.randn(6, spaces.features, generator=g, dtype=torch.float64)
    action = policy(states).sample(g)
    shift = 0.4 * torch.randn(6, generator=g, dtype=torch.float64)
    logp = policy(states).logp(action).detach() + shift
    full = torch.zeros(2, 4, dtype=torch.float64)
    batch = pg.Batch(mask=mask, group=torch.arange(2), reward=torch.zeros(2), logp_old=full.masked_scatter(mask, logp))
    psi = full.masked_scatter(mask, torch.randn(6, generator=g, dtype=torch.float64))
    old = policy(states).at(torch.arange(6))
    return ControlProblem(learner.policy, learner.critic, 1_000_003 * seed, batch, psi, states, action, old, algorithm)


def parameters(p: ControlProblem) -> Tensor:
    return torch.cat([x.detach().flatten() for x in p.policy.network.parameters()])


def outputs(p: ControlProblem, theta: Tensor) -> Tensor:
    """[n, K] logits, or means and log standard deviations, as a function of θ."""
    shares = theta.split([x.numel() for x in p.policy.network.parameters()])
    named = {n: s.view_as(x) for (n, x), s in zip(p.policy.network.named_parameters(), shares, strict=True)}
    result = functional_call(p.policy.network, named, (p.states,))
    return result.logits if isinstance(result, Categorical) else torch.cat([result.mean, result.log_std], 1)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_fisher_products_are_those_of_the_explicit_matrix(spaces: Spaces) -> None:
    p = problem(spaces, find_preset("trpo").algorithm)
    theta = parameters(p)
    jacobian = torch.autograd.functional.jacobian(lambda x: outputs(p, x), theta)  # [n, K, P]
    result = p.policy.network(p.states)
    if isinstance(result, Categorical):
        probability = result.logits.softmax(-1)
        middle = torch.diag_embed(probability) - probability[:, :, None] * probability[:, None, :]
    else:  # of a Gaussian: 1/σ² for a mean, 2 for a log σ
        middle = torch.diag_embed(torch.cat([(-2 * result.log_std).exp(), torch.full_like(result.mean, 2)], 1))
    explicit = torch.einsum("nkp,nkl,nlq->pq", jacobian, middle, jacobian) / 6
    logp = torch.autograd.functional.jacobian(lambda x: scored(p, x), theta)  # [n, P]
    sampled = logp.T @ logp / 6
    for v in torch.eye(len(theta), dtype=torch.float64)[::3]:
        assert torch.allclose(p.fisher(v, False), explicit @ v, atol=1e-10)
        assert torch.allclose(p.fisher(v, True), sampled @ v, atol=1e-10)
    assert explicit.abs().max() > 1e-2


def scored(p: ControlProblem, theta: Tensor) -> Tensor:
    out = outputs(p, theta)
    k = p.policy.network.body[-1].out_features  # type: ignore[union-attr]
    result = Categorical(out) if p.policy.network.log_std is None else Gaussian(out[:, :k], out[:, k:])
    return result.logp(p.action)


@pytest.mark.parametrize("spaces", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_the_gradient_is_that_of_the_literal_clipped_loss(spaces: Spaces) -> None:
    ppo = find_preset("ppo").algorithm
    assert ppo.critic is not None
    p = problem(spaces, replace(ppo, advantage=(pg.GAE(),), critic=replace(ppo.critic, gamma=1.0)))
    parts = p.split(0, 3)
    assert [len(part.states) for part in parts] == [2, 2, 2]
    assert sum(part.batch.mask.int() for part in parts).equal(p.batch.mask.int())  # type: ignore[union-attr]
    assert not all(part.states.equal(p.states[2 * i : 2 * i + 2]) for i, part in enumerate(parts))
    for part in [p, *parts]:
        part.accumulate()
        result = torch.cat([x.grad.flatten() for x in part.policy.network.parameters() if x.grad is not None])
        part.policy.adam.zero_grad(set_to_none=True)
        theta = parameters(part).requires_grad_()
        ratio = (scored(part, theta) - part.batch.logp_old[part.batch.mask]).exp()  # type: ignore[index]
        psi = part.psi[part.batch.mask]
        loss = -torch.minimum(ratio * psi, ratio.clamp(0.8, 1.2) * psi).mean()
        (expected,) = torch.autograd.grad(loss, theta)
        assert torch.allclose(result, expected, atol=1e-7)  # coefficients are in the reward's float32
        assert expected.abs().max() > 1e-3


def test_a_trust_region_evaluates_its_steps() -> None:
    p = problem(CONTINUOUS, find_preset("trpo").algorithm)
    before = parameters(p)
    delta = 0.1 * torch.randn(len(before), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    value, kl = p.evaluate(delta)
    assert parameters(p).equal(before)
    assert kl > 0
    p.commit(delta)
    now = p.policy.network(p.states)
    assert p.old.kl(now).mean().item() == pytest.approx(kl, rel=1e-12)
    ratio = (now.logp(p.action) - p.batch.logp_old[p.batch.mask]).exp()  # type: ignore[index]
    assert (ratio * p.psi[p.batch.mask]).mean().item() == pytest.approx(value, rel=1e-6)
    assert len(p.subsample(0.5).states) == 3
    assert p.subsample(0.5).states.equal(p.subsample(0.5).states)


def test_normalising_is_by_all_that_was_seen() -> None:
    x = 3 + 2 * torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    state = Normaliser.create(3)
    assert state(x).equal(x)
    for chunk in x.split([1, 20, 29]):
        state = state.observe(chunk)
    assert state.count == 50
    assert torch.allclose(state(x), (x - x.mean(0)) / x.std(0, correction=0), atol=1e-5)


def test_policies_start_near_uniform() -> None:
    policy = ControlPolicy(DISCRETE, (64, 64), torch.Generator().manual_seed(0))
    entropy = policy(torch.randn(10, 1, generator=torch.Generator().manual_seed(0))).entropy()
    assert (entropy > math.log(2) - 1e-3).all()


def test_a_distribution_does_not_move_with_the_weights() -> None:
    policy = ControlPolicy(CONTINUOUS, (4,), torch.Generator().manual_seed(0))
    with torch.no_grad():
        old = policy(torch.zeros(2, 3))
        assert policy.log_std is not None
        policy.log_std.add_(1.0)
        new = policy(torch.zeros(2, 3))
    assert old.log_std.tolist() == [[0, 0], [0, 0]]
    assert (old.kl(new) > 0.5).all()
