"""The settings of the lab's table and findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from policygrad.lab.episodes import ConversationSetting, ConversationWorld, EpisodeTree, Walk
from policygrad.lab.policies import Bigram, TabularPolicy
from policygrad.lab.sequences import PrefixTree, World, perturb_policy, sample_right_answers
from policygrad.lab.setting import LabSetting

DIFFICULTY = (0.15, 0.5, 0.85)
OFF_POLICY_KL = 0.05  # nats per completion between π_old and π_θ, off-policy


def make_table_settings(kl: float = OFF_POLICY_KL, seed: int = 0) -> tuple[LabSetting, LabSetting]:
    """Return (on-policy, off-policy): three prompts of unequal difficulty, 15 completions of up to 3 tokens, shared parameters.

    The same π_old samples in both; off-policy, π_θ is `kl` nats away from it in a random direction. π_ref is 0.02 nats away in
    another direction. The critic's error has a standard deviation of 0.1.
    """
    tree = PrefixTree(3, 3)
    policy = Bigram(tree, len(DIFFICULTY))
    old = policy.initial(seed)
    world = World(tree, sample_right_answers(tree, policy, old, DIFFICULTY, seed), policy)
    reference = perturb_policy(world, old, 0.02, seed=seed + 2)
    on = LabSetting(world, old, reference=reference, critic_error=0.1, seed=seed)
    return on, replace(on, theta=perturb_policy(world, old, kl, seed=seed + 1), old=old)


def one_prompt(length: int = 3, p: float = 0.4, seed: int = 0, vocabulary: int = 3) -> LabSetting:
    """Return one prompt on-policy: a table of logits, and a random set of right answers with probability about p."""
    tree = PrefixTree(vocabulary, length)
    policy = TabularPolicy(tree)
    theta = policy.initial(seed)
    return LabSetting(World(tree, sample_right_answers(tree, policy, theta, (p,), seed), policy), theta)


def two_answers(p: float, rewards: Sequence[float] = (0.0, 1.0)) -> LabSetting:
    """Return one prompt with one token: EOS, or the answer with the second reward, which has probability p."""
    tree = PrefixTree(2, 1)
    theta = torch.tensor([0.0, math.log(p / (1 - p))], dtype=torch.float64)
    return LabSetting(World(tree, torch.tensor([list(rewards)], dtype=torch.float64), TabularPolicy(tree)), theta)


def walk_setting(
    turns: int = 3,
    gamma: float = 1.0,
    seed: int = 0,
    game: Walk = Walk(),  # noqa: B008  frozen
) -> ConversationSetting:
    """Return conversations with the game `Walk`, with a logit for each history; J discounts by γ per turn."""
    tree = EpisodeTree(length=3 * turns, game=game)
    policy = TabularPolicy(tree)
    return ConversationSetting(ConversationWorld(tree, tree.total(gamma)[None], policy), policy.initial(seed))
