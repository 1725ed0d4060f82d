"""Conversations small enough to enumerate: every episode of several turns with a world that answers, and may draw.

A turn is at most `spoken` tokens, EOS ends it. The world then says one token, which is not the policy's: a column off the mask.
A state of the policy is all that was said before a token, the world's answers among it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from policygrad.errors import ConfigError
from policygrad.lab.sequences import EOS, Policy, PrefixTree, World
from policygrad.lab.setting import LabSetting


@dataclass(frozen=True)
class GameTransition:
    """What may come of a turn."""

    probability: float
    state: int | None
    """Where the next turn begins; None = the episode is over."""
    reward: float
    """Of the turn."""
    outcome: float = 0.0
    """Of the episode, where it ends here."""


class Game(Protocol):
    """A world of rooms."""

    start: ClassVar[int]

    def transitions(self, room: int, word: tuple[int, ...]) -> Sequence[GameTransition]:
        """What may come of saying these tokens, EOS left out, in this room; the chances add up to 1."""
        ...


@dataclass(frozen=True)
class Walk:
    """Two steps lead to the door, and being there is worth 1. Saying nothing waits, which costs `delay`; one token is a step; two
    are a leap, which costs `effort` and from the start reaches the door half the time, else it falls back. Whoever gets on
    earns `progress` in that turn."""

    leap_cost: float = 0.3
    wait_cost: float = 0.1
    progress_reward: float = 0.5
    start: ClassVar[int] = 0

    def transitions(self, room: int, word: tuple[int, ...]) -> Sequence[GameTransition]:
        if not word:
            return (GameTransition(1.0, room, -self.wait_cost),)
        cost = self.leap_cost if len(word) > 1 else 0.0
        arrived = GameTransition(1.0, None, self.progress_reward - cost, 1.0)
        if room == 1:
            return (arrived,)
        if len(word) == 1:
            return (GameTransition(1.0, 1, self.progress_reward),)
        return (replace(arrived, probability=0.5), GameTransition(0.5, 0, -cost))


@dataclass(frozen=True)
class Episode:
    """One way it may go, column by column."""

    actions: tuple[int, ...] = ()
    """Tokens of the policy; the world's k-th possible answer is −1 − k."""
    turn: tuple[int, ...] = ()
    """Which turn a column belongs to, the answer to it included."""
    state: tuple[int, ...] = ()
    """Where that turn began."""
    reward: tuple[float, ...] = ()
    """Each turn's reward, at its last token."""
    probability: float = 1.0
    """That the world answers so."""
    outcome: float = 0.0

    def extend(self, room: int, tokens: tuple[int, ...], which: int, answer: GameTransition) -> Episode:
        """With one more turn."""
        n, turn = len(tokens), self.turn[-1] + 1 if self.turn else 0
        return Episode(
            (*self.actions, *tokens, -1 - which),
            self.turn + (turn,) * (n + 1),
            self.state + (room,) * (n + 1),
            (*self.reward, *(0.0,) * (n - 1), answer.reward, 0.0),
            self.probability * answer.probability,
            answer.outcome,
        )


