"""A small language in which all completions of a prompt are enumerated, with a softmax policy over prefixes, in float64.

The vocabulary is {EOS, 1, …, V − 1}. A completion ends with EOS or has length L (it is then `truncated`). A state is a prefix:
the tokens so far. X prompts, N completions each, S states, P parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from policygrad.errors import ConfigError


def derivative(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """Return ∇f(θ), shaped like θ, of a scalar function."""
    theta = theta.detach().requires_grad_()
    return torch.autograd.grad(f(theta), theta)[0]


def jacobian(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """Return ∂f/∂θ, shaped [*f, *θ]."""
    matrix: Tensor = torch.autograd.functional.jacobian(f, theta.detach(), vectorize=True)  # type: ignore[no-untyped-call]
    return matrix


def sample_normal(shape: int | Sequence[int], scale: float, seed: int) -> Tensor:
    """Sample a float64 tensor from N(0, scale²)."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EOS = 0
MAX_COMPLETIONS = 6000  # maximum completions of one prompt; vocabulary 5 and length 6 have 5461


@dataclass(frozen=True)
class PrefixTree:
    """All completions and their prefixes.

    Raises:
        ConfigError: A vocabulary below 2, a length below 1, or more completions than can be enumerated.
    """

    vocabulary: int = 3
    length: int = 3

    def __post_init__(self) -> None:
        if self.vocabulary < 2 or self.length < 1:
            raise ConfigError(
                f"a world needs a vocabulary of at least 2 (EOS is one) and a length of at least 1, not {self.vocabulary} "
                f"and {self.length}"
            )
        if (size := sum((self.vocabulary - 1) ** n for n in range(self.length + 1))) > MAX_COMPLETIONS:
            raise ConfigError(
                f"a vocabulary of {self.vocabulary} and a length of {self.length} make {size} completions, and at most "
                f"{MAX_COMPLETIONS} are enumerated: use smaller ones (5 and 6 make 5461)"
            )

    @cached_property
    def completions(self) -> list[tuple[int, ...]]:
        """The tokens of each completion without EOS, shorter completions first."""
        alphabet = range(1, self.vocabulary)
        return [word for n in range(self.length + 1) for word in itertools.product(alphabet, repeat=n)]

    @cached_property
    def tokens(self) -> Tensor:
        """[N, L] int64, padded with EOS."""
        return torch.tensor([[*word, *[EOS] * (self.length - len(word))] for word in self.completions])

    @cached_property
    def lengths(self) -> Tensor:
        """[N] int64; number of sampled tokens, including EOS."""
        return torch.tensor([min(len(word) + 1, self.length) for word in self.completions])

    @cached_property
    def mask(self) -> Tensor:
        """[N, L] bool."""
        return torch.arange(self.length) < self.lengths[:, None]

    @cached_property
    def truncated(self) -> Tensor:
        """[N] bool; True if the length was reached without EOS."""
        return torch.tensor([len(word) == self.length for word in self.completions])

    @cached_property
    def prefixes(self) -> list[tuple[int, ...]]:
        """The states: all sequences that may precede a sampled token."""
        return [word for word in self.completions if len(word) < self.length]

    @cached_property
    def state(self) -> Tensor:
        """[N, L] int64; the state before each token, 0 off the mask."""
        index = {prefix: i for i, prefix in enumerate(self.prefixes)}
        return torch.tensor(
            [[index.get(word[:t], 0) * (t <= len(word)) for t in range(self.length)] for word in self.completions]
        )

    @property
    def size(self) -> int:
        return len(self.completions)


