"""The worlds' exact quantities: by hand, by two routes, and by what sampling says."""

from __future__ import annotations

import itertools

import pytest
import torch

from policygrad.lab import mdp
from policygrad.lab.mdp import TabularMDP, as_mdp, bandit, chain, gridworld, random_mdp, softmax, solve
from policygrad.lab.policies import Bigram, Experts, TabularPolicy, Transformer
from policygrad.lab.sequences import (
    PrefixTree,
    World,
    derivative,
    perturb_policy,
    sample_right_answers,
)

PROBLEMS = {
    "random": random_mdp(),
    "chain": chain(),
    "grid": gridworld(),
    "finite": random_mdp(3, 2).with_horizon(4),
    "bandit": bandit(torch.tensor([1.0, 0.0, 2.0])),
}


def logits(problem: TabularMDP, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(problem.reward.shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_theorem_is_the_derivative_of_the_linear_solve(name: str) -> None:
    problem = PROBLEMS[name]
    theta = logits(problem)
    result = mdp.objective_gradient(problem, theta)
    torch.testing.assert_close(mdp.policy_gradient_theorem(problem, theta), result, rtol=0, atol=1e-12)
    assert result.abs().max() > 1e-4


@pytest.mark.parametrize("name", PROBLEMS)
def test_bellman_and_occupancy(name: str) -> None:
    problem = PROBLEMS[name]
    policy = softmax(logits(problem))
    exact = solve(problem, policy)
    torch.testing.assert_close((policy * exact.q).sum(1), exact.value, rtol=0, atol=1e-10)
    assert (policy * exact.advantage).sum(1).abs().max() < 1e-10
    assert float((exact.occupancy[:, None] * policy * problem.reward).sum()) == pytest.approx(float(exact.objective))


def test_a_bandit_by_hand() -> None:
    problem = bandit(torch.tensor([1.0, 0.0, 2.0]))
    exact = solve(problem, torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64))
    assert float(exact.objective) == pytest.approx(0.9)
    torch.testing.assert_close(exact.advantage, torch.tensor([[0.1, -0.9, 1.1]], dtype=torch.float64))
    gradient = mdp.objective_gradient(problem, torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log())
    torch.testing.assert_close(gradient, torch.tensor([[0.05, -0.27, 0.22]], dtype=torch.float64))  # π·A


def test_a_finite_horizon_by_rolling_forward() -> None:
    problem, policy = random_mdp(3, 2), softmax(logits(random_mdp(3, 2)))
    moves = torch.einsum("sa,sat->st", policy, problem.transition)
    state, total = problem.start, 0.0
    for t in range(5):
        total += 0.8**t * float(state @ (policy * problem.reward).sum(1))
        state = state @ moves
    assert float(solve(problem.with_horizon(5, 0.8), policy.repeat(5, 1)).objective) == pytest.approx(total)


def test_the_fisher_matrix_is_the_hessian_of_the_mean_kl() -> None:
    problem = random_mdp(3, 2)
    theta = logits(problem)
    occupancy = solve(problem, softmax(theta)).occupancy

    def kl(other: torch.Tensor) -> torch.Tensor:
        return (occupancy * mdp.state_kl(softmax(theta), softmax(other))).sum() / occupancy.sum()

    hessian = torch.autograd.functional.hessian(kl, theta).reshape(6, 6)
    torch.testing.assert_close(mdp.fisher_matrix(problem, theta), hessian, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TabularMDP(*_parts(), gamma=1.0), "infinite horizon.*finite"),
        (lambda: TabularMDP(*_parts(), gamma=1.5), "gamma must be in"),
        (lambda: TabularMDP(_parts()[0] * 2, *_parts()[1:]), "must hold probabilities.*sums to 2"),
        (lambda: TabularMDP(_parts()[0][:1], *_parts()[1:]), r"expected \[2, 2, 2\]"),
        (lambda: random_mdp().with_horizon(0), "at least 1 step"),
        (lambda: PrefixTree(6, 6), "19531 completions.*6000"),
        (lambda: PrefixTree(1, 3), "vocabulary of at least 2"),
        (
            lambda: as_mdp(World(PrefixTree(5, 6), torch.zeros(2, 5461).double(), TabularPolicy(PrefixTree(5, 6), 2))),
            "2730 prefixes.*37264500",
        ),
        (lambda: World(PrefixTree(3, 2), torch.zeros(1, 3).double(), TabularPolicy(PrefixTree(3, 2))), "N = 7"),
        (lambda: _subsets(1.0), r"in \(0, 1\), not 1"),
        (lambda: mdp.penalty_constant(bandit(torch.ones(2)), torch.full((1, 2), 0.5).double()), "gamma below 1"),
    ],
)
def test_invalid_worlds_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def _parts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    half = torch.full((2, 2, 2), 0.5, dtype=torch.float64)
    return half, half[0], half[0, 0]


def _subsets(p: float) -> torch.Tensor:
    tree = PrefixTree(3, 2)
    policy = TabularPolicy(tree)
    return sample_right_answers(tree, policy, policy.initial(0), (p,))


def test_gamma_1_is_allowed_where_every_policy_ends() -> None:
    assert chain(gamma=1.0).always_ends
    assert not random_mdp().always_ends


