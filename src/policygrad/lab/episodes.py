"""Conversations small enough to enumerate: all episodes of several turns with a world that answers, possibly at random.

A turn has at most `turn_tokens` tokens and is ended by EOS. The world then answers with one token, which is not the policy's: a
column outside the mask. The state of the policy is the history before a token, including the world's answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from policygrad.errors import ConfigError
from policygrad.lab.sequences import EOS, PrefixTree, World
from policygrad.lab.setting import LabSetting


@dataclass(frozen=True)
class GameTransition:
    """A possible result of a turn."""

    probability: float
    state: int | None  # the game's state in which the next turn begins; None = the episode is over
    reward: float
    outcome: float = 0.0  # reward of the episode, if it ends here


class EnumerableGame(Protocol):
    """A game with numbered states."""

    start: ClassVar[int]

    def transitions(self, state: int, tokens: tuple[int, ...]) -> Sequence[GameTransition]:
        """Return the possible results of a turn with these tokens (without EOS); the probabilities sum to 1."""


@dataclass(frozen=True)
class Walk:
    """A door two steps away, which is worth 1.

    No token waits and costs `wait_cost`. One token is a step. Two tokens are a leap, which costs `leap_cost`; from the start it
    reaches the door half the time, and otherwise nothing changes. Every advance earns `progress_reward` in its turn.
    """

    leap_cost: float = 0.3
    wait_cost: float = 0.1
    progress_reward: float = 0.5
    start: ClassVar[int] = 0

    def transitions(self, state: int, tokens: tuple[int, ...]) -> Sequence[GameTransition]:
        if not tokens:
            return (GameTransition(1.0, state, -self.wait_cost),)
        cost = self.leap_cost if len(tokens) > 1 else 0.0
        arrival = GameTransition(1.0, None, self.progress_reward - cost, 1.0)
        if state == 1:
            return (arrival,)
        if len(tokens) == 1:
            return (GameTransition(1.0, 1, self.progress_reward),)
        return (replace(arrival, probability=0.5), GameTransition(0.5, 0, -cost))


@dataclass(frozen=True)
class Episode:
    """A possible episode, column by column."""

    actions: tuple[int, ...] = ()  # tokens of the policy; the world's k-th possible answer is −1 − k
    turn: tuple[int, ...] = ()  # the turn of each column, including the answer to it
    state: tuple[int, ...] = ()  # the game's state in which that turn began
    reward: tuple[float, ...] = ()  # each turn's reward, at its last token
    probability: float = 1.0  # of the world's answers
    outcome: float = 0.0


@dataclass(frozen=True)
class EpisodeTree(PrefixTree):
    """All episodes of a game, in place of all completions; L has room for each turn of at most `turn_tokens` and its answer.

    Raises:
        ConfigError: A length that is not a multiple of a turn's.
    """

    vocabulary: int = 2
    length: int = 9
    turn_tokens: int = 2
    game: EnumerableGame = Walk()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length % (self.turn_tokens + 1):
            raise ConfigError(
                f"turns of {self.turn_tokens} tokens and an answer take {self.turn_tokens + 1} columns each, so the length must be "
                f"a multiple of that, not {self.length}"
            )

    @cached_property
    def episodes(self) -> list[Episode]:
        """All episodes, in depth-first order."""
        turns = PrefixTree(self.vocabulary, self.turn_tokens).completions

        def play(before: Episode, state: int, remaining: int) -> Iterator[Episode]:
            number = before.turn[-1] + 1 if before.turn else 0
            for turn in turns:
                tokens = (*turn, EOS)[: self.turn_tokens]
                columns = len(tokens) + 1  # with the world's answer
                for answer, result in enumerate(self.game.transitions(state, turn)):
                    after = Episode(
                        (*before.actions, *tokens, -1 - answer),
                        before.turn + (number,) * columns,
                        before.state + (state,) * columns,
                        (*before.reward, *(0.0,) * (columns - 2), result.reward, 0.0),
                        before.probability * result.probability,
                        result.outcome,
                    )
                    if result.state is None or remaining == 1:
                        yield after
                    else:
                        yield from play(after, result.state, remaining - 1)

        return list(play(Episode(), self.game.start, self.length // (self.turn_tokens + 1)))

    def _padded(self, rows: Sequence[Sequence[float]], fill: float) -> Tensor:
        """[N, L] float64."""
        return torch.tensor([[*row, *[fill] * (self.length - len(row))] for row in rows], dtype=torch.float64)

    @cached_property
    def completions(self) -> list[tuple[int, ...]]:
        """The policy's own tokens; if the world is random, several episodes have the same ones."""
        return [tuple(x for x in e.actions if x >= 0) for e in self.episodes]

    @cached_property
    def tokens(self) -> Tensor:
        return self._padded([e.actions for e in self.episodes], EOS).clamp(min=0).long()

    @cached_property
    def mask(self) -> Tensor:
        return self._padded([e.actions for e in self.episodes], -1) >= 0

    @cached_property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)

    @cached_property
    def truncated(self) -> Tensor:
        return torch.zeros(self.size, dtype=torch.bool)

    @cached_property
    def prefixes(self) -> list[tuple[int, ...]]:
        """All histories before a sampled token, with the world's answers as negative numbers."""
        histories = ((e.actions[:t] for t, x in enumerate(e.actions) if x >= 0) for e in self.episodes)
        return list(dict.fromkeys(prefix for each in histories for prefix in each))

    @cached_property
    def state(self) -> Tensor:
        index = {prefix: i for i, prefix in enumerate(self.prefixes)}
        rows = [[index[e.actions[:t]] if x >= 0 else 0 for t, x in enumerate(e.actions)] for e in self.episodes]
        return self._padded(rows, 0).long()

    @cached_property
    def turn_state(self) -> Tensor:
        """[N, L] int64; the game's state in which a token's turn began."""
        return self._padded([e.state for e in self.episodes], 0).long()

    @cached_property
    def token_reward(self) -> Tensor:
        """[N, L] each turn's reward at its last token."""
        return self._padded([e.reward for e in self.episodes], 0)

    @cached_property
    def outcome(self) -> Tensor:
        """[N]."""
        return torch.tensor([e.outcome for e in self.episodes], dtype=torch.float64)

    def total(self, gamma: float = 1.0) -> Tensor:
        """[N] Σ_n γ^n r_n, with the outcome in the last turn's reward."""
        turn, last = self._padded([e.turn for e in self.episodes], 0), torch.tensor([e.turn[-1] for e in self.episodes])
        return (gamma**turn * self.token_reward).sum(1) + gamma ** last.double() * self.outcome


@dataclass(frozen=True, eq=False)
class ConversationWorld(World):
    """A world whose completions are episodes; `reward` is an episode's total, as in a rollout without parts that read turns."""

    tree: EpisodeTree

    def logp(self, theta: Tensor) -> Tensor:
        """[X, N] log-probability of each episode, of the policy and the world together."""
        return (
            super().logp(theta) + torch.tensor([e.probability for e in self.tree.episodes], dtype=torch.float64).log()
        )


@dataclass(frozen=True, eq=False)
class ConversationSetting(LabSetting):
    """A setting whose batches contain turns, as a rollout's do."""

    world: ConversationWorld

    def reward_fields(self, needs: Set[str]) -> dict[str, Any]:
        if "turn_state" not in needs:  # no part reads turns: the outcome is the entire reward
            return super().reward_fields(needs)
        tree, prompts = self.world.tree, self.world.prompts
        turn_state = {"turn_state": tree.turn_state.repeat(prompts, 1)}
        if "token_reward" not in needs:
            return super().reward_fields(frozenset()) | turn_state
        rewards = {"token_reward": tree.token_reward.repeat(prompts, 1), "reward": tree.outcome.repeat(prompts)}
        return turn_state | rewards
