"""Games of TextArena, for one player or for several. This module alone imports textarena, when a game is played."""

from __future__ import annotations

import contextlib
import copy
import difflib
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from policygrad.environments.games import GameStep, SelfPlay
from policygrad.environments.observations import TERMINATED, TURNS, initial_observation, join_texts, reply_observation
from policygrad.errors import ConfigError, EngineError, import_optional
from policygrad.rollout.environment import FAILED, INITIAL, Action, Observation, Step, is_finite_number
from policygrad.tasks.base import Example, IsolatedRandom

END_OF_THOUGHT = "</think>"
SHARED_FROM = 1000
"""Collections with more elements, such as word lists, are shared by all episodes: games only read them, and copying one takes
longer than a turn."""


@dataclass(frozen=True)
class TextArena:
    """Episodes of a TextArena game: `pg.TextArena("Wordle-v0")`, or `--environment textarena:Wordle-v0`.

    The policy reads what the game has said since its last turn. The reward is the game's, at its end; it is 0 when turns or tokens
    end the game first, or when the game's code fails on an answer (`environment/failed`). Answers that the game finds invalid are
    counted (`environment/invalid`).

    With several `players` it makes games for self-play, `pg.SelfPlay(pg.TextArena("TicTacToe-v0", players=2), eval_opponent=…)`;
    `--environment textarena:TicTacToe-v0` is that, evaluated against the run's model before training. A player on whose answer the
    game's code fails loses.

    Each episode has its own states of Python's and numpy's global generators, which games use.

    Raises:
        ConfigError: No such game, or one that cannot be created here or has another number of players, with the reason.
    """

    name: str
    """The game's id in TextArena. Its observation wrappers are left out, since each turn is shown once."""
    instructions: str = ""
    """Text before the game's own. The task's prompt is not shown."""
    max_turns: int = 32
    """Maximum turns of the policy. The run's `max_tokens` limits the tokens of all turns together."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The game's options, overriding those of its id, such as max_turns of GuessTheNumber."""
    players: int = 1
    """Number of players; more than 1 is for `SelfPlay`."""

    def __post_init__(self) -> None:
        if self.max_turns < 1 or self.players < 1:
            raise ConfigError(
                f"TextArena: max_turns and players must be at least 1, not {self.max_turns} and {self.players}"
            )
        self._game  # noqa: B018  fails here, not in the first episode, if the game cannot be played

    @cached_property
    def _game(self) -> _Game:
        arena, title = _import_textarena(), f"TextArena's {self.name}"
        if self.name not in arena.envs.registration.ENV_REGISTRY:
            names = sorted(arena.envs.registration.ENV_REGISTRY)
            near = difflib.get_close_matches(self.name, names, n=3, cutoff=0.4)
            raise ConfigError(
                f"TextArena has no game {self.name!r}: did you mean {', '.join(near or names[:8])}? "
                "textarena.pprint_registry_detailed() lists them"
            )
        try:
            with IsolatedRandom(0)(), _suppress_output():
                game = _Game.from_env(arena.make(self.name, **self.options))
                trial = game.copy()
                trial.reset(num_players=self.players, seed=0)
        except AssertionError as error:  # raised by a state that refuses the number of players
            raise ConfigError(f"{title} is not for {self._count} ({error}): {self._other_number}") from error
        except Exception as error:  # a game's code may need anything: word lists, a key, a package
            lines = [line.strip() for line in str(error).splitlines() if line.strip(" *")]  # nltk's errors fill pages
            reason = f"{type(error).__name__}: {' '.join(lines[:3])[:400]}"
            raise ConfigError(f"{title} cannot be played here: {reason}") from error
        if (number := getattr(trial.state, "num_players", 1)) != self.players:
            raise ConfigError(f"{title} has {number} players: {self._other_number}")
        return game

    @property
    def _count(self) -> str:
        return "one player" if self.players == 1 else f"{self.players} players"

    @property
    def _other_number(self) -> str:
        return (
            f"choose a single-player game, or let the policy play itself, SelfPlay(TextArena({self.name!r}, players=2))"
            if self.players == 1
            else "set players to their number"
        )

    @property
    def __name__(self) -> str:
        """Name in messages."""
        return self.name

    def __call__(self, example: Example, seed: int = 0) -> Any:
        """Return an episode of one player, or a game of several."""
        return (_Episode if self.players == 1 else _Match)(self, self._game, example, seed)


@dataclass(frozen=True, eq=False)
class _Game:
    """A newly created game, to be copied for each episode, and its wrappers for answers."""

    template: Any
    wrappers: tuple[Callable[[str], str], ...]  # outermost first; one may put brackets around a word that has none
    shared: Mapping[int, Any]  # collections that copies share, by id: the memo for `copy.deepcopy`

    @classmethod
    def from_env(cls, env: Any) -> _Game:
        arena, wrappers = _import_textarena(), list[Callable[[str], str]]()
        while isinstance(env, arena.Wrapper):
            if isinstance(env, arena.ActionWrapper):
                wrappers.append(env.action)
            env = env.env
        return cls(env, tuple(wrappers), {id(x): x for x in iter_large_collections(env)})

    def copy(self) -> Any:
        return copy.deepcopy(self.template, dict(self.shared))

    def wrap(self, text: str) -> str:
        """Return an answer as the game's wrappers pass it on."""
        for wrapper in self.wrappers:
            text = wrapper(text)
        return text


