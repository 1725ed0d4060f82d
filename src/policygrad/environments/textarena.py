"""Games of TextArena for one player; the one file that imports it, when a game is played."""

from __future__ import annotations

import contextlib
import copy
import difflib
import io
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from policygrad.environments.base import FAILED, Action, Environment, Observation, Step, is_finite_number
from policygrad.environments.registry import TERMINATED, TURNS, initial_observation, reply_observation
from policygrad.errors import ConfigError, EngineError, install_command
from policygrad.tasks.base import Example

SHARED_FROM = 1000
"""Elements from which on a list of words is shared by all episodes: games read those, and copying one takes longer than a turn."""
_SWAPPING = threading.Lock()


@dataclass(frozen=True)
class TextArena:
    """Episodes of a game of TextArena: `pg.TextArena("Wordle-v0")`, on the command line `textarena:Wordle-v0`.

    The policy reads what the game says since its last turn, its own words left out, and answers as the game asks for it,
    mostly in square brackets. The reward is the game's, at its end; 0 where turns or tokens end it before, and where the game's
    own code fails at an answer, which is counted (`environment/failed`). What the game finds invalid is counted too
    (`environment/invalid`): most allow one such answer in a row. Two-player games are refused: against whom one plays is no part
    of them.

    Games draw from Python's and numpy's global generators. Each episode has states of its own for both, which stand in their
    place during its calls alone: nothing else draws otherwise for it, and an episode draws the same whatever runs beside it.

    Raises:
        ConfigError: no such game, one that cannot be made here or is for several, with the reason.
    """

    name: str
    """A game's id in TextArena; its observation wrappers are left out, since each turn is shown once."""
    instructions: str = ""
    """Stands before the game's own. The task's prompt is not shown."""
    max_turns: int = 32
    """Turns of the policy; the tokens of all of them are the run's `max_tokens`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the game, in place of its id's, such as max_turns of GuessTheNumber."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ConfigError(f"TextArena: max_turns must be at least 1, not {self.max_turns}")
        self._game  # noqa: B018  refuses what cannot be played now, not in the first episode

    @cached_property
    def _game(self) -> _Game:
        arena = _textarena()
        if self.name not in arena.envs.registration.ENV_REGISTRY:
            known = sorted(arena.envs.registration.ENV_REGISTRY)
            near = difflib.get_close_matches(self.name, known, n=3, cutoff=0.4)
            raise ConfigError(
                f"TextArena has no game {self.name!r}: did you mean {', '.join(near or known[:8])}? "
                "textarena.pprint_registry_detailed() lists them"
            )
        try:
            with IsolatedRandom(0)(), _silent():
                game = _Game.of(arena.make(self.name, **self.options))
                trial = game.copied()
                trial.reset(num_players=1, seed=0)
        except AssertionError as error:  # how its states refuse a number of players
            raise ConfigError(
                f"TextArena's {self.name} is not for one player ({error}): take a single-player game"
            ) from error
        except Exception as error:  # whatever a game's own code needs: word lists, a key, a package
            raise ConfigError(
                f"TextArena's {self.name} cannot be played here: {type(error).__name__}: {_first_lines(error)}"
            ) from error
        if getattr(trial.state, "num_players", 1) != 1:
            raise ConfigError(
                f"TextArena's {self.name} has {trial.state.num_players} players: take a single-player game"
            )
        return game

    def __call__(self, example: Example, seed: int = 0) -> Environment:
        return _Episode(self, self._game, example, seed)


@dataclass(frozen=True, eq=False)
class _Game:
    """A game as it was made, and what its wrappers make of an answer."""

    pattern: Any
    formats: tuple[Callable[[str], str], ...]
    """Outermost first; such as brackets around a word that has none."""
    shared: Mapping[int, Any]
    """Word lists by their id, as `copy.deepcopy` takes what is not to be copied."""

    @classmethod
    def of(cls, env: Any) -> _Game:
        arena, formats = _textarena(), list[Callable[[str], str]]()
        while isinstance(env, arena.Wrapper):
            if isinstance(env, arena.ActionWrapper):
                formats.append(env.action)
            env = env.env
        return cls(env, tuple(formats), {id(x): x for x in iter_large_collections(env)})

    def copied(self) -> Any:
        """A game of an episode's own."""
        return copy.deepcopy(self.pattern, dict(self.shared))


