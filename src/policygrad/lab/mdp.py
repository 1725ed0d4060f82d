"""Tabular Markov decision processes: J, V, Q, A, the discounted occupancy, ∇J and the Fisher matrix, by linear algebra."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from policygrad.core.metrics import Metrics
from policygrad.errors import ConfigError
from policygrad.lab.sequences import World, derivative, jacobian


@dataclass(frozen=True, eq=False)
class TabularMDP:
    """S states, A actions. The transitions from (s, a) sum to 1 minus the probability that the episode ends there.

    γ = 1 requires that episodes end under every policy; `with_horizon` makes them end.

    Raises:
        ConfigError: Shapes that do not match, invalid probabilities, or γ = 1 with possibly endless episodes.
    """

    transition: Tensor  # [S, A, S] P(s'|s, a)
    reward: Tensor  # [S, A] expected reward
    start: Tensor  # [S] probabilities of the first state
    gamma: float = 0.9

    def __post_init__(self) -> None:
        states, actions = self.reward.shape
        for name, shape in (("transition", (states, actions, states)), ("start", (states,))):
            value = getattr(self, name)
            if value.shape != shape:
                raise ConfigError(
                    f"TabularMDP.{name} has shape {list(value.shape)}, expected {list(shape)}: reward is [S, A] = "
                    f"{[states, actions]}"
                )
            low, high = float(value.min()), float(value.sum(-1).max())
            if low < 0 or high > 1 + 1e-9:
                raise ConfigError(
                    f"TabularMDP.{name} must hold probabilities: the smallest is {low:g}, a row sums to {high:g}"
                )
        if abs(float(self.start.sum()) - 1) > 1e-9:
            raise ConfigError(f"TabularMDP.start must sum to 1, not {float(self.start.sum()):g}")
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"TabularMDP.gamma must be in [0, 1], not {self.gamma}")
        if self.gamma == 1 and not self.always_ends:
            raise ConfigError(
                "TabularMDP with gamma = 1 and an infinite horizon: an episode may never end, so J is undefined. Use "
                "gamma below 1, or a finite horizon: mdp.with_horizon(steps)"
            )

    @property
    def states(self) -> int:
        return self.reward.shape[0]

    @property
    def actions(self) -> int:
        return self.reward.shape[1]

    @property
    def always_ends(self) -> bool:
        """True when from every state and under every policy the episode ends with probability 1."""
        ends = 1 - self.transition.sum(-1)
        reached = torch.zeros_like(self.start)
        for _ in range(self.states):  # the least probability, over policies, to have ended within k steps
            reached = (ends + self.transition @ reached).amin(1)
        return bool((reached > 1e-12).all())

    def with_horizon(self, steps: int, gamma: float = 1.0) -> TabularMDP:
        """Return the problem cut off after `steps` steps; a state is (time, state), numbered time·S + state."""
        if steps < 1:
            raise ConfigError(f"TabularMDP.with_horizon needs at least 1 step, not {steps}")
        s, a = self.states, self.actions
        moves = self.transition.new_zeros(steps, s, a, steps, s)
        for t in range(steps - 1):
            moves[t, :, :, t + 1] = self.transition
        start = torch.cat([self.start, self.start.new_zeros((steps - 1) * s)])
        return TabularMDP(moves.reshape(steps * s, a, steps * s), self.reward.repeat(steps, 1), start, gamma)


def random_mdp(states: int = 5, actions: int = 3, gamma: float = 0.9, seed: int = 0) -> TabularMDP:
    """Return an MDP with transitions uniform on the simplex, standard normal rewards and a uniform start."""
    generator = torch.Generator().manual_seed(seed)
    weights = -torch.rand(states, actions, states, generator=generator, dtype=torch.float64).log()
    reward = torch.randn(states, actions, generator=generator, dtype=torch.float64)
    start = torch.full((states,), 1 / states, dtype=torch.float64)
    return TabularMDP(weights / weights.sum(-1, keepdim=True), reward, start, gamma)


def chain(length: int = 6, gamma: float = 0.95, slip: float = 0.1) -> TabularMDP:
    """Return states in a row; moves left and right may slip. Right at the far end pays 1 and ends, left at the near end 0.05."""

    def outcomes(state: int, action: int) -> Iterator[Outcome]:
        for way, p in ((action, 1 - slip), (1 - action, slip)):
            target = state + (1 if way else -1)
            yield (p, None, 1.0) if target == length else (p, max(target, 0), 0.05 * (target < 0))

    return _tabulate(length, 2, outcomes, gamma)


def gridworld(height: int = 3, width: int = 4, gamma: float = 0.95, slip: float = 0.1) -> TabularMDP:
    """Return a grid: from the upper left to the lower right corner, which pays 1 and ends; a step costs 0.02, walls block.

    Actions are up, down, left, right; with probability `slip` the move is one of the four at random.
    """

    def outcomes(cell: int, action: int) -> Iterator[Outcome]:
        row, column = divmod(cell, width)
        for way, (dy, dx) in enumerate(((-1, 0), (1, 0), (0, -1), (0, 1))):
            target = min(max(row + dy, 0), height - 1) * width + min(max(column + dx, 0), width - 1)
            p = slip / 4 + (1 - slip) * (way == action)
            yield (p, None, 0.98) if target == height * width - 1 else (p, target, -0.02)

    return _tabulate(height * width, 4, outcomes, gamma)


Outcome = tuple[float, int | None, float]  # (probability, next state, reward) of an action; None = the episode ends


def _tabulate(states: int, actions: int, outcomes: Callable[[int, int], Iterable[Outcome]], gamma: float) -> TabularMDP:
    """Return the problem that starts in state 0 and has these outcomes of (state, action)."""
    moves, reward = (torch.zeros(states, actions, n, dtype=torch.float64) for n in (states, 1))
    for state, action in product(range(states), range(actions)):
        for p, target, payment in outcomes(state, action):
            reward[state, action] += p * payment
            if target is not None:
                moves[state, action, target] += p
    return TabularMDP(moves, reward.squeeze(-1), torch.eye(states, dtype=torch.float64)[0], gamma)


def bandit(rewards: Tensor) -> TabularMDP:
    """Return a problem with one state and one step; rewards [A]."""
    rewards = rewards.double()
    return TabularMDP(torch.zeros(1, len(rewards), 1).double(), rewards[None], torch.ones(1).double(), gamma=1.0)


@dataclass(frozen=True, eq=False)
class Solution:
    """Exact quantities of a policy π [S, A] in an MDP."""

    value: Tensor  # [S] V = (I − γP_π)⁻¹ r_π
    q: Tensor  # [S, A]
    occupancy: Tensor  # [S] d = Σ_t γ^t P(s_t = s), unnormalised: it sums to 1/(1−γ) if no episode ends
    objective: Tensor  # [] J = μ₀ᵀV

    @property
    def advantage(self) -> Tensor:
        """[S, A] Q − V."""
        return self.q - self.value[:, None]


def solve(mdp: TabularMDP, policy: Tensor) -> Solution:
    """Compute the policy's values and occupancy, with the graph of `policy` [S, A]."""
    if policy.shape != mdp.reward.shape:
        raise ConfigError(f"a policy of this MDP is [S, A] = {list(mdp.reward.shape)}, not {list(policy.shape)}")
    moves = torch.einsum("sa,sat->st", policy, mdp.transition)
    system = torch.eye(mdp.states, dtype=policy.dtype) - mdp.gamma * moves
    value = torch.linalg.solve(system, (policy * mdp.reward).sum(1))
    occupancy = torch.linalg.solve(system.T, mdp.start)
    q = mdp.reward + mdp.gamma * mdp.transition @ value
    return Solution(value, q, occupancy, mdp.start @ value)


