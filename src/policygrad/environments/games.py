"""Games of several players: the protocol of a game, and self-play, in which the policy plays every role."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from policygrad.errors import ConfigError
from policygrad.rewards.workers.messages import quote
from policygrad.rollout.environment import (
    ENVIRONMENT,
    Action,
    Capabilities,
    MalformedError,
    Observation,
    Step,
    is_finite_number,
    make_environment,
)
from policygrad.tasks.base import Example, Prompt

if TYPE_CHECKING:
    from policygrad.rollout.runners import EpisodeContext, EpisodeRunner

RANDOM = "random"
"""An opponent that moves uniformly at random."""


@dataclass(frozen=True)
class GameStep:
    """The result of the players' moves. The game continues if somebody moves next.

    Raises:
        EngineError: a reward or metric that is not a finite number, or an observation of another type.
    """

    observations: Mapping[int, Observation] = field(default_factory=dict)
    """The players that move next, at the same time, and what each has read since its last move; {} = the game is over."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards of players for this step; they are added up. Every player needs one by the end of the game, such as 1, 0 or −1."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log as environment/NAME: summed over a game, averaged over games."""
    stop_reason: str = ENVIRONMENT
    """Why the game ended, one word for metrics and logs; used when nobody moves next."""

    def __post_init__(self) -> None:
        for player, observation in self.observations.items():
            if not isinstance(observation, Observation):
                kind = type(observation).__name__
                raise MalformedError(f"observations[{player}] must be an Observation (pg.Observation), not {kind}")
        for player, reward in self.rewards.items():
            if not is_finite_number(reward):
                raise MalformedError(f"rewards[{player}] = {quote(reward)}: give a finite number")
        step = Step(metrics=self.metrics, stop_reason=self.stop_reason)  # which checks both
        object.__setattr__(self, "metrics", step.metrics)
        object.__setattr__(self, "stop_reason", step.stop_reason)


class Game(Protocol):
    """One game. Players have numbers from 0 on.

    A player reads its observations and its own moves, as it sampled them; of another's moves it reads what an observation tells.
    As with an `Environment`, a game that never awaits may set `waits = False`, and one that holds a resource may have a method
    `close`.
    """

    roles: Sequence[str]
    """The role of each player, such as ("first", "second"). Players may share one, as several solvers of a problem do."""

    async def reset(self) -> Mapping[int, Observation]:
        """Return the players that move first, and what each reads."""

    async def step(self, moves: Mapping[int, Action]) -> GameStep:
        """Apply the moves of the players that were to move. An illegal one is the game's to judge: a loss, or another attempt."""


@runtime_checkable
class HasLegalMoves(Protocol):
    """A game that lists legal moves, for opponents that choose one."""

    def legal_moves(self, player: int) -> Sequence[str]:
        """Return the moves that a player may make now, as it would write them."""


@runtime_checkable
class SupportsForfeit(Protocol):
    """A game that decides what a player's forfeit is worth."""

    def forfeit(self, player: int) -> Mapping[int, float]:
        """Return the players' rewards when one can make no move, because its tokens or the model's context are used up."""


@dataclass(frozen=True)
class Turn:
    """What an opponent that is a function is given to choose a move."""

    player: int
    role: str
    observation: Prompt
    """What it reads now: text, or chat messages."""
    earlier: tuple[Prompt, ...]
    """Its earlier observations, each followed by its move."""
    legal_moves: tuple[str, ...]
    """() where the game does not list them."""
    seed: int
    """For random numbers: a function of the run's seed, the game and the move, so that a resumed run repeats it."""


Opponent = Callable[[Turn], str | Awaitable[str]]
"""Chooses a move, plain or async; returns it as a player would write it."""


def choose_random_move(turn: Turn) -> str:
    """Move uniformly at random among the legal moves."""
    if not turn.legal_moves:
        raise ConfigError(
            "the opponent 'random' chooses among legal moves, and the game has no method legal_moves(player): add it, or set "
            "eval_opponent='initial', a model's name or a function of a policygrad.Turn"
        )
    return Random(turn.seed).choice(turn.legal_moves)


