"""Rewards of the lab's worlds: a number for every completion, as a verifier would give it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policygrad.errors import ConfigError
from policygrad.lab.sequences import Policy, Tree, Verifier, World


def verified(tree: Tree, verifier: Verifier, prompts: int = 1) -> Tensor:
    """[X, N] float64, the same for every prompt."""
    row = [verifier(word) for word in tree.words]
    return torch.tensor([row] * prompts, dtype=torch.float64)


def sum_equals(target: int) -> Verifier:
    """1 where the tokens add up to `target`."""
    return lambda word: float(sum(word) == target)


def long_enough(tokens: int) -> Verifier:
    """1 where there are at least so many tokens before EOS."""
    return lambda word: float(len(word) >= tokens)


def random_subsets(tree: Tree, policy: Policy, theta: Tensor, difficulty: Sequence[float], seed: int = 0) -> Tensor:
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