def softmax(theta: Tensor, features: Tensor | None = None) -> Tensor:
    """Return π [S, A] from logits: a table theta [S, A], or features [S, A, P] times theta [P]."""
    return (theta if features is None else features @ theta).softmax(-1)


def objective_gradient(mdp: TabularMDP, theta: Tensor, features: Tensor | None = None) -> Tensor:
    """Compute ∇J by autograd through the linear solve."""
    return derivative(lambda x: solve(mdp, softmax(x, features)).objective, theta)


def policy_gradient_theorem(mdp: TabularMDP, theta: Tensor, features: Tensor | None = None) -> Tensor:
    """Compute ∇J = Σ_s d(s) Σ_a ∇π(a|s) Q(s, a). Source: Sutton et al. 2000, theorem 1."""
    exact = solve(mdp, softmax(theta, features).detach())
    return derivative(lambda x: (exact.occupancy[:, None] * softmax(x, features) * exact.q).sum(), theta)


def fisher_matrix(mdp: TabularMDP, theta: Tensor, features: Tensor | None = None) -> Tensor:
    """[P, P] F = E[∇log π ∇log πᵀ] over states from the normalised occupancy: the Hessian of the mean KL."""
    policy = softmax(theta, features)
    scores = jacobian(lambda x: softmax(x, features).log(), theta)
    scores = scores.reshape(*policy.shape, -1)
    occupancy = solve(mdp, policy).occupancy
    weight = (occupancy / occupancy.sum())[:, None] * policy
    return torch.einsum("sa,sap,saq->pq", weight, scores, scores)


