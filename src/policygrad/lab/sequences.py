"""Small language: every completion of a prompt enumerated, and a real softmax policy over prefixes. Float64 throughout.

The vocabulary is {EOS, 1, …, V − 1}. A completion ends with EOS or has the length L (it is then cut off, `truncated`). A
state is a prefix: the tokens so far. X prompts, N completions each, S states, P parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from policygrad.errors import ConfigError

# Derivatives by autograd, of functions of one tensor θ.


def derivative(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """∇f(θ), shaped like θ; f is a scalar."""
    theta = theta.detach().requires_grad_()
    return torch.autograd.grad(f(theta), theta)[0]


def jacobian(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """∂f/∂θ, shaped [*f, *θ]."""
    found: Tensor = torch.autograd.functional.jacobian(f, theta.detach(), vectorize=True)  # type: ignore[no-untyped-call]
    return found


EOS = 0
MAX_COMPLETIONS = 6000
"""Completions of one prompt that are still enumerated: vocabulary 5 and length 6 have 5461."""
Verifier = Callable[[tuple[int, ...]], float]
"""The reward of a completion's tokens, EOS left out."""


def count_completions(vocabulary: int, length: int) -> int:
    """N, how many completions there are."""
    words = vocabulary - 1
    return sum(int(words**n) for n in range(length)) + int(words**length)


@dataclass(frozen=True)
class PrefixTree:
    """Every completion and every prefix of it.

    Raises:
        ConfigError: fewer than 2 tokens, no length, or more completions than can be enumerated.
    """

    vocabulary: int = 3
    length: int = 3

    def __post_init__(self) -> None:
        if self.vocabulary < 2 or self.length < 1:
            raise ConfigError(
                f"a world needs a vocabulary of at least 2 (EOS is one) and a length of at least 1, not {self.vocabulary} "
                f"and {self.length}"
            )
        if (size := count_completions(self.vocabulary, self.length)) > MAX_COMPLETIONS:
            raise ConfigError(
                f"a vocabulary of {self.vocabulary} and a length of {self.length} make {size} completions, and at most "
                f"{MAX_COMPLETIONS} are enumerated: take a smaller one (5 and 6 make 5461)"
            )

    @cached_property
    def words(self) -> list[tuple[int, ...]]:
        """Each completion's tokens without EOS, short ones first."""
        alphabet = range(1, self.vocabulary)
        return [word for n in range(self.length + 1) for word in itertools.product(alphabet, repeat=n)]

    @cached_property
    def tokens(self) -> Tensor:
        """[N, L] int64; EOS fills up."""
        return torch.tensor([[*word, *[EOS] * (self.length - len(word))] for word in self.words])

    @cached_property
    def lengths(self) -> Tensor:
        """[N] int64; sampled tokens, EOS among them."""
        return torch.tensor([min(len(word) + 1, self.length) for word in self.words])

    @cached_property
    def mask(self) -> Tensor:
        """[N, L] bool."""
        return torch.arange(self.length) < self.lengths[:, None]

    @cached_property
    def truncated(self) -> Tensor:
        """[N] bool; the length was reached without EOS."""
        return torch.tensor([len(word) == self.length for word in self.words])

    @cached_property
    def prefixes(self) -> list[tuple[int, ...]]:
        """The states: what may stand before a sampled token."""
        return [word for word in self.words if len(word) < self.length]

    @cached_property
    def state(self) -> Tensor:
        """[N, L] int64; the state before each token, 0 off the mask."""
        index = {prefix: i for i, prefix in enumerate(self.prefixes)}
        return torch.tensor(
            [[index.get(word[:t], 0) * (t <= len(word)) for t in range(self.length)] for word in self.words]
        )

    @property
    def size(self) -> int:
        return len(self.words)


class Policy(Protocol):
    """A softmax policy over prefixes."""

    def initial(self, seed: int) -> Tensor:
        """θ [P]."""
        ...

    def logits(self, theta: Tensor) -> Tensor:
        """[X, S, V]."""
        ...


