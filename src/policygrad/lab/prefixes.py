"""A sequence world as a Markov decision process over prefixes: V, Q, A and the occupancy of small language by linear algebra."""

from __future__ import annotations

import torch

from policygrad.errors import ConfigError
from policygrad.lab.mdp import TabularMDP
from policygrad.lab.sequences import World

LARGEST = 20_000_000
"""Entries of the transition matrix [S, A, S]; a vocabulary of 5 and a length of 6 have 9.3 million."""


def as_mdp(world: World, gamma: float = 1.0) -> TabularMDP:
    """States are all prompts' prefixes [X·S], actions tokens; the last token of a completion pays R and ends the episode.

    Its policy is `world.conditionals(theta).exp()` [X·S, V]: `solve` then gives J, V, Q, A and the occupancy, whose sum at
    γ = 1 is the expected length.

    Raises:
        ConfigError: a world whose transitions would be too many.
    """
    tree, states, tokens = world.tree, world.prompts * len(world.tree.prefixes), world.tree.vocabulary
    if (size := states * tokens * states) > LARGEST:
        raise ConfigError(
            f"{states} prefixes and {tokens} tokens make {size} transitions, and at most {LARGEST} are held: take a smaller "
            "world, or fewer prompts"
        )
    rows, last = torch.arange(world.rows), tree.lengths.repeat(world.prompts) - 1
    reward = torch.zeros(states * tokens, dtype=torch.float64)
    reward[world.cell[rows, last]] = world.reward.flatten()
    moves = torch.zeros(states * tokens, states, dtype=torch.float64)
    follows = world.mask[:, 1:]
    moves[world.cell[:, :-1][follows], world.state[:, 1:][follows]] = 1.0
    start = torch.zeros(states, dtype=torch.float64)
    start[world.state[:, 0]] = 1 / world.prompts
    return TabularMDP(moves.reshape(states, tokens, states), reward.reshape(states, tokens), start, gamma)
