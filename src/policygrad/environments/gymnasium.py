"""Environments of Gymnasium that can be played in words; the one file that imports it for episodes, when one is used."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from policygrad.environments.base import Action, Environment, Observation, Step
from policygrad.environments.registry import TERMINATED, TURNS, initial_observation, parse_choice, reply_observation
from policygrad.errors import ConfigError, install_command
from policygrad.tasks.base import Example
from policygrad.utils.user_code import add_cwd_to_path

ACTION_NAMES: Mapping[str, tuple[str, ...]] = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""What the actions of Gymnasium's own games are called, by the pages of Gymnasium 1.4, "Action Space"."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.)\x1b\[0m")


@dataclass(frozen=True)
class GymnasiumText:
    """Episodes in an environment of Gymnasium: `pg.GymnasiumText("FrozenLake-v1")`, on the command line `gymnasium:FrozenLake-v1`.

    The observation is `describe(observation)` where that is given; the text itself in a Text space; the picture in characters
    where the environment draws one (render mode "ansi"); the number of the state in a Discrete space. An action is the text of
    the turn in a Text space, and in a Discrete one the last word or number in it that is an action's, in square brackets if
    there are any. A turn that names none is told so, counted (`environment/malformed`), and has changed nothing.

    Raises:
        ConfigError: no such environment, or spaces that cannot be said in words, with the reason.
    """

    name: str
    """As `gymnasium.make` takes it; MODULE:ID imports the module first."""
    actions: Sequence[str] = ()
    """What the actions of a Discrete space are called, in order; () = as `STOP_MESSAGE` has it, or by their numbers alone."""
    describe: Callable[[Any], str] | None = None
    """An observation in words, for any space."""
    instructions: str | None = None
    """Stands before the first observation; None = what the actions are. The task's own prompt is not shown."""
    max_turns: int = 32
    """Turns of the policy; the tokens of all of them are the run's `max_tokens`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `gymnasium.make`, such as is_slippery."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ConfigError(f"GymnasiumText: max_turns must be at least 1, not {self.max_turns}")
        self._world  # noqa: B018  refuses what cannot be played now, not in the first episode

    @cached_property
    def _world(self) -> _World:
        env = self._make({})
        modes = env.metadata.get("render_modes") or ()
        drawn = self.describe is None and "ansi" in modes and not _is(env.observation_space, "Text")
        world = _World(env.observation_space, env.action_space, drawn, tuple(self.actions) or _words(self.name))
        env.close()
        if self.describe is None and not drawn and not _said(world.observations):
            raise ConfigError(
                f"{self.name} shows {world.observations}, which is no text and no number: give describe=, a function from an "
                "observation to words, from Python"
            )
        if not _said(world.actions):
            raise ConfigError(
                f"{self.name} is played with {world.actions}: words can be an action of a Text or a Discrete space only; wrap it "
                "into one (gymnasium.ActionWrapper)"
            )
        if _is(world.actions, "Discrete") and world.words and len(world.words) != world.actions.n:
            raise ConfigError(f"{self.name} has {world.actions.n} actions, and {len(world.words)} are named")
        return world

    def _make(self, more: Mapping[str, Any]) -> Any:
        gym = _gymnasium()
        if ":" in self.name:
            add_cwd_to_path(self.name.partition(":")[0])
        try:
            return gym.make(self.name, disable_env_checker=True, **{**self.options, **more})
        except (gym.error.Error, ModuleNotFoundError) as error:
            known = sorted(gym.registry)
            near = difflib.get_close_matches(self.name, known, n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(near)}?" if near and self.name not in known else ""
            raise ConfigError(f"gymnasium does not make {self.name!r}: {error}{hint}") from error
        except TypeError as error:
            raise ConfigError(f"gymnasium does not make {self.name!r} with {dict(self.options)}: {error}") from error

    def __call__(self, example: Example, seed: int = 0) -> Environment:
        env = self._make({"render_mode": "ansi"} if self._world.drawn else {})
        return _Episode(self, self._world, env, example, seed)


@dataclass(frozen=True)
class _World:
    """What is played."""

    observations: Any
    actions: Any
    drawn: bool
    """Whether the state is shown as a picture in characters."""
    words: tuple[str, ...]

    @property
    def choices(self) -> str:
        """The actions of a Discrete space, for the policy."""
        first, n = int(self.actions.start), int(self.actions.n)
        if self.words:
            return ", ".join(f"{first + i} {word}" for i, word in enumerate(self.words))
        return f"a number from {first} to {first + n - 1}"

    def read(self, text: str) -> Any:
        """The action that a turn names; None where it names none."""
        if _is(self.actions, "Text"):
            said = text.strip()
            return said if self.actions.contains(said) else None
        number = parse_choice(text, self.words or ("",) * int(self.actions.n), int(self.actions.start))
        return None if number is None else self.actions.dtype.type(number)

    @property
    def wanted(self) -> str:
        """What a turn must be, for one that is not."""
        if _is(self.actions, "Text"):
            of = self.actions
            return f"an answer has {of.min_length} to {of.max_length} of the characters {of.characters}"
        return f"name one action in square brackets: {self.choices}"


class _Episode:
    """One episode."""

    waits: ClassVar[bool] = False

    def __init__(self, asked: GymnasiumText, world: _World, env: Any, example: Example, seed: int) -> None:
        self.asked, self.world, self.env, self.example, self.seed = asked, world, env, example, seed
        self.turns = 0

    async def reset(self) -> Observation:
        seen, _ = self.env.reset(
            seed=self.seed % (1 << 32)
        )  # some environments take no more than numpy's old generators
        said = self.asked.instructions
        if said is None:
            said = (
                ""
                if _is(self.world.actions, "Text")
                else f"Answer with one action in square brackets: {self.world.choices}."
            )
        return initial_observation(self.example, self._shown(seen), said)

    async def step(self, action: Action) -> Step:
        self.turns += 1
        taken = self.world.read(action.text)
        metrics = {"malformed": float(taken is None)}
        reward, said = 0.0, f"error: {self.world.wanted}"
        if taken is not None:
            seen, worth, terminated, truncated, _ = self.env.step(taken)
            reward = float(worth)
            if terminated or truncated:
                return Step(reward=reward, metrics=metrics, stop_reason=TERMINATED if terminated else TURNS)
            said = self._shown(seen)
        if action.truncated or self.turns >= self.asked.max_turns:
            return Step(reward=reward, metrics=metrics, stop_reason=TURNS)
        return Step(reply_observation(self.example, said), reward, metrics)

    async def close(self) -> None:
        self.env.close()

    def _shown(self, seen: Any) -> str:
        if self.asked.describe is not None:
            return self.asked.describe(seen)
        if self.world.drawn:
            return strip_ansi(str(self.env.render()))
        return seen if isinstance(seen, str) else f"state {seen}"


def strip_ansi(drawn: str) -> str:
    """A picture in characters without colours; one character in colour, which is where somebody stands, is in brackets."""
    return _ANSI.sub("", _COLOURED.sub(r"[\1]", drawn)).strip("\n")


def _said(space: Any) -> bool:
    return _is(space, "Text") or _is(space, "Discrete")


def _is(space: Any, kind: str) -> bool:
    return isinstance(space, getattr(_gymnasium().spaces, kind))


def _words(name: str) -> tuple[str, ...]:
    """Of Gymnasium's own games, whatever their version."""
    return ACTION_NAMES.get(re.sub(r"-v\d+$", "", name), ())


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"gymnasium:… needs gymnasium, which is not installed: {install_command('control')}"
        ) from error
    return gymnasium