def natural_gradient(mdp: TabularMDP, theta: Tensor, features: Tensor | None = None) -> Tensor:
    """Compute F⁺∇J, shaped like theta; F is singular because a softmax ignores constants. Source: Kakade 2001, eq. 3."""
    solution = torch.linalg.pinv(fisher_matrix(mdp, theta, features), hermitian=True, rtol=1e-10)
    step: Tensor = solution @ objective_gradient(mdp, theta, features).flatten()
    return step.reshape(theta.shape)


def state_kl(old: Tensor, new: Tensor) -> Tensor:
    """[S] KL(old‖new) in nats."""
    return (old * (old.log() - new.log())).sum(-1)


def surrogate_value(mdp: TabularMDP, old: Tensor, new: Tensor) -> Tensor:
    """[] L_old(new) = J(old) + Σ_s d_old(s) Σ_a new(a|s) A_old(s, a). Source: Schulman et al. 2015, eq. 3."""
    exact = solve(mdp, old)
    return exact.objective + (exact.occupancy[:, None] * new * exact.advantage).sum()


def improvement_bound(mdp: TabularMDP, old: Tensor, new: Tensor) -> tuple[float, float]:
    """Return lower bounds of J(new) by KL and by total variation: L − C·max_s KL and L − C·max_s TV², C = 4εγ/(1−γ)².

    ε = max |A_old|. Source: Schulman et al. 2015, theorem 1 and eq. 9.
    """
    level = float(surrogate_value(mdp, old, new))
    constant = penalty_constant(mdp, old)
    kl, tv = float(state_kl(old, new).max()), float(((old - new).abs().sum(-1) / 2).max())  # TV = ½‖old − new‖₁
    return level - constant * kl, level - constant * tv**2


def penalty_constant(mdp: TabularMDP, old: Tensor) -> float:
    """C = 4εγ/(1−γ)²."""
    if mdp.gamma == 1:
        raise ConfigError("the bound's constant 4εγ/(1−γ)² is infinite at gamma = 1: use gamma below 1")
    epsilon = float(solve(mdp, old).advantage.abs().max())
    return 4 * epsilon * mdp.gamma / (1 - mdp.gamma) ** 2


MAX_TRANSITIONS = 20_000_000
"""Entries of the transition matrix [S, A, S]; a vocabulary of 5 and a length of 6 have 9.3 million."""


