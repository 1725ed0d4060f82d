"""Expectations without sampling: every completion of a tabular model, every group of completions, in float64.

Vocabulary {EOS, a, b}, at most three tokens: 15 completions. A group of G is one of 15^G tuples; each tuple is one group of
a single batch, weighted by its probability, so one call of the library gives the exact expectation of its gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import policygrad as pg
from doubles.random_batches import Random, gradients

EOS, VOCABULARY, LONGEST = 0, 3, 3


COMPLETIONS = [
    tokens
    for n in range(1, LONGEST + 1)
    for tokens in itertools.product(range(VOCABULARY), repeat=n)
    if EOS not in tokens[:-1] and (tokens[-1] == EOS or n == LONGEST)
]


TOKENS = torch.tensor([list(o) + [EOS] * (LONGEST - len(o)) for o in COMPLETIONS])


MASK = torch.tensor([[t < len(o) for t in range(LONGEST)] for o in COMPLETIONS])


PREVIOUS = torch.cat([torch.zeros(len(TOKENS), 1, dtype=torch.int64), TOKENS[:, :-1]], 1)


RANDOM = Random(0)


REWARD = RANDOM.normal(len(COMPLETIONS))


THETA, BEHAVIOUR, REFERENCE = (RANDOM.normal(LONGEST, VOCABULARY, VOCABULARY) for _ in range(3))


def conditionals(theta: Tensor) -> Tensor:
    """log π(·|s) [15, T, V] at the states that the completions pass: position and previous token."""
    return torch.log_softmax(theta, -1)[torch.arange(LONGEST), PREVIOUS]


def token_logp(theta: Tensor) -> Tensor:
    return conditionals(theta).gather(-1, TOKENS[..., None]).squeeze(-1)


def logp_of(theta: Tensor) -> Tensor:
    """log π(o) [15]."""
    return torch.where(MASK, token_logp(theta), 0).sum(1)


def true_gradient(reward: Tensor = REWARD) -> Tensor:
    """∇ E[R]."""
    theta = THETA.clone().requires_grad_()
    return gradients((logp_of(theta).exp() * reward).sum(), theta)[0]


def expected_gradient(
    algorithm: pg.Algorithm, G: int, sampler: Tensor = THETA, psi: Tensor | None = None, off_policy: bool = False
) -> Tensor:
    """E over all G-tuples from `sampler` of the library's gradient at θ; `psi` [15, T] replaces the algorithm's Ψ."""
    tuples = torch.cartesian_prod(*[torch.arange(len(COMPLETIONS))] * G).reshape(-1, G)
    rows = tuples.flatten()
    probability = logp_of(sampler)[tuples].sum(1).exp()
    batch = pg.Batch(
        mask=MASK[rows],
        group=torch.arange(len(tuples)).repeat_interleave(G),
        reward=REWARD[rows],
        logp_old=token_logp(sampler)[rows],
        logp_ref=token_logp(REFERENCE)[rows],
        weight=(probability * len(tuples)).repeat_interleave(G)[:, None].expand(-1, LONGEST),
    )
    theta = THETA.clone().requires_grad_()
    advantages = algorithm.compute_advantages(batch) if psi is None else psi[rows]
    batch = batch if off_policy else replace(batch, logp_old=None)
    return gradients(-pg.surrogate(token_logp(theta)[rows], batch, advantages, algorithm), theta)[0]


def frozen_visits(per_state: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """∇ Σ_s d(s) f(π(·|s)) with the visitation d frozen at θ; f maps (log π(·|s), log π_ref(·|s)) [15, T, V] to [15, T]."""
    theta = THETA.clone().requires_grad_()
    visits = torch.where(MASK, logp_of(THETA).exp()[:, None], 0)
    return gradients((visits * per_state(conditionals(theta), conditionals(REFERENCE))).sum(), theta)[0]
