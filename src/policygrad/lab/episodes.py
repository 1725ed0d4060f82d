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
from policygrad.lab.sequences import EOS, Policy, Tree, World
from policygrad.lab.setting import Setting


@dataclass(frozen=True)
class Answer:
    """What may come of a turn."""

    chance: float
    room: int | None
    """Where the next turn begins; None = the episode is over."""
    reward: float
    """Of the turn."""
    outcome: float = 0.0
    """Of the episode, where it ends here."""


class Game(Protocol):
    """A world of rooms."""

    start: ClassVar[int]

    def answers(self, room: int, word: tuple[int, ...]) -> Sequence[Answer]:
        """What may come of saying these tokens, EOS left out, in this room; the chances add up to 1."""
        ...


@dataclass(frozen=True)
class Walk:
    """Two steps lead to the door, and being there is worth 1. Saying nothing waits, which costs `delay`; one token is a step; two
    are a leap, which costs `effort` and from the start reaches the door half the time, else it falls back. Whoever gets on
    earns `progress` in that turn."""

    effort: float = 0.3
    delay: float = 0.1
    progress: float = 0.5
    start: ClassVar[int] = 0

    def answers(self, room: int, word: tuple[int, ...]) -> Sequence[Answer]:
        if not word:
            return (Answer(1.0, room, -self.delay),)
        cost = self.effort if len(word) > 1 else 0.0
        arrived = Answer(1.0, None, self.progress - cost, 1.0)
        if room == 1:
            return (arrived,)
        if len(word) == 1:
            return (Answer(1.0, 1, self.progress),)
        return (replace(arrived, chance=0.5), Answer(0.5, 0, -cost))


@dataclass(frozen=True)
class Episode:
    """One way it may go, column by column."""

    said: tuple[int, ...] = ()
    """Tokens of the policy; the world's k-th possible answer is −1 − k."""
    turn: tuple[int, ...] = ()
    """Which turn a column belongs to, the answer to it included."""
    room: tuple[int, ...] = ()
    """Where that turn began."""
    paid: tuple[float, ...] = ()
    """Each turn's reward, at its last token."""
    chance: float = 1.0
    """That the world answers so."""
    outcome: float = 0.0

    def then(self, room: int, tokens: tuple[int, ...], which: int, answer: Answer) -> Episode:
        """With one more turn."""
        n, turn = len(tokens), self.turn[-1] + 1 if self.turn else 0
        return Episode(
            (*self.said, *tokens, -1 - which),
            self.turn + (turn,) * (n + 1),
            self.room + (room,) * (n + 1),
            (*self.paid, *(0.0,) * (n - 1), answer.reward, 0.0),
            self.chance * answer.chance,
            answer.outcome,
        )


