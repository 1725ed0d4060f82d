"""Ratios over long chains, where completions are too many to enumerate: sampled, against an exact ∇J."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from policygrad.core.protocols import Ratio
from policygrad.core.ratios import Sequence, Token
from policygrad.lab.calculus import derivative
from policygrad.lab.finding import Finding, percent, verdict
from policygrad.lab.measurement import Figures, figures
from policygrad.lab.policies import normal

LENGTHS = (8, 32, 128, 512)
CHAINS, WORLDS = 1024, 4
DISTANCES = (0.02, 0.2)
"""Nats a token between π_old and π_θ."""


@dataclass(frozen=True)
class Chain:
    """Every token is drawn by the token before it, and earns f(before, token)/√n: J and ∇J are exact at any length n."""

    earns: Tensor
    """[V + 1, V] f; row V is the start."""

    def policy(self, theta: Tensor) -> Tensor:
        """[V + 1, V] log π."""
        return theta.reshape(self.earns.shape).log_softmax(1)

    def visits(self, theta: Tensor, n: int) -> Tensor:
        """[V + 1] expected number of tokens drawn in each state."""
        p, (states, v) = self.policy(theta).exp(), self.earns.shape
        here = torch.zeros(states, dtype=torch.float64)
        here[v] = 1.0
        total = here
        for _ in range(n - 1):
            here = torch.cat([here @ p, torch.zeros(1, dtype=torch.float64)])
            total = total + here
        return total

    def objective(self, theta: Tensor, n: int) -> Tensor:
        """J."""
        value = self.visits(theta, n) @ (self.policy(theta).exp() * self.earns).sum(1)
        return value / math.sqrt(n)

    def distance(self, old: Tensor, new: Tensor, n: int) -> float:
        """KL(old‖new) in nats a token, of chains of n tokens that `old` draws."""
        p, q = self.policy(old), self.policy(new)
        return float(self.visits(old, n) @ (p.exp() * (p - q)).sum(1)) / n

    def draw(self, theta: Tensor, number: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
        """(states, tokens) [number, n] each."""
        p, generator = self.policy(theta).exp(), torch.Generator().manual_seed(seed)
        state = torch.full((number,), self.earns.shape[1])
        states, tokens = [], []
        for _ in range(n):
            states.append(state)
            state = torch.multinomial(p[state], 1, generator=generator).squeeze(1)
            tokens.append(state)
        return torch.stack(states, 1), torch.stack(tokens, 1)


def _moved(chain: Chain, old: Tensor, kl: float, seed: int) -> Tensor:
    """θ in a random direction from `old`, `kl` nats a token away."""
    direction, low, high = normal(len(old), 1.0, seed), 0.0, 8.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if chain.distance(old, old + middle * direction, 64) < kl else (low, middle)
    return old + low * direction


def _scores(chain: Chain, theta: Tensor, drawn: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
    """[N, P] Σ_t weight_t ∇log π_θ(token_t | state_t)."""
    (states, tokens), (rows, v) = drawn, chain.earns.shape
    taken = torch.zeros(len(states), rows * v, dtype=torch.float64).scatter_add_(1, states * v + tokens, weight)
    there = torch.zeros(len(states), rows, dtype=torch.float64).scatter_add_(1, states, weight)
    return taken - (there[:, :, None] * chain.policy(theta).exp()).flatten(1)


@dataclass(frozen=True)
class Sampled:
    """One ratio's estimator over chains of one length."""

    figures: Figures
    """Of r·(R − J)∇log π, summed over tokens."""
    spread: float
    """Standard deviation of r."""
    drift: float
    """The share of the variance that is Var R·‖E Σ_t r_t ∇log π_t‖²: 0 where the score keeps its mean of 0 under π_old."""


def _sampled(
    chain: Chain, old: Tensor, new: Tensor, drawn: tuple[Tensor, Tensor], ratios: list[Ratio]
) -> list[Sampled]:
    states, tokens = drawn
    n = states.shape[1]
    change = (chain.policy(new) - chain.policy(old))[states, tokens]
    psi = chain.earns[states, tokens].sum(1) / math.sqrt(n) - float(chain.objective(old, n))
    truth = derivative(lambda theta: chain.objective(theta, n), new)
    even = torch.full((len(states),), 1 / len(states), dtype=torch.float64)
    found = []
    for ratio in ratios:
        r = ratio(change, torch.ones_like(change, dtype=torch.bool))
        score = _scores(chain, new, drawn, r)
        measured = figures(score * psi[:, None], even, truth, exact=False)
        drift = float(psi.var() * score.mean(0).square().sum()) / (measured.variance * float(truth @ truth))
        found.append(Sampled(measured, float(r.std()), drift))
    return found


