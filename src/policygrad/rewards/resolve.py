"""From a name to a reward: built-ins, `package.module.function`, `path/to/file.py:function`, or the function itself."""

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from policygrad.errors import ConfigError
from policygrad.rewards import code, math, reasoning_gym
from policygrad.rewards.builtin import Format, exact_match
from policygrad.rewards.composed import Composed
from policygrad.rewards.foreign import USUAL, foreign, place
from policygrad.rewards.imports import FileFunction, imported
from policygrad.rewards.options import last_value
from policygrad.rewards.penalties import LengthPenalty, RepetitionPenalty
from policygrad.rewards.process_rewards import worked_steps
from policygrad.rewards.spec import parse
from policygrad.rewards.types import Reward, RewardFunction

_BUILTIN: dict[str, RewardFunction] = {
    "code": code.code,
    "exact_match": exact_match,
    "format": Format(),
    "gsm8k": math.gsm8k,
    "math": math.math,
    "reasoning_gym": reasoning_gym.reasoning_gym,
    "reasoning_gym_partial": reasoning_gym.reasoning_gym_partial,
    "repetition_penalty": RepetitionPenalty(),
    "worked_steps": worked_steps,
}
_PRESETS: dict[str, Callable[[str], RewardFunction]] = {
    "code": lambda options: _walled(code.Code.of(options)),
    "format": Format,
    "gsm8k": lambda options: math.Gsm8k(_words(options)),
    "judge": lambda options: _judge(options),
    "length_penalty": LengthPenalty.of,
    "math": lambda options: math.Math(_words(options)),
    "model": lambda path: _reward_model(path),
    "openrlhf": lambda name: foreign("openrlhf", name),
    "repetition_penalty": RepetitionPenalty.of,
    "verl": lambda name: foreign("verl", name),
}
"""What takes words behind a colon."""
OPENAI = "https://api.openai.com/v1"
_HERE = ("localhost", "127.0.0.1", "::1")
_DOTTED = re.compile(r"\w+(\.\w+)+")


def known_rewards() -> list[str]:
    """Names of the built-in rewards, sorted.

    `format:REGEX` takes a pattern of your own, `gsm8k:POLICY,POLICY` and `math:…` say where the answer is looked for,
    `code:OPTION=VALUE,…` what a program may take, `length_penalty:longest=400` what is too long; `model:PATH` is a reward model,
    `judge:RUBRIC,model=NAME,url=…` a language model that is asked; `verl:FILE` and `openrlhf:FILE` take those functions.
    """
    return sorted(_BUILTIN)


def resolve(name: "str | Reward | RewardFunction") -> Reward:
    """The reward called `name`, with an optional weight, bounds and gates: `0.5*math within 0..1 if format` (`spec.py`).

    Raises ConfigError for an unknown name and for what cannot be imported, with the way out. A Reward or a function is accepted in
    a name's place.
    """
    if isinstance(name, Reward):
        return name
    if callable(name):
        return _reward(getattr(name, "__name__", type(name).__name__), name, 1.0)
    if not isinstance(name, str):
        raise ConfigError(f"a reward is a name or a function, got {type(name).__name__}")
    spec = parse(name, known)
    if spec.plain:
        return _reward(spec.name, _function(spec.name), spec.weight)
    inner, *gates = (_reward(part, _function(part), 1.0) for part in spec.names)
    return _reward(spec.title, Composed(inner, tuple(gates), spec.low, spec.high), spec.weight)


def codes_of(name: str) -> tuple[str, ...]:
    """The modules and files that a reward's name would import, and the servers elsewhere that it would show texts to; none where
    all is policygrad's own. Imports nothing."""
    return tuple(code for part in parse(name, known).names if (code := _code_of(part)))


def rubrics_of(name: str) -> tuple[str, ...]:
    """The files that say to judges what is good."""
    judges = (part.removeprefix("judge:") for part in parse(name, known).names if part.startswith("judge:"))
    return tuple(rest.partition(",")[0].strip().removeprefix("rubric=") for rest in judges)


def is_local(address: str) -> bool:
    """Whether an address is one of this machine, in whatever way it is read: one with a user's name or a backslash is not."""
    try:
        return urlsplit(address).hostname in _HERE and not set("@\\") & set(address)
    except ValueError:
        return False


def _code_of(name: str) -> str | None:
    if name.startswith("judge:"):
        address = last_value(name, "url") or OPENAI
        return None if is_local(address) else address
    kind, _, rest = name.partition(":")
    if kind in USUAL:
        return place(kind, rest)[0]
    if name in _BUILTIN or kind in _PRESETS:
        return None
    path, colon, _ = name.rpartition(":")
    if colon and path.endswith(".py"):
        return path
    return name.rpartition(".")[0] if _DOTTED.fullmatch(name) else None


def known(text: str) -> bool:
    """Whether a text may be the name of a reward; nothing is imported for that."""
    prefix, colon, _ = text.partition(":")
    return text in _BUILTIN or bool(colon and prefix in _PRESETS) or _code_of(text) is not None


def _reward(name: str, function: RewardFunction, weight: float) -> Reward:
    return Reward(name, function, weight, **getattr(function, "reward_options", {}))


def _words(options: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in options.split(",") if word.strip())


def _walled(programs: code.Code) -> RewardFunction:
    programs.reward_prepare()
    return programs


def _reward_model(path: str) -> RewardFunction:
    from policygrad.rewards.model import ModelReward  # which imports torch

    return ModelReward.of(path)


def _judge(options: str) -> RewardFunction:
    from policygrad.rewards.judge import Judge  # which few runs have

    return Judge.of(options)


def _function(name: str) -> RewardFunction:
    preset, colon, options = name.partition(":")
    if preset == "math":
        math.check_installed()
    if preset == "code" or (preset in _PRESETS and (colon or name not in _BUILTIN)):
        return _PRESETS[preset](options)
    if name in _BUILTIN:
        return _BUILTIN[name]
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return FileFunction.load(str(Path(path).resolve()), function)
    if _DOTTED.fullmatch(name):
        return imported(name)
    near = difflib.get_close_matches(name, known_rewards(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"the built-in ones are {', '.join(known_rewards())}."
    raise ConfigError(
        f"unknown reward {name!r}: {hint} Your own is package.module.function or path/to/file.py:function"
    )