@dataclass(frozen=True)
class Episodes(Tree):
    """Every episode of a game, in place of every completion; L has room for each turn and the answer to it.

    Raises:
        ConfigError: a length that is not so many whole turns.
    """

    vocabulary: int = 2
    length: int = 9
    spoken: int = 2
    """Tokens that a turn may have."""
    game: Game = Walk()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length % (self.spoken + 1):
            raise ConfigError(
                f"turns of {self.spoken} tokens and an answer take {self.spoken + 1} columns each, and a length of {self.length} "
                "is no multiple of that"
            )

    @cached_property
    def episodes(self) -> list[Episode]:
        """In the order in which they branch."""
        words = Tree(self.vocabulary, self.spoken).words

        def played(before: Episode, room: int, left: int) -> Iterator[Episode]:
            for word in words:
                tokens = (*word, EOS)[: self.spoken]
                for which, answer in enumerate(self.game.answers(room, word)):
                    after = before.then(room, tokens, which, answer)
                    if answer.room is None or left == 1:
                        yield after
                    else:
                        yield from played(after, answer.room, left - 1)

        return list(played(Episode(), self.game.start, self.length // (self.spoken + 1)))

    def _padded(self, rows: Sequence[Sequence[float]], fill: float) -> Tensor:
        """[N, L] float64."""
        return torch.tensor([[*row, *[fill] * (self.length - len(row))] for row in rows], dtype=torch.float64)

    @cached_property
    def words(self) -> list[tuple[int, ...]]:
        """The policy's own tokens; where the world draws, several episodes have the same."""
        return [tuple(x for x in e.said if x >= 0) for e in self.episodes]

    @cached_property
    def tokens(self) -> Tensor:
        return self._padded([e.said for e in self.episodes], EOS).clamp(min=0).long()

    @cached_property
    def mask(self) -> Tensor:
        return self._padded([e.said for e in self.episodes], -1) >= 0

    @cached_property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)

    @cached_property
    def truncated(self) -> Tensor:
        return torch.zeros(self.size, dtype=torch.bool)

    @cached_property
    def prefixes(self) -> list[tuple[int, ...]]:
        """What may stand before a sampled token, the world's answers below 0."""
        before = ((e.said[:t] for t, x in enumerate(e.said) if x >= 0) for e in self.episodes)
        return list(dict.fromkeys(prefix for some in before for prefix in some))

    @cached_property
    def state(self) -> Tensor:
        index = {prefix: i for i, prefix in enumerate(self.prefixes)}
        rows = [[index[e.said[:t]] if x >= 0 else 0 for t, x in enumerate(e.said)] for e in self.episodes]
        return self._padded(rows, 0).long()

    @cached_property
    def anchor(self) -> Tensor:
        """[N, L] int64; the room that a token's turn began in."""
        return self._padded([e.room for e in self.episodes], 0).long()

    @cached_property
    def token_reward(self) -> Tensor:
        """[N, L] each turn's reward at its last token."""
        return self._padded([e.paid for e in self.episodes], 0)

    @cached_property
    def outcome(self) -> Tensor:
        """[N]."""
        return torch.tensor([e.outcome for e in self.episodes], dtype=torch.float64)

    @cached_property
    def log_chance(self) -> Tensor:
        """[N] nats; what the world adds to an episode's log-probability."""
        return torch.tensor([e.chance for e in self.episodes], dtype=torch.float64).log()

    def total(self, gamma: float = 1.0) -> Tensor:
        """[N] Σ_n γ^n r_n, the outcome in the last turn's."""
        turn, last = self._padded([e.turn for e in self.episodes], 0), torch.tensor([e.turn[-1] for e in self.episodes])
        return (gamma**turn * self.token_reward).sum(1) + gamma ** last.double() * self.outcome


@dataclass(frozen=True, eq=False)
class Conversations(World):
    """A world whose completions are episodes; `reward` is all that one earns, as a rollout without a part that reads turns says."""

    tree: Episodes

    @classmethod
    def of(cls, tree: Episodes, policy: Policy, gamma: float = 1.0) -> Conversations:
        """One prompt; γ < 1 discounts what J is made of, per turn."""
        return cls(tree, tree.total(gamma)[None], policy)

    def logp(self, theta: Tensor) -> Tensor:
        """[X, N] log of an episode's probability: the policy's and the world's."""
        return super().logp(theta) + self.tree.log_chance


@dataclass(frozen=True, eq=False)
class ConversationSetting(Setting):
    """A setting whose batches hold turns, as a rollout fills them in."""

    world: Conversations

    def rewards(self, reads: Set[str]) -> dict[str, Any]:
        if "anchor" not in reads:  # nobody asks for turns: the outcome is everything
            return super().rewards(reads)
        tree, prompts = self.world.tree, self.world.prompts
        anchor = {"anchor": tree.anchor.repeat(prompts, 1)}
        if "token_reward" not in reads:
            return super().rewards(frozenset()) | anchor
        paid = {"token_reward": tree.token_reward.repeat(prompts, 1), "reward": tree.outcome.repeat(prompts)}
        return anchor | paid