def long_chains(seed: int = 0) -> Finding:
    """The variance and the bias of both ratios on chains up to 512 tokens, in random worlds.

    Under π_old the score Σ_t ∇log π_θ has no longer the mean 0: it is −Σ_t ∇KL(π_old‖π_θ), and grows with the length. Token
    ratios take it back to 0 state by state, E_old[r ∇log π_θ] = 0; a factor per sequence cannot. Source of the claim: Zheng et
    al. 2025 (GSPO), sec. 3.
    """
    ratios: dict[str, Ratio] = {"token": Token(), "sequence": Sequence()}
    table = torch.zeros(4, len(ratios), len(DISTANCES), len(LENGTHS), WORLDS).double()
    for w in range(WORLDS):
        own = seed * 1000 + w * 10
        chain, old = Chain(normal(20, 1.0, own).reshape(5, 4)), normal(20, 0.7, own + 1)
        states, tokens = chain.draw(old, CHAINS, LENGTHS[-1], own + 2)
        for d, kl in enumerate(DISTANCES):
            new = _moved(chain, old, kl, own + 3)
            for i, n in enumerate(LENGTHS):
                for k, x in enumerate(_sampled(chain, old, new, (states[:, :n], tokens[:, :n]), [*ratios.values()])):
                    table[:, k, d, i, w] = torch.tensor([x.figures.variance, x.figures.bias, x.spread, x.drift])
    variance, bias, width, drift = (dict(zip(ratios, part, strict=True)) for part in table)
    change = variance["sequence"] / variance["token"]
    mean, error = change.mean(2), change.std(2) / math.sqrt(WORLDS)
    holds = bool((mean + 2 * error < 1).all())
    last = LENGTHS[-1]
    return Finding(
        "long_chains",
        "Over long answers one ratio per sequence cuts variance against one per token.",
        holds,
        f"On chains of {_list(LENGTHS)} tokens ({CHAINS} sampled in each of {WORLDS} random worlds) the sequence ratio's variance "
        "is "
        + "; ".join(_said(kl, mean[d], error[d]) for d, kl in enumerate(DISTANCES))
        + f": {verdict(holds, 'less at every length', 'no cut that grows with the length')}. Its weights do vary less, "
        f"{_pair(width['sequence'][:, -1])} against {_pair(width['token'][:, -1])} at {last} tokens, but they let the score drift: "
        f"{_percents(drift['sequence'][:, -1])} of its variance is Var R times the squared mean of Σ∇log π under π_old, which "
        f"token ratios keep near 0 ({_percents(drift['token'][:, -1])}). Its bias is {_pair(bias['sequence'][:, -1])} of ‖∇J‖ "
        f"there, the token ratio's {_pair(bias['token'][:, -1])}.",
        {f"times_{kl:g}_{n}": float(mean[d, i]) for d, kl in enumerate(DISTANCES) for i, n in enumerate(LENGTHS)}
        | {f"drift_{name}": float(drift[name][0, -1].mean()) for name in ratios},
        error=float(error.max()),
        curves={
            "length": tuple(map(float, LENGTHS)),
            **{f"spread_{name}": tuple(v[0].mean(1).tolist()) for name, v in width.items()},
            **{f"variance_{name}": tuple(v[0].mean(1).tolist()) for name, v in variance.items()},
            **{f"bias_{name}": tuple(v[0].mean(1).tolist()) for name, v in bias.items()},
        },
    )


def _said(kl: float, mean: Tensor, error: Tensor) -> str:
    times = ", ".join(f"{float(m):.2f} (± {float(e):.2f})" for m, e in zip(mean, error, strict=True))
    return f"{times} times the token ratio's {kl:g} nats a token away"


def _percents(table: Tensor) -> str:
    return " and ".join(percent(x) for x in table.mean(1).tolist())


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


def _pair(table: Tensor) -> str:
    return " and ".join(f"{x:.2f}" for x in table.mean(1).tolist())