def as_mdp(world: World, gamma: float = 1.0) -> TabularMDP:
    """Convert a world of sequences to an MDP: states are all prompts' prefixes [X·S], actions are tokens.

    The last token of a completion pays R and ends the episode. The policy is `world.conditionals(theta).exp()` [X·S, V]: `solve`
    then gives J, V, Q, A and the occupancy, whose sum at γ = 1 is the expected length.

    Raises:
        ConfigError: Too many transitions.
    """
    tree, states, tokens = world.tree, world.prompts * len(world.tree.prefixes), world.tree.vocabulary
    if (size := states * tokens * states) > MAX_TRANSITIONS:
        raise ConfigError(
            f"{states} prefixes and {tokens} tokens make {size} transitions, and at most {MAX_TRANSITIONS} are supported: use "
            "a smaller world, or fewer prompts"
        )
    rows, last = torch.arange(len(world.mask)), tree.lengths.repeat(world.prompts) - 1
    reward = torch.zeros(states * tokens, dtype=torch.float64)
    reward[world.cell[rows, last]] = world.reward.flatten()
    moves = torch.zeros(states * tokens, states, dtype=torch.float64)
    follows = world.mask[:, 1:]
    moves[world.cell[:, :-1][follows], world.state[:, 1:][follows]] = 1.0
    start = torch.zeros(states, dtype=torch.float64)
    start[world.state[:, 0]] = 1 / world.prompts
    return TabularMDP(moves.reshape(states, tokens, states), reward.reshape(states, tokens), start, gamma)


@dataclass(eq=False)
class ExactProblem:
    """A problem for update rules with exact expectations: θ is a table of logits [S, A]; `history` records J after each step."""

    mdp: TabularMDP
    theta: Tensor
    lr: float = 1.0  # learning rate of gradient steps: θ ← θ + lr·∇J
    history: list[float] = field(default_factory=list)
    pending: Tensor = field(init=False)
    curvature: Tensor | None = field(default=None, init=False)  # [P, P] the Fisher matrix at θ, cached

    def __post_init__(self) -> None:
        self.pending = torch.zeros_like(self.theta)
        self.history = [self.objective]

    @property
    def objective(self) -> float:
        """J(π_θ)."""
        return float(solve(self.mdp, softmax(self.theta)).objective)

    def split(self, epoch: int, minibatches: int) -> list[ExactProblem]:
        """An expectation has no minibatches: each is the complete problem."""
        return [self] * minibatches

    def accumulate(self) -> Metrics:
        self.pending = self.pending + objective_gradient(self.mdp, self.theta)
        return {}

    def descend(self) -> Metrics:
        self.commit((self.lr * self.pending).flatten())
        self.pending = torch.zeros_like(self.theta)
        return {}

    def subsample(self, share: float) -> ExactProblem:
        """An expectation has no groups to choose from."""
        return self

    def gradient(self) -> tuple[Tensor, Metrics]:
        return objective_gradient(self.mdp, self.theta).flatten(), {}

    def fisher(self, v: Tensor, sampled: bool) -> Tensor:
        """Exact, whatever `sampled` is, since all states and actions are enumerated."""
        if self.curvature is None:
            self.curvature = fisher_matrix(self.mdp, self.theta)
        return self.curvature @ v

    def evaluate(self, delta: Tensor) -> tuple[float, float]:
        old, new = softmax(self.theta), softmax(self.theta + delta.reshape(self.theta.shape))
        occupancy = solve(self.mdp, old).occupancy
        kl = (occupancy * state_kl(old, new)).sum() / occupancy.sum()
        return float(surrogate_value(self.mdp, old, new)), float(kl)

    def commit(self, delta: Tensor) -> None:
        self.theta = self.theta + delta.reshape(self.theta.shape)
        self.curvature = None
        self.history.append(self.objective)

    def fit_critic(self) -> Metrics:
        """The values are exact, so there is no critic to fit."""
        return {}

    def measure(self) -> Metrics:
        return {}

    def adapt(self, metrics: Metrics) -> ExactProblem | None:
        """There is no adaptive β."""
        return None