@dataclass(frozen=True, eq=False)
class World:
    """X prompts with a reward for every completion, and the policy that answers them; prompts are drawn uniformly.

    Raises:
        ConfigError: a reward table that does not fit the tree.
    """

    tree: PrefixTree
    reward: Tensor
    """[X, N]."""
    policy: Policy
    _scores: dict[tuple[float, ...], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.reward.ndim != 2 or self.reward.shape[1] != self.tree.size or self.reward.dtype != torch.float64:
            raise ConfigError(
                f"World.reward must be float64 [X, N] with N = {self.tree.size} completions, not {self.reward.dtype} "
                f"{list(self.reward.shape)}"
            )

    @property
    def prompts(self) -> int:
        return self.reward.shape[0]

    @property
    def rows(self) -> int:
        """X·N, every completion of every prompt; row x·N + n."""
        return self.prompts * self.tree.size

    @cached_property
    def mask(self) -> Tensor:
        """[X·N, L]."""
        return self.tree.mask.repeat(self.prompts, 1)

    @cached_property
    def state(self) -> Tensor:
        """[X·N, L] index into all X·S states."""
        offset = torch.arange(self.prompts) * len(self.tree.prefixes)
        return (self.tree.state[None] + offset[:, None, None]).flatten(0, 1)

    @cached_property
    def cell(self) -> Tensor:
        """[X·N, L] index into all X·S·V (state, token) pairs."""
        return self.state * self.tree.vocabulary + self.tree.tokens.repeat(self.prompts, 1)

    def conditionals(self, theta: Tensor) -> Tensor:
        """[X·S, V] log π(·|s)."""
        return self.policy.logits(theta).log_softmax(-1).flatten(0, 1)

    def token_logp(self, theta: Tensor) -> Tensor:
        """[X·N, L] nats; 0 off the mask."""
        return torch.where(self.mask, self.conditionals(theta).flatten()[self.cell], 0)

    def logp(self, theta: Tensor) -> Tensor:
        """[X, N] log π(o|x)."""
        return self.token_logp(theta).sum(1).reshape(self.prompts, -1)

    def objective(self, theta: Tensor, reward: Tensor | None = None) -> Tensor:
        """[] J = mean over prompts of Σ_o π(o|x) R(x, o)."""
        return self.success(theta, reward).mean()

    def success(self, theta: Tensor, reward: Tensor | None = None) -> Tensor:
        """[X] expected reward per prompt; p, where rewards are 0 and 1."""
        return (self.logp(theta).exp() * (self.reward if reward is None else reward)).sum(1)

    def gradient(self, theta: Tensor, reward: Tensor | None = None) -> Tensor:
        """[P] ∇J."""
        return derivative(lambda x: self.objective(x, reward), theta)

    def cell_scores(self, theta: Tensor) -> Tensor:
        """[X·S·V, P] ∇log π(a|s); kept for the last few θ, as many estimators are measured at one."""
        key = tuple(theta.tolist())
        if key not in self._scores:
            if len(self._scores) >= 4:
                self._scores.pop(next(iter(self._scores)))
            self._scores[key] = jacobian(lambda x: self.conditionals(x).flatten(), theta)
        return self._scores[key]

    def scores(self, theta: Tensor) -> Tensor:
        """[X·N, P] ∇log π(o|x), a completion's score."""
        per_token = self.cell_scores(theta)[self.cell]
        return torch.where(self.mask[..., None], per_token, 0).sum(1)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """[] KL(π_p‖π_q) of whole completions in nats, mean over prompts, with graph."""
        log_p, log_q = self.logp(p), self.logp(q)
        return (log_p.exp() * (log_p - log_q)).sum(1).mean()

    def greedy(self, theta: Tensor) -> Tensor:
        """[X, N] bool; the completion that takes the most probable token in every state, one for each prompt."""
        best = self.conditionals(theta).argmax(-1)[self.state] == self.tree.tokens.repeat(self.prompts, 1)
        return (best | ~self.mask).all(1).reshape(self.prompts, -1)

    def mean_length(self, theta: Tensor, where: Tensor | None = None) -> Tensor:
        """[] E|o| in tokens, over the completions `where` [X, N], with graph."""
        weight = self.logp(theta).exp() * (1 if where is None else where)
        return (weight * self.tree.lengths).sum() / weight.sum()

    def values(self, theta: Tensor, to_go: Tensor) -> Tensor:
        """[X·S] V(s) = E[G | s]: the mean, over the completions that pass through s, of the reward to go `reverse_cumsum` [X·N, L]."""
        weight = torch.where(self.mask, self.logp(theta).exp().flatten()[:, None], 0)
        total, mass = (torch.zeros(self.prompts * len(self.tree.prefixes)).double() for _ in range(2))
        total.index_add_(0, self.state.flatten(), torch.where(self.mask, weight * to_go, 0).flatten())
        mass.index_add_(0, self.state.flatten(), weight.flatten())
        return total / mass


def perturb_policy(world: World, theta: Tensor, kl: float, seed: int = 0, direction: Tensor | None = None) -> Tensor:
    """θ + a·direction with a > 0 such that KL(π_θ‖π_moved) = `kl` nats a completion; the direction is random unless given.

    Raises:
        ConfigError: a distance below 0, or one that the direction does not reach, or jumps over.
    """
    if kl < 0:
        raise ConfigError(f"a KL of {kl} nats is below 0: the distance is at least 0")
    if direction is None:
        direction = torch.randn(len(theta), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if kl == 0:
        return theta
    low, high = 0.0, 1.0 / float(direction.norm())
    for _ in range(24):  # further away a logit's rounding would pass for a distance
        if float(world.kl(theta, theta + high * direction)) >= kl:
            break
        low, high = high, 2 * high
    else:
        raise ConfigError(f"no step along this direction moves the policy by a KL of {kl:g} nats")
    for _ in range(40):
        middle = (low + high) / 2
        found = float(world.kl(theta, theta + middle * direction))
        if abs(found / kl - 1) < 1e-9:
            return theta + middle * direction
        low, high = (middle, high) if found < kl else (low, middle)
    if abs(found / kl - 1) > 1e-3:
        raise ConfigError(
            f"the policy jumps along this direction, over a KL of {kl:g} nats: fix what switches (routing) first"
        )
    return theta + high * direction


# Rewards of the lab's worlds: a number for every completion, as a verifier would give it.


def reward_table(tree: PrefixTree, verifier: Verifier, prompts: int = 1) -> Tensor:
    """[X, N] float64, the same for every prompt."""
    row = [verifier(word) for word in tree.words]
    return torch.tensor([row] * prompts, dtype=torch.float64)


def reward_sum(target: int) -> Verifier:
    """1 where the tokens add up to `target`."""
    return lambda word: float(sum(word) == target)


def reward_min_length(tokens: int) -> Verifier:
    """1 where there are at least so many tokens before EOS."""
    return lambda word: float(len(word) >= tokens)


def sample_right_answers(
    tree: PrefixTree, policy: Policy, theta: Tensor, difficulty: Sequence[float], seed: int = 0
) -> Tensor:
    """[X, N] 0 or 1: for each prompt the set of right completions, drawn in random order, whose probability under θ comes as
    near to p as it can.

    Raises:
        ConfigError: a p outside (0, 1).
    """
    generator = torch.Generator().manual_seed(seed)
    blank = World(tree, torch.zeros(len(difficulty), tree.size).double(), policy)
    probability = blank.logp(theta.detach()).exp()
    rows = []
    for p, chance in zip(difficulty, probability, strict=True):
        if not 0 < p < 1:
            raise ConfigError(f"a prompt's difficulty is its probability of a right answer, in (0, 1), not {p}")
        right, mass = torch.zeros(tree.size).double(), 0.0
        for n in torch.randperm(tree.size, generator=generator).tolist():
            if abs(mass + float(chance[n]) - p) < abs(mass - p):
                right[n], mass = 1.0, mass + float(chance[n])
        rows.append(right)
    return torch.stack(rows)