@dataclass(frozen=True)
class Policy:
    """A softmax policy over prefixes. Its parameters are tensors of some shapes, initially from N(0, scale²)."""

    tree: PrefixTree
    prompts: int = 1
    scale: float = 0.5

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        raise NotImplementedError

    def initial(self, seed: int) -> Tensor:
        """θ [P]."""
        return sample_normal(sum(map(math.prod, self.shapes)), self.scale, seed)

    def split(self, theta: Tensor) -> list[Tensor]:
        """Return the parameters, shaped as in `shapes`."""
        pieces = torch.split(theta, [math.prod(shape) for shape in self.shapes])
        return [piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def logits(self, theta: Tensor) -> Tensor:
        """[X, S, V]."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class World:
    """X uniformly sampled prompts, a reward for every completion, and a policy.

    Raises:
        ConfigError: A reward table that does not match the tree.
    """

    tree: PrefixTree
    reward: Tensor  # [X, N]
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

    @cached_property
    def mask(self) -> Tensor:
        """[X·N, L]; row x·N + n is completion n of prompt x."""
        return self.tree.mask.repeat(self.prompts, 1)

    @cached_property
    def state(self) -> Tensor:
        """[X·N, L] indices of the X·S states."""
        offset = torch.arange(self.prompts) * len(self.tree.prefixes)
        return (self.tree.state[None] + offset[:, None, None]).flatten(0, 1)

    @cached_property
    def cell(self) -> Tensor:
        """[X·N, L] indices of the X·S·V (state, token) pairs."""
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

    def token_weight(self, theta: Tensor) -> Tensor:
        """[X·N, L] π(o|x) of each token's completion; 0 off the mask."""
        return torch.where(self.mask, self.logp(theta).exp().flatten()[:, None], 0)

    def objective(self, theta: Tensor, reward: Tensor | None = None) -> Tensor:
        """[] J, the mean over prompts of Σ_o π(o|x) R(x, o)."""
        return self.success(theta, reward).mean()

    def success(self, theta: Tensor, reward: Tensor | None = None) -> Tensor:
        """[X] expected reward per prompt; the success rate p for rewards of 0 and 1."""
        return (self.logp(theta).exp() * (self.reward if reward is None else reward)).sum(1)

    def gradient(self, theta: Tensor, reward: Tensor | None = None) -> Tensor:
        """[P] ∇J."""
        return derivative(lambda x: self.objective(x, reward), theta)

    def cell_scores(self, theta: Tensor) -> Tensor:
        """[X·S·V, P] ∇log π(a|s), cached for the last few θ, because many estimators are measured at the same one."""
        key = tuple(theta.tolist())
        if key not in self._scores:
            if len(self._scores) >= 4:
                self._scores.pop(next(iter(self._scores)))
            self._scores[key] = jacobian(lambda x: self.conditionals(x).flatten(), theta)
        return self._scores[key]

    def scores(self, theta: Tensor) -> Tensor:
        """[X·N, P] ∇log π(o|x), the score of each completion."""
        per_token = self.cell_scores(theta)[self.cell]
        return torch.where(self.mask[..., None], per_token, 0).sum(1)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """[] KL(π_p‖π_q) of complete completions in nats, mean over prompts, with graph."""
        log_p, log_q = self.logp(p), self.logp(q)
        return (log_p.exp() * (log_p - log_q)).sum(1).mean()

    def greedy(self, theta: Tensor) -> Tensor:
        """[X, N] bool; marks each prompt's greedy completion."""
        best = self.conditionals(theta).argmax(-1)[self.state] == self.tree.tokens.repeat(self.prompts, 1)
        return (best | ~self.mask).all(1).reshape(self.prompts, -1)

    def mean_length(self, theta: Tensor, where: Tensor | None = None) -> Tensor:
        """[] E|o| in tokens among the completions `where` [X, N], with graph."""
        weight = self.logp(theta).exp() * (1 if where is None else where)
        return (weight * self.tree.lengths).sum() / weight.sum()

    def values(self, theta: Tensor, to_go: Tensor) -> Tensor:
        """[X·S] V(s) = E[G | s], the mean reward to go (`to_go` [X·N, L]) of the completions that pass through s."""
        weight = self.token_weight(theta)
        total, mass = (torch.zeros(self.prompts * len(self.tree.prefixes)).double() for _ in range(2))
        total.index_add_(0, self.state.flatten(), torch.where(self.mask, weight * to_go, 0).flatten())
        mass.index_add_(0, self.state.flatten(), weight.flatten())
        return total / mass


def perturb_policy(world: World, theta: Tensor, kl: float, seed: int = 0, direction: Tensor | None = None) -> Tensor:
    """Return θ + a·direction with a > 0 such that KL(π_θ‖π_new) = `kl` nats per completion. The default direction is random.

    Raises:
        ConfigError: A negative distance, or one that the direction does not reach or jumps over.
    """
    if kl < 0:
        raise ConfigError(f"the KL must be at least 0 nats, not {kl}")
    if direction is None:
        direction = sample_normal(len(theta), 1.0, seed)
    if kl == 0:
        return theta
    low, high = 0.0, 1.0 / float(direction.norm())
    for _ in range(24):  # beyond that, rounding of the logits would look like a distance
        if float(world.kl(theta, theta + high * direction)) >= kl:
            break
        low, high = high, 2 * high
    else:
        raise ConfigError(f"no step along this direction moves the policy by a KL of {kl:g} nats")
    for _ in range(40):
        middle = (low + high) / 2
        reached = float(world.kl(theta, theta + middle * direction))
        if abs(reached / kl - 1) < 1e-9:
            return theta + middle * direction
        low, high = (middle, high) if reached < kl else (low, middle)
    if abs(reached / kl - 1) > 1e-3:
        raise ConfigError(
            f"along this direction the policy jumps over a KL of {kl:g} nats: fix discrete choices (routing) first"
        )
    return theta + high * direction


def sample_right_answers(
    tree: PrefixTree, policy: Policy, theta: Tensor, difficulty: Sequence[float], seed: int = 0
) -> Tensor:
    """Choose random right completions of each prompt, with probability under θ as near as possible to `difficulty`.

    Returns:
        Rewards [X, N], 0 or 1.

    Raises:
        ConfigError: A probability outside (0, 1).
    """
    generator = torch.Generator().manual_seed(seed)
    blank = World(tree, torch.zeros(len(difficulty), tree.size).double(), policy)
    probability = blank.logp(theta.detach()).exp()
    rows = []
    for p, chance in zip(difficulty, probability, strict=True):
        if not 0 < p < 1:
            raise ConfigError(f"a prompt's difficulty must be a probability in (0, 1), not {p}")
        right, mass = torch.zeros(tree.size).double(), 0.0
        for n in torch.randperm(tree.size, generator=generator).tolist():
            if abs(mass + float(chance[n]) - p) < abs(mass - p):
                right[n], mass = 1.0, mass + float(chance[n])
        rows.append(right)
    return torch.stack(rows)
