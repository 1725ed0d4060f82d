"""Gymnasium environments played as text. This module alone imports gymnasium for episodes, when one is used."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, cast

from policygrad.environments.observations import (
    TERMINATED,
    TURNS,
    Shown,
    initial_observation,
    parse_choice,
    reply_observation,
)
from policygrad.errors import ConfigError, EngineError, import_optional
from policygrad.rollout.environment import Action, Environment, Observation, Step
from policygrad.tasks.base import Example
from policygrad.utils.pictures import to_parts
from policygrad.utils.user_code import add_cwd_to_path

# Action names of Gymnasium's own games, from the documentation of Gymnasium 1.4, "Action Space".
ACTION_NAMES: Mapping[str, tuple[str, ...]] = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.)\x1b\[0m")


@dataclass(frozen=True)
class GymnasiumText:
    """Episodes in a Gymnasium environment: `pg.GymnasiumText("FrozenLake-v1")`, or `--environment gymnasium:FrozenLake-v1`.

    The observation is `describe(observation)` if given; else a picture with the render mode "rgb_array", text in a Text space or
    with the render mode "ansi", or the state's number in a Discrete space. In a Discrete space the action is the last word or
    number of the turn that names one, in square brackets if there are any. A turn that names none gets an error message and is
    counted (`environment/malformed`).

    Raises:
        ConfigError: No such environment, or spaces that cannot be expressed as text, with the reason.
    """

    name: str
    """A name for `gymnasium.make`; MODULE:ID imports the module first."""
    actions: Sequence[str] = ()
    """Names of a Discrete space's actions, in order; () = those in `ACTION_NAMES`, or numbers alone."""
    describe: Callable[[Any], Any] | None = None
    """Converts an observation of any space to text, a picture, or a list of texts and pictures."""
    instructions: str | None = None
    """Text before the first observation; None = a list of the actions. The task's own prompt is not shown."""
    max_turns: int = 32
    """Maximum turns of the policy. The run's `max_tokens` limits the tokens of all turns together."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options for `gymnasium.make`, such as is_slippery."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ConfigError(f"GymnasiumText: max_turns must be at least 1, not {self.max_turns}")
        self._adapter  # noqa: B018  fails here, not in the first episode, if the environment cannot be played

    @cached_property
    def _adapter(self) -> _TextAdapter:
        env = self._make({})
        modes = env.metadata.get("render_modes") or ()
        frames = self.describe is None and self.options.get("render_mode") == "rgb_array"
        ansi = self.describe is None and not frames and "ansi" in modes and not _is_space(env.observation_space, "Text")
        names = tuple(self.actions) or ACTION_NAMES.get(re.sub(r"-v\d+$", "", self.name), ())
        observations, actions = env.observation_space, env.action_space
        env.close()
        if self.describe is None and not (ansi or frames) and not _is_space(observations, "Text", "Discrete"):
            raise ConfigError(
                f"{self.name} has observations in {observations}, which is neither text nor a number: from Python, give "
                "describe=, a function from an observation to text or a picture, or options={'render_mode': 'rgb_array'}"
            )
        if not _is_space(actions, "Text", "Discrete"):
            raise ConfigError(
                f"{self.name} has actions in {actions}: text can express actions of a Text or a Discrete space only; wrap it "
                "(gymnasium.ActionWrapper)"
            )
        if _is_space(actions, "Text"):
            length = f"{actions.min_length} to {actions.max_length}"
            hint = f"an answer has {length} of the characters {actions.characters}"
            return _TextAdapter(actions, ansi, frames, (), "", hint)
        first, count = int(actions.start), int(actions.n)
        if names and len(names) != count:
            raise ConfigError(f"{self.name} has {count} actions, and {len(names)} are named")
        choices = ", ".join(f"{i} {name}" for i, name in enumerate(names, first))
        choices = choices or f"a number from {first} to {first + count - 1}"
        hint = f"name one action in square brackets: {choices}"
        return _TextAdapter(actions, ansi, frames, names or ("",) * count, choices, hint)

    def _make(self, more: Mapping[str, Any]) -> Any:
        gym = _import_gymnasium()
        if ":" in self.name:
            add_cwd_to_path(self.name.partition(":")[0])
        try:
            return gym.make(self.name, disable_env_checker=True, **{**self.options, **more})
        except (gym.error.Error, ModuleNotFoundError) as error:
            names = sorted(gym.registry)
            near = difflib.get_close_matches(self.name, names, n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(near)}?" if near and self.name not in names else ""
            raise ConfigError(f"gymnasium does not make {self.name!r}: {error}{hint}") from error
        except TypeError as error:
            raise ConfigError(f"gymnasium does not make {self.name!r} with {dict(self.options)}: {error}") from error

    def __call__(self, example: Example, seed: int = 0) -> Environment:
        env = self._make({"render_mode": "ansi"} if self._adapter.ansi else {})
        return _Episode(self, self._adapter, env, example, seed)


@dataclass(frozen=True)
class _TextAdapter:
    """Converts between turns and actions."""

    actions: Any  # the action space
    ansi: bool  # True when the state is rendered as characters
    frames: bool  # True when it is rendered as a picture
    names: tuple[str, ...]  # of a Discrete space's actions, "" for one without a name; () = the action is text
    choices: str  # the actions of a Discrete space, for the policy
    hint: str  # the error message for a turn that names no action

    def parse(self, text: str) -> Any:
        """Return the action that a turn names, or None."""
        if not self.names:
            action = text.strip()
            return action if self.actions.contains(action) else None
        number = parse_choice(text, self.names, int(self.actions.start))
        return None if number is None else self.actions.dtype.type(number)


class _Episode:
    waits: ClassVar[bool] = False

    def __init__(self, config: GymnasiumText, adapter: _TextAdapter, env: Any, example: Example, seed: int) -> None:
        self.config, self.adapter, self.env, self.example, self.seed = config, adapter, env, example, seed
        self.turns, self.shows_pictures = 0, False

    async def reset(self) -> Observation:
        # numpy's older generators, which some environments use, take seeds below 2^32
        observation, _ = self.env.reset(seed=self.seed % (1 << 32))
        instructions = self.config.instructions
        if instructions is None:
            choices = self.adapter.choices
            instructions = f"Answer with one action in square brackets: {choices}." if choices else ""
        shown = self._render(observation)
        self.shows_pictures = not isinstance(shown, str)
        return initial_observation(self.example, shown, instructions)

    async def step(self, action: Action) -> Step:
        self.turns += 1
        move = self.adapter.parse(action.text)
        metrics = {"malformed": float(move is None)}
        reward, reply = 0.0, cast(Shown, f"error: {self.adapter.hint}")
        if move is not None:
            observation, value, terminated, truncated, _ = self.env.step(move)
            reward = float(value)
            if terminated or truncated:
                return Step(reward=reward, metrics=metrics, stop_reason=TERMINATED if terminated else TURNS)
            reply = self._render(observation)
        if action.truncated or self.turns >= self.config.max_turns:
            return Step(reward=reward, metrics=metrics, stop_reason=TURNS)
        return Step(reply_observation(self.example, reply, as_messages=self.shows_pictures), reward, metrics)

    async def close(self) -> None:
        self.env.close()

    def _render(self, observation: Any) -> Shown:
        if self.config.describe is not None:
            described = self.config.describe(observation)
            return to_parts(described) or cast(str, described)
        if self.adapter.frames:
            frame = self.env.render()
            parts = to_parts(frame)
            if parts is None:
                raise EngineError(
                    f"{self.config.name} renders {type(frame).__name__} under rgb_array: give describe= instead"
                )
            return parts
        if self.adapter.ansi:
            return strip_ansi(str(self.env.render()))
        return observation if isinstance(observation, str) else f"state {observation}"


def strip_ansi(frame: str) -> str:
    """Remove the colours from a rendered frame; a single coloured character, which marks the player, is put in brackets."""
    return _ANSI.sub("", _COLOURED.sub(r"[\1]", frame)).strip("\n")


def _is_space(space: Any, *kinds: str) -> bool:
    return isinstance(space, tuple(getattr(_import_gymnasium().spaces, kind) for kind in kinds))


def _import_gymnasium() -> Any:
    return import_optional("gymnasium", "gymnasium:…", "control")
