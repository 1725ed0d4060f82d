"""From a name to a reward: built-ins, `package.module.function`, `path/to/file.py:function`, or the function itself."""

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError
from policygrad.rewards import code, math, reasoning_gym
from policygrad.rewards.builtin import Format, exact_match
from policygrad.rewards.composed import Composed
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
    "length_penalty": LengthPenalty.of,
    "math": lambda options: math.Math(_words(options)),
    "model": lambda path: _reward_model(path),
    "repetition_penalty": RepetitionPenalty.of,
}
"""What takes words behind a colon."""
FILE_MODULE = "policygrad_file_"
"""Begins the names of modules that are files which no import path leads to."""
_DOTTED = re.compile(r"\w+(\.\w+)+")


def known_rewards() -> list[str]:
    """Names of the built-in rewards, sorted.

    `format:REGEX` takes a pattern of your own, `gsm8k:POLICY,POLICY` and `math:…` say where the answer is looked for,
    `code:OPTION=VALUE,…` what a program may take, `length_penalty:longest=400` what is too long; `model:PATH` is a reward model.
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
    spec = parse(name, _known)
    if spec.plain:
        return _reward(spec.name, _function(spec.name), spec.weight)
    inner, *gates = (_reward(part, _function(part), 1.0) for part in spec.names)
    return _reward(spec.title, Composed(inner, tuple(gates), spec.low, spec.high), spec.weight)


def codes_of(name: str) -> tuple[str, ...]:
    """The modules and files that a reward's name would import; none where all is policygrad's own. Imports nothing."""
    return tuple(code for part in parse(name, _known).names if (code := _code_of(part)))


def _code_of(name: str) -> str | None:
    if name in _BUILTIN or name.partition(":")[0] in _PRESETS:
        return None
    path, colon, _ = name.rpartition(":")
    if colon and path.endswith(".py"):
        return path
    return name.rpartition(".")[0] if _DOTTED.fullmatch(name) else None


def _known(text: str) -> bool:
    """Whether a text may be the name of a reward."""
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
        return _import(name)
    near = difflib.get_close_matches(name, known_rewards(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"the built-in ones are {', '.join(known_rewards())}."
    raise ConfigError(
        f"unknown reward {name!r}: {hint} Your own is package.module.function or path/to/file.py:function"
    )


def look_here(module_name: str) -> None:
    """Puts the current folder on the import path if it holds the module, as it would be for a script there."""
    top, here = module_name.partition(".")[0], Path.cwd()
    if top in sys.modules or str(here) in sys.path:
        return
    if (here / f"{top}.py").exists() or (here / top).is_dir():
        sys.path.append(str(here))


def _import(dotted: str) -> RewardFunction:
    """A function by its dotted path; a module in the current folder counts, as it would for a script there."""
    module_name, _, function = dotted.rpartition(".")
    look_here(module_name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"reward {dotted!r}: there is no module {error.name!r}; install it, run from the folder that holds it, "
                "or write path/to/file.py:function"
            ) from error
        raise ConfigError(f"reward {dotted!r}: {module_name} needs the module {error.name!r}; install it") from error
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise ConfigError(
            f"reward {dotted!r}: importing {module_name} raised {kind}: {error}; fix that first"
        ) from error
    return _member(module, function, module_name)


def _member(module: Any, name: str, where: str) -> RewardFunction:
    function = getattr(module, name, None)
    if callable(function):
        found: RewardFunction = function
        return found
    if function is not None:
        raise ConfigError(f"reward: {name!r} in {where} is {type(function).__name__}, not a function")
    names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names[:8]) or 'no functions'}"
    raise ConfigError(f"reward: there is no function {name!r} in {where}; {hint}")


@dataclass(frozen=True)
class FileFunction:
    """A function of a file that no import path leads to. A worker gets path and name, and loads the file itself."""

    path: str
    name: str
    function: RewardFunction

    @property
    def __wrapped__(self) -> RewardFunction:
        return self.function

    @property
    def reward_options(self) -> dict[str, Any]:
        return getattr(self.function, "reward_options", {})

    @property
    def reward_prepare(self) -> Callable[[], object] | None:
        return getattr(self.function, "reward_prepare", None)

    def __call__(self, *args: Any, **columns: Any) -> Any:
        return self.function(*args, **columns)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return FileFunction.load, (self.path, self.name)

    @classmethod
    def load(cls, path: str, name: str) -> "FileFunction":
        """Execute the file (once per process) and take the function; the file's folder joins the import path."""
        return cls(path, name, _member(load_file(path), name, path))


def load_file(path: str, what: str = "reward") -> Any:
    """The module of a Python file, executed once per process under a name of its own: two files of one name are two modules.

    what: begins the message of a refusal. Raises ConfigError: no such file, or one that raises, with its line.
    """
    module_name = FILE_MODULE + hashlib.sha256(path.encode()).hexdigest()[:12]
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(f"{what}: there is no file {path}; check the path before the colon")
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigError(f"{what}: loading {path} raised {raised(error, path)}; fix that first") from error
    return module


def raised(error: BaseException, path: str | None) -> str:
    """`KeyError: 'x' (line 7)`: what code of a user's raised, and where in the file it did."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines = [error.lineno]
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {said}" + (f" (line {lines[-1]})" if lines else "")