@pytest.mark.parametrize(("vocabulary", "length"), [(2, 1), (3, 3), (5, 2), (2, 6), (4, 4)])
def test_the_tree_contains_every_completion_once(vocabulary: int, length: int) -> None:
    tree = PrefixTree(vocabulary, length)
    brute = {
        tuple(itertools.takewhile(bool, word)) for word in itertools.product(range(vocabulary), repeat=length)
    }  # cut at the first EOS
    assert len(tree.completions) == len(set(tree.completions)) == sum((vocabulary - 1) ** n for n in range(length + 1))
    assert set(tree.completions) == brute
    for word, tokens, states, n in zip(tree.completions, tree.tokens, tree.state, tree.lengths, strict=True):
        for t in range(int(n)):
            assert tree.prefixes[int(states[t])] == word[:t]
            assert int(tokens[t]) == (word[t] if t < len(word) else 0)


@pytest.mark.parametrize("kind", [TabularPolicy, Bigram, Transformer, Experts])
def test_policies_are_distributions_with_exact_gradients(kind) -> None:
    tree = PrefixTree(3, 3)
    policy = kind(tree, 2)
    theta = policy.initial(3)
    world = World(tree, sample_right_answers(tree, policy, theta, (0.3, 0.6)), policy)
    probability = world.logp(theta).exp()
    torch.testing.assert_close(probability.sum(1), torch.ones(2).double(), rtol=0, atol=1e-12)
    by_scores = (probability * world.reward).flatten() @ world.scores(theta) / 2
    torch.testing.assert_close(by_scores, world.gradient(theta), rtol=0, atol=1e-12)
    step = 1e-6 * torch.randn(len(theta), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rise = float(world.objective(theta + step) - world.objective(theta - step)) / 2
    assert rise == pytest.approx(float(world.gradient(theta) @ step), rel=1e-4)


def test_values_are_expected_rewards_and_distances_are_kept() -> None:
    tree = PrefixTree(3, 3)
    policy = TabularPolicy(tree)
    theta = policy.initial(0)
    world = World(tree, torch.tensor([[float(sum(word) == 3) for word in tree.completions]]).double(), policy)
    to_go = world.reward.flatten()[:, None].expand(world.mask.shape)
    value = world.values(theta, to_go)
    assert float(value[0]) == pytest.approx(float(world.objective(theta)))
    after = world.conditionals(theta).exp()[0]  # the first token: V(()) = Σ_a π(a) V(a)
    assert float(value[0]) == pytest.approx(float(after[1] * value[1] + after[2] * value[2]))
    assert float(world.kl(theta, perturb_policy(world, theta, 0.07))) == pytest.approx(0.07, rel=1e-6)
    torch.testing.assert_close(perturb_policy(world, theta, 0.0), theta)
    with pytest.raises(ValueError, match="at least 0 nats"):
        perturb_policy(world, theta, -1.0)
    with pytest.raises(ValueError, match="no step"):
        perturb_policy(world, theta, 0.1, direction=torch.ones_like(theta))
    with pytest.raises(ValueError, match="the policy jumps over a KL"):
        perturb_policy(
            _mixture(), _mixture().policy.initial(0), 0.02, seed=10
        )  # a flip of the routing takes 0.084 nats at once


def _mixture() -> World:
    tree = PrefixTree(3, 5)
    return World(tree, torch.zeros(1, tree.size).double(), Experts(tree))


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_a_sequence_world_as_a_decision_process(gamma: float) -> None:
    """V, Q, A and the occupancy of language by linear algebra, against enumeration."""
    tree = PrefixTree(3, 3)
    policy = Bigram(tree, 2)
    theta = policy.initial(5)
    world = World(tree, sample_right_answers(tree, policy, theta, (0.3, 0.6)), policy)
    problem = as_mdp(world, gamma)

    def objective(x: torch.Tensor) -> torch.Tensor:
        return solve(problem, world.conditionals(x).exp()).objective

    steps = tree.lengths.double().repeat(2)
    reward = world.reward * gamma ** (steps - 1).reshape(2, -1)
    torch.testing.assert_close(objective(theta), world.objective(theta, reward), rtol=0, atol=1e-12)
    torch.testing.assert_close(derivative(objective, theta), world.gradient(theta, reward), rtol=0, atol=1e-12)
    exact, probability = solve(problem, world.conditionals(theta).exp()), world.logp(theta).exp().flatten()
    left = steps[:, None] - 1 - torch.arange(tree.length)
    to_go = world.reward.flatten()[:, None] * gamma**left
    torch.testing.assert_close(exact.value, world.values(theta, to_go), rtol=0, atol=1e-12)
    through = torch.zeros(len(exact.value)).double()
    weight = torch.where(world.mask, probability[:, None] / 2 * gamma ** torch.arange(tree.length).double(), 0)
    through.index_add_(0, world.state.flatten(), weight.flatten())
    torch.testing.assert_close(exact.occupancy, through, rtol=0, atol=1e-12)
    first, token = 0, 1  # Q of a token is γ times the value of the prefix that it makes
    there = tree.prefixes.index((token,))
    assert float(exact.q[first, token]) == pytest.approx(gamma * float(exact.value[there]))
    assert float(exact.q[first, 0]) == float(world.reward[0, 0])  # EOS at once
    assert (world.conditionals(theta).exp() * exact.advantage).sum(1).abs().max() < 1e-12
    if gamma == 1:
        assert float(exact.occupancy.sum()) == pytest.approx(float(world.mean_length(theta)))
