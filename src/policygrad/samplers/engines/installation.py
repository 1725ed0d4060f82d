"""Python environments that have an engine: find one, ask for its version, or make one. An engine often pins other versions than
policygrad, so it has an environment of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from policygrad.errors import ConfigError, EngineError
from policygrad.utils.child_environment import filter_environment

if TYPE_CHECKING:
    from policygrad.samplers.engines.base import EngineSampler

_SAFE_PATH = {"PYTHONSAFEPATH": "1"}  # modules of the current folder would hide those of the environment
_QUERY_TIMEOUT = 60.0  # seconds in which a Python tells the version of a package
_QUERY = """
import importlib.metadata, importlib.util, sys
name = sys.argv[1]
if importlib.util.find_spec(name) is None:
    sys.exit(3)
try:
    print(importlib.metadata.version(name))
except importlib.metadata.PackageNotFoundError:
    print("of an unknown version")
"""


@dataclass(frozen=True)
class Installation:
    """A Python that can import an engine."""

    python: str  # the interpreter
    version: str  # of the engine

    def resolve(self, argv: Sequence[str]) -> list[str]:
        """Return a command with the program of this environment as its first word: its Python, or a script beside it."""
        program = self.python if argv[0] == "python" else str(Path(self.python).with_name(argv[0]))
        return [program, *argv[1:]]


def find_python(path: str | None) -> str:
    """Return the interpreter of a virtual environment, or one that is named itself; None is this process's own.

    Raises:
        ConfigError: There is none.
    """
    if path is None:
        return sys.executable
    named = Path(path).expanduser()
    python = (
        named.joinpath(*(("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")))
        if named.is_dir()
        else named
    )
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise ConfigError(
            f"{path!r} is no Python: name a virtual environment, or the Python in it, such as DIR/bin/python"
        )
    return str(python.absolute())  # not resolved: a virtual environment's Python is a link


@lru_cache(maxsize=32)
def find_version(python: str, package: str) -> str | None:
    """Return the version of a package that an interpreter can import; None if it cannot.

    Raises:
        ConfigError: The interpreter does not run.
    """
    environment = filter_environment(os.environ, ())
    if Path(python) != Path(sys.executable):
        environment.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            [python, "-c", _QUERY, package],
            env=environment | _SAFE_PATH,
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} does not run: {error}") from error
    return done.stdout.strip() if done.returncode == 0 else None


def is_installed_here(engine: type[EngineSampler]) -> bool:
    """Return whether this environment has an engine."""
    return find_spec(engine.package) is not None


def find_installation(
    engine: type[EngineSampler], name: str, python: str | None, option: str = "--sampler.python"
) -> Installation:
    """Return the environment that has an engine: the one that `python` names, this one, or that of a program on the PATH.

    Args:
        name: The engine's name on the command line.
        python: A virtual environment or its Python; None = not given.
        option: The option that gives `python`, for the message.

    Raises:
        ConfigError: `python` is none, or the engine is not in its environment.
    """
    interpreter = find_python(python)
    version = find_version(interpreter, engine.package)
    program = shutil.which(engine.package)
    if version is None and python is None and program is not None:  # a script beside the Python that runs it
        interpreter = str(Path(program).resolve().with_name("python"))
        version = find_version(interpreter, engine.package) if Path(interpreter).exists() else None
    if version is None:
        where = "this environment" if python is None else python
        raise ConfigError(
            f"{engine.name} is not in {where}. `policygrad engine install {name} --into DIR` makes an environment that has it, and "
            f"{option} DIR names it. Servers that run already are named by --sampler.urls URL …; "
            "`policygrad doctor` lists the engines that are found."
        )
    return Installation(interpreter, version)


def install(
    engine: type[EngineSampler], folder: Path, requirements: Sequence[str], on_progress: Callable[[str], None]
) -> Installation:
    """Make a virtual environment with an engine, or complete one.

    Args:
        requirements: What pip installs; empty = the tested version of the engine.
        on_progress: Called with each step.

    Raises:
        ConfigError: The folder is something else.
        EngineError: pip fails.
    """
    if folder.exists() and not (folder / "pyvenv.cfg").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--into {folder}: it exists and is no virtual environment. Name a new folder.")
    requirements = requirements or engine.requirements(has_gpu=shutil.which("nvidia-smi") is not None)
    on_progress(f"making a virtual environment in {folder}")
    _run([sys.executable, "-P", "-m", "venv", str(folder)], "the environment cannot be made")
    python = find_python(str(folder))
    on_progress(f"installing {' '.join(requirements)}: some gigabytes, some minutes")
    _run([python, "-m", "pip", "install", "--disable-pip-version-check", *requirements], "pip fails")
    find_version.cache_clear()
    version = find_version(python, engine.package)
    if version is None:
        raise EngineError(f"{folder} has {' '.join(requirements)}, and cannot import {engine.package}")
    return Installation(python, version)


def _run(argv: Sequence[str], failure: str) -> None:
    # pip's index, proxy, keyring and compilers are set by variables of any name, so it inherits all
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(argv, env=environment | _SAFE_PATH, stdout=2)  # standard error: its output is progress
    if done.returncode:
        raise EngineError(f"{failure} (exit code {done.returncode}): see its output above")