@dataclass(frozen=True)
class EpisodeTree(PrefixTree):
    """Every episode of a game, in place of every completion; L has room for each turn and the answer to it.

    Raises:
        ConfigError: a length that is not so many whole turns.
    """

    vocabulary: int = 2
    length: int = 9
    turn_tokens: int = 2
    """Tokens that a turn may have."""
    game: Game = Walk()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length % (self.turn_tokens + 1):
            raise ConfigError(
                f"turns of {self.turn_tokens} tokens and an answer take {self.turn_tokens + 1} columns each, and a length of {self.length} "
                "is no multiple of that"
            )

    @cached_property
    def episodes(self) -> list[Episode]:
        """In the order in which they branch."""
        words = PrefixTree(self.vocabulary, self.turn_tokens).words

        def played(before: Episode, room: int, left: int) -> Iterator[Episode]:
            for word in words:
                tokens = (*word, EOS)[: self.turn_tokens]
                for which, answer in enumerate(self.game.transitions(room, word)):
                    after = before.extend(room, tokens, which, answer)
                    if answer.state is None or left == 1:
                        yield after
                    else:
                        yield from played(after, answer.state, left - 1)

        return list(played(Episode(), self.game.start, self.length // (self.turn_tokens + 1)))

    def _padded(self, rows: Sequence[Sequence[float]], fill: float) -> Tensor:
        """[N, L] float64."""
        return torch.tensor([[*row, *[fill] * (self.length - len(row))] for row in rows], dtype=torch.float64)

    @cached_property
    def words(self) -> list[tuple[int, ...]]:
        """The policy's own tokens; where the world draws, several episodes have the same."""
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
        """What may stand before a sampled token, the world's answers below 0."""
        before = ((e.actions[:t] for t, x in enumerate(e.actions) if x >= 0) for e in self.episodes)
        return list(dict.fromkeys(prefix for some in before for prefix in some))

    @cached_property
    def state(self) -> Tensor:
        index = {prefix: i for i, prefix in enumerate(self.prefixes)}
        rows = [[index[e.actions[:t]] if x >= 0 else 0 for t, x in enumerate(e.actions)] for e in self.episodes]
        return self._padded(rows, 0).long()

    @cached_property
    def turn_state(self) -> Tensor:
        """[N, L] int64; the room that a token's turn began in."""
        return self._padded([e.state for e in self.episodes], 0).long()

    @cached_property
    def token_reward(self) -> Tensor:
        """[N, L] each turn's reward at its last token."""
        return self._padded([e.reward for e in self.episodes], 0)

    @cached_property
    def outcome(self) -> Tensor:
        """[N]."""
        return torch.tensor([e.outcome for e in self.episodes], dtype=torch.float64)

    @cached_property
    def log_world_probability(self) -> Tensor:
        """[N] nats; what the world adds to an episode's log-probability."""
        return torch.tensor([e.probability for e in self.episodes], dtype=torch.float64).log()

    def total(self, gamma: float = 1.0) -> Tensor:
        """[N] Σ_n γ^n r_n, the outcome in the last turn's."""
        turn, last = self._padded([e.turn for e in self.episodes], 0), torch.tensor([e.turn[-1] for e in self.episodes])
        return (gamma**turn * self.token_reward).sum(1) + gamma ** last.double() * self.outcome


@dataclass(frozen=True, eq=False)
class ConversationWorld(World):
    """A world whose completions are episodes; `reward` is all that one earns, as a rollout without a part that reads turns says."""

    tree: EpisodeTree

    @classmethod
    def from_tree(cls, tree: EpisodeTree, policy: Policy, gamma: float = 1.0) -> ConversationWorld:
        """One prompt; γ < 1 discounts what J is made of, per turn."""
        return cls(tree, tree.total(gamma)[None], policy)

    def logp(self, theta: Tensor) -> Tensor:
        """[X, N] log of an episode's probability: the policy's and the world's."""
        return super().logp(theta) + self.tree.log_world_probability


@dataclass(frozen=True, eq=False)
class ConversationSetting(LabSetting):
    """A setting whose batches hold turns, as a rollout fills them in."""

    world: ConversationWorld

    def reward_fields(self, reads: Set[str]) -> dict[str, Any]:
        if "turn_state" not in reads:  # nobody asks for turns: the outcome is everything
            return super().reward_fields(reads)
        tree, prompts = self.world.tree, self.world.prompts
        anchor = {"turn_state": tree.turn_state.repeat(prompts, 1)}
        if "token_reward" not in reads:
            return super().reward_fields(frozenset()) | anchor
        paid = {"token_reward": tree.token_reward.repeat(prompts, 1), "reward": tree.outcome.repeat(prompts)}
        return anchor | paid