@dataclass(frozen=True)
class SelfPlay:
    """Games between copies of the policy: `pg.train(run, environment=pg.SelfPlay(Nim))`, or `--environment mine.py:NAME`.

    A game is one row of the batch per player, all in one group. A row holds what that player read and sampled, and only its own
    moves are trained. Rows have `Batch.role`; `spiral` compares each role with its own past, and `within=peers` of `GroupMean`,
    `LeaveOneOut` and `GroupStd` compares the rows of one role.

    A player whose tokens (`max_tokens`, for all its moves) or context end before its move is complete gets `forfeit_reward`, and
    the others share the opposite, unless the game has a method `forfeit`. After an error of the game or of an opponent the game is
    not trained on.

    Raises:
        ConfigError: an option without a meaning.
    """

    game: Callable[..., Game]
    """Creates one game: `f(example)`, or `f(example, seed)` when it is random; a class with those arguments does."""
    opponent: Opponent | str | None = None
    """Who plays the other roles in training; None = the policy. Against an opponent, whose moves are never trained, the policy's
    role changes from prompt to prompt. `random`, `initial`, a model's folder or hub id, or a function of a `Turn`."""
    eval_opponent: Opponent | str | None = RANDOM
    """The same in evaluations. Against itself (None) the mean reward of a zero-sum game is 0 whatever the policy has learned."""
    compared_within_game: tuple[str, ...] = ()
    """Roles whose players are compared only with those of the same game, such as solvers of one proposed problem. Players of other
    roles are compared with those of the prompt's other games."""
    forfeit_reward: float = -1.0

    def __post_init__(self) -> None:
        if not callable(self.game):
            raise ConfigError(
                f"SelfPlay: game is {self.game!r}: pass a function of an example, or a class, that makes a game"
            )
        for name in ("opponent", "eval_opponent"):
            value = getattr(self, name)
            if value is not None and not callable(value) and (not isinstance(value, str) or not value):
                raise ConfigError(
                    f"SelfPlay: {name} is {value!r}: pass a function of a policygrad.Turn, 'random', 'initial', a model's folder "
                    "or hub id, or None for the policy itself"
                )
        if isinstance(self.compared_within_game, str):
            raise ConfigError(
                f"SelfPlay: compared_within_game is the text {self.compared_within_game!r}: write a tuple of roles, "
                f"({self.compared_within_game!r},)"
            )
        if not is_finite_number(self.forfeit_reward):
            raise ConfigError(f"SelfPlay: forfeit_reward must be a finite number, not {self.forfeit_reward!r}")

    @property
    def __name__(self) -> str:
        """Name in messages."""
        return str(getattr(self.game, "__name__", type(self.game).__name__))

    @property
    def capabilities(self) -> Capabilities:
        """What a run must know of games."""
        return Capabilities(
            plays_itself=self.opponent is None,
            stays_because=f"games such as {self.__name__} run in the process of the trainer",
        )

    def runner(self, context: EpisodeContext) -> EpisodeRunner:
        """Return what plays the games."""
        from policygrad.environments.game_episodes import run_games

        return partial(
            run_games, sampler=context.sampler, encoder=context.tokenizer, environment=self, calls=context.make_calls()
        )

    def with_models(self, load: Callable[[str], EpisodeContext]) -> SelfPlay:
        """Return it with the models that play against the policy loaded."""
        from policygrad.environments.game_episodes import ModelOpponent

        @cache
        def load_opponent(name: str) -> ModelOpponent:
            loaded = load(name)
            return ModelOpponent(loaded.sampler, loaded.tokenizer)

        def seat(opponent: Opponent | str | None) -> Opponent | str | None:
            is_model = isinstance(opponent, str) and opponent != RANDOM
            return load_opponent(opponent) if is_model else opponent

        return replace(self, opponent=seat(self.opponent), eval_opponent=seat(self.eval_opponent))

    def __call__(self, example: Example, seed: int = 0) -> Any:
        """Return a game."""
        return make_environment(self.game, example, seed)  # type: ignore[arg-type]  # a game has the same two methods


async def choose_move(opponent: Opponent, turn: Turn) -> str:
    """Return an opponent's move, whether or not the opponent is async."""
    move: object = opponent(turn)
    if inspect.isawaitable(move):
        move = await move
    if not isinstance(move, str):
        raise TypeError(f"the opponent returned {type(move).__name__} {quote(move)}: return text")
    return move
