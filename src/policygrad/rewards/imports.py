"""Code of a user's own: a function by its dotted path, or in a file that no import path leads to."""

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policygrad.errors import ConfigError
from policygrad.rewards.types import RewardFunction

FILE_MODULE = "policygrad_file_"
"""Begins the names of modules that are files which no import path leads to."""


def look_here(module_name: str) -> None:
    """Puts the current folder on the import path if it holds the module, as it would be for a script there."""
    top, here = module_name.partition(".")[0], Path.cwd()
    if top in sys.modules or str(here) in sys.path:
        return
    if (here / f"{top}.py").exists() or (here / top).is_dir():
        sys.path.append(str(here))


def imported(dotted: str) -> RewardFunction:
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