def iter_large_collections(thing: Any, depth: int = 3) -> Iterator[Any]:
    """The collections of many elements that an object holds, and the objects that it holds, so many steps down."""
    for value in getattr(thing, "__dict__", {}).values():
        if isinstance(value, list | tuple | set | frozenset | dict):
            if len(value) > SHARED_FROM:
                yield value
        elif depth > 1:
            yield from iter_large_collections(value, depth - 1)


class IsolatedRandom:
    """The states of Python's and numpy's global generators that are one episode's own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._states: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """While what is inside goes on they are in place; after it, those are again that were before."""
        import numpy

        with _SWAPPING:
            before = random.getstate(), numpy.random.get_state()
            if self._states is None:
                random.seed(self.seed)
                numpy.random.seed(self.seed % (1 << 32))
            else:
                random.setstate(self._states[0])
                numpy.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), numpy.random.get_state()
                random.setstate(before[0])
                numpy.random.set_state(before[1])


class _Episode:
    """One episode."""

    waits: ClassVar[bool] = False

    def __init__(self, asked: TextArena, game: _Game, example: Example, seed: int) -> None:
        self.asked, self.game, self.example, self.seed = asked, game, example, seed
        self.env = game.copied()
        self.own = IsolatedRandom(seed)
        self.turns = 0

    async def reset(self) -> Observation:
        with self.own(), _silent():
            self.env.reset(num_players=1, seed=self.seed)
        return initial_observation(self.example, self._heard()[0], self.asked.instructions)

    async def step(self, action: Action) -> Step:
        self.turns += 1
        text = action.text
        for formatted in self.game.formats:
            text = formatted(text)
        metrics = {"invalid": 0.0, "failed": 0.0}
        try:
            with self.own(), _silent():
                over, _ = self.env.step(action=text)
        except (
            Exception
        ):  # a game's own code, at words that it has not foreseen: that costs the policy the game, not the run
            return Step(reward=0.0, metrics=metrics | {"failed": 1.0}, stop_reason=FAILED)
        said, invalid = self._heard()
        if over:
            rewards, info = self.env.close()
            lost = bool((info or {}).get(0, {}).get("invalid_move"))
            return Step(reward=self._worth(rewards), metrics=metrics | {"invalid": float(lost)}, stop_reason=TERMINATED)
        metrics["invalid"] = float(invalid)
        if action.truncated or self.turns >= self.asked.max_turns:
            return Step(reward=0.0, metrics=metrics, stop_reason=TURNS)
        return Step(reply_observation(self.example, said), 0.0, metrics)

    def _worth(self, rewards: Any) -> float:
        own: Any = (rewards or {}).get(0)
        if not is_finite_number(own):
            raise EngineError(f"TextArena's {self.asked.name} is over and gives no reward to its player: {rewards!r}")
        return float(own)

    def _heard(self) -> tuple[str, bool]:
        """What the game has said since the last turn, and whether it found the last answer invalid."""
        kinds = _textarena().ObservationType
        _, messages = self.env.get_observation()
        said = [(text, kind) for _, text, kind in messages if kind != kinds.PLAYER_ACTION]
        return join_messages([text for text, _ in said]), any(kind == kinds.GAME_ADMIN for _, kind in said)


def _silent() -> contextlib.redirect_stdout[io.StringIO]:
    """Games print what they download, and some what they count."""
    return contextlib.redirect_stdout(io.StringIO())


def join_messages(messages: Sequence[str]) -> str:
    """Each on lines of its own."""
    return "\n".join(text.strip("\n") for text in messages if text.strip())


def _first_lines(error: Exception) -> str:
    """What it says, without the pages that nltk's has."""
    said = [line.strip() for line in str(error).splitlines() if line.strip(" *")]
    return " ".join(said[:3])[:400]


def _textarena() -> Any:
    try:
        import textarena
    except ImportError as error:
        raise ConfigError(
            f"textarena:… needs textarena, which is not installed: {install_command('textarena')}"
        ) from error
    return textarena
