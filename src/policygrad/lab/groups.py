"""Optimiser steps side by side: every multiset of G completions with its probability, or a sample of steps."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from policygrad.errors import ConfigError
from policygrad.lab.setting import Setting

MOST_STEPS = 20_000
"""Up to so many multisets the expectation is exact."""
SAMPLED_STEPS = 4096
MOST_COMPLETIONS = 1_000_000
"""In all sampled steps together."""


@dataclass(frozen=True, eq=False)
class WeightedSteps:
    """M steps of B completions each."""

    rows: Tensor
    """[M, B] int64 into a setting's book."""
    weight: Tensor
    """[M] probabilities; 1/M where the steps were sampled."""
    exact: bool
    """Whether these are all the steps there are."""
    group: Tensor
    """[B] int64; which group of its step a completion belongs to."""
    silent: Tensor | None = None
    """[B] bool; completions that count in the statistics alone."""


def multisets(n: int, size: int) -> int:
    """How many multisets of `size` out of n."""
    return math.comb(n + size - 1, size)


def all_steps(setting: Setting, size: int, silent: int = 0) -> WeightedSteps:
    """One group of one prompt is a step: every multiset of G completions of every prompt, with its multinomial probability.

    silent: of N = G + silent completions, so many count in the statistics alone (multisets of both kinds, side by side).

    Raises:
        ConfigError: a group of none; more than `MOST_STEPS` steps.
    """
    world = setting.world
    number = count_steps(setting, size, silent)
    if number > MOST_STEPS:
        raise ConfigError(
            f"{world.prompts} prompts of {world.tree.size} completions make {number} steps with {size + silent} completions "
            f"each, and at most {MOST_STEPS} are enumerated: take a smaller group or world, or sample_steps"
        )
    log_p = world.logp(setting.behaviour).detach()
    tuples, chances = _multisets(log_p, size)
    if silent:
        more, theirs = _multisets(log_p, silent)
        left, right = torch.cartesian_prod(torch.arange(len(tuples)), torch.arange(len(more))).unbind(1)
        tuples, chances = torch.cat([tuples[left], more[right]], 1), chances[:, left] * theirs[:, right]
    offset = torch.arange(world.prompts)[:, None, None] * world.tree.size
    rows = (tuples + offset).flatten(0, 1)
    quiet = torch.arange(size + silent) >= size if silent else None
    return WeightedSteps(rows, chances.flatten() / world.prompts, True, torch.zeros(size + silent).long(), quiet)


def count_steps(setting: Setting, size: int, silent: int = 0) -> int:
    """How many steps `all_steps` would make."""
    if size < 1:
        raise ConfigError(f"a group has at least 1 completion, not {size}")
    n = setting.world.tree.size
    return setting.world.prompts * multisets(n, size) * (multisets(n, silent) if silent else 1)


def _multisets(log_p: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(the multisets [K, G], their probabilities [X, K]) of G draws from each row of log_p [X, N]."""
    tuples = torch.tensor(list(itertools.combinations_with_replacement(range(log_p.shape[1]), size)))
    repeats, run = (torch.ones(len(tuples)).double() for _ in range(2))
    for j in range(1, size):  # the product over a run of k equal ones is k!
        run = torch.where(tuples[:, j] == tuples[:, j - 1], run + 1, 1)
        repeats = repeats * run
    return tuples, (float(math.factorial(size)) / repeats) * log_p[:, tuples].sum(-1).exp()


def sample_steps(
    setting: Setting, size: int, steps: int = SAMPLED_STEPS, prompts: int = 1, seed: int = 0
) -> WeightedSteps:
    """M steps of `prompts` groups of G completions, drawn independently; prompts are drawn with replacement.

    Raises:
        ConfigError: a group of none; more than `MOST_COMPLETIONS` completions.
    """
    if size < 1:
        raise ConfigError(f"a group has at least 1 completion, not {size}")
    if (number := steps * prompts * size) > MOST_COMPLETIONS:
        raise ConfigError(
            f"{steps} sampled steps of {prompts * size} completions are {number}, and at most {MOST_COMPLETIONS} are drawn: take "
            f"a group of at most {MOST_COMPLETIONS // (steps * prompts)}, or fewer steps"
        )
    world, generator = setting.world, torch.Generator().manual_seed(seed)
    prompt = torch.randint(world.prompts, (steps * prompts,), generator=generator)
    chance = world.logp(setting.behaviour).detach().exp()[prompt]
    drawn = torch.multinomial(chance, size, replacement=True, generator=generator)
    rows = (drawn + prompt[:, None] * world.tree.size).reshape(steps, prompts * size)
    weight = torch.full((steps,), 1 / steps, dtype=torch.float64)
    return WeightedSteps(rows, weight, False, torch.arange(prompts).repeat_interleave(size))


def steps_for(setting: Setting, size: int, seed: int = 0) -> WeightedSteps:
    """All of them where their number allows, else a sample."""
    exact = count_steps(setting, size) <= MOST_STEPS
    return all_steps(setting, size) if exact else sample_steps(setting, size, seed=seed)