def iter_large_collections(thing: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the large collections among an object's attributes, and those of its attributes down to `depth`."""
    for value in getattr(thing, "__dict__", {}).values():
        if isinstance(value, list | tuple | set | frozenset | dict):
            if len(value) > SHARED_FROM:
                yield value
        elif depth > 1:
            yield from iter_large_collections(value, depth - 1)


class _Episode:
    waits: ClassVar[bool] = False

    def __init__(self, config: TextArena, game: _Game, example: Example, seed: int) -> None:
        self.config, self.game, self.example, self.seed = config, game, example, seed
        self.env = game.copy()
        self.random = IsolatedRandom(seed)
        self.turns = 0

    async def reset(self) -> Observation:
        with self.random(), _suppress_output():
            self.env.reset(num_players=1, seed=self.seed)
        return initial_observation(self.example, self._new_messages()[0], self.config.instructions)

    async def step(self, action: Action) -> Step:
        self.turns += 1
        text = self.game.wrap(action.text)
        metrics = {"invalid": 0.0, "failed": 0.0}
        try:
            with self.random(), _suppress_output():
                done, _ = self.env.step(action=text)
        except Exception:  # the game's code fails on unforeseen words: the policy loses the game, the run continues
            return Step(reward=0.0, metrics=metrics | {"failed": 1.0}, stop_reason=FAILED)
        reply, invalid = self._new_messages()
        if done:
            rewards, info = self.env.close()
            metrics["invalid"] = float(bool((info or {}).get(0, {}).get("invalid_move")))
            reward: Any = (rewards or {}).get(0)
            if not is_finite_number(reward):
                raise EngineError(
                    f"TextArena's {self.config.name} is over without a reward for its player: {rewards!r}"
                )
            return Step(reward=float(reward), metrics=metrics, stop_reason=TERMINATED)
        metrics["invalid"] = float(invalid)
        if action.truncated or self.turns >= self.config.max_turns:
            return Step(reward=0.0, metrics=metrics, stop_reason=TURNS)
        return Step(reply_observation(self.example, reply), 0.0, metrics)

    def _new_messages(self) -> tuple[str, bool]:
        """Return what the game has said since the last turn, and whether it found the last answer invalid."""
        kinds = _import_textarena().ObservationType
        _, messages = self.env.get_observation()
        new = [(text, kind) for _, text, kind in messages if kind != kinds.PLAYER_ACTION]
        return join_texts(text for text, _ in new), any(kind == kinds.GAME_ADMIN for _, kind in new)


class _Match:
    """A game of several players."""

    waits: ClassVar[bool] = False

    def __init__(self, config: TextArena, game: _Game, example: Example, seed: int) -> None:
        self.config, self.game, self.example, self.seed = config, game, example, seed
        self.roles = [f"player{number}" for number in range(config.players)]
        self.env = game.copy()
        self.random = IsolatedRandom(seed)
        self.turns = 0
        self.has_read: set[int] = set()

    async def reset(self) -> Mapping[int, Observation]:
        with self.random(), _suppress_output():
            self.env.reset(num_players=self.config.players, seed=self.seed)
        return self._observe()[0]

    async def step(self, moves: Mapping[int, Action]) -> GameStep:
        [(player, action)] = moves.items()
        self.turns += 1
        text = self.game.wrap(action.text.rpartition(END_OF_THOUGHT)[2].strip())
        metrics = {"invalid": 0.0, "failed": 0.0}
        try:
            with self.random(), _suppress_output():
                done, _ = self.env.step(action=text)
        except Exception:  # the game's code fails on unforeseen words: the player loses, the run continues
            num_opponents = self.config.players - 1
            rewards = {
                number: -1.0 if number == player else 1.0 / num_opponents for number in range(self.config.players)
            }
            return GameStep(rewards=rewards, metrics=metrics | {"failed": 1.0}, stop_reason=FAILED)
        if done:
            rewards, info = self.env.close()
            metrics["invalid"] = float(any(each.get("invalid_move") for each in (info or {}).values()))
            if len(rewards or {}) != self.config.players or not all(map(is_finite_number, rewards.values())):
                raise EngineError(
                    f"TextArena's {self.config.name} is over without a reward for each player: {rewards!r}"
                )
            final = {int(number): float(reward) for number, reward in rewards.items()}
            return GameStep(rewards=final, metrics=metrics, stop_reason=TERMINATED)
        if self.turns >= self.config.max_turns * self.config.players:
            return GameStep(rewards=dict.fromkeys(range(self.config.players), 0.0), metrics=metrics, stop_reason=TURNS)
        observations, invalid = self._observe()
        metrics["invalid"] = float(invalid)
        return GameStep(observations, metrics=metrics)

    def _observe(self) -> tuple[Mapping[int, Observation], bool]:
        """Return what the next player reads, and whether the game found its last answer invalid."""
        kinds = _import_textarena().ObservationType
        player, messages = self.env.get_observation()
        new = [(text, kind) for sender, text, kind in messages if kind != kinds.PLAYER_ACTION or sender != player]
        text = join_texts(text for text, _ in new)
        if player in self.has_read:
            observation = reply_observation(self.example, text)
        else:
            observation = initial_observation(self.example, text, self.config.instructions)
        self.has_read.add(player)
        return {player: observation}, any(kind == kinds.GAME_ADMIN for _, kind in new)


def use_textarena(name: str) -> TextArena | SelfPlay:
    """Return a game of one player, or self-play of a game of two.

    Raises:
        ConfigError: see `TextArena`; the reason for one player where neither number fits.
    """
    try:
        return TextArena(name)
    except ConfigError as reason:
        try:
            game = TextArena(name, players=2)
        except ConfigError:
            raise reason from None
        return SelfPlay(game, eval_opponent=INITIAL)


def _suppress_output() -> contextlib.redirect_stdout[io.StringIO]:
    """Hide what games print, such as their downloads."""
    return contextlib.redirect_stdout(io.StringIO())


def _import_textarena() -> Any:
    return import_optional("textarena", "textarena:…", "textarena")
